"""stack_install as a node runs it, with real archives from a real depot."""

import fcntl
import getpass
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .loading import ROOT, load
from .prefix import GOOD, MPI, NEW, OLD, PYTHON, archive, contents, installed, names, program, refused, request
from .stack import Endless, NotHttp, Truncates, dead_url, run_module, served, tree

install = load("modules", "stack_install")
unprivileged = load("module_utils", "unprivileged")


def test_a_stack_is_installed_once(tmp_path: Path, depot: str, root: Path) -> None:
    asked = request(archive(tmp_path), depot, root)
    assert run_module("stack_install", asked, check_mode=True)["changed"]
    assert not root.exists()
    answer = run_module("stack_install", asked)
    assert answer["changed"]
    assert set(answer["seconds"]) == {"fetch", "unpack", "prove"}
    before = tree(root)
    assert set(before) == {f"mpi/{MPI}/{name}" for name in ("bin/mpirun", "contents")} | {
        f"stacks/{NEW}/{name}" for name in ("contents", "venv/bin/python", "mpi", "manifest.json")
    }
    assert names(root) == ["mpi", "stacks"]
    again = {**asked, "url": dead_url()}
    assert not run_module("stack_install", again)["changed"]
    assert tree(root) == before
    # What was touched and not changed stays.
    stack = root / "stacks" / NEW
    (stack / "venv/bin/python").touch()
    assert contents.touched(stack, contents.proven(stack / "manifest.json"))
    assert not run_module("stack_install", again)["changed"]


def rewrite(stack: Path) -> None:
    """Change a file's content, but neither its size nor its times."""
    file = stack / "venv/bin/python"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(file.read_text().swapcase())
    os.utime(file, ns=times)


@pytest.mark.parametrize(
    ("change", "difference"),
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
    tmp_path: Path, depot: str, root: Path, change: Callable[[Path], object], difference: str
) -> None:
    asked = request(archive(tmp_path), depot, root)
    assert run_module("stack_install", asked)["changed"]
    stack = root / "stacks" / NEW
    before = {path: text for path, (_, text) in tree(root).items()}
    assert contents.drift(root, NEW) == []
    change(stack)
    assert difference in "; ".join(contents.drift(root, NEW))
    predicted = run_module("stack_install", asked, check_mode=True)
    assert predicted["changed"]
    assert difference in str(predicted["warnings"])
    assert run_module("stack_install", asked)["changed"]
    assert {path: text for path, (_, text) in tree(root).items()} == before
    assert contents.drift(root, NEW) == []


