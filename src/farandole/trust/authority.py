"""A cluster's certificate authority, which exists only on the control machine."""

import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.trust import certificates, remembered
from farandole.trust import rules as trust
from farandole.trust.certificates import Request
from farandole.trust.rules import Signed

KINDS = ("host", "user")
REVOKED = "revoked_keys"
# Every key ever signed, as an unrecorded key cannot be revoked.
LEDGER = "signed_keys"
# The public keys of every CA that was made here, as nodes may still trust a former one.
AUTHORITIES = "authorities"
# Exists from the creation of a CA until a run has brought it to every node.
UNFINISHED = "unfinished"
# Exists, with the date of a backup that was restored, until a new CA replaces the one from there: nobody knows what it
# has signed since.
RESTORED = "restored"


def load_ca(path: Path, passphrase: str) -> Ed25519PrivateKey:
    """Load the private key of a CA, or say why it cannot be opened."""
    secret = b""
    try:
        if not is_unencrypted(path):
            secret = passphrase.encode()
            if not secret:
                raise FarandoleError(
                    f"the CA key {path} has a passphrase: set ssh_trust_ca_passphrase from Ansible Vault"
                )
        key = serialization.load_ssh_private_key(path.read_bytes(), secret or None)
    except ValueError as error:
        why, cure = str(error), "restore it from your backup"
        if secret:
            why, cure = "ssh_trust_ca_passphrase is not its passphrase", "set ssh_trust_ca_passphrase"
        raise FarandoleError(
            f"the CA key {path} cannot be opened: {why}; {cure}, or make a new CA with -e ssh_trust_rotate=true"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise FarandoleError(f"the CA key {path} is not an ed25519 key: move it away and run again")
    return key


def is_unencrypted(path: Path) -> bool:
    """Whether the private key of a CA has no passphrase."""
    try:
        serialization.load_ssh_private_key(path.read_bytes(), None)
    except TypeError:
        return False
    return True


def save_ca(path: Path, key: Ed25519PrivateKey, passphrase: str) -> None:
    """Write the private key of a CA atomically, readable by its owner only."""
    encryption = (
        serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    )
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, encryption)
    write_private(path, text, durable=True)


def requests(
    nodes: list[dict[str, Any]],
    users: Sequence[str],
    launchers: Collection[str],
    mounters: Collection[str],
    homes: Sequence[str],
    days: dict[str, int],
) -> list[Request]:
    """Request a host certificate for every node, for launchers one for each user, and for mounters one for files."""
    requested = []
    for node in nodes:
        name, sources = node["name"], tuple(node["sources"])
        requested.append(Request("host", name, node["host_key"], tuple(node["names"]), (), days["host"]))
        for user, kind in trust.kinds_at(name, users, launchers, mounters).items():
            names = trust.principals(user, kind, homes)
            # Nobody mounts the homes of the machine that has them.
            real = tuple(address for address in sources if kind != "files" or not ip_address(address).is_loopback)
            requested.append(Request(kind, name, node["job_keys"][user], names, real, days["user"]))
    return [request for request in requested if request.key]


