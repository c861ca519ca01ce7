#!/usr/bin/python
"""The node's part of action send_files: report which files are missing, and unpack those that arrived."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.folders import checksum

BLOCK = 1 << 20


def unpack(bundle: Path, directory: Path, wanted: dict[str, str]) -> str:
    """Put the files of a bundle in place; return the first that is not as expected, or an empty string."""
    pending = dict(wanted)
    with tarfile.open(bundle) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name in pending and member.isfile() else None
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
                if checksum(draft) != pending.pop(member.name):
                    return member.name
                draft.chmod(0o644)
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
    # A tar that was cut between two members is valid.
    return next(iter(pending), "")


def sweep(directory: Path, wanted: dict[str, str], keep: int) -> None:
    """In the folders of these files, keep the files and the newest others."""
    for folder in {(directory / name).parent for name in wanted}:
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[keep:]:
            if str(path.relative_to(directory)) not in wanted:
                path.unlink()


def main() -> None:
    """Report the missing files, or unpack those that arrived."""
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
        if damaged := unpack(bundle, directory, wanted):
            module.fail_json(msg=f"{damaged} arrived damaged in {directory}: run again")
        if module.params["keep"]:
            sweep(directory, wanted, module.params["keep"])
    except tarfile.TarError as error:
        module.fail_json(msg=f"the files arrived damaged in {directory}: run again ({error})")
    except OSError as error:
        module.fail_json(msg=f"the files cannot be written to {directory}: {error}")
    finally:
        bundle.unlink(missing_ok=True)
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
