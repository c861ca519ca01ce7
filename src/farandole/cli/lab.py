"""The `farandole lab` commands."""

import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from farandole.core.errors import FarandoleError
from farandole.lab import faults, host, image, inventory, lab
from farandole.lab.shell import run

app = typer.Typer(no_args_is_help=True, help="Run hosts with systemd and sshd on this machine, to test on.")
fault = typer.Typer(no_args_is_help=True, help="Let something go wrong with a node, or mend it.")
app.add_typer(fault, name="fault")
console = Console(highlight=False, soft_wrap=True)


def _lab_name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,30}", value):
        raise typer.BadParameter("at most 31 lower-case letters, digits, _ and -, starting with a letter")
    return value


Name = Annotated[str, typer.Option("--name", "-n", callback=_lab_name, help="Name of the lab.")]


@contextmanager
def _work(what: str) -> Iterator[lab.Progress]:
    """Change the machine and show progress: a status line on a terminal, else one line per step."""
    host.check()
    begun = time.monotonic()
    with ExitStack() as stack:
        if console.is_terminal:
            status = stack.enter_context(console.status(what))

        def progress(step: str) -> None:
            if console.is_terminal:
                status.update(f"{what}: {step}")
            else:
                console.print(f"{what}: {step}")

        stack.enter_context(host.locked(wait=lambda: progress("waiting for another lab command to finish")))
        yield progress
    console.print(f"{what}: done in {time.monotonic() - begun:.1f} s")


@app.command()
def setup() -> None:
    """Install the Debian packages that the lab needs."""
    if not host.is_root():
        host.check_packages()
    elif missing := host.missing_packages():
        console.print(f"installing {', '.join(missing)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "--quiet", env=environment)
        run(*host.install_command(missing), env=environment)


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Number of nodes in total.")] = 2,
    suite: Annotated[image.Suite, typer.Option(help="Debian release of new nodes.")] = image.Suite.bookworm,
    name: Name = "lab",
    *,
    decoy: Annotated[bool, typer.Option("--decoy", help="Give each new node a docker0 with the same address.")] = False,
    second: Annotated[
        bool, typer.Option("--second-network", help="Connect each new node to a second network, by its eth1.")
    ] = False,
) -> None:
    """Start a lab or add nodes to it; safe to run again.

    Nodes are privileged containers: root on a node can become root on this machine (docs/lab.md).
    """
    inventory.check(name)
    with _work(f"{name} up") as progress:
        lab.up(name, nodes, suite, decoy=decoy, second=second, progress=progress)
    console.print(f"inventory: {inventory.folder(name)}")


@app.command()
def down(name: Name = "lab") -> None:
    """Remove a lab; removing the last one restores this machine."""
    if not (lab.nodes(name) or inventory.folder(name).exists()):
        console.print(f"there is no lab {name}; removing anything that one may have left")
    with _work(f"{name} down") as progress:
        kept = inventory.remove(name)
        restored = lab.down(name, progress)
        faults.forget(name)
    for line in kept:
        console.print(f"kept: {line}")
    for line in restored:
        console.print(f"restored: {line}")
    if others := sorted({node.lab for node in lab.nodes()}):
        console.print(f"this machine's settings stay changed for the remaining labs: {', '.join(others)}")
    if host.STORE.exists():
        console.print(f"kept: the node images in {host.STORE} (`farandole lab purge` removes them)")


@app.command()
def purge() -> None:
    """Remove the cached node images."""
    with _work("purge"):
        lab.purge()


@app.command()
def status() -> None:
    """Show all labs, their nodes, and what they have changed on this machine."""
    host.check()
    found = lab.nodes()
    if not found:
        console.print("no lab is up; `farandole lab up` starts one")
    table = Table("lab", "node", "suite", "address", "state", "ssh")
    for node in found:
        ssh = "answers" if node.state == "running" and lab.answers(node.address, 0) else "silent"
        table.add_row(node.lab, node.name, node.suite, node.address, node.state, ssh)
    if found:
        console.print(table)
    for change in host.changes():
        console.print(f"on this machine: {change}")


@app.command("inventory")
def inventory_(name: Name = "lab") -> None:
    """Write the lab's inventory into this checkout and print its path."""
    host.check()
    found = [node for node in lab.nodes(name) if node.state == "running"]
    if not found:
        raise FarandoleError(f"lab {name} has no running node; `farandole lab up --name {name}` starts it")
    inventory.check(name)
    console.print(str(inventory.write(name, {node.name: (node.address, node.root) for node in found})))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def ssh(
    node: Annotated[str, typer.Argument(help="node-1, node-2, …")],
    command: Annotated[list[str] | None, typer.Argument(help="Command to run; without one, a shell.")] = None,
    name: Name = "lab",
) -> None:
    """Open a shell on a node, or run one command with exactly these arguments."""
    config = inventory.folder(name) / ".ssh" / "config"
    if not config.exists():
        raise FarandoleError(f"this checkout knows no lab {name}; `farandole lab up --name {name}` starts it")
    if f"Host {node}\n" not in config.read_text():
        raise FarandoleError(f"lab {name} has no node {node}; `farandole lab status` shows all")
    words = command[1:] if command and command[0] == "--" else command
    if words and words[0].startswith("-"):  # ssh would take it as its own option
        raise FarandoleError(f"{words[0]} is not a program; options of this command go before {node}")
    # ssh passes one string to the remote shell; quoting preserves the arguments.
    os.execvp("ssh", ["ssh", "-F", str(config), node, *([shlex.join(words)] if words else [])])  # noqa: S606


