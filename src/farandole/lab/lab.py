"""A lab's nodes and network, and the operations on them."""

import ipaddress
import json
import os
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from farandole.core import files
from farandole.core.errors import FarandoleError
from farandole.core.findings import natural
from farandole.lab import host, image, inventory, machine
from farandole.lab.firewall import RANGE
from farandole.lab.host import Kernel
from farandole.lab.podman import podman, power_cycle, query, reap_strays, remove
from farandole.lab.shell import run

Progress = Callable[[str], None]
# The subnets of networks, by their names in podman.
Networks = Mapping[str, ipaddress.IPv4Network]

# 64 networks of 1000 nodes each.
_NETWORKS = tuple(RANGE.subnets(new_prefix=22))
_BRIDGE = "farandole"
_FIRST_NODE = 10
# A node that shares this machine's kernel must not set its clock, load modules, create devices or read its log.
# As settings of the node's systemd, they would also be taken from what this machine's kernel starts, until it reboots.
# podman leaves a privileged container all of them.
_NEVER = "-mknod,-sys_module,-sys_rawio,-sys_time,-syslog,-mac_admin,-mac_override,-wake_alarm"
# States before the first start, and during a removal.
_NEW, _GOING = ("created", "initialized"), ("stopping", "removing")
# Until a node answers: those with kernels of their own boot them, beside others.
SSH_SECONDS = {Kernel.shared: 90, Kernel.own: 300, Kernel.stock: 900}
# How many kernels boot at once: with more, each takes longer, and all of them no less.
_BOOTING = 2 * len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class LabNode:
    """One host of a lab."""

    name: str
    lab: str
    suite: str
    kernel: Kernel
    address: str
    state: str
    pid: int
    project: str

    @property
    def container(self) -> str:
        """The name of its container in podman."""
        return _container(self.lab, self.name)

    @property
    def root(self) -> Path:
        """Its root folder, as seen from this machine; with a kernel of its own, what it got when it was created."""
        shared = self.kernel is Kernel.shared
        return Path(f"/proc/{self.pid}/root") if shared else machine.seed(self.container)

    def execute(self, *command: str) -> str:
        """Run a command on it as root, whatever has become of its network."""
        if self.kernel is Kernel.shared:
            return podman("exec", self.container, *command)
        return machine.execute(self, *command)


def nodes(lab: str | None = None) -> list[LabNode]:
    if not host.ready():
        return []
    label = "farandole.lab" if lab is None else f"farandole.lab={lab}"
    all_nodes = [
        LabNode(
            name=entry["Labels"]["farandole.node"],
            lab=entry["Labels"]["farandole.lab"],
            suite=entry["Labels"]["farandole.suite"],
            # Labs of earlier versions do not say it.
            kernel=Kernel(entry["Labels"].get("farandole.kernel", Kernel.shared)),
            address=entry["Labels"]["farandole.address"],
            # podman 4 forgets over a reboot of this machine, or its own, that they ran.
            state="exited" if entry["State"] in _NEW and entry["StartedAt"] > 0 else entry["State"],
            pid=entry["Pid"],
            project=entry["Labels"].get("farandole.project", ""),
        )
        for entry in query("ps", "--all", "--filter", f"label={label}")
    ]
    return sorted(all_nodes, key=lambda node: (node.lab, natural(node.name)))


def stopped() -> list[str]:
    """The labs that a reboot of this machine has stopped."""
    networks = (host.STORE / "networks").glob("farandole-*.json")
    names = {path.stem.removeprefix("farandole-").removesuffix(".second") for path in networks}
    return [] if host.ready() else sorted(names)


def node(lab: str, name: str) -> LabNode:
    """Return one node, or refuse with a list of the existing ones."""
    existing = {candidate.name: candidate for candidate in nodes(lab)}
    if name not in existing:
        raise FarandoleError(
            f"{lab} has no node {name} (it has: {', '.join(existing) or 'none'}); `farandole lab status` shows all"
        )
    return existing[name]


@dataclass(frozen=True)
class Kind:
    """What new nodes are like."""

    suite: image.Suite
    kernel: Kernel
    mib: int
    decoy: bool
    # What new nodes have from the start: Debian packages, and a packed stack.
    packages: Sequence[str] = ()
    stack: Path | None = None


