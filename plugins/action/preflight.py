"""Judge the inventory, then the nodes, before anything is touched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleError
from ansible.plugins.loader import become_loader, connection_loader

from farandole.action import Action
from farandole.errors import FarandoleError
from farandole.findings import Finding, count, report
from farandole.preflight.inventory import (
    Node,
    declared_names,
    declared_options,
    judge_inventory,
    judge_revoked,
    judge_values,
)
from farandole.preflight.nodes import judge_hosts, probes_of, record, summary
from farandole.state import claim

DOCUMENTATION = r"""
module: preflight
short_description: Judge the inventory and the nodes
description:
  - Runs on the control machine. Names host, cause and cure of everything that would make a later step fail, and fails
    if there is anything. Changes no host and opens no connection; meant for C(run_once).
options:
  phase:
    description:
      - V(inventory) judges groups, names, addresses and variables.
      - V(hosts) judges what M(node_probe) found, registered as C(_preflight_probe) on each host of the play, and writes
        it with the findings to C(preflight.json) in O(state_dir), in check mode too.
    type: str
    choices: [inventory, hosts]
    required: true
  roles_dir:
    description: Folder of the roles, whose argument specs say which variables exist. V(inventory) needs it.
    type: path
  state_dir:
    description: Folder on the control machine for C(preflight.json). It belongs to the first inventory that uses it.
    type: path
    required: true
author: Farandole
"""

EXAMPLES = r"""
- name: Judge the inventory
  preflight:
    phase: inventory
    roles_dir: "{{ role_path | dirname }}"
    state_dir: "{{ preflight_state_dir }}"
  run_once: true
"""

RETURN = r"""
msg:
  description: The findings as a numbered text, or one line that there is none.
  returned: always
  type: str
  sample: "4 nodes, Debian 12: no finding"
"""


def connection_variables() -> frozenset[str]:
    """Ansible's names for how a host is reached, as its plugins for that declare them."""
    names = {"ansible_become", "ansible_become_method", "ansible_connection", "ansible_timeout"}
    for kind, loader, name in (("connection", connection_loader, "ssh"), ("become", become_loader, "sudo")):
        loader.get(name, class_only=True)
        options = constants.config.get_configuration_definitions(kind, name).values()
        names |= {variable["name"] for option in options for variable in option.get("vars", ())}
    return frozenset(names | {"ansible_python_interpreter", "ansible_shell_executable", "ansible_shell_type"})


def read_node(name: str, variables: Mapping[str, Any]) -> Node:
    cluster_ip = variables.get("cluster_ip")
    return Node(
        name=name,
        ansible_host=str(variables.get("ansible_host", name)),
        port=str(variables.get("ansible_port", 22)),
        cluster_ip=None if cluster_ip is None else str(cluster_ip),
        variables=frozenset(variables),
    )


def read_nodes(names: Iterable[str], hostvars: Mapping[str, Any]) -> tuple[list[Node], list[Finding]]:
    """The nodes, and a finding for each whose variables cannot be worked out."""
    nodes, broken = [], []
    cure = "correct its cluster_ip, ansible_host or ansible_port"
    for name in names:
        try:
            nodes.append(read_node(name, hostvars[name]))
        except AnsibleError as error:
            broken.append(Finding(name, f"its address cannot be worked out: {error}", cure))
    return nodes, broken


def write_private(path: Path, content: str) -> None:
    """Replace a file as a whole; it and its directory are its owner's alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(content)
    Path(draft).replace(path)


class ActionModule(Action):
    """Runs on the control machine alone."""

    _requires_connection = False
    required_if = (("phase", "inventory", ("roles_dir",)),)

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Judges one of the two."""
        judge = self._inventory if arguments["phase"] == "inventory" else self._hosts
        findings, words = judge(arguments, variables)
        # The verdict is what this task is for: shown without -v too.
        result = {"changed": False, "_ansible_verbose_always": True}
        return {**result, "failed": True, "msg": report(findings)} if findings else {**result, "msg": words}

    def _inventory(self, args: Mapping[str, Any], task_vars: Mapping[str, Any]) -> tuple[list[Finding], str]:
        self._claim(args, task_vars, write=False)
        groups, hostvars = task_vars["groups"], task_vars["hostvars"]
        specs = self._specs(Path(args["roles_dir"]))
        declared = {role: declared_names(spec) for role, spec in specs.items()}
        options = {name: option for spec in specs.values() for name, option in declared_options(spec).items()}
        nodes, broken = read_nodes(groups.get("cluster", ()), hostvars)
        findings = [*broken, *judge_inventory(groups, nodes, declared, connection_variables())]
        if not findings:
            values = {n.name: {name: hostvars[n.name][name] for name in n.variables & set(options)} for n in nodes}
            findings = judge_values(values, options)
        if not findings:
            findings = judge_revoked(groups, task_vars.get("ssh_trust_revoked") or ())
        if not findings:
            self._claim(args, task_vars, write=not self._task.check_mode)
        return findings, f"{count(len(nodes), 'node')} in the inventory: no finding"

    def _hosts(self, args: Mapping[str, Any], task_vars: Mapping[str, Any]) -> tuple[list[Finding], str]:
        hostvars = task_vars["hostvars"]
        revoked = task_vars.get("ssh_trust_revoked") or ()
        nodes, broken = read_nodes([n for n in task_vars["ansible_play_hosts_all"] if n not in revoked], hostvars)
        answers = {node.name: hostvars[node.name].get("_preflight_probe", {}) for node in nodes}
        findings = [*broken, *judge_hosts(nodes, answers, self._task.check_mode)]
        probes = probes_of(answers)
        write_private(Path(args["state_dir"]) / "preflight.json", record(findings, probes))
        return findings, summary(probes)

    def _claim(self, args: Mapping[str, Any], task_vars: Mapping[str, Any], *, write: bool) -> None:
        # Hosts on the command line are in no folder, and in no group cluster either.
        if folder := task_vars.get("inventory_dir"):
            try:
                claim(Path(args["state_dir"]), Path(folder), write=write)
            except FarandoleError as error:
                raise FarandoleError(f"{error}; nothing was changed") from None

    def _specs(self, roles_dir: Path) -> dict[str, Mapping[str, Any]]:
        paths = sorted(roles_dir.glob("*/meta/argument_specs.yml"))
        return {path.parts[-3]: self._loader.load_from_file(str(path)) for path in paths}
