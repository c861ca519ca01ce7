"""Decide which node fetches an archive from which, so that the head need not send it to each of them."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.core.fetching import PIECE
from farandole.inventory.cluster import HostVars, node_address, parse_address

# Nodes that lack an archive; with fewer, the head alone is as fast.
LEAST = 4
# How long a node waits for a source, per node between it and the depot: who is next to a fault moves to its next source
# first, and those behind it, who notice only that nothing comes, need not move.
PATIENCE_S = 5


def peers(
    installs: Sequence[Mapping[str, Any]], names: Sequence[str], hostvars: HostVars, head: str, forks: int, port: int
) -> dict[str, dict[str, Any]]:
    """By stack, the sha256 of each piece of its archive, and how each node that lacks it takes part in passing it on.

    `names` are the nodes of the play, in Ansible's order. The head has the depot, so it does not take part."""
    shared = {}
    for number, part in enumerate(installs):
        lacking = {*part["lacking"]} - {head}
        addresses = {name: parse_address(node_address(hostvars[name])) for name in names if name in lacking}
        usable = {name: str(address) for name, address in addresses.items() if address}
        if part["archive"] and len(usable) >= LEAST:
            # A node may still be passing on the archive before this one.
            nodes = tree(usable, forks, port + number)
            shared[part["id"]] = {"pieces": pieces(Path(part["archive"]["path"])), "nodes": nodes}
    return shared


def pieces(path: Path) -> list[str]:
    """The sha256 of each piece of a file."""
    with path.open("rb") as file:
        return [hashlib.sha256(piece).hexdigest() for piece in iter(lambda: file.read(PIECE), b"")]


def tree(addresses: Mapping[str, str], forks: int, port: int) -> dict[str, dict[str, Any]]:
    """For each node, where it listens, which nodes it asks before the depot, and whose requests it answers."""
    names = list(addresses)
    nodes: dict[str, dict[str, Any]] = {}
    for place, (name, address) in enumerate(addresses.items()):
        patience = PATIENCE_S * (2 + depth(place, forks))
        nodes[name] = {"address": address, "port": port, "patience": patience}
        nodes[name] |= {"sources": [], "children": [], "grandchildren": []}
        above = parent(place, forks)
        for kind in ("children", "grandchildren"):
            if above is not None:
                nodes[name]["sources"].append({"name": names[above], "address": addresses[names[above]]})
                nodes[names[above]][kind].append(address)
                above = parent(above, forks)
    return nodes


def parent(place: int, forks: int) -> int | None:
    """The place of the node from which a node fetches, always an earlier one; None for the depot.

    Ansible starts so many nodes at once. They form a tree in which the depot and each node have two children. After
    that it starts one whenever another has ended; each of these has one parent that is likely to have ended."""
    if place >= forks:
        return place - forks
    return place // 2 - 1 if place > 1 else None


def depth(place: int, forks: int) -> int:
    """How many nodes that may still be fetching are between a node and the depot."""
    above = parent(place, forks)
    return 0 if above is None else 1 if place >= forks else 1 + depth(above, forks)
