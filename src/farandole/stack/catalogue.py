"""What no package index knows: the stack's components, what Horovod needs of packages, and what was seen to work."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from farandole.core.errors import FarandoleError
from farandole.core.files import from_yaml

FILE, EVIDENCE = (Path(__file__).with_name(f"{name}.yml") for name in ("catalogue", "evidence"))
NONE = "none"
# How a constraint begins that only holds for what something else brings along.
IF_ANY = f"{NONE} | "
# Properties of the nodes; they cannot be pinned.
FACTS = ("os", "arch", "python", "glibc", "driver")
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@cache
def order(version: str) -> Version:
    """The sort key of a version, or of the lower end of a range; names sort before numbers."""
    try:
        return Version(version.removeprefix(">=").split(",")[0])
    except InvalidVersion:
        return Version("0.dev0")


@cache
def _specifiers(text: str) -> SpecifierSet:
    return SpecifierSet(text, prereleases=True)


def is_range(version: str) -> bool:
    return version[:1] in "<>=!~"


@cache
def allows(constraint: str, version: str) -> bool:
    """Whether a version satisfies a constraint such as "none | ==2.29.7", "11 | 12", ">=9", or "" for any version; a
    range satisfies itself, and "==" one of its versions."""
    if not constraint:
        return version != NONE
    for alternative in constraint.split(" | "):
        if alternative == version:
            return True
        if is_range(version):
            if alternative.startswith("==") and _specifiers(version).contains(order(alternative[2:])):
                return True
        elif is_range(alternative) and version != NONE and _specifiers(alternative).contains(order(version)):
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
    constraint = constraint.removeprefix(IF_ANY)
    if not constraint or is_range(constraint):
        return f"{title(component)}{constraint}"
    return f"{title(component)} {constraint.replace(' | ', ' or ')}"


@dataclass(frozen=True)
class Need:
    """A requirement for a version of a component or package, or for its absence; who requires it, and why."""

    component: str
    constraint: str
    by: str
    why: str = ""
    # The full sentence, if "by needs component" would not read well.
    text: str = ""

    @property
    def optional(self) -> bool:
        """Whether it may be absent."""
        return self.constraint.startswith(IF_ANY)

    def allows(self, row: "Row") -> bool:
        return row.component == self.component and allows(self.constraint, row.version)

    def __str__(self) -> str:
        return f"{self.short}{f' ({self.why})' if self.why else ''}"

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
    def wheel_platforms(self) -> list[str]:
        """The platform tags that its C library supports, best first."""
        names = []
        for minor in range(int(self.glibc.split(".")[1]), 4, -1):
            names += [f"manylinux_2_{minor}_{self.arch}"]
            names += [f"{_OLD_NAMES[minor]}_{self.arch}"] if minor in _OLD_NAMES else []
        return [*names, f"linux_{self.arch}"]

    @property
    def tags(self) -> tuple[Tag, ...]:
        """All wheel tags that it supports, best first."""
        return _tags(self.python, tuple(self.wheel_platforms))


@cache
def _tags(python: str, platforms: tuple[str, ...]) -> tuple[Tag, ...]:
    major, minor = (int(number) for number in python.split("."))
    own = f"cp{major}{minor}"
    return (*cpython_tags((major, minor), [own], platforms), *compatible_tags((major, minor), own, platforms))


@dataclass(frozen=True)
class Row:
    """A version of a component, or a range of versions of a package, and its requirements."""

    component: str
    version: str
    data: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        if self.component == "os":
            return system(self.version)
        return f"{title(self.component)}{'' if is_range(self.version) else ' '}{self.version}"

    def blocked(self, *, gpus: bool) -> str:
        """Why it cannot be used at all; empty if it can."""
        data = self.data if "refused" in self.data or not gpus else self.data.get("on_gpus", {})
        return _why(data.get("refused", ""))

    def needs(self, *, gpus: bool) -> Iterator[Need]:
        requirements = {**self.data.get("needs", {}), **(self.data.get("on_gpus", {}) if gpus else {})}
        for component, need in requirements.items():
            if component != "refused":
                want, why = (need, "") if isinstance(need, str) else (need["want"], _why(need))
                text = f"{self} has {words(component, want)}" if self.component == "os" else ""
                yield Need(component, want, str(self), why, text)


def _why(reason: str | Mapping[str, str]) -> str:
    return reason if isinstance(reason, str) else "; ".join(filter(None, map(reason.get, ("why", "thread"))))


@dataclass(frozen=True)
class Evidence:
    """A set of versions that was built and run together, or that was seen to fail."""

    system: str
    works: bool
    ran: str
    set: Mapping[str, str]
    # Everything else in the environment.
    others: Mapping[str, str]

    @property
    def versions(self) -> dict[str, str]:
        return {**self.set, **self.others}


def _set(text: str) -> dict[str, str]:
    return {name: version for name, _, version in (word.partition("==") for word in text.split())}


@dataclass(frozen=True)
class Catalogue:
    """All rows, and the evidence."""

    data: Mapping[str, Any]
    evidence: tuple[Evidence, ...] = ()

    @property
    def components(self) -> Mapping[str, Mapping[str, Any]]:
        """Rows by component and version."""
        rows: Mapping[str, Mapping[str, Any]] = self.data["components"]
        return rows

    @property
    def frameworks(self) -> Mapping[str, str]:
        """Packages by framework name."""
        packages: Mapping[str, str] = self.data["frameworks"]
        return packages

    def rows(self, component: str) -> list[Row]:
        """All versions, oldest first."""
        return self._rows.get(component, [])

    @cached_property
    def _rows(self) -> dict[str, list[Row]]:
        return {
            component: sorted((Row(component, *row) for row in rows.items()), key=lambda row: order(row.version))
            for component, rows in self.components.items()
        }

    def knows(self, name: str) -> bool:
        """Whether it is a component, whose versions are here, and not a package, whose versions the index has."""
        return name in self.components or name in FACTS

    def is_component(self, name: str) -> bool:
        """Whether it is a component whose versions are here one by one."""
        return self.knows(name) and not any(is_range(row.version) for row in self.rows(name))

    def sources(self, openmpi: Row) -> list[dict[str, str]]:
        """Where the source of an OpenMPI is: the project's site, or a Debian source package."""
        series, url = openmpi.version.rpartition(".")[0], self.data["openmpi_site"]
        site = url.format(series=series, version=openmpi.version)
        sources = [{"url": site, "file": site.rpartition("/")[2], "sha256": openmpi.data["sha256"]}]
        return sources + [{"apt": "openmpi", **source} for source in [openmpi.data.get("debian")] if source]

    def proven(self, name: str, version: str) -> list[str]:
        """The systems on which a set that works contained a version, or one of a range."""
        runs = ((run.system, run.set.get(name, NONE)) for run in self.evidence if run.works)
        return list(dict.fromkeys(system for system, seen in runs if allows(version, seen)))

    def seen(self, versions: Mapping[str, str], os: str) -> Evidence | None:
        """What was seen of exactly these versions on a system; None if nobody tried."""
        # What a set leaves out makes another one of it.
        telling = (*self.frameworks.values(), "cuda")
        runs = [
            run
            for run in self.evidence
            if run.system == os
            and run.set.items() <= versions.items()
            and all(run.versions.get(name, NONE) == versions.get(name, NONE) for name in telling)
        ]
        # Of those that disagree, the one that failed.
        return max(runs, key=lambda run: (len(run.set), not run.works), default=None)

    def rank(self, row: Row, os: str) -> tuple[int, bool, Version]:
        """Order of preference: tested on this system, tested elsewhere, the system's own version, newer."""
        where = self.proven(row.component, row.version)
        own = self.components["os"].get(os, {}).get("default", {})
        seen = 2 if os in where else 1 if where else 0
        return seen, own.get(row.component) == row.version, order(row.version)

    def pin(self, text: str) -> tuple[str, str]:
        """Parse NAME==VERSION; refuse a version of a component that the catalogue does not have."""
        match = re.fullmatch(r"\s*([A-Za-z0-9][\w.+-]*)\s*==\s*([\w.+!-]+)\s*", text)
        if not match:
            raise FarandoleError(f"{text!r} is not a pin: write NAME==VERSION, for example numpy==2.4.6")
        name, version = self.named(match[1]), match[2]
        if name in FACTS:
            raise FarandoleError(f"{name} cannot be pinned: the nodes determine it. Leave {text!r} out")
        known = [row.version for row in self.rows(name)]
        if not self.is_component(name):
            try:
                Requirement(f"{name}=={version}")
            except InvalidRequirement:
                raise FarandoleError(f"{text!r} is not a pin: {version} is not a package version") from None
            return name, version
        is_version = order(version) != order("")
        if not any(candidate == version or (is_version and allows(f"=={version}", candidate)) for candidate in known):
            raise FarandoleError(
                f"{text}: the catalogue has no {title(name)} {version}; it has {', '.join(known)}. "
                "docs/catalogue.md says how to add a version"
            )
        return name, version

    def named(self, name: str) -> str:
        """The name of a component or package here, given any name that people use for it."""
        return canonicalize_name(self.data["aliases"].get(name.lower(), name))

    def imported(self, name: str) -> str:
        """A hint that a name is what programs import, not the package that has it."""
        known = self.data["packages"].get(name)
        return f"   programs import {name}, and the package that has it is {known}" if known else ""

    def hint(self, name: str) -> str:
        """A hint at the package that was probably meant."""
        if known := self.data["packages"].get(name):
            return f" (did you mean {known}?)"
        names = {name for run in self.evidence for name in run.versions} | {*self.data["packages"].values()}
        if name in names:
            return ", although it exists: does one of them answer with a page to log in?"
        return near(name, names)

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
            raise FarandoleError(f"no framework is requested: name {' or '.join(self.frameworks)} in stack_frameworks")
        return tuple(name for name in self.frameworks if name in names)


def near(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that was probably meant."""
    matches = difflib.get_close_matches(word, [*known], n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


@cache
def load(file: Path = FILE, evidence: Path = EVIDENCE) -> Catalogue:
    data, seen = (from_yaml(path.read_text()) for path in (file, evidence))
    return Catalogue(
        data,
        tuple(
            Evidence(run["system"], run["verdict"] == "works", run["ran"], _set(run["set"]), _set(run.get("with", "")))
            for run in seen
            if "set" in run  # otherwise there was none: it was refused
        ),
    )
