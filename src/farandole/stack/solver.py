"""Choose the stack: the components by our own rules, and then, with these, the packages by the index."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from farandole.core.errors import FarandoleError
from farandole.core.findings import some
from farandole.stack import index, rules, sdist
from farandole.stack.cache import COMPILED_AGAINST
from farandole.stack.catalogue import FACTS, NONE, Need, Row, near, order, system
from farandole.stack.index import Question, UnsatisfiableError, Wheel
from farandole.stack.problem import Problem, spelled
from farandole.stack.rules import Solution

YOURS = "your request"
# How PyTorch and what goes with it are marked.
BUILDS = r"cpu|cu\d+|rocm[\d.]+|xpu"


def solve(problem: Problem) -> Solution:
    """Find the best set; if there is none, refuse with the conflicts and the nearest set that works."""
    _check_platform(problem)
    try:
        return _choose(problem)
    except UnsatisfiableError as error:
        raise FarandoleError(refusal(problem, error)) from None


def _check_platform(problem: Problem) -> None:
    platform, hosts = problem.nodes.platform, some(problem.nodes.hosts)
    known = problem.catalogue.components["os"]
    if platform.os not in known:
        raise FarandoleError(
            f"{hosts}: the catalogue does not have {platform.os}{near(platform.os, known)}; it has {', '.join(known)}"
        )
    own = known[platform.os]["ships"]["python"]
    if platform.python != own:
        raise FarandoleError(
            f"{hosts}: /usr/bin/python3 is Python {platform.python}, and {system(platform.os)} comes with {own}: "
            "restore that one (apt-get install --reinstall python3-minimal)"
        )


def alternatives(problem: Problem) -> Iterator[Solution]:
    """All sets of components that differ in the ranges of the frameworks, best first."""
    wanted = [problem.catalogue.frameworks[name] for name in problem.request.frameworks]
    ranges = [sorted(problem.catalogue.rows(name), key=problem.rank, reverse=True) for name in wanted]
    roots = problem.roots()
    for rows in product(*ranges):
        if solution := rules.resolve(problem, [*roots, *(Need(row.component, row.version, str(row)) for row in rows)]):
            yield solution


# Packages


def _choose(problem: Problem) -> Solution:
    """Let the index choose the packages of the stack, and then the user's own beside them."""
    first: FarandoleError | None = None
    for components in alternatives(problem):
        question = asked(problem, components)
        try:
            wheels = index.ask(question)
        except UnsatisfiableError as error:
            first = first or error
            continue
        base = frozenset(wheel.package for wheel in wheels)
        if problem.request.packages:
            question = beside(problem, question, wheels)
            folder = problem.request.sources
            wheels = sdist.choose(question, folder) if folder else index.ask(question)
            _refuse_frameworks(problem, wheels)
        return replace(components, needs=(*components.needs, *question.needs), wheels=wheels, base=base)
    raise first or FarandoleError(rules.refusal(problem))


def asked(problem: Problem, components: Solution) -> Question:
    """What the index is asked for, without the user's own packages."""
    request, catalogue, rows = problem.request, problem.catalogue, components.rows
    frameworks = [catalogue.frameworks[name] for name in request.frameworks]
    text = problem.framework(request.frameworks[0]).text
    needs = [Need(name, rows[name].version, "the stack", text=text) for name in frameworks]
    needs += [pin for pin in problem.pins if pin.component in frameworks or not catalogue.knows(pin.component)]
    needs += [Need(name, "", str(rows["horovod"])) for name in rows["horovod"].data["requires"]]
    needs += [need for row in rows.values() for need in problem.package_needs(row)]
    needs += [Need("torch", "", YOURS, text=problem.cuda)] if problem.cuda else []
    return Question(
        platform=problem.nodes.platform,
        needs=tuple(needs),
        instead=catalogue.data["on_cpus"] if problem.accelerator == "cpu" else {},
        prefer={name: version for name, (version, _) in problem.preferred.items()},
        never="cpu" if problem.accelerator == "cuda" or problem.cuda else "",
        until=problem.known.until,
    )


def beside(problem: Problem, question: Question, wheels: Sequence[Wheel]) -> Question:
    """The question with the user's own packages, which must leave alone what Horovod is compiled against."""
    names = {wheel.package: wheel.version for wheel in wheels}
    fixed = [
        Need(
            name, f"=={version}", "Horovod", why=f"pin another {name} in stack_pins, and Horovod is compiled for that",
            text=f"Horovod is compiled against {name} {version}",
        )
        for name, version in names.items()
        if name in COMPILED_AGAINST
    ]  # fmt: skip
    own = [Need(*index.split(wish[0]), YOURS, text=spelled(wish)) for wish in problem.request.packages]
    mark = index.build(names.get("torch", ""))
    return replace(
        question,
        needs=(*question.needs, *own, *fixed),
        prefer={**question.prefer, **names},
        # What PyTorch is built for, its companions have to be built for.
        never=f"(?!{re.escape(mark)}$)(?:{BUILDS})" if re.fullmatch(BUILDS, mark) else question.never,
    )