def test_only_what_was_touched_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("a/x", "b/y", "b/z"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    contents.write(tmp_path)
    since = (tmp_path / contents.LIST).stat().st_ctime_ns
    read = set[str]()

    def noted(path: str) -> str:
        read.add(Path(path).name)
        return Path(path).read_text()

    monkeypatch.setattr(contents, "sha256", noted)
    # The kernel's clock for files goes in steps.
    time.sleep(0.05)
    (tmp_path / "b/y").touch()
    assert contents.verify(tmp_path, since=since) == ["b/y has different content"]
    assert read == {"y"}
    # What is in a touched folder may have been put there.
    (tmp_path / "b").touch()
    contents.verify(tmp_path, since=since)
    assert read == {"y", "z"}
    (tmp_path / contents.LIST).touch()
    contents.verify(tmp_path, since=since)
    assert read == {"x", "y", "z"}


def test_what_was_touched_and_is_whole_is_read_once(
    tmp_path: Path, depot: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_module("stack_install", request(archive(tmp_path), depot, root))["changed"]
    stack, read = root / "stacks" / NEW, list[str]()
    original: Callable[[str], str] = contents.sha256
    python = stack / "venv/bin/python"

    def noted(path: str) -> str:
        read.append(path)
        return original(path)

    monkeypatch.setattr(contents, "sha256", noted)
    # As archives have it.
    os.utime(stack / "manifest.json", (contents.PACKED_S, contents.PACKED_S))
    # The kernel's clock for files goes in steps.
    time.sleep(0.1)
    assert contents.drift(root, NEW) == [] and str(python) not in read
    python.touch()
    time.sleep(0.1)
    for note, times in ((False, 1), (True, 1), (True, 0)):
        read.clear()
        assert contents.drift(root, NEW, note=note) == []
        assert read.count(str(python)) == times
    # What cannot be verified is not noted as whole.
    before, kept = contents.proven(stack / "manifest.json"), (stack / contents.LIST).read_text()
    (stack / contents.LIST).unlink()
    python.touch()
    assert contents.drift(root, NEW, note=True) == [] and contents.proven(stack / "manifest.json") == before
    (stack / contents.LIST).write_text(kept)
    rewrite(stack)
    for _ in range(2):
        assert contents.drift(root, NEW, note=True) == [f"in stacks/{NEW}, venv/bin/python has different content"]


def test_what_is_not_the_archive_is_not_unpacked(tmp_path: Path, depot: str, root: Path) -> None:
    packed, wanted = archive(tmp_path), "0" * 64
    asked = request(packed, depot, root)
    said = refused({**asked, "sha256": wanted}, root)
    assert f"{depot}/stack.tar.zst is damaged: its sha256 is {asked['sha256']}, expected {wanted}" in said
    for handler, why in (
        (Truncates, "bytes before the end"),
        (Endless, f"is longer than {packed.stat().st_size} bytes"),
        (NotHttp, "220 mail"),
    ):
        with served(tmp_path / "depot", handler) as url:
            assert why in refused(request(packed, url, root), root)
    for url, why in ((dead_url(), "connection refused"), (f"{depot}/no", "File not found")):
        said = refused(request(packed, url, root), root)
        assert f"{url}/stack.tar.zst cannot be fetched: {why}" in said
        assert "systemctl status farandole-depot on the head" in said
    assert run_module("stack_install", asked, http_proxy=dead_url())["changed"]
    shutil.rmtree(root)
    os.truncate(packed, packed.stat().st_size // 2)
    assert "the stack cannot be unpacked to" in refused(request(packed, depot, root), root)
    shutil.rmtree(root)
    root.write_text("")
    assert f"the stack cannot be written to {root}: " in run_module("stack_install", asked)["msg"]


CRASH = f"exec {shlex.quote(sys.executable)} -c 'import ctypes; ctypes.string_at(0)'"
STOPS: dict[str, tuple[str, str, list[str], list[str]]] = {
    "mpirun": (
        "echo libz.so.1: cannot open >&2; exit 127", PYTHON, ["json"], ["mpirun --version: libz.so.1: cannot open"]
    ),
    "module": (GOOD, PYTHON, ["json", "no_such_module"], ["No module named 'no_such_module'"]),
    "python": (GOOD, "", ["json"], ["venv/bin/python -c import json", ": [Errno 2] No such file"]),
    "status": (
        "seq 9999; echo $'\\033[31m'the reason; exit 3", PYTHON, [], ["9999\n", "the reason\nIt ended with status 3."]
    ),
    "killed": ("echo before; kill -KILL $$", PYTHON, [], ["before", "\nIt was killed by SIGKILL."]),
    "silent": ("kill -KILL $$", PYTHON, [], ["it printed nothing.", "\nIt was killed by SIGKILL."]),
    "shell": (
        "sh -c 'kill -SEGV $$'; exit $?", PYTHON, [], ["\nIt ended with status 139, as a shell says of SIGSEGV."]
    ),
    "crash": (CRASH, PYTHON, [], ["\nIt was killed by SIGSEGV."]),
    "TensorFlow is loaded last": (
        GOOD, 'echo "$2"; exit 1', ["horovod.tensorflow", "horovod.torch", "torchvision"],
        [": import horovod.torch; import torchvision; import horovod.tensorflow\nIt ended with status 1."],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("mpirun", "python", "modules", "parts"), STOPS.values(), ids=STOPS)
def test_a_stack_that_does_not_run_is_refused_with_how_its_program_ended(
    tmp_path: Path, depot: str, root: Path, mpirun: str, python: str, modules: list[str], parts: list[str]
) -> None:
    installed(root, OLD, mpi="another")
    (root / "current").symlink_to(f"stacks/{OLD}")
    asked = request(archive(tmp_path, mpirun, python), depot, root, modules=modules or ["json"])
    said = run_module("stack_install", asked)["msg"]
    shown, _, kernel = said.partition(" The kernel said meanwhile: ")
    assert "the stack was unpacked but does not run here, so it is not used: " in shown
    assert all(part in shown for part in parts) and (shown.endswith(parts[-1]) or not parts[-1].endswith("."))
    assert not any(part in said for part in ("\n1\n", "\x1b", "\nimport"))
    assert len(said) < 3000
    if mpirun == CRASH and unprivileged.kernel(time.monotonic() - 60):
        assert "segfault at 0 ip" in kernel
    assert not (root / "stacks" / NEW / "manifest.json").exists()
    assert (root / "current").readlink() == Path("stacks") / OLD
    assert not (root / "incoming").exists()


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path, depot: str, root: Path) -> None:
    program(root / "incoming/tree/stacks" / NEW / "venv/bin/python", "exit 1")
    program(root / "stacks" / NEW / "venv/bin/python", "exit 1")
    program(root / "stacks" / NEW / "venv/bin/leftover", GOOD)
    (root / "incoming/archive").write_text("half")
    assert run_module("stack_install", request(archive(tmp_path), depot, root))["changed"]
    assert sorted(path.name for path in (root / "stacks" / NEW / "venv/bin").iterdir()) == ["python"]
    assert names(root) == ["mpi", "stacks"]


def test_an_existing_openmpi_is_kept_and_gets_its_contents_list_unless_it_is_half_removed(
    tmp_path: Path, depot: str, root: Path
) -> None:
    program(root / "mpi" / MPI / "bin/mpirun", GOOD)
    before = tree(root)
    assert run_module("stack_install", request(archive(tmp_path), depot, root))["changed"]
    assert tree(root).items() >= before.items()
    assert (root / "mpi" / MPI / "contents").is_file()
    # After a kill during removal, mpirun --version may still work.
    shutil.rmtree(root)
    program(root / "mpi" / MPI / "bin/mpirun", GOOD)
    whole = archive(tmp_path, spoil=lambda made: program(made / "mpi" / MPI / "bin/orted", GOOD))
    assert run_module("stack_install", request(whole, depot, root))["changed"]
    assert (root / "mpi" / MPI / "bin/orted").exists()
    assert names(root) == ["mpi", "stacks"]


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
    said = refused(request(packed, dead_url(), root, unpacked=1 << 60), root)
    assert said.startswith(f"{root} has ")
    assert f"and the stack needs {(1 << 40) + 256} MiB while it is installed: free some space there" in said


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


@pytest.mark.parametrize("group", ["console_scripts", "gui_scripts"])
def test_no_program_of_a_wheel_has_a_path_for_a_name(tmp_path: Path, group: str) -> None:
    script, wheel = (ROOT / "roles/stack/files/names.py").read_text(), tmp_path / "a-1-py3-none-any.whl"
    for name, refused_as in {
        "a": "",
        "a.b-c": "",
        "/etc/cron.daily/a": "'/etc/cron.daily/a'",
        "../a": "'../a'",
    }.items():
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr("a-1.dist-info/entry_points.txt", f"[{group}]\n{name} = a:main\n")
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, wheel, tmp_path / "*.whl"], text=True, capture_output=True, check=False
        )
        assert bool(done.returncode) == bool(refused_as), done.stderr
        assert refused_as in done.stderr


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
