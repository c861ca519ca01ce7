"""Check the inventory, then the nodes, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleError
from ansible.plugins.loader import become_loader, connection_loader

from farandole import fabric, nccl
from farandole.action import Action
from farandole.errors import FarandoleError
from farandole.files import write_private
from farandole.findings import Finding, count, refused, report, stopped
from farandole.pairs.examine import Examined, Wanted, examine, links_in
from farandole.pairs.judge import Bars
from farandole.preflight.inventory import (
    Node,
    declared_names,
    judge_inventory,
    judge_settings,
    read_node,
    unreadable,
)
from farandole.preflight.nodes import about, judge_hosts, probes_of, record
from farandole.state import claim

DOCUMENTATION = r"""
module: preflight
short_description: Check the inventory and the nodes
description:
  - Runs on the control machine. Reports the host, cause and cure of everything that would make a later step fail, and
    fails if any of it is no mere warning or note. It changes no host. For V(hosts) it starts a program on each node,
    through the connection of M(node_probe), that measures the connections to the others. Use it with C(run_once).
options:
  phase:
    description:
      - V(inventory) checks groups, names, addresses and variables.
      - V(hosts) checks the results of M(node_probe), registered as C(_preflight_probe) on each host of the play, and
        writes them with the findings to C(preflight.json) in O(state_dir), in check mode too.
    type: str
    choices: [inventory, hosts]
    required: true
  roles_dir:
    description: Folder of the roles, whose argument specs define which variables exist. Required for V(inventory).
    type: path
  accounts:
    description: The accounts that will run jobs, the job user first, with their uids. Required for V(hosts).
    type: dict
  fabric_network:
    description: The variable of role fabric; V(hosts) checks that there is a network for jobs.
    type: str
    default: ""
  network:
    description: How much of the connections between the nodes V(hosts) measures.
    type: str
    choices: [auto, all, connections, nothing]
    default: auto
  bandwidth_share:
    description: The share of what is usual in the cluster below which a connection is too slow.
    type: float
    default: 0.85
  bandwidth_floor:
    description: The megabits per second below which every connection is too slow.
    type: float
    default: 0
  stack:
    description: Whether the stack will be installed too, so that V(hosts) checks C(nccl_version).
    type: bool
    default: true
  state_dir:
    description: Folder on the control machine for C(preflight.json). It belongs to the first inventory that uses it.
    type: path
    required: true
author: Farandole
"""

EXAMPLES = r"""
- name: Check the inventory
  preflight:
    phase: inventory
    roles_dir: "{{ role_path | dirname }}"
    state_dir: "{{ preflight_state_dir }}"
  run_once: true
"""

RETURN = r"""
msg:
  description: The findings as a numbered list, or one line if there are none.
  returned: always
  type: str
  sample: "4 nodes, Debian 12: no finding"
"""


def connection_variables() -> frozenset[str]:
    """The variables that configure connections, as Ansible's plugins declare them."""
    names = {"ansible_become", "ansible_become_method", "ansible_connection", "ansible_timeout"}
    for kind, loader, name in (("connection", connection_loader, "ssh"), ("become", become_loader, "sudo")):
        loader.get(name, class_only=True)
        options = constants.config.get_configuration_definitions(kind, name).values()
        names |= {variable["name"] for option in options for variable in option.get("vars", ())}
    return frozenset(names | {"ansible_python_interpreter", "ansible_shell_executable", "ansible_shell_type"})


def readable(names: Iterable[str], hostvars: Mapping[str, Any]) -> tuple[list[Node], list[Finding]]:
    """The nodes, and a finding for each whose variables Ansible cannot evaluate."""
    nodes, broken = [], []
    for name in names:
        try:
            nodes.append(read_node(name, hostvars[name]))
        except AnsibleError as error:
            broken.append(unreadable(name, error))
    return nodes, broken


