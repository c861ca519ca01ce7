"""Check the inventory, then the nodes, before anything is changed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.errors import AnsibleError
from ansible.plugins.loader import become_loader, connection_loader

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.findings import Finding, FindingsError, count, refused, report, stopped
from farandole.inventory import excluded
from farandole.inventory.state import claim
from farandole.links.examine import Examined, Wanted, carries, examine, links_in, login_of
from farandole.links.judge import Bars
from farandole.plays.action import Action
from farandole.preflight import fabric, networks
from farandole.preflight.inventory import (
    Node,
    declared_names,
    judge_inventory,
    judge_login,
    judge_passwords,
    judge_settings,
    judge_tags,
    read_node,
    unreadable,
)
from farandole.preflight.machines import former_record, judge_machines, judge_queues
from farandole.preflight.nodes import about, judge_hosts, judge_machine_ids, probes_of, record
from farandole.stack import nccl

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
  on_bad_node:
    description:
      - With V(exclude), V(hosts) records a bad node in C(excluded.yml) in O(state_dir), and the run goes on without.
      - The head, the builder, or most nodes cannot be left out; nor is a node because of what another one says.
    type: str
    choices: [stop, exclude]
    default: stop
  stack:
    description: Whether the stack will be installed too, so that V(hosts) checks C(nccl_version).
    type: bool
    default: true
  queue:
    description: The nodes that get a queue of Farandole's; V(hosts) checks that none has another one.
    type: list
    elements: str
    default: []
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
excluded:
  description: The nodes that are left out, in check mode also those that would be.
  returned: some are
  type: list
  elements: str
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


def typed_options() -> dict[str, str]:
    """What the user typed after ansible-playbook to say how to log in."""
    known = {
        "--user": (context.CLIARGS.get("remote_user"), constants.DEFAULT_REMOTE_USER),
        "--private-key": (context.CLIARGS.get("private_key_file"), constants.DEFAULT_PRIVATE_KEY_FILE),
    }
    return {option: str(given) for option, (given, default) in known.items() if given and given != default}


def asked_passwords() -> list[str]:
    """The options by which the user was asked for a password."""
    known = {"--ask-pass": "ask_pass", "--ask-become-pass": "become_ask_pass"}
    return [option for option, name in known.items() if context.CLIARGS.get(name)]


class ActionModule(Action):
    """Runs on the control machine alone."""

    _requires_connection = False
    required_if = (("phase", "inventory", ("roles_dir",)), ("phase", "hosts", ("accounts",)))
    # Those that are left out from now on.
    left_out: Iterable[str] = ()
    chosen = networks.Networks()

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Checks the inventory or the hosts."""
        check = self._inventory if arguments["phase"] == "inventory" else self._hosts
        findings, checked = check(arguments, variables)
        if refused(findings):
            raise FindingsError(findings)
        result = self.shown(report(findings, f"{checked}: {{problems}}"))
        return {**result, "excluded": [*self.left_out]} if self.left_out else result

    def _inventory(self, arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[list[Finding], str]:
        self._claim(arguments, variables, write=False)
        groups, hostvars = variables["groups"], variables["hostvars"]
        nodes, broken = readable(groups.get("cluster", ()), hostvars)
        revoked = variables.get("ssh_trust_revoked") or ()
        specs = self._specs(Path(arguments["roles_dir"]))
        declared = {role: declared_names(spec) for role, spec in specs.items()}
        given = (*variables["ansible_run_tags"], *variables["ansible_skip_tags"])
        findings = [*broken, *judge_tags(given), *judge_inventory(groups, nodes, declared, connection_variables())]
        own = {node.name: hostvars[node.name] for node in nodes}
        findings += [*judge_login(own, typed_options()), *judge_passwords(own, asked_passwords())]
        findings = findings or judge_settings(groups, nodes, hostvars, specs.values(), revoked)
        if not findings:
            self._claim(arguments, variables, write=not self._task.check_mode)
            findings = excluded.set_aside(excluded.read(Path(arguments["state_dir"])), self._checked(variables))
        return findings, f"{count(len(nodes), 'node')} in the inventory"

    def _hosts(self, arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[list[Finding], str]:
        hostvars, state = variables["hostvars"], Path(arguments["state_dir"])
        checked = self._checked(variables)
        with excluded.changing(state) as entries:
            asked = [name for name in checked.tested if name not in entries or not entries[name].person]
            nodes, broken = readable(asked, hostvars)
            answers = {node.name: hostvars[node.name].get("_preflight_probe", {}) for node in nodes}
            found = [*broken, *judge_hosts(nodes, answers, arguments["accounts"], self._task.check_mode)]
            probes = probes_of(answers)
            if arguments["stack"]:
                found += [one for name in probes for one in self._nccl(hostvars[name], name, probes[name])]
            # Like role fabric: all nodes, whatever --limit says.
            members = excluded.members(checked.cluster, entries)
            record_file, sound = state / "preflight.json", self._sound(nodes, probes, found)
            last = networks.former_in(record_file)
            self.chosen = self._choose(arguments, hostvars, excluded.members(members, stopped(found)), sound, last)
            network = fabric.choose(members, hostvars, self.chosen.wanted)
            former, user = former_record(record_file, time.time()), next(iter(arguments["accounts"]), "")
            found += judge_machines(probes, hostvars, network.interfaces, user, arguments["stack"], former)
            found += judge_queues(probes, arguments["queue"])
            # What was measured in another network says nothing about this one.
            links = Examined([], links_in(record_file) if network.network == last["network"] else {})
            if network.network:
                wanted = self._wanted(arguments, variables, network)
                links = examine(
                    self._sound(nodes, probes, found),
                    hostvars,
                    wanted,
                    links.links,
                    self.say(variables),
                )
                found += links.findings
            # What follows from a comparison of nodes says nothing about one of them, as any of them may lie.
            compared = {*judge_machine_ids(probes)}
            decision = excluded.decide(
                [one for one in found if one not in compared],
                entries,
                replace(checked, tested=asked),
                exclude=arguments.get("on_bad_node") == "exclude",
            )
            probes = {name: probe for name, probe in probes.items() if name not in decision.entries}
            members = excluded.members(checked.cluster, decision.entries)
            network = fabric.choose(members, hostvars, self.chosen.wanted)
            found = [*decision.findings, *judge_machine_ids(probes), *network.findings, *self.chosen.findings]
            findings = [*dict.fromkeys(found)]
            if not self._task.check_mode and not refused(findings):
                entries.clear()
                entries.update(decision.entries)
            self.left_out = decision.entries
        write_private(state / "preflight.json", record(findings, probes, network, links.links, self.chosen.known()))
        return findings, ", ".join(filter(None, [about(probes), links.about]))

    @staticmethod
    def _sound(nodes: Iterable[Node], probes: Mapping[str, Any], found: Iterable[Finding]) -> list[Node]:
        bad = stopped(found)
        return [node for node in nodes if node.name in probes and node.name not in bad]

    @staticmethod
    def _choose(
        arguments: Mapping[str, Any], hostvars: Mapping[str, Any], names: Sequence[str], sound: Iterable[Node],
        last: Mapping[str, Any],
    ) -> networks.Networks:  # fmt: skip
        """The network for jobs; what several carry is measured only between all nodes."""
        able = [node for node in sound if node.name in names and login_of(hostvars, node.name).get("shared")]
        measurable = len(able) == len(names) and arguments["network"] in ("auto", "all")
        measure = partial(carries, able, hostvars) if measurable else None
        pinned, again = arguments["fabric_network"], arguments["network"] == "all"
        return networks.choose(names, hostvars, pinned, last, measure, again=again)

    @staticmethod
    def _wanted(arguments: Mapping[str, Any], variables: Mapping[str, Any], network: fabric.Fabric) -> Wanted:
        bars = Bars(arguments["bandwidth_share"], arguments["bandwidth_floor"])
        head = variables["groups"]["head"][0] if variables["groups"].get("head") else ""
        return Wanted(arguments["network"], bars, head, next(iter(arguments["accounts"]), ""), network)

    @staticmethod
    def _checked(variables: Mapping[str, Any]) -> excluded.Checked:
        groups, revoked = variables["groups"], variables.get("ssh_trust_revoked") or ()
        tested = excluded.members(variables["ansible_play_hosts_all"], revoked)
        cluster = excluded.members(groups["cluster"], revoked)
        servers = {*groups.get("head", ()), *groups.get("builders", ())[:1]}
        return excluded.Checked(cluster, servers, tested, excluded.PROBE, variables.get("inventory_dir") or "")

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