Target = Annotated[str, typer.Argument(metavar="NODE", help="node-1, node-2, …")]
Link = Annotated[faults.Link, typer.Option(help="The interface; eth1 is in the second network.")]


@contextmanager
def _target(what: str, node: str, name: str, wanted: str = "running") -> Iterator[lab.Node]:
    """The node that a fault or a repair is meant for, if its state allows it."""
    with _work(f"{what} {node}"):
        target = lab.node(name, node)
        if target.state != wanted:
            raise FarandoleError(f"{node} is {target.state}, and {what} is for a node that is {wanted}")
        yield target


@fault.command()
def cut(node: Target, link: Link = faults.Link.eth0, name: Name = "lab") -> None:
    """Unplug the network cable."""
    with _target("cut", node, name) as target:
        faults.cut(target, link)


@fault.command()
def throttle(
    node: Target,
    mbit: Annotated[int, typer.Option(min=1, max=100_000, help="Megabits per second.")] = 100,
    link: Link = faults.Link.eth0,
    name: Name = "lab",
) -> None:
    """Limit the rate of the node's link, in each direction."""
    with _target("throttle", node, name) as target:
        faults.throttle(target, mbit, link)


@fault.command()
def block(
    node: Target,
    sender: Annotated[str, typer.Option("--from", help="Only what this other node sends.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Only this TCP and UDP port.")] = 0,
    name: Name = "lab",
    *,
    all_but_ssh: Annotated[bool, typer.Option("--all-but-ssh", help="Everything except TCP port 22.")] = False,
    reject: Annotated[bool, typer.Option("--reject", help="Refuse it, instead of dropping it in silence.")] = False,
) -> None:
    """Let a firewall on the node accept no new connection; without an option, none at all.

    A second call adds to the first. Connections of the node's own, and those that exist, are left alone.
    """
    if port and all_but_ssh:
        raise FarandoleError("--port and --all-but-ssh exclude each other")
    with _target("block", node, name) as target:
        faults.block(target, lab.node(name, sender) if sender else None, port, all_but_ssh=all_but_ssh, reject=reject)


@fault.command()
def mtu(
    node: Target,
    size: Annotated[int, typer.Option("--bytes", min=576, max=9000, help="Bytes of the largest packet.")] = 1400,
    name: Name = "lab",
) -> None:
    """Give the node's link another MTU than the other nodes have."""
    with _target("mtu", node, name) as target:
        faults.mtu(target, size)


@fault.command()
def slow(
    node: Target,
    percent: Annotated[int, typer.Option(min=1, max=100, help="Per cent of one processor.")] = 20,
    name: Name = "lab",
) -> None:
    """Limit what the node computes."""
    with _target("slow", node, name) as target:
        faults.slow(target, percent)


@fault.command()
def memory(
    node: Target,
    mib: Annotated[
        int, typer.Option(min=64, max=1 << 20, help="MiB that all its processes may use from now on.")
    ] = 1024,
    name: Name = "lab",
) -> None:
    """Give the node little memory, so that the kernel kills what wants more."""
    with _target("memory", node, name) as target:
        faults.memory(target, mib)


@fault.command()
def fill(
    node: Target,
    path: Annotated[str, typer.Argument(help="The folder on the node.")] = "/opt",
    name: Name = "lab",
    *,
    inodes: Annotated[bool, typer.Option("--inodes", help="Use up the inodes and leave space.")] = False,
) -> None:
    """Fill a folder up; it gets a small file system of its own, so this machine's disk is not filled."""
    with _target("fill", node, name) as target:
        faults.fill(target, path, inodes=inodes)


@fault.command()
def skew(
    node: Target,
    seconds: Annotated[int, typer.Option(help="How far it is ahead; behind, if negative.")] = 3600,
    name: Name = "lab",
) -> None:
    """Give the node a wrong clock: all that starts on it from now on, each ssh session too, sees another time."""
    with _target("skew", node, name) as target:
        faults.skew(target, seconds)


@fault.command()
def heal(node: Target, name: Name = "lab") -> None:
    """Undo cut, throttle, block, mtu, slow, memory, fill and skew."""
    with _target("heal", node, name) as target:
        faults.heal(target)


@fault.command()
def pause(node: Target, name: Name = "lab") -> None:
    """Freeze the node: it does not answer, but its connections stay open."""
    with _target("pause", node, name) as target:
        faults.pause(target)


@fault.command()
def resume(node: Target, name: Name = "lab") -> None:
    """Continue a frozen node."""
    with _target("resume", node, name, "paused") as target:
        faults.resume(target)


@fault.command()
def kill(node: Target, name: Name = "lab") -> None:
    """Cut the node's power."""
    with _target("kill", node, name) as target:
        faults.kill(target)


@fault.command()
def start(node: Target, name: Name = "lab") -> None:
    """Switch a killed node back on."""
    with _target("start", node, name, "exited") as target:
        faults.start(target)


@fault.command()
def reboot(node: Target, name: Name = "lab") -> None:
    """Reboot the node."""
    with _target("reboot", node, name) as target:
        faults.reboot(target)
