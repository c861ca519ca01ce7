"""The keys by which hosts prove who they are: asked for, compared with what is known, shown as fingerprints."""

import base64
import hashlib
import re
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from farandole.core.text import one_line

# The best one first: only keys of the first type are signed by the cluster's authority.
TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa")
SCANNED = "ed25519,ecdsa,rsa"
# What ssh reads where nothing else is set.
KNOWN = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")
# What shows a host's fingerprint on its own console.
SHOW = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
ANSWER_S, SCANS = 5, 16


@dataclass(frozen=True)
class HostKey:
    """A key of a host."""

    kind: str
    blob: str

    @property
    def fingerprint(self) -> str:
        """The fingerprint as ssh-keygen -l shows it."""
        digest = hashlib.sha256(base64.b64decode(self.blob)).digest()
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def place(address: str, port: int) -> str:
    """How known_hosts calls a host."""
    return address if port == 22 else f"[{address}]:{port}"


def ssh_options(state: Path) -> str:
    """The options with which Ansible's connections refuse what the cluster has revoked."""
    known = state / "ca" / "known_hosts"
    files = f'GlobalKnownHostsFile="{known}" {KNOWN[1]}'
    options = ["UpdateHostKeys=no", "ForwardAgent=no", "ForwardX11=no", files]
    if known.is_file():
        # Only ed25519 keys are signed and revoked; a revoked node must not return with a key of another type.
        options.append(f"HostKeyAlgorithms={TYPES[0]}-cert-v01@openssh.com,{TYPES[0]}")
    return shlex.join([word for option in options for word in ("-o", option)])


def scan(addresses: Sequence[str], port: int) -> list[HostKey | str]:
    """The best key of each host, or why there is none."""
    with ThreadPoolExecutor(SCANS) as pool:
        return [*pool.map(lambda address: _scan(address, port), addresses)]


def _scan(address: str, port: int) -> HostKey | str:
    command = ["ssh-keyscan", "-T", str(ANSWER_S), "-p", str(port), "-t", SCANNED, address]
    try:
        done = subprocess.run(
            command, text=True, errors="replace", capture_output=True, timeout=6 * ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {6 * ANSWER_S} s"
    keys = sorted(read(done.stdout), key=lambda key: TYPES.index(key.kind))
    messages = [line for line in done.stderr.splitlines() if not line.startswith("#")]
    return keys[0] if keys else one_line(messages[-1] if messages else f"no answer to ssh in {ANSWER_S} s")


def read(text: str) -> list[HostKey]:
    """The keys in lines of known_hosts; other lines, and keys that are none, are left out."""
    keys = []
    for line in text.splitlines():
        match = re.fullmatch(r"\S+ (\S+) ([A-Za-z0-9+/]{40,2000}={0,2})(?: .*)?", line)
        if match and match[1] in TYPES and len(match[2]) % 4 == 0:
            keys.append(HostKey(match[1], match[2]))
    return keys


def known(names: Sequence[str], files: Sequence[str] = KNOWN) -> list[HostKey]:
    """The keys that this machine knows of a host."""
    keys = []
    for file in (str(Path(path).expanduser()) for path in files):
        for name in names:
            done = subprocess.run(
                ["ssh-keygen", "-F", name, "-f", file], text=True, errors="replace", capture_output=True, check=False
            )
            keys += read(done.stdout)
    return keys
