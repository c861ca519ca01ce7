"""Both halves of send_files, packing and unpacking, and keep_file, which copies back."""

import io
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.plays import sending
from farandole.stack.cache import recall_whole

from .loading import act, acted, load
from .stack import run_module, tree

action, module = load("action", "send_files"), load("modules", "send_files")


def wanted(tmp_path: Path, **contents: str) -> list[dict[str, str]]:
    """Files on the control machine, for stacks/ on the depot."""
    files = []
    for name, content in contents.items():
        path = tmp_path / "cache" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        files.append({"path": str(path), "name": f"stacks/{name}", "sha256": sha256(path)})
    return files


def call(tmp_path: Path, files: list[dict[str, str]], **more: str) -> dict[str, Any]:
    digests = {file["name"]: file["sha256"] for file in files}
    return run_module("send_files", {"directory": str(tmp_path / "depot"), "wanted": digests, **more})


def bundle(tmp_path: Path, **contents: str) -> Path:
    """A tar with arbitrary names."""
    path = tmp_path / "bundle.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content.encode()))
    return path


def test_files_are_sent_once(tmp_path: Path) -> None:
    files = wanted(tmp_path, a="one", b="two")
    assert call(tmp_path, files)["missing"] == ["stacks/a", "stacks/b"]
    # A user's own link is followed.
    path = Path(files[0]["path"])
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    sending.bundle(files, tmp_path / "bundle.tar")
    assert call(tmp_path, files, bundle=str(tmp_path / "bundle.tar"))["changed"]
    assert stored(tmp_path) == {"stacks/a": "one", "stacks/b": "two"}
    assert not (tmp_path / "bundle.tar").exists()
    # nginx runs as another user and must be able to read it.
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "depot/stacks").iterdir()} == {0o644}
    (tmp_path / "depot/stacks/b").write_text("rot")
    answer = call(tmp_path, files)
    assert (answer["missing"], answer["changed"]) == (["stacks/b"], False)


def test_how_far_a_transfer_is_comes_from_the_program_that_sends(tmp_path: Path) -> None:
    archive = tmp_path / "bundle.tar"
    archive.write_bytes(bytes(5_000_000))
    assert sending.sent(archive, 5_000_000) == ""
    # The sender is a program of a program, as with sshpass, and has read a part; others end while they are looked at.
    read = "for i in $(seq 100); do head -c 30000 <&3 >/dev/null; done"
    sender = f"(exec 3<{archive}; {read}; sleep 60) & wait"
    with subprocess.Popen(["sh", "-c", sender], start_new_session=True) as process:
        until = time.monotonic() + 30
        try:
            while (progress := sending.sent(archive, 5_000_000)) != "sent 3 of 5 MB" and time.monotonic() < until:
                pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert progress == "sent 3 of 5 MB"


def stored(tmp_path: Path) -> dict[str, str]:
    return {name: content for name, (_, content) in tree(tmp_path / "depot").items()}


def test_damaged_files_are_not_stored(tmp_path: Path) -> None:
    files = wanted(tmp_path, a="one", b="two")
    there = tmp_path / "depot/stacks/b"
    there.parent.mkdir(parents=True)
    there.write_text("older")
    answer = call(tmp_path, files, bundle=str(bundle(tmp_path, **{"stacks/a": "one", "stacks/b": "twx"})))
    assert answer["msg"] == f"stacks/b arrived damaged in {tmp_path / 'depot'}: run again"
    assert stored(tmp_path) == {"stacks/a": "one", "stacks/b": "older"}
    assert not (tmp_path / "bundle.tar").exists()
    (tmp_path / "file").touch()
    packed = str(bundle(tmp_path, **{"stacks/a": "one"}))
    answer = call(tmp_path, files, bundle=packed, directory=str(tmp_path / "file"))
    assert answer["msg"].startswith(f"the files cannot be written to {tmp_path / 'file'}: ")


