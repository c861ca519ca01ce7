#!/usr/bin/python
DOCUMENTATION = """
module: held_debs
short_description: Install Debian packages at exactly one version and hold them there
description:
  - Installs, upgrades or downgrades all packages together, even if they are held at another version, and holds them.
  - Repairs packages that a killed run left half installed.
  - If the version is not available, the error lists the versions that are.
  - Replaces M(ansible.builtin.apt) and M(ansible.builtin.dpkg_selections), which need a round trip for the versions and
    one for each hold. M(ansible.builtin.apt) also installs files one by one, which fails for two debs that depend on
    each other's exact version; it repairs nothing, and does not support a deb that contains a repository.
options:
  names: {description: Names of the packages., type: list, elements: str, required: true}
  version: {description: The version of all of them., type: str, required: true}
  files:
    description:
      - Debs on the node, one per package, or a single deb that contains a local repository, as NVIDIA offers.
      - Empty to install from apt's sources.
    type: list
    elements: path
    default: []
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.apt import reasons, update

HELD = "hi "  # wanted: hold, is: installed, no error
INTACT = ("i ", "n ", "c ")  # is: installed, not installed, only its settings
KEYRINGS = ("*.gpg", "*.asc")
APT = [
    "apt-get",
    "--option=DPkg::Lock::Timeout=600",
    "--option=Dpkg::Use-Pty=0",
    "--yes",
    "--no-install-recommends",
    "--allow-downgrades",
    "--allow-change-held-packages",
]


class Deb(NamedTuple):
    """A deb, with its package name and version."""

    path: str
    name: str
    version: str


def states(module: AnsibleModule, names: list[str]) -> dict[str, str]:
    """State and version of each package; empty for one that dpkg does not know."""
    form = "--showformat=${db:Status-Abbrev} ${Version}"
    return {name: module.run_command(["dpkg-query", "--show", form, name])[1].rstrip() for name in names}


def run(module: AnsibleModule, what: str, command: list[str]) -> str:
    """Run a command; fail if it fails."""
    code, out, err = module.run_command(command, environ_update={"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"})
    if code:
        module.fail_json(msg=f"{what} failed: {' '.join(reasons(out, err)) or code}")
    return str(out)


def repair(module: AnsibleModule, names: list[str]) -> list[str]:
    """Complete pending work of dpkg, without which apt refuses to run; return the options apt then needs."""
    # It fails if a package has to be reinstalled to repair it.
    module.run_command(["dpkg", "--configure", "--pending"], environ_update={"DEBIAN_FRONTEND": "noninteractive"})
    broken = any(state and state[1:3] not in INTACT for state in states(module, names).values())
    # apt takes a half-installed package of the requested version for an installed one.
    return ["--reinstall"] if broken else []


def describe(module: AnsibleModule, path: str) -> Deb:
    """Read the name and version of a deb."""
    form = "--showformat=${Package} ${Version}"
    shown = run(module, f"reading the deb {path}", ["dpkg-deb", "--show", form, path])
    name, _, version = shown.partition(" ")
    return Deb(path, name, version)


def versions(module: AnsibleModule, name: str) -> list[str]:
    """The versions that apt could install, newest first."""
    _, out, _ = module.run_command(["apt-cache", "madison", name])
    return list(dict.fromkeys(line.split("|")[1].strip() for line in out.splitlines() if line.count("|") == 2))


def lacking(offers: dict[str, list[str]], version: str) -> str:
    """Describe the packages that are not available at this version; empty if all are."""
    return "; ".join(
        f"{name} {version} is not available (available: {', '.join(present) or 'none'})"
        for name, present in offers.items()
        if version not in present
    )


def choose(module: AnsibleModule, debs: list[Deb], names: list[str], version: str) -> list[str]:
    """The plain debs to install, one per package."""
    offers = {name: [deb.version for deb in debs if deb.name == name] for name in names}
    if problem := lacking(offers, version):
        module.fail_json(msg=f"the files do not match the request: {problem}")
    return [deb.path for deb in debs if deb.name in names and deb.version == version]


def local_repository(module: AnsibleModule, deb: Deb) -> str:
    """Install the deb that contains a repository and the key for it; return the path of its apt entry."""
    # Even if it is installed already: a killed run may have left it incomplete.
    run(module, f"installing {deb.path}", ["dpkg", "--install", deb.path])
    files = [
        Path(line)
        for line in run(module, "listing the files of the deb", ["dpkg", "--listfiles", deb.name]).splitlines()
    ]
    entries = [file for file in files if file.match("/etc/apt/sources.list.d/*.*")]
    if len(entries) != 1:
        module.fail_json(msg=f"{deb.path} is neither one of the requested packages nor a local repository with them")
    for target in signed_by(entries[0].read_text()):
        for key in files:
            if key.name == target.name and key != target and any(key.match(form) for form in KEYRINGS):
                shutil.copy(key, target)
    return str(entries[0])


def signed_by(entry: str) -> list[Path]:
    """The keyrings that a sources file names, in either of its formats."""
    return [Path(path) for path in re.findall(r"(?im)\bsigned-by(?:=|:\s*)(/[^\]\s,]+)", entry)]


def refresh(module: AnsibleModule, source: str) -> None:
    """Update the package lists of one source only."""
    run(module, f"reading the packages of {source}", update(source))


def requested(module: AnsibleModule) -> list[str]:
    """The packages to install, as arguments of apt-get install."""
    names, version = module.params["names"], module.params["version"]
    debs = [describe(module, path) for path in module.params["files"]]
    if len(debs) == 1 and debs[0].name not in names:
        refresh(module, local_repository(module, debs[0]))
    elif debs:
        return choose(module, debs, names, version)
    if problem := lacking({name: versions(module, name) for name in names}, version):
        module.fail_json(msg=f"{problem} in apt's sources")
    return [f"{name}={version}" for name in names]


def main() -> None:
    """Compare the packages with the request, then repair, install and hold them."""
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "required": True},
            "version": {"type": "str", "required": True},
            "files": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    names = module.params["names"]
    goal = dict.fromkeys(names, f"{HELD} {module.params['version']}")
    former = states(module, names)
    if former == goal or module.check_mode:
        module.exit_json(changed=former != goal, due=former != goal, former=former)
    run(module, "apt-get", [*APT, *repair(module, names), "install", *requested(module)])
    run(module, "apt-mark", ["apt-mark", "hold", *names])
    if (now := states(module, names)) != goal:
        module.fail_json(msg=f"apt-get succeeded, but dpkg reports {now}, expected {goal}")
    module.exit_json(changed=True, due=True, former=former)


if __name__ == "__main__":
    main()