class Authority:
    """The folder of a CA: its two keys, what they signed, and which keys are revoked."""

    def __init__(self, folder: Path, passphrase: str, *, check_mode: bool) -> None:
        self.folder, self.passphrase, self.check_mode = folder, passphrase, check_mode
        self.changed = False
        self.ledger = self._read_ledger()
        self.revoked = [line for line in self._read(REVOKED).splitlines() if line.split()]
        self.authorities = self._read(AUTHORITIES).splitlines()

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def _write(self, name: str, text: str) -> None:
        self.changed = True
        if not self.check_mode:
            write_private(self.folder / name, text, durable=True)

    def _read_ledger(self) -> list[Signed]:
        """The CA of an older version has no ledger; only its latest certificates are known."""
        path = self.folder / LEDGER
        return trust.read_ledger(path.read_text(), str(path)) if path.exists() else self._issued()

    def _issued(self) -> list[Signed]:
        issued = []
        for path in sorted((self.folder / "issued").glob("*-cert.pub")):
            name, _, kind = path.name.removesuffix("-cert.pub").rpartition(".")
            certificate = certificates.parse(path.read_text())
            key = certificate.public_key() if certificate else None
            if isinstance(key, Ed25519PublicKey):
                issued.append(Signed(certificates.public_text(key), name, kind))
        return issued

    def refuse_incomplete(self) -> None:
        """Refuse to go on without the list of revoked keys, as nodes would accept these keys again."""
        if (self.folder / LEDGER).exists() and not (self.folder / REVOKED).exists():
            raise FarandoleError(
                f"{self.folder / REVOKED} is missing, so it is not known which keys are revoked: restore the folder "
                "from your backup; then, as the backup lacks the keys signed since, make a new CA by running site.yml "
                "with -e ssh_trust_rotate=true"
            )

    @property
    def unfinished(self) -> bool:
        """Whether the run that made this CA has not completed."""
        return (self.folder / UNFINISHED).exists()

    @property
    def restored(self) -> str:
        """The date of the backup that this CA comes from; empty if it comes from none."""
        return self._read(RESTORED).strip()

    @property
    def missing(self) -> list[str]:
        """The CA's keys that are not in its folder."""
        return [f"{kind}_ca" for kind in KINDS if not (self.folder / f"{kind}_ca").exists()]

    def why_renew(self) -> str:
        """Why a new CA is needed; empty if the present one is fine."""
        ledger = (self.folder / LEDGER).exists()
        why = trust.why_renew(str(self.folder), self.missing, ledger=ledger, restored=self.restored)
        if why and not self.missing:
            # With a wrong passphrase, the new keys would be encrypted with that one.
            self.keys()
        return why

    def renew(self) -> None:
        """Discard the CA's keys. Nothing that they signed stays valid; what is revoked stays revoked."""
        self.changed = True
        if self.check_mode:
            # From here on, the real run would find no CA: neither does a folder that does not exist.
            self.folder = self.folder / "renewed"
            return
        self._write(UNFINISHED, "")
        self._write(REVOKED, "".join(f"{line}\n" for line in self.revoked))
        # The keys go first: if this run is killed after that, the next one starts the renewal again.
        for kind in KINDS:
            (self.folder / f"{kind}_ca").unlink(missing_ok=True)
        (self.folder / RESTORED).unlink(missing_ok=True)
        self._write(LEDGER, trust.ledger_text(self.ledger))
        shutil.rmtree(self.folder / "issued", ignore_errors=True)

    def keys(self) -> dict[str, Ed25519PrivateKey]:
        """The CA's keys by kind, generated on first use and encrypted once a passphrase fits all that have one."""
        paths = {kind: self.folder / f"{kind}_ca" for kind in KINDS}
        keys = {
            kind: load_ca(path, self.passphrase) if path.exists() else Ed25519PrivateKey.generate()
            for kind, path in paths.items()
        }
        for kind, path in paths.items():
            if not path.exists() or (self.passphrase and is_unencrypted(path)):
                self.changed = True
                if not self.check_mode:
                    save_ca(path, keys[kind], self.passphrase)
        return keys

    def announce(self, host_ca: str) -> None:
        """Write a known_hosts file, so that the control machine verifies the nodes by this CA, too."""
        path = self.folder / "known_hosts"
        revoked = [f"@revoked * {trust.key_of(line)}\n" for line in self.revoked]
        text = "".join([f"@cert-authority * {host_ca}\n", *revoked])
        if not self.check_mode and not (path.exists() and path.read_text() == text):
            write_private(path, text, durable=True)

    def issued(self, name: str, kind: str) -> Path:
        """The path of a node's certificate."""
        return self.folder / "issued" / f"{name}.{kind}-cert.pub"

    def record(self, asked: list[Signed]) -> None:
        """Record keys for ever, before any certificate for them exists."""
        ledger = list(dict.fromkeys([*self.ledger, *asked]))
        if ledger != self.ledger:
            self.ledger = ledger
            self._write(LEDGER, trust.ledger_text(ledger))

    def recognize(self, *made: str) -> None:
        """Record the public keys of a CA for ever, before any node trusts it."""
        if new := [key for key in made if key not in self.authorities]:
            self.authorities += new
            self._write(AUTHORITIES, "".join(f"{key}\n" for key in self.authorities))

    def certificate(self, request: Request, ca: Ed25519PrivateKey) -> str:
        """The certificate on file if it is still good, else a new one."""
        path, now = self.issued(request.name, request.kind), time.time()
        text = path.read_text() if path.exists() else ""
        if not certificates.is_good(text, request, ca.public_key(), now):
            self.changed = True
            text = certificates.sign(request, ca, now) + "\n"
            if not self.check_mode:
                write_private(path, text)
        return text

    def revoke(self, gone: list[Signed]) -> None:
        """Add keys to the list of revoked ones."""
        lines = trust.revoke(self.revoked, gone)
        if lines != self.revoked:
            self.revoked = lines
            self._write(REVOKED, "".join(f"{line}\n" for line in lines))

    def withdraw(self, launchers: Sequence[str], mounters: Sequence[str], users: Sequence[str]) -> None:
        """Remove the user certificates of nodes that no longer launch jobs, and of people who are no longer listed."""
        kept = {self.issued(name, kind) for name in launchers for kind in trust.kinds_of(users).values()}
        kept |= {self.issued(name, "files") for name in mounters}
        for path in (self.folder / "issued").glob("*-cert.pub"):
            if not path.name.endswith(".host-cert.pub") and path not in kept:
                self.changed = True
                if not self.check_mode:
                    path.unlink()


@dataclass(frozen=True)
class Members:
    """The nodes and users of the cluster according to the inventory, and the nodes that take part in this run."""

    cluster: Sequence[str]
    users: list[str]
    launchers: list[str]
    mounters: list[str]
    revoked: list[str]
    present: list[str]
    excluded: Sequence[str] = ()

    @property
    def left_out(self) -> set[str]:
        """The nodes that do not take part in this run although they could."""
        return set(self.cluster) - set(self.present) - set(self.revoked) - set(self.excluded)


