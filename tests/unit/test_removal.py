"""What leaves a node again: the module remove, run as on a node, the roles' lists, and the report."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from farandole.core.programs import LAUNCHER
from farandole.inventory.cluster import HostVars
from farandole.inventory.facts import describe
from farandole.plays.removal import in_use, report

from .loading import ROOT, load
from .stack import run_module

REMOVE = "farandole.cluster.remove"
module = load("modules", "remove")
hosts = load("modules", "former_hosts")
accounts = load("modules", "former_accounts")
ANSWER = {
    "_stack_use": {"running": []},
    "_stack_removed": {"removed": ["/opt/farandole"], "left": [], "packages": ["curl", "x; reboot", "openssh-server"]},
    "_base_removed": {"removed": [], "left": ["\x1b[2Jaccount trainer"], "packages": []},
}


def remove(*, check_mode: bool = False, **arguments: Any) -> dict[str, Any]:
    texts = {name: value if name == "lines" else [str(item) for item in value] for name, value in arguments.items()}
    return run_module("remove", texts, check_mode=check_mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file, a folder and a link to something that is not ours."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/data").write_text("data")
    ours = tmp_path / "ours"
    (ours / "stacks/1").mkdir(parents=True)
    (ours / "stacks/link").symlink_to(tmp_path / "theirs")
    (ours / "current").symlink_to("stacks/1")
    return ours


def test_removes_once_and_then_finds_nothing(folder: Path) -> None:
    wanted: dict[str, Any] = {"paths": [folder / "current", folder / "stacks", folder / "mpi"], "empty": [folder]}
    predicted = remove(check_mode=True, **wanted)
    assert (folder / "stacks/1").is_dir()
    done = remove(**wanted)
    assert predicted["removed"] == done["removed"] == [str(folder / "current"), str(folder / "stacks"), str(folder)]
    assert list(folder.parent.iterdir()) == [folder.parent / "theirs"]
    assert (folder.parent / "theirs/data").read_text() == "data"
    assert remove(**wanted)["changed"] is False


def test_removes_what_a_killed_run_has_left_and_nothing_that_is_not_ours(folder: Path) -> None:
    (folder / "notes").touch()
    (folder / "stacks").rename(folder / ".stacks.removing")
    (folder / ".environment.abc.new").touch()
    wanted = [folder / name for name in ("stacks", "environment", "current")]
    assert remove(paths=wanted, empty=[folder])["left"] == [f"{folder}, because others have put something there: notes"]
    assert [path.name for path in folder.iterdir()] == ["notes"]
    (folder.parent / "elsewhere").symlink_to(folder)
    assert "because it is a link" in remove(empty=[folder.parent / "elsewhere"])["left"][0]
    (folder / "notes").unlink()
    assert remove(paths=wanted, empty=[folder])["left"] == []
    assert not folder.exists()


def test_never_removes_what_is_mounted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = folder.parent / "mountinfo"
    table.write_text(f"1 0 0:1 / {folder}/stacks/1 rw - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(module, "TABLE", table)
    removal = module.Removal(SimpleNamespace(check_mode=False))
    for name in ("stacks", "current"):
        removal.path(folder / name)
    assert removal.removed == [str(folder / "current")]
    assert removal.left == [f"{folder}/stacks: {folder}/stacks/1 is a mount point; unmount it and run this again"]
    assert (folder / "stacks/1").is_dir()


def test_a_command_of_somebody_else_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMANDS", tmp_path)
    wrapper, own = (ROOT / "roles/fabric/templates/wrapper.j2"), (ROOT / "roles/modules/files/module")
    ours = {"mpirun": wrapper.read_text(), "module": own.read_text(), "farandole": LAUNCHER}
    for name, text in {**ours, "theirs": "#!/bin/sh\n. /opt/farandole/theirs\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "horovodrun").symlink_to("mpirun")
    removal = module.Removal(SimpleNamespace(check_mode=False))
    for name in (*ours, "theirs", "horovodrun"):
        removal.path(tmp_path / name)
    assert removal.removed == [str(tmp_path / name) for name in ours]
    assert removal.left == [f"{tmp_path / name}, because it is not Farandole's" for name in ("theirs", "horovodrun")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["horovodrun", "theirs"]


def test_a_home_with_a_mount_in_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 0:1 / / rw - ext4 /dev/sda1 rw\n1 0 0:1 / /home/alice/my\\040data rw - ext4 /dev/sdb1 rw\n"
        "1 0 0:1 / /home/alicia rw - ext4 /dev/sdc1 rw\n"
    )
    monkeypatch.setattr(accounts, "TABLE", table)
    homes = {name: accounts.mounted_in(Path("/home") / name) for name in ("alice", "alicia", "ali")}
    assert homes == {"alice": "/home/alice/my data", "alicia": "/home/alicia", "ali": ""}


@pytest.mark.parametrize(
    ("keep", "removed", "ended"), [(False, ["alice"], ["alice", "bob"]), (True, [], [])], ids=["accounts", "none"]
)
def test_only_accounts_that_are_listed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keep: bool, removed: list[str], ended: list[str]
) -> None:
    """Of the others of the group, who were taken off the list, nobody has been told."""
    known = {
        name: SimpleNamespace(pw_name=name, pw_uid=uid, pw_dir=str(tmp_path / name))
        for name, uid in (("alice", 2001), ("bob", 2002), ("system", 7))
    }
    commands, killed, answers = list[list[str]](), list[int](), list[dict[str, Any]]()

    def run_command(command: list[str], **_: bool) -> tuple[int, str, str]:
        commands.append(command)
        return 0, "ext4", ""

    fake = SimpleNamespace(
        params={"names": ["alice"], "group": "jobs", "keep": keep}, check_mode=False, run_command=run_command,
        exit_json=lambda **said: answers.append(said), fail_json=lambda **_: None,
    )  # fmt: skip
    monkeypatch.setattr(accounts, "AnsibleModule", lambda **_: fake)
    monkeypatch.setattr(accounts, "account", known.get)
    monkeypatch.setattr(accounts, "group", lambda _: SimpleNamespace(gr_mem=["alice", "bob", "system", "gone"]))
    monkeypatch.setattr(accounts, "end_all", lambda uid, _: killed.append(uid))
    monkeypatch.setattr(accounts, "CRONTABS", tmp_path)
    accounts.main()
    assert [command[-1] for command in commands if command[0] == "userdel"] == removed
    assert killed == [known[name].pw_uid for name in ended]
    assert [command[2] for command in commands if command[1] == "disable-linger"] == ended
    (told,) = answers
    assert told["removed"] == [*(f"account {name}" for name in removed), "group jobs"]
    assert f"account bob with its home {tmp_path}/bob, because it is no longer in cluster_users" in told["left"]


def test_a_pattern_takes_only_roots_own_where_every_account_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    for name in ("landing.1", "landing.2", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "landing.3").symlink_to("other")
    os.chown(tmp_path / "landing.2", 65534, 65534)
    assert remove(paths=[tmp_path / "landing*"])["removed"] == [str(tmp_path / "landing.1")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["landing.2", "landing.3", "other"]


def test_removes_lines_and_a_file_without_others(tmp_path: Path) -> None:
    mixed, ours = tmp_path / "mixed", tmp_path / "ours"
    mixed.write_text("@cert x farandole\nhost key\n")
    mixed.chmod(0o640)
    ours.write_text("@cert x farandole\n")
    remove(lines={str(path): "^@.* farandole$" for path in (mixed, ours)})
    assert (mixed.read_text(), mixed.stat().st_mode & 0o777) == ("host key\n", 0o640)
    assert not ours.exists()


@pytest.mark.parametrize("end", ["# END\n", "# END", ""])
def test_the_block_leaves_the_table_of_hosts_even_if_it_was_cut_off(end: str) -> None:
    assert hosts.without(f"127.0.0.1 localhost\n# BEGIN\n10.0.0.1 node-1\n{end}", "# BEGIN", "# END") == (
        "127.0.0.1 localhost\n"
    )


def test_the_own_name_is_where_the_installer_puts_it() -> None:
    assert hosts.with_own("127.0.0.1\tlocalhost\n\n::1 ip6\n", "n.example.org") == (
        "127.0.0.1\tlocalhost\n127.0.1.1\tn.example.org n\n\n::1 ip6\n"
    )
    assert hosts.names("127.0.1.1 a b # c\n# 1 d\n") == {"a", "b"}


def written(tasks: Any) -> list[str]:
    """The paths of all files that tasks write."""
    if isinstance(tasks, list):
        return [path for task in tasks for path in written(task)]
    if not isinstance(tasks, dict):
        return []
    own = [str(tasks["path"])] if "path" in tasks and {"content", "template"} & {*tasks} else []
    return own + [path for value in tasks.values() for path in written(value)]


def is_removed(path: str, listed: set[str]) -> bool:
    return path in listed or any(path.startswith(f"{folder}/") for folder in listed)


@pytest.mark.parametrize(
    "role", sorted(path.parents[1] for path in ROOT.glob("roles/*/tasks/remove.yml")), ids=lambda role: role.name
)
def test_a_role_removes_every_file_that_it_writes(role: Path) -> None:
    files = {name: yaml.safe_load(name.read_text()) for name in (role / "tasks").glob("*.yml")}
    (removal,) = (tasks for name, tasks in files.items() if name.name == "remove.yml")
    listed = {str(path) for task in removal for path in task.get(REMOVE, {}).get("paths", [])}
    listed |= {path for task in removal for path in task.get(REMOVE, {}).get("lines", {})}
    assert {path for path in written(list(files.values())) if not is_removed(path, listed)} == set()


def test_every_role_that_writes_files_or_installs_packages_can_be_removed() -> None:
    ours = {"write_files", "packages", "apt_source", "held_debs", "stack_install"}
    verbs = {f"farandole.cluster.{name}" for name in ours}
    for role in sorted(ROOT.glob("roles/*")):
        text = "".join(path.read_text() for path in role.glob("tasks/*.yml") if path.name != "remove.yml")
        if any(f"\n  {verb}:" in text for verb in verbs):
            assert (role / "tasks/remove.yml").exists(), role.name
            assert (
                f"name: farandole.cluster.{role.name}, tasks_from: remove"
                in (ROOT / "playbooks/remove.yml").read_text()
            )


def test_the_report_is_given_every_answer() -> None:
    modules = {
        f"farandole.cluster.{name}" for name in ("remove", "clock", "former_hosts", "former_accounts", "mount_units")
    }
    tasks = [task for path in ROOT.glob("roles/*/tasks/remove.yml") for task in yaml.safe_load(path.read_text())]
    registered = {task["register"] for task in tasks if modules & {*task}}
    (report,) = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text())[-1]["tasks"]
    assert {*report["farandole.cluster.removal_report"]["answers"]} == registered


def test_the_report_names_what_stays_and_what_is_not_done() -> None:
    lost = {"_stack_use": {"unreachable": True, "msg": "No route to host"}}
    text, missed = report(
        ["node-1", "node-2", "node-3"],
        {"node-1": ANSWER, "node-2": lost, "node-3": {}},
        ["_stack_removed", "_base_removed"],
        describe({"cluster": ["node-1", "node-2", "node-3", "node-4"]}, "/state", ["node-3"]),
        inventory="/inventory/mine",
    )
    assert "node-1: removed\n  /opt/farandole\n" in text
    # Their words are shown, but never run.
    assert "\\x1b[2Jaccount trainer" in text
    assert "apt-get purge curl\n" in text
    assert "Take node-1 out of /inventory/mine and run site.yml" in text
    assert "/state" in text
    assert "node-2 does not answer (No route to host)" in missed
    assert "node-3 is revoked" in missed
    # When all leave, nobody is told to take nodes out.
    cluster = describe({"cluster": ["node-1"]}, "/state")
    text, missed = report(["node-1"], {"node-1": ANSWER}, ["_base_removed"], cluster, inventory="i")
    assert ("Take " in text, missed) == (False, "")


def test_what_only_a_later_role_could_remove_does_not_stay() -> None:
    early = {
        "removed": [],
        "left": ["/opt/a, because others have put something there: b", "/opt/c, because it is a link"],
    }
    late = {"removed": ["/opt/a/b", "/opt/a"], "packages": ["chrony", "curl", "sudo"]}
    cluster = describe({"cluster": ["node-1"]}, "/state")
    text, _ = report(["node-1"], {"node-1": {"one": early, "two": late}}, ["one", "two"], cluster, inventory="i")
    assert "what stays\n  /opt/c, because it is a link\n" in text
    assert "apt-get purge curl\n" in text


def test_what_is_running_is_named_for_each_node() -> None:
    used: HostVars = {"node-1": {"_stack_use": {"running": ["run 3 of trainer"]}}, "node-2": ANSWER, "node-3": {}}
    assert "node-1: run 3 of trainer. Wait" in in_use(list(used), used)
    assert in_use(["node-2", "node-3"], used) == ""


def test_a_queue_of_somebody_else_is_left_alone() -> None:
    tasks = yaml.safe_load((ROOT / "roles/slurm/tasks/remove.yml").read_text())
    (removal,) = (task for task in tasks if REMOVE in task)
    assert removal["when"] == "__slurm_record is file"
