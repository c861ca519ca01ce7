"""Choose a version of everything: what the catalogue knows, what the nodes are, what the user wishes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from resolvelib import AbstractProvider, BaseReporter, ResolutionError, ResolutionImpossible, Resolver
from resolvelib.resolvers import RequirementInformation

from farandole.errors import FarandoleError
from farandole.findings import some
from farandole.stack.catalogue import FACTS, NONE, Catalogue, Need, Row, near, order, system, words
from farandole.stack.nodes import Nodes

ALWAYS = ("horovod", "openmpi", "gxx")
# Decided first: what the rest hangs on. NCCL comes after the wheel that it has to match.
FIRST = (*FACTS, "cuda", "torch", "tensorflow", "horovod", "openmpi", "gxx")
DEEP = 4
Causes = Sequence[RequirementInformation[Need, Row]]


@dataclass(frozen=True)
class Wish:
    """What the user wants."""

    frameworks: tuple[str, ...]
    pins: tuple[tuple[str, str], ...] = ()
    accelerator: str = "auto"
    # Names the origin of pins that came from the command line.
    command: frozenset[tuple[str, str]] = frozenset()
    # As the user types it.
    inventory: str = "INVENTORY"

    def said(self, pin: tuple[str, str]) -> str:
        """A pin in the user's own words."""
        text = f"{pin[0]}=={pin[1]}"
        return f"--want {text}" if pin in self.command else f"stack_pins ({text})"


@dataclass(frozen=True)
class Problem:
    """All that a solution must satisfy."""

    catalogue: Catalogue
    nodes: Nodes
    wish: Wish

    @cached_property
    def accelerator(self) -> str:
        """cpu or cuda."""
        return self.nodes.accelerator(self.wish.accelerator)

    def facts(self) -> Iterator[Need]:
        """What the nodes are."""
        platform, hosts = self.nodes.platform, some(self.nodes.hosts)
        values = (platform.os, platform.arch, platform.python, platform.glibc, self.nodes.driver)
        for component, value in zip(FACTS, values, strict=True):
            what = system(value) if component == "os" else words(component, value)
            yield Need(component, value, hosts, text=f"{hosts}: {what}")
        for component in ALWAYS:
            yield Need(component, "", "every stack")

    def chip(self) -> Iterator[Need]:
        """What the accelerator asks for."""
        hosts = some(self.nodes.hosts)
        if self.accelerator == "cpu":
            found = "no node has an NVIDIA driver and a CUDA toolkit"
            text = f"the cluster is on CPUs: {found if self.wish.accelerator == 'auto' else 'stack_accelerator is cpu'}"
            yield Need("cuda", NONE, "a cluster on CPUs", text=text)
            yield Need("nccl", NONE, "a cluster on CPUs", text=text)
            return
        yield Need("cuda", "", "a cluster on GPUs")
        yield Need("nccl", "", "a cluster on GPUs")
        for version in sorted(set(self.nodes.toolkits.values())):
            yield Need("cuda", f"=={version.split('.')[0]}.*", hosts, text=f"{hosts}: CUDA toolkit {version}")

    def framework(self, name: str) -> Need:
        """That a framework is there, or is not."""
        wanted = name in self.wish.frameworks
        text = f"frameworks are {' and '.join(self.wish.frameworks)}"
        return Need(self.catalogue.frameworks[name], "" if wanted else NONE, "your wish", text=text)

    def pin(self, pin: tuple[str, str]) -> Need:
        """A version that the user insists on."""
        return Need(pin[0], f"=={pin[1]}", "your wish", text=self.wish.said(pin))

    def roots(self) -> list[Need]:
        """All of it."""
        return [*self.facts(), *self.chip(), *self.wishes(self.wish.pins)]

    def wishes(self, pins: Iterable[tuple[str, str]]) -> list[Need]:
        """The frameworks and some of the pins."""
        return [*map(self.framework, self.catalogue.frameworks), *map(self.pin, pins)]

    def rows(self, component: str) -> list[Row]:
        """All versions of a component that there are, the nodes' own for a fact."""
        if component in FACTS:
            value = next(need.constraint for need in self.facts() if need.component == component)
            known = self.catalogue.components.get(component, {})
            return [Row(component, value, known.get(value, {}))]
        return [*self.catalogue.rows(component), Row(component, NONE)]


