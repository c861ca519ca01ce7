"""A lab's nodes and network, and the operations on them."""

import ipaddress
import json
import resource
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.findings import natural
from farandole.lab import host, image, inventory
from farandole.lab.podman import podman, power_cycle, query, reap_strays, remove
from farandole.lab.shell import run

Progress = Callable[[str], None]
# The subnets of networks, by their names in podman.
Networks = Mapping[str, ipaddress.IPv4Network]

# 64 networks of 1000 nodes each, away from podman's and docker's own ranges.
_NETWORKS = tuple(ipaddress.IPv4Network("10.94.0.0/16").subnets(new_prefix=22))
_FIRST_NODE = 10
SSH_SECONDS = 90


@dataclass(frozen=True)
class LabNode:
    """One host of a lab."""

    name: str
    lab: str
    suite: str
    address: str
    state: str
    pid: int

    @property
    def container(self) -> str:
        """The name of its container in podman."""
        return _container(self.lab, self.name)

    @property
    def root(self) -> Path:
        """Its root folder, as seen from this machine."""
        return Path(f"/proc/{self.pid}/root")


def nodes(lab: str | None = None) -> list[LabNode]:
    if not host.ready():
        return []
    label = "farandole.lab" if lab is None else f"farandole.lab={lab}"
    all_nodes = [
        LabNode(
            name=entry["Labels"]["farandole.node"],
            lab=entry["Labels"]["farandole.lab"],
            suite=entry["Labels"]["farandole.suite"],
            address=entry["Labels"]["farandole.address"],
            state=entry["State"],
            pid=entry["Pid"],
        )
        for entry in query("ps", "--all", "--filter", f"label={label}")
    ]
    return sorted(all_nodes, key=lambda node: (node.lab, natural(node.name)))


def node(lab: str, name: str) -> LabNode:
    """Return one node, or refuse with a list of the existing ones."""
    existing = {candidate.name: candidate for candidate in nodes(lab)}
    if name not in existing:
        raise FarandoleError(
            f"{lab} has no node {name} (it has: {', '.join(existing) or 'none'}); `farandole lab status` shows all"
        )
    return existing[name]


def up(lab: str, count: int, suite: image.Suite, *, decoy: bool, second: bool, progress: Progress) -> list[LabNode]:
    """Bring a lab to `count` running nodes; existing ones are left alone."""
    host.prepare()
    reap_strays()
    present = nodes(lab)
    if len(present) > count:
        raise FarandoleError(
            f"{lab} has {len(present)} nodes, more than {count}: `farandole lab down --name {lab}` first"
        )
    host.make_room(len(nodes()) - len(present) + count)
    networks = _ensure_networks(lab, second=second)
    try:
        _fill(lab, count, suite, networks, decoy=decoy, progress=progress)
    except FarandoleError as error:
        if "already allocated" not in str(error):
            raise
        # An interrupted start leaves its address allocated until the namespace is gone.
        power_cycle(error, progress)
        _fill(lab, count, suite, networks, decoy=decoy, progress=progress)
    progress("waiting for ssh")
    ready = nodes(lab)
    wait_for_ssh(ready)
    inventory.write(lab, {node.name: (node.address, node.root) for node in ready})
    return ready


def down(lab: str, progress: Progress) -> list[str]:
    """Remove a lab in any state; removing the last one restores the machine."""
    if not host.STORE.exists():
        return []
    host.prepare()
    reap_strays()
    present = nodes(lab)
    if present:
        progress(f"removing {len(present)} nodes")
        remove([node.container for node in present], progress)
    for network in [name for name in _network_names(lab) if name in _networks()]:
        bridge = _inspect_network(network)["network_interface"]
        if Path(f"/sys/class/net/{bridge}").exists():  # a killed start leaves it in use
            run("ip", "link", "delete", bridge)
        podman("network", "rm", "--force", network)
    return [] if nodes() or _networks() else host.restore()


def purge() -> None:
    """Remove the cached node images and podman's store; refused while labs are up."""
    if nodes():
        raise FarandoleError("labs are up: remove each one first with `farandole lab down --name NAME`")
    if host.STORE.exists():
        run("rm", "--recursive", "--one-file-system", str(host.STORE))


def _fill(lab: str, count: int, suite: image.Suite, networks: Networks, *, decoy: bool, progress: Progress) -> None:
    """Start the nodes that are down and create the missing ones."""
    _settle(lab, progress)
    existing = {node.name for node in nodes(lab)}
    missing = [index for index in range(1, count + 1) if f"node-{index}" not in existing]
    if missing:
        progress(f"node image for {suite} (about a minute if it must be built)")
        disk = image.ensure(suite)
        for index in missing:
            progress(f"starting node-{index} of {count}")
            _create(lab, index, suite, disk, networks, decoy=decoy)


