"""The `farandole lab` commands."""

import inspect
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from farandole.core.errors import FarandoleError
from farandole.lab import cgroups, faults, host, image, inventory, lab, machine
from farandole.lab.shell import run
from farandole.stack.cache import Builds

app = typer.Typer(no_args_is_help=True, help="Run hosts with systemd and sshd on this machine, to test on.")
fault = typer.Typer(no_args_is_help=True, help="Inject a fault into a node, or repair it.")
app.add_typer(fault, name="fault")
console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def _lab_name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,30}", value):
        raise typer.BadParameter("at most 31 lower-case letters, digits, _ and -, starting with a letter")
    return value


Name = Annotated[str, typer.Option("--name", "-n", callback=_lab_name, help="Name of the lab.")]
Kernel = Annotated[
    host.Kernel,
    typer.Option(
        help="What new nodes run: this machine's kernel, one of their own in user mode, or Debian's under QEMU."
    ),
]
Target = Annotated[str, typer.Argument(metavar="NODE", help="node-1, node-2, …")]


@app.callback()
def _find_programs() -> None:
    # `su` leaves the PATH as it is, and that of a user has no programs of the administrator.
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@contextmanager
def _work(title: str) -> Iterator[lab.Progress]:
    """Change the machine and show progress: a status line on a terminal, else one line per step."""
    host.check()
    begun = time.monotonic()
    with ExitStack() as stack:
        if console.is_terminal:
            status = stack.enter_context(console.status(title))

        def progress(step: str) -> None:
            if console.is_terminal:
                status.update(f"{title}: {step}")
            else:
                console.print(f"{title}: {step}")

        stack.enter_context(host.locked(wait=lambda: progress("waiting for another lab command to finish")))
        yield progress
    console.print(f"{title}: done in {time.monotonic() - begun:.1f} s")


@app.command()
def setup(kernel: Kernel = host.Kernel.shared) -> None:
    """Install the Debian packages that the lab needs, for nodes with this kind of kernel."""
    if not host.is_root():
        host.check_packages(kernel)
    elif missing := host.missing_packages(kernel):
        console.print(f"installing {', '.join(missing)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "--quiet", env=environment)
        run(*host.install_command(missing), env=environment)


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Number of nodes in total.")] = 2,
    suite: Annotated[image.Suite, typer.Option(help="Debian release of new nodes.")] = image.Suite.bookworm,
    name: Name = "lab",
    kernel: Kernel = host.Kernel.shared,
    *,
    memory: Annotated[
        int, typer.Option(min=machine.LEAST_MIB, help="MiB of a new node with a kernel of its own.")
    ] = machine.MEMORY_MIB,
    packages: Annotated[
        str, typer.Option(help="Debian packages, separated by commas, that new nodes have from the start.")
    ] = "",
    stack: Annotated[str, typer.Option(help="A stack of an earlier lab that they have as well.")] = "",
    decoy: Annotated[bool, typer.Option("--decoy", help="Give each new node a docker0 with the same address.")] = False,
    second: Annotated[
        bool, typer.Option("--second-network", help="Connect each new node to a second network, by its eth1.")
    ] = False,
) -> None:
    """Start a lab or add nodes to it; safe to run again.

    Nodes are, or run in, privileged containers: root on a node can become root on this machine (docs/lab.md).
    """
    inventory.check(name)
    has = sorted({*filter(None, packages.split(","))})
    kind = lab.Kind(suite, kernel, memory, decoy, has, _packed(stack, suite) if stack else None)
    with _work(f"{name} up") as progress:
        lab.up(name, nodes, kind, second=second, progress=progress)
    console.print(f"inventory: {inventory.folder(name)}")


def _packed(stack: str, suite: image.Suite) -> Path:
    """The archive of a stack that labs have built for this release."""
    locks = [(built.about["lock"], built.path) for built in Builds(inventory.builds()).packed()]
    known = {lock["id"]: path for lock, path in locks if lock["platform"]["os"] == image.SYSTEMS[suite]}
    if stack not in known:
        raise FarandoleError(f"no lab with {suite} has built stack {stack} (there are: {', '.join(known) or 'none'})")
    return known[stack]


