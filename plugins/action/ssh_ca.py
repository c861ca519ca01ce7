"""The cluster's certificate authority, which lives on the control machine alone."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import ssh

from farandole.errors import FarandoleError
from farandole.state import claim

DAY = 86400
KINDS = ("host", "user")
REVOKED = "revoked_keys"
# A clock that is a little behind must not refuse a fresh certificate.
CLOCK_SLACK = 300


@dataclass(frozen=True)
class Wish:
    """What a certificate has to say."""

    kind: str
    name: str
    key: str
    principals: tuple[str, ...]
    sources: tuple[str, ...]
    days: int


def public_text(key: Ed25519PublicKey) -> str:
    """As it stands in known_hosts and authorized_keys."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def load_ca(path: Path, passphrase: str) -> Ed25519PrivateKey:
    """The private key of a CA, or a message that says why it stays shut."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), passphrase.encode() or None)
    except ValueError as error:
        protected = "passphrase" in str(error).lower() or "password" in str(error).lower()
        known = "ssh_trust_ca_passphrase is not its passphrase" if passphrase or protected else str(error)
        raise AnsibleActionFail(
            f"the CA key {path} cannot be opened: {known}; set ssh_trust_ca_passphrase, "
            "or make a new CA with -e ssh_trust_rotate=true"
        ) from error
    except TypeError as error:  # cryptography's word for a passphrase that is missing or not needed
        if passphrase:
            return load_ca(path, "")
        raise AnsibleActionFail(
            f"the CA key {path} has a passphrase: set ssh_trust_ca_passphrase from Ansible Vault"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise AnsibleActionFail(f"the CA key {path} is not an ed25519 key: move it away and run again")
    return key


def stands_open(path: Path) -> bool:
    """Whether the private key of a CA has no passphrase."""
    try:
        serialization.load_ssh_private_key(path.read_bytes(), None)
    except TypeError:
        return False
    return True


def save_ca(path: Path, key: Ed25519PrivateKey, passphrase: str) -> None:
    """Write it for its owner alone, and never half."""
    shut = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, shut)
    write_private(path, text)


def write_private(path: Path, content: bytes) -> None:
    """A file of mode 0600 in a directory of mode 0700, in place at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    draft = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)


