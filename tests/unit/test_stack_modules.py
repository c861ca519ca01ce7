"""stack_install and stack_switch as a node runs them, with real archives from a real depot."""

from __future__ import annotations

import fcntl
import getpass
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.core.files import sha256

from .loading import ROOT, load
from .stack import Endless, NotHttp, Truncates, dead_url, run_module, served, tree

install, switch = load("modules", "stack_install"), load("modules", "stack_switch")
probe = load("modules", "node_probe")
contents, unprivileged = load("module_utils", "contents"), load("module_utils", "unprivileged")

NEW, OLD = "aaaa00000000", "bbbb00000000"
MPI = "0123456789ab"
GOOD = "exit 0"
PYTHON = f'exec {shlex.quote(sys.executable)} "$@"'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "opt"


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "depot").mkdir()
    with served(tmp_path / "depot") as url:
        yield url


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def archive(
    tmp_path: Path, mpirun: str = GOOD, python: str = PYTHON, spoil: Callable[[Path], object] = Path.exists
) -> Path:
    """A stack packed as by a builder, or as by a compromised builder."""
    made, packed = tmp_path / "made", tmp_path / "depot" / "stack.tar.zst"
    shutil.rmtree(made, ignore_errors=True)
    stack = made / "stacks" / NEW
    program(made / "mpi" / MPI / "bin/mpirun", mpirun)
    (stack / "venv/bin").mkdir(parents=True)
    if python:
        program(stack / "venv/bin/python", python)
    (stack / "mpi").symlink_to(f"../../mpi/{MPI}")
    for folder in (stack, made / "mpi" / MPI):
        contents.write(folder)
    (stack / "manifest.json").write_text("{}")
    spoil(made)
    subprocess.run(["tar", "-C", made, "--zstd", "-cf", packed, *names(made)], check=True)
    return packed


def request(packed: Path, depot: str, root: Path, **more: Any) -> dict[str, Any]:
    """The arguments of the role."""
    size = packed.stat().st_size
    asked = {"id": NEW, "url": f"{depot}/{packed.name}", "sha256": sha256(packed), "size": size, "unpacked": 10 * size}
    asked |= {"mpi": MPI, "user": getpass.getuser()}
    return {**asked, "modules": ["json", "tarfile"], "root": str(root), **more}


def test_a_stack_is_installed_once(tmp_path: Path, depot: str, root: Path) -> None:
    asked = request(archive(tmp_path), depot, root)
    answer = run_module("stack_install", asked)
    assert answer["changed"]
    assert set(answer["seconds"]) == {"fetch", "unpack", "prove"}
    before = tree(root)
    assert set(before) == {
        f"mpi/{MPI}/bin/mpirun",
        f"mpi/{MPI}/contents",
        f"stacks/{NEW}/contents",
        f"stacks/{NEW}/venv/bin/python",
        f"stacks/{NEW}/mpi",
        f"stacks/{NEW}/manifest.json",
    }
    assert names(root) == ["mpi", "stacks"]
    again = run_module("stack_install", {**asked, "url": dead_url()})
    assert not again["changed"]
    assert tree(root) == before


def rewrite(stack: Path) -> None:
    """Change a file's content, but neither its size nor its times."""
    file = stack / "venv/bin/python"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(file.read_text().swapcase())
    os.utime(file, ns=times)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewrite, f"in stacks/{NEW}, venv/bin/python has different content"),
        (lambda stack: (stack / "venv/bin/python").chmod(0o700), "venv/bin/python has mode 0700 instead of 0755"),
        (lambda stack: (stack / "venv/bin/python").unlink(), "venv/bin/python is missing"),
        (lambda stack: (stack / "venv/bin/more").touch(), "venv/bin/more is unexpected"),
        (lambda stack: (stack / "mpi/bin/mpirun").write_text("x"), f"in mpi/{MPI}, bin/mpirun has different content"),
        (lambda stack: shutil.rmtree((stack / "mpi").resolve()), f"{MPI} is missing"),
    ],
)
def test_a_changed_stack_is_found_and_installed_again(
    tmp_path: Path, depot: str, root: Path, change: Callable[[Path], object], words: str
) -> None:
    asked = request(archive(tmp_path), depot, root)
    assert run_module("stack_install", asked)["changed"]
    stack = root / "stacks" / NEW
    before = {path: text for path, (_, text) in tree(root).items()}
    assert contents.drift(root, NEW) == []
    change(stack)
    assert words in "; ".join(contents.drift(root, NEW))
    predicted = run_module("stack_install", asked, check_mode=True)
    assert predicted["changed"]
    assert words in str(predicted["warnings"])
    assert run_module("stack_install", asked)["changed"]
    assert {path: text for path, (_, text) in tree(root).items()} == before
    assert contents.drift(root, NEW) == []


