"""A cluster's certificate authority, which is on the control machine alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import ssh

from farandole import trust
from farandole.errors import FarandoleError
from farandole.trust import Signed

DAY = 86400
KINDS = ("host", "user")
REVOKED = "revoked_keys"
# Every key that was ever signed: what is not known cannot be revoked.
LEDGER = "signed_keys"
# There from the making of a CA until a run has brought it to every node.
UNFINISHED = "unfinished"
# A clock that is a little behind must not refuse a fresh certificate.
CLOCK_SLACK = 300


@dataclass(frozen=True)
class Request:
    """What a certificate is to say."""

    kind: str
    name: str
    key: str
    principals: tuple[str, ...]
    sources: tuple[str, ...]
    days: int

    @property
    def signed(self) -> Signed:
        """What the ledger keeps of it."""
        return Signed(self.key, self.name, self.kind)


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
        raise FarandoleError(
            f"the CA key {path} cannot be opened: {known}; set ssh_trust_ca_passphrase, "
            "or make a new CA with -e ssh_trust_rotate=true"
        ) from error
    except TypeError as error:  # cryptography's word for a passphrase that is missing or not needed
        if passphrase:
            return load_ca(path, "")
        raise FarandoleError(
            f"the CA key {path} has a passphrase: set ssh_trust_ca_passphrase from Ansible Vault"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise FarandoleError(f"the CA key {path} is not an ed25519 key: move it away and run again")
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


def write_private(path: Path, content: bytes, *, durable: bool = True) -> None:
    """A file of mode 0600 in a directory of mode 0700, in place at once, and there after a power cut too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    draft = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    draft.replace(path)
    if durable:
        # The folder may be new itself.
        for folder in (path.parent, path.parent.parent):
            sync_folder(folder)


