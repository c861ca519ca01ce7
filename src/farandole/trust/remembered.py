"""What nodes remember of the cluster's CA, and an older copy of its folder does not."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.core.findings import Finding, FindingsError, count, finding, some
from farandole.core.schema import UnfitError, fields, many, within, words
from farandole.trust.certificates import signed_key
from farandole.trust.rules import KEY, Signed, key_of

MEMORY = fields(
    {
        "authorities": many(words(KEY)),
        # Only those that the list of this run lacks.
        "revoked": many(words(KEY + r" [!-~]{1,255}")),
        "certificate": words(r"|ssh-ed25519-cert-v01@openssh\.com [A-Za-z0-9+/=]{1,16384}"),
    }
)
Memories = Mapping[str, Mapping[str, Any]]
# A key that the CA of this folder does not know to be revoked, and for which node it was signed: who says so.
Claims = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Known:
    """What the CA's folder says, after what the inventory revokes; without a CA that is about to be replaced."""

    folder: str
    host_ca: str
    user_ca: str
    former: Collection[str]
    ledger: Sequence[Signed]
    revoked: Sequence[str]
    # Whether the run that made this CA has not completed.
    unfinished: bool
    # Whether it came from a backup. Then what a single node knows is left to the operator, although it is replaced.
    restored: bool = False


def memories(nodes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The checked answers of all nodes; a malformed one is a finding about that node."""
    checked, faults = {}, []
    for node in nodes:
        try:
            checked[node["name"]] = within("it", MEMORY, node["remembers"])
        except UnfitError as error:
            faults.append(finding("memory-malformed", node["name"], seen=str(error)))
    _refuse(faults)
    return checked


def believed(told: Memories, known: Known, revoked: Collection[str], *, alone: bool) -> list[Signed]:
    """The keys that nodes rightly call revoked, and the folder does not; what else it does not know is refused.

    One node decides nothing about another: two have to say so, or the only one there is. A new CA makes everything
    else invalid of which nodes could know.
    """
    claims = _claims(told, {key_of(line) for line in known.revoked})
    owners: dict[str, set[str]] = {}
    for entry in known.ledger:
        owners.setdefault(entry.key, set()).add(entry.name)
    true = {line for line in claims if _owner(line) in owners.get(key_of(line), {_owner(line)})}
    agreed = {line for line in true if alone or len(claims[line]) > 1}
    named = {line for line in agreed if not known.user_ca or _owner(line) in revoked}
    rest = {line: nodes for line, nodes in claims.items() if line not in named}
    cas = {known.host_ca, known.user_ca, *known.former}
    faults = [*_foreign(told, known.folder, cas), *_outdated(told, known), *_unknown(rest, known, len(told))]
    counted = {name for name, memory in told.items() if _counts(memory, known)}
    _refuse(
        [*_unknown(rest, known, len(told))] if known.restored else [fault for fault in faults if fault.host in counted]
    )
    return [Signed(key_of(line), _owner(line), "user") for line in claims if line in named]


def _counts(memory: Mapping[str, Any], known: Known) -> bool:
    """Whether this CA has to know all that the node does: not if the node is still to get this CA."""
    present = {known.host_ca, known.user_ca} - {""}
    return bool(present) and (not known.unfinished or present == {*memory["authorities"]})


def _owner(line: str) -> str:
    return line.rsplit(" ", 1)[1]


def _claims(told: Memories, known: Collection[str]) -> dict[str, list[str]]:
    claims: dict[str, list[str]] = {}
    for name, memory in told.items():
        for line in dict.fromkeys(memory["revoked"]):
            if key_of(line) not in known:
                claims.setdefault(line, []).append(name)
    return claims


def refuse_foreign(told: Memories, folder: str, cas: Collection[str]) -> None:
    """Refuse nodes that trust a CA which was not made here."""
    _refuse([*_foreign(told, folder, cas)])


def _foreign(told: Memories, folder: str, cas: Collection[str]) -> Iterator[Finding]:
    for name, memory in told.items():
        if not {*memory["authorities"]} <= {*cas}:
            yield finding("ca-unknown", name, folder=folder)


def _outdated(told: Memories, known: Known) -> Iterator[Finding]:
    """No node can make this up: the CA itself signed the key."""
    keys = {"", *(entry.key for entry in known.ledger)}
    for name, memory in told.items():
        if signed_key(memory["certificate"], known.host_ca) not in keys:
            yield finding("ledger-outdated", name, folder=known.folder)


def _unknown(claims: Claims, known: Known, asked: int) -> Iterator[Finding]:
    for name in dict.fromkeys(name for nodes in claims.values() for name in nodes):
        own = {line: len(nodes) for line, nodes in claims.items() if name in nodes}
        yield finding(
            "revoked-unknown",
            name,
            count=count(len(own), "revoked key"),
            seen=some(sorted({_owner(line) for line in own})),
            said=min(own.values()),
            asked=asked,
            folder=known.folder,
        )


def _refuse(faults: Sequence[Finding]) -> None:
    if faults:
        raise FindingsError(faults, "found {problems} with what the nodes know of the CA; nothing was signed.")
