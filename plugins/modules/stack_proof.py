#!/usr/bin/python
DOCUMENTATION = """
module: stack_proof
short_description: Compare the current stack with what was built
description:
  - Compares every file of the stack, of its OpenMPI and of the stack to which it adds packages with their lists of
    contents, and these lists with the control machine's records. Reports differences without failing.
  - Returns a C(proven) of null if the stack cannot be verified, because it was built without lists.
options:
  known:
    description: Valid sha256 of the list of each tree, by its path below O(root), C(stacks/ID) or C(mpi/KEY).
    type: dict
    default: {}
  root: {description: Folder that contains the stacks., type: path, default: /opt/farandole}
attributes:
  check_mode: {description: Never changes anything., support: full}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.contents import short, trees, verify


def main() -> None:
    """Verify the stack and what it uses."""
    module = AnsibleModule(
        argument_spec={"known": {"type": "dict", "default": {}}, "root": {"type": "path", "default": "/opt/farandole"}},
        supports_check_mode=True,
    )
    root, known = Path(module.params["root"]).resolve(), module.params["known"]
    stack = (root / "current").resolve()
    if stack.parent != root / "stacks" or not (stack / "manifest.json").exists():
        module.exit_json(changed=False, stack="", proven=False, wrong="the node has no current stack")
    places = {f"{tree.parent.name}/{tree.name}": tree for tree in trees(stack)}
    differences = {where: verify(tree, known.get(where, ())) for where, tree in places.items()}
    # The list in a tree that was not built for this cluster proves nothing.
    for where in differences.keys() - known.keys() if known else ():
        if differences[where] == []:
            differences[where] = ["it was not built for this cluster"]
    wrong = "; ".join(f"in {where}, {short(problems)}" for where, problems in differences.items() if problems)
    proven = False if wrong else None if None in differences.values() else True
    module.exit_json(changed=False, stack=stack.name, proven=proven, wrong=wrong)


if __name__ == "__main__":
    main()