@app.command()
def down(name: Name = "lab") -> None:
    """Remove a lab; removing the last one restores this machine."""
    # All in here, as whoever removes the last lab ends each podman that still runs.
    with _work(f"{name} down") as progress:
        lab.refuse_foreign(name)
        if not (lab.nodes(name) or inventory.folder(name).exists()):
            console.print(f"there is no lab {name}; removing anything that one may have left")
        kept = inventory.remove(name)
        restored = lab.down(name, progress)
        cgroups.forget(name)
        others = sorted({node.lab for node in lab.nodes()})
    for line in kept:
        console.print(f"kept: {line}")
    for line in restored:
        console.print(f"restored: {line}")
    if others:
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
    nodes = lab.nodes()
    stopped = lab.stopped()
    for name in stopped:
        console.print(f"lab {name} is stopped: `farandole lab up --name {name}` starts it")
    if not nodes and not stopped:
        console.print("no lab is up; `farandole lab up` starts one")
    table = Table("lab", "node", "suite", "kernel", "address", "state", "ssh")
    for node in nodes:
        ssh = "answers" if node.state == "running" and lab.answers(node.address, 0) else "silent"
        table.add_row(node.lab, node.name, node.suite, node.kernel, node.address, node.state, ssh)
    if nodes:
        console.print(table)
    for change in host.changes():
        console.print(f"on this machine: {change}")


@app.command("inventory")
def inventory_(name: Name = "lab") -> None:
    """Write the lab's inventory into this checkout and print its path."""
    host.check()
    if not any(node.state == "running" for node in lab.nodes(name)):
        raise FarandoleError(f"lab {name} has no running node; `farandole lab up --name {name}` starts it")
    inventory.check(name)
    console.print(str(lab.write_inventory(name)))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def ssh(
    node: Target,
    command: Annotated[list[str] | None, typer.Argument(help="Command to run; without one, a shell.")] = None,
    name: Name = "lab",
) -> None:
    """Open a shell on a node, or run one command with exactly these arguments."""
    config = inventory.folder(name) / ".ssh" / "config"
    if not config.exists():
        raise FarandoleError(f"this checkout knows no lab {name}; `farandole lab up --name {name}` starts it")
    if f"Host {node}\n" not in config.read_text():
        raise FarandoleError(f"lab {name} has no node {node}; `farandole lab status` shows all")
    arguments = command[1:] if command and command[0] == "--" else command
    if arguments and arguments[0].startswith("-"):  # ssh would take it as its own option
        raise FarandoleError(f"{arguments[0]} is not a program; options of this command go before {node}")
    # ssh passes one string to the remote shell; quoting preserves the arguments.
    os.execvp("ssh", ["ssh", "-F", str(config), node, *([shlex.join(arguments)] if arguments else [])])  # noqa: S606


def _on_node(change: Callable[..., None], state: str = "running") -> Callable[..., None]:
    """A command that changes a node in this state, which it takes by its name and that of its lab."""

    def changed(node: str, name: str, **options: Any) -> None:
        with _work(f"{change.__name__} {node}"):
            target = lab.node(name, node)
            if target.state != state:
                raise FarandoleError(f"{node} is {target.state}, and {change.__name__} is for a node that is {state}")
            change(target, **options)

    _, *own = inspect.signature(change, eval_str=True).parameters.values()
    parameters = [
        inspect.Parameter("node", inspect.Parameter.KEYWORD_ONLY, annotation=Target),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default="lab", annotation=Name),
    ]
    changed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    changed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    changed.__name__, changed.__doc__ = change.__name__, change.__doc__
    return changed


for change in faults.FAULTS:
    fault.command()(_on_node(change))
fault.command()(_on_node(faults.resume, "paused"))
fault.command()(_on_node(faults.start, "exited"))
