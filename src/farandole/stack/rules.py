"""Choose the components by the catalogue's own rules, without any index; explain conflicts, and say what would work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import yaml

from farandole.stack.catalogue import FACTS, NONE, Need, Row, title
from farandole.stack.index import Wheel
from farandole.stack.own import SETTING
from farandole.stack.problem import WANT, Problem, Request

# In this order: what the rest depends on first.
ORDER = (*FACTS, "cuda", "nccl", "torch", "tensorflow", "horovod", "gxx", "openmpi")


@dataclass(frozen=True)
class Solution:
    """A version of every component, or a range of versions of a framework, the wheels, and what required each."""

    rows: Mapping[str, Row]
    needs: Sequence[Need]
    wheels: Sequence[Wheel] = ()
    # The packages that the stack has without the user's own ones.
    base: frozenset[str] = frozenset()

    def needs_of(self, name: str) -> list[Need]:
        return [need for need in self.needs if need.component == name]


def resolve(problem: Problem, roots: Sequence[Need]) -> Solution | None:
    """The best set of components, without wheels; None if there is none."""
    if not (rows := _search(problem, list(roots), {})):
        return None
    # NCCL depends on the most, and comes last.
    ordered = sorted(rows.values(), key=lambda row: row.component == "nccl")
    needs = [*roots, *(need for row in ordered for need in problem.needs(row))]
    return Solution({name: row for name, row in sorted(rows.items()) if row.version != NONE}, needs)


def _search(problem: Problem, needs: Sequence[Need], chosen: Mapping[str, Row]) -> Mapping[str, Row] | None:
    if len(chosen) == len(ORDER):
        return chosen
    name = ORDER[len(chosen)]
    good = [row for row in _allowed(problem, name, needs) if not problem.blocked(row)]
    for row in sorted(good, key=lambda row: (row.version == NONE, problem.rank(row)), reverse=True):
        more = problem.needs(row)
        if all(need.allows(chosen[need.component]) for need in more if need.component in chosen) and (
            rows := _search(problem, [*needs, *more], {**chosen, name: row})
        ):
            return rows
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
    lines = ["no set of versions satisfies the request; nothing was changed."]
    for name in ORDER:
        if reasons := _conflicts(problem, name, _certain(problem)):
            lines += ["", f"{title(name)}: no version fits", *(f"   - {reason}" for reason in reasons)]
    return "\n".join([*lines, "", *cure(problem.request, nearest(problem, possible))])


def _certain(problem: Problem) -> list[Need]:
    """What is required in any case: by the nodes and the request, and by each version that one of these determines."""
    needs = problem.roots()
    for need in needs:
        rows = [row for row in problem.rows(need.component) if need.allows(row)]
        needs += [more for row in rows if len(rows) == 1 for more in problem.needs(row) if more not in needs]
    return needs


def _conflicts(problem: Problem, name: str, certain: Sequence[Need]) -> list[str]:
    """Why no version of a component can be used; empty if one can."""
    own = [need for need in certain if need.component == name]
    if not (rows := _allowed(problem, name, own)):
        pinned = [row for row in problem.rows(name) for need in own if need.constraint == f"=={row.version}"]
        return [*(str(need) for need in own if need.constraint), *filter(None, map(problem.blocked, pinned))]
    # What a single one needs is certain, and said where it conflicts.
    reasons = {row: _against(problem, row, certain if rows[1:] else []) for row in rows}
    return [f"{row}: {why}" for row, why in reasons.items()] if all(reasons.values()) else []


def _against(problem: Problem, row: Row, certain: Sequence[Need]) -> str:
    """Why a version cannot be used beside what is certain; empty if it can."""
    conflicts = (
        f"{need}; but {other}"
        for need in problem.needs(row)
        for other in certain
        if other.component == need.component and not _allowed(problem, need.component, [need, other])
    )
    return problem.blocked(row) or next(conflicts, "")


# What would work


def nearest(
    problem: Problem, works: Callable[[Problem], bool], suspect: Callable[[str], bool] = lambda _: True
) -> Request | None:
    """The request that works and drops least: suspect packages and pins, then all, then the GPUs, then a framework."""
    request = problem.request
    chips = [request.accelerator] + ["cpu"] * (problem.accelerator == "cuda")
    sets = [request.frameworks] + [(name,) for name in request.frameworks if len(request.frameworks) > 1]
    wishes = [*request.packages, *request.pins]
    innocent = [wish for wish in wishes if not suspect(wish[0])]
    for frameworks, chip, kept in product(sets, chips, (innocent, list[tuple[str, str]]())):
        whole = replace(request, frameworks=frameworks, accelerator=chip)
        if works(replace(problem, request=whole.only(kept))):
            for wish in reversed(wishes):
                if wish not in kept and works(replace(problem, request=whole.only([*kept, wish]))):
                    kept.append(wish)
            return whole.only(kept)
    return None


def cure(request: Request, nearest: Request | None) -> list[str]:
    """The nearest set that works, as commands and settings."""
    if not nearest:
        return ["no part of it works on these nodes"]
    lines = ["nearest set that works:"]
    options = [f"{WANT} {text}" for text, where in nearest.pins if where == WANT]
    for (setting, before), after in zip(request.settings().items(), nearest.settings().values(), strict=True):
        if before != after:
            written = yaml.safe_dump(after, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
            lines.append(f"   in the inventory: {setting}: {written}")
    if nearest.accelerator != request.accelerator:
        options.insert(0, f"--accelerator {nearest.accelerator}")
    if nearest.frameworks != request.frameworks:
        options.insert(0, f"--frameworks {','.join(nearest.frameworks)}")
    lines += [
        f"   without {text}, which {where} names"
        for text, where in request.packages
        if (text, where) not in nearest.packages and where != SETTING
    ]
    return [*lines, f"   {' '.join([f'farandole lock -i {request.inventory}', *options])}"]