class _Provider(AbstractProvider[Need, Row, str]):
    """The catalogue as resolvelib wants to be told of it."""

    def __init__(self, problem: Problem, living: Mapping[str, Sequence[Row]]) -> None:
        self.problem = problem
        self.platform = problem.nodes.platform
        self.living = living

    def identify(self, requirement_or_candidate: Need | Row) -> str:
        return requirement_or_candidate.component

    def get_preference(
        self,
        identifier: str,
        resolutions: Mapping[str, Row],
        candidates: Mapping[str, Iterator[Row]],
        information: Mapping[str, Iterator[RequirementInformation[Need, Row]]],
        backtrack_causes: Causes,
    ) -> Any:
        del resolutions, candidates, information
        causes = {cause.requirement.component for cause in backtrack_causes}
        place = FIRST.index(identifier) if identifier in FIRST else len(FIRST)
        return place, identifier == "nccl", identifier not in causes, identifier

    def find_matches(
        self,
        identifier: str,
        requirements: Mapping[str, Iterator[Need]],
        incompatibilities: Mapping[str, Iterator[Row]],
    ) -> Iterable[Row]:
        needs, bad = list(requirements[identifier]), list(incompatibilities[identifier])
        living = self.living[identifier]
        good = [row for row in living if row not in bad and all(need.allows(row) for need in needs)]
        catalogue, platform = self.problem.catalogue, self.platform
        return sorted(good, key=lambda row: (row.version == NONE, catalogue.rank(row, platform)), reverse=True)

    def is_satisfied_by(self, requirement: Need, candidate: Row) -> bool:
        return requirement.allows(candidate)

    def get_dependencies(self, candidate: Row) -> Iterable[Need]:
        return list(candidate.needs(self.platform))


@dataclass(frozen=True)
class Solution:
    """A version of everything, and who asked for each."""

    rows: Mapping[str, Row]
    needs: Mapping[str, Sequence[Need]]


def resolve(problem: Problem, roots: Sequence[Need]) -> Solution:
    """The best set, or ResolutionImpossible."""
    deaths = Deaths(problem, roots)
    if deaths.wiped:
        raise ResolutionImpossible([])
    provider = _Provider(problem, deaths.living)
    result = Resolver(provider, BaseReporter[Need, Row, str]()).resolve(roots, max_rounds=2000)
    needs = {name: [one.requirement for one in result.criteria[name].information] for name in result.mapping}
    rows = {name: row for name, row in sorted(result.mapping.items()) if row.version != NONE}
    return Solution(rows, needs)


def solve(problem: Problem) -> Solution:
    """The best set; when there is none, a refusal that says what stands against it and what would work."""
    known = problem.catalogue.components["os"]
    if problem.nodes.platform.os not in known:
        raise FarandoleError(
            f"{some(problem.nodes.hosts)}: the catalogue knows nothing of {problem.nodes.platform.os}"
            f"{near(problem.nodes.platform.os, known)}; it knows {', '.join(known)}"
        )
    own = known[problem.nodes.platform.os]["ships"]["python"]
    if problem.nodes.platform.python != own:
        raise FarandoleError(
            f"{some(problem.nodes.hosts)}: /usr/bin/python3 is Python {problem.nodes.platform.python}, and "
            f"{system(problem.nodes.platform.os)} comes with {own}: put its own back "
            f"(apt-get install --reinstall python3-minimal)"
        )
    try:
        return resolve(problem, problem.roots())
    except ResolutionError:
        raise FarandoleError(refusal(problem)) from None


def possible(problem: Problem, roots: Sequence[Need]) -> bool:
    """Whether there is any set."""
    try:
        resolve(problem, roots)
    except ResolutionError:
        return False
    return True


# Why each version


def why(problem: Problem, solution: Solution) -> dict[str, str]:
    """A sentence for every component: what asked for it, what kept it from being newer."""
    return {name: f"{_asked(solution.needs[name])}; {_newer(problem, solution, name)}" for name in solution.rows}


def _asked(needs: Sequence[Need]) -> str:
    found = list(dict.fromkeys(need.short for need in needs))
    return "; ".join(found[:2]) + (f" (and {len(found) - 2} more)" if len(found) > 2 else "")


def _newer(problem: Problem, solution: Solution, name: str) -> str:
    row, platform = solution.rows[name], problem.nodes.platform
    if name in FACTS:
        return "it is what the nodes have"
    newer = [one for one in problem.catalogue.rows(name) if order(one.version).release > order(row.version).release]
    if not newer:
        return "the newest in the catalogue"
    newest = newer[-1]
    if blocked := newest.blocked(platform):
        return f"not {newest.version}: {blocked}"
    if against := next((need for need in solution.needs[name] if not need.allows(newest)), None):
        return f"not {newest.version}: {against}"
    for need in newest.needs(platform):
        chosen = solution.rows.get(need.component, Row(need.component, NONE))
        if not need.allows(chosen):
            return f"not {newest.version}: {need}"
    if row.version == problem.catalogue.components["os"][platform.os].get("default", {}).get(name):
        return f"not {newest.version}: {row.version} is the system's own"
    proven = ", ".join(problem.catalogue.proven(row))
    return f"not {newest.version}: {row.version} was seen to work ({proven}), {newest.version} was not"


