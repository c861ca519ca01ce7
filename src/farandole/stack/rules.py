"""Choose the components by the catalogue's own rules, without any index; explain conflicts, and say what would work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from resolvelib import AbstractProvider, BaseReporter, ResolutionError, ResolutionImpossible, Resolver
from resolvelib.resolvers import RequirementInformation

from farandole.stack.catalogue import FACTS, NONE, Need, Row
from farandole.stack.own import SETTING
from farandole.stack.problem import Problem, Request

# Decided first, because the rest depends on them.
FIRST = (*FACTS, "cuda", "torch", "tensorflow", "horovod", "openmpi", "gxx")
MAX_DEPTH = 4
Causes = Sequence[RequirementInformation[Need, Row]]


class _Provider(AbstractProvider[Need, Row, str]):
    """The catalogue, adapted to resolvelib's interface."""

    def __init__(self, problem: Problem, candidates: Mapping[str, Sequence[Row]]) -> None:
        self.problem = problem
        self.candidates = candidates

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
        return place, identifier not in causes, identifier

    def find_matches(
        self,
        identifier: str,
        requirements: Mapping[str, Iterator[Need]],
        incompatibilities: Mapping[str, Iterator[Row]],
    ) -> Iterable[Row]:
        needs, bad = list(requirements[identifier]), list(incompatibilities[identifier])
        candidates = self.candidates[identifier]
        good = [row for row in candidates if row not in bad and all(need.allows(row) for need in needs)]
        return sorted(good, key=lambda row: (row.version == NONE, self.problem.rank(row)), reverse=True)

    def is_satisfied_by(self, requirement: Need, candidate: Row) -> bool:
        return requirement.allows(candidate)

    def get_dependencies(self, candidate: Row) -> Iterable[Need]:
        return self.problem.needs(candidate)


@dataclass(frozen=True)
class Components:
    """A version of every component, or a range of versions of a framework, and what required each."""

    rows: Mapping[str, Row]
    needs: Mapping[str, Sequence[Need]]


def resolve(problem: Problem, roots: Sequence[Need]) -> Components:
    """Find the best set, or raise ResolutionImpossible."""
    elimination = Elimination(problem, roots)
    if elimination.exhausted:
        raise ResolutionImpossible([])
    provider = _Provider(problem, elimination.candidates)
    result = Resolver(provider, BaseReporter[Need, Row, str]()).resolve(roots, max_rounds=2000)
    needs = {name: [one.requirement for one in result.criteria[name].information] for name in result.mapping}
    rows = {name: row for name, row in sorted(result.mapping.items()) if row.version != NONE}
    return Components(rows, needs)


def possible(problem: Problem, roots: Sequence[Need]) -> bool:
    """Whether any set satisfies the requirements."""
    try:
        resolve(problem, roots)
    except ResolutionError:
        return False
    return True


# Why not


