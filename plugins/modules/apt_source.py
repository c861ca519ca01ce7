#!/usr/bin/python
DOCUMENTATION = """
module: apt_source
short_description: Add an apt source whose signing key is identified by its fingerprint
description:
  - Writes an entry to /etc/apt/sources.list.d for which apt accepts signatures of this key only, even if the key's file
    contains others.
  - Fetches the key unless an installed one works. apt reads the repository with it before anything is installed, so a
    repository that apt refuses leaves no changes.
  - Replaces M(ansible.builtin.deb822_repository), which needs python3-debian on the node, fetches a key of any size,
    and writes the entry before apt has checked it.
  - Without O(uri), adds components of the release itself, from the repository and with the key of its C(main).
options:
  name: {description: Name of the entry and of the key's file., type: str, required: true}
  uri: {description: URI of the repository., type: str, default: ""}
  suites:
    description: Suites of the repository; C(/) for a flat repository.
    type: list
    elements: str
    default: ["/"]
  components:
    description: Components of the repository; none for a flat repository.
    type: list
    elements: str
    default: []
  key_url: {description: URL of its public key., type: str, default: ""}
  key_fingerprint:
    description: Full fingerprint of the key, 40 hexadecimal digits; blanks are allowed.
    type: str
    default: ""
"""

import os
import re
import tempfile
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import fetch_url
from ansible_collections.farandole.cluster.plugins.module_utils.apt import update
from ansible_collections.farandole.cluster.plugins.module_utils.fetching import read, within
from ansible_collections.farandole.cluster.plugins.module_utils.folders import put, replacing

SOURCES = Path("/etc/apt/sources.list.d")
KEYRINGS = Path("/etc/apt/keyrings")
# By the suffix, apt decides whether a keyring is ASCII-armoured or binary.
ARMOURED, BINARY = ".asc", ".gpg"
# The limits on the size of a key, which is a few KiB, and on the time to fetch it.
KEY_SIZE, KEY_S = 64 << 10, 60
ORIGINS = ("Debian", "Ubuntu")
FINGERPRINT = re.compile(r"[0-9A-F]{40}")


class Source(NamedTuple):
    """An entry of apt's sources."""

    uri: str
    suites: list[str]
    components: list[str]
    signed_by: str

    def text(self) -> str:
        """Format the entry as deb822."""
        fields = {
            "Types": "deb",
            "URIs": self.uri,
            "Suites": " ".join(self.suites),
            "Components": " ".join(self.components),
            "Signed-By": self.signed_by,
        }
        return "# Managed by Farandole.\n" + "".join(f"{name}: {value}\n" for name, value in fields.items() if value)


class Row(NamedTuple):
    """A package list that apt knows, from `apt-get indextargets`."""

    origin: str
    codename: str
    release: str
    component: str
    uri: str
    entry: str


def fingerprint(module: AnsibleModule) -> str:
    """The requested fingerprint, which must be complete, because a short one can be forged."""
    given = module.params["key_fingerprint"]
    wanted = re.sub(r"[\s:]", "", given).upper()
    if not FINGERPRINT.fullmatch(wanted):
        module.fail_json(msg=f"key_fingerprint must be a full fingerprint of 40 hexadecimal digits, not {given!r}")
    return wanted


def load(module: AnsibleModule, url: str) -> bytes:
    """Download a key, up to the maximum size."""
    answer, info = fetch_url(module, url, timeout=30)
    if info["status"] != 200:
        raise OSError(info["msg"])
    content: bytes = read(answer, KEY_SIZE)
    return content


def fetch(module: AnsibleModule) -> bytes:
    """Fetch the key; apt checks it later."""
    url = module.params["key_url"]
    try:
        key: bytes = within(KEY_S, lambda: load(module, url))
    except (OSError, HTTPException) as error:
        module.fail_json(msg=f"the key {url} cannot be fetched: {error}; nothing was installed")
    return key


def suffix(key: bytes) -> str:
    """The suffix for a keyring's file."""
    return ARMOURED if b"-----BEGIN PGP" in key else BINARY


