"""The trust probe, with a stand-in for ssh that prints what a test needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.core.causes import causes
from farandole.validation.answer import connections
from farandole.validation.judge import GREEN, RED, Check
from farandole.validation.nodes import trust_checks

from .loading import ROOT

PROBE = ROOT / "src/farandole/node/probes/trust.py"
NODES = {"node-1": "192.0.2.1", "node-2": "192.0.2.2"}
# The argument after `ssh -o BatchMode=yes` is the target; each target has its own script beside this one.
SSH = '#!/bin/sh\n[ "$1 $2" = "-o BatchMode=yes" ] && exec sh "${0%/*}/$3"\n'


def says(name: str, machine: str) -> str:
    return f"echo {name}; echo {machine}"


def complains(*lines: str) -> str:
    return "\n".join(f"printf '%s\\r\\n' '{line}' >&2" for line in lines) + "\nexit 255"


def probe(folder: Path, **other: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and connections of two nodes that answer correctly, except for the targets in `other`."""
    ssh = folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    for name, address in NODES.items():
        for target in (name, address):
            (folder / target).write_text(other.get(target, says(name, f"id-of-{name}")))
    done = subprocess.run(
        [sys.executable, PROBE, json.dumps(NODES)],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    # As the control machine reads it.
    return done.returncode, connections({"stdout": done.stdout}, NODES)


def judged(code: int, tried: list[dict[str, Any]]) -> Check:
    told = json.dumps({"connections": tried})
    (check,) = trust_checks({"node-1": {"rc": code, "stdout": told}}, NODES)
    return check


def test_every_connection_is_clean(tmp_path: Path) -> None:
    code, tried = probe(tmp_path)
    assert code == 0
    assert [(attempt["host"], attempt["target"], attempt["machine"], attempt["code"]) for attempt in tried] == [
        (name, target, f"id-of-{name}", "") for name, address in NODES.items() for target in (name, address)
    ]
    assert all(0 <= attempt["seconds"] < 20 for attempt in tried)
    assert judged(code, tried).status == GREEN


STRANGER, NOISE = "peer-stranger", "peer-failed"
UNSIGNED = "No ED25519 host key is known for node-2 and you have requested strict checking."
REVOKED = "Host key ED25519-CERT SHA256:0 revoked by file /etc/farandole/ssh/revoked_keys"
FAILED = "Host key verification failed."
GOOD = says("node-2", "id-of-node-2")
UNCLEAN = {
    "another machine": (says("node-9", "id-of-node-2"), STRANGER, "'node-9 id-of-node-2'"),
    "a login script prints": (f"echo Welcome\n{GOOD}", STRANGER, "'Welcome node-2 id-of-node-2'"),
    "a logout script prints": (f"{GOOD}\necho Bye", STRANGER, "'node-2 id-of-node-2 Bye'"),
    "no answer": ("true", STRANGER, "''"),
    "a login script complains": (f"echo 'stty: not a tty' >&2\n{GOOD}", NOISE, "stty: not a tty"),
    "no output": ("exit 3", NOISE, "exit status 3"),
    "unsigned": (complains(UNSIGNED, FAILED), "peer-host-key-unsigned", "Host key verification failed"),
    "revoked": (complains(REVOKED, FAILED), "peer-host-key-revoked", "revoked by file /etc/farandole/ssh/revoked_keys"),
} | {
    code: (complains(line), code, line.removeprefix("ssh: ").rstrip("."))
    for code, line in (
        ("peer-certificate-refused", "trainer@node-2: Permission denied (publickey)."),
        ("peer-timeout", "ssh: connect to host node-2 port 22: Connection timed out"),
        ("peer-no-route", "ssh: connect to host node-2 port 22: No route to host"),
        ("peer-refused", "ssh: connect to host node-2 port 22: Connection refused"),
        ("peer-name-unknown", "ssh: Could not resolve hostname node-2: Name or service not known"),
        ("peer-closed", "kex_exchange_identification: Connection closed by remote host"),
    )
}


@pytest.mark.parametrize(("answer", "cause", "shown"), UNCLEAN.values(), ids=UNCLEAN)
def test_a_connection_that_is_not_clean_is_named_with_its_cause(
    tmp_path: Path, answer: str, cause: str, shown: str
) -> None:
    code, tried = probe(tmp_path, **{"node-2": answer})
    assert code == 1
    (wrong,) = (attempt for attempt in tried if attempt["code"])
    assert (wrong["host"], wrong["target"], causes()[wrong["code"]].seen) == ("node-2", "node-2", "trust")
    assert shown in wrong["seen"]
    check = judged(code, tried)
    assert (check.status, check.code, check.log) == (RED, cause, [check.cause])


def test_one_machine_under_two_names_counts_once(tmp_path: Path) -> None:
    code, tried = probe(tmp_path, **{target: says("node-2", "id-of-node-1") for target in ("node-2", "192.0.2.2")})
    assert code == 1
    assert not any(attempt["code"] for attempt in tried)
    check = judged(code, tried)
    assert (check.status, check.code) == (RED, "machines-shared")


def test_endless_output_of_ssh_is_truncated(tmp_path: Path) -> None:
    _, tried = probe(tmp_path, **{"node-2": "yes very long | head -c 300000 >&2; exit 255"})
    assert 0 < len(tried[2]["seen"]) <= 1003
