"""`farandole replace`: a new machine takes the name and the place of one that is gone."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.change import Change, alone
from farandole.cli.init import KNOWN_HOSTS, ask
from farandole.cli.node import Name, cluster_of, refuse_stranger
from farandole.cli.options import Inventory, as_given, with_login
from farandole.core.errors import FarandoleError
from farandole.core.files import write
from farandole.core.findings import several
from farandole.inventory import excluded
from farandole.inventory.facts import ClusterFacts
from farandole.inventory.host_keys import KNOWN, SHOW, HostKey, known, place
from farandole.inventory.run_lock import person
from farandole.inventory.variables import folder_of, host_variables
from farandole.plays.playbook import Login
from farandole.queue.key import forget

# Marks a node that is left out because a new machine has not taken its place yet.
CODE = "replace"


@with_login("user", "private_key", "vault_password_file")
def replace(
    name: Name,
    inventory: Inventory,
    host_key: Annotated[
        str, typer.Option(metavar="SHA256:...", help="The new machine's fingerprint, so that nobody is asked.")
    ] = "",
    *,
    login: Login,
) -> None:
    """Put a new machine in the place of a node: same name, new keys; the former machine's are revoked everywhere.

    Its address comes from the inventory; change it there first if it is another one.
    If sudo needs a password, set ansible_become_password: nobody is asked for it.
    """
    cluster, variables = cluster_of(inventory, write=True), host_variables(inventory.absolute())
    refuse_stranger(name, cluster)
    if name == cluster.head:
        raise FarandoleError(f"{name} is the head, which has what no other node has: make another node the head first")
    if name in cluster.builders[:1]:
        raise FarandoleError(f"{name} builds for all nodes: put another one first in group builders")
    if name in cluster.revoked:
        raise FarandoleError(f"take {name} out of ssh_trust_revoked first; its former keys stay revoked")
    address, port = str(variables[name].get("ansible_host") or name), int(variables[name].get("ansible_port") or 22)
    file, host = folder_of(inventory) / KNOWN_HOSTS, place(address, port)
    file = file if file.exists() else Path(KNOWN[0]).expanduser()
    key = ask({name: address}, port)[name]
    again = f"farandole replace {name} {as_given(inventory, login)}"
    change = Change(inventory, login, cluster, again)
    with alone(cluster.state):
        entry = excluded.read(cluster.state).get(name)
        begun = entry and entry.code == CODE and key in known((host,), (str(file),))
        if not begun:
            refuse_former(name, key, cluster)
            confirm(name, address, key, host_key)
            remember(file, host, key)
            # The former machine knows the queue's.
            forget(cluster.state / "slurm")
        left_out = dataclasses.replace(
            excluded.by_person(person(), "it was replaced, and is not proven yet"), code=CODE
        )
        if why := change.brought_back(
            {name: left_out}, lambda: renewed(change, name, left_out) or change.returning([name])
        ):
            raise FarandoleError(
                f"{name}: {why}{change.untold()}. It is left out of jobs; when that is mended, run again: {again}"
            )
    others = [*excluded.read(cluster.state)]
    but = f" but {several(others)}, which learn it when they are back" if others else ""
    typer.echo(f"{name} is replaced and takes part in jobs; the former machine's keys are refused by all nodes{but}")


def renewed(change: Change, name: str, left_out: excluded.Entry) -> str:
    """Sign the new machine's keys, and let all nodes refuse the former one's; returns what failed, if anything did."""
    if not change.run("site.yml", "--limit", name, "--skip-tags", "slurm"):
        return "site.yml failed"
    # The head gives the new machine no jobs yet.
    excluded.end_proof(change.cluster.state, name, left_out, good=False)
    if not change.run("site.yml"):
        return "site.yml failed on the other nodes"
    if excluded.read(change.cluster.state).get(name) != left_out:
        return "somebody has said something else of it meanwhile"
    excluded.begin_proof(change.cluster.state, name, left_out)
    # What was measured is of the former machine.
    measured = change.run("playbooks/preflight.yml", "--extra-vars", "preflight_network=all")
    return "" if measured else "preflight failed"


def refuse_former(name: str, key: HostKey, cluster: ClusterFacts) -> None:
    """Refuse a machine whose key was this cluster's before, such as the former one."""
    for kind in ("revoked_keys", "signed_keys"):
        path = cluster.state / "ca" / kind
        if path.exists() and key.blob in path.read_text():
            raise FarandoleError(
                f"{name} has a key that this cluster knows from before ({key.fingerprint}), so it is no new machine. "
                "Nothing was changed; if it was copied from one, make its own: rm /etc/ssh/ssh_host_*; ssh-keygen -A"
            )


def confirm(name: str, address: str, key: HostKey, fingerprint: str) -> None:
    """Make sure that a person knows the key of the new machine."""
    typer.echo(f"{name} ({address}) has a new host key: {key.fingerprint}")
    if fingerprint and fingerprint != key.fingerprint:
        raise FarandoleError(f"--host-key is another one: {fingerprint}; nothing was changed")
    if fingerprint:
        return
    if not sys.stdin.isatty():
        raise FarandoleError("nothing was changed, because this cannot be confirmed without a terminal: --host-key")
    typer.echo(f"Compare it with what the machine itself says, on its console:  {SHOW}")
    typer.confirm("Is it the same?", abort=True)


def remember(file: Path, host: str, key: HostKey) -> None:
    """Put the new key in the place of the former one; what is said of other hosts as well stays."""
    former = subprocess.run(["ssh-keygen", "-F", host, "-f", file], text=True, capture_output=True, check=False).stdout
    gone = {line for line in former.splitlines() if not line.startswith(("#", "@"))}
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [left for line in lines if (left := without(line, host) if line in gone else line)]
    write(file, "\n".join([*kept, f"{host} {key.kind} {key.blob}", ""]), durable=True)


def without(line: str, host: str) -> str:
    """A line of known_hosts that is about a host, without it; empty if it is about no other one."""
    names, _, key = line.partition(" ")
    others = [name for name in names.split(",") if name != host and not name.startswith("|")]
    return f"{','.join(others)} {key}" if others else ""
