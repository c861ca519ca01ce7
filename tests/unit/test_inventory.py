"""Inventories that cannot be used: said in one message, which file and line, whatever the command."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.inventory.facts import of_inventory
from farandole.inventory.reading import existing
from farandole.inventory.variables import host_variables, refuse_unknown
from farandole.stack.settings import inventory_variables, sources_of

from .loading import ROOT, act

GOOD = """\
cluster:
  hosts:
    node-1: {ansible_host: 192.0.2.1}
    node-2: {ansible_host: 192.0.2.2}
head:
  hosts:
    node-1:
"""


def folder(path: Path, content: str, **variables: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "hosts.yml").write_text(content)
    for name, text in variables.items():
        (path / "group_vars").mkdir(exist_ok=True)
        (path / "group_vars" / f"{name}.yml").write_text(text)
    return path


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (GOOD.replace("192.0.2.1}", "192.0.2.1"), "hosts.yml, line 4, column 11: expected ',' or '}'"),
        (GOOD.replace("  hosts", "\thosts", 1), "hosts.yml, line 2, column 1: found character '\\t'"),
        (GOOD.replace("  node-2", "   node-2"), "hosts.yml, line 4, column 6: "),
        (GOOD.replace("node-2", "node-1"), "hosts.yml, line 4, column 5: node-1 is already in line 3"),
        ("cluster:\n  hosts:\n    - node-1\n", "hosts.yml, line 3, column 5: hosts of cluster "),
        ("all:\n  children:\n    cluster:\n      hosts: [a]\n", "hosts.yml, line 4, column 14: hosts of cluster "),
        ("", "hosts.yml is empty"),
        ("- node-1\n", "hosts.yml is empty, or not a mapping"),
        ("\x00", "hosts.yml is not YAML: "),
    ],
)
def test_a_malformed_inventory_is_told_with_file_and_line(content: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(FarandoleError) as told:
        host_variables(folder(tmp_path, content))
    assert str(told.value).startswith(f"{tmp_path}/{place}")


@pytest.mark.parametrize(("value", "expected"), [("false", False), ("no", False), ("true", True), ("yes", True)])
def test_a_boolean_that_is_a_string_counts_as_what_it_says(value: str, *, expected: bool, tmp_path: Path) -> None:
    inventory = folder(tmp_path, GOOD, all=f"slurm_enabled: '{value}'\nstack_build_wheels: '{value}'\n")
    assert bool(of_inventory(inventory).queue) is expected
    assert bool(sources_of(inventory_variables(inventory))) is expected


def test_a_boolean_that_is_neither_is_refused(tmp_path: Path) -> None:
    inventory = folder(tmp_path, GOOD, all="stack_build_wheels: maybe\n")
    with pytest.raises(FarandoleError, match="stack_build_wheels must be a plain true or false here, but is 'maybe'"):
        sources_of(inventory_variables(inventory))


def plainly(inventory: Path, state: str = "") -> str:
    """What Ansible itself says of an inventory that is refused."""
    own_state = ("-e", json.dumps({"base_state_dir": state or f"{inventory}/state"}))
    command = ["ansible-playbook", "-i", str(inventory), *own_state, "playbooks/preflight.yml"]
    plain = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert plain.returncode != 0
    return " ".join((plain.stdout + plain.stderr).split())


def test_plain_ansible_tells_the_same(tmp_path: Path) -> None:
    folder(tmp_path, GOOD.replace("node-2", "node-1"))
    assert f"{tmp_path}/hosts.yml, line 4, column 5: node-1 is already in line 3" in plainly(tmp_path)


@pytest.mark.parametrize(
    ("there", "first"), [("all/mine.yml", "all"), ("all.yaml", "all.yml"), ("all.json", "all.yml"), ("all", "all")]
)
def test_settings_that_ansible_would_ignore_are_refused(there: str, first: str, tmp_path: Path) -> None:
    inventory = folder(tmp_path, GOOD, all="validation_seconds: 300\n")
    second = inventory / "group_vars" / there
    second.parent.mkdir(exist_ok=True)
    second.write_text("{}")
    unread = second if first == "all.yml" else inventory / "group_vars/all.yml"
    why = f"Ansible does not read {unread}, because there is {inventory}/group_vars/{first}, too"
    with pytest.raises(FarandoleError) as told:
        existing(inventory)
    assert str(told.value).startswith(why)
    assert why in plainly(inventory)


@pytest.mark.parametrize("place", ["state", "{{ inventory_dir }}/state", "/$HOME/state", "~nobody-here/state"])
def test_a_state_folder_that_is_another_one_for_commands_than_for_playbooks_is_refused(
    place: str, tmp_path: Path
) -> None:
    inventory = folder(tmp_path, GOOD, all=json.dumps({"base_state_dir": place}))
    why = f"base_state_dir is '{place}', which"
    with pytest.raises(FarandoleError, match=re.escape(why)):
        of_inventory(inventory)
    # Ansible may double the quotes.
    assert why in plainly(inventory, place).replace("''", "'")
    assert {path.name for path in tmp_path.iterdir()} == {"hosts.yml", "group_vars"}


def test_a_misspelt_group_is_still_told_where_localhost_stands_for_the_nodes(tmp_path: Path) -> None:
    assert "rename group clusters to cluster" in plainly(folder(tmp_path, GOOD.replace("cluster:", "clusters:")))


def test_variables_are_read_like_the_hosts_and_the_rest_is_left_to_ansible(tmp_path: Path) -> None:
    encrypted = "$ANSIBLE_VAULT;1.1;AES256\n6162\n"
    tagged = "a: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  6162\nb: !unsafe '{{ x }}'\n"
    inventory = folder(tmp_path / "mine", GOOD, all=tagged, cluster=encrypted, head="")
    (inventory / "stack.lock.yml").write_text("{")
    (inventory / ".hidden.yml").write_text("{")
    assert existing(inventory) == inventory
    (inventory / "group_vars/all.yml").write_text("a: b: c\n")
    with pytest.raises(FarandoleError, match=r"group_vars/all\.yml, line 1, column 5: "):
        existing(inventory)
    file = tmp_path / "hosts.json"
    file.write_text('{\n\t"cluster": {"hosts": {"node-1": null}}\n}')
    assert existing(file) == file


def refused(*arguments: str) -> str:
    """What a command says that does nothing."""
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, FarandoleError), done.output
    return str(done.exception)


@pytest.mark.parametrize("verb", ["preflight", "apply", "validate", "remove", "lock", "status", "runs", "node list"])
def test_an_inventory_that_is_missing_or_empty_is_one_message_in_every_command(verb: str, tmp_path: Path) -> None:
    for inventory in (tmp_path / "missing", tmp_path):
        assert str(inventory) in refused(*verb.split(), "-i", str(inventory))


@pytest.mark.parametrize("verb", ["remove", "lock", "status", "runs", "node list"])
def test_an_inventory_without_a_cluster_is_refused_by_every_command(verb: str, tmp_path: Path) -> None:
    inventory = folder(tmp_path, "servers: {hosts: {node-1: {}}}\n")
    assert "inventory/example/hosts.yml" in refused(*verb.split(), "-i", str(inventory))


def test_unknown_names_are_answered_with_those_that_exist(tmp_path: Path) -> None:
    inventory = folder(tmp_path, GOOD)
    for known in ("", "node-1,node-2", "cluster,!head", "node-*", "all", "~node-[12]", "node-1:node-2"):
        refuse_unknown(inventory, "--limit", known)
    for pattern in ("node-3", "node-1,nod-2", "cluster,!hed"):
        with pytest.raises(FarandoleError, match="node-1, node-2"):
            refuse_unknown(inventory, "--limit", pattern)
    refused("apply", "-i", str(inventory), "--limit", "node-9")
    refused("preflight", "-i", str(inventory), "--hosts", "node-9")


@pytest.mark.parametrize("command", ["remove --hosts", "upgrade --hosts", "run --hosts", "apply --limit", "drift -l"])
def test_a_list_without_a_name_does_not_mean_all_nodes(command: str, tmp_path: Path) -> None:
    inventory, (verb, option) = folder(tmp_path, GOOD), command.split()
    for nodes in ("", " ", ","):
        assert "names no node" in refused(verb, "-i", str(inventory), option, nodes, *["true"] * (verb == "run"))


def test_the_lock_alone_says_what_to_run(tmp_path: Path) -> None:
    arguments = {"inventory_dir": str(tmp_path), "nodes": ["node-1"], "frameworks": ["pytorch"]}
    message = act("stack_lock", arguments, {"hostvars": {"node-1": {}}})["msg"]
    assert f"farandole lock -i {tmp_path}" in message
    assert f"ansible-playbook -i {tmp_path} playbooks/preflight.yml playbooks/lock.yml" in message


def test_the_version_is_told_and_no_command_read_for_that() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "farandole", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"farandole {importlib.metadata.version('farandole')}\n"
    assert re.findall(r"farandole\.cli\.\w+$", done.stderr, re.MULTILINE) == ["farandole.cli.app"]


def folders(*names: str) -> None:
    for name in names:
        Path("inventory", name).mkdir(parents=True)
        Path("inventory", name, "hosts.yml").write_text("cluster: {hosts: {node-1: }}\nhead: {hosts: {node-1: }}\n")


def asked(*arguments: str, **environment: str) -> str:
    """What a command that contacts nobody says of its inventory."""
    done = CliRunner().invoke(app, ["node", "exclude", "nobody", "--why", "x", *arguments], env=environment)
    return f"{done.output}{done.exception}"


def test_the_only_inventory_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARANDOLE_STATE", str(tmp_path / "state"))
    assert "there is none in ./inventory; farandole init makes one" in asked()
    folders("example", "mine")
    assert "there is no node nobody; the nodes are node-1" in asked()
    assert "there is no node nobody" in asked("-i", "mine")
    assert "there is no inventory other" in asked("-i", "other")
    folders("other")
    assert "which inventory? there are inventory/mine, inventory/other. Name it" in asked()
    assert "there is no node nobody" in asked(FARANDOLE_INVENTORY="other")
    # A path counts before a short name.
    (tmp_path / "mine").mkdir()
    assert "mine has no inventory" in asked("-i", "mine")


@pytest.mark.parametrize(
    "command", ["predict --model-mb 1 --step-ms 1", "report", "watch", "stack show 0", "stack list"]
)
def test_the_inventory_of_the_environment_is_meant_by_every_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARANDOLE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FARANDOLE_INVENTORY", "nowhere")
    assert "nowhere" in refused(*command.split())


def test_the_network_of_the_only_inventory_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARANDOLE_STATE", str(tmp_path / "state"))
    job = ("predict", "--model-mb", "1", "--step-ms", "1")
    assert "which inventory" in refused(*job)
    folders("mine")
    assert "farandole preflight -i inventory/mine" in refused(*job)
    assert CliRunner().invoke(app, [*job, "--mbit", "100", "--delay-us", "100"]).exit_code == 0


def test_of_several_reports_that_of_the_only_inventory_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARANDOLE_STATE", str(tmp_path / "state"))
    for name in ("mine", "lab"):
        Path("state", name, "reports/latest").mkdir(parents=True)
    assert "several clusters" in refused("report")
    folders("mine")
    assert str(tmp_path / "state/mine/reports") in refused("report")


@pytest.mark.parametrize("group", ["cluster", "head"])
def test_a_cluster_needs_a_node_and_a_head(tmp_path: Path, group: str) -> None:
    (tmp_path / "hosts.yml").write_text(f"{'head' if group == 'cluster' else 'cluster'}: {{hosts: {{node-1: }}}}\n")
    with pytest.raises(FarandoleError, match=f"group {group} is missing or empty"):
        host_variables(tmp_path, group)
