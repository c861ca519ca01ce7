"""The certificates of a cluster's CA: what is asked for, signed, and read again."""

import time
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import ssh

from farandole.core.errors import FarandoleError
from farandole.trust.rules import Signed

DAY = 86400
# A node whose clock is slow must accept a fresh certificate, also while it is set.
CLOCK_SLACK = DAY


@dataclass(frozen=True)
class Request:
    """The contents of a certificate to be signed."""

    kind: str
    name: str
    key: str
    principals: tuple[str, ...]
    sources: tuple[str, ...]
    days: int

    @property
    def ca(self) -> str:
        """The kind of the CA that signs it."""
        return "host" if self.kind == "host" else "user"

    @property
    def signed(self) -> Signed:
        """The ledger's record of this request."""
        return Signed(self.key, self.name, self.kind)


def public_text(key: Ed25519PublicKey) -> str:
    """A public key in the format of known_hosts and authorized_keys."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def parse(text: str) -> ssh.SSHCertificate | None:
    """Parse a certificate; None if the text is not one."""
    try:
        identity = serialization.load_ssh_public_identity(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    return identity if isinstance(identity, ssh.SSHCertificate) else None


def is_good(text: str, request: Request, ca: Ed25519PublicKey, now: float) -> bool:
    """Whether a certificate matches the request and has more than a third of its lifetime left."""
    certificate = parse(text)
    if certificate is None:
        return False
    signed_by, key = certificate.signature_key(), certificate.public_key()
    if not isinstance(signed_by, Ed25519PublicKey) or not isinstance(key, Ed25519PublicKey):
        return False
    return (
        public_text(signed_by) == public_text(ca)
        and public_text(key) == request.key
        and tuple(name.decode() for name in certificate.valid_principals) == request.principals
        and certificate.critical_options == options(request)
        and certificate.extensions == extensions(request)
        and now + request.days * DAY / 3 < certificate.valid_before <= now + request.days * DAY + 1
    )


def options(request: Request) -> dict[bytes, bytes]:
    """Critical options: none for a host; a user certificate is valid from its own node, and may be for files alone."""
    critical = {b"force-command": b"internal-sftp"} if request.kind == "files" else {}
    return critical | ({b"source-address": ",".join(request.sources).encode()} if request.sources else {})


def extensions(request: Request) -> dict[bytes, bytes]:
    """Extensions: a user may have a terminal, but no forwarding and no ~/.ssh/rc."""
    return {b"permit-pty": b""} if request.kind not in ("host", "files") else {}


def sign(request: Request, ca: Ed25519PrivateKey, now: float) -> str:
    """Sign a certificate and return it as one line of text."""
    key = serialization.load_ssh_public_key(request.key.encode())
    if not isinstance(key, Ed25519PublicKey):
        raise FarandoleError(f"{request.name}: its {request.kind} key is not an ed25519 key")
    kind = ssh.SSHCertificateType.HOST if request.ca == "host" else ssh.SSHCertificateType.USER
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


def signed_key(text: str, ca: str) -> str:
    """The key in a certificate, if this CA signed it."""
    certificate = parse(text)
    if not certificate:
        return ""
    signed_by, key = certificate.signature_key(), certificate.public_key()
    if not isinstance(signed_by, Ed25519PublicKey) or not isinstance(key, Ed25519PublicKey):
        return ""
    try:
        certificate.verify_cert_signature()
    except InvalidSignature:
        return ""
    return public_text(key) if public_text(signed_by) == ca else ""