def sync_folder(path: Path) -> None:
    """What was renamed or made in it is on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def parse(text: str) -> ssh.SSHCertificate | None:
    """A certificate, or nothing when it is none."""
    try:
        found = serialization.load_ssh_public_identity(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    return found if isinstance(found, ssh.SSHCertificate) else None


def is_good(text: str, request: Request, ca: Ed25519PublicKey, now: float) -> bool:
    """Whether a certificate says what was requested and has more than a third of its life before it."""
    found = parse(text)
    if found is None:
        return False
    signed_by, key = found.signature_key(), found.public_key()
    if not isinstance(signed_by, Ed25519PublicKey) or not isinstance(key, Ed25519PublicKey):
        return False
    return (
        public_text(signed_by) == public_text(ca)
        and public_text(key) == request.key
        and tuple(name.decode() for name in found.valid_principals) == request.principals
        and found.critical_options == options(request)
        and found.extensions == extensions(request)
        and now + request.days * DAY / 3 < found.valid_before <= now + request.days * DAY + 1
    )


def options(request: Request) -> dict[bytes, bytes]:
    """Host certificates have none; a user certificate is good from its own node alone."""
    return {b"source-address": ",".join(request.sources).encode()} if request.sources else {}


def extensions(request: Request) -> dict[bytes, bytes]:
    """A terminal, and neither forwarding nor a file of start-up commands."""
    return {b"permit-pty": b""} if request.kind == "user" else {}


def sign(request: Request, ca: Ed25519PrivateKey, now: float) -> str:
    """The certificate as one line of text."""
    key = serialization.load_ssh_public_key(request.key.encode())
    if not isinstance(key, Ed25519PublicKey):
        raise FarandoleError(f"{request.name}: its {request.kind} key is not an ed25519 key")
    kind = ssh.SSHCertificateType.HOST if request.kind == "host" else ssh.SSHCertificateType.USER
    builder = (
        ssh.SSHCertificateBuilder()
        .public_key(key)
        .serial(time.time_ns())
        .type(kind)
        .key_id(f"{request.name} {request.kind}".encode())
        .valid_principals([name.encode() for name in request.principals])
        .valid_after(int(now) - CLOCK_SLACK)
        .valid_before(int(now) + request.days * DAY)
    )
    for name, value in options(request).items():
        builder = builder.add_critical_option(name, value)
    for name, value in extensions(request).items():
        builder = builder.add_extension(name, value)
    return builder.sign(ca).public_bytes().decode()


def requests(nodes: list[dict[str, Any]], user: str, days: dict[str, int]) -> list[Request]:
    """A host certificate for every node, a user certificate for every launcher."""
    found = []
    for node in nodes:
        name, sources = node["name"], tuple(node["sources"])
        found.append(Request("host", name, node["host_key"], tuple(node["names"]), (), days["host"]))
        if node["job_key"]:
            found.append(Request("user", name, node["job_key"], (user,), sources, days["user"]))
    return [request for request in found if request.key]


class Authority:
    """The CA's folder: two keys, what they signed, and what is revoked."""

    def __init__(self, folder: Path, passphrase: str, *, check_mode: bool) -> None:
        self.folder, self.passphrase, self.check_mode = folder, passphrase, check_mode
        self.changed = False
        self.ledger = self._read_ledger()
        self.revoked = [line for line in self._read(REVOKED).splitlines() if line.split()]

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def _write(self, name: str, text: str) -> None:
        self.changed = True
        if not self.check_mode:
            write_private(self.folder / name, text.encode())

    def _read_ledger(self) -> list[Signed]:
        """The CA of a former version has none; what it signed last is all that is known."""
        path = self.folder / LEDGER
        return trust.read_ledger(path.read_text(), str(path)) if path.exists() else self._issued()

    def _issued(self) -> list[Signed]:
        found = []
        for path in sorted((self.folder / "issued").glob("*-cert.pub")):
            name, _, kind = path.name.removesuffix("-cert.pub").rpartition(".")
            certificate = parse(path.read_text())
            key = certificate.public_key() if certificate else None
            if isinstance(key, Ed25519PublicKey):
                found.append(Signed(public_text(key), name, kind))
        return found

    def refuse_torn(self) -> None:
        """Without the list of revoked keys they would be accepted again."""
        if (self.folder / LEDGER).exists() and not (self.folder / REVOKED).exists():
            raise FarandoleError(
                f"{self.folder / REVOKED} is missing, and with it which keys nobody may accept: restore the folder "
                "from your backup; and, as keys that were signed since then are in no backup, make a new CA: "
                "site.yml with -e ssh_trust_rotate=true"
            )

    @property
    def unfinished(self) -> bool:
        """Whether the run that made this CA did not come to its end."""
        return (self.folder / UNFINISHED).exists()

    def why_renew(self) -> str:
        """Why there has to be a new CA; nothing when the old one serves."""
        missing = [f"{kind}_ca" for kind in KINDS if not (self.folder / f"{kind}_ca").exists()]
        why = trust.why_renew(str(self.folder), missing, ledger=(self.folder / LEDGER).exists())
        if why and not missing:
            for kind in KINDS:  # With the wrong passphrase, or none, the new keys would be shut by it too.
                self.key(kind)
        return why

    def renew(self) -> None:
        """New keys. Nothing that the old ones signed stays valid; what is revoked stays revoked."""
        self.changed = True
        if self.check_mode:
            # A folder that is not there is what the real run would find from here on.
            self.folder = self.folder / "renewed"
            return
        self._write(UNFINISHED, "")
        self._write(REVOKED, "".join(f"{line}\n" for line in self.revoked))
        # The keys go first: killed at any later point, the next run begins this again.
        for kind in KINDS:
            (self.folder / f"{kind}_ca").unlink(missing_ok=True)
        self._write(LEDGER, trust.ledger_text(self.ledger))
        shutil.rmtree(self.folder / "issued", ignore_errors=True)

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
        path = self.folder / "known_hosts"
        revoked = [f"@revoked * {trust.key_of(line)}\n" for line in self.revoked]
        text = "".join([f"@cert-authority * {host_ca}\n", *revoked])
        if not self.check_mode and not (path.exists() and path.read_text() == text):
            write_private(path, text.encode())

    def issued(self, name: str, kind: str) -> Path:
        """Where the certificate of a node is kept."""
        return self.folder / "issued" / f"{name}.{kind}-cert.pub"

    def record(self, asked: list[Signed]) -> None:
        """Remember keys for ever, before anything says that they are signed."""
        ledger = list(dict.fromkeys([*self.ledger, *asked]))
        if ledger != self.ledger:
            self.ledger = ledger
            self._write(LEDGER, trust.ledger_text(ledger))

    def certificate(self, request: Request, ca: Ed25519PrivateKey) -> str:
        """The certificate on file when it still serves, else a new one."""
        path, now = self.issued(request.name, request.kind), time.time()
        text = path.read_text() if path.exists() else ""
        if not is_good(text, request, ca.public_key(), now):
            self.changed = True
            text = sign(request, ca, now) + "\n"
            if not self.check_mode:
                write_private(path, text.encode(), durable=False)
        return text

    def revoke(self, gone: list[Signed]) -> None:
        """Keys that nobody accepts from now on."""
        lines = trust.revoke(self.revoked, gone)
        if lines != self.revoked:
            self.revoked = lines
            self._write(REVOKED, "".join(f"{line}\n" for line in lines))

    def withdraw(self, launchers: list[str]) -> None:
        """Remove the certificates of those who launch jobs no more."""
        for path in (self.folder / "issued").glob("*.user-cert.pub"):
            if path.name.removesuffix(".user-cert.pub") not in launchers:
                self.changed = True
                if not self.check_mode:
                    path.unlink()


