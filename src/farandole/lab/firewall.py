"""Remove the firewall chains that podman's network program leaves behind with its last network."""

import ipaddress
import json
from collections.abc import Iterator
from typing import Any

from farandole.lab.shell import run

Entry = dict[str, Any]
# All labs' addresses, away from podman's and docker's own ranges; an interrupted start leaves rules for them.
RANGE = ipaddress.IPv4Network("10.94.0.0/16")
_LAB_NETWORKS = str(RANGE.network_address).removesuffix("0.0")
_OWN = "netavark"


def names() -> list[str]:
    """List every table and chain, to know later which existed before."""
    rules = _ruleset()
    return sorted(
        [_table(entry) for entry in _each(rules, "table")] + [_chain(entry) for entry in _each(rules, "chain")]
    )


def clean(before: list[str]) -> list[str]:
    """Remove what has been added since `before` and is no longer used; returns what was removed."""
    rules = _ruleset()
    chains = [
        entry
        for entry in _each(rules, "chain")
        if entry["name"].lower().startswith("netavark") and _chain(entry) not in before
    ]
    forward = [rule for rule in _each(rules, "rule") if rule["chain"] == "NETAVARK_FORWARD"]
    # Newer versions of podman's network program use their own table, with chains for each network.
    own = [chain["name"] for chain in _each(rules, "chain") if chain["table"] == _OWN]
    others = [name for name in own if name.startswith("nv_") and f"_{_LAB_NETWORKS.replace('.', '_')}" not in name]
    if others or any(f'"{_LAB_NETWORKS}' not in json.dumps(rule) for rule in forward):
        return []  # another podman on this machine uses them
    ours = {entry["name"] for entry in chains}
    for rule in _each(rules, "rule"):
        if _jump(rule) in ours:
            _nft("delete", "rule", rule["family"], rule["table"], rule["chain"], "handle", str(rule["handle"]))
    for chain in chains:
        _nft("flush", "chain", *_chain(chain).split())
    for chain in chains:
        _nft("delete", "chain", *_chain(chain).split())
    return [f"firewall chain {_chain(chain)}" for chain in chains] + _drop_empty_tables(before)


def _drop_empty_tables(before: list[str]) -> list[str]:
    rules = _ruleset()
    used = {f"{rule['family']} {rule['table']}" for rule in _each(rules, "rule")} - {f"inet {_OWN}"}
    unused = [
        _table(entry) for entry in _each(rules, "table") if _table(entry) not in before and _table(entry) not in used
    ]
    for table in unused:
        _nft("delete", "table", *table.split())
    return [f"firewall table {table}" for table in unused]


def _ruleset() -> list[Entry]:
    listed: list[Entry] = json.loads(_nft("--json", "list", "ruleset"))["nftables"]
    return listed


def _each(rules: list[Entry], kind: str) -> Iterator[Entry]:
    return (entry[kind] for entry in rules if kind in entry)


def _table(entry: Entry) -> str:
    return f"{entry['family']} {entry['name']}"


def _chain(entry: Entry) -> str:
    return f"{entry['family']} {entry['table']} {entry['name']}"


def _jump(rule: Entry) -> str | None:
    for step in rule["expr"]:
        if isinstance(step.get("jump"), dict):
            return str(step["jump"]["target"])
    return None


def _nft(*arguments: str) -> str:
    return run("nft", *arguments)
