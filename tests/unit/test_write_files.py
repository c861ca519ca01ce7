"""The module write_files, run as on a node, with real files."""

import grp
import os
import pwd
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .loading import load
from .stack import run_module

folders = load("module_utils", "folders")
ME = pwd.getpwuid(os.geteuid()).pw_name
# The validation that role ssh_trust uses.
CHECK = "ssh -G -F %s localhost"


def wanted(path: Path, content: str, **more: str) -> dict[str, str]:
    return {"path": str(path), "content": content, "owner": ME, **more}


def run(*files: dict[str, str], check_mode: bool = False, sweep: Sequence[Path] = ()) -> tuple[int, dict[str, Any]]:
    arguments = {"files": files, "sweep": [str(path) for path in sweep]}
    answer = run_module("write_files", arguments, check_mode=check_mode)
    return int(answer.get("failed", False)), answer


def state(folder: Path) -> dict[Path, tuple[str, int, int]]:
    """Content, mode and inode of every file; a rewritten file has another inode, even with equal content."""
    return {path: (path.read_text(), path.stat().st_mode, path.stat().st_ino) for path in folder.iterdir()}


def test_writes_only_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    files = wanted(folder / "b", "two\n"), wanted(folder / "a", "öne\n")
    code, result = run(*files)
    assert (code, result["changed"]) == (0, True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "öne\n", "b": "two\n"}
    assert {path.stat().st_mode & 0o7777 for path in folder.iterdir()} == {0o644}
    before = state(folder)
    code, result = run(*files)
    assert (code, result["changed"], result["written"], result["diff"]) == (0, False, [], [])
    assert state(folder) == before
    _, result = run(files[0], wanted(folder / "a", "other\n"))
    assert result["written"] == [str(folder / "a")]
    assert state(folder)[folder / "b"] == before[folder / "b"]
    assert (folder / "a").read_text() == "other\n"


def test_folders_are_open_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folders.put(tmp_path / "made/here/a", "text")
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "made", tmp_path / "made/here")} == {0o755}


def test_check_mode_writes_nothing_and_shows_a_diff(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "made" / "new"
    there.write_text("old\n")
    before = state(tmp_path)
    # Neither the owner nor the folder need be there yet.
    files = wanted(there, "new\n"), wanted(new, "first\n", owner="no-such-user")
    code, result = run(*files, check_mode=True, sweep=[tmp_path / "own"])
    assert (code, result["changed"], result["swept"]) == (0, True, [])
    assert result["written"] == [str(there), str(new)]
    assert [(change["after_header"], change["before"], change["after"]) for change in result["diff"]] == [
        (str(there), "old\n", "new\n"),
        (str(new), "", "first\n"),
    ]
    assert state(tmp_path) == before


def test_an_invalid_file_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "ssh.conf"
    run(wanted(path, "User new\n", validate=CHECK))
    assert [(file, file.read_text()) for file in tmp_path.iterdir()] == [(path, "User new\n")]
    before = state(tmp_path)
    code, result = run(wanted(path, "Colour blue\n", validate=CHECK))
    assert (code, result["failed"]) == (1, True)
    assert result["msg"].startswith(f"{path} was not written, because its validation failed: ")
    assert "Bad configuration option: colour" in result["msg"]
    assert state(tmp_path) == before


def test_a_file_is_private_until_it_is_in_place(tmp_path: Path) -> None:
    run(wanted(tmp_path / "a", "secret", mode="0640", validate=f"cp --preserve=mode %s {tmp_path}/seen"))
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"a": 0o640, "seen": 0o600}


