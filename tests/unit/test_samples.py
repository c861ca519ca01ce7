"""The samples on a node: depot_fetch as it runs there, and the scripts as passed to write_files."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from farandole.plays import folders as samples

from .loading import ROOT
from .stack import Endless, NotHttp, Truncates, dead_url, run_module, served, tree

FILES = {"images.gz": b"images", "SOURCE": b"MNIST\n"}


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "depot").mkdir()
    with served(tmp_path / "depot") as url:
        yield url


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


def with_sum(asked: dict[str, Any], wanted: str) -> dict[str, Any]:
    return {**asked, "files": [{**one, "sha256": wanted} for one in asked["files"]]}


def there(asked: dict[str, Any]) -> dict[str, bytes]:
    """Everything around the data's folder, except the lock that only its owner can open."""
    folder = Path(asked["path"]).parent
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if found.pop(".lock", None) is not None:
        assert (folder / ".lock").stat().st_mode & 0o777 == 0o600
    return found


WHOLE = {f"mnist/{name}": content for name, content in FILES.items()}


def test_data_is_installed_once(tmp_path: Path, depot: str) -> None:
    asked = request(tmp_path, depot)
    assert run_module("depot_fetch", asked)["changed"]
    assert there(asked) == WHOLE
    folder = Path(asked["path"])
    assert [path.stat().st_mode & 0o777 for path in (folder, *sorted(folder.iterdir()))] == [0o755, 0o644, 0o644]
    before = tree(folder)
    assert not run_module("depot_fetch", {**asked, "url": dead_url()})["changed"]
    assert tree(folder) == before


def test_check_mode_predicts_and_fetches_nothing(tmp_path: Path, depot: str) -> None:
    asked = request(tmp_path, depot)
    ahead = {**asked, "url": dead_url()}
    assert run_module("depot_fetch", ahead, check_mode=True)["changed"]
    assert not (tmp_path / "opt").exists()
    run_module("depot_fetch", asked)
    assert not run_module("depot_fetch", ahead, check_mode=True)["changed"]


@pytest.mark.parametrize("harm", ["damage", "loss", "extra file", "other data"])
def test_wrong_files_are_repaired(tmp_path: Path, depot: str, harm: str) -> None:
    asked = request(tmp_path, depot)
    run_module("depot_fetch", asked)
    folder = Path(asked["path"])
    if harm == "damage":
        (folder / "images.gz").write_bytes(b"imagos")
    elif harm == "loss":
        (folder / "SOURCE").unlink()
    elif harm == "extra file":
        (folder / "more").mkdir()
        (folder / "more/still").touch()
    else:
        asked = request(tmp_path, depot, {"other.gz": b"other"})
    assert run_module("depot_fetch", asked)["changed"]
    assert there(asked) == (WHOLE if harm != "other data" else {"mnist/other.gz": b"other"})
    assert not run_module("depot_fetch", asked)["changed"]


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path, depot: str) -> None:
    asked = request(tmp_path, depot)
    left = Path(asked["path"]).with_name(".mnist.incoming")
    (left / "new").mkdir(parents=True)
    (left / "archive").write_text("half")
    assert run_module("depot_fetch", asked)["changed"]
    assert there(asked) == WHOLE


def refused(asked: dict[str, Any], words: str) -> None:
    """Check that a request is refused with a message and changes nothing."""
    before = there(asked)
    assert words in run_module("depot_fetch", asked)["msg"]
    assert there(asked) == before


def test_a_refusal_changes_nothing(tmp_path: Path, depot: str) -> None:
    run_module("depot_fetch", request(tmp_path, depot))
    other = request(tmp_path, depot, {"other.gz": b"other"})
    got = hashlib.sha256(b"other").hexdigest()
    refused(with_sum(other, "0" * 64), f"its sha256 is {got}, expected {'0' * 64}")
    refused({**other, "url": dead_url()}, "connection refused. Check that the depot is running")
    refused({**other, "url": f"{depot}/gone"}, "cannot be fetched")
    for handler, words in (
        (NotHttp, "cannot be fetched"),
        (Truncates, "the transfer stopped"),
        (Endless, "it is longer than"),
    ):
        with served(tmp_path / "depot", handler) as url:
            refused({**other, "url": url}, words)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, depot: str) -> None:
    asked = request(tmp_path, depot)
    (tmp_path / "opt").write_text("in the way")
    assert f"the files cannot be written to {asked['path']}" in run_module("depot_fetch", asked)["msg"]


def test_concurrent_installations_are_serialised(tmp_path: Path, depot: str) -> None:
    asked = request(tmp_path, depot)
    parent = Path(asked["path"]).parent
    parent.mkdir(parents=True)
    opened = os.open(parent / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(opened, fcntl.LOCK_EX)
    answers: list[dict[str, Any]] = []
    second = threading.Thread(target=lambda: answers.append(run_module("depot_fetch", asked)))
    second.start()
    second.join(1)
    assert second.is_alive()
    assert there(asked) == {}
    os.close(opened)
    second.join(30)
    assert answers[0]["changed"]
    assert there(asked) == WHOLE


def test_another_account_cannot_block_an_installation(tmp_path: Path, depot: str) -> None:
    asked = request(tmp_path, depot)
    parent = Path(asked["path"]).parent
    parent.mkdir(parents=True)
    opened = os.open(parent, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_EX)
    answers: list[dict[str, Any]] = []
    install = threading.Thread(target=lambda: answers.append(run_module("depot_fetch", asked)))
    install.start()
    install.join(20)
    os.close(opened)
    assert answers
    assert answers[0]["changed"]


def test_the_depot_is_not_fetched_through_a_proxy(tmp_path: Path, depot: str) -> None:
    assert run_module("depot_fetch", request(tmp_path, depot), http_proxy=dead_url(), no_proxy="")["changed"]


# Scripts


def test_scripts_have_folders_and_modes(tmp_path: Path) -> None:
    for name in ("train.py", "jobs/run.sh", "jobs/host file", ".train.py.swp", "__pycache__/train.pyc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"of {name}, {{{{ a }}}}")
    result = samples.folder_files(str(tmp_path), "/opt/s", "users")
    assert [(one["path"], one["mode"]) for one in result] == [
        ("/opt/s/jobs/host file", "0644"),
        ("/opt/s/jobs/run.sh", "0755"),
        ("/opt/s/train.py", "0755"),
    ]
    assert {one["group"] for one in result} == {"users"}
    assert result[2]["content"] == "of train.py, {{ a }}"


def test_the_projects_scripts_are_found() -> None:
    result = samples.folder_files(str(ROOT / "files/samples"), "/opt/s", "users")
    assert any(one["path"].endswith(".py") for one in result)
