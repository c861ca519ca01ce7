"""What nodes say before the launcher of Intel Caffe starts a training, and how it is judged."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from farandole.node.caffe import nodes, probe

from .prefix import program

FILES = {"/c/bin/caffe": "the program", "s": "the solver", "n": "the net"}
SAME = dict.fromkeys(FILES, "a")
GOOD: dict[str, Any] = {"problems": [], "digests": SAME, "model": [], "cores": 2, "adapters": [], "fabric": []}


@pytest.mark.parametrize(
    ("network", "second", "said"),
    [
        ("tcp", {}, []),
        ("opa", {"adapters": ["hfi1_0"]}, ["node-1: there is no Omni-Path adapter"]),
        ("tcp", {"problems": ["there is no x\x1b[2J"]}, ["node-2: there is no x\\x1b[2J"]),
        ("tcp", {"digests": {**SAME, "/c/bin/caffe": "d"}}, ["node-2: the program /c/bin/caffe differs from that of"]),
        ("tcp", {"digests": {"s": "a", "n": "d"}}, ["node-2: the net n differs from that of node-1"]),
        ("tcp", {"machine": "1"}, ["node-2: it is the same machine as node-1"]),
    ],
)
def test_each_difference_of_a_node_is_named(network: str, second: dict[str, Any], said: list[str]) -> None:
    answers: dict[str, nodes.Answer] = {
        "node-1": {**GOOD, "machine": "1"},
        "node-2": {**GOOD, "machine": "2", **second},
    }
    problems = list(nodes.judge(answers, FILES, network))
    assert [problem[: len(start)] for problem, start in zip(problems, said, strict=True)] == said


def test_a_node_without_answer_or_folder_is_named() -> None:
    answers: dict[str, nodes.Answer] = {"node-1": "Permission denied (publickey).", "node-2": {"problems": ["gone"]}}
    first, second = nodes.judge(answers, FILES, "opa")
    assert first.startswith("node-1 cannot be asked: Permission denied (publickey).")
    assert second == "node-2: gone"


def test_a_node_describes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("solver", "train_lmdb", "shard_0_lmdb"):
        Path(name).write_text(name)
    sources = ["train_lmdb", "shard_%#_lmdb", "test_%#_lmdb", "gone"]
    request = {
        "cwd": str(tmp_path), "caffe": "/bin/true", "folders": [], "launcher": "/bin/gone", "snapshots": "g one",
        "files": {"solver": "the solver", "gone": "the net"}, "sources": sources, "model": "solver",
    }  # fmt: skip
    answer = nodes.ask(socket.gethostname(), request, in_slurm=False)
    assert isinstance(answer, dict), answer
    starts = [
        "the net gone cannot be read: No such file",
        "there is no /bin/gone, which starts the ranks",
        "the data test_%#_lmdb cannot be read: No such file",
        "the data gone cannot be read: No such file",
        "no snapshot can be written to g one: No such file",
    ]
    assert [problem[: len(start)] for problem, start in zip(answer["problems"], starts, strict=True)] == starts
    assert answer["problems"][-1].endswith("mkdir -p 'g one'")
    assert answer["digests"] == {"solver": hashlib.sha256(b"solver").hexdigest()}
    assert answer["cores"] >= 1
    assert answer["model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard_0_lmdb", "solver", "train_lmdb"]
    (lost,) = probe.describe({**request, "cwd": "/gone"})["problems"]
    assert lost.startswith("/gone, where the job starts, cannot be entered")


@pytest.mark.parametrize(("library", "cure"), [("libmpi.so.12", "caffe_packages: [mpich]"), ("libx.so", "folder lib")])
def test_a_library_that_a_node_lacks_is_named(
    library: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "ldd", f"echo '	{library} => not found'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    request = {"files": {}, "caffe": "/c", "folders": [], "launcher": "/bin/true", "sources": [], "snapshots": "."}
    (said,) = probe.problems(request)
    assert said.startswith(f"/c does not find {library}. ")
    assert cure in said