def test_a_stack_that_was_touched_but_not_changed_stays(tmp_path: Path, depot: str, root: Path) -> None:
    asked = request(archive(tmp_path), depot, root)
    run_module("stack_install", asked)
    (root / "stacks" / NEW / "venv/bin/python").touch()
    assert contents.touched(root / "stacks" / NEW, (root / "stacks" / NEW / "manifest.json").stat().st_ctime_ns)
    assert not run_module("stack_install", asked)["changed"]


def test_check_mode_installs_nothing(tmp_path: Path, depot: str, root: Path) -> None:
    assert run_module("stack_install", request(archive(tmp_path), depot, root), check_mode=True)["changed"]
    assert not root.exists()


def refused(asked: dict[str, Any], root: Path) -> str:
    """The message of a refusal, which must leave nothing behind."""
    before = tree(root)
    answer = run_module("stack_install", asked)
    assert answer.get("failed")
    assert tree(root) == before
    assert not (root / "incoming").exists()
    return str(answer["msg"])


def test_an_archive_with_another_sha256_is_not_unpacked(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path)
    wanted = "0" * 64
    words = refused(request(packed, depot, root, sha256=wanted), root)
    assert f"{depot}/stack.tar.zst is damaged: its sha256 is {sha256(packed)}, expected {wanted}" in words


def test_an_archive_truncated_before_packing_is_refused(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path)
    os.truncate(packed, packed.stat().st_size // 2)
    assert "the stack cannot be unpacked to" in refused(request(packed, depot, root), root)


def test_an_incomplete_download_is_not_unpacked(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path)
    with served(tmp_path / "depot", Truncates) as broken:
        assert "bytes before the end" in refused(request(packed, broken, root), root)
    with served(tmp_path / "depot", Endless) as endless:
        assert f"is longer than {packed.stat().st_size} bytes" in refused(request(packed, endless, root), root)
    assert run_module("stack_install", request(packed, depot, root))["changed"]


def test_an_unreachable_depot_is_reported_with_the_cure(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path)
    with served(tmp_path / "depot", NotHttp) as other:
        for url, why in ((dead_url(), "connection refused"), (f"{depot}/no", "File not found"), (other, "220 mail")):
            words = refused(request(packed, url, root), root)
            assert f"{url}/stack.tar.zst cannot be fetched: " in words
            assert why in words
            assert "systemctl status farandole-depot on the head" in words


def test_the_depot_is_not_fetched_through_a_proxy(tmp_path: Path, depot: str, root: Path) -> None:
    assert run_module("stack_install", request(archive(tmp_path), depot, root), http_proxy=dead_url())["changed"]


@pytest.mark.parametrize(
    ("mpirun", "python", "module", "words"),
    [
        ("echo libz.so.1: cannot open >&2; exit 127", PYTHON, "json", "mpirun --version: libz.so.1: cannot open"),
        (GOOD, PYTHON, "no_such_module", "No module named 'no_such_module'"),
        (GOOD, "", "json", "venv/bin/python -c import json; import json: [Errno 2] No such file"),
    ],
    ids=["mpirun", "module", "python"],
)
def test_a_stack_that_does_not_run_is_refused(
    tmp_path: Path, depot: str, root: Path, mpirun: str, python: str, module: str, words: str
) -> None:
    installed(root, OLD, mpi="another")
    (root / "current").symlink_to(f"stacks/{OLD}")
    packed = archive(tmp_path, mpirun, python)
    answer = run_module("stack_install", request(packed, depot, root, modules=["json", module]))
    assert "the stack was unpacked but does not run here, so it is not used: " in answer["msg"]
    assert words in answer["msg"]
    assert not (root / "stacks" / NEW / "manifest.json").exists()
    assert (root / "current").readlink() == Path("stacks") / OLD
    assert not (root / "incoming").exists()


def test_tensorflow_is_loaded_last(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path, python='echo "$2"; exit 1')
    modules = ["horovod.tensorflow", "horovod.torch", "torchvision"]
    said = run_module("stack_install", request(packed, depot, root, modules=modules))["msg"]
    assert "\nimport" not in said
    assert ": import horovod.torch; import torchvision; import horovod.tensorflow\nIt ended with status 1." in said


CRASH = f"exec {shlex.quote(sys.executable)} -c 'import ctypes; ctypes.string_at(0)'"


@pytest.mark.parametrize(
    ("program", "words", "ending"),
    [
        ("seq 9999; echo $'\\033[31m'the reason; exit 3", "9999\n", "the reason\nIt ended with status 3."),
        ("echo before; kill -KILL $$", "before", "\nIt was killed by SIGKILL."),
        ("kill -KILL $$", "it printed nothing.", "\nIt was killed by SIGKILL."),
        ("sh -c 'kill -SEGV $$'; exit $?", "", "\nIt ended with status 139, as a shell says of SIGSEGV."),
        (CRASH, "", "\nIt was killed by SIGSEGV."),
    ],
    ids=["status", "killed", "silent", "shell", "crash"],
)
def test_a_stack_that_does_not_run_says_how_its_program_ended(
    tmp_path: Path, depot: str, root: Path, program: str, words: str, ending: str
) -> None:
    said = run_module("stack_install", request(archive(tmp_path, program), depot, root))["msg"]
    shown, _, kernel = said.partition(" The kernel said meanwhile: ")
    assert words in shown
    assert shown.endswith(ending)
    assert "\n1\n" not in said
    assert "\x1b" not in said
    assert len(said) < 3000
    if program == CRASH and unprivileged.kernel(time.monotonic() - 60):
        assert "segfault at 0 ip" in kernel


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path, depot: str, root: Path) -> None:
    program(root / "incoming/tree/stacks" / NEW / "venv/bin/python", "exit 1")
    program(root / "stacks" / NEW / "venv/bin/python", "exit 1")
    program(root / "stacks" / NEW / "venv/bin/leftover", GOOD)
    (root / "incoming/archive").write_text("half")
    assert run_module("stack_install", request(archive(tmp_path), depot, root))["changed"]
    assert sorted(path.name for path in (root / "stacks" / NEW / "venv/bin").iterdir()) == ["python"]
    assert names(root) == ["mpi", "stacks"]