def _withdrawn(ledger: Sequence[Signed], members: Members) -> list[Signed]:
    return trust.withdrawn(ledger, members.launchers, members.mounters, members.revoked, members.users)


def follow_inventory(authority: Authority, members: Members, *, rotate: bool) -> str:
    """Revoke keys as the inventory says, whatever the nodes say; return why a new CA is needed, if it is."""
    known = {entry.name for entry in authority.ledger} | {line.split()[-1] for line in authority.revoked}
    trust.refuse_misspelt(members.revoked, known | set(members.cluster))
    trust.refuse_no_launcher(members.launchers)
    why = "ssh_trust_rotate asks for a new CA" if rotate else authority.why_renew()
    if why or authority.unfinished:
        why_all = why or "the run that made a new CA has not brought it to every node"
        trust.refuse_partial(members.left_out, why_all, lost=bool(authority.missing) and not rotate)
    if not rotate:
        authority.refuse_incomplete()
    authority.revoke(_withdrawn(authority.ledger, members))
    return why


def sign_all(
    authority: Authority,
    wanted: list[Request],
    members: Members,
    told: remembered.Memories,
    *,
    renew: bool,
    restored: bool,
) -> dict[str, Any]:
    """Refuse what must not be signed, record the rest and sign it."""
    asked = [request.signed for request in wanted]
    trust.refuse_shared(authority.ledger, asked, members.cluster)
    gone = trust.replaced(authority.ledger, asked)
    keys = {} if renew else authority.keys()
    gone += _remembered(authority, gone, members, told, public(keys), restored=restored)
    trust.refuse_revoked(asked, trust.revoke(authority.revoked, gone))
    authority.revoke(gone)
    if renew:
        authority.renew()
        keys = authority.keys()
    authority.record(asked)
    authority.withdraw(members.launchers, members.mounters, members.users)
    made = public(keys)
    authority.recognize(*made.values())
    authority.announce(made["host"])
    hosts: dict[str, str] = {}
    users: dict[str, dict[str, str]] = {}
    for request in wanted:
        text = authority.certificate(request, keys[request.ca])
        if request.kind == "host":
            hosts[request.name] = text
        else:
            users.setdefault(request.name, {})[trust.MOUNTER if request.kind == "files" else request.principals[0]] = (
                text
            )
    return {
        "host_ca": made["host"],
        "user_ca": made["user"],
        "host": hosts,
        "user": users,
        "revoked": authority.revoked,
    }


def public(keys: Mapping[str, Ed25519PrivateKey]) -> dict[str, str]:
    """The public halves of a CA's keys."""
    return {kind: certificates.public_text(key.public_key()) for kind, key in keys.items()}


def _remembered(
    authority: Authority,
    gone: Sequence[Signed],
    members: Members,
    told: remembered.Memories,
    present: Mapping[str, str],
    *,
    restored: bool,
) -> list[Signed]:
    known = remembered.Known(
        folder=str(authority.folder),
        host_ca=present.get("host", ""),
        user_ca=present.get("user", ""),
        former=authority.authorities,
        ledger=authority.ledger,
        revoked=trust.revoke(authority.revoked, gone),
        unfinished=authority.unfinished,
        restored=restored,
    )
    alone = len(set(members.cluster) - set(members.revoked)) == 1
    return remembered.believed(told, known, members.revoked, alone=alone)


def serve(authority: Authority, arguments: dict[str, Any], cluster: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Do all that a run asks of the CA; return the result and a warning for the operator."""
    launchers, users = arguments["launchers"], arguments["users"]
    # No run should ask for them.
    nodes = [node for node in arguments["nodes"] if node["name"] not in arguments["revoked"]]
    mounters, present = arguments["mounters"], [node["name"] for node in nodes]
    excluded = arguments.get("excluded", ())
    members = Members(cluster, users, launchers, mounters, arguments["revoked"], present, excluded)
    why = follow_inventory(authority, members, rotate=arguments["rotate"])
    notice = ""
    # Whoever rotates the CA knows.
    if why and authority.ledger and not arguments["rotate"]:
        notice = f"{why}: a new CA replaces it, and nothing signed before is valid any longer"
    trust.refuse_answers(nodes, launchers, mounters, users, check_mode=authority.check_mode)
    told = remembered.memories(nodes)
    # As of a control machine that has never seen this cluster; whoever rotates or restores the CA knows.
    if why and not (authority.ledger or authority.unfinished or authority.restored or arguments["rotate"]):
        remembered.refuse_foreign(told, str(authority.folder), authority.authorities)
    days = {"host": arguments["host_days"], "user": arguments["user_days"]}
    wanted = requests(nodes, users, launchers, mounters, arguments["homes"], days)
    restored = bool(authority.restored) and not arguments["rotate"]
    return sign_all(authority, wanted, members, told, renew=bool(why), restored=restored), notice
