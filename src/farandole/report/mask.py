"""Replace the names of hosts, people, folders and machines in a result, the same one always by the same word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from itertools import chain
from typing import Any

# Fields that a report uses as codes, and that name no host.
CODES = {"status", "verdict", "code", "severity", "time", "started", "rates_measured", "versions", "bars", "stack"}
# Checks whose id ends with what they are about.
ABOUT = ("trust.", "stack.", "files.")
EVERYWHERE = {"root"}
IDS = re.compile(r"\b(?:[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b", re.IGNORECASE)
HARDWARE = re.compile(r"(?<![0-9a-f:])[0-9a-f]{2}(?::[0-9a-f]{2}){5}(?![0-9a-f:])", re.IGNORECASE)
ADDRESS = re.compile(
    r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\d)|(?<![^\W_])(?<!\.)[0-9a-f]{0,4}:[0-9a-f:.]{1,41}(?!\w)", re.IGNORECASE
)
# Folders that are the same on every machine; all others may be somebody's.
PATH = re.compile(
    r"(?<![\w.])/(?!(?:s?bin|boot|dev|etc|lib\w*|opt/farandole|proc|run|sys|tmp|usr|var)(?![\w-])|\d+(?:\.\d+){3})"
    r"[\w.+~-]+(?:/[\w.+@~=-]*)*"
)
USERS = (
    re.compile(r"/(?:home|Users)/([\w.-]+)"),
    re.compile(r"(?<![\w./])~([A-Za-z_][\w.-]*)"),
    re.compile(r"(?<![\w.])([A-Za-z_][\w.-]*)@(?=\w)"),
    re.compile(r"\b[ug]id=\d+\(([\w.-]+)\)"),
)
# The domain of a host that the inventory knows without one.
DOMAIN = re.compile(r"(?<![^\W_])(host-\d+)(?:\.[A-Za-z][\w-]*){2,}")
AT = re.compile(r"@((?!(?:host|address|domain)-\d)[\w-]+(?:\.[\w-]+)+)")
# What was cut may be the rest of a name.
CUT = re.compile(r"\S*…\s?\S*")
# The length at which jobs cut lines without saying so, before format 3 said it.
LINE = 300


def masked_alike(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results without names, the same host with the same word in all."""
    mask = Mask(results)
    return [{**mask.of(result, ""), "cluster": "", "names": {}, "accounts": []} for result in results]


def hosts(result: Mapping[str, Any]) -> list[str]:
    """The names of all hosts that a result mentions as such, those that were validated first."""
    names = [*result["hosts"], *(name for one in result["checks"] for name in one["hosts"])]
    names += [name for one in result["jobs"] for name in one["nodes"]]
    names += [rank["host"] for one in result["jobs"] for rank in one["ranks"]]
    if preflight := result["preflight"]:
        names += [*preflight["hosts"], *preflight["nodes"], *(name for one in preflight["pairs"] for name in one[:2])]
    return [name for name in dict.fromkeys([*names, *result["names"]]) if name]


def strings(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(strings, chain(value, value.values())))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(strings, value))