def test_an_existing_openmpi_is_kept_and_gets_its_contents_list(tmp_path: Path, depot: str, root: Path) -> None:
    program(root / "mpi" / MPI / "bin/mpirun", GOOD)
    before = tree(root)
    assert run_module("stack_install", request(archive(tmp_path), depot, root))["changed"]
    assert tree(root).items() >= before.items()
    assert (root / "mpi" / MPI / "contents").is_file()


def test_a_half_removed_openmpi_is_replaced(tmp_path: Path, depot: str, root: Path) -> None:
    """After a kill during removal, mpirun --version may still work."""

    def more(made: Path) -> None:
        program(made / "mpi" / MPI / "bin/orted", GOOD)

    program(root / "mpi" / MPI / "bin/mpirun", GOOD)
    assert run_module("stack_install", request(archive(tmp_path, spoil=more), depot, root))["changed"]
    assert (root / "mpi" / MPI / "bin/orted").exists()
    assert names(root) == ["mpi", "stacks"]


def mode(path: str, bits: int) -> Callable[[Path], None]:
    return lambda made: (made / path).chmod(bits)


def link(path: str, target: str) -> Callable[[Path], None]:
    return lambda made: (made / path).symlink_to(target)


def stack_elsewhere(made: Path) -> None:
    shutil.rmtree(made / f"stacks/{NEW}")
    (made / f"stacks/{NEW}").symlink_to("/opt")


def mpi_elsewhere(made: Path) -> None:
    (made / f"stacks/{NEW}/mpi").unlink()
    (made / f"stacks/{NEW}/mpi").symlink_to("/etc")


PYTHON_FILE = f"stacks/{NEW}/venv/bin/python"


@pytest.mark.parametrize(
    ("spoil", "words"),
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
        (mpi_elsewhere, "its mpi points elsewhere"),
        (stack_elsewhere, f"'stacks/{NEW}' is not a folder"),
    ],
)
def test_an_archive_with_more_than_a_stack_is_refused(
    tmp_path: Path, depot: str, root: Path, spoil: Callable[[Path], object], words: str
) -> None:
    said = refused(request(archive(tmp_path, spoil=spoil), depot, root), root)
    assert f"the archive of stack {NEW} is refused: {words}" in said
    assert "Nothing in it was used" in said


