"""podman with the lab's own store, configuration and (where needed) cgroup tree."""

import json
import os
from collections.abc import Container
from typing import Any

import typer

from farandole.core.errors import FarandoleError
from farandole.lab import host
from farandole.lab.shell import run

# Nothing is shared with the user's own podman. static_dir keeps its default: the clean-up process that restarts a
# rebooting node does not read this file.
_ENGINE = """\
[engine]
runtime = "crun"
events_logger = "file"
volume_path = "{store}/volumes"
tmp_dir = "{run[0]}"
{cgroups}
[network]
network_backend = "netavark"
network_config_dir = "{store}/networks"
"""
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{store}/graph"
runroot = "{run[1]}"
# Nobody needs a node's disk after this machine has lost power, so no sync of a node waits for this machine's disk.
# As on any disk, a folder that was in the image can be renamed.
[storage.options.overlay]
mountopt = "volatile,redirect_dir=on"
"""


def podman(*arguments: str) -> str:
    """Run podman for the lab and return its output."""
    return run(*host.enter(), "podman", *arguments, env=_environment())


def query(*arguments: str) -> list[dict[str, Any]]:
    """Run a podman command and parse its JSON output."""
    entries: list[dict[str, Any]] = json.loads(podman(*arguments, "--format", "json") or "[]") or []
    return entries


def images() -> list[str]:
    """The existing images, as repository:tag."""
    return podman("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()


def remove(containers: list[str]) -> None:
    """Remove containers, if necessary by a power cycle."""
    command = ("rm", "--force", "--time=0", *containers)
    try:
        podman(*command)
    except FarandoleError as error:
        power_cycle(error, containers)
        podman(*command)


def power_cycle(reason: Exception, without: Container[str]) -> None:
    """Restart podman when interrupted commands have left it in an inconsistent state, and all nodes but `without`."""
    # Not as progress, which the next step overwrites.
    typer.echo(f"podman is stuck; restarting it, and with it the nodes of all labs: {reason}", err=True)
    running = podman("ps", "--format={{.Names}}").split()
    host.power_cycle()
    for container in (name for name in running if name not in without):
        try:
            podman("start", container)
        except FarandoleError as error:
            typer.echo(f"{container} is off: {error}", err=True)


def reap_strays() -> None:
    """Clean up after starts and removals that were killed halfway."""
    # One without a container answers podman's question for its version.
    monitors = [
        (pid, command) for pid, command in host.processes() if command[0].endswith("conmon") and "-c" in command
    ]
    known = podman("ps", "--quiet", "--no-trunc", "--filter=status=running", "--filter=status=paused").split()
    for pid, command in monitors:
        if command[command.index("-c") + 1] not in known:
            host.end(pid)  # it is running, but podman does not know it
    for line in podman("ps", "--all", "--external", "--format", "{{.ID}} {{.Status}}").splitlines():
        if line.endswith(" Storage"):
            podman("rm", "--force", line.split()[0])  # it has a disk and a name, but podman does not know it


def _environment() -> dict[str, str]:
    cgroups = "" if host.systemd_runs_cgroups() else 'cgroup_manager = "cgroupfs"\n'
    settings = {"CONTAINERS_CONF": _ENGINE, "CONTAINERS_STORAGE_CONF": _STORAGE}
    environment = dict(os.environ)
    host.STORE.mkdir(parents=True, exist_ok=True)
    for variable, template in settings.items():
        text = template.format(store=host.STORE, run=host.PODMAN_RUN, cgroups=cgroups)
        path = host.STORE / f"{variable.lower()}.toml"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        environment[variable] = str(path)
    return environment
