"""Archives as a builder packs them: layers on another stack, and what a compromised builder may try."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.core.files import sha256

from .loading import load
from .prefix import GOOD, MPI, NEW, OLD, PYTHON, archive, contents, installed, names, program, refused, request, to
from .stack import dead_url, run_module, tree

probe = load("modules", "node_probe")


def mode(path: str, bits: int) -> Callable[[Path], None]:
    return lambda made: (made / path).chmod(bits)


def link(path: str, target: str) -> Callable[[Path], None]:
    """Put a link in place of whatever is there."""

    def act(made: Path) -> None:
        there = made / path
        if there.is_dir() and not there.is_symlink():
            shutil.rmtree(there)
        there.unlink(missing_ok=True)
        there.symlink_to(target)

    return act


PYTHON_FILE = f"stacks/{NEW}/venv/bin/python"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (mode(PYTHON_FILE, 0o4755), f"'{PYTHON_FILE}' has mode 4755, which would run it as another account"),
        (mode(f"mpi/{MPI}/bin", 0o2755), f"'mpi/{MPI}/bin' has mode 2755"),
        (mode(PYTHON_FILE, 0o757), f"'{PYTHON_FILE}' has mode 0757, which lets every account change it"),
        (lambda made: os.mkfifo(made / f"stacks/{NEW}/pipe"), f"'stacks/{NEW}/pipe' is not a file, folder or link"),
        (lambda made: program(made / "incoming/x", GOOD), "'incoming' does not belong in it"),
        (lambda made: (made / "contents").touch(), "'contents' does not belong in it"),
        (link("current", f"stacks/{NEW}"), "'current' does not belong in it"),
        (lambda made: program(made / f"stacks/{OLD}/venv/bin/python", GOOD), f"'stacks/{OLD}' does not belong in it"),
        (lambda made: program(made / "mpi/another/bin/mpirun", GOOD), "'mpi/another' does not belong in it"),
        (lambda made: (made / f"mpi/{MPI}").rename(made / "mpi/another"), "'mpi/another' does not belong in it"),
        (lambda made: shutil.rmtree(made / "mpi"), "mpi is not in it"),
        (lambda made: (made / f"stacks/{NEW}/manifest.json").unlink(), "its manifest.json is not in it"),
        (link(f"stacks/{NEW}/mpi", "/etc"), "its mpi points elsewhere"),
        (link(f"stacks/{NEW}/base", f"../{OLD}"), "its base points elsewhere"),
        (link(f"stacks/{NEW}", "/opt"), f"'stacks/{NEW}' is not a folder"),
    ],
)
def test_an_archive_with_more_than_a_stack_is_refused(
    tmp_path: Path, depot: str, root: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    said = refused(request(archive(tmp_path, spoil=spoil), depot, root), root)
    assert f"the archive of stack {NEW} is refused: {reason}" in said
    assert "Nothing in it was used" in said


LAYER = "cccc00000000"


def layer(tmp_path: Path, spoil: Callable[[Path], object] = Path.exists, python: str = PYTHON) -> Path:
    """A stack with nothing but packages, which uses another one."""
    made, packed = tmp_path / "layer", tmp_path / "depot" / "layer.tar.zst"
    shutil.rmtree(made, ignore_errors=True)
    stack = made / "stacks" / LAYER
    program(stack / "venv/bin/python", python)
    (stack / "mpi").symlink_to(f"../../mpi/{MPI}")
    (stack / "base").symlink_to(f"../{NEW}")
    contents.write(stack)
    (stack / "manifest.json").write_text("{}")
    spoil(made)
    subprocess.run(["tar", "-C", made, "--zstd", "-cf", packed, *names(made)], check=True)
    return packed


def test_a_layer_is_installed_on_its_base(tmp_path: Path, depot: str, root: Path) -> None:
    run_module("stack_install", request(archive(tmp_path), depot, root))
    before = tree(root)
    asked = request(layer(tmp_path), depot, root, id=LAYER, base=NEW)
    assert run_module("stack_install", asked)["changed"]
    after = tree(root)
    assert after.items() >= before.items()
    assert set(after) - set(before) == {
        f"stacks/{LAYER}/{name}" for name in ("base", "contents", "manifest.json", "mpi", "venv/bin/python")
    }
    assert not run_module("stack_install", {**asked, "url": dead_url()})["changed"]
    assert to(root, LAYER, keep=1)["changed"]
    # The base stays, although only one stack is to be kept.
    assert names(root / "stacks") == [NEW, LAYER]
    assert run_module("stack_proof", {"root": str(root)})["proven"] is True


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda made: program(made / "mpi" / MPI / "bin/mpirun", GOOD), "'mpi' does not belong in it"),
        (lambda made: program(made / "stacks" / NEW / "venv/bin/python", GOOD), f"'stacks/{NEW}' does not belong in"),
        (lambda made: (made / f"stacks/{LAYER}/base").unlink(), "its base points elsewhere"),
        (link(f"stacks/{LAYER}/base", f"../{OLD}"), "its base points elsewhere"),
    ],
    ids=["mpi", "base", "no base", "another base"],
)
def test_an_archive_with_more_than_a_layer_is_refused(
    tmp_path: Path, depot: str, root: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    run_module("stack_install", request(archive(tmp_path), depot, root))
    said = refused(request(layer(tmp_path, spoil), depot, root, id=LAYER, base=NEW), root)
    assert f"the archive of stack {LAYER} is refused: {reason}" in said


def test_a_damaged_base_is_installed_again_and_the_layer_stays(tmp_path: Path, depot: str, root: Path) -> None:
    asked = request(archive(tmp_path), depot, root)
    run_module("stack_install", asked)
    run_module("stack_install", request(layer(tmp_path), depot, root, id=LAYER, base=NEW))
    to(root, LAYER)
    file = root / "stacks" / NEW / "venv/bin/python"
    file.chmod(0o700)
    difference = f"in stacks/{NEW}, venv/bin/python has mode 0700 instead of 0755"
    assert contents.drift(root, LAYER) == contents.drift(root, NEW) == [difference]
    assert run_module("stack_proof", {"root": str(root)})["wrong"].startswith(f"in stacks/{NEW}, venv/bin/python has")
    assert probe.stacks(root) == {"current": LAYER, "former": "", "installed": [], "late": False, "left": False}
    assert run_module("stack_install", asked)["changed"]
    assert probe.stacks(root) == {
        "current": LAYER,
        "former": "",
        "installed": [NEW, LAYER],
        "late": False,
        "left": False,
    }
    file.chmod(0o700)
    assert f"stack {LAYER} is damaged" in to(root, LAYER, verify=True)["msg"]
    # Neither counts as installed any more.
    assert list(root.glob("stacks/*/manifest.json")) == []


def members(*made: tuple[str, str, bytes, str]) -> bytes:
    """A tar that the tar program would not write: kind, name, content, link target."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for kind, name, content, target in made:
            about = tarfile.TarInfo(name)
            about.type = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}[kind]
            about.size, about.linkname, about.mode = len(content), target, 0o644
            tar.addfile(about, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize(
    "made",
    [
        [("file", "../../planted", b"x", "")],
        [("file", "/{outside}/planted", b"x", "")],
        [("link", f"stacks/{NEW}/way", b"", "{outside}"), ("file", f"stacks/{NEW}/way/planted", b"x", "")],
        [("link", f"stacks/{NEW}/way", b"", "../../../../.."), ("file", f"stacks/{NEW}/way/planted", b"x", "")],
        [("link", "stacks", b"", "{outside}"), ("file", f"stacks/{NEW}/planted", b"x", "")],
        [("hard", f"stacks/{NEW}/secret", b"", "{outside}/secret")],
        [("link", "a", b"", "{outside}"), ("hard", f"stacks/{NEW}/secret", b"", "a/secret")],
    ],
    ids=["up", "absolute", "by a link", "by a link up", "stacks is a link", "hard", "hard by a link"],
)
def test_nothing_outside_is_written_or_read(
    tmp_path: Path, depot: str, root: Path, made: list[tuple[str, str, bytes, str]]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("root's")
    there = str(outside)
    filled = [
        (kind, name.replace("{outside}", there), content, target.replace("{outside}", there))
        for kind, name, content, target in made
    ]
    packed = tmp_path / "depot/stack.tar.zst"
    subprocess.run(["zstd", "-q", "-o", packed], input=members(*filled), check=True)
    answer = run_module("stack_install", request(packed, depot, root))
    assert answer["failed"]
    assert "cannot be unpacked" in answer["msg"] or "is refused" in answer["msg"]
    assert list(tmp_path.rglob("planted")) == []
    assert names(outside) == ["secret"]
    assert (outside / "secret").stat().st_nlink == 1
    assert names(root) == ["mpi", "stacks"]
    assert names(root / "stacks") == names(root / "mpi") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_root_runs_nothing_from_an_archive(tmp_path: Path, depot: str) -> None:
    """mpirun and python here succeed only as nobody, without root's environment or access to root's folders."""
    nobody = '[ "$(id -u) $(id -G)" = "65534 65534" ] && [ -z "$SECRET" ] && [ "$PWD" = / ] && exit 0; id; env; exit 1'
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        root.chmod(0o755)
        packed = archive(tmp_path, nobody, nobody)
        answer = run_module("stack_install", request(packed, depot, root, user="nobody"), SECRET="1")  # noqa: S106
        assert answer["changed"], answer
        shutil.rmtree(root / "stacks")
        answer = run_module("stack_install", request(packed, depot, root, user="root"))
        assert "does not run here" in answer["msg"]
        assert "uid=0(root)" in answer["msg"]
        answer = run_module("stack_install", request(packed, depot, root, user="no-such-account"))
        assert "there is no account no-such-account here" in answer["msg"]


# Only what has changed


def changes(
    tmp_path: Path, depot: str, root: Path, *taken: str, spoil: Callable[[Path], object] = Path.exists
) -> tuple[Path, dict[str, Any]]:
    """The archive of a stack without what a former one has, and what the role says of it."""
    whole = archive(tmp_path)
    made, packed = tmp_path / "made", whole.with_name("changes.tar.zst")
    former = root / "stacks" / OLD
    (former / "venv/lib").mkdir(parents=True)
    for path, place in {"python": f"stacks/{NEW}/venv/bin/python", "mpirun": f"mpi/{MPI}/bin/mpirun"}.items():
        if path in taken:
            shutil.copy2(made / place, former / "venv/lib" / path)
    installed(root, OLD, mpi="another")
    command = [sys.executable, "-I", str(contents.__file__), "--beside", str(former), f"stacks/{NEW}", f"mpi/{MPI}"]
    listed = subprocess.run(command, cwd=made, check=True, capture_output=True).stdout
    for path in taken:
        assert path.encode() not in listed
    spoil(made)
    options = ("--zstd", "--no-recursion", "--null", "--verbatim-files-from", "-T-", "-cf", str(packed))
    subprocess.run(["tar", "-C", str(made), *options], input=listed, check=True)
    asked = {
        "former": OLD, "whole": {**file_of(whole), "url": f"{depot}/{whole.name}"},
        "contents": {name: contents.digest(contents.listed(made / name)) for name in (f"stacks/{NEW}", f"mpi/{MPI}")},
    }  # fmt: skip
    return packed, asked


def file_of(path: Path) -> dict[str, Any]:
    return {"sha256": sha256(path), "size": path.stat().st_size}


def as_packed(made: Path) -> None:
    """Set the times of all files to that of an archive."""
    for path in made.rglob("*"):
        os.utime(path, (contents.PACKED_S, contents.PACKED_S), follow_symlinks=False)


def test_a_stack_is_completed_with_what_another_one_has(tmp_path: Path, depot: str, root: Path) -> None:
    packed, asked = changes(tmp_path, depot, root, "python", "mpirun", spoil=as_packed)
    answer = run_module("stack_install", request(packed, depot, root, **asked))
    assert answer["changed"], answer
    assert not answer.get("warnings")
    assert contents.drift(root, NEW) == []
    came, made = tree(root / "stacks" / NEW), tree(tmp_path / "made/stacks" / NEW)
    # A change is not hidden by whatever touches all files afterwards, the manifest last, and leaves their times.
    changed = root / "stacks" / NEW / "venv/bin/python"
    before = changed.read_bytes()
    for content, found in ((b"other", ["has different content"]), (before, [])):
        changed.write_bytes(content)
        for path in sorted(root.rglob("*"), key=lambda path: path.name == "manifest.json"):
            os.utime(path, ns=(0, path.lstat().st_mtime_ns), follow_symlinks=False)
        assert [problem[-21:] for problem in contents.drift(root, NEW)] == found
    assert {path: text for path, (_, text) in came.items()} == {path: text for path, (_, text) in made.items()}
    # A file that both stacks had would be changed in both.
    assert {path.stat().st_nlink for path in root.rglob("*") if path.is_file()} == {1}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda former: (former / "venv/lib/python").write_text("other"), "venv/bin/python has different content"),
        (lambda former: (former / "venv/lib/python").unlink(), "No such file"),
        (lambda former: (former / "contents").write_text(""), "does not have 'venv/bin/python'"),
        (lambda former: shutil.rmtree(former), "does not have 'venv/bin/python'"),
    ],
    ids=["changed", "gone", "unlisted", "no stack"],
)
def test_the_whole_stack_is_fetched_where_the_former_one_is_of_no_use(
    tmp_path: Path, depot: str, root: Path, spoil: Callable[[Path], object], why: str
) -> None:
    packed, asked = changes(tmp_path, depot, root, "python")
    spoil(root / "stacks" / OLD)
    answer = run_module("stack_install", request(packed, depot, root, **asked))
    assert answer["changed"], answer
    assert why in str(answer["warnings"]), answer["warnings"]
    assert contents.drift(root, NEW) == []


def lie(path: str) -> Callable[[Path], object]:
    """Add a file to the list of a stack that is nowhere in it."""

    def act(made: Path) -> None:
        listed = made / "stacks" / NEW / "contents"
        what = sha256(made / PYTHON_FILE)
        listed.write_text(f'{listed.read_text()}["{path}", "file", "0755", "{what}"]\n')
        (made / "stacks" / NEW / "mpi").unlink()
        (made / "stacks" / NEW / "mpi").symlink_to(made.parent / "outside")

    return act


@pytest.mark.parametrize(
    "path", ["../../../outside/evil", "mpi/evil", "/{}/outside/evil", "venv/../../evil", "..", "."]
)
def test_a_list_leads_to_no_file_outside(tmp_path: Path, depot: str, root: Path, path: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    packed, asked = changes(tmp_path, depot, root, "python", spoil=lie(path.format(str(tmp_path)[1:])))
    answer = run_module("stack_install", request(packed, depot, root, **asked))
    assert answer["changed"], answer
    assert "leads to elsewhere" in str(answer["warnings"]) or path in ("..", ".")
    assert not [*outside.iterdir(), *root.rglob("evil"), *tmp_path.glob("evil")]
    assert contents.drift(root, NEW) == []
