"""The `farandole stack` commands on a real cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from typer.testing import CliRunner

from farandole.cli import stack as show
from farandole.core.errors import FarandoleError
from farandole.inventory import state
from farandole.stack.cache import Builds, Lock, lab_builds
from farandole.stack.lock import identity
from farandole.stack.settings import builds_of

from .loading import ROOT, load
from .stack import LOCK, changed, pack, pack_stack

OTHER = "aabb00000000"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # So that output is not truncated.
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv(state.SETTING, str(tmp_path / ".farandole"))
    return Builds(lab_builds())


def saved(path: Path, lock: Lock) -> Path:
    """Write a lock to a file, with a matching id."""
    path.write_text(yaml.safe_dump({**lock, "id": identity(lock)}))
    return path


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(show.app, arguments)
    if done.exception:
        raise done.exception
    return done.output


def test_nothing_differs_between_a_lock_and_itself_and_a_component_is_told_once() -> None:
    for same in (LOCK, changed("why", to={})):
        assert show.differences(LOCK, same) == []
    new = changed("versions", "openmpi", to="4.1.8")
    new["openmpi"]["version"] = "4.1.8"
    assert show.differences(LOCK, new) == [("openmpi", "4.1.4", "4.1.8")]


@pytest.mark.parametrize(
    ("new", "change"),
    [
        (changed("versions", "gxx", to="14"), ("gxx", "12", "14")),
        (changed("wheels", 0, "version", to="2.3.4"), ("numpy", "2.4.6", "2.3.4")),
        (changed("wheels", to=LOCK["wheels"][1:]), ("numpy", "2.4.6", "-")),
        (changed("versions", "tf-keras", to="2.21.0"), ("tf-keras", "-", "2.21.0")),
        (changed("platform", "os", to="debian-13"), ("platform.os", "debian-12", "debian-13")),
        (changed("wanted", "accelerator", to="cuda"), ("wanted.accelerator", "cpu", "cuda")),
        (
            changed("openmpi", "configure", to=["--enable-orterun-prefix-by-default"]),
            ("openmpi.configure --disable-mpi-fortran", "yes", "-"),
        ),
        (changed("horovod", "sha256", to="12"), ("horovod.sha256", "02", "12")),
        # The same version from elsewhere, such as a build for another accelerator.
        (changed("wheels", 2, "sha256", to="16"), ("torch 2.13.0 sha256", "06", "16")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_difference_is_shown_with_both_values(new: Lock, change: tuple[str, str, str]) -> None:
    (row,) = show.differences(LOCK, new)
    assert all(cell.startswith(beginning) for cell, beginning in zip(row, change, strict=True))


def test_a_stack_is_found_by_a_prefix_of_its_id(cache: Builds) -> None:
    for stack in (LOCK["id"], OTHER):
        pack_stack(cache, stack)
    assert show.find(LOCK["id"]) == LOCK
    assert show.find("aaa") == LOCK
    assert show.find("aab")["id"] == OTHER


def test_an_ambiguous_or_unknown_prefix_is_refused(cache: Builds) -> None:
    with pytest.raises(FarandoleError, match=f"no stack begins with aaa in {cache.stacks}; packed there: none"):
        show.find("aaa")
    for stack in (LOCK["id"], OTHER):
        pack_stack(cache, stack)
    for prefix, message in (("aa", "more than one stack begins with aa"), ("c", "no stack begins with c")):
        with pytest.raises(FarandoleError, match=f"{message} in {cache.stacks}; packed there: {LOCK['id']}, {OTHER}"):
            show.find(prefix)


def test_a_lock_file_can_be_given_instead_of_an_id(tmp_path: Path) -> None:
    path = saved(tmp_path / "stack.lock.yml", LOCK)
    assert show.find(str(path)) == {**LOCK, "id": identity(LOCK)}


@pytest.mark.parametrize(
    "text", ["", "all: {hosts: {}}\n", "- a\n", "a: [\n"], ids=["empty", "other", "list", "broken"]
)
def test_a_file_that_is_not_a_lock_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(text)
    with pytest.raises(FarandoleError, match=f"^{path} (is|has) .*make a new one: rm {path} && farandole lock -i "):
        show.find(str(path))


def test_show_prints_a_valid_lock(cache: Builds, tmp_path: Path) -> None:
    lock = changed("wanted", "pins", to=["numpy[red]==2.4.6", ":bug:"])
    lock["id"] = identity(lock)
    pack(cache.stack(lock), lock=lock, unpacked=1, contents={})
    path = tmp_path / "stack.lock.yml"
    path.write_text(printed("show", lock["id"][:6]))
    assert show.find(str(path)) == lock


def test_the_command_that_a_rollback_prints_replaces_the_lock_or_leaves_it_alone(tmp_path: Path) -> None:
    inventory = tmp_path / "my cluster"
    inventory.mkdir()
    groups = {name: {"hosts": {"node-1": None}} for name in ("cluster", "head")}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(groups))
    path, lock = saved(inventory / "stack.lock.yml", LOCK), changed("wanted", "pins", to=["numpy==2.4.6"])
    lock["id"] = identity(lock)

    def said(known: Lock) -> str:
        loader = DataLoader()
        task = loader.load_from_file(str(ROOT / "roles/stack/tasks/rollback.yml"), trusted_as_template=True)[-1]
        variables = task.get("vars", {}) | {
            "ansible_play_hosts": ["node-1"],
            "stack_lock": known,
            "inventory_dir": str(inventory),
        }
        return str(Templar(loader, variables).template(task["ansible.builtin.debug"]["msg"]))

    def run() -> int:
        known = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = said(lock).partition("run: ")[2]
        return subprocess.run(command, shell=True, env=known, capture_output=True, check=False).returncode  # noqa: S602

    assert run() == 1
    assert show.find(str(path))["id"] == identity(LOCK)
    pack(Builds(tmp_path / ".farandole/my cluster/builds").stack(lock), lock=lock, unpacked=1, contents={})
    assert run() == 0
    assert show.find(str(path)) == lock
    assert "stack show" not in said({"id": lock["id"]})


def test_differences_are_printed(cache: Builds, tmp_path: Path) -> None:
    pack_stack(cache, LOCK["id"])
    path = saved(tmp_path / "lock", changed("wanted", "pins", to=["numpy[red]"]))
    assert [line.split() for line in printed("diff", "aaa", str(path)).splitlines()] == [
        ["component", "aaa", str(path)],
        ["wanted.pins", "numpy[red]", "-", "yes"],
    ]
    assert printed("diff", "aaa", LOCK["id"]) == "nothing differs\n"


def test_packed_stacks_are_listed(cache: Builds) -> None:
    assert printed("list") == f"no stack is packed in {cache.stacks}\n"
    for stack in (LOCK["id"], OTHER):
        pack_stack(cache, stack)
    head, *rows = (line.split() for line in printed("list").splitlines())
    assert " ".join(head) == "stack platform tensorflow torch horovod openmpi numpy adds size packed kept in"
    assert [row[:3] for row in rows] == [[stack, "debian-12", "x86_64"] for stack in (LOCK["id"], OTHER)]
    assert {row[-1] for row in rows} == {str(cache.root)}
    assert rows[0][4:8] == ["2.13.0", "0.28.1", "4.1.4", "2.4.6"]


def test_builds_may_be_in_the_home_of_whoever_calls_but_not_in_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pack_stack(Builds(tmp_path / "mine"), OTHER)
    cluster = {"hosts": {"node-1": {}}, "vars": {"stack_builds": "~/mine"}}
    inventory = {"cluster": cluster, "head": {"hosts": {"node-1": {}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    assert show.find(OTHER, tmp_path / "hosts.yml")["id"] == OTHER
    known = load("filter", "farandole").FilterModule().filters()["stack_known"]
    assert known("~/mine") == {f"stacks/{OTHER}": ["07"]}
    cluster["vars"] = {"stack_builds": "{{ mine }}"}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    with pytest.raises(FarandoleError, match="stack_builds must be a plain path here"):
        builds_of(tmp_path / "hosts.yml")


def test_each_cluster_has_its_own_builds(cache: Builds, tmp_path: Path) -> None:
    pack_stack(cache, OTHER)
    pack_stack(Builds(tmp_path / ".farandole/mine/builds"), LOCK["id"])
    pack_stack(Builds(tmp_path / "theirs"), "cccc00000000")
    for name, builds in (("mine", {}), ("theirs", {"stack_builds": str(tmp_path / "theirs")})):
        (tmp_path / name).mkdir(exist_ok=True)
        inventory = {"cluster": {"hosts": {"node-1": {}}, "vars": builds}, "head": {"hosts": {"node-1": {}}}}
        (tmp_path / name / "hosts.yml").write_text(yaml.safe_dump(inventory))
    assert [builds.root for builds in builds_of(tmp_path / "mine")] == [tmp_path / ".farandole/mine/builds"]
    assert [builds.root for builds in builds_of(tmp_path / "theirs")] == [tmp_path / "theirs"]
    assert {line.split()[0] for line in printed("list").splitlines()} == {"stack", OTHER, LOCK["id"]}
    assert show.find("cccc", tmp_path / "theirs")["id"] == "cccc00000000"
    with pytest.raises(FarandoleError, match="no stack begins with cccc in"):
        show.find("cccc", tmp_path / "mine")


def test_an_unreachable_node_is_listed_with_its_reason() -> None:
    stacks = {"current": "aaaa", "former": "", "installed": ["aaaa", "bbbb"]}
    table = show.node_table({"node-1": {"probe": {"stacks": stacks}}, "node-2": {"unreachable_reason": "No route"}})
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["node-1", "aaaa", "-", "aaaa", "bbbb"],
        ["node-2", "?", "?", "No", "route"],
    ]


def test_the_nodes_are_really_asked(tmp_path: Path) -> None:
    here = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"cluster": {"hosts": {"node-1": here}}}))
    assert show.nodes_of(inventory)["node-1"]["probe"]["accounts"] == {}
