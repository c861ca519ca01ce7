"""stack_switch and stack_proof as a node runs them."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.core.files import sha256

from .loading import load
from .prefix import GOOD, MPI, NEW, OLD, installed, links, names, program, to
from .stack import run_module, tree

switch, probe = load("modules", "stack_switch"), load("modules", "node_probe")


def test_the_previous_stack_becomes_the_former_one(root: Path) -> None:
    for stack in (OLD, NEW):
        installed(root, stack)
    answers = [to(root, OLD)]
    assert links(root) == {"current": f"stacks/{OLD}"}
    answers += [to(root, stack) for stack in (OLD, NEW, OLD, OLD)]
    assert [(answer["changed"], answer["former"], answer["pruned"]) for answer in answers] == [
        (True, "", []), (False, OLD, []), (True, OLD, []), (True, NEW, []), (False, OLD, []),
    ]  # fmt: skip
    assert links(root) == {"current": f"stacks/{OLD}", "former": f"stacks/{NEW}"}


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


def test_unfinished_and_unused_trees_and_those_moved_aside_are_removed(root: Path) -> None:
    installed(root, OLD, mpi="m1")
    installed(root, NEW, mpi="m1")
    (installed(root, "half", mpi="m2") / "manifest.json").unlink()
    (root / "mpi" / "m3").mkdir()
    program(root / "removing/x/m1/bin/mpirun", GOOD)
    assert sorted(to(root, NEW, keep=9)["pruned"]) == ["half", "m2", "m3"]
    assert (names(root), names(root / "stacks"), names(root / "mpi")) == (
        ["current", "mpi", "stacks"], [NEW, OLD], ["m1"],
    )  # fmt: skip


@pytest.mark.parametrize("way", ["environ", "cwd", "exe", "mpi"])
def test_what_a_process_uses_is_kept_until_the_run_after_its_end(root: Path, way: str) -> None:
    for age, stack in enumerate((NEW, OLD, "busy", "base", "idle")):
        installed(root, stack, mpi=f"m-{stack}", age=age)
    busy = root / "stacks/busy"
    (busy / "base").symlink_to("../base")
    # Root sees where it really is, and a job's path may have a link.
    (root.parent / "link").symlink_to(root)
    place = root / "mpi/m-busy" if way == "mpi" else busy
    program = shutil.copy("/bin/sleep", place) if way in ("exe", "mpi") else "/bin/sleep"
    environment = {"PATH": f"/x:{root.parent}/link/stacks/busy/venv/bin:/bin"} if way == "environ" else {}
    to(root, OLD, keep=9)
    with subprocess.Popen([program, "60"], cwd=busy if way == "cwd" else "/", env=environment) as process:
        answers = [to(root.parent / "link", NEW, keep=2) for _ in range(2)]
        process.kill()
    kept = {"busy", "base"} if way != "mpi" else set()
    assert {*answers[0]["pruned"]} == {"base", "busy", "idle", "m-base", "m-idle"} - kept - {
        f"m-{name}" for name in kept
    }
    assert [answer["pruned"] for answer in answers[1:]] == [[]] and not answers[1]["changed"]
    assert probe.stacks(root)["left"]
    assert {*to(root, NEW, keep=2)["pruned"]} == kept | {f"m-{name}" for name in kept | {"busy"}}
    assert names(root / "stacks") == sorted((NEW, OLD)) and not probe.stacks(root)["left"]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_stack_that_takes_long_to_read_is_looked_at_only_if_there_is_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, damaged: bool
) -> None:
    large = program(root / "stacks" / NEW / "venv/large", GOOD)
    os.truncate(large, 1 << 30)
    installed(root, NEW)
    assert to(root, NEW)["changed"] and to(root, NEW, verify=True)["proven"] and not probe.stacks(root)["late"]
    # The kernel's clock for files goes in steps.
    time.sleep(0.1)
    os.truncate(large, (1 << 30) - damaged)
    monkeypatch.setattr(probe, "LOOK_S", 0.2)
    begun = time.monotonic()
    assert probe.stacks(root, note=True)["late"]
    assert time.monotonic() - begun < 1
    found = probe.stacks(root, note=True, patient=True)
    assert (found["installed"], found["late"]) == ([] if damaged else [NEW], False)
    # What was found whole is not read again.
    assert probe.stacks(root, note=True)["late"] is damaged


def test_the_base_of_a_kept_stack_is_kept_also_below_a_link(root: Path) -> None:
    (root.parent / "disk").mkdir()
    root.symlink_to("disk")
    (root / "stacks" / NEW).mkdir(parents=True)
    (root / "stacks" / NEW / "base").symlink_to("../base")
    for age, stack in enumerate((NEW, OLD, "base")):
        installed(root, stack, age=age)
    assert to(root, NEW, keep=1)["pruned"] == [OLD]
    assert names(root / "stacks") == [NEW, "base"]


def test_a_damaged_stack_is_refused_and_reinstalled(root: Path) -> None:
    """An old OpenMPI was half removed, and a rollback would use the rest of it."""
    for stack, mpi in ((OLD, "m1"), (NEW, "m2")):
        for path in (root / "mpi" / mpi / "bin/mpirun", root / "stacks" / stack / "venv/bin/python"):
            program(path, GOOD)
        installed(root, stack, mpi)
    to(root, OLD)
    # It is verified before it is tried.
    verified = to(root, NEW, verify=True)
    assert (verified["changed"], verified["proven"], links(root)) == (False, True, {"current": f"stacks/{OLD}"})
    (root / "mpi/m2/bin/mpirun").unlink()
    program(root / "mpi/m2/bin/mine", GOOD)
    said = to(root, NEW, verify=True)["msg"]
    assert f"stack {NEW} is damaged, so nothing was switched: in {root}/mpi/m2, bin/mine is unexpected; bin/m" in said
    assert links(root) == {"current": f"stacks/{OLD}"}
    assert not (root / "stacks" / NEW / "manifest.json").exists()
    assert f"stack {NEW} is not installed here" in to(root, NEW)["msg"]


@pytest.mark.parametrize(
    ("spoil", "difference"),
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
def test_every_difference_is_reported(root: Path, spoil: Callable[[Path], object], difference: str) -> None:
    file = root / "stacks" / NEW / "venv/python"
    program(file, GOOD)
    installed(root, NEW)
    (root / "current").symlink_to(f"stacks/{NEW}")
    assert run_module("stack_proof", {"root": str(root)})["proven"] is True
    spoil(file)
    answer = run_module("stack_proof", {"root": str(root)})
    assert (answer["proven"], answer["stack"]) == (False, NEW)
    assert difference in answer["wrong"]
    assert difference in to(root, NEW, verify=True)["msg"]


def test_the_contents_list_itself_is_verified(root: Path) -> None:
    installed(root, NEW)
    (root / "current").symlink_to(f"stacks/{NEW}")
    lists = {tree: [sha256(root / tree / "contents")] for tree in (f"stacks/{NEW}", f"mpi/{MPI}")}

    def proof(known: dict[str, list[str]]) -> tuple[bool | None, str]:
        answer = run_module("stack_proof", {"root": str(root), "known": known})
        return answer["proven"], answer["wrong"]

    assert proof(lists) == (True, "")
    assert proof({**lists, f"mpi/{MPI}": ["of an earlier build", *lists[f"mpi/{MPI}"]]}) == (True, "")
    strange = f"in stacks/{NEW}, it was not built for this cluster"
    assert proof({f"mpi/{MPI}": lists[f"mpi/{MPI}"]}) == (False, strange)
    other = f"in stacks/{NEW}, contents differs from the list written at build time"
    assert proof({**lists, f"stacks/{NEW}": ["0"]}) == (False, other)
    for path in lists:
        (root / path / "contents").unlink()
    # A tree that matches the control machine's record needs no list; without either it cannot be verified.
    assert proof(lists) == (True, "")
    assert proof({}) == (None, "")
    assert proof({f"stacks/{NEW}": ["0"]})[0] is False
    assert to(root, NEW, verify=True)["proven"] is False
    (root / "stacks" / NEW / "manifest.json").unlink()
    assert proof(lists) == (False, "the node has no current stack")


def test_a_missing_stack_is_refused(root: Path) -> None:
    (root / "stacks" / "half").mkdir(parents=True)
    for there in ("none", f"{NEW}, {OLD}"):
        if there != "none":
            installed(root, OLD), installed(root, NEW)
        before = tree(root)
        assert to(root, "half")["msg"] == f"stack half is not installed here; installed: {there}"
        assert tree(root) == before
        assert (root / "stacks" / "half").exists()


def test_check_mode_switches_and_removes_nothing(root: Path) -> None:
    for stack in (OLD, NEW, "cccc"):
        installed(root, stack)
    to(root, OLD)
    before = tree(root)
    assert [to(root, stack, 1, check_mode=True)["changed"] for stack in (OLD, NEW, "to-come")] == [False, True, True]
    assert tree(root) == before
