"""What nodes say before the launcher of Intel Caffe starts a training, and how it is judged."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from farandole.node.caffe import nodes, probe

HERE = socket.gethostname()
FILES = {"/c/bin/caffe": "the program", "s": "the solver", "n": "the net"}
GOOD: dict[str, Any] = {
    "problems": [], "digests": dict.fromkeys(FILES, "a"), "model": [], "cores": 2, "adapters": [], "fabric": []
}  # fmt: skip


def judged(network: str = "tcp", **second: Any) -> list[str]:
    """What is said about a second node that differs from the first."""
    answers: dict[str, nodes.Answer] = {
        "node-1": {**GOOD, "machine": "1"},
        "node-2": {**GOOD, "machine": "2", **second},
    }
    return list(nodes.judge(answers, FILES, network))


def test_sound_nodes_have_no_problem() -> None:
    assert judged() == []
    assert judged("opa", adapters=["hfi1_0"]) == [
        "node-1: there is no Omni-Path adapter (/sys/class/infiniband/hfi1*): use --network tcp"
    ]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"problems": ["there is no x\x1b[2J"]}, "node-2: there is no x?[2J"),
        (
            {"digests": {**GOOD["digests"], "/c/bin/caffe": "d"}},
            "node-2: the program /c/bin/caffe differs from that of node-1. Copy it again, or run site.yml",
        ),
        (
            {"digests": {"s": "a", "n": "d"}},
            "node-2: the net n differs from that of node-1. Copy it again, or run site.yml",
        ),
        ({"machine": "1"}, "node-2: it is the same machine as node-1 (/etc/machine-id): name each machine once"),
    ],
)
def test_each_difference_of_a_node_is_named(second: dict[str, Any], said: str) -> None:
    assert judged(**second) == [said]


def test_a_node_without_answer_or_folder_is_named() -> None:
    answers: dict[str, nodes.Answer] = {"node-1": "Permission denied (publickey).", "node-2": {"problems": ["gone"]}}
    assert list(nodes.judge(answers, FILES, "opa")) == [
        "node-1 cannot be asked: Permission denied (publickey).. Mend `ssh node-1`, or take it out of the hostfile",
        "node-2: gone",
    ]


def test_a_node_describes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("solver", "train_lmdb", "shard_0_lmdb"):
        Path(name).write_text(name)
    Path("closed").mkdir()
    sources = ["train_lmdb", "shard_%#_lmdb", "test_%#_lmdb", "gone"]
    request = {
        "cwd": str(tmp_path), "caffe": "/bin/true", "folders": [], "launcher": "/bin/gone", "snapshots": "g one",
        "files": {"solver": "the solver", "gone": "the net"}, "sources": sources, "model": "solver",
    }  # fmt: skip
    answer = nodes.ask(HERE, request, in_slurm=False)
    assert isinstance(answer, dict), answer
    assert answer["problems"] == [
        "the net gone cannot be read: No such file or directory. Put it there",
        "there is no /bin/gone, which starts the ranks. Install the same MPI as elsewhere",
        "the data test_%#_lmdb cannot be read: No such file or directory. Put it there, or mend its path",
        "the data gone cannot be read: No such file or directory. Put it there, or mend its path",
        "no snapshot can be written to g one: No such file or directory. Caffe would hang for ever after the training. "
        "Make the folder there: mkdir -p 'g one'",
    ]
    assert answer["digests"] == {"solver": hashlib.sha256(b"solver").hexdigest()}
    assert answer["cores"] >= 1
    assert answer["model"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["closed", "shard_0_lmdb", "solver", "train_lmdb"]
    assert probe.describe({**request, "cwd": "/gone"}) == {
        "problems": [
            "/gone, where the job starts, cannot be entered: No such file or directory. Make that folder there"
        ]
    }


@pytest.mark.parametrize(("library", "cure"), [("libmpi.so.12", "caffe_packages: [mpich]"), ("libx.so", "folder lib")])
def test_a_library_that_a_node_lacks_is_named(
    library: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin/ldd"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\necho '	{library} => not found'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    request = {"files": {}, "caffe": "/c", "folders": [], "launcher": "/bin/true", "sources": [], "snapshots": "."}
    (said,) = probe.problems(request)
    assert said.startswith(f"/c does not find {library}. ")
    assert cure in said
