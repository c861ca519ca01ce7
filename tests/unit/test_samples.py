"""The samples on a node: depot_fetch as it runs there, and the scripts as passed to write_files."""

import argparse
import fcntl
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from farandole.plays import folders as samples

from .loading import ROOT
from .stack import dead_url, run_module, tree

FILES = {"images.gz": b"images", "SOURCE": b"MNIST\n"}


def request(tmp_path: Path, url: str, files: Mapping[str, bytes] = FILES) -> dict[str, Any]:
    """The arguments of the role, with the files on the depot."""
    requested = []
    for name, content in files.items():
        path = tmp_path / "depot/data" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o600)
        requested.append({"name": f"data/{name}", "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)})
    return {"url": url, "files": requested, "path": str(tmp_path / "opt/data/mnist")}


def there(asked: dict[str, Any]) -> dict[str, bytes]:
    """Everything around the data's folder, except the lock that only its owner can open."""
    folder = Path(asked["path"]).parent
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if contents.pop(".lock", None) is not None:
        assert (folder / ".lock").stat().st_mode & 0o777 == 0o600
    return contents


WHOLE = {f"mnist/{name}": content for name, content in FILES.items()}


def test_data_is_installed_once(tmp_path: Path, depot: str) -> None:
    asked = request(tmp_path, depot)
    ahead = {**asked, "url": dead_url()}
    assert run_module("depot_fetch", ahead, check_mode=True)["changed"]
    assert not (tmp_path / "opt").exists()
    # What a killed run has left is removed.
    left = Path(asked["path"]).with_name(".mnist.incoming")
    (left / "new").mkdir(parents=True)
    (left / "archive").write_text("half")
    assert run_module("depot_fetch", asked)["changed"]
    assert there(asked) == WHOLE
    folder = Path(asked["path"])
    assert [path.stat().st_mode & 0o777 for path in (folder, *sorted(folder.iterdir()))] == [0o755, 0o644, 0o644]
    before = tree(folder)
    for check_mode in (True, False):
        assert not run_module("depot_fetch", ahead, check_mode=check_mode)["changed"]
    assert tree(folder) == before


HARM: dict[str, Callable[[Path], object]] = {
    "damage": lambda folder: (folder / "images.gz").write_bytes(b"imagos"),
    "loss": lambda folder: (folder / "SOURCE").unlink(),
    "extra file": lambda folder: shutil.copytree(folder, folder / "more"),
    "other data": Path.exists,
}


@pytest.mark.parametrize("harm", HARM)
def test_wrong_files_are_repaired(tmp_path: Path, depot: str, harm: str) -> None:
    asked, wanted = request(tmp_path, depot), WHOLE
    run_module("depot_fetch", asked)
    HARM[harm](Path(asked["path"]))
    if harm == "other data":
        asked, wanted = request(tmp_path, depot, {"other.gz": b"other"}), {"mnist/other.gz": b"other"}
    assert run_module("depot_fetch", asked)["changed"]
    assert there(asked) == wanted
    assert not run_module("depot_fetch", asked)["changed"]


def test_a_refusal_changes_nothing(tmp_path: Path, depot: str) -> None:
    """How the depot can fail otherwise is tested with stacks, which are fetched in the same way."""
    run_module("depot_fetch", request(tmp_path, depot))
    other = request(tmp_path, depot, {"good.gz": b"good", "other.gz": b"other"})
    good, second = other["files"]
    damaged = {**other, "files": [good, {**second, "sha256": "0" * 64}]}
    (tmp_path / "file").write_text("in the way")
    before = there(other)
    for asked, message in (
        (damaged, f"its sha256 is {second['sha256']}, expected {'0' * 64}"),
        ({**other, "url": dead_url()}, "connection refused"),
        ({**other, "path": f"{tmp_path}/file/x"}, f"the files cannot be written to {tmp_path}/file/x"),
    ):
        assert message in run_module("depot_fetch", asked)["msg"]
        assert there(other) == before


@pytest.mark.parametrize("waits", [True, False])
def test_an_installation_waits_for_another_one_but_not_for_another_account(
    tmp_path: Path, depot: str, waits: bool
) -> None:
    """Every account can open the folder, and lock it."""
    asked = request(tmp_path, depot)
    parent = Path(asked["path"]).parent
    parent.mkdir(parents=True)
    opened = os.open(parent / ".lock", os.O_RDWR | os.O_CREAT, 0o600) if waits else os.open(parent, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_EX)
    answers: list[dict[str, Any]] = []
    second = threading.Thread(target=lambda: answers.append(run_module("depot_fetch", asked)))
    second.start()
    second.join(1 if waits else 20)
    assert second.is_alive() is waits
    assert (there(asked) == {}) is waits
    os.close(opened)
    second.join(30)
    assert answers[0]["changed"]
    assert there(asked) == WHOLE


def test_scripts_have_folders_and_modes(tmp_path: Path) -> None:
    for name in ("train.py", "jobs/run.sh", "jobs/host file", ".train.py.swp", "__pycache__/train.pyc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"of {name}, {{{{ a }}}}")
    result = samples.folder_files(str(tmp_path), "/opt/s", "users")
    assert [(entry["path"], entry["mode"], entry["group"]) for entry in result] == [
        (f"/opt/s/{name}", mode, "users")
        for name, mode in (("jobs/host file", "0644"), ("jobs/run.sh", "0755"), ("train.py", "0755"))
    ]
    assert result[2]["content"] == "of train.py, {{ a }}"
    ours = samples.folder_files(str(ROOT / "files/samples"), "/opt/s", "users")
    assert any(entry["path"].endswith(".py") for entry in ours)


MISSING = ("numpy", "torch", "torch.nn", "torch.nn.functional", "torch.utils", "torch.utils.data", "horovod")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Imports a sample, in a job's folder on a machine that has none of the packages that it needs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "files/samples"))
    before = {*sys.modules}
    for name in (*MISSING, "torch.utils.data.distributed", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    yield importlib.import_module
    for name in {*sys.modules} - before:
        del sys.modules[name]


def test_a_run_names_the_data_that_each_rank_has_used(
    scripts: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mnist, proof = scripts("mnist"), scripts("proof")
    monkeypatch.setattr(mnist, "read", lambda _: MagicMock(ndim=3, __len__=lambda _: 1))
    answers: list[dict[str, Any]] = []

    def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
        answers.insert(0, own)
        return [dict(answer) for answer in answers]

    for rank in (1, 0):
        (tmp_path / f"MNIST-data-{rank}").mkdir()
        (tmp_path / f"MNIST-data-{rank}/SOURCE").write_text(f"images of rank {rank}\n")
        mnist.load_data(f"MNIST-data-{rank}")
        assert proof.finish(argparse.Namespace(json=False), gather, rank, 2, [], proof.Meter(), 1.0, 0.0) == 0
    assert capfd.readouterr().out.endswith("data: images of rank 0 and images of rank 1\n")


def test_the_elastic_sample_refuses_checkpoints_which_it_would_not_write(
    scripts: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pytorch_elastic.py", "--checkpoints", "saved"])
    with pytest.raises(SystemExit):
        scripts("pytorch_elastic").main()
    assert "--checkpoints: this sample keeps its state in memory" in capfd.readouterr().err
    monkeypatch.setattr(sys, "argv", ["pytorch_mnist.py", "--checkpoints", "saved"])
    assert scripts("proof").arguments("", lr=0.1).checkpoints == Path("saved")


def test_a_launcher_that_does_not_exist_is_no_finished_job() -> None:
    command, given = ["sh", str(ROOT / "files/samples/jobs/slurm.sh")], {"LAUNCHER": "mpiexec", "SLURM_NTASKS": "2"}
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert (done.returncode, "LAUNCHER=mpiexec" in done.stderr) == (1, True)
