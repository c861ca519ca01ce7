#!/usr/bin/python
"""The node's part of action send_files: report which files are missing, and unpack those that arrived."""

import os
import shutil
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import checksum, replacing

BLOCK = 1 << 20


class DamagedError(Exception):
    """Names a file that is not as it was sent."""


def unpack(bundle: Path, directory: Path, wanted: dict[str, str]) -> None:
    """Put the files of a bundle in place; refuse the first that is not as expected."""
    pending = dict(wanted)
    with tarfile.open(bundle) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name in pending and member.isfile() else None
            if source is None:
                raise DamagedError(member.name)
            with replacing(directory / member.name) as file:
                shutil.copyfileobj(source, file, BLOCK)
                file.flush()
                if checksum(Path(file.name)) != pending.pop(member.name):
                    raise DamagedError(member.name)
    # A tar that was cut between two members is valid.
    if pending:
        raise DamagedError(next(iter(pending)))


def sweep(directory: Path, asked: list[str], keep: int) -> None:
    """In the folders of these files, keep the files and the newest others."""
    for folder in {(directory / name).parent for name in asked}:
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[keep:]:
            if str(path.relative_to(directory)) not in asked:
                path.unlink()


def main() -> None:
    """Report the missing files, or unpack those that arrived."""
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "wanted": {"type": "dict", "required": True},
            "bundle": {"type": "path"},
            "keep": {"type": "int", "default": 0},
            "asked": {"type": "list", "elements": "str", "default": []},
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
        unpack(bundle, directory, wanted)
        if module.params["keep"]:
            sweep(directory, module.params["asked"], module.params["keep"])
    except DamagedError as error:
        module.fail_json(msg=f"{error} arrived damaged in {directory}: run again")
    except tarfile.TarError as error:
        module.fail_json(msg=f"the files arrived damaged in {directory}: run again ({error})")
    except OSError as error:
        module.fail_json(msg=f"the files cannot be written to {directory}: {error}")
    finally:
        bundle.unlink(missing_ok=True)
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
