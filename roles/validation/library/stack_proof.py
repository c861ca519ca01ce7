#!/usr/bin/python
"""Hold the current stack of a node against what was built."""

from __future__ import annotations

DOCUMENTATION = """
module: stack_proof
short_description: Hold the current stack against what was built
description:
  - Compares every file of the stack and of its OpenMPI with the list of contents that each brought, and this list with
    what the control machine knows of it. Says what differs, and does not fail for it.
options:
  known:
    description: The sha256 of the lists that belong to a tree, by its path below O(root), C(stacks/ID) and C(mpi/KEY).
    type: dict
    default: {}
  root:
    description: Below which stacks live.
    type: path
    default: /opt/farandole
attributes:
  check_mode:
    description: Changes nothing, in check mode or out of it.
    support: full
author: Farandole
"""

EXAMPLES = """
- name: Hold the stack against what was built
  stack_proof:
    known: {stacks/0123456789ab: [3b1f...]}
"""

RETURN = """
stack:
  description: The id of the current stack, empty without one.
  type: str
  returned: always
proven:
  description: Whether it is what was built; null where nothing tells, as it was made before there were lists.
  type: bool
  returned: always
wrong:
  description: The first things that differ, in a line.
  type: str
  returned: always
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.contents import proof, short


def main() -> None:
    """The stack, then its OpenMPI."""
    module = AnsibleModule(
        argument_spec={
            "known": {"type": "dict", "default": {}},
            "root": {"type": "path", "default": "/opt/farandole"},
        },
        supports_check_mode=True,
    )
    root, known = Path(module.params["root"]).resolve(), module.params["known"]
    stack = (root / "current").resolve()
    if stack.parent != root / "stacks" or not (stack / "manifest.json").exists():
        module.exit_json(changed=False, stack="", proven=False, wrong="no stack is current there")
    trees = {tree.name: (tree, f"{tree.parent.name}/{tree.name}") for tree in (stack, (stack / "mpi").resolve())}
    found = {where: proof(tree, known.get(where, ())) for tree, where in trees.values()}
    wrong = "; ".join(f"in {where}, {short(words)}" for where, words in found.items() if words)
    proven = False if wrong else None if None in found.values() else True
    module.exit_json(changed=False, stack=stack.name, proven=proven, wrong=wrong)


if __name__ == "__main__":
    main()
