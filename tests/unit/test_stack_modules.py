"""stack_install and stack_switch as a node runs them, with real archives from a real depot."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.stack.cache import sha256

from .loading import load
from .stack import Babbles, BreaksOff, dead_url, run_module, served, tree

install, switch = load("modules", "stack_install"), load("modules", "stack_switch")

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


def archive(tmp_path: Path, mpirun: str = GOOD, python: str = PYTHON) -> Path:
    """A stack, packed as a builder packs it."""
    made, packed = tmp_path / "made", tmp_path / "depot" / "stack.tar.zst"
    shutil.rmtree(made, ignore_errors=True)
    stack = made / "stacks" / NEW
    program(made / "mpi" / MPI / "bin/mpirun", mpirun)
    (stack / "venv/bin").mkdir(parents=True)
    if python:
        program(stack / "venv/bin/python", python)
    (stack / "mpi").symlink_to(f"../../mpi/{MPI}")
    (stack / "manifest.json").write_text("{}")
    subprocess.run(["tar", "-C", made, "--zstd", "-cf", packed, f"stacks/{NEW}", f"mpi/{MPI}"], check=True)
    return packed


def wish(packed: Path, depot: str, root: Path, **more: Any) -> dict[str, Any]:
    """What the role asks for."""
    size = packed.stat().st_size
    asked = {"id": NEW, "url": f"{depot}/{packed.name}", "sha256": sha256(packed), "size": size, "unpacked": 10 * size}
    return {**asked, "modules": ["json", "tarfile"], "root": str(root), **more}


def test_it_is_installed_once(tmp_path: Path, depot: str, root: Path) -> None:
    asked = wish(archive(tmp_path), depot, root)
    answer = run_module("stack_install", asked)
    assert answer["changed"]
    assert set(answer["seconds"]) == {"fetch", "unpack", "prove"}
    before = tree(root)
    assert set(before) == {
        f"mpi/{MPI}/bin/mpirun",
        f"stacks/{NEW}/venv/bin/python",
        f"stacks/{NEW}/mpi",
        f"stacks/{NEW}/manifest.json",
    }
    assert sorted(path.name for path in root.iterdir()) == ["mpi", "stacks"]
    again = run_module("stack_install", {**asked, "url": dead_url()})
    assert not again["changed"]
    assert tree(root) == before


def test_check_mode_installs_nothing(tmp_path: Path, depot: str, root: Path) -> None:
    assert run_module("stack_install", wish(archive(tmp_path), depot, root), check_mode=True)["changed"]
    assert not root.exists()


def refused(asked: dict[str, Any], root: Path) -> str:
    """The words of a refusal that leaves nothing behind."""
    before = tree(root)
    answer = run_module("stack_install", asked)
    assert answer.get("failed")
    assert tree(root) == before
    assert not (root / "incoming").exists()
    return str(answer["msg"])


def test_an_archive_with_another_sha256_is_not_unpacked(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path)
    wanted = "0" * 64
    words = refused(wish(packed, depot, root, sha256=wanted), root)
    assert f"{depot}/stack.tar.zst is damaged: its sha256 is {sha256(packed)}, wanted is {wanted}" in words


def test_an_archive_that_was_cut_off_before_it_was_packed_does_not_count(
    tmp_path: Path, depot: str, root: Path
) -> None:
    packed = archive(tmp_path)
    os.truncate(packed, packed.stat().st_size // 2)
    assert "the stack does not unpack below" in refused(wish(packed, depot, root), root)


def test_an_archive_of_which_half_arrives_is_not_unpacked(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path)
    with served(tmp_path / "depot", BreaksOff) as broken:
        assert "is damaged: its sha256 is" in refused(wish(packed, broken, root), root)
    assert run_module("stack_install", wish(packed, depot, root))["changed"]


def test_a_depot_that_does_not_serve_is_named_with_the_cure(tmp_path: Path, depot: str, root: Path) -> None:
    packed = archive(tmp_path)
    with served(tmp_path / "depot", Babbles) as babbling:
        for url, why in ((dead_url(), "Connection refused"), (f"{depot}/no", "File not found"), (babbling, "220 mail")):
            words = refused(wish(packed, url, root), root)
            assert f"{url}/stack.tar.zst cannot be fetched: " in words
            assert why in words
            assert "systemctl status farandole-depot on the head" in words


def test_a_proxy_to_the_world_is_not_asked_for_the_depot(tmp_path: Path, depot: str, root: Path) -> None:
    assert run_module("stack_install", wish(archive(tmp_path), depot, root), http_proxy=dead_url())["changed"]


@pytest.mark.parametrize(
    ("mpirun", "python", "module", "words"),
    [
        ("echo libz.so.1: cannot open >&2; exit 127", PYTHON, "json", "mpirun --version: libz.so.1: cannot open"),
        (GOOD, PYTHON, "no_such_module", "No module named 'no_such_module'"),
        (GOOD, "", "json", "venv/bin/python -c import json; import json: [Errno 2] No such file"),
    ],
    ids=["mpirun", "module", "python"],
)
def test_what_does_not_run_here_does_not_count(
    tmp_path: Path, depot: str, root: Path, mpirun: str, python: str, module: str, words: str
) -> None:
    installed(root, OLD, mpi="another")
    (root / "current").symlink_to(f"stacks/{OLD}")
    packed = archive(tmp_path, mpirun, python)
    answer = run_module("stack_install", wish(packed, depot, root, modules=["json", module]))
    assert "the stack was unpacked and does not run here, so it is not used: " in answer["msg"]
    assert words in answer["msg"]
    assert not (root / "stacks" / NEW / "manifest.json").exists()
    assert (root / "current").readlink() == Path("stacks") / OLD
    assert not (root / "incoming").exists()


def test_what_a_killed_run_left_is_swept_away(tmp_path: Path, depot: str, root: Path) -> None:
    program(root / "incoming/tree/stacks" / NEW / "venv/bin/python", "exit 1")
    program(root / "stacks" / NEW / "venv/bin/python", "exit 1")
    program(root / "stacks" / NEW / "venv/bin/leftover", GOOD)
    (root / "incoming/archive").write_text("half")
    assert run_module("stack_install", wish(archive(tmp_path), depot, root))["changed"]
    assert sorted(path.name for path in (root / "stacks" / NEW / "venv/bin").iterdir()) == ["python"]
    assert sorted(path.name for path in root.iterdir()) == ["mpi", "stacks"]


def test_an_openmpi_that_is_there_stays(tmp_path: Path, depot: str, root: Path) -> None:
    program(root / "mpi" / MPI / "bin/mpirun", "# another stack uses it")
    before = tree(root)
    assert run_module("stack_install", wish(archive(tmp_path), depot, root))["changed"]
    assert tree(root).items() >= before.items()


def test_without_room_nothing_is_fetched(tmp_path: Path, root: Path) -> None:
    (tmp_path / "depot").mkdir()
    packed = archive(tmp_path)
    words = refused(wish(packed, dead_url(), root, unpacked=1 << 60), root)
    assert words.startswith(f"{root} has ")
    assert f"and the stack needs {(1 << 40) + 256} MiB while it is installed: make room there" in words


def test_a_place_that_is_no_folder_is_named(tmp_path: Path, depot: str, root: Path) -> None:
    root.write_text("")
    answer = run_module("stack_install", wish(archive(tmp_path), depot, root))
    assert f"{root} cannot take the stack: " in answer["msg"]


def installed(root: Path, stack: str, mpi: str = MPI, age: int = 0) -> Path:
    """A stack as stack_install leaves it."""
    folder = root / "stacks" / stack
    folder.mkdir(parents=True)
    (root / "mpi" / mpi).mkdir(parents=True, exist_ok=True)
    (folder / "mpi").symlink_to(f"../../mpi/{mpi}")
    (folder / "manifest.json").write_text("{}")
    os.utime(folder, (1_800_000_000 - age, 1_800_000_000 - age))
    return folder


def to(root: Path, stack: str, keep: int = 3, *, check_mode: bool = False) -> dict[str, Any]:
    return run_module("stack_switch", {"id": stack, "keep": keep, "root": str(root)}, check_mode=check_mode)


def links(root: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in root.iterdir() if path.is_symlink()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_one_before_becomes_the_former_one(root: Path) -> None:
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


def test_a_run_that_was_killed_between_the_links_is_taken_up(root: Path) -> None:
    for stack in ("cccc", OLD, NEW):
        installed(root, stack)
    for stack in ("cccc", OLD):
        to(root, stack)
    switch.point(root / "former", OLD)
    assert links(root) == {"current": f"stacks/{OLD}", "former": f"stacks/{OLD}"}
    (root / ".current.new").symlink_to("stacks/half")
    assert to(root, NEW)["changed"]
    assert links(root) == {"current": f"stacks/{NEW}", "former": f"stacks/{OLD}"}


@pytest.mark.parametrize(("keep", "stay"), [(1, ["s4", "s5"]), (3, ["s1", "s4", "s5"]), (4, ["s1", "s2", "s4", "s5"])])
def test_the_linked_and_the_youngest_are_kept(root: Path, keep: int, stay: list[str]) -> None:
    for number in range(1, 6):
        installed(root, f"s{number}", mpi=f"m{number}", age=number)
    (root / "current").symlink_to("stacks/s4")
    answer = to(root, "s5", keep)
    assert names(root / "stacks") == stay
    assert names(root / "mpi") == [name.replace("s", "m") for name in stay]
    gone = {f"s{number}" for number in range(1, 6)} - set(stay)
    assert set(answer["pruned"]) == gone | {name.replace("s", "m") for name in gone}


def test_what_was_not_finished_and_what_nothing_uses_goes(root: Path) -> None:
    installed(root, OLD, mpi="m1")
    installed(root, NEW, mpi="m1")
    (installed(root, "half", mpi="m2") / "manifest.json").unlink()
    (root / "mpi" / "m3").mkdir()
    assert sorted(to(root, NEW, keep=9)["pruned"]) == ["half", "m2", "m3"]
    assert (names(root / "stacks"), names(root / "mpi")) == ([NEW, OLD], ["m1"])


@pytest.mark.parametrize(
    ("there", "words"), [((OLD, NEW), f"there are: {NEW}, {OLD}"), ((), "there are: none")], ids=["two", "none"]
)
def test_a_stack_that_is_not_there_is_refused(root: Path, there: tuple[str, ...], words: str) -> None:
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


def test_an_installation_waits_for_one_that_a_killed_run_left_at_work(tmp_path: Path) -> None:
    root = tmp_path / "farandole"
    with install.alone(root):
        holder = os.open(root, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(holder)
