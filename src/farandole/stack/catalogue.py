"""The catalogue of components, their versions and requirements; the data is in catalogue.yml."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from farandole.errors import FarandoleError

FILE = Path(__file__).with_name("catalogue.yml")
NONE = "none"
# Properties of the nodes; they cannot be pinned.
FACTS = ("os", "arch", "python", "glibc", "driver")
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def order(version: str) -> Version:
    """The sort key of a version; names sort before numbers."""
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0.dev0")


@cache
def _specifiers(text: str) -> SpecifierSet:
    return SpecifierSet(text, prereleases=True)


@cache
def allows(constraint: str, version: str) -> bool:
    """Whether a version satisfies a constraint such as "none | ==2.29.7", "11 | 12", ">=9", or "" for any version."""
    if not constraint:
        return version != NONE
    for alternative in constraint.split(" | "):
        if alternative[0] in "<>=!~":
            if version != NONE and _specifiers(alternative).contains(order(version)):
                return True
        elif alternative == version:
            return True
    return False


def title(component: str) -> str:
    """The display name of a component."""
    return {"gxx": "g++", "cuda": "CUDA", "os": "system", "nccl": "NCCL", "python": "Python"}.get(component, component)


def system(name: str) -> str:
    """The display name of a system such as debian-12."""
    return name.replace("-", " ").capitalize()


def words(component: str, constraint: str) -> str:
    """A constraint as text for a sentence."""
    if constraint == NONE:
        return f"no {title(component)}"
    if not constraint or constraint[0] in "<>=!~":
        return f"{title(component)}{constraint}"
    return f"{title(component)} {constraint.replace(' | ', ' or ')}"


@dataclass(frozen=True)
class Need:
    """A requirement for a version of a component, or for its absence; who requires it, and why."""

    component: str
    constraint: str
    by: str
    why: str = ""
    thread: str = ""
    # The full sentence, if "by needs component" would not read well.
    text: str = ""

    def allows(self, row: Row) -> bool:
        """Whether a row satisfies it."""
        return row.component == self.component and allows(self.constraint, row.version)

    def __str__(self) -> str:
        reasons = "; ".join(text for text in (self.why, self.thread) if text)
        return f"{self.short}{f' ({reasons})' if reasons else ''}"

    @property
    def short(self) -> str:
        """The requirement as text, without the reason."""
        return self.text or f"{self.by} needs {words(self.component, self.constraint)}"


@dataclass(frozen=True)
class Platform:
    """The platform that all nodes of a cluster share."""

    os: str
    arch: str
    python: str
    glibc: str = field(default="2.17", compare=False)

    def __str__(self) -> str:
        return f"{system(self.os)}, {self.arch}, Python {self.python}"

    @property
    def markers(self) -> dict[str, str]:
        """The values against which environment markers of Python packages are evaluated."""
        return {
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": self.arch,
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "extra": "",
        }

    @property
    def wheel_platforms(self) -> list[str]:
        """The platform tags that its C library supports, best first."""
        names = []
        for minor in range(int(self.glibc.split(".")[1]), 4, -1):
            names += [f"manylinux_2_{minor}_{self.arch}"]
            names += [f"{_OLD_NAMES[minor]}_{self.arch}"] if minor in _OLD_NAMES else []
        return [*names, f"linux_{self.arch}"]

    @property
    def tags(self) -> dict[Tag, int]:
        """All wheel tags that it supports, with their rank."""
        return _tags(self.python, tuple(self.wheel_platforms))


@cache
def _tags(python: str, platforms: tuple[str, ...]) -> dict[Tag, int]:
    major, minor = (int(number) for number in python.split("."))
    own = f"cp{major}{minor}"
    found = [
        *cpython_tags((major, minor), [own], platforms),
        *compatible_tags((major, minor), own, platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(found)))}


@cache
def _wheel_tags(file: str) -> frozenset[Tag]:
    return parse_wheel_filename(file)[3]


@dataclass(frozen=True)
class Row:
    """A version of a component, and its requirements."""

    component: str
    version: str
    data: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    memory: dict[Platform, tuple[Need, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return system(self.version) if self.component == "os" else f"{title(self.component)} {self.version}"

    @property
    def distribution(self) -> str:
        """Its name on the package index."""
        return str(self.data.get("distribution", self.component))

    @property
    def is_wheel(self) -> bool:
        """Whether it is installed into the virtual environment."""
        return "files" in self.data

    def wheel(self, platform: Platform) -> tuple[str, str] | None:
        """The best wheel for a platform, with its sha256."""
        tags = platform.tags
        ranked = [
            (min(tags[tag] for tag in _wheel_tags(file) & tags.keys()), file)
            for file in self.data.get("files", ())
            if _wheel_tags(file) & tags.keys()
        ]
        return (best := min(ranked)[1], self.data["files"][best]) if ranked else None

    def blocked(self, platform: Platform) -> str:
        """Why it cannot be used on a platform at all; empty if it can."""
        if refused := self.data.get("refused"):
            return "; ".join(text for text in (refused["why"], refused.get("thread")) if text)
        if self.is_wheel and not self.wheel(platform):
            note = f": {self.data['note']}" if "note" in self.data else ""
            return f"no wheel for CPython {platform.python} on {platform.arch} with glibc {platform.glibc}{note}"
        return ""

    def needs(self, platform: Platform) -> tuple[Need, ...]:
        """Its requirements on a platform."""
        if platform not in self.memory:
            self.memory[platform] = tuple(self._read_needs(platform))
        return self.memory[platform]

    def _read_needs(self, platform: Platform) -> Iterator[Need]:
        for component, need in self.data.get("needs", {}).items():
            need = {"want": need} if isinstance(need, str) else need
            text = f"{self} has {words(component, need['want'])}" if self.component == "os" else ""
            yield Need(component, need["want"], str(self), need.get("why", ""), need.get("thread", ""), text)
        if python := self.data.get("python"):
            yield Need("python", python.replace(" ", ""), str(self))
        for text in self.data.get("requires", ()):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(platform.markers):
                yield Need(canonicalize_name(requirement.name), str(requirement.specifier), str(self))


@dataclass(frozen=True)
class Catalogue:
    """All rows, and the sets of versions that were tested."""

    data: Mapping[str, Any]
    memory: dict[str, list[Row]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def components(self) -> Mapping[str, Mapping[str, Any]]:
        """Rows by component and version."""
        found: Mapping[str, Mapping[str, Any]] = self.data["components"]
        return found

    @property
    def frameworks(self) -> Mapping[str, str]:
        """Components by framework name."""
        found: Mapping[str, str] = self.data["frameworks"]
        return found

    def rows(self, component: str) -> list[Row]:
        """All versions, oldest first."""
        if component not in self.memory:
            rows = [Row(component, version, data) for version, data in self.components.get(component, {}).items()]
            self.memory[component] = sorted(rows, key=lambda row: order(row.version))
        return self.memory[component]

    def row(self, component: str, version: str) -> Row:
        """One version."""
        return Row(component, version, self.components[component][version])

    def proven(self, row: Row) -> list[str]:
        """The systems on which a tested set contained it."""
        sets = self.data["evidence"]
        return list(dict.fromkeys(one["system"] for one in sets if one["set"].get(row.component) == row.version))

    def proof(self, versions: Mapping[str, str], os: str) -> str:
        """What was tested of a set as a whole on a system; empty if it was never built there."""
        for one in self.data["evidence"]:
            if one["system"] == os and one["set"].items() <= versions.items():
                return str(one["ran"])
        return ""

    def rank(self, row: Row, platform: Platform) -> tuple[int, bool, Version]:
        """Order of preference: tested on this system, tested elsewhere, the system's own version, newer."""
        where = self.proven(row)
        own = self.components["os"].get(platform.os, {}).get("default", {})
        seen = 2 if platform.os in where else 1 if where else 0
        return seen, own.get(row.component) == row.version, order(row.version)

    def pin(self, text: str) -> tuple[str, str]:
        """Parse NAME==VERSION; refuse what the catalogue does not have."""
        match = re.fullmatch(r"\s*([A-Za-z0-9][\w.+-]*)\s*==\s*([\w.+!-]+)\s*", text)
        if not match:
            raise FarandoleError(
                f"{text!r} is not a pin: write NAME==VERSION, for example numpy=={self._newest('numpy')}"
            )
        name, version = self._component(match[1]), match[2]
        if name in FACTS:
            raise FarandoleError(f"{name} cannot be pinned: the nodes determine it. Leave {text!r} out")
        known = [row.version for row in self.rows(name)]
        is_version = order(version) != order("")
        if not any(one == version or (is_version and allows(f"=={version}", one)) for one in known):
            raise FarandoleError(
                f"{text}: the catalogue has no {title(name)} {version}; it has {', '.join(known)}. "
                "docs/catalogue.md says how to add a version"
            )
        return name, version

    def _newest(self, component: str) -> str:
        return self.rows(component)[-1].version

    def _component(self, name: str) -> str:
        known = canonicalize_name(self.data["aliases"].get(name.lower(), name))
        if known in self.components or known in FACTS:
            return known
        names = [*self.components, *self.data["aliases"]]
        raise FarandoleError(f"the catalogue has no component {name}{near(name.lower(), names)}")

    def check_frameworks(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the frameworks in the catalogue's order; refuse unknown ones."""
        names = [*names]
        for name in names:
            if name not in self.frameworks:
                raise FarandoleError(
                    f"there is no framework {name}{near(name, self.frameworks)}: "
                    f"stack_frameworks and --frameworks take {' and '.join(self.frameworks)}"
                )
        if not names:
            raise FarandoleError(
                f"no framework is requested: name one of {', '.join(self.frameworks)} in stack_frameworks"
            )
        return tuple(name for name in self.frameworks if name in names)


def near(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that was probably meant."""
    found = difflib.get_close_matches(word, [*known], n=1)
    return f" (did you mean {found[0]}?)" if found else ""


@cache
def load(file: Path = FILE) -> Catalogue:
    """Load the catalogue."""
    return Catalogue(yaml.load(file.read_text(), Loader=_LOADER))  # noqa: S506 - the safe loader, in C if available
