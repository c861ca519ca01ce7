"""What nodes say before the launcher of Intel Caffe starts a training, and how it is judged."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from farandole.node.caffe import nodes, probe
from farandole.node.caffe.plan import Solver

from .prefix import program

GOOD: dict[str, Any] = {"problems": [], "model": 0, "cores": 2, "omni_path": False}


@pytest.mark.parametrize(
    ("network", "second", "said"),
    [
        ("tcp", {}, []),
        ("opa", {"omni_path": True}, ["node-1: there is no Omni-Path adapter"]),
        ("tcp", {"problems": ["there is no x\x1b[2J"]}, ["node-2: there is no x\\x1b[2J"]),
        ("tcp", {"machine": "1"}, ["node-2: it is the same machine as node-1"]),
    ],
)
def test_each_problem_of_a_node_is_named(network: str, second: dict[str, Any], said: list[str]) -> None:
    answers = {"node-1": {**GOOD, "machine": "1"}, "node-2": {**GOOD, "machine": "2", **second}}
    problems = list(nodes.judge(answers, network))
    assert [problem[: len(start)] for problem, start in zip(problems, said, strict=True)] == said


def test_a_node_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path / "ssh", 'echo "Hello"; echo "Permission denied (publickey)." >&2; exit 255')
    (said,) = nodes.judge(nodes.ask_all(["node-1"], {}, in_slurm=False), "opa")
    assert said.startswith("node-1: it cannot be asked: Permission denied (publickey).")
    program(tmp_path / "srun", 'echo "Hello"; echo \'{"problems": []}\'; echo 5')
    assert nodes.ask("node-1", {}, in_slurm=True) == {"problems": []}


def test_a_node_describes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("solver", "net", "train_lmdb", "shard_0_lmdb"):
        Path(name).write_text(name)
    solver = Solver("solver", ["net"], ["train_lmdb", "shard_%#_lmdb", "test_%#_lmdb", "gone"], "g one/m", False)
    request = nodes.request_of("/bin/true", "", "/bin/gone", solver)
    Path("net").write_text("another")
    answer = nodes.ask(socket.gethostname(), request, in_slurm=False)
    starts = [
        "/bin/true loads no MPI",
        f"{tmp_path}/net differs from that of {socket.gethostname()}",
        f"{tmp_path}/test_%#_lmdb cannot be read: No such file",
        f"{tmp_path}/gone cannot be read: No such file",
        "/bin/gone cannot be read: No such file",
        f"no snapshot can be written to {tmp_path}/g one: No such file",
    ]
    assert [problem[: len(start)] for problem, start in zip(answer["problems"], starts, strict=True)] == starts
    assert answer["problems"][-1].endswith(f"mkdir -p '{tmp_path}/g one'")
    assert (answer["model"], answer["cores"] >= 1) == (0, True)
    assert nodes.ask(socket.gethostname(), {**request, "model": str(tmp_path / "net")}, in_slurm=False)["model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net", "shard_0_lmdb", "solver", "train_lmdb"]


@pytest.mark.parametrize(
    ("library", "refused"),
    [
        ("libmpi.so.12 => /opt/lib/libmpi.so.12", []),
        ("libmpich.so.12 => /opt/lib/libmpi.so.12 (0x00007f01)", []),
        ("libmpi.so.12 => not found", ["does not find libmpi.so.12. Set caffe_packages: [mpich]"]),
        ("libmpi.so.12 => /x\nlibiomp5.so => not found", ["does not find libiomp5.so. Put it into the folder lib"]),
        ("libmpi.so.40 => /opt/lib/libmpi.so.40", ["loads libmpi.so.40, but only libmpi.so.12"]),
        ("libmpi.so.12 => /x (0x1)\nlibmpi.so.40 => /y", ["loads libmpi.so.12, libmpi.so.40, but only"]),
        ("libc.so.6 => /x", ["loads no MPI"]),
    ],
)
def test_the_mpi_of_a_program_is_read_from_ldd(
    library: str, refused: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = f"\tlinux-vdso.so.1 (0x00007fff)\n\t{library}\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)\n"
    (tmp_path / "shown").write_text(shown)
    program(tmp_path / "ldd", f"cat {tmp_path}/shown")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = list(probe.wrong_libraries("/c", ""))
    assert [problem[: len(start) + 3] for problem, start in zip(said, refused, strict=True)] == [
        f"/c {start}" for start in refused
    ]
