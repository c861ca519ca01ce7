"""`farandole init`: make the inventory of a cluster, with host keys that a person has compared."""

import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from farandole.cli.options import PrivateKey
from farandole.core.errors import FarandoleError
from farandole.core.files import sync_folder, write
from farandole.core.project import version
from farandole.core.table import table
from farandole.core.text import visible
from farandole.inventory.cluster import LABEL
from farandole.inventory.host_keys import KNOWN, SHOW, HostKey, known, place, scan
from farandole.inventory.reading import FOLDER

# In the inventory's folder, where Ansible does not take it for a list of hosts.
KNOWN_HOSTS = ".ssh/known_hosts"


def init(
    name: Annotated[str, typer.Argument(help="The cluster's name: the inventory becomes ./inventory/NAME.")],
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST]...", help="The nodes: a name, an IPv4 address, or NAME=ADDRESS."),
    ] = None,
    head: Annotated[str, typer.Option(help="The node where jobs are started, by default the first.")] = "",
    user: Annotated[str, typer.Option("--user", "-u", help="Log in as root, or as this user with sudo.")] = "root",
    private_key: PrivateKey = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of ssh on the nodes.")] = 22,
    host_key: Annotated[
        list[str] | None,
        typer.Option(metavar="SHA256:...", help="A fingerprint that need not be confirmed; for scripts, one per node."),
    ] = None,
) -> None:
    """Make the inventory of a cluster: ask each host for its key, show the fingerprints, write ./inventory/NAME."""
    folder = FOLDER / name
    if not LABEL.fullmatch(name):
        raise FarandoleError(f"{name} is not a valid cluster name: use lower-case letters, digits and hyphens")
    if folder.exists():
        raise FarandoleError(
            f"{folder} exists, and nothing was written: choose another name, or add nodes to its hosts.yml"
        )
    nodes, first = read_hosts(hosts or [], head)
    keys = ask(nodes, port)
    confirm(nodes, keys, port, host_key or [])
    write_inventory(folder, files_of(nodes, keys, first, user=user, private_key=private_key, port=port))
    typer.echo(f"{folder}: {len(nodes)} nodes, jobs are started on {first}\nnext: farandole apply -i {name}")


def read_hosts(hosts: Sequence[str], head: str) -> tuple[dict[str, str], str]:
    """The address of each node by its name, and the name of the head."""
    known = {*hosts, *(host.partition("=")[0] for host in hosts)}
    arguments = [*([head] if head and head not in known else []), *hosts]
    if not arguments:
        raise FarandoleError("which hosts? name at least one, for example  farandole init mine 192.0.2.11 192.0.2.12")
    pairs = [_node(word, number) for number, word in enumerate(arguments, 1)]
    for kind, values in (("name", [name for name, _ in pairs]), ("address", [address for _, address in pairs])):
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            both = " and ".join(word for word, pair in zip(arguments, pairs, strict=True) if twice[0] in pair)
            raise FarandoleError(f"{both} have the same {kind}, {twice[0]}; nothing was written: name each host once")
    place = arguments.index(head) if head in arguments else [name for name, _ in pairs].index(head) if head else 0
    return dict(pairs), pairs[place][0]


def _node(word: str, number: int) -> tuple[str, str]:
    """The name and the address of a host that was given as one of them or as both."""
    name, both, target = word.partition("=")
    target = target if both else name
    try:
        address = str(IPv4Address(target))
        name = name if both else f"node-{number}"
    except ValueError:
        name = name if both else name.lower().partition(".")[0]
        address = _resolve(target)
    given = IPv4Address(address)
    if given.is_loopback or given.is_unspecified or given.is_multicast:
        raise FarandoleError(
            f"{visible(word)}: no other node can reach it at {address}; nothing was written: give its address in their "
            f"network as {visible(name)}=ADDRESS"
        )
    if not LABEL.fullmatch(name) or name == "localhost":
        raise FarandoleError(f"{word}: {name} cannot be a node's name; give it one with NAME={address}")
    return name, address


def _resolve(name: str) -> str:
    """The IPv4 address of a name, as other nodes need an address that is the same everywhere."""
    try:
        addresses = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is malformed"
        raise FarandoleError(
            f"{visible(name)} has no IPv4 address here ({reason}); nothing was written: add {visible(name)}=ADDRESS"
        ) from None
    return str(addresses[0][4][0])