# Packages added to another stack

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
    assert to(root, LAYER, keep=1)["proven"]
    # The base stays, although only one stack is to be kept.
    assert names(root / "stacks") == [NEW, LAYER]
    assert run_module("stack_proof", {"root": str(root)})["proven"] is True


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda made: program(made / "mpi" / MPI / "bin/mpirun", GOOD), "'mpi' does not belong in it"),
        (lambda made: program(made / "stacks" / NEW / "venv/bin/python", GOOD), f"'stacks/{NEW}' does not belong in"),
        (lambda made: (made / f"stacks/{LAYER}/base").unlink(), "its base points elsewhere"),
        (
            lambda made: [
                (made / f"stacks/{LAYER}/base").unlink(),
                (made / f"stacks/{LAYER}/base").symlink_to(f"../{OLD}"),
            ],
            "its base points elsewhere",
        ),
    ],
    ids=["mpi", "base", "no base", "another base"],
)
def test_an_archive_with_more_than_a_layer_is_refused(
    tmp_path: Path, depot: str, root: Path, spoil: Callable[[Path], object], words: str
) -> None:
    run_module("stack_install", request(archive(tmp_path), depot, root))
    said = refused(request(layer(tmp_path, spoil), depot, root, id=LAYER, base=NEW), root)
    assert f"the archive of stack {LAYER} is refused: {words}" in said


def test_a_stack_with_a_base_is_refused_where_none_is_due(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path, spoil=lambda made: (made / f"stacks/{NEW}/base").symlink_to(f"../{OLD}"))
    assert "its base points elsewhere" in refused(request(packed, depot, root), root)


def test_a_damaged_base_is_installed_again_and_the_layer_stays(tmp_path: Path, depot: str, root: Path) -> None:
    asked = request(archive(tmp_path), depot, root)
    run_module("stack_install", asked)
    run_module("stack_install", request(layer(tmp_path), depot, root, id=LAYER, base=NEW))
    to(root, LAYER)
    file = root / "stacks" / NEW / "venv/bin/python"
    file.chmod(0o700)
    words = f"in stacks/{NEW}, venv/bin/python has mode 0700 instead of 0755"
    assert contents.drift(root, LAYER) == contents.drift(root, NEW) == [words]
    assert run_module("stack_proof", {"root": str(root)})["wrong"].startswith(f"in stacks/{NEW}, venv/bin/python has")
    assert probe.stacks(root) == {"current": LAYER, "former": "", "installed": []}
    assert run_module("stack_install", asked)["changed"]
    assert probe.stacks(root) == {"current": LAYER, "former": "", "installed": [NEW, LAYER]}
    file.chmod(0o700)
    assert f"stack {LAYER} is damaged" in to(root, LAYER)["msg"]
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


def test_a_hanging_program_is_killed(tmp_path: Path) -> None:
    begun = time.monotonic()
    assert unprivileged.run(["sh", "-c", "sleep 60 & wait"], getpass.getuser(), tmp_path, seconds=1) == (
        -signal.SIGKILL,
        "it did not end within 1 s",
    )
    assert time.monotonic() - begun < 10


def test_nothing_is_fetched_without_enough_space(tmp_path: Path, root: Path) -> None:
    (tmp_path / "depot").mkdir()
    packed = archive(tmp_path)
    words = refused(request(packed, dead_url(), root, unpacked=1 << 60), root)
    assert words.startswith(f"{root} has ")
    assert f"and the stack needs {(1 << 40) + 256} MiB while it is installed: free some space there" in words


def test_a_target_that_is_not_a_folder_is_reported(tmp_path: Path, depot: str, root: Path) -> None:
    root.write_text("")
    answer = run_module("stack_install", request(archive(tmp_path), depot, root))
    assert f"the stack cannot be written to {root}: " in answer["msg"]


def installed(root: Path, stack: str, mpi: str = MPI, age: int = 0) -> Path:
    """A stack as installed by stack_install."""
    folder = root / "stacks" / stack
    folder.mkdir(parents=True, exist_ok=True)
    (root / "mpi" / mpi).mkdir(parents=True, exist_ok=True)
    (folder / "mpi").symlink_to(f"../../mpi/{mpi}")
    for path in (folder, root / "mpi" / mpi):
        contents.write(path)
    (folder / "manifest.json").write_text("{}")
    os.utime(folder, (1_800_000_000 - age, 1_800_000_000 - age))
    return folder


