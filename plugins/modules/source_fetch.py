#!/usr/bin/python
"""The node's part of action source_fetch: download the source of a Debian package."""

import os
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def mirror(module: AnsibleModule) -> str:
    """The Debian mirror that this node uses."""
    _, out, _ = module.run_command(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(SITE)|$(REPO_URI)"], check_rc=True
    )
    for line in out.splitlines():
        origin, _, uri = line.split("|", 2)
        if origin == "Debian":
            return str(uri)
    module.fail_json(msg="this node does not use a Debian mirror")
    return ""


def main() -> None:
    """Download the archive, with a private package source that the node's own apt does not use."""
    module = AnsibleModule(
        argument_spec={
            "package": {"type": "str", "required": True},
            "release": {"type": "str", "required": True},
            "file": {"type": "str", "required": True},
            "scratch": {"type": "path", "required": True},
        }
    )
    package, release, file = (module.params[key] for key in ("package", "release", "file"))
    folder = Path(module.params["scratch"])
    uri = mirror(module)
    os.umask(0o022)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as state:
        private = Path(state)
        (private / "lists/partial").mkdir(parents=True)
        (private / "sources.list").write_text(f"deb-src {uri} {release} main\n")
        options = {
            "Dir::Etc::sourcelist": f"{private}/sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": f"{private}/lists",
            "APT::Sandbox::User": "root",
            "pkgCacheFile": "",
        }
        settings = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
        for command in (["update"], ["source", "--download-only", "--tar-only", package]):
            code, out, err = module.run_command(["apt-get", *settings, *command], cwd=str(folder))
            if code:
                module.fail_json(
                    msg=f"apt-get {command[0]} failed for {release}'s sources at {uri}: {(err or out).strip()[-300:]}"
                )
    if not (folder / file).exists():
        there = sorted(path.name for path in folder.iterdir())
        module.fail_json(msg=f"{release} at {uri} has {', '.join(there)}, not {file}")
    module.exit_json(changed=True, path=str(folder / file), origin=f"{release}'s source package at {uri}")


if __name__ == "__main__":
    main()
