"""Replace the names of hosts, addresses and machine ids in a result, the same one always by the same word."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

# Fields that a report uses as codes, and that name no host.
CODES = {"status", "verdict", "code", "severity", "time", "started", "rates_measured", "versions", "bars", "stack"}
PER_HOST = ("trust.", "stack.")
IDS = re.compile(r"\b(?:[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b", re.IGNORECASE)
HARDWARE = re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b", re.IGNORECASE)
ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f:.]*)(?![\w])", re.IGNORECASE)
INVENTORY = re.compile(r"(-i|--inventory)[ =](?:'[^']*'|\S+)")


def masked_alike(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results without names, the same host with the same word in all; programs may have printed other names."""
    names = list(dict.fromkeys(name for result in results for name in hosts(result)))
    clusters, paths = ({str(result[what]) for result in results} for what in ("cluster", "inventory"))
    mask = Mask(names, clusters, paths)
    return [{**mask.of(result, ""), "cluster": "", "inventory": "inventory/NAME"} for result in results]


def hosts(result: Mapping[str, Any]) -> list[str]:
    """The names of all nodes that a result mentions as such."""
    names = [*result["hosts"], *(name for one in result["checks"] for name in one["hosts"])]
    names += [name for one in result["jobs"] for name in one["nodes"]]
    names += [rank["host"] for one in result["jobs"] for rank in one["ranks"]]
    if preflight := result["preflight"]:
        names += [*preflight["hosts"], *preflight["nodes"], *(name for one in preflight["pairs"] for name in one[:2])]
    return [name for name in dict.fromkeys(names) if name]


class Mask:
    """Remembers what stands for what."""

    def __init__(self, names: Sequence[str], clusters: Collection[str], paths: Collection[str]) -> None:
        self.words: dict[str, str] = {}
        self.paths = [one for one in paths if len(one) > 1]
        for number, name in enumerate(names, 1):
            for one in {name, *_short(name)}:
                self.words.setdefault(one.lower(), f"host-{number}")
        domains = {domain for name in names for domain in _domain(name)}
        for number, domain in enumerate(sorted(domains), 1):
            self.words.setdefault(domain.lower(), f"domain-{number}")
        for cluster in clusters:
            # Short ones, such as lab, are words of every log.
            if len(cluster) > 3:
                self.words.setdefault(cluster.lower(), "cluster")
        # The longest first, so that node-1 does not replace the beginning of node-10 or node-1.example.org.
        parts = "|".join(re.escape(one) for one in sorted(self.words, key=len, reverse=True))
        self.known = re.compile(rf"(?<![^\W_])(?:{parts})(?![^\W_])", re.IGNORECASE) if parts else None
        self.others: dict[str, str] = {}

    def of(self, value: Any, field: str) -> Any:
        """A value with all that is in it."""
        if isinstance(value, str):
            return value if field in CODES or (field == "id" and not value.startswith(PER_HOST)) else self.text(value)
        if isinstance(value, list | tuple):
            return [self.of(one, field) for one in value]
        if isinstance(value, Mapping):
            plain = field in CODES
            return {
                key if plain or not self._is_name(key) else self.text(key): one if plain else self.of(one, key)
                for key, one in value.items()
            }
        return value

    def _is_name(self, key: str) -> bool:
        return key.lower() in self.words

    def text(self, text: str) -> str:
        """A text with other words for names, addresses and ids."""
        for path in self.paths:
            text = text.replace(path, "inventory/NAME")
        text = INVENTORY.sub(r"\1 inventory/NAME", text)
        if self.known:
            text = self.known.sub(lambda found: self.words[found[0].lower()], text)
        text = IDS.sub(lambda found: self._other("machine", found[0]), text)
        text = HARDWARE.sub(lambda found: self._other("interface", found[0]), text)
        return ADDRESS.sub(self._address, text)

    def _address(self, found: re.Match[str]) -> str:
        # A full stop or a colon may end it.
        for end in ("", ":", "."):
            whole = found[0]
            try:
                address = ip_address(whole.removesuffix(end) if end else whole)
            except ValueError:
                continue
            return (
                whole if address.is_loopback or address.is_unspecified else self._other("address", str(address)) + end
            )
        return found[0]

    def _other(self, kind: str, seen: str) -> str:
        number = 1 + sum(word.startswith(f"{kind}-") for word in self.others.values())
        return self.others.setdefault(seen.lower(), f"{kind}-{number}")


def _short(name: str) -> Iterator[str]:
    """The first part of a full name."""
    if "." in name and not ADDRESS.fullmatch(name):
        yield name.partition(".")[0]


def _domain(name: str) -> Iterator[str]:
    if name.count(".") > 1 and not ADDRESS.fullmatch(name):
        yield name.partition(".")[2]
