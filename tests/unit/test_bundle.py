"""`farandole bundle`: the archive has what the lock names, and nothing that is private."""

import subprocess
import tarfile
from pathlib import Path

import pytest

from farandole.cli import bundle
from farandole.core.errors import FarandoleError

from .stack import LOCK


def test_the_archive_is_written_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "run").touch(0o700)
    output = tmp_path / "bundle.tar"
    bundle.pack(output, {f"farandole/{name}": tmp_path / name for name in ("one", "link", "run")})
    with tarfile.open(output) as tar:
        members = {member.name: (member.mode, member.uid, member.uname, member.issym()) for member in tar}
    assert members == {
        "farandole/one": (0o644, 0, "root", False),
        "farandole/link": (0o755, 0, "root", True),
        "farandole/run": (0o755, 0, "root", False),
        "farandole/bundle/env": (0o644, 0, "root", False),
    }
    with pytest.raises(FarandoleError, match=r"none/bundle.tar cannot be written: No such file or dir"):
        bundle.pack(tmp_path / "none/bundle.tar", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.tar", "link", "one", "run"]


def test_the_files_are_those_of_the_lock(tmp_path: Path) -> None:
    place = "farandole/bundle/cache/farandole"
    files = bundle.cached(LOCK, tmp_path, tmp_path / "sources/openmpi.tar.bz2")
    wheels = [f"{place}/wheels/{wheel['file']}" for wheel in LOCK["wheels"]]
    assert list(files) == [*wheels, f"{place}/sources/openmpi.tar.bz2"]


def test_only_what_git_tracks_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"farandole/README.md", "farandole/Makefile"} <= bundle.project().keys()
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    for name in ("tracked", "private"):
        (tmp_path / name).touch()
    subprocess.run(["git", "-C", tmp_path, "add", "tracked"], check=True)
    monkeypatch.setattr(bundle, "ROOT", tmp_path)
    assert bundle.project() == {"farandole/tracked": tmp_path / "tracked"}
    monkeypatch.setattr(bundle, "ROOT", tmp_path / "none")
    with pytest.raises(FarandoleError, match="is not a git checkout"):
        bundle.project()


def test_without_a_lock_there_is_nothing_to_carry(tmp_path: Path) -> None:
    with pytest.raises(FarandoleError, match=r"there is no .*stack.lock.yml: run  farandole lock -i "):
        bundle.bundle(tmp_path)
