"""The archive with Intel Caffe: what the control machine checks, and what a node unpacks or refuses."""

import hashlib
import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.stack import caffe as archives

from .stack import dead_url, run_module, tree


def packed(path: Path, *members: tuple[str, str], compress: str = "gz") -> Path:
    """A tar of members, each a name and its text; one that begins with -> is a link, => a hard link, || a pipe."""
    mode: Any = f"w:{compress}"
    with tarfile.open(path, mode) as tar:
        for name, text in members:
            member = tarfile.TarInfo(name)
            member.mode, member.uid, member.gid = 0o6777, 1234, 1234
            if kind := {"->": tarfile.SYMTYPE, "=>": tarfile.LNKTYPE, "||": tarfile.FIFOTYPE}.get(text[:2]):
                member.type, member.linkname = kind, text[2:]
            else:
                member.size = len(text)
            tar.addfile(member, None if kind else io.BytesIO(text.encode()))
    return path


WHOLE = (("bin/caffe", "program"), ("lib/libmlsl.so.1", "library"), ("lib/libmlsl.so", "->libmlsl.so.1"))


def request(tmp_path: Path, url: str, *members: tuple[str, str], compress: str = "gz") -> dict[str, Any]:
    file = packed(tmp_path / "depot/caffe.tar", *members, compress=compress)
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"url": f"{url}/caffe.tar", "sha256": digest, "size": len(content), "root": str(tmp_path / "opt/caffe")}


@pytest.mark.parametrize("compress", ["", "gz", "bz2", "xz"])
def test_an_archive_is_installed_once(tmp_path: Path, depot: str, compress: str) -> None:
    asked = request(tmp_path, depot, *WHOLE, compress=compress)
    assert run_module("caffe_install", asked, check_mode=True)["changed"]
    assert not (tmp_path / "opt").exists()
    assert run_module("caffe_install", asked)["changed"]
    root = Path(asked["root"])
    assert str((root / "current").readlink()) == asked["sha256"][:16]
    program = root / "current/bin/caffe"
    assert program.read_text() == "program"
    about = program.stat()
    assert (stat.S_IMODE(about.st_mode), about.st_uid) == (0o755, os.geteuid())
    assert (root / "current/lib/libmlsl.so").read_text() == "library"
    assert (root / "abi/libmpi.so.12").is_symlink()
    before = tree(root)
    assert not run_module("caffe_install", {**asked, "url": dead_url()})["changed"]
    assert tree(root) == before


def test_the_one_before_stays_and_older_ones_go(tmp_path: Path, depot: str) -> None:
    names = []
    for number in range(3):
        asked = request(tmp_path, depot, *WHOLE, ("number", str(number)))
        run_module("caffe_install", asked)
        names.append(asked["sha256"][:16])
    root = Path(asked["root"])
    assert {path.name for path in root.iterdir()} == {*names[1:], "current", "abi", ".lock"}
    assert str((root / "current").readlink()) == names[2]
    # Jobs may still use the one before when the present one is mended.
    (root / "current/bin/caffe").write_text("other")
    assert run_module("caffe_install", asked)["changed"]
    assert {path.name for path in root.iterdir()} == {*names[1:], "current", "abi", ".lock"}
    # One in a folder, which is left out, and mended once it was changed.
    asked = request(tmp_path, depot, *((f"./intel_caffe/{name}", text) for name, text in WHOLE))
    for content in ("program", "other"):
        (root / "current/bin/caffe").write_text(content)
        assert run_module("caffe_install", asked)["changed"]
        assert (root / "current/bin/caffe").read_text() == "program"


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("lib/x", "y")], "there is no bin/caffe in it"),
        ([("a/bin/caffe", "x"), ("b", "y")], "there is no bin/caffe in it"),
        ([*WHOLE, ("../evil", "x")], "'../evil' leads out of it"),
        ([*WHOLE, ("/etc/evil", "x")], "'/etc/evil' leads out of it"),
        ([*WHOLE, ("lib/a/../../../evil", "x")], "leads out of it"),
        ([*WHOLE, ("lib/x", "->/etc/passwd")], "'/etc/passwd' leads out of it"),
        ([*WHOLE, ("lib/x", "->../../evil")], "leads out of it"),
        ([*WHOLE, ("a/b/s", "->../../lib"), ("x", "->a/b/s/../../y")], "the link 'x' leads out of it"),
        ([("a/bin/caffe", "x"), ("a/x", "->../y")], "the link 'a/x' leads out of it"),
        ([*WHOLE, ("lib/x", "=>/etc/passwd")], "'/etc/passwd' leads out of it"),
        ([*WHOLE, ("lib/x", "=>lib/gone")], "'lib/x' is a hard link to something outside"),
        ([*WHOLE, ("a", "->lib"), ("a/x", "y")], "'a/x' would be written through the link 'a'"),
        ([*WHOLE, ("bin/caffe", "other")], "'bin/caffe' is in it twice"),
        ([*WHOLE, ("lib/x", "||")], "'lib/x' is not a file, folder or link"),
        ([("bin/caffe", "->../lib/gone"), ("lib/x", "y")], "its bin/caffe is not a program"),
    ],
)
def test_an_unsafe_archive_is_refused_and_changes_nothing(
    tmp_path: Path, depot: str, members: list[tuple[str, str]], said: str
) -> None:
    good = request(tmp_path, depot, *WHOLE)
    run_module("caffe_install", good)
    before = set(tree(Path(good["root"])))
    answer = run_module("caffe_install", request(tmp_path, depot, *members))
    assert "caffe_archive is refused: " in answer["msg"]
    assert said in answer["msg"]
    assert "what was installed before stays" in answer["msg"]
    assert set(tree(Path(good["root"]))) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["depot", "opt"]


def test_what_is_no_archive_is_refused(tmp_path: Path, depot: str) -> None:
    asked = request(tmp_path, depot, *WHOLE)
    (tmp_path / "depot/caffe.tar").write_bytes(b"no tar")
    digest = hashlib.sha256(b"no tar").hexdigest()
    assert "caffe_archive is refused" in run_module("caffe_install", {**asked, "sha256": digest, "size": 6})["msg"]
    assert "is damaged" in run_module("caffe_install", {**asked, "size": 6})["msg"]


def test_the_archive_is_checked_on_the_control_machine(tmp_path: Path) -> None:
    file = packed(tmp_path / "caffe.tgz", *WHOLE)
    good = hashlib.sha256(file.read_bytes()).hexdigest()
    described = archives.archive("caffe.tgz", good, str(tmp_path))
    assert described == {
        "path": str(file), "name": f"caffe/{good[:16]}.tar", "sha256": good, "size": file.stat().st_size
    }  # fmt: skip
    with pytest.raises(FarandoleError, match="caffe_sha256 is empty"):
        archives.archive(str(file), "", "")
    with pytest.raises(FarandoleError, match=f"is {good}, but caffe_sha256 is {'0' * 64}"):
        archives.archive(str(file), "0" * 64, "")
    with pytest.raises(FarandoleError, match="is not a file on the control machine"):
        archives.archive("gone", good, str(tmp_path))
