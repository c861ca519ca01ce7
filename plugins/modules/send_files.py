#!/usr/bin/python
"""The node's half of the action send_files: say which files are missing, and unpack those that arrived."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.folders import checksum

BLOCK = 1 << 20


def unpack(bundle: Path, directory: Path, wanted: dict[str, str]) -> str:
    """Put each file of the bundle in its place when it is what was wanted; the first that is not, or nothing."""
    left = dict(wanted)
    with tarfile.open(bundle) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name in left and member.isfile() else None
            if source is None:
                return member.name
            target = directory / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.part")
            try:
                draft.unlink(missing_ok=True)
                with draft.open("xb") as file:
                    while block := source.read(BLOCK):
                        file.write(block)
                if checksum(draft) != left.pop(member.name):
                    return member.name
                draft.chmod(0o644)
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
    # A tar that ends too early can look whole.
    return next(iter(left), "")


def sweep(directory: Path, wanted: dict[str, str], keep: int) -> None:
    """Of the folders that the files are in, leave these files and the youngest others."""
    for folder in {(directory / name).parent for name in wanted}:
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[keep:]:
            if str(path.relative_to(directory)) not in wanted:
                path.unlink()


def main() -> None:
    """Say what is missing, or take what has arrived."""
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "wanted": {"type": "dict", "required": True},
            "bundle": {"type": "path"},
            "keep": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)
    directory, wanted = Path(module.params["directory"]), module.params["wanted"]
    if not module.params["bundle"]:
        missing = [name for name, digest in wanted.items() if checksum(directory / name) != digest]
        module.exit_json(changed=False, missing=missing)
    bundle = Path(module.params["bundle"])
    try:
        if spoilt := unpack(bundle, directory, wanted):
            module.fail_json(msg=f"{spoilt} arrived damaged in {directory}: run again")
        if module.params["keep"]:
            sweep(directory, wanted, module.params["keep"])
    except tarfile.TarError as error:
        module.fail_json(msg=f"the files arrived damaged in {directory}: run again ({error})")
    except OSError as error:
        module.fail_json(msg=f"{directory} cannot take the files: {error}")
    finally:
        bundle.unlink(missing_ok=True)
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