@pytest.mark.parametrize("cut", [600, 1024 + 300, 10], ids=["in a file", "in a header", "at once"])
def test_a_truncated_bundle_is_refused(tmp_path: Path, cut: int) -> None:
    files = wanted(tmp_path, a="o" * 512, b="two")
    path = bundle(tmp_path, **{"stacks/a": "o" * 512, "stacks/b": "two"})
    os.truncate(path, cut)
    answer = call(tmp_path, files, bundle=str(path))
    assert answer.get("failed"), answer
    assert f"arrived damaged in {tmp_path / 'depot'}: run again" in answer["msg"]
    assert set(tree(tmp_path / "depot")) <= {"stacks/a"}


@pytest.mark.parametrize("name", ["stacks/other", "../outside/x", "stacks/../../outside/x", "a link"])
def test_an_unrequested_name_and_a_link_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "depot").mkdir()
    path = bundle(tmp_path, **{name: "x"})
    if name == "a link":
        name, link = "stacks/a", tarfile.TarInfo("stacks/a")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        with tarfile.open(path, "w") as tar:
            tar.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(module.DamagedError, match=f"^{re.escape(name)}$"):
        module.unpack(path, tmp_path / "depot", {"stacks/a": "01"})
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_or_missing_local_files_are_not_sent(tmp_path: Path) -> None:
    (file,) = wanted(tmp_path, a="one")
    sending.check(file)
    with pytest.raises(
        FarandoleError, match=f"{file['path']} on the control machine is damaged: .*delete it and run again"
    ):
        sending.check({**file, "sha256": "0" * 64})
    Path(file["path"]).unlink()
    with pytest.raises(FarandoleError, match=f"{file['path']} does not exist on the control machine"):
        sending.check(file)


def test_files_are_not_written_through_symlinks(tmp_path: Path) -> None:
    files = wanted(tmp_path, a="one")
    (tmp_path / "depot/stacks").mkdir(parents=True)
    (tmp_path / "victim").write_text("whole")
    for name in ("a", ".a.0a1b2c3d.new"):
        (tmp_path / "depot/stacks" / name).symlink_to(tmp_path / "victim")
    sending.bundle(files, tmp_path / "bundle.tar")
    assert call(tmp_path, files, bundle=str(tmp_path / "bundle.tar"))["changed"]
    assert (tmp_path / "victim").read_text() == "whole"
    assert [path.name for path in (tmp_path / "depot/stacks").iterdir()] == ["a"]
    assert not (tmp_path / "depot/stacks/a").is_symlink()
    assert (tmp_path / "depot/stacks/a").read_text() == "one"


@pytest.fixture
def landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A landing folder separate from this machine's own, which may be a node too."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(sending, "CLEAN_UP", sending.CLEAN_UP.replace(sending.LANDING, f"{place}/farandole-landing"))
    monkeypatch.setattr(sending, "LANDING", f"{place}/farandole-landing")
    return place


class Node(action.ActionModule):  # type: ignore[misc, name-defined]
    """The action, with this machine as its node."""

    def __init__(self) -> None:
        """Work without an Ansible task."""

    def _shell(self, script: str) -> dict[str, Any]:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        return {"rc": done.returncode, "stdout": done.stdout, "stderr": done.stderr}

    def _execute_module(self, module_args: dict[str, Any], **_: Any) -> dict[str, Any]:
        return run_module("send_files", module_args)


def test_a_transfer_uses_its_own_folder_and_leaves_nothing(landing: Path) -> None:
    # Another account may own the name that earlier versions used; that does not matter.
    (landing / f"farandole-landing-{os.getuid()}").touch()
    with Node()._landing("node-1", 1) as first, Node()._landing("node-1", 1) as second:
        assert first != second
        assert Path(first).stat().st_mode & 0o777 == 0o700
        (Path(first) / "bundle.tar").touch()
    assert [path.name for path in landing.iterdir()] == [f"farandole-landing-{os.getuid()}"]
    with pytest.raises(RuntimeError), Node()._landing("node-1", 1) as folder:
        (Path(folder) / "bundle.tar").touch()
        raise RuntimeError
    assert len(list(landing.iterdir())) == 1