def repository(module: AnsibleModule) -> tuple[Source, bool]:
    """Return an entry that apt accepts, and whether its key was (or would be) installed."""
    wanted, name = fingerprint(module), module.params["name"]
    source = Source(module.params["uri"], module.params["suites"], module.params["components"], "")
    paths = [KEYRINGS / f"{name}{kind}" for kind in (ARMOURED, BINARY)]
    for path in filter(Path.exists, paths):
        entry = source._replace(signed_by=f"{path} {wanted}")
        if module.check_mode or not refusal(module, entry):
            return entry, False
    path = paths[0]
    if not module.check_mode:
        key = fetch(module)
        if reason := refusal(module, source, key, wanted):
            module.fail_json(
                msg=f"{source.uri} with the key {module.params['key_url']} is refused, nothing was installed: "
                f"{reason}; expected {wanted}"
            )
        path = path.with_suffix(suffix(key))
        with replacing(path) as file:
            file.write(key)
    return source._replace(signed_by=f"{path} {wanted}"), True


def refusal(module: AnsibleModule, source: Source, key: bytes = b"", wanted: str = "") -> str:
    """Why apt refuses an entry that is not installed yet; empty if apt can read its packages."""
    # apt checks signatures with another account, which needs access to this folder.
    with tempfile.TemporaryDirectory(dir="/var/lib/apt") as name:
        folder = Path(name)
        folder.chmod(0o755)
        if key:
            keyring = folder / f"key{suffix(key)}"
            keyring.write_bytes(key)
            source = source._replace(signed_by=f"{keyring} {wanted}")
        (folder / "entry.sources").write_text(source.text())
        code, out, err = module.run_command(update(folder / "entry.sources"), environ_update={"LC_ALL": "C"})
    return " ".join((err or out).split()) or f"apt-get update failed with status {code}" if code else ""


def release(module: AnsibleModule, own: Path) -> Source | None:
    """An entry for the requested components, from the repository of the release's main; None if others provide them."""
    form = "$(ORIGIN)|$(CODENAME)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)|$(SOURCESENTRY)"
    _, out, _ = module.run_command(["apt-get", "indextargets", "--format", form, "Identifier: Packages"], check_rc=True)
    codename = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    rows = [Row(*line.split("|")) for line in out.splitlines() if line.count("|") == 5]
    own_release = [row for row in rows if row.origin in ORIGINS and codename and row.codename == codename[1]]
    mains = [row for row in own_release if row.component == "main"]
    if not mains:
        module.fail_json(msg="apt has no source for main of this release: run apt-get update, or set uri")
    present = {row.component for row in own_release if not row.entry.startswith(f"{own}:")}
    components = [component for component in module.params["components"] if component not in present]
    if not components:
        return None
    file, _, number = mains[0].entry.rpartition(":")
    return Source(mains[0].uri, [mains[0].release], components, signed_by(Path(file), int(number)))


def signed_by(file: Path, number: int) -> str:
    """The signing key of an existing entry; apt refuses two entries for one repository with different keys."""
    if file.suffix == ".sources":
        stanzas = [part for part in re.split(r"\n\s*\n", file.read_text()) if re.search(r"(?im)^types:", part)]
        match = re.search(r"(?im)^signed-by:\s*(\S+)", stanzas[number - 1])
    else:
        match = re.search(r"\bsigned-by=([^\]\s]+)", file.read_text().splitlines()[number - 1])
    return match[1] if match else ""


def main() -> None:
    """Install the key, then the entry that refers to it."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "uri": {"type": "str", "default": ""},
            "suites": {"type": "list", "elements": "str", "default": ["/"]},
            "components": {"type": "list", "elements": "str", "default": []},
            "key_url": {"type": "str", "default": ""},
            "key_fingerprint": {"type": "str", "default": "", "no_log": False},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)
    path = SOURCES / f"{module.params['name']}.sources"
    changed, source = False, None
    if module.params["uri"]:
        source, changed = repository(module)
    elif (source := release(module, path)) and not module.check_mode and (reason := refusal(module, source)):
        module.fail_json(msg=f"{' '.join(source.components)} of {source.uri} cannot be read: {reason}")
    if source and (not path.exists() or path.read_text() != source.text()):
        changed = True
        if not module.check_mode:
            put(path, source.text())
    module.exit_json(changed=changed, path=str(path) if source else "")


if __name__ == "__main__":
    main()
