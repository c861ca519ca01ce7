"""What a solution must satisfy: the nodes, and the user's request."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from packaging.version import Version

from farandole.core.errors import FarandoleError
from farandole.core.findings import some
from farandole.stack.catalogue import FACTS, NONE, Catalogue, Evidence, Need, Row, allows, load, order, system, words
from farandole.stack.nodes import Nodes
from farandole.stack.own import SETTING as OWN
from farandole.stack.own import Wish

ALWAYS = ("horovod", "openmpi", "gxx")
# Where a version can be pinned.
PINS, WANT = "stack_pins", "--want"


@dataclass(frozen=True)
class Request:
    """What the user asks for; what inventory to name is as the user typed it."""

    frameworks: tuple[str, ...]
    pins: tuple[Wish, ...] = ()
    accelerator: str = "auto"
    inventory: str = "INVENTORY"
    # The user's own packages.
    packages: tuple[Wish, ...] = ()
    # Where sources are kept, if packages without a wheel may be built.
    sources: Path | None = None

    def only(self, wishes: Collection[Wish]) -> Self:
        """The same with only these pins and packages."""
        pins, packages = (tuple(wish for wish in all_ if wish in wishes) for all_ in (self.pins, self.packages))
        return replace(self, pins=pins, packages=packages)

    def settings(self) -> dict[str, Any]:
        """What an inventory says to request this."""
        wishes = {where: [text for text, own in (*self.pins, *self.packages) if own == where] for where in (PINS, OWN)}
        return {"stack_frameworks": list(self.frameworks), "stack_accelerator": self.accelerator, **wishes}


def spelled(wish: Wish) -> str:
    """A wish as the user wrote it, and where."""
    text, where = wish
    return f"{where} {text}" if where == WANT else f"{where} ({text})"


def request(
    frameworks: Iterable[str],
    pins: Iterable[str],
    accelerator: str,
    command: Iterable[str] = (),
    inventory: str = "INVENTORY",
    packages: tuple[Wish, ...] = (),
    sources: Path | None = None,
) -> Request:
    """Build a request; refuse what the catalogue does not have. `command` are pins from the command line."""
    catalogue, chosen = load(), dict[str, Wish]()
    if accelerator not in ("auto", "cpu", "cuda"):
        raise FarandoleError(f"stack_accelerator is {accelerator}; it must be auto, cpu or cuda")
    for text, where in (*((text, PINS) for text in pins), *((text, WANT) for text in command)):
        name, version = catalogue.pin(text)
        pinned = chosen.setdefault(name, (f"{name}=={version}", where))[0]
        if pinned != f"{name}=={version}":
            before = pinned.partition("==")[2]
            raise FarandoleError(f"{name} is pinned to {before} and to {version}: keep one of them")
    wishes = tuple(wish for _, wish in sorted(chosen.items()))
    return Request(catalogue.check_frameworks(frameworks), wishes, accelerator, inventory, packages, sources)


@dataclass(frozen=True)
class Known:
    """The versions in the former lock, which are kept if they fit, and until when the index is read."""

    versions: Mapping[str, str] = field(default_factory=dict)
    until: str = ""


@dataclass(frozen=True)
class Problem:
    """Everything that a solution must satisfy."""

    catalogue: Catalogue
    nodes: Nodes
    request: Request
    known: Known = field(default_factory=Known)
    # Why PyTorch has to be a build for CUDA even on CPUs; empty if it need not.
    cuda: str = ""

    @cached_property
    def accelerator(self) -> str:
        """The accelerator to use: cpu or cuda."""
        return self.nodes.accelerator(self.request.accelerator)

    @property
    def os(self) -> str:
        """The nodes' system."""
        return self.nodes.platform.os

    @cached_property
    def preferred(self) -> dict[str, tuple[str, str]]:
        """Versions to take where they fit, and why: those of the former lock, else of the set that was seen to work."""
        if self.known.versions:
            return {name: (version, "as in the former lock") for name, version in self.known.versions.items()}
        if not (seen := self._nearest_evidence()):
            return {}
        why = f"as in the set that ran on {system(seen.system)}"
        return {
            name: (version, why) for name, version in seen.versions.items() if not self.catalogue.is_component(name)
        }

    def _nearest_evidence(self) -> Evidence | None:
        """The set that works, has these frameworks, and comes closest to the system, the pins and the processors."""
        catalogue, request = self.catalogue, self.request
        pinned = {text for text, _ in request.pins}

        def rank(run: Evidence) -> tuple[bool, int, bool, list[Version], int]:
            pins = sum(f"{name}=={version.partition('+')[0]}" in pinned for name, version in run.set.items())
            wanted = [catalogue.frameworks[name] for name in request.frameworks]
            # What is built for CPUs is a tenth of the size.
            small = self.accelerator == "cpu" and run.set.get("torch", "").endswith("+cpu")
            # The newest NumPy, too, and of the same set the row that says most.
            newest = [order(run.set.get(name, "0")) for name in (*wanted, "numpy")]
            return run.system == self.os, pins, small, newest, len(run.versions)

        names = catalogue.frameworks.items()
        fitting = [
            run
            for run in catalogue.evidence
            if run.works and all((package in run.set) == (name in request.frameworks) for name, package in names)
        ]
        return max(fitting, key=rank, default=None)

    @cached_property
    def _values(self) -> dict[str, str]:
        platform = self.nodes.platform
        values = (platform.os, platform.arch, platform.python, platform.glibc, self.nodes.driver)
        return dict(zip(FACTS, values, strict=True))

    def _chip(self, hosts: str) -> Iterator[Need]:
        """Requirements from the accelerator."""
        cpu = self.accelerator == "cpu"
        absence = "no node has an NVIDIA driver and a CUDA toolkit"
        reason = absence if self.request.accelerator == "auto" else "stack_accelerator is cpu"
        text = f"the cluster is on CPUs: {reason}" if cpu else ""
        for component in ("cuda", "nccl"):
            yield Need(component, NONE if cpu else "", f"a cluster on {'CPUs' if cpu else 'GPUs'}", text=text)
        for version in () if cpu else sorted(set(self.nodes.toolkits.values())):
            yield Need("cuda", f"=={version.split('.')[0]}.*", hosts, text=f"{hosts}: CUDA toolkit {version}")

    def framework(self, name: str) -> Need:
        """A framework must be present, or absent."""
        wanted = name in self.request.frameworks
        text = f"frameworks are {' and '.join(self.request.frameworks)}"
        return Need(self.catalogue.frameworks[name], "" if wanted else NONE, "your request", text=text)

    @cached_property
    def pins(self) -> list[Need]:
        """The pinned versions."""
        split = ((pin, *pin[0].partition("==")) for pin in self.request.pins)
        return [Need(name, f"=={version}", "your request", text=spelled(pin)) for pin, name, _, version in split]

    def roots(self) -> list[Need]:
        """What the nodes, the accelerator and the request require of components."""
        hosts = some(self.nodes.hosts)
        needs = [
            Need(name, value, hosts, text=f"{hosts}: {system(value) if name == 'os' else words(name, value)}")
            for name, value in self._values.items()
        ]
        needs += [Need(name, "", "every stack") for name in ALWAYS]
        needs += [*self._chip(hosts), *map(self.framework, self.catalogue.frameworks)]
        return needs + [pin for pin in self.pins if self.catalogue.knows(pin.component)]

    def rows(self, component: str) -> list[Row]:
        """All versions of a component; for a fact, the nodes' own."""
        if component in FACTS:
            value = self._values[component]
            return [Row(component, value, self.catalogue.components.get(component, {}).get(value, {}))]
        return [*self.catalogue.rows(component), Row(component, NONE)]

    def rank(self, row: Row) -> tuple[bool, tuple[int, bool, Version]]:
        """Order of preference: what is preferred, or a range with it, and then as the catalogue says."""
        version, _ = self.preferred.get(row.component, ("", ""))
        return bool(version) and allows(row.version, version), self.catalogue.rank(row, self.os)

    def blocked(self, row: Row) -> str:
        """Why a row cannot be used at all; empty if it can."""
        return row.blocked(gpus=self.accelerator == "cuda")

    def needs(self, row: Row) -> list[Need]:
        """What a row requires of other components."""
        return [need for need in self._needs(row) if self.catalogue.knows(need.component)]

    def package_needs(self, row: Row) -> list[Need]:
        return [need for need in self._needs(row) if not self.catalogue.knows(need.component)]

    def _needs(self, row: Row) -> Iterator[Need]:
        return row.needs(gpus=self.accelerator == "cuda")