def test_only_leftovers_of_killed_transfers_are_removed(landing: Path, tmp_path: Path) -> None:
    old = 1_000_000_000
    for name in ("farandole-landing.0123", f"farandole-landing-{os.getuid()}", "farandole-landing.4567", "other"):
        (landing / name).mkdir()
        (landing / name / "bundle.tar").touch()
        os.utime(landing / name / "bundle.tar", (old, old))
        os.utime(landing / name, (old, old))
    # A transfer in progress: its folder is old, but the file in it still changes.
    os.utime(landing / "farandole-landing.4567/bundle.tar")
    (tmp_path / "victim").mkdir()
    (landing / "farandole-landing.89ab").symlink_to(tmp_path / "victim")
    os.utime(tmp_path / "victim", (old, old))
    with Node()._landing("node-1", 1):
        pass
    left = {path.name for path in landing.iterdir()}
    assert left == {"farandole-landing.4567", "farandole-landing.89ab", "other"}
    assert (tmp_path / "victim").exists()


def test_a_node_that_cannot_receive_files_is_reported_with_a_cure(landing: Path) -> None:
    with pytest.raises(FarandoleError, match=r"node-1 has \d+ MiB free in /var/tmp, but .* needs \d+ MiB: free some"):
        Node()._landing("node-1", 1 << 60).__enter__()
    landing.rmdir()
    with pytest.raises(
        FarandoleError,
        match=r"no files can be sent to node-1, because .* cannot be created there: mkdir: .*No such file or "
        r"directory. The login user must be able to write to /var/tmp: chmod 1777 /var/tmp",
    ):
        Node()._landing("node-1", 1).__enter__()


def test_a_copied_file_is_recorded_once_it_is_complete(tmp_path: Path) -> None:
    made, target = tmp_path / "made", tmp_path / "cache/stacks/a.tar.zst"
    made.write_text("packed")
    asked = {"path": str(made), "sha256": sha256(made), "to": str(target), "about": {"unpacked": 7}}

    def keep(*, check_mode: bool = False, **changes: str) -> dict[str, Any]:
        here = SimpleNamespace(fetch_file=shutil.copyfile)
        variables = {"inventory_hostname": "localhost"}
        return act("keep_file", {**asked, **changes}, variables, check_mode=check_mode, connection=here)

    assert keep(check_mode=True)["changed"]
    wrong = keep(sha256="0" * 64)
    assert f"from {made} of localhost is not the expected file: its sha256 is {asked['sha256']}" in wrong["msg"]
    assert f"expected {'0' * 64}. It was not kept: check that source and run again" in wrong["msg"]
    assert list(target.parent.iterdir()) == []
    answer = keep()
    built = recall_whole(target)
    assert built
    assert (answer["changed"], answer["file"], built.about) == (True, built.describe(), {"unpacked": 7})
    assert not keep()["changed"]


def test_the_newest_and_the_requested_files_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    folder.mkdir()
    for age, name in enumerate(("new", "second", "third", "old")):
        (folder / name).write_text(name)
        os.utime(folder / name, (1000 - age, 1000 - age))
    (tmp_path / "elsewhere").write_text("")
    module.sweep(tmp_path, ["stacks/old"], keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["new", "old", "second"]
    assert (tmp_path / "elsewhere").exists()


def test_a_requested_file_that_is_there_already_is_kept(landing: Path, tmp_path: Path) -> None:
    files = wanted(tmp_path, a="one", b="two")
    (tmp_path / "depot/stacks").mkdir(parents=True)
    for age, name in enumerate(("other", "a")):
        (tmp_path / "depot/stacks" / name).write_text("one")
        os.utime(tmp_path / "depot/stacks" / name, (1000 - age, 1000 - age))
    node = Node()
    node._task = SimpleNamespace(check_mode=False, no_log=False, delegate_to=None)
    node._display, node._connection = SimpleNamespace(display=print), SimpleNamespace(put_file=shutil.copyfile)
    answer = acted(node, {"directory": str(tmp_path / "depot"), "files": files, "keep": 1}, {})
    assert (answer["failed"], answer["sent"]) == (False, ["stacks/b"])
    assert stored(tmp_path) == {"stacks/a": "one", "stacks/b": "two"}
    assert list(landing.iterdir()) == []