@dataclass(frozen=True)
class Members:
    """What the inventory says of the cluster, and who of it takes part in this run."""

    cluster: Sequence[str]
    launchers: list[str]
    revoked: list[str]
    present: list[str]

    @property
    def left_out(self) -> set[str]:
        """The nodes to which this run brings nothing."""
        return set(self.cluster) - set(self.present) - set(self.revoked)


def follow_inventory(authority: Authority, members: Members, *, rotate: bool) -> str:
    """Revoke what the inventory takes away, whatever the nodes say; returns why a new CA is needed, if it is."""
    known = {one.name for one in authority.ledger} | {line.split()[-1] for line in authority.revoked}
    trust.refuse_unknown(members.revoked, known | set(members.cluster))
    trust.refuse_no_launcher(members.launchers)
    why = "a new CA is asked for by ssh_trust_rotate" if rotate else authority.why_renew()
    if why or authority.unfinished:
        trust.refuse_partial(members.left_out, why or "the run that made a new CA has not brought it to every node")
    if not rotate:
        authority.refuse_torn()
    authority.revoke(trust.left(authority.ledger, members.launchers, members.revoked))
    return why


def sign_all(authority: Authority, wanted: list[Request], members: Members, *, renew: bool) -> dict[str, Any]:
    """Refuse what must not be signed, remember the rest and sign it."""
    asked = [request.signed for request in wanted]
    trust.refuse_shared(authority.ledger, asked, members.cluster)
    replaced = trust.replaced(authority.ledger, asked)
    trust.refuse_revoked(asked, trust.revoke(authority.revoked, replaced))
    authority.revoke(replaced)
    if renew:
        authority.renew()
    authority.record(asked)
    authority.withdraw(members.launchers)
    keys = {kind: authority.key(kind) for kind in KINDS}
    host_ca = public_text(keys["host"].public_key())
    authority.announce(host_ca)
    certificates: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for request in wanted:
        certificates[request.kind][request.name] = authority.certificate(request, keys[request.kind])
    user_ca = public_text(keys["user"].public_key())
    return {"host_ca": host_ca, "user_ca": user_ca, **certificates, "revoked": authority.revoked}


def serve(authority: Authority, told: dict[str, Any], cluster: Sequence[str]) -> tuple[dict[str, Any], str]:
    """All that a run asks of the CA; with it what the operator has to know."""
    nodes, launchers = told["nodes"], told["launchers"]
    members = Members(cluster, launchers, told["revoked"], present=[node["name"] for node in nodes])
    why = follow_inventory(authority, members, rotate=told["rotate"])
    notice = ""
    # Who rotates knows.
    if why and authority.ledger and not told["rotate"]:
        notice = f"{why}: a new CA is made, and nothing that was signed before is valid any longer"
    trust.refuse_answers(nodes, launchers, check_mode=authority.check_mode)
    wanted = requests(nodes, told["user"], {"host": told["host_days"], "user": told["user_days"]})
    return sign_all(authority, wanted, members, renew=bool(why)), notice
