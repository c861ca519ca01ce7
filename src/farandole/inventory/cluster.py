"""Names and addresses of the nodes, from the inventory."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from types import MappingProxyType
from typing import Any

HostVars = Mapping[str, Mapping[str, Any]]
# An RFC 1123 label in lower case; one of digits only would be read as an IPv4 address.
LABEL = re.compile(r"(?!\d+$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# All names by which Ansible's ssh plugin knows them; the last one that is set counts.
USER_VARIABLES = ("ansible_user", "ansible_ssh_user")
KEY_VARIABLES = ("ansible_private_key_file", "ansible_ssh_private_key_file")
# The defaults of base_user and base_user_id.
JOB_USER, JOB_USER_ID = "trainer", 2000
# Of the head's own exporter, for Prometheus there.
EXPORTER_PORT = 908


@dataclass(frozen=True)
class Node:
    """What the inventory says about one host."""

    name: str
    ansible_host: str
    port: str = "22"
    cluster_ip: str | None = None
    variables: frozenset[str] = frozenset()

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The address by which the other nodes reach it."""
        return parse_address(self.cluster_ip or self.ansible_host)


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def read_node(name: str, variables: Mapping[str, Any]) -> Node:
    """Build a node from a host's variables."""
    cluster_ip = variables.get("cluster_ip")
    return Node(
        name=name,
        ansible_host=str(variables.get("ansible_host", name)),
        port=str(variables.get("ansible_port", 22)),
        cluster_ip=None if cluster_ip is None else str(cluster_ip),
        variables=frozenset(variables),
    )


def builders(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The nodes that may build; the first one does."""
    return list(groups.get("builders") or groups.get("head", ()))


def job_user(variables: Mapping[str, Any]) -> str:
    """The account that runs jobs, from the variables of any node."""
    return str(variables.get("base_user") or JOB_USER)


def job_users(variables: Mapping[str, Any]) -> list[str]:
    """The accounts of all who start jobs, the job user first, from the variables of any node."""
    return [job_user(variables), *(str(person["name"]) for person in variables.get("cluster_users") or ())]


def accounts(people: Sequence[Mapping[str, Any]], job_user: str, job_user_id: int) -> dict[str, int]:
    """The uids of all who start jobs, by name, the job user first."""
    return {job_user: int(job_user_id), **{str(person["name"]): int(person["uid"]) for person in people}}


def node_address(variables: Mapping[str, Any]) -> str:
    """The address by which the other nodes reach a node."""
    return str(variables.get("cluster_ip") or variables.get("ansible_host") or "")


def node_addresses(names: Sequence[str], hostvars: HostVars) -> dict[str, str]:
    """The addresses of nodes, by name."""
    return {name: node_address(hostvars[name]) for name in names}


def host_table(names: list[str], hostvars: HostVars) -> str:
    """The cluster's lines in /etc/hosts."""
    return "\n".join(f"{address} {name}" for name, address in node_addresses(names, hostvars).items())


def member_addresses(
    names: Sequence[str], hostvars: HostVars, shared: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> list[str]:
    """Every address of nodes: those in the inventory, and those in the networks that all nodes share."""
    known = [[*filter(parse_address, _called(hostvars[name])), *shared.get(name, ())] for name in names]
    return list(dict.fromkeys(address for own in known for address in own))


def answer_of(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """What role preflight got from a node in this run: a probe, or why there is none; empty if it was not asked."""
    return variables.get("_preflight_probe") or {}


def probe_of(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a node reported in this run; empty if it was not probed."""
    return answer_of(variables).get("probe") or {}


def _called(variables: Mapping[str, Any]) -> list[str]:
    aliases = variables.get("ssh_trust_aliases") or []
    return [str(name) for name in (node_address(variables), variables.get("ansible_host"), *aliases) if name]


def ssh_ports(names: Sequence[str], hostvars: HostVars) -> dict[str, str]:
    """The ports of sshd other than 22, by the names and addresses of their node, separated by commas."""
    ports = {name: str(hostvars[name].get("ansible_port") or 22) for name in names}
    return {
        ",".join(dict.fromkeys([name, *_called(hostvars[name])])): port for name, port in ports.items() if port != "22"
    }


def login_name(variables: Mapping[str, Any]) -> str:
    """The account with which Ansible logs in to a node; empty if the inventory does not say."""
    return _last(USER_VARIABLES, variables)


def login_key(variables: Mapping[str, Any]) -> str:
    """The file of the key with which Ansible logs in to a node; empty if the inventory does not say."""
    return _last(KEY_VARIABLES, variables)


def _last(names: Sequence[str], variables: Mapping[str, Any]) -> str:
    return next((str(variables[name]) for name in reversed(names) if variables.get(name)), "")


def ssh_nodes(names: list[str], hostvars: HostVars) -> list[dict[str, Any]]:
    """What the certificate authority needs to know about each node."""
    return [
        {
            "name": name,
            # The certificate authority validates what the nodes answered.
            "host_key": hostvars[name]["_ssh_trust_identity"].get("host_key"),
            "job_keys": hostvars[name]["_ssh_trust_identity"].get("job_keys"),
            "remembers": hostvars[name]["_ssh_trust_identity"].get("remembers"),
            # For its host certificate, and for the user certificate of its job user, who connects from there.
            "names": list(dict.fromkeys([name, *_called(hostvars[name]), "localhost"])),
            "sources": list(dict.fromkeys([*filter(parse_address, _called(hostvars[name])), "127.0.0.1", "::1"])),
        }
        for name in names
    ]