# Why not


@dataclass
class Deaths:
    """What is left of the catalogue under some needs, and why the rest is not."""

    problem: Problem
    roots: Sequence[Need]

    def __post_init__(self) -> None:
        self.platform = self.problem.nodes.platform
        self.reasons: dict[Row, list[Need | str]] = {}
        self.living = {name: self._living(name) for name in [*self.problem.catalogue.components, *FACTS]}
        while self._round():
            pass

    def _living(self, component: str) -> list[Row]:
        rows = self.problem.rows(component)
        self.reasons.update({row: [text] for row in rows if (text := row.blocked(self.platform))})
        return [row for row in rows if row not in self.reasons]

    @property
    def wiped(self) -> list[str]:
        """Components of which nothing is left."""
        return [name for name, rows in self.living.items() if not rows]

    def certain(self) -> list[Need]:
        """The roots, and the needs of what there is only one choice for."""
        found, seen = list(self.roots), set[str]()
        for need in found:
            rows = [row for row in self.living[need.component] if need.allows(row)]
            if len(rows) == 1 and need.component not in seen:
                seen.add(need.component)
                found += rows[0].needs(self.platform)
        return found

    def _round(self) -> bool:
        certain = self.certain()
        dead: dict[Row, list[Need | str]] = {}
        for name, rows in self.living.items():
            # What the nodes are is never what has to give way.
            for row in rows if name not in FACTS else ():
                if reasons := [*self._refused(row, certain), *self._starved(row, certain)]:
                    dead[row] = reasons
        self.reasons.update(dead)
        self.living = {name: [row for row in rows if row not in dead] for name, rows in self.living.items()}
        return bool(dead)

    @staticmethod
    def _refused(row: Row, certain: Sequence[Need]) -> list[Need | str]:
        return [need for need in certain if need.component == row.component and not need.allows(row)]

    def _starved(self, row: Row, certain: Sequence[Need]) -> list[Need | str]:
        return [need for need in row.needs(self.platform) if not self._fed(need, certain)]

    def _fed(self, need: Need, certain: Sequence[Need]) -> bool:
        if need.component in FACTS:
            return need.allows(self.living[need.component][0])
        others = [one for one in certain if one.component == need.component]
        return any(need.allows(row) and all(one.allows(row) for one in others) for row in self.living[need.component])

    def tell(self, row: Row, depth: int = 1, told: set[Row] | None = None) -> list[str]:
        """Why a row is out, as an indented list."""
        told = set() if told is None else told
        if row in told or depth > DEEP:
            return []
        told.add(row)
        lines = []
        for reason in self.reasons.get(row, ()):
            against = self._against(row, reason)
            lines.append(f"{'   ' * depth}- {reason}{against}")
            if isinstance(reason, Need) and reason.component != row.component and not against:
                for other in self.problem.rows(reason.component):
                    lines += self.tell(other, depth + 1, told) if reason.allows(other) else []
        return lines

    def _against(self, row: Row, reason: Need | str) -> str:
        """What stands against a need, when it is said in one sentence."""
        if isinstance(reason, str) or reason.component == row.component:
            return ""
        others = [need for need in self.certain() if need.component == reason.component]
        rows = [one for one in self.problem.rows(reason.component) if reason.allows(one)]
        return next((f"; but {one}" for one in others if not any(one.allows(row) for row in rows)), "")


def refusal(problem: Problem) -> str:
    """What stands against the wish, and the nearest one that works."""
    found = nearest(problem)
    lines = ["no set of versions fits what is asked for; nothing was changed."]
    for number, (what, reasons) in enumerate(conflicts(problem, found), 1):
        lines += ["", f"{number}. {what}", *reasons]
    return "\n".join([*lines, "", *cure(problem.wish, found)])


