#!/usr/bin/python
"""Add a source of Debian packages whose key is known by its fingerprint."""

from __future__ import annotations

DOCUMENTATION = """
module: apt_source
short_description: Add a source of Debian packages whose key is known by its fingerprint
description:
  - Writes an entry below /etc/apt/sources.list.d; its packages are believed for the signature of one key alone.
  - The key is fetched once, and installed only when the file holds nothing but the key with that fingerprint.
  - Without O(uri), adds components of the release itself from where it has its C(main), with the key that it has there.
options:
  name:
    description: Name of the entry, and of the key's file.
    type: str
    required: true
  uri:
    description: Where the repository is.
    type: str
    default: ""
  suites:
    description: Its suites; C(/) for a flat repository.
    type: list
    elements: str
    default: ["/"]
  components:
    description: Its components; none for a flat repository.
    type: list
    elements: str
    default: []
  key_url:
    description: Where its public key is.
    type: str
    default: ""
  key_fingerprint:
    description: The key's whole fingerprint, 40 hexadecimal digits, blanks allowed.
    type: str
    default: ""
author: Farandole
"""

EXAMPLES = """
- name: Add NVIDIA's repository
  apt_source:
    name: cuda
    uri: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/
    key_url: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/3bf863cc.pub
    key_fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
- name: Add contrib
  apt_source:
    name: contrib
    components: [contrib]
"""

RETURN = """
path:
  description: The file of the entry.
  type: str
  returned: always
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fetching import read, within
from ansible.module_utils.urls import fetch_url

SOURCES = Path("/etc/apt/sources.list.d")
KEYRINGS = Path("/etc/apt/keyrings")
ARMOR = b"-----BEGIN PGP PUBLIC KEY BLOCK-----"
PUBLIC_KEY = 6
# A key is a few KiB; so long it may take.
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
        """As deb822."""
        fields = {
            "Types": "deb",
            "URIs": self.uri,
            "Suites": " ".join(self.suites),
            "Components": " ".join(self.components),
            "Signed-By": self.signed_by,
        }
        return "# Managed by Farandole.\n" + "".join(f"{name}: {value}\n" for name, value in fields.items() if value)


class Row(NamedTuple):
    """One of apt's own lists."""

    origin: str
    codename: str
    release: str
    component: str
    uri: str
    entry: str


def dearmor(key: bytes) -> bytes:
    """The packets of a key, armoured or not (RFC 4880, 6.2); nothing where the armour is broken."""
    if ARMOR not in key:
        return key
    form = ARMOR + rb"[ \t\r]*\n(?:[^\n]*:[^\n]*\n)*[ \t\r]*\n(.*?)(?:\n=[^\n]*)?\n-----END"
    try:
        return b"".join(base64.b64decode(block) for block in re.findall(form, key, re.DOTALL))
    except binascii.Error:
        return b""


def packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and body of each packet (RFC 4880, 4.2); IndexError or ValueError where it is no OpenPGP."""
    at = 0
    while at < len(data):
        head, at = data[at], at + 1
        if head & 0xC0 == 0xC0:
            tag, first, at = head & 0x3F, data[at], at + 1
            if first < 192:
                length = first
            elif first < 224:
                length, at = (first - 192 << 8) + data[at] + 192, at + 1
            elif first == 255:
                length, at = int.from_bytes(data[at : at + 4], "big"), at + 4
            else:
                raise ValueError("a packet of unknown length")
        elif head & 0x80:
            tag, size = head >> 2 & 0x0F, 1 << (head & 3)
            if size == 8:
                raise ValueError("a packet of unknown length")
            length, at = int.from_bytes(data[at : at + size], "big"), at + size
        else:
            raise ValueError("no packet")
        if at + length > len(data):
            raise ValueError("a packet that is cut short")
        yield tag, data[at : at + length]
        at += length


def fingerprints(keyring: bytes) -> set[str]:
    """Of all primary keys in it (RFC 4880, 12.2); empty where there is anything that is no key of version 4."""
    try:
        keys = [body for tag, body in packets(keyring) if tag == PUBLIC_KEY]
    except (IndexError, ValueError):
        return set()
    if any(body[:1] != b"\x04" for body in keys):
        return set()
    # SHA-1 is what a fingerprint is made of; nothing is signed by it here.
    return {hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper() for body in keys}  # noqa: S324


def wanted_key(module: AnsibleModule) -> str:
    """The fingerprint asked for, whole or not at all: a short one can be forged."""
    given = module.params["key_fingerprint"]
    wanted = re.sub(r"[\s:]", "", given).upper()
    if not FINGERPRINT.fullmatch(wanted):
        module.fail_json(msg=f"the whole fingerprint of a key has 40 hexadecimal digits, not {given!r}")
    return wanted


def load(module: AnsibleModule, url: str) -> bytes:
    """What is there, which is small if it is a key."""
    answer, info = fetch_url(module, url, timeout=30)
    if info["status"] != 200:
        raise OSError(info["msg"])
    content: bytes = read(answer, KEY_SIZE)
    return content


def fetch(module: AnsibleModule, wanted: str) -> bytes:
    """The key without its armour, when it is the wanted one and nothing beside it."""
    url = module.params["key_url"]
    try:
        key = dearmor(within(KEY_S, lambda: load(module, url)))
    except (OSError, HTTPException) as error:
        module.fail_json(msg=f"the key {url} cannot be fetched: {error}; nothing was installed")
    if (found := fingerprints(key)) != {wanted}:
        there = ", ".join(sorted(found)) or "no OpenPGP key"
        module.fail_json(msg=f"the key {url} is refused, nothing was installed: there is {there}, wanted is {wanted}")
    return key


def install_key(module: AnsibleModule) -> tuple[str, bool]:
    """Path of the keyring, and whether it was (or would be) written."""
    wanted, path = wanted_key(module), KEYRINGS / f"{module.params['name']}.gpg"
    if path.exists() and fingerprints(path.read_bytes()) == {wanted}:
        return str(path), False
    if not module.check_mode:
        # Just the packets that were judged, so that nobody reads anything else in it.
        put(path, fetch(module, wanted))
    return str(path), True


def put(path: Path, content: bytes) -> None:
    """In place at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(content)
    draft.chmod(0o644)
    draft.replace(path)


def release(module: AnsibleModule, own: Path) -> Source | None:
    """The components asked for, from where the release has its main; nothing when they are there by another entry."""
    form = "$(ORIGIN)|$(CODENAME)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)|$(SOURCESENTRY)"
    _, out, _ = module.run_command(["apt-get", "indextargets", "--format", form, "Identifier: Packages"], check_rc=True)
    codename = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    rows = [Row(*line.split("|")) for line in out.splitlines() if line.count("|") == 5]
    mine = [row for row in rows if row.origin in ORIGINS and codename and row.codename == codename[1]]
    mains = [row for row in mine if row.component == "main"]
    if not mains:
        module.fail_json(msg="apt knows no source of the release's own main: run apt-get update, or set uri")
    there = {row.component for row in mine if not row.entry.startswith(f"{own}:")}
    components = [component for component in module.params["components"] if component not in there]
    if not components:
        return None
    file, _, number = mains[0].entry.rpartition(":")
    return Source(mains[0].uri, [mains[0].release], components, signed_by(Path(file), int(number)))


def signed_by(file: Path, number: int) -> str:
    """By which key an entry is believed; apt refuses two entries of one repository that differ in it."""
    if file.suffix == ".sources":
        stanzas = [part for part in re.split(r"\n\s*\n", file.read_text()) if re.search(r"(?im)^types:", part)]
        found = re.search(r"(?im)^signed-by:\s*(\S+)", stanzas[number - 1])
    else:
        found = re.search(r"\bsigned-by=([^\]\s]+)", file.read_text().splitlines()[number - 1])
    return found[1] if found else ""


def main() -> None:
    """Key first, then the entry that needs it."""
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
    path = SOURCES / f"{module.params['name']}.sources"
    changed, source = False, None
    if module.params["uri"]:
        keyring, changed = install_key(module)
        source = Source(module.params["uri"], module.params["suites"], module.params["components"], keyring)
    else:
        source = release(module, path)
    if source and (not path.exists() or path.read_text() != source.text()):
        changed = True
        if not module.check_mode:
            put(path, source.text().encode())
    module.exit_json(changed=changed, path=str(path) if source else "")


if __name__ == "__main__":
    main()