class ActionModule(Action):
    """Runs on the control machine alone."""

    _requires_connection = False
    required_if = (("phase", "inventory", ("roles_dir",)), ("phase", "hosts", ("accounts",)))

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Checks the inventory or the hosts."""
        check = self._inventory if arguments["phase"] == "inventory" else self._hosts
        findings, checked = check(arguments, variables)
        failed = refused(findings)
        text = report(findings) if failed else report(findings, f"{checked}: {{problems}}")
        # The message is the purpose of this task, so it is shown without -v too.
        return {"changed": False, "failed": failed, "msg": text, "_ansible_verbose_always": True}

    def _inventory(self, arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[list[Finding], str]:
        self._claim(arguments, variables, write=False)
        groups, hostvars = variables["groups"], variables["hostvars"]
        nodes, broken = readable(groups.get("cluster", ()), hostvars)
        revoked = variables.get("ssh_trust_revoked") or ()
        specs = self._specs(Path(arguments["roles_dir"]))
        declared = {role: declared_names(spec) for role, spec in specs.items()}
        findings = [*broken, *judge_inventory(groups, nodes, declared, connection_variables())]
        findings = findings or judge_settings(groups, nodes, hostvars, specs.values(), revoked)
        if not findings:
            self._claim(arguments, variables, write=not self._task.check_mode)
        return findings, f"{count(len(nodes), 'node')} in the inventory"

    def _hosts(self, arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[list[Finding], str]:
        hostvars = variables["hostvars"]
        revoked = variables.get("ssh_trust_revoked") or ()
        nodes, broken = readable([n for n in variables["ansible_play_hosts_all"] if n not in revoked], hostvars)
        answers = {node.name: hostvars[node.name].get("_preflight_probe", {}) for node in nodes}
        probes = probes_of(answers)
        # Like role fabric: all nodes, whatever --limit says.
        members = [name for name in variables["groups"]["cluster"] if name not in revoked]
        network = fabric.choose(members, hostvars, arguments["fabric_network"])
        findings = [
            *broken,
            *judge_hosts(nodes, answers, arguments["accounts"], self._task.check_mode),
            *network.findings,
        ]
        if arguments["stack"]:
            findings += [one for name in probes for one in self._nccl(hostvars[name], name, probes[name])]
        path = Path(arguments["state_dir"]) / "preflight.json"
        links = Examined([], links_in(path))
        if network.network:
            bad = stopped(findings)
            sound = [node for node in nodes if node.name in probes and node.name not in bad]
            wanted = self._wanted(arguments, variables, network.network)
            links = examine(sound, hostvars, wanted, links.links, self._display.display)
        findings = [*dict.fromkeys([*findings, *links.findings])]
        write_private(path, record(findings, probes, network, links.links))
        return findings, ", ".join(filter(None, [about(probes), links.about]))

    @staticmethod
    def _wanted(arguments: Mapping[str, Any], variables: Mapping[str, Any], network: str) -> Wanted:
        bars = Bars(arguments["bandwidth_share"], arguments["bandwidth_floor"])
        head = variables["groups"]["head"][0] if variables["groups"].get("head") else ""
        return Wanted(arguments["network"], bars, head, next(iter(arguments["accounts"])), network)

    @staticmethod
    def _nccl(own: Mapping[str, Any], name: str, probe: Mapping[str, Any]) -> list[Finding]:
        # Otherwise the version is that of the lock, which playbooks/lock.yml checks.
        return nccl.judge(own, name, probe) if "nccl_version" in own else []

    def _claim(self, arguments: Mapping[str, Any], variables: Mapping[str, Any], *, write: bool) -> None:
        # Hosts given on the command line have no inventory folder, and no group cluster either.
        if folder := variables.get("inventory_dir"):
            try:
                claim(Path(arguments["state_dir"]), Path(folder), write=write)
            except FarandoleError as error:
                raise FarandoleError(f"{error}; nothing was changed") from None

    def _specs(self, roles_dir: Path) -> dict[str, Mapping[str, Any]]:
        paths = sorted(roles_dir.glob("*/meta/argument_specs.yml"))
        return {path.parts[-3]: self._loader.load_from_file(str(path)) for path in paths}