def to(root: Path, stack: str, keep: int = 3, *, check_mode: bool = False) -> dict[str, Any]:
    return run_module("stack_switch", {"id": stack, "keep": keep, "root": str(root)}, check_mode=check_mode)


def links(root: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in root.iterdir() if path.is_symlink()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_the_previous_stack_becomes_the_former_one(root: Path) -> None:
    for stack in (OLD, NEW):
        installed(root, stack)
    answers = [to(root, stack) for stack in (OLD, OLD, NEW, OLD, OLD)]
    assert [(answer["changed"], answer["former"]) for answer in answers] == [
        (True, ""),
        (False, OLD),
        (True, OLD),
        (True, NEW),
        (False, OLD),
    ]
    assert links(root) == {"current": f"stacks/{OLD}", "former": f"stacks/{NEW}"}
    assert [answer["pruned"] for answer in answers] == [[]] * 5


def test_a_first_stack_has_no_former_one(root: Path) -> None:
    installed(root, NEW)
    to(root, NEW)
    assert links(root) == {"current": f"stacks/{NEW}"}


def test_a_switch_killed_between_the_links_is_completed(root: Path) -> None:
    for stack in ("cccc", OLD, NEW):
        installed(root, stack)
    for stack in ("cccc", OLD):
        to(root, stack)
    switch.link(root / "former", f"stacks/{OLD}")
    assert links(root) == {"current": f"stacks/{OLD}", "former": f"stacks/{OLD}"}
    (root / ".current.new").symlink_to("stacks/half")
    assert to(root, NEW)["changed"]
    assert links(root) == {"current": f"stacks/{NEW}", "former": f"stacks/{OLD}"}


@pytest.mark.parametrize(("keep", "stay"), [(1, ["s4", "s5"]), (3, ["s1", "s4", "s5"]), (4, ["s1", "s2", "s4", "s5"])])
def test_linked_and_newest_stacks_are_kept(root: Path, keep: int, stay: list[str]) -> None:
    for number in range(1, 6):
        installed(root, f"s{number}", mpi=f"m{number}", age=number)
    (root / "current").symlink_to("stacks/s4")
    answer = to(root, "s5", keep)
    assert names(root / "stacks") == stay
    assert names(root / "mpi") == [name.replace("s", "m") for name in stay]
    gone = {f"s{number}" for number in range(1, 6)} - set(stay)
    assert set(answer["pruned"]) == gone | {name.replace("s", "m") for name in gone}


def test_unfinished_and_unused_trees_are_removed(root: Path) -> None:
    installed(root, OLD, mpi="m1")
    installed(root, NEW, mpi="m1")
    (installed(root, "half", mpi="m2") / "manifest.json").unlink()
    (root / "mpi" / "m3").mkdir()
    assert sorted(to(root, NEW, keep=9)["pruned"]) == ["half", "m2", "m3"]
    assert (names(root / "stacks"), names(root / "mpi")) == ([NEW, OLD], ["m1"])


def test_a_damaged_stack_is_refused_and_reinstalled(root: Path) -> None:
    """An old OpenMPI was half removed, and a rollback would use the rest of it."""
    for stack, mpi in ((OLD, "m1"), (NEW, "m2")):
        for path in (root / "mpi" / mpi / "bin/mpirun", root / "stacks" / stack / "venv/bin/python"):
            program(path, GOOD)
        installed(root, stack, mpi)
    to(root, OLD)
    (root / "mpi/m2/bin/mpirun").unlink()
    program(root / "mpi/m2/bin/mine", GOOD)
    said = to(root, NEW)["msg"]
    assert f"stack {NEW} is damaged, so nothing was switched: in {root}/mpi/m2, bin/mine is unexpected; bin/m" in said
    assert links(root) == {"current": f"stacks/{OLD}"}
    assert not (root / "stacks" / NEW / "manifest.json").exists()
    assert f"stack {NEW} is not installed here" in to(root, NEW)["msg"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.write_text("changed"), "venv/python has different content"),
        (lambda file: file.chmod(0o777), "venv/python has mode 0777 instead of 0755"),
        (lambda file: [file.unlink(), file.symlink_to("/bin/sh")], "venv/python is a link instead of a file"),
        (lambda file: [file.unlink(), file.mkdir()], "venv/python is a folder instead of a file"),
        (lambda file: file.rename(file.with_name("a\nb")), "venv/a\\nb is unexpected; venv/python is missing"),
        (lambda file: (file.parents[1] / "contents").write_text("[]"), "contents is damaged"),
        (lambda file: os.mkfifo(file.with_name("pipe")), "venv/pipe is unexpected"),
    ],
)
def test_every_difference_is_reported(root: Path, spoil: Callable[[Path], object], words: str) -> None:
    file = root / "stacks" / NEW / "venv/python"
    program(file, GOOD)
    installed(root, NEW)
    (root / "current").symlink_to(f"stacks/{NEW}")
    assert run_module("stack_proof", {"root": str(root)})["proven"] is True
    spoil(file)
    answer = run_module("stack_proof", {"root": str(root)})
    assert (answer["proven"], answer["stack"]) == (False, NEW)
    assert words in answer["wrong"]
    assert words in to(root, NEW)["msg"]


