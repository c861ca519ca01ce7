"""The cluster's CA on real files, what a run asks of it, and ssh-keygen, which checks what it produces; for tests."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from farandole.core.errors import FarandoleError
from farandole.core.findings import FindingsError
from farandole.trust import authority as ca_of
from farandole.trust import certificates
from farandole.trust.certificates import Request

# Always the same, because they are in the names of tests.
CA, *KEYS = (Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number in range(7))
HOST_KEY, JOB_KEY, OTHER_KEY, A, B, C = (certificates.public_text(key.public_key()) for key in KEYS)
HOST = Request("host", "node-1", HOST_KEY, ("node-1", "192.0.2.1"), (), 3650)
USER = Request("user", "node-1", JOB_KEY, ("trainer",), ("192.0.2.1", "127.0.0.1", "::1"), 300)
NOTHING = {"authorities": [], "revoked": [], "certificate": ""}
CLUSTER = ["node-1", "node-2"]


def authority(tmp_path: Path, passphrase: str = "", *, check_mode: bool = False) -> Any:
    return ca_of.Authority(tmp_path / "mine" / "ca", passphrase, check_mode=check_mode)


def issue(ca: Any, *requests: Any) -> list[str]:
    """Issue certificates as a run does."""
    return [ca.certificate(request, ca.keys()[request.kind]) for request in requests or (HOST, USER)]


def on_disk(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Inode and content of every file: a file that was rewritten has another inode."""
    return {path: (path.stat().st_ino, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def without(tmp_path: Path, *names: str) -> None:
    for name in names:
        (tmp_path / "mine" / "ca" / name).unlink()


def ssh_keygen(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command, environment = ["ssh-keygen", *arguments], {**os.environ, "TZ": "UTC"}
    return subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, check=False)


def shown(certificate: str) -> list[str]:
    """What ssh-keygen prints about a certificate, after checking its signature."""
    done = ssh_keygen("-L", "-f", "-", stdin=certificate)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()[1:]]
    return [line for line in lines if not line.startswith("Serial:")]


def parsed(certificate: str) -> tuple[str, list[bytes]]:
    """The key and the names in a certificate."""
    made = certificates.parse(certificate)
    assert made
    key = made.public_key()
    assert isinstance(key, Ed25519PublicKey)
    return certificates.public_text(key), made.valid_principals


def node(name: str, host_key: Any, job_key: Any = None, **others: Any) -> dict[str, Any]:
    keys = {"trainer": job_key, **others} if job_key is not None else {}
    answer = {"host_key": host_key, "job_keys": keys, "remembers": NOTHING}
    return {"name": name, **answer, "names": [name], "sources": ["192.0.2.1"]}


HEAD = node("node-1", HOST_KEY, JOB_KEY)
WORKER = node("node-2", OTHER_KEY)


def serve(tmp_path: Path, *nodes: Any, ca: Any = None, cluster: Sequence[str] = CLUSTER, **changes: Any) -> Any:
    """Do the CA's part of site.yml; returns its result and its warning."""
    arguments = {
        "nodes": nodes or (HEAD, WORKER), "launchers": ["node-1"], "users": ["trainer"], "mounters": [], "homes": [],
        "host_days": 3650, "user_days": 300, "revoked": [], "rotate": False, **changes,
    }  # fmt: skip
    return ca_of.serve(ca or authority(tmp_path), arguments, cluster)


def given(tmp_path: Path, *nodes: Any, **changes: Any) -> dict[str, Any]:
    signed, notice = serve(tmp_path, *nodes, **changes)
    assert notice == ""
    # As the role does in the end.
    (tmp_path / "mine/ca/unfinished").unlink(missing_ok=True)
    assert isinstance(signed, dict)
    return signed


def refused(tmp_path: Path, *nodes: Any, **changes: Any) -> str:
    """Why nothing was signed."""
    before = on_disk(tmp_path / "mine/ca/issued")
    with pytest.raises(FarandoleError) as refusal:
        serve(tmp_path, *nodes, **changes)
    assert on_disk(tmp_path / "mine/ca/issued") == before
    if isinstance(refusal.value, FindingsError):
        assert all(
            item.cause in str(refusal.value) and item.cure in str(refusal.value) for item in refusal.value.findings
        )
    return str(refusal.value)


def findings(tmp_path: Path, *nodes: Any, **changes: Any) -> list[tuple[str, str]]:
    """Host and code of every finding because of which nothing was signed."""
    before = on_disk(tmp_path / "mine/ca/issued")
    with pytest.raises(FindingsError) as refusal:
        serve(tmp_path, *nodes, **changes)
    assert on_disk(tmp_path / "mine/ca/issued") == before
    return [(finding.host, finding.code) for finding in refusal.value.findings]


def revoked_keys(tmp_path: Path) -> set[str]:
    """The revoked keys as sshd and ssh read them on a node."""
    path = tmp_path / "mine" / "ca" / "revoked_keys"
    return {" ".join(line.split()[:2]) for line in path.read_text().splitlines()} if path.exists() else set()