@dataclass
class Elimination:
    """The candidates left of the catalogue under some requirements, and why the others were eliminated."""

    problem: Problem
    roots: Sequence[Need]

    def __post_init__(self) -> None:
        self.reasons: dict[Row, list[Need | str]] = {}
        self.candidates = {name: self._initial(name) for name in [*self.problem.catalogue.components, *FACTS]}
        while self._round():
            pass

    def _initial(self, component: str) -> list[Row]:
        rows = self.problem.rows(component)
        self.reasons.update({row: [text] for row in rows if (text := self.problem.blocked(row))})
        return [row for row in rows if row not in self.reasons]

    @property
    def exhausted(self) -> list[str]:
        """Components without any candidate left."""
        return [name for name, rows in self.candidates.items() if not rows]

    def certain(self) -> list[Need]:
        """The roots, and the requirements of components with a single candidate."""
        found, seen = list(self.roots), set[str]()
        for need in found:
            rows = [row for row in self.candidates[need.component] if need.allows(row)]
            if len(rows) == 1 and need.component not in seen:
                seen.add(need.component)
                found += self.problem.needs(rows[0])
        return found

    def _round(self) -> bool:
        certain = self.certain()
        eliminated: dict[Row, list[Need | str]] = {}
        for name, rows in self.candidates.items():
            # Facts about the nodes are never eliminated.
            for row in rows if name not in FACTS else ():
                if reasons := [*self._refused(row, certain), *self._unmet(row, certain)]:
                    eliminated[row] = reasons
        self.reasons.update(eliminated)
        self.candidates = {
            name: [row for row in rows if row not in eliminated] for name, rows in self.candidates.items()
        }
        return bool(eliminated)

    @staticmethod
    def _refused(row: Row, certain: Sequence[Need]) -> list[Need | str]:
        return [need for need in certain if need.component == row.component and not need.allows(row)]

    def _unmet(self, row: Row, certain: Sequence[Need]) -> list[Need | str]:
        return [need for need in self.problem.needs(row) if not self._can_meet(need, certain)]

    def _can_meet(self, need: Need, certain: Sequence[Need]) -> bool:
        candidates = self.candidates[need.component]
        if need.component in FACTS:
            return need.allows(candidates[0])
        others = [one for one in certain if one.component == need.component]
        return any(need.allows(row) and all(one.allows(row) for one in others) for row in candidates)

    def explain(self, row: Row, depth: int = 1, explained: set[Row] | None = None) -> list[str]:
        """Why a row was eliminated, as an indented list."""
        explained = set() if explained is None else explained
        if row in explained or depth > MAX_DEPTH:
            return []
        explained.add(row)
        lines = []
        for reason in self.reasons.get(row, ()):
            against = self._against(row, reason)
            lines.append(f"{'   ' * depth}- {reason}{against}")
            if isinstance(reason, Need) and reason.component != row.component and not against:
                for other in self.problem.rows(reason.component):
                    lines += self.explain(other, depth + 1, explained) if reason.allows(other) else []
        return lines

    def _against(self, row: Row, reason: Need | str) -> str:
        """What conflicts with a requirement, if one sentence can say it."""
        if isinstance(reason, str) or reason.component == row.component:
            return ""
        others = [need for need in self.certain() if need.component == reason.component]
        rows = [one for one in self.problem.rows(reason.component) if reason.allows(one)]
        return next((f"; but {one}" for one in others if not any(one.allows(row) for row in rows)), "")


def refusal(problem: Problem) -> str:
    """Describe the conflicts in the request, and the nearest request that works."""
    found = nearest(problem)
    lines = ["no set of versions satisfies the request; nothing was changed."]
    for number, (part, reasons) in enumerate(conflicts(problem, found), 1):
        lines += ["", f"{number}. {part}", *reasons]
    return "\n".join([*lines, "", *cure(problem.request, found)])


def conflicts(problem: Problem, kept: Request | None) -> Iterator[tuple[str, list[str]]]:
    """Each part of the request that cannot be satisfied, with the reasons."""
    request = problem.request
    kept = kept or replace(request, frameworks=(), pins=())
    bare = Elimination(problem, list(problem.facts()))
    if bare.exhausted:
        rows = [row for name in bare.exhausted for row in problem.rows(name) if row.version != NONE]
        yield f"{problem.nodes.platform}", _eliminated(bare, rows)
        return
    for name in request.frameworks:
        need = problem.framework(name)
        if name not in kept.frameworks or Elimination(problem, [*problem.facts(), *problem.chip(), need]).exhausted:
            yield f"{name} ({'GPUs' if problem.accelerator == 'cuda' else 'CPUs'})", against(problem, need, ())
    for pin in request.pins:
        if pin not in kept.pins:
            yield request.spelled(pin), against(problem, problem.pin(pin), kept.pins)


