"""Choose the components by the catalogue's own rules, without any index; explain conflicts, and say what would work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import yaml

from farandole.stack.catalogue import FACTS, NONE, Need, Row
from farandole.stack.own import SETTING
from farandole.stack.problem import ALWAYS, Problem, Request

# In this order: what the rest depends on first.
ORDER = (*FACTS, "cuda", "nccl", "torch", "tensorflow", "horovod", "gxx", "openmpi")


@dataclass(frozen=True)
class Components:
    """A version of every component, or a range of versions of a framework, and what required each."""

    rows: Mapping[str, Row]
    needs: Mapping[str, Sequence[Need]]


def resolve(problem: Problem, roots: Sequence[Need]) -> Components | None:
    """The best set of components, or None if there is none."""
    if not (rows := _search(problem, list(roots), {})):
        return None
    # NCCL depends on the most, and comes last.
    found = sorted(rows.values(), key=lambda row: row.component == "nccl")
    needs = [*roots, *(need for row in found for need in problem.needs(row))]
    return Components(
        {name: row for name, row in sorted(rows.items()) if row.version != NONE},
        {name: [need for need in needs if need.component == name] for name in rows},
    )


def _search(problem: Problem, needs: Sequence[Need], chosen: Mapping[str, Row]) -> Mapping[str, Row] | None:
    if len(chosen) == len(ORDER):
        return chosen
    name = ORDER[len(chosen)]
    good = [row for row in _allowed(problem, name, needs) if not problem.blocked(row)]
    for row in sorted(good, key=lambda row: (row.version == NONE, problem.rank(row)), reverse=True):
        more = problem.needs(row)
        if all(need.allows(chosen[need.component]) for need in more if need.component in chosen) and (
            found := _search(problem, [*needs, *more], {**chosen, name: row})
        ):
            return found
    return None


def _allowed(problem: Problem, name: str, needs: Sequence[Need]) -> list[Row]:
    own = [need for need in needs if need.component == name]
    return [row for row in problem.rows(name) if all(need.allows(row) for need in own)]


def possible(problem: Problem) -> bool:
    """Whether any set of components satisfies the request."""
    return resolve(problem, problem.roots()) is not None


# Why not


def refusal(problem: Problem) -> str:
    """Describe the conflicts in the request, and the nearest request that works."""
    found = nearest(problem, possible)
    lines = ["no set of versions satisfies the request; nothing was changed."]
    for number, (part, reasons) in enumerate(conflicts(problem, found), 1):
        lines += ["", f"{number}. {part}", *reasons]
    return "\n".join([*lines, "", *cure(problem.request, found)])


def conflicts(problem: Problem, kept: Request | None) -> Iterator[tuple[str, list[str]]]:
    """Each part of the request that cannot be satisfied, with the reasons."""
    request, facts = problem.request, list(problem.facts())
    for component in ALWAYS:
        if reasons := impossible(problem, Need(component, "", ""), facts):
            yield str(problem.nodes.platform), reasons
            return
    kept = kept or replace(request, frameworks=(), pins=())
    base = [*facts, *problem.chip()]
    chip = "GPUs" if problem.accelerator == "cuda" else "CPUs"
    for name in request.frameworks:
        need = problem.framework(name)
        if name not in kept.frameworks or impossible(problem, need, base):
            yield f"{name} ({chip})", _against(problem, need, base, kept)
    for need in problem.chip() if kept.accelerator != request.accelerator else ():
        if reasons := impossible(problem, need, base):
            yield need.short, reasons
    for pin in request.pins:
        if pin not in kept.pins and problem.catalogue.knows(pin[0]):
            yield request.spelled(pin), _against(problem, problem.pin(pin), base, kept)


def _against(problem: Problem, need: Need, base: Sequence[Need], kept: Request) -> list[str]:
    """Why a requirement cannot be met: on these nodes at all, or together with what is kept of the request."""
    others = problem.requested(kept)
    if reasons := impossible(problem, need, base) or impossible(problem, need, [*base, *others]):
        return reasons
    if kept.accelerator != problem.request.accelerator:
        return ["   it does not matter on CPUs, which the nearest set uses"]
    return [f"   it conflicts with {', '.join(dict.fromkeys(map(str, others)))}"]


def impossible(problem: Problem, need: Need, needs: Sequence[Need]) -> list[str]:
    """Why no row satisfies a need beside others, as an indented list; empty if one does."""
    certain = _certain(problem, needs)
    rows = [row for row in problem.rows(need.component) if need.allows(row)]
    found = {row: _reasons(problem, row, certain, "   ") for row in rows}
    if not all(found.values()):
        return []
    return [line for row, reasons in found.items() for line in (f"   {row}:", *reasons)]


def _certain(problem: Problem, needs: Sequence[Need]) -> list[Need]:
    """The needs, and those of components with a single candidate."""
    found = list(needs)
    for need in found:
        rows = _allowed(problem, need.component, found)
        found += [more for row in rows if len(rows) == 1 for more in problem.needs(row) if more not in found]
    return found


def _reasons(problem: Problem, row: Row, certain: Sequence[Need], indent: str) -> list[str]:
    """Why a row is impossible, as an indented list; empty if it is not."""
    if text := problem.blocked(row):
        return [f"{indent}- {text}"]
    lines = [f"{indent}- {need}" for need in certain if need.component == row.component and not need.allows(row)]
    for need in problem.needs(row):
        rows = [other for other in problem.rows(need.component) if need.allows(other)]
        beside = (one for one in certain if one.component == need.component)
        if against := next((one for one in beside if not any(map(one.allows, rows))), None):
            lines.append(f"{indent}- {need}; but {against}")
        elif all(inner := [_reasons(problem, other, certain, f"{indent}   ") for other in rows]):
            lines += [f"{indent}- {need}", *(line for reasons in inner for line in reasons)]
    return lines


# What would work


def nearest(
    problem: Problem, works: Callable[[Problem], bool], suspect: Callable[[str], bool] = lambda _: True
) -> Request | None:
    """The request that works and drops least: suspect packages and pins, then all, then the GPUs, then a framework."""
    request = problem.request
    chips = [request.accelerator] + ["cpu"] * (problem.accelerator == "cuda")
    sets = [request.frameworks] + [(name,) for name in request.frameworks if len(request.frameworks) > 1]
    wishes = [*request.packages, *request.pins]
    innocent = [one for one in wishes if not suspect(one[0])]
    for frameworks, chip, kept in product(sets, chips, (innocent, list[tuple[str, str]]())):
        whole = replace(request, frameworks=frameworks, accelerator=chip)
        if works(replace(problem, request=whole.only(kept))):
            for one in reversed(wishes):
                if one not in kept and works(replace(problem, request=whole.only([*kept, one]))):
                    kept.append(one)
            return whole.only(kept)
    return None


def cure(request: Request, found: Request | None) -> list[str]:
    """The nearest set that works, as commands and settings."""
    if not found:
        return ["no part of it works on these nodes"]
    lines, options = ["nearest set that works:"], [f"--want {name}=={version}" for name, version in found.from_command]
    for (setting, before), after in zip(request.settings().items(), found.settings().values(), strict=True):
        if before != after:
            written = yaml.safe_dump(after, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
            lines.append(f"   in the inventory: {setting}: {written}")
    if found.accelerator != request.accelerator:
        options.insert(0, f"--accelerator {found.accelerator}")
    if found.frameworks != request.frameworks:
        options.insert(0, f"--frameworks {','.join(found.frameworks)}")
    dropped = [one for one in request.packages if one not in found.packages and one[1] != SETTING]
    lines += [f"   without {requirement}, which {where} names" for requirement, where in dropped]
    return [*lines, f"   {' '.join([f'farandole lock -i {request.inventory}', *options])}"]