def parse(text: str) -> ssh.SSHCertificate | None:
    """A certificate, or nothing when it is none."""
    try:
        found = serialization.load_ssh_public_identity(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    return found if isinstance(found, ssh.SSHCertificate) else None


def is_good(text: str, wish: Wish, ca: Ed25519PublicKey, now: float) -> bool:
    """Whether a certificate says what is wished and has more than a third of its life before it."""
    found = parse(text)
    if found is None:
        return False
    signed_by, key = found.signature_key(), found.public_key()
    if not isinstance(signed_by, Ed25519PublicKey) or not isinstance(key, Ed25519PublicKey):
        return False
    return (
        public_text(signed_by) == public_text(ca)
        and public_text(key) == wish.key
        and tuple(name.decode() for name in found.valid_principals) == wish.principals
        and found.critical_options == options(wish)
        and found.extensions == extensions(wish)
        and now + wish.days * DAY / 3 < found.valid_before <= now + wish.days * DAY + 1
    )


def options(wish: Wish) -> dict[bytes, bytes]:
    """Host certificates have none; a user certificate is good from its own node alone."""
    return {b"source-address": ",".join(wish.sources).encode()} if wish.sources else {}


def extensions(wish: Wish) -> dict[bytes, bytes]:
    """A terminal, and neither forwarding nor a file of start-up commands."""
    return {b"permit-pty": b""} if wish.kind == "user" else {}


def sign(wish: Wish, ca: Ed25519PrivateKey, now: float) -> str:
    """The certificate as one line of text."""
    key = serialization.load_ssh_public_key(wish.key.encode())
    if not isinstance(key, Ed25519PublicKey):
        raise AnsibleActionFail(f"{wish.name}: its {wish.kind} key is not an ed25519 key")
    kind = ssh.SSHCertificateType.HOST if wish.kind == "host" else ssh.SSHCertificateType.USER
    builder = (
        ssh.SSHCertificateBuilder()
        .public_key(key)
        .serial(time.time_ns())
        .type(kind)
        .key_id(f"{wish.name} {wish.kind}".encode())
        .valid_principals([name.encode() for name in wish.principals])
        .valid_after(int(now) - CLOCK_SLACK)
        .valid_before(int(now) + wish.days * DAY)
    )
    for name, value in options(wish).items():
        builder = builder.add_critical_option(name, value)
    for name, value in extensions(wish).items():
        builder = builder.add_extension(name, value)
    return builder.sign(ca).public_bytes().decode()


def wishes(nodes: list[dict[str, Any]], user: str, days: dict[str, int]) -> list[Wish]:
    """A host certificate for every node, a user certificate for every launcher."""
    found = []
    for node in nodes:
        name, sources = node["name"], tuple(node["sources"])
        found.append(Wish("host", name, node["host_key"], tuple(node["names"]), (), days["host"]))
        if node["job_key"]:
            found.append(Wish("user", name, node["job_key"], (user,), sources, days["user"]))
    return [wish for wish in found if wish.key]


class Authority:
    """The CA's folder: two keys, what they signed, and what is revoked."""

    def __init__(self, folder: Path, passphrase: str, *, check_mode: bool) -> None:
        self.folder, self.passphrase, self.check_mode = folder, passphrase, check_mode
        self.changed = False

    def rotate(self) -> None:
        """New keys, and what the old ones signed is worth nothing; what is revoked stays revoked."""
        self.changed = True
        if self.check_mode:
            # A folder that is not there is what the real run would find from here on.
            self.folder = self.folder / "rotated"
        elif self.folder.exists():
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != REVOKED:
                    path.unlink()

    def key(self, kind: str) -> Ed25519PrivateKey:
        """The CA's key of a kind, made at its first use and encrypted at the first use of a passphrase."""
        path = self.folder / f"{kind}_ca"
        there = path.exists()
        key = load_ca(path, self.passphrase) if there else Ed25519PrivateKey.generate()
        if not there or (self.passphrase and stands_open(path)):
            self.changed = True
            if not self.check_mode:
                save_ca(path, key, self.passphrase)
        return key

    def announce(self, host_ca: str) -> None:
        """A known_hosts file by which the control machine, too, knows the nodes by their signature."""
        path, line = self.folder / "known_hosts", f"@cert-authority * {host_ca}\n"
        if not self.check_mode and not (path.exists() and path.read_text() == line):
            write_private(path, line.encode())

    def issued(self, name: str, kind: str) -> Path:
        """Where the certificate of a node is kept."""
        return self.folder / "issued" / f"{name}.{kind}-cert.pub"

    def certificate(self, wish: Wish, ca: Ed25519PrivateKey) -> str:
        """The certificate on file when it still serves, else a new one."""
        path, now = self.issued(wish.name, wish.kind), time.time()
        text = path.read_text() if path.exists() else ""
        if not is_good(text, wish, ca.public_key(), now):
            self.changed = True
            text = sign(wish, ca, now) + "\n"
            if not self.check_mode:
                write_private(path, text.encode())
        return text

    def revoked(self, names: list[str]) -> list[str]:
        """Every key ever revoked, those of `names` among them from now on."""
        path = self.folder / REVOKED
        known = path.read_text().splitlines() if path.exists() else []
        keys = dict.fromkeys(known)
        for name in names:
            keys.update(dict.fromkeys(f"{key} {name}" for key in self._keys_of(name)))
        if list(keys) != known:
            self.changed = True
            if not self.check_mode:
                write_private(path, "".join(f"{key}\n" for key in keys).encode())
        return list(keys)

    def _keys_of(self, name: str) -> list[str]:
        certificates = [parse(path.read_text()) for path in map(self.issued, [name] * 2, KINDS) if path.exists()]
        keys = [found.public_key() for found in certificates if found]
        return [public_text(key) for key in keys if isinstance(key, Ed25519PublicKey)]


def refuse_unknown(names: list[str], revoked: list[str], cluster: list[str]) -> None:
    """A misspelt name would leave a node trusted that the operator believes to be out."""
    known = {line.split()[-1] for line in revoked} | set(cluster)
    for name in names:
        if name not in known:
            raise AnsibleActionFail(
                f"ssh_trust_revoked names {name}, which is not in the inventory and was never signed here: "
                "check the spelling"
            )


def refuse_partial_rotation(nodes: list[str], revoked: list[str], cluster: list[str]) -> None:
    """Nodes left out would keep certificates of a CA that is gone."""
    if left_out := sorted(set(cluster) - set(nodes) - set(revoked)):
        raise AnsibleActionFail(
            f"a rotation concerns every node, and this run leaves out {', '.join(left_out)}: run it without --limit"
        )


def refuse_revoked(wanted: list[Wish], revoked: list[str]) -> None:
    """A revoked key is never signed again."""
    gone = {" ".join(line.split()[:2]) for line in revoked}
    for wish in wanted:
        if wish.key in gone:
            file = "/etc/ssh/ssh_host_ed25519_key" if wish.kind == "host" else "/etc/farandole/ssh/id_job"
            raise AnsibleActionFail(
                f"{wish.name}: its {wish.kind} key is revoked and will not be signed again. To take the node back, "
                f"make sure of it, delete {file} on it and run again; to keep it out, name it in ssh_trust_revoked"
            )


class ActionModule(ActionBase):  # type: ignore[misc]
    """Signs what has to be signed, for all hosts at once."""

    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module of the same name."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
                "folder": {"type": "path", "required": True},
                "nodes": {"type": "list", "elements": "dict", "required": True},
                "user": {"type": "str", "required": True},
                "host_days": {"type": "int", "required": True},
                "user_days": {"type": "int", "required": True},
                "passphrase": {"type": "str", "default": "", "no_log": True},
                "revoked": {"type": "list", "elements": "str", "default": []},
                "rotate": {"type": "bool", "default": False},
            }
        )
        folder = Path(arguments["folder"])
        try:
            claim(folder.parent, Path((task_vars or {})["inventory_dir"]), write=not self._task.check_mode)
        except FarandoleError as error:
            raise AnsibleActionFail(str(error)) from None
        authority = Authority(folder, arguments["passphrase"], check_mode=self._task.check_mode)
        cluster = (task_vars or {})["groups"]["cluster"]
        revoked = authority.revoked(arguments["revoked"])
        refuse_unknown(arguments["revoked"], revoked, cluster)
        if arguments["rotate"]:
            refuse_partial_rotation([node["name"] for node in arguments["nodes"]], arguments["revoked"], cluster)
            authority.rotate()
        days = {"host": arguments["host_days"], "user": arguments["user_days"]}
        wanted = wishes(arguments["nodes"], arguments["user"], days)
        refuse_revoked(wanted, revoked)
        keys = {kind: authority.key(kind) for kind in KINDS}
        host_ca = public_text(keys["host"].public_key())
        authority.announce(host_ca)
        certificates: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        for wish in wanted:
            certificates[wish.kind][wish.name] = authority.certificate(wish, keys[wish.kind])
        result.update(
            changed=authority.changed,
            host_ca=host_ca,
            user_ca=public_text(keys["user"].public_key()),
            host=certificates["host"],
            user=certificates["user"],
            revoked=revoked,
        )
        return result
