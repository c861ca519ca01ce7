#!/usr/bin/python
DOCUMENTATION = """
module: stack_switch
short_description: Make an installed stack the current one
description:
  - Switches C(current) atomically; the previous stack becomes C(former).
  - With O(verify), which comes first on all nodes, so that none switches while another cannot, it compares the stack,
    its OpenMPI and the stack to which it adds packages with their lists of contents. What is damaged no longer counts
    as installed, so that the next run reinstalls it. A stack built without lists is not verified.
  - Of the other stacks, keeps the newest, those that a process uses, and what they add packages to. Removes unfinished
    stacks and every OpenMPI that no stack and no process uses.
options:
  id: {description: Id of the stack., type: str, required: true}
  verify: {description: Verify it instead., type: bool, default: false}
  keep: {description: "Number of stacks to keep, including the current and the former one.", type: int, default: 3}
  root: {description: Folder that contains the stacks., type: path, default: /opt/farandole}
"""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.contents import short, trees, verify
from ansible_collections.farandole.cluster.plugins.module_utils.folders import alone, aside, link, sweep


def target_of(link: Path) -> str:
    """The stack that a link points to; empty if there is no link."""
    return link.readlink().name if link.is_symlink() else ""


def switch(root: Path, stack: str) -> str:
    """Switch `current` and return its former target. `former` is written first, so that a killed run loses nothing."""
    before = target_of(root / "current")
    if before and before != stack:
        link(root / "former", f"stacks/{before}")
    link(root / "current", f"stacks/{stack}")
    return before


def surplus(root: Path, keep: int, busy: Collection[str] = ()) -> list[Path]:
    """Stacks beyond `keep`, unfinished stacks, and every OpenMPI that no remaining stack uses; none that is busy."""
    linked = {target_of(root / "current"), target_of(root / "former")}
    stacks = list((root / "stacks").iterdir())
    complete = [path for path in stacks if (path / "manifest.json").exists()]
    others = sorted((path for path in complete if path.name not in linked), key=lambda path: -path.stat().st_mtime)
    spare = max(0, keep - sum(path.name in linked for path in complete))
    kept = {path for path in complete if path.name in linked} | set(others[:spare])
    kept |= {path for path in stacks if path.name in busy}
    kept |= {(path / "base").resolve() for path in kept if (path / "base").is_symlink()}
    used = {(path / "mpi").resolve() for path in kept}
    unused = [path for path in (root / "mpi").iterdir() if path.resolve() not in used and path.name not in busy]
    return [path for path in stacks if path not in kept] + unused


def in_use(root: str) -> set[str]:
    """The stacks and OpenMPIs of which processes have loaded something, in which they are, or with which they began."""
    roots = b"|".join(re.escape(os.fsencode(place)) for place in (root, os.path.realpath(root)))
    tree = re.compile(rb"(?:%s)/(?:stacks|mpi)/([\w.-]+)" % roots)
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "maps", "exe", "cwd"):
            # It may have ended meanwhile.
            with suppress(OSError):
                about = process / name
                found.update(tree.findall(os.fsencode(about.readlink()) if about.is_symlink() else about.read_bytes()))
    return {os.fsdecode(name) for name in found}


def refuse_damaged(module: AnsibleModule, root: Path, stack: str) -> bool:
    """Refuse a damaged stack and remove its manifest; return whether the stack could be verified."""
    folder = root / "stacks" / stack
    parts = {part: verify(part) for part in trees(folder)}
    for part, wrong in parts.items():
        if wrong:
            for damaged in {folder, part}:
                (damaged / "manifest.json").unlink(missing_ok=True)
            module.fail_json(
                msg=f"stack {stack} is damaged, so nothing was switched: in {part}, {short(wrong)}. It no longer "
                "counts as installed: run site.yml (or rollback.yml) again, which reinstalls it"
            )
    return None not in parts.values()


def main() -> None:
    """Verify the stack, or switch to it, then remove surplus ones that nothing uses."""
    module = AnsibleModule(
        argument_spec={
            "id": {"type": "str", "required": True},
            "verify": {"type": "bool", "default": False},
            "keep": {"type": "int", "default": 3},
            "root": {"type": "path", "default": "/opt/farandole"},
        },
        supports_check_mode=True,
    )
    # /opt may be a link.
    root, stack = Path(module.params["root"]).resolve(), module.params["id"]
    before = target_of(root / "current")
    if module.check_mode:
        module.exit_json(changed=before != stack, former=before, pruned=[])
    if not (root / "stacks" / stack / "manifest.json").exists():
        there = sorted(path.parent.name for path in root.glob("stacks/*/manifest.json"))
        module.fail_json(msg=f"stack {stack} is not installed here; installed: {', '.join(there) or 'none'}")
    with alone(root):
        if module.params["verify"]:
            module.exit_json(changed=False, proven=refuse_damaged(module, root, stack))
        switch(root, stack)
        pruned = surplus(root, module.params["keep"])
        # Only then, as it reads what all processes have loaded.
        unused = surplus(root, module.params["keep"], in_use(module.params["root"])) if pruned else []
        for path in unused:
            aside(root, path)
        sweep(root)
        if pruned != unused:
            # By this the next run knows that something is left.
            (root / "removing").mkdir(mode=0o700)
    names = [path.name for path in unused]
    module.exit_json(changed=bool(before != stack or names), former=before, pruned=names)


if __name__ == "__main__":
    main()