class Mask:
    """Remembers what stands for what."""

    def __init__(self, results: Sequence[Mapping[str, Any]]) -> None:
        self.words: dict[str, str] = {}
        names = list(dict.fromkeys(name for result in results for name in hosts(result)))
        for number, name in enumerate(names, 1):
            own = [name, *(one for result in results for one in called(result, name))]
            self._add(f"host-{number}", chain(own, *map(_short, own)))
        domains = {domain for name in [*self.words] for domain in _domain(name)}
        for number, domain in enumerate(sorted(domains, key=len), 1):
            self._add(f"domain-{number}", [domain])
        people = {name for result in results for name in result["accounts"]}
        texts = [*strings(results)]
        people |= {found[1].rstrip(".") for text in texts for form in USERS for found in form.finditer(text)}
        for number, name in enumerate(sorted(people - EVERYWHERE), 1):
            self._add(f"user-{number}", [name])
        self._add("cluster", (result["cluster"] for result in results))
        self.paths = sorted({result["inventory"] for result in results if len(result["inventory"]) > 1}, key=len)
        # The longest first, so that node-1 does not replace the beginning of node-1.example.org. A name of one letter
        # says nothing, and would be in every line.
        known = sorted((one for one in self.words if len(one) > 1), key=len, reverse=True)
        parts = "|".join(map(re.escape, known))
        self.known = re.compile(rf"(?<![^\W_])(?:{parts})(?![^\W_])", re.IGNORECASE) if parts else None
        # Within other words, those that can hardly be there by chance.
        parts = "|".join(re.escape(one) for one in known if len(one) > 3 and re.search(r"\d", one))
        self.within = re.compile(parts, re.IGNORECASE) if parts else None
        self.others: dict[str, str] = {}

    def _add(self, word: str, names: Iterable[str]) -> None:
        for name in names:
            if name:
                self.words.setdefault(name.lower(), word)

    def of(self, value: Any, field: str) -> Any:
        """A value with all that is in it."""
        if isinstance(value, str):
            if field in CODES or (field == "id" and not value.startswith(ABOUT)):
                return value
            head, dot, rest = value.partition(".") if field == "id" else ("", "", value)
            return head + dot + self.text(rest, log=field == "log")
        if isinstance(value, list | tuple):
            return [self.of(one, field) for one in value]
        if isinstance(value, Mapping):
            plain = field in CODES
            return {
                key if plain or key.lower() not in self.words else self.text(key): one if plain else self.of(one, key)
                for key, one in value.items()
            }
        return value

    def text(self, text: str, *, log: bool = False) -> str:
        """A text with other words for names, addresses, paths and ids."""
        if text.lower() in self.words:
            return self.words[text.lower()]
        if log and len(text) == LINE:
            text = f"{text}…"
        text = CUT.sub("…", text)
        for path in reversed(self.paths):
            text = text.replace(path, "inventory/NAME")
        text = PATH.sub(lambda found: f"/{self._other('path', found[0])}", text)
        if self.known:
            text = DOMAIN.sub(r"\1", self.known.sub(lambda found: self.words[found[0].lower()], text))
        text = IDS.sub(lambda found: self._other("machine", found[0]), text)
        text = HARDWARE.sub(lambda found: self._other("interface", found[0]), text)
        text = ADDRESS.sub(self._address, text)
        text = AT.sub(lambda found: f"@{self._other('elsewhere', found[1])}", text)
        return self.within.sub("(a name)", text) if self.within else text

    def _address(self, found: re.Match[str]) -> str:
        # A full stop or a colon may end it.
        for end in ("", ":", "."):
            try:
                address = ip_address(found[0].removesuffix(end))
            except ValueError:
                continue
            if address.is_loopback or address.is_unspecified:
                return found[0]
            return self._other("address", str(address)) + (end if found[0].endswith(end) else "")
        # With leading zeros, for example.
        return found[0] if ":" in found[0] else self._other("address", found[0])

    def _other(self, kind: str, seen: str) -> str:
        number = 1 + sum(word.startswith(f"{kind}-") for word in self.others.values())
        return self.others.setdefault(seen.lower(), f"{kind}-{number}")


def called(result: Mapping[str, Any], name: str) -> list[str]:
    """Other names of a host."""
    known = (result["preflight"] or {}).get("hosts", {}).get(name, {})
    return [*result["names"].get(name, ()), known.get("hostname", "")]


def _short(name: str) -> Iterator[str]:
    """The first part of a full name."""
    if "." in name and not ADDRESS.fullmatch(name):
        yield name.partition(".")[0]


def _domain(name: str) -> Iterator[str]:
    if name.count(".") > 1 and not ADDRESS.fullmatch(name):
        yield name.partition(".")[2]
