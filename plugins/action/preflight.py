DOCUMENTATION = r"""
module: preflight
short_description: Check the inventory and the nodes
description:
  - Runs on the control machine. Reports the host, cause and cure of everything that would make a later step fail, and
    fails if any of it is more than a warning or a note. It changes no host. For V(hosts) it starts a program on each
    node, through the connection of M(node_probe), that measures the connections to the others. Use it with C(run_once).
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
  cluster:
    description: What is known of the cluster, C(cluster_facts) of role C(cluster). Required for V(hosts).
    type: dict
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
  state_dir:
    description: Folder on the control machine for C(preflight.json). It belongs to the first inventory that uses it.
    type: path
    required: true
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ansible import constants, context
from ansible.errors import AnsibleError
from ansible.plugins.loader import become_loader, connection_loader

from farandole.core.errors import FarandoleError
from farandole.core.findings import Finding, FindingsError, count, refused, report
from farandole.core.project import refuse_other
from farandole.inventory import excluded
from farandole.inventory.cluster import Node, read_node
from farandole.inventory.facts import ClusterFacts, describe, typed
from farandole.inventory.reading import unread
from farandole.inventory.state import claim, state_folder
from farandole.links.judge import Bars
from farandole.plays.action import LocalAction
from farandole.preflight.hosts import Request, check
from farandole.preflight.inventory import (
    declared_options,
    judge_inventory,
    judge_login,
    judge_passwords,
    judge_settings,
    judge_tags,
    unreadable,
)
from farandole.preflight.settings import judge_ansible
from farandole.stack import nccl


def connection_variables() -> frozenset[str]:
    """The variables that configure connections, as Ansible's plugins declare them."""
    names = {"ansible_become", "ansible_become_method", "ansible_connection", "ansible_timeout"}
    # Those of other ways to become root are not similar to these.
    become = [("become", become_loader, name) for name in ("su", "sudo")]
    for kind, loader, name in (("connection", connection_loader, "ssh"), *become):
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


class ActionModule(LocalAction):
    required_if = (("phase", "inventory", ("roles_dir",)), ("phase", "hosts", ("accounts", "cluster")))
    # Those that are left out from now on.
    left_out: Mapping[str, str] = MappingProxyType({})

    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Checks the inventory or the hosts."""
        checks = self._inventory if arguments["phase"] == "inventory" else self._hosts
        findings, checked = checks(arguments, variables)
        if refused(findings):
            raise FindingsError(findings)
        result = self.shown(report(findings, f"{checked}: {{problems}}"))
        return {**result, "excluded": {**self.left_out}} if self.left_out else result

    def _inventory(self, arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[list[Finding], str]:
        # Here it is not evaluated yet, as for commands, which would not find the state.
        state_folder("", variables.get("base_state_dir") or "")
        self._claim(arguments, variables, write=False)
        groups, hostvars = variables["groups"], variables["hostvars"]
        nodes, broken = readable(groups.get("cluster", ()), hostvars)
        revoked = variables.get("ssh_trust_revoked") or ()
        folder = Path(arguments["roles_dir"]).parent
        refuse_other(folder, f"use the environment of {folder.resolve()}")
        specs = self._specs(folder / "roles")
        declared = {role: frozenset(declared_options(spec)) for role, spec in specs.items()}
        given = (*variables["ansible_run_tags"], *variables["ansible_skip_tags"])
        # Without nodes, localhost stands for them, which is in no inventory.
        hidden = unread(Path(place)) if (place := variables.get("inventory_dir")) else []
        findings = [*broken, *judge_tags(given, specs), *hidden]
        findings += judge_inventory(groups, nodes, declared, connection_variables())
        own = {node.name: hostvars[node.name] for node in nodes}
        findings += [*judge_login(own, typed_options()), *judge_passwords(own, asked_passwords())]
        findings = findings or judge_settings(groups, nodes, hostvars, specs.values(), revoked)
        if not findings:
            self._claim(arguments, variables, write=not self._task.check_mode)
            state = Path(arguments["state_dir"])
            cluster = describe(groups, state, revoked)
            findings = excluded.set_aside(excluded.read(state), self._checked(cluster, variables))
        return [*findings, *judge_ansible()], f"{count(len(nodes), 'node')} in the inventory"

    def _hosts(self, arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[list[Finding], str]:
        hostvars, cluster = variables["hostvars"], typed(arguments["cluster"])
        request = Request(
            state=Path(arguments["state_dir"]),
            accounts=arguments["accounts"],
            head=cluster.head,
            stack=arguments["stack"],
            # The head runs it.
            queue=[cluster.head, *cluster.queue] if cluster.queue else [],
            measure=arguments["network"],
            network=arguments["fabric_network"],
            bars=Bars(arguments["bandwidth_share"], arguments["bandwidth_floor"]),
            exclude=arguments["on_bad_node"] == "exclude",
            check_mode=self._task.check_mode,
        )
        outcome = check(
            request,
            self._checked(cluster, variables),
            hostvars,
            lambda names: readable(names, hostvars),
            lambda name, probe: self._nccl(hostvars[name], name, probe),
            self.say(variables),
        )
        self.left_out = outcome.left_out
        return [*outcome.findings], outcome.about

    @staticmethod
    def _checked(cluster: ClusterFacts, variables: Mapping[str, Any]) -> excluded.Checked:
        tested = excluded.members(variables["ansible_play_hosts_all"], cluster.revoked)
        servers = {cluster.head, *cluster.builders[:1]}
        return excluded.Checked(cluster.trusted, servers, tested, excluded.PROBE, variables.get("inventory_dir") or "")

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