def test_the_contents_list_itself_is_verified(root: Path) -> None:
    installed(root, NEW)
    (root / "current").symlink_to(f"stacks/{NEW}")
    lists = {tree: [sha256(root / tree / "contents")] for tree in (f"stacks/{NEW}", f"mpi/{MPI}")}

    def proof(known: dict[str, list[str]]) -> tuple[bool | None, str]:
        answer = run_module("stack_proof", {"root": str(root), "known": known})
        return answer["proven"], answer["wrong"]

    assert proof(lists) == (True, "")
    assert proof({**lists, f"mpi/{MPI}": ["of an earlier build", *lists[f"mpi/{MPI}"]]}) == (True, "")
    strange = f"in stacks/{NEW}, it is none of those that were built for this cluster"
    assert proof({f"mpi/{MPI}": lists[f"mpi/{MPI}"]}) == (False, strange)
    other = f"in stacks/{NEW}, contents differs from the list written at build time"
    assert proof({**lists, f"stacks/{NEW}": ["0"]}) == (False, other)
    for path in lists:
        (root / path / "contents").unlink()
    # A tree that matches the control machine's record needs no list; without either it cannot be verified.
    assert proof(lists) == (True, "")
    assert proof({}) == (None, "")
    assert proof({f"stacks/{NEW}": ["0"]})[0] is False
    assert to(root, NEW)["proven"] is False
    (root / "stacks" / NEW / "manifest.json").unlink()
    assert proof(lists) == (False, "the node has no current stack")


def test_trees_moved_aside_by_a_killed_run_are_removed(root: Path) -> None:
    installed(root, NEW)
    program(root / "removing/x/m1/bin/mpirun", GOOD)
    to(root, NEW)
    assert names(root) == ["current", "mpi", "stacks"]


@pytest.mark.parametrize(
    ("there", "words"), [((OLD, NEW), f"installed: {NEW}, {OLD}"), ((), "installed: none")], ids=["two", "none"]
)
def test_a_missing_stack_is_refused(root: Path, there: tuple[str, ...], words: str) -> None:
    for stack in there:
        installed(root, stack)
    (root / "stacks" / "half").mkdir(parents=True)
    before = tree(root)
    assert to(root, "half")["msg"] == f"stack half is not installed here; {words}"
    assert tree(root) == before
    assert (root / "stacks" / "half").exists()


def test_check_mode_switches_and_removes_nothing(root: Path) -> None:
    for stack in (OLD, NEW, "cccc"):
        installed(root, stack)
    to(root, OLD)
    before = tree(root)
    assert [to(root, stack, 1, check_mode=True)["changed"] for stack in (OLD, NEW, "to-come")] == [False, True, True]
    assert tree(root) == before


def test_an_installation_waits_for_one_still_running(tmp_path: Path) -> None:
    root = tmp_path / "farandole"
    with install.alone(root):
        # The job user cannot open the lock, so it cannot hold it.
        assert (root / ".lock").stat().st_mode & 0o777 == 0o600
        holder = os.open(root / ".lock", os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(holder)


def test_a_folder_is_replaced_or_removed_as_a_whole(tmp_path: Path) -> None:
    script = (ROOT / "roles/stack/files/replace.sh").read_text()
    old, new, removing = tmp_path / "mpi" / "old", tmp_path / "new", tmp_path / "removing"
    for text in ("first", "second"):
        new.mkdir()
        (new / "file").write_text(text)
        subprocess.run(["sh", "-euc", script, "-", old, new], env={"REMOVING": str(removing), **os.environ}, check=True)
        assert [(path.name, path.read_text()) for path in old.iterdir()] == [("file", text)]
    subprocess.run(["sh", "-euc", script, "-", old], env={"REMOVING": str(removing), **os.environ}, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mpi"]
