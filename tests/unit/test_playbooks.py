"""The playbooks, started from outside the repository."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from farandole.core.files import sha256
from farandole.inventory import excluded
from farandole.inventory.state import state_folder
from farandole.stack.lock import identity

from .loading import ROOT
from .stack import LOCK, changed

VERBS = ("backup", "preflight", "remove", "restore", "rollback", "upgrade", "validate")


def ansible_playbook(folder: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment = {**known, "ANSIBLE_NOCOLOR": "1", "COLUMNS": "500", **variables}
    command = ["ansible-playbook", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def play(playbook: str, folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    arguments = ("-i", ROOT / "inventory/example", "--syntax-check", ROOT / playbook)
    return ansible_playbook(folder, *arguments, *options, HOME=str(folder), **variables)


@pytest.mark.parametrize("playbook", ["site.yml", *(f"playbooks/{name}.yml" for name in VERBS)])
def test_a_run_with_unsafe_settings_is_refused_with_the_lines_to_add(playbook: str, tmp_path: Path) -> None:
    done = play(playbook, tmp_path)
    assert done.returncode != 0
    assert f"export ANSIBLE_CONFIG={ROOT}/ansible.cfg" in done.stderr
    assert "inject_facts_as_vars = false\ncallbacks_enabled = farandole.cluster.plain_terminal\n" in done.stderr
    assert "host_key_checking" not in done.stderr
    if playbook == "site.yml":
        for option in ("--skip-tags=stack,always", "--start-at-task=Set up ssh between the nodes"):
            done = play(playbook, tmp_path, option, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"))
            assert "Leave this option out" in done.stderr
        done = play(playbook, tmp_path, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_HOST_KEY_CHECKING="no")
        assert "\nhost_key_checking = true  (unset ANSIBLE_HOST_KEY_CHECKING, which overrides it)\n" in done.stderr


def test_a_clone_and_the_package_of_another_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "farandole").mkdir()
    (tmp_path / "farandole/__init__.py").touch()
    done = play("site.yml", tmp_path, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), PYTHONPATH=str(tmp_path))
    assert f"the Python package farandole in {tmp_path}/farandole is not that of {ROOT}: " in done.stderr


def test_a_run_from_any_folder_may_name_ansible_cfg(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(ROOT)
    done = play("site.yml", tmp_path, ANSIBLE_CONFIG=str(tmp_path / "link/ansible.cfg"))
    assert done.returncode == 0, done.stderr


def test_an_empty_group_of_builders_leaves_building_to_the_head(tmp_path: Path) -> None:
    groups = {"cluster": {"hosts": {"node-1": None}}, "head": {"hosts": {"node-1": None}}, "builders": {"hosts": {}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    done = ansible_playbook(ROOT, "-i", tmp_path, "--list-hosts", "playbooks/build.yml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["(1):", "node-1"]


def test_wheels_are_fetched_into_the_cache_of_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "cache/wheels").mkdir(parents=True)
    lock = changed("wheels", to=[dict(LOCK["wheels"][0])])
    (wheel,) = lock["wheels"]
    path = tmp_path / "cache/wheels" / wheel["file"]
    path.write_text("wheel")
    wheel["sha256"] = sha256(path)
    (tmp_path / "stack.lock.yml").write_text(yaml.safe_dump({**lock, "id": identity(lock)}))
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"cluster": {"hosts": {"node-1": None}}}))
    fetch = {"ansible.builtin.import_role": {"name": "farandole.cluster.frameworks", "tasks_from": "fetch"}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "cluster", "gather_facts": False, "tasks": [fetch]}]))
    options: list[str | Path] = [
        "-e",
        f"stack_cache={tmp_path}/cache",
        "-i",
        tmp_path / "hosts.yml",
        tmp_path / "play.yml",
    ]
    done = ansible_playbook(ROOT, *options, XDG_CACHE_HOME=str(tmp_path), PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stdout
    assert "changed=0" in done.stdout


def test_validation_goes_on_without_a_node_that_preflight_has_excluded_in_the_same_run(tmp_path: Path) -> None:
    cluster = {"hosts": dict.fromkeys(("node-1", "node-2", "node-3", "node-4"))}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"cluster": cluster, "head": {"hosts": {"node-1": None}}}))
    state = state_folder(tmp_path, str(tmp_path / "state"))
    with excluded.changing(state) as entries:
        entries["node-2"] = replace(excluded.by_person("", "it is off"), by="check")
        entries["node-3"] = excluded.by_person("somebody", "it is loud")
    role = {"ansible.builtin.import_role": {"name": "farandole.cluster.validation", "tasks_from": "trust"}}
    plays = [{"hosts": "cluster", "gather_facts": False, "tasks": [role]}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(plays))

    def refusal(hosts: str, *more: str) -> str:
        options = (
            "-e",
            f"base_state_dir={tmp_path}/state",
            "-e",
            f"validation_hosts={hosts}",
            "--limit",
            "node-4",
            *more,
        )
        return ansible_playbook(ROOT, "-i", tmp_path / "hosts.yml", *options, tmp_path / "play.yml").stdout

    exclude = ("-e", "on_bad_node=exclude")
    assert "preflight has excluded node-2\n" in refusal("node-2", *exclude)
    # The next thing that it refuses.
    assert "--limit excludes the head" in refusal("node-2,node-4", *exclude)
    # They are validated before somebody includes them.
    assert "--limit excludes the head" in refusal("node-3", *exclude)
    assert "--limit excludes the head" in refusal("node-2")


@pytest.mark.parametrize(
    ("head", "said"), [({}, "ok: [node-2 -> node-1(127.0.0.1)]"), ({"ansible_port": 1}, "...ignoring")]
)
def test_the_head_learns_of_a_node_by_a_run_without_it_and_may_be_off(
    head: dict[str, int], said: str, tmp_path: Path
) -> None:
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {"node-1": {"ansible_host": "127.0.0.1", **(head or local)}, "node-2": local, "node-3": local}
    groups = {"cluster": {"hosts": hosts}, "head": {"hosts": {"node-1": None}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    role = {"ansible.builtin.import_role": {"name": "farandole.cluster.monitoring", "tasks_from": "known"}}
    after = {"ansible.builtin.debug": {"msg": "goes on"}}
    play = {"hosts": "cluster", "gather_facts": False, "any_errors_fatal": True, "tasks": [role, after]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    options = ("-i", tmp_path / "hosts.yml", "-e", f"base_state_dir={tmp_path}/state", "--limit", "node-2,node-3")
    done = ansible_playbook(ROOT, *options, "--check", tmp_path / "play.yml")
    assert (done.returncode, done.stdout.count("goes on"), said in done.stdout) == (0, 2, True), done.stdout


@pytest.mark.parametrize(
    ("file", "hosts", "revoked", "record"),
    [
        ("set_up", "node-1,node-2,node-3", [], "node-1\n"),
        # The former head still has its Prometheus.
        ("set_up", "node-1,node-3", [], "node-2\n"),
        ("set_up", "node-1,node-3", ["node-2"], "node-1\n"),
        ("remove", "node-1,node-2", ["node-3"], None),
        ("remove", "node-1,node-2", [], "node-2\n"),
    ],
)
def test_what_is_left_of_monitoring_is_recorded(
    file: str, hosts: str, revoked: list[str], record: str | None, tmp_path: Path
) -> None:
    own = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ssh_trust_revoked": revoked}
    cluster = {"hosts": dict.fromkeys(("node-1", "node-2", "node-3")), "vars": own}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"cluster": cluster, "head": {"hosts": {"node-1": None}}}))
    state = state_folder(tmp_path, str(tmp_path / "state"))
    state.mkdir(parents=True)
    (state / "monitored").write_text("node-2\n")
    role = ROOT / "roles/monitoring"
    tasks = [
        task for task in yaml.safe_load((role / f"tasks/{file}.yml").read_text()) if "record" in task["name"].lower()
    ]
    known = [str(role / "vars/main.yml"), str(role / "defaults/main/cluster.yml")]
    play = {"hosts": "cluster", "gather_facts": False, "vars_files": known, "tasks": tasks}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    options = ("-i", tmp_path / "hosts.yml", "-e", f"base_state_dir={tmp_path}/state", "--limit", hosts)
    done = ansible_playbook(ROOT, *options, tmp_path / "play.yml")
    assert (done.returncode, len(tasks)) == (0, 1), done.stdout
    assert ((state / "monitored").read_text() if (state / "monitored").exists() else None) == record


@pytest.mark.parametrize(("hosts", "unknown"), [("node-1 node-2", '"node-1 node-2"'), ("node-1 , node-3", '"node-3"')])
def test_names_without_a_comma_between_them_are_not_taken_for_the_first_one(
    tmp_path: Path, hosts: str, unknown: str
) -> None:
    nodes = {name: {"ansible_host": "127.0.0.1", "ansible_port": 1} for name in ("node-1", "node-2")}
    cluster = {"hosts": nodes, "vars": {"base_state_dir": f"{tmp_path}/state"}}
    groups = {"cluster": cluster, "head": {"hosts": {"node-1": None}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    command = [str(Path(sys.executable).with_name("farandole")), "validate", "-i", str(tmp_path), "--hosts", hosts]
    done = subprocess.run(
        command, env={**os.environ, "COLUMNS": "500"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert f"validation_hosts names {unknown}, not in group cluster" in done.stdout