def test_nothing_is_written_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("whole")
    for name in ("a", ".a.0a1b2c3d.new"):
        (tmp_path / name).symlink_to("victim")
    run(wanted(tmp_path / "a", "text"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "text", "victim": "whole"}


def test_the_newer_of_two_concurrent_writers_wins(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), folders.replacing(tmp_path / "a[b]") as older:
        older.write(b"old")
        with folders.replacing(tmp_path / "a[b]") as newer:
            newer.write(b"new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a[b]": "new"}


def test_the_order_is_kept(tmp_path: Path) -> None:
    first, second, bad, never = (tmp_path / name for name in ("z", "a", "m", "b"))
    code, _ = run(
        wanted(first, "same"),
        # Valid only after the first file is in place.
        wanted(second, "same", validate=f"cmp {first} %s"),
        wanted(bad, "", validate="false %s"),
        wanted(never, ""),
    )
    assert code == 1
    assert sorted(tmp_path.iterdir()) == [second, first]


def test_the_mode_is_corrected_even_if_the_content_is_right(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for mode, changed in (("0600", True), ("0755", True), ("0755", False)):
        _, result = run(wanted(path, "text", mode=mode))
        assert (path.stat().st_mode & 0o7777, result["changed"]) == (int(mode, 8), changed)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("to", "name"), [("owner", "nobody"), ("group", "daemon")])
def test_a_file_gets_its_owner_and_group(tmp_path: Path, to: str, name: str) -> None:
    path, nobody = tmp_path / "a", pwd.getpwnam("nobody")
    # By default the owner's group.
    owned = (nobody.pw_uid, nobody.pw_gid) if to == "owner" else (0, grp.getgrnam(name).gr_gid)
    run(wanted(path, "text"))
    for changed in (True, False):
        _, result = run(wanted(path, "text") | {to: name})
        assert (path.stat().st_uid, path.stat().st_gid) == owned
        assert result["changed"] is changed


def test_a_missing_group_is_named(tmp_path: Path) -> None:
    file = wanted(tmp_path / "a", "", group="no-such-group")
    code, result = run(file)
    assert (code, result["msg"]) == (1, "there is no group no-such-group to own the files")
    code, result = run(file, check_mode=True)
    assert (code, result["changed"]) == (0, True)


def test_other_files_in_a_swept_folder_are_removed(tmp_path: Path) -> None:
    folder, kept = tmp_path / "own", tmp_path / "own/jobs/kept"
    run(
        wanted(kept, "1"),
        wanted(folder / "old", "1"),
        wanted(folder / "gone/deep/old", "1"),
        wanted(tmp_path / "b", ""),
    )
    (folder / "link").symlink_to(tmp_path)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/kept.pyc").touch()
    others = [str(folder / name) for name in ("gone/deep/old", "link", "old")]
    for check_mode in (True, False):
        _, result = run(wanted(kept, "1"), check_mode=check_mode, sweep=[folder])
        assert (result["changed"], result["written"], result["swept"]) == (True, [], others)
    left = ["b", "own", "own/__pycache__", "own/__pycache__/kept.pyc", "own/jobs", "own/jobs/kept"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == left
    _, result = run(wanted(kept, "1"), sweep=[folder])
    assert (result["changed"], result["swept"]) == (False, [])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "@a ours\n@b ours\n"),
        ("", "@a ours\n@b ours\n"),
        ("theirs\n", "theirs\n@a ours\n@b ours\n"),
        ("theirs", "theirs\n@a ours\n@b ours\n"),
        ("one\n@old ours\n\n@older ours\n# two\n", "one\n@a ours\n@b ours\n\n# two\n"),
        ("@old ours\nours\n@x ours too\n", "@a ours\n@b ours\nours\n@x ours too\n"),
    ],
)
def test_only_our_own_lines_change(tmp_path: Path, before: str | None, after: str) -> None:
    path = tmp_path / "a"
    if before is not None:
        path.write_text(before)
    file = wanted(path, "@a ours\n@b ours\n", own="^@.* ours$")
    code, result = run(file, check_mode=True)
    assert (code, result["changed"], result["diff"][0]["after"]) == (0, True, after)
    for changed in (True, False):
        code, result = run(file)
        assert (code, result["changed"]) == (0, changed)
        assert path.read_text() == after