def conflicts(problem: Problem, kept: Wish | None) -> Iterator[tuple[str, list[str]]]:
    """Each part of the wish that cannot be had, with the reasons."""
    wish = problem.wish
    kept = kept or replace(wish, frameworks=(), pins=())
    bare = Deaths(problem, list(problem.facts()))
    if bare.wiped:
        rows = [row for name in bare.wiped for row in problem.rows(name) if row.version != NONE]
        yield f"{problem.nodes.platform}", _out(bare, rows)
        return
    for name in wish.frameworks:
        need = problem.framework(name)
        if name not in kept.frameworks or Deaths(problem, [*problem.facts(), *problem.chip(), need]).wiped:
            yield f"{name} ({'GPUs' if problem.accelerator == 'cuda' else 'CPUs'})", against(problem, need, ())
    for pin in wish.pins:
        if pin not in kept.pins:
            yield wish.said(pin), against(problem, problem.pin(pin), kept.pins)


def against(problem: Problem, need: Need, kept: Iterable[tuple[str, str]]) -> list[str]:
    """The reasons why a need cannot be met: on these nodes, or beside the fewest of the other wishes."""
    base = [*problem.facts(), *problem.chip()]
    deaths = Deaths(problem, [*base, need])
    rows = [row for row in problem.rows(need.component) if need.allows(row)]
    if deaths.wiped:
        return [*_out(deaths, rows), *_made_for(problem, need)]
    rest = problem.wishes(kept)
    for one in list(rest):
        fewer = [other for other in rest if other is not one]
        if not possible(problem, [*base, need, *fewer]):
            rest = fewer
    deaths = Deaths(problem, [*base, need, *rest])
    wiped = [one for one in rest if one.component in deaths.wiped]
    beside = [row for one in wiped for row in problem.rows(one.component) if one.allows(row)]
    return _out(deaths, [*rows, *beside]) or [f"   it does not go together with {', '.join(map(str, rest))}"]


def _out(deaths: Deaths, rows: Iterable[Row]) -> list[str]:
    lines = []
    for row in rows:
        reasons = deaths.tell(row)
        lines += [f"   {row}:", *reasons] if reasons else []
    return lines


def _made_for(problem: Problem, need: Need) -> list[str]:
    """What stands against the frameworks that are made for exactly what is asked for."""
    if need.component in problem.catalogue.frameworks.values():
        return []
    lines = []
    deaths = Deaths(problem, list(problem.facts()))
    wanted = [row for row in problem.catalogue.rows(need.component) if need.allows(row)]
    for name in problem.wish.frameworks:
        for row in problem.catalogue.rows(problem.catalogue.frameworks[name]):
            made = [one for one in row.needs(problem.nodes.platform) if one.component == need.component]
            if any(one.allows(other) for one in made for other in wanted) and (reasons := deaths.tell(row)):
                lines += [f"   {row}, which is made for it:", *reasons]
    return lines


def nearest(problem: Problem) -> Wish | None:
    """The wish that works and leaves out least: pins first, then the GPUs, then a framework."""
    wish = problem.wish
    chips = [wish.accelerator] + ["cpu"] * (problem.accelerator == "cuda")
    sets = [wish.frameworks] + [(name,) for name in wish.frameworks if len(wish.frameworks) > 1]
    for frameworks in sets:
        for chip in chips:
            found = replace(wish, frameworks=frameworks, accelerator=chip, pins=())
            if possible(replace(problem, wish=found), replace(problem, wish=found).roots()):
                return _with_pins(problem, found)
    return None


def _with_pins(problem: Problem, wish: Wish) -> Wish:
    for pin in problem.wish.pins:
        more = replace(problem, wish=replace(wish, pins=(*wish.pins, pin)))
        if possible(more, more.roots()):
            wish = more.wish
    return wish


def cure(wish: Wish, found: Wish | None) -> list[str]:
    """The nearest set that works, as it is typed."""
    if not found:
        return ["no part of it works on these nodes"]
    options = [f"--want {name}=={version}" for name, version in found.pins if (name, version) in found.command]
    lines = ["nearest set that works:"]
    if found.frameworks != wish.frameworks:
        options.insert(0, f"--frameworks {','.join(found.frameworks)}")
        lines.append(f"   in the inventory: stack_frameworks: [{', '.join(found.frameworks)}]")
    if found.accelerator != wish.accelerator:
        options.insert(0, f"--accelerator {found.accelerator}")
        lines.append(f"   in the inventory: stack_accelerator: {found.accelerator}")
    ours = [pin for pin in found.pins if pin not in found.command]
    if [pin for pin in wish.pins if pin not in wish.command] != ours:
        pins = ", ".join(f'"{name}=={version}"' for name, version in ours)
        lines.append(f"   in the inventory: stack_pins: [{pins}]")
    return [*lines, f"   {' '.join([f'farandole lock -i {wish.inventory}', *options])}"]
