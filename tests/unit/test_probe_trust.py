"""The probe of trust, with a stand-in for ssh that gives each of its answers and complaints on demand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .loading import ROOT

PROBE = ROOT / "files" / "probes" / "trust.py"
NODES = {"node-1": "192.0.2.1", "node-2": "192.0.2.2"}
# What follows `ssh -o BatchMode=yes` is the target: each has a script of its own beside this one.
SSH = '#!/bin/sh\n[ "$1 $2" = "-o BatchMode=yes" ] && exec sh "${0%/*}/$3"\n'


def says(name: str, machine: str) -> str:
    return f"echo {name}; echo {machine}"


def complains(*lines: str) -> str:
    return "\n".join(f"printf '%s\\r\\n' '{line}' >&2" for line in lines) + "\nexit 255"


def probe(folder: Path, **other: str) -> tuple[int, list[str]]:
    """Exit status and lines, two clean nodes given but for the targets that answer something other."""
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
    # Columns and seconds as one would read them.
    return done.returncode, [
        re.sub(r"\d+\.\d\d s$", "fast", " ".join(line.split())) for line in done.stdout.splitlines()
    ]


def test_every_way_is_clean(tmp_path: Path) -> None:
    assert probe(tmp_path) == (
        0,
        [
            "node-1 node-1 fast",
            "node-1 192.0.2.1 fast",
            "node-2 node-2 fast",
            "node-2 192.0.2.2 fast",
            "machines: 2 of 2, clean ways: 4 of 4",
        ],
    )


UNCLEAN = {
    "another machine": (
        says("node-9", "id-of-node-2"),
        "said 'node-9 id-of-node-2', not its name: a login script prints, or it is another machine",
    ),
    "a login script prints": (
        "echo Welcome\n" + says("node-2", "id-of-node-2"),
        "said 'Welcome node-2 id-of-node-2', not its name: a login script prints, or it is another machine",
    ),
    "a logout script prints": (
        says("node-2", "id-of-node-2") + "\necho Bye",
        "said 'node-2 id-of-node-2 Bye', not its name: a login script prints, or it is another machine",
    ),
    "nothing said": ("true", "said '', not its name: a login script prints, or it is another machine"),
    "a login script complains": (
        "echo 'stty: not a tty' >&2\n" + says("node-2", "id-of-node-2"),
        "unexpected words from ssh (stty: not a tty)",
    ),
    "no words": ("exit 3", "unexpected words from ssh (exit status 3)"),
    "unsigned": (
        complains(
            "No ED25519 host key is known for node-2 and you have requested strict checking.",
            "Host key verification failed.",
        ),
        "its host key carries no signature of this cluster's CA (Host key verification failed.)",
    ),
    "revoked": (
        complains(
            "Host key ED25519-CERT SHA256:0 revoked by file /etc/farandole/ssh/revoked_keys",
            "Host key verification failed.",
        ),
        "its host key is revoked (Host key ED25519-CERT SHA256:0 revoked by file /etc/farandole/ssh/revoked_keys)",
    ),
    "not let in": (
        complains("trainer@node-2: Permission denied (publickey)."),
        "it does not accept the job user's certificate (trainer@node-2: Permission denied (publickey).)",
    ),
    "silent": (
        complains("ssh: connect to host node-2 port 22: Connection timed out"),
        "nothing answers at that address (ssh: connect to host node-2 port 22: Connection timed out)",
    ),
    "no route": (
        complains("ssh: connect to host node-2 port 22: No route to host"),
        "there is no route to that address (ssh: connect to host node-2 port 22: No route to host)",
    ),
    "refused": (
        complains("ssh: connect to host node-2 port 22: Connection refused"),
        "no sshd listens there (ssh: connect to host node-2 port 22: Connection refused)",
    ),
    "unknown": (
        complains("ssh: Could not resolve hostname node-2: Name or service not known"),
        "the name is not known here (ssh: Could not resolve hostname node-2: Name or service not known)",
    ),
    "closed": (
        complains("kex_exchange_identification: Connection closed by remote host"),
        "its sshd closed the connection, MaxStartups may be too low "
        "(kex_exchange_identification: Connection closed by remote host)",
    ),
}


@pytest.mark.parametrize(("answer", "complaint"), UNCLEAN.values(), ids=UNCLEAN)
def test_a_way_that_is_not_clean_is_named_with_its_cause(tmp_path: Path, answer: str, complaint: str) -> None:
    assert probe(tmp_path, **{"node-2": answer}) == (
        1,
        [
            "node-1 node-1 fast",
            "node-1 192.0.2.1 fast",
            f"node-2 node-2 {complaint}",
            "node-2 192.0.2.2 fast",
            "machines: 2 of 2, clean ways: 3 of 4",
        ],
    )


def test_one_machine_under_two_names_is_not_two(tmp_path: Path) -> None:
    code, lines = probe(tmp_path, **{target: says("node-2", "id-of-node-1") for target in ("node-2", "192.0.2.2")})
    assert code == 1
    assert lines[-2:] == [
        "node-1 and node-2 are one machine: they have the same machine id",
        "machines: 1 of 2, clean ways: 4 of 4",
    ]
