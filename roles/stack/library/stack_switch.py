#!/usr/bin/python
"""Make an installed stack the current one, and sweep out those that are too many."""

from __future__ import annotations

DOCUMENTATION = """
module: stack_switch
short_description: Make an installed stack the current one
description:
  - C(current) goes from one stack to the other at once; the one before becomes C(former).
  - Before that, the stack and its OpenMPI are held against their lists of contents. One that is not whole does not
    count as installed any more, so that the next run installs it anew. One that was made without lists is taken as it
    is.
  - Of all others the youngest are kept; a stack that was not finished, and an OpenMPI that no stack uses, go.
options:
  id:
    description: The stack.
    type: str
    required: true
  keep:
    description: How many stacks may stay, the current and the former one among them.
    type: int
    default: 3
  root:
    description: Below which stacks live.
    type: path
    default: /opt/farandole
author: Farandole
"""

EXAMPLES = """
- name: Switch to the stack
  stack_switch:
    id: 0123456789ab
    keep: 3
"""

RETURN = """
proven:
  description: Whether the stack had lists of its contents to be held against.
  type: bool
  returned: when it switched
former:
  description: The stack that was current before.
  type: str
  returned: always
pruned:
  description: What was removed.
  type: list
  returned: always
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.contents import proof, short
from ansible.module_utils.folders import alone, aside, sweep


def target_of(link: Path) -> str:
    """The stack to which a link leads, empty without one."""
    return link.readlink().name if link.is_symlink() else ""


def point(link: Path, stack: str) -> None:
    """Point a link elsewhere atomically."""
    draft = link.with_name(f".{link.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(f"stacks/{stack}")
    draft.replace(link)


def switch(root: Path, stack: str) -> str:
    """Switch `current` and return its former target. `former` is written first, so that a killed run loses nothing."""
    before = target_of(root / "current")
    if before and before != stack:
        point(root / "former", before)
    point(root / "current", stack)
    return before


def surplus(root: Path, keep: int) -> list[Path]:
    """Stacks beyond `keep` and unfinished ones, then every OpenMPI that nothing left over uses."""
    linked = {target_of(root / "current"), target_of(root / "former")}
    stacks = list((root / "stacks").iterdir())
    whole = [path for path in stacks if (path / "manifest.json").exists()]
    others = sorted((path for path in whole if path.name not in linked), key=lambda path: -path.stat().st_mtime)
    room = max(0, keep - sum(path.name in linked for path in whole))
    kept = {path for path in whole if path.name in linked} | set(others[:room])
    used = {(path / "mpi").resolve() for path in kept}
    idle = [path for path in (root / "mpi").iterdir() if path.resolve() not in used]
    return [path for path in stacks if path not in kept] + idle


def refuse_torn(module: AnsibleModule, root: Path, stack: str) -> bool:
    """Whether it could be proven that the stack is whole; one that is not loses its mark."""
    folder = root / "stacks" / stack
    parts = {folder: proof(folder), (folder / "mpi").resolve(): proof((folder / "mpi").resolve())}
    for part, wrong in parts.items():
        if wrong:
            (folder / "manifest.json").unlink()
            module.fail_json(
                msg=f"stack {stack} is not whole, so nothing was switched: in {part}, {short(wrong)}. It does not "
                "count as installed any more: run site.yml (or rollback.yml) again, which installs it anew"
            )
    return None not in parts.values()


def main() -> None:
    """Prove, switch, then prune."""
    module = AnsibleModule(
        argument_spec={
            "id": {"type": "str", "required": True},
            "keep": {"type": "int", "default": 3},
            "root": {"type": "path", "default": "/opt/farandole"},
        },
        supports_check_mode=True,
    )
    root, stack = Path(module.params["root"]), module.params["id"]
    before = target_of(root / "current")
    if module.check_mode:
        module.exit_json(changed=before != stack, former=before, pruned=[])
    if not (root / "stacks" / stack / "manifest.json").exists():
        there = sorted(path.parent.name for path in root.glob("stacks/*/manifest.json"))
        module.fail_json(msg=f"stack {stack} is not installed here; there are: {', '.join(there) or 'none'}")
    with alone(root):
        proven = refuse_torn(module, root, stack)
        switch(root, stack)
        pruned = surplus(root, module.params["keep"])
        for path in pruned:
            aside(root, path)
        sweep(root)
    names = [path.name for path in pruned]
    module.exit_json(changed=before != stack, former=before, pruned=names, proven=proven)


if __name__ == "__main__":
    main()