def up(lab: str, count: int, kind: Kind, *, second: bool, progress: Progress) -> None:
    """Bring a lab to `count` running nodes; existing ones are left alone."""
    machine.check(kind.kernel)
    host.check_space()
    host.prepare()
    reap_strays()
    refuse_foreign(lab)
    present = nodes(lab)
    if len(present) > count:
        raise FarandoleError(
            f"{lab} has {len(present)} nodes, more than {count}: --nodes {len(present)} keeps them, "
            f"`farandole lab down --name {lab}` removes them"
        )
    machine.check_memory(kind.kernel, count - len(present), kind.mib)
    user_mode = kind.kernel is Kernel.own or any(node.kernel is Kernel.own for node in nodes())
    host.make_room(len(nodes()) - len(present) + count, user_mode=user_mode)
    networks = _ensure_networks(lab, second=second)
    try:
        _fill(lab, count, kind, networks, progress)
    except FarandoleError as error:
        if "already allocated" not in str(error):
            raise
        # An interrupted start leaves its address allocated until the namespace is gone.
        power_cycle(error, ())
        _fill(lab, count, kind, networks, progress)
    progress("waiting for ssh")
    wait_for_ssh(nodes(lab))
    write_inventory(lab)


def refuse_foreign(lab: str) -> None:
    """Refuse the lab of another checkout that still exists, unless that lab's inventory is in this one as well."""
    if inventory.folder(lab).exists() or not host.STORE.exists():
        return
    host.prepare()
    others = {node.project for node in nodes(lab)} - {"", str(inventory.project())}
    for other in filter(os.path.isdir, others):
        raise FarandoleError(
            f"lab {lab} belongs to {other}: choose another --name, or go there; if it is to be used from here as well, "
            f"`farandole lab inventory --name {lab}` first"
        )


def write_inventory(lab: str) -> Path:
    """Write the inventory of the nodes that run, and let this checkout's key in on them."""
    running = [node for node in nodes(lab) if node.state == "running"]
    places = {node.name: (node.address, node.root) for node in running}
    target = inventory.write(lab, places, limited=any(node.kernel is Kernel.shared for node in running))
    with ThreadPoolExecutor(max_workers=_BOOTING) as pool:
        list(pool.map(machine.authorize, [node for node in running if node.kernel is not Kernel.shared]))
    return target


def down(lab: str, progress: Progress) -> list[str]:
    """Remove a lab in any state; removing the last one restores the machine."""
    if not host.STORE.exists():
        return []
    host.prepare()
    reap_strays()
    present = nodes(lab)
    if present:
        progress(f"removing {len(present)} nodes")
        remove([node.container for node in present])
    machine.remove(lab)
    for network in [name for name in _network_names(lab) if name in _networks()]:
        bridge = _inspect_network(network)["network_interface"]
        # A killed start leaves it in use. One that podman has named may be that of your own podman.
        if bridge.startswith(_BRIDGE) and Path(f"/sys/class/net/{bridge}").exists():
            run("ip", "link", "delete", bridge)
        podman("network", "rm", "--force", network)
    return [] if nodes() or _networks() else host.restore()


def purge() -> None:
    """Remove the cached node images and podman's store; refused while there are labs."""
    if labs := sorted({node.lab for node in nodes()}) or stopped():
        raise FarandoleError(
            f"{', '.join(labs)} would lose nodes' disks: remove each lab first with `farandole lab down --name NAME`"
        )
    if host.STORE.exists():
        run("rm", "--recursive", "--one-file-system", str(host.STORE))


def _fill(lab: str, count: int, kind: Kind, networks: Networks, progress: Progress) -> None:
    """Start the nodes that are down and create the missing ones."""
    _settle(lab, progress)
    existing = {node.name for node in nodes(lab)}
    missing = [index for index in range(1, count + 1) if f"node-{index}" not in existing]
    if missing:
        progress(f"node image for {kind.suite} (about a minute if it must be built)")
        has, disk = (kind.packages, kind.stack), None
        if kind.kernel is not Kernel.shared:
            has, disk = ((), None), image.disk(kind.suite, kind.kernel, *has)
        container = image.ensure(kind.suite, *has)
        for number, index in enumerate(missing):
            if disk and number >= _BOOTING:
                wait_for_ssh([node(lab, f"node-{missing[number - _BOOTING]}")])
            progress(f"starting node-{index} of {count}")
            _create(lab, index, kind, container, disk, networks)