def ask(nodes: Mapping[str, str], port: int) -> dict[str, HostKey]:
    """The host key of each node; refuses if one does not answer, or has another key than this machine knows."""
    typer.echo(f"asking {len(nodes)} hosts for their keys")
    answers = dict(zip(nodes, scan([*nodes.values()], port), strict=True))
    if silent := [f"{node} ({nodes[node]}): {why}" for node, why in answers.items() if isinstance(why, str)]:
        raise FarandoleError(
            "no host key from " + "; ".join(silent) + f". Nothing was written: start sshd there, open port {port} "
            "for this machine, or correct the address"
        )
    keys = {node: key for node, key in answers.items() if isinstance(key, HostKey)}
    if twins := [node for node, key in keys.items() if [*keys.values()].count(key) > 1]:
        raise FarandoleError(
            f"{', '.join(twins)} have the same host key: they are one machine, or copies of one. Nothing was written: "
            "name each machine once; on a copy, make its own keys: rm /etc/ssh/ssh_host_*; ssh-keygen -A"
        )
    return keys


def confirm(nodes: Mapping[str, str], keys: Mapping[str, HostKey], port: int, fingerprints: Sequence[str]) -> None:
    """Make sure that a person knows each key: by known_hosts, by an option, or by looking at its fingerprint."""
    new = []
    for node, key in keys.items():
        before = [former for former in known((place(nodes[node], port),)) if former.kind == key.kind]
        if before and key not in before:
            raise FarandoleError(
                f"{node} ({nodes[node]}) has another host key than {KNOWN[0]} or {KNOWN[1]} says: now "
                f"{key.fingerprint}, before {before[0].fingerprint}. Nothing was written. If it was reinstalled, "
                f"forget the old key:  ssh-keygen -R '{place(nodes[node], port)}'  Otherwise the connection may be "
                "intercepted"
            )
        if key not in before and key.fingerprint not in fingerprints:
            new.append(node)
    rows = [[node, nodes[node], key.fingerprint, "" if node in new else "known"] for node, key in keys.items()]
    typer.echo(table([["node", "address", "host key", ""], *rows]))
    if new and fingerprints:
        raise FarandoleError(f"no --host-key has the fingerprint of {', '.join(new)}; nothing was written")
    if new and not sys.stdin.isatty():
        raise FarandoleError(
            "nothing was written, because these keys cannot be confirmed without a terminal: give them with --host-key"
        )
    if new:
        typer.echo(f"Compare them with what each host itself says, on its console:  {SHOW}")
        typer.confirm("Are they the same?", abort=True)


def files_of(
    nodes: Mapping[str, str], keys: Mapping[str, HostKey], head: str, *, user: str, private_key: Path | None, port: int
) -> dict[str, str]:
    hosts = {node: {"ansible_host": address} for node, address in nodes.items()}
    groups = {"cluster": {"hosts": hosts}, "head": {"hosts": {head: None}}}
    variables: dict[str, Any] = {"ansible_user": user}
    if private_key:
        variables["ansible_ssh_private_key_file"] = str(private_key.absolute())
    if port != 22:
        variables["ansible_port"] = port
    variables["ansible_ssh_common_args"] = f"""-o 'UserKnownHostsFile="{{{{ inventory_dir }}}}/{KNOWN_HOSTS}"'"""
    lines = [f"{place(nodes[node], port)} {key.kind} {key.blob}\n" for node, key in keys.items()]
    made = f"# Made by farandole init {version()}; it is yours to change.\n"
    return {
        "hosts.yml": made + yaml.safe_dump(groups, sort_keys=False, explicit_start=True),
        "group_vars/all.yml": "# How to log in; settings of the roles can go here, too.\n"
        + yaml.safe_dump(variables, sort_keys=False, explicit_start=True, width=200),
        KNOWN_HOSTS: "".join(lines),
    }


def write_inventory(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files beside their place, and put all of them there at once."""
    draft = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for name, content in files.items():
            (draft / name).parent.mkdir(exist_ok=True)
            write(draft / name, content, durable=True)
        draft.chmod(0o755)
        draft.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise FarandoleError(f"{folder} cannot be written, and was not: {error.strerror}") from None
    finally:
        if draft:
            shutil.rmtree(draft, ignore_errors=True)