def _refuse_frameworks(problem: Problem, wheels: Sequence[Wheel]) -> None:
    """Refuse a framework that came with a package of the user's, as Horovod would not be built for it."""
    for name, package in problem.catalogue.frameworks.items():
        by = next((wheel.needed_by for wheel in wheels if wheel.package == package), None)
        if name not in problem.request.frameworks and by is not None:
            who = ", ".join(by) or "your request"
            raise FarandoleError(
                f"{who} needs {package}, and Horovod would not be built for it: add {name} to stack_frameworks"
            )


# Why not


def refusal(problem: Problem, error: UnsatisfiableError) -> str:
    """Describe why no packages fit together, and the nearest request for which some do."""
    said = str(error)
    named = [need for need in error.question.needs if (need.why or need.text) and index.names(said, need.component)]
    lines = ["no set of packages satisfies the request; nothing was changed.", ""]
    lines += [f"   {line}" for line in said.splitlines()]
    lines += [f"   - {need}" for need in dict.fromkeys(map(str, named))]
    if not problem.request.sources and (only := ", ".join(sorted(index.without_wheel(said)))):
        lines.append(
            f"   {only} can be built once, on the builder, where its own code then runs: stack_build_wheels: true"
        )
    places = problem.catalogue.data["cpu_builds"] if problem.accelerator == "cpu" else {}
    lines += [
        f"   builds of {name} for CPUs are elsewhere: pip config set global.extra-index-url {places[name]}"
        for name in sorted({need.component for need in named if need.by == YOURS} & places.keys())
    ]
    if missing := index.missing(said):
        lines.append(f"   no index has a package {missing}{problem.catalogue.hint(missing)}")
    elif hints := [hint for need in named if need.by == YOURS and (hint := problem.catalogue.imported(need.component))]:
        lines += hints
    nearest = rules.nearest(problem, _works, lambda package: index.names(said, package))
    return "\n".join([*lines, "", *rules.cure(problem.request, nearest)])


def _works(problem: Problem) -> bool:
    try:
        return bool(_choose(problem).wheels)
    except FarandoleError:
        return False


# Why each version


def why(problem: Problem, solution: Solution) -> dict[str, str]:
    """A sentence for every component and package: what required it, and why it is this version."""
    components = {
        name: f"{_asked(solution.needs_of(name))}; {_newer(problem, solution, name)}"
        for name in solution.rows
        if name not in problem.catalogue.frameworks.values()
    }
    return components | {wheel.package: _package(problem, solution, wheel) for wheel in solution.wheels}


def _asked(needs: Sequence[Need]) -> str:
    reasons = list(dict.fromkeys(need.short for need in needs))
    return "; ".join(reasons[:2]) + (f" (and {len(reasons) - 2} more)" if len(reasons) > 2 else "")


def _package(problem: Problem, solution: Solution, wheel: Wheel) -> str:
    needs = [need for need in solution.needs_of(wheel.package) if need.short]
    by = [Need(wheel.package, "", name) for name in wheel.needed_by]
    version, kept = problem.preferred.get(wheel.package, ("", ""))
    chosen = kept if version == wheel.version else "the newest that fits"
    if wheel.package == "torch" and problem.cuda:
        chosen = f"a build for CUDA, as {problem.cuda}"
    return f"{_asked([*needs, *by])}; {chosen}{'; built, as there is no wheel' if wheel.build else ''}"


def _newer(problem: Problem, solution: Solution, name: str) -> str:
    row, os = solution.rows[name], problem.os
    if name in FACTS:
        return "determined by the nodes"
    newer = [new for new in problem.catalogue.rows(name) if order(new.version).release > order(row.version).release]
    if not newer:
        return "the newest in the catalogue"
    newest = newer[-1]
    if blocked := problem.blocked(newest):
        return f"not {newest.version}: {blocked}"
    if against := next((need for need in solution.needs_of(name) if not need.allows(newest)), None):
        return f"not {newest.version}: {against}"
    for need in problem.needs(newest):
        chosen = solution.rows.get(need.component, Row(need.component, NONE))
        if not need.allows(chosen):
            return f"not {newest.version}: {need}"
    if row.version == problem.catalogue.components["os"][os].get("default", {}).get(name):
        return f"not {newest.version}: {row.version} is the system's own"
    proven = ", ".join(problem.catalogue.proven(name, row.version))
    return f"not {newest.version}: {row.version} is tested ({proven}), {newest.version} is not"