def _settle(lab: str, progress: Progress) -> None:
    """Start the nodes that are down; one whose creation or removal was interrupted is removed, to be created again."""
    for _ in range(3):  # removing one may cut the power of the others
        down = [node for node in nodes(lab) if node.state != "running"]
        for node in down:
            progress(f"starting {node.name} again")
            if node.state in (*_NEW, *_GOING):
                remove([node.container])
            else:
                podman("unpause" if node.state == "paused" else "start", node.container)
        if not down:
            return


def _create(lab: str, index: int, kind: Kind, image: str, disk: Path | None, networks: Networks) -> None:
    name = f"node-{index}"
    container = _container(lab, name)
    addresses = {network: subnet[_FIRST_NODE + index] for network, subnet in networks.items()}
    first = next(iter(addresses.values()))
    labels = {"lab": lab, "node": name, "suite": kind.suite, "kernel": kind.kernel, "address": str(first)}
    labels["project"] = str(inventory.project())
    if disk:
        labels["disk"] = disk.name
        links = [
            (ipaddress.IPv4Interface(f"{addresses[network]}/{subnet.prefixlen}"), None if number else subnet[1])
            for number, (network, subnet) in enumerate(networks.items())
        ]
        machine.prepare(container, name, links, decoy=kind.decoy)
        own, command = machine.options(container, kind.mib), machine.command(kind.kernel, disk, links, kind.mib)
    else:
        own = ["--systemd=always", "--shm-size=1g", "--tmpfs=/tmp", f"--env=LAB_DECOY={int(kind.decoy)}"]
        command = ["setpriv", f"--bounding-set={_NEVER}", "/sbin/init"]
    podman(
        "run",
        "--detach",
        f"--name={container}",
        f"--hostname={name}",
        "--privileged",
        "--pids-limit=0",  # unlimited; -1 needs a controller that a hybrid cgroup tree lacks
        "--restart=always",
        "--no-hosts",
        f"--ulimit=nofile={_limit(resource.RLIMIT_NOFILE, 1048576)}",
        f"--ulimit=nproc={_limit(resource.RLIMIT_NPROC, 32768)}",
        *(
            f"--network={network}:interface_name=eth{number},ip={address},mac={machine.mac(address)}"
            for number, (network, address) in enumerate(addresses.items())
        ),
        *(f"--label=farandole.{key}={value}" for key, value in labels.items()),
        *own,
        image,
        *command,
    )


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
        _name_bridge(name)
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
    raise FarandoleError(
        f"all of {RANGE} is in use here: `ip -4 address` and `ip route` show by what, and "
        "`farandole lab status` shows the labs, of which `farandole lab down --name NAME` removes one"
    )


def _name_bridge(network: str) -> None:
    """Podman 4 has no option for it, and takes a name that another podman may take as well."""
    settings = host.STORE / "networks" / f"{network}.json"
    told = json.loads(settings.read_text())
    # A lab of an earlier version keeps the one that it uses.
    if not Path(f"/sys/class/net/{told['network_interface']}").exists():
        number = _NETWORKS.index(ipaddress.IPv4Network(told["subnets"][0]["subnet"]))
        files.write(settings, json.dumps(told | {"network_interface": f"{_BRIDGE}{number}"}))


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
    most = max(SSH_SECONDS[node.kernel] for node in waiting)
    deadline = time.monotonic() + most
    interrupted = Event()
    with ThreadPoolExecutor(max_workers=32) as pool:
        try:
            answered = pool.map(lambda node: answers(node.address, deadline, interrupted), waiting)
            silent = [node.name for node, heard in zip(waiting, answered, strict=True) if not heard]
        except BaseException:
            interrupted.set()
            raise
    if silent:
        raise FarandoleError(
            f"no ssh on {', '.join(silent)} after {most} s; `farandole lab status` shows their state, "
            f"{machine.MACHINES} has what those with kernels of their own have printed, "
            "`farandole lab down` removes the lab"
        )


def answers(address: str, deadline: float, interrupted: Event | None = None) -> bool:
    """Whether an ssh server answers there before the deadline."""
    while True:
        try:
            with socket.create_connection((address, 22), timeout=2) as connection:
                # A slow server that is asked again has one more to answer.
                connection.settimeout(max(2, min(30, deadline - time.monotonic())))
                if connection.recv(4) == b"SSH-":
                    return True
        except OSError:
            pass
        if time.monotonic() > deadline or (interrupted and interrupted.is_set()):
            return False
        time.sleep(0.1)