def _settle(lab: str, progress: Progress) -> None:
    """Start the nodes that are down; one whose creation or removal was interrupted is removed, to be created again."""
    for _ in range(3):  # removing one may cut the power of the others
        down = [node for node in nodes(lab) if node.state != "running"]
        for node in down:
            progress(f"starting {node.name} again")
            if not _starts(node):
                remove([node.container], progress)
        if not down:
            return


def _starts(node: LabNode) -> bool:
    if node.state not in ("paused", "exited", "stopped"):
        return False
    try:
        podman("unpause" if node.state == "paused" else "start", node.container)
    except FarandoleError:
        return False
    return True


def _create(lab: str, index: int, suite: str, disk: str, networks: Networks, *, decoy: bool) -> None:
    name = f"node-{index}"
    addresses = {network: subnet[_FIRST_NODE + index] for network, subnet in networks.items()}
    labels = {"lab": lab, "node": name, "suite": suite, "address": str(addresses[_network_names(lab)[0]])}
    podman(
        "run",
        "--detach",
        f"--name={_container(lab, name)}",
        f"--hostname={name}",
        "--privileged",
        "--systemd=always",
        "--pids-limit=0",  # unlimited; -1 needs a controller that a hybrid cgroup tree lacks
        "--restart=always",
        "--no-hosts",
        "--shm-size=1g",
        "--tmpfs=/tmp",
        f"--ulimit=nofile={_limit(resource.RLIMIT_NOFILE, 1048576)}",
        f"--ulimit=nproc={_limit(resource.RLIMIT_NPROC, 32768)}",
        *(
            f"--network={network}:interface_name=eth{number},ip={address},mac={_mac(address)}"
            for number, (network, address) in enumerate(addresses.items())
        ),
        f"--env=LAB_DECOY={int(decoy)}",
        *(f"--label=farandole.{key}={value}" for key, value in labels.items()),
        disk,
        "/sbin/init",
    )


def _mac(address: ipaddress.IPv4Address) -> str:
    """A new MAC address after a restart would make the neighbours' ARP entries stale."""
    return "02:00:" + ":".join(f"{byte:02x}" for byte in address.packed)


def _limit(kind: int, wanted: int) -> int:
    """A container's limit cannot exceed the hard limit of this machine."""
    hard = resource.getrlimit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)


def _ensure_networks(lab: str, *, second: bool) -> Networks:
    """The networks of a lab with their subnets; the second one leads nowhere else."""
    names = _network_names(lab)
    for name, options in zip(names[: 1 + second], ((), ("--internal",)), strict=False):
        if name not in _networks():
            _create_network(lab, name, *options)
    return {name: ipaddress.IPv4Network(_subnet(name)) for name in names[: 1 + second]}


def _create_network(lab: str, name: str, *options: str) -> None:
    for candidate in _NETWORKS:
        command = ("network", "create", "--disable-dns", f"--subnet={candidate}", *options)
        try:
            podman(*command, f"--label=farandole.lab={lab}", name)
        except FarandoleError as error:
            if "already used" not in str(error):
                raise
        else:
            return


def subnet(lab: str) -> str:
    """The range of a lab's addresses."""
    return _subnet(_network_names(lab)[0])


def _subnet(network: str) -> str:
    return str(_inspect_network(network)["subnets"][0]["subnet"])


def _inspect_network(name: str) -> dict[str, Any]:
    inspected: list[dict[str, Any]] = json.loads(podman("network", "inspect", name))
    return inspected[0]


def _networks() -> list[str]:
    return podman("network", "ls", "--filter=label=farandole.lab", "--format={{.Name}}").split()


def _network_names(lab: str) -> tuple[str, str]:
    """The first and the second network; no lab's name has a dot in it."""
    return f"farandole-{lab}", f"farandole-{lab}.second"


def _container(lab: str, name: str) -> str:
    return f"farandole-{lab}-{name}"


def wait_for_ssh(waiting: list[LabNode]) -> None:
    """Wait until nodes answer by ssh."""
    deadline = time.monotonic() + SSH_SECONDS
    with ThreadPoolExecutor(max_workers=32) as pool:
        answered = pool.map(lambda node: answers(node.address, deadline), waiting)
        silent = [node.name for node, heard in zip(waiting, answered, strict=True) if not heard]
    if silent:
        raise FarandoleError(
            f"no ssh on {', '.join(silent)} after {SSH_SECONDS} s; `farandole lab status` shows their state, "
            "`farandole lab down` removes the lab"
        )


def answers(address: str, deadline: float) -> bool:
    """Whether an ssh server answers there before the deadline."""
    while True:
        try:
            with socket.create_connection((address, 22), timeout=2) as connection:
                if connection.recv(4) == b"SSH-":
                    return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