def against(problem: Problem, need: Need, kept: Iterable[tuple[str, str]]) -> list[str]:
    """Why a requirement cannot be met: on these nodes at all, or together with the fewest other requests."""
    base = [*problem.facts(), *problem.chip()]
    elimination = Elimination(problem, [*base, need])
    rows = [row for row in problem.rows(need.component) if need.allows(row)]
    if elimination.exhausted:
        return [*_eliminated(elimination, rows), *_made_for(problem, need)]
    rest = problem.requested(kept)
    for one in list(rest):
        fewer = [other for other in rest if other is not one]
        if not possible(problem, [*base, need, *fewer]):
            rest = fewer
    elimination = Elimination(problem, [*base, need, *rest])
    exhausted = [one for one in rest if one.component in elimination.exhausted]
    others = [row for one in exhausted for row in problem.rows(one.component) if one.allows(row)]
    return _eliminated(elimination, [*rows, *others]) or [f"   it conflicts with {', '.join(map(str, rest))}"]


def _eliminated(elimination: Elimination, rows: Iterable[Row]) -> list[str]:
    lines = []
    for row in rows:
        reasons = elimination.explain(row)
        lines += [f"   {row}:", *reasons] if reasons else []
    return lines


def _made_for(problem: Problem, need: Need) -> list[str]:
    """What conflicts with the framework versions that are made for exactly the requested version."""
    if need.component in problem.catalogue.frameworks.values():
        return []
    lines = []
    elimination = Elimination(problem, list(problem.facts()))
    wanted = [row for row in problem.catalogue.rows(need.component) if need.allows(row)]
    for name in problem.request.frameworks:
        for row in problem.catalogue.rows(problem.catalogue.frameworks[name]):
            made = [one for one in problem.needs(row) if one.component == need.component]
            if any(one.allows(other) for one in made for other in wanted) and (reasons := elimination.explain(row)):
                lines += [f"   {row}, which is made for it:", *reasons]
    return lines


def nearest(problem: Problem) -> Request | None:
    """The request that works and drops least: pins first, then the GPUs, then a framework."""
    request = problem.request
    chips = [request.accelerator] + ["cpu"] * (problem.accelerator == "cuda")
    sets = [request.frameworks] + [(name,) for name in request.frameworks if len(request.frameworks) > 1]
    for frameworks in sets:
        for chip in chips:
            found = replace(request, frameworks=frameworks, accelerator=chip, pins=())
            if possible(replace(problem, request=found), replace(problem, request=found).roots()):
                return _with_pins(problem, found)
    return None


def _with_pins(problem: Problem, request: Request) -> Request:
    for pin in problem.request.pins:
        more = replace(problem, request=replace(request, pins=(*request.pins, pin)))
        if possible(more, more.roots()):
            request = more.request
    return request


def cure(request: Request, found: Request | None) -> list[str]:
    """The nearest set that works, as commands and settings."""
    if not found:
        return ["no part of it works on these nodes"]
    options = [f"--want {name}=={version}" for name, version in found.pins if (name, version) in found.command]
    lines = ["nearest set that works:"]
    if found.frameworks != request.frameworks:
        options.insert(0, f"--frameworks {','.join(found.frameworks)}")
        lines.append(f"   in the inventory: stack_frameworks: [{', '.join(found.frameworks)}]")
    if found.accelerator != request.accelerator:
        options.insert(0, f"--accelerator {found.accelerator}")
        lines.append(f"   in the inventory: stack_accelerator: {found.accelerator}")
    ours = [pin for pin in found.pins if pin not in found.command]
    if [pin for pin in request.pins if pin not in request.command] != ours:
        pins = ", ".join(f'"{name}=={version}"' for name, version in ours)
        lines.append(f"   in the inventory: stack_pins: [{pins}]")
    for requirement, where in request.packages:
        if (requirement, where) not in found.packages and where != SETTING:
            lines.append(f"   without {requirement}, which {where} names")
    packages = [text for text, where in found.packages if where == SETTING]
    if [text for text, where in request.packages if where == SETTING] != packages:
        lines.append(
            f"   in the inventory: stack_packages: {yaml.safe_dump(packages, default_flow_style=True).strip()}"
        )
    return [*lines, f"   {' '.join([f'farandole lock -i {request.inventory}', *options])}"]
