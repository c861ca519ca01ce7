"""The versions chosen for different nodes and requests, and the refusals when none fit."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.stack import index, nodes, rules, solver
from farandole.stack.catalogue import Row, load
from farandole.stack.problem import Known, Problem, Request, request
from farandole.stack.rules import Solution

pytestmark = pytest.mark.usefixtures("small_index")
BOOKWORM = {
    "os_id": "debian", "os_version": "12", "arch": "x86_64", "python": "3.11", "glibc": "2.36", "nvidia_driver": "",
    "cuda": "",
}  # fmt: skip
TRIXIE = {**BOOKWORM, "os_version": "13", "python": "3.13", "glibc": "2.41"}
GPU = {**BOOKWORM, "nvidia_driver": "580.95.05", "cuda": "13.0"}
BOTH = ("tensorflow", "pytorch")
MANUAL = (
    *("openmpi==4.0.0", "nccl==2.7.8-1+cuda10.1", "cuda==10.1", "g++==7"),
    *("tensorflow==2.3.1", "torch==1.6.0+cu101"),
)


def cluster(*probes: Mapping[str, str]) -> dict[str, Any]:
    return {f"node-{number}": dict(probe) for number, probe in enumerate(probes, 1)}


def problem(wanted: Request, *probes: Mapping[str, str]) -> Problem:
    return Problem(load(), nodes.read(cluster(*(probes or (BOOKWORM, BOOKWORM)))), wanted)


def solved(wanted: Request, *probes: Mapping[str, str]) -> Solution:
    return solver.solve(problem(wanted, *probes))


def refused(wanted: Request, *probes: Mapping[str, str]) -> str:
    with pytest.raises(FarandoleError) as refusal:
        solved(wanted, *probes)
    return str(refusal.value)


def versions(solution: Solution, *names: str) -> list[str]:
    chosen = {name: row.version for name, row in solution.rows.items()}
    chosen |= {wheel.package: wheel.version for wheel in solution.wheels}
    return [chosen.get(name, "none") for name in names]


def test_both_frameworks_on_debian_12() -> None:
    solution = solved(Request(BOTH))
    assert "horovod 0.28.1 needs setuptools<81" in [need.short for need in solution.needs_of("setuptools")]
    assert {wheel.name for wheel in solution.wheels} > {"tensorflow-cpu", "torch", "tf-keras"}
    assert not [wheel for wheel in solution.wheels if wheel.name.startswith("nvidia-") or wheel.name == "tensorflow"]


TENSORFLOW, TORCH, CPU_TORCH = ("tensorflow",), ("pytorch",), "2.13.0+cpu"
KEPT = Known({"numpy": "2.3.4", "pandas": "2.3.3", "torch": CPU_TORCH})


@pytest.mark.parametrize(
    ("wanted", "probe", "chosen"),
    [
        (
            Request(BOTH), BOOKWORM,
            {"torch": CPU_TORCH, "tensorflow": "2.21.0", "tf-keras": "2.21.0", "numpy": "2.4.6", "protobuf": "7.36.2",
             "openmpi": "4.1.4", "gxx": "12", "horovod": "0.28.1", "cuda": "none", "nccl": "none"},
        ),
        (Request(TENSORFLOW), TRIXIE, {"torch": "none", "tensorflow": "2.21.0", "openmpi": "4.1.4", "gxx": "14"}),
        (Request(TORCH), BOOKWORM, {"numpy": "2.4.6", "tensorflow": "none", "keras": "none"}),
        # There, torch has a build for CUDA alone.
        (
            Request(BOTH), TRIXIE,
            {"torch": "2.15.0", "tensorflow": "2.21.0", "nvidia-nccl-cu13": "2.30.7", "cuda": "none"},
        ),
        # Its NCCL is that of the debs.
        (
            Request(TORCH), GPU,
            {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.29.7-1+cuda13.2", "nvidia-nccl-cu13": "2.29.7"},
        ),
        (Request(BOTH, accelerator="cpu"), GPU, {"torch": CPU_TORCH, "cuda": "none"}),
        (request(BOTH, (), "auto", ["openmpi==4.0.0"]), BOOKWORM, {"openmpi": "4.0.0"}),
        # A pin selects the older set around it.
        (
            request(TENSORFLOW, ["numpy==1.25.2"], "auto"), BOOKWORM,
            {"tensorflow": "2.15.1", "keras": "2.15.0", "tf-keras": "2.15.1", "torch": "none"},
        ),
        (request(BOTH, ["numpy==2.3.4"], "auto"), BOOKWORM, {"numpy": "2.3.4", "tensorflow": "2.21.0"}),
    ],
)  # fmt: skip
def test_versions(wanted: Request, probe: Mapping[str, str], chosen: dict[str, str]) -> None:
    assert dict(zip(chosen, versions(solved(wanted, probe, probe), *chosen), strict=True)) == chosen


def test_the_former_locks_versions_are_kept() -> None:
    wanted = replace(problem(Request(BOTH, packages=(("pandas", "stack_packages"),))), known=KEPT)
    assert versions(solver.solve(wanted), *KEPT.versions) == [*KEPT.versions.values()]


@pytest.mark.parametrize(
    ("wanted", "probe", "asks", "reasons"),
    [
        (
            request(BOTH, (), "auto", MANUAL), BOOKWORM, False,
            [
                "no node has an NVIDIA driver and a CUDA toolkit",
                "node-1, node-2: no driver", "Debian 12 has g++ 11 or 12", "node-1, node-2: Python 3.11",
                "CUDA 10.1 needs driver>=418.39 (the oldest driver that runs CUDA 10.1)",
                "CUDA 10.1 needs g++<=8 (nvcc 10.1 refuses newer host compilers)",
                "tensorflow<2.4 needs Python<3.9 (its wheels end at CPython 3.8)", "torch<1.8 needs Python<3.9",
                "NCCL 2.7.8-1+cuda10.1 needs CUDA==10.1 (the deb was built for it)",
                # Of all that, only OpenMPI 4.0.0 remains.
                "farandole lock -i INVENTORY --want openmpi==4.0.0",
            ],
        ),
        (
            request(TORCH, MANUAL, "auto"), GPU, False,
            [
                "CUDA 10.1 needs g++<=8", "node-1, node-2: CUDA toolkit 13.0",
                "in the inventory: stack_pins: [openmpi==4.0.0]",
            ],
        ),
        (
            Request(TORCH, accelerator="cuda"), {**GPU, "nvidia_driver": "535.129.03"}, True,
            ["node-1, node-2: driver 535.129.03", "CUDA 13.0 needs driver>=580.65.06 (the oldest driver that"],
        ),
        (
            Request(BOTH), GPU, True,
            [
                "   - tensorflow>=2.4,<2.15: Horovod's GPU part was never built against it",
                "   - tensorflow<2.4: tensorflow<2.4 needs Python<3.9 (its wheels end at CPython 3.8); but node-1",
                "farandole lock -i INVENTORY --accelerator cpu",
            ],
        ),
        (
            request(BOTH, ["numpy==1.25.2", "openmpi==4.1.8", "tensorflow==2.21.0"], "auto"), BOOKWORM, True,
            [
                "no set of packages satisfies the request; nothing was changed.", "numpy>=1.26.0",
                "- stack_pins (numpy==1.25.2)", "in the inventory: stack_pins: [openmpi==4.1.8, tensorflow==2.21.0]",
            ],
        ),
        (
            request(BOTH, ["setuptools==84.2.1"], "auto"), BOOKWORM, True,
            [
                "horovod 0.28.1 needs setuptools<81 (its setup.py imports pkg_resources, which setuptools 81 dropped)",
                "- stack_pins (setuptools==84.2.1)",
            ],
        ),
        (
            request(BOTH, ["nunpy==2.4.6"], "auto"), BOOKWORM, True,
            ["no index has a package nunpy (did you mean numpy?)"],
        ),
        (
            request(BOTH, ["openmpi==5.0.7"], "auto"), BOOKWORM, False,
            ["https://github.com/open-mpi/ompi/issues/12090"],
        ),
        (
            Request(TENSORFLOW, packages=(("wants-torch", "stack_packages"),)), BOOKWORM, True,
            ["wants-torch needs torch, and Horovod would not be built for it: add pytorch to stack_frameworks"],
        ),
    ],
)  # fmt: skip
def test_refusals(
    wanted: Request, probe: Mapping[str, str], asks: bool, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not asks:
        # Our own rules refuse it without an index.
        monkeypatch.setattr(index, "UV", "/usr/bin/false")
    said = refused(wanted, probe, probe)
    for reason in reasons:
        assert reason in said
    assert ("no node has an NVIDIA driver" in said) == (reasons[0] == "no node has an NVIDIA driver and a CUDA toolkit")


@pytest.mark.parametrize("probe", [BOOKWORM, TRIXIE, GPU])
@pytest.mark.parametrize("pins", [(), ("gxx==11",), ("openmpi==4.0.0",), ("torch==2.15.0",), ("cuda==12.9",)])
def test_the_components_are_the_best_of_all_sets_that_fit(probe: Mapping[str, str], pins: tuple[str, ...]) -> None:
    """Compared with all of them."""
    wanted = problem(request(("pytorch",), pins, "auto"), probe)
    roots = wanted.roots()
    rows = []
    for name in rules.ORDER:
        own = [need for need in roots if need.component == name]
        good = (row for row in wanted.rows(name) if not wanted.blocked(row) and all(need.allows(row) for need in own))
        rows.append(sorted(good, key=wanted.rank, reverse=True))

    def fits(chosen: tuple[Row, ...]) -> bool:
        by_component = {row.component: row for row in chosen}
        return all(need.allows(by_component[need.component]) for row in chosen for need in wanted.needs(row))

    best = next(filter(fits, itertools.product(*rows)), None)
    solution = rules.resolve(wanted, roots)
    assert (solution and set(solution.rows.values())) == (best and {row for row in best if row.version != "none"})


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("sklearn", "no index has a package sklearn (did you mean scikit-learn?)"),
        ("only-windows", "only-windows==1.0 has no wheels with a matching"),
        ("only-source", "only-source==1.0 has no wheel, only sources"),
        ("torchvision==0.20.0", "Horovod is compiled against torch 2.13.0+cpu (pin another torch in stack_pins"),
        ("numpy<1.26", "stack_packages (numpy<1.26)"),
    ],
)
def test_packages_that_do_not_fit(package: str, reason: str) -> None:
    said = refused(Request(BOTH, packages=(("pandas", "stack_packages"), (package, "stack_packages"))))
    assert reason in said
    assert "in the inventory: stack_packages: [pandas]" in said


def test_packages_of_the_users_own_leave_the_stack_alone() -> None:
    alone, extended = solved(Request(BOTH)), solved(Request(BOTH, packages=(("pandas<3", "stack_packages"),)))
    assert versions(extended, "pandas", "six", "torch", "numpy") == ["2.3.3", "1.17.0", "2.13.0+cpu", "2.4.6"]
    assert {wheel.name for wheel in extended.wheels if wheel.package not in extended.base} == {"pandas", "six"}
    theirs = {(wheel.file, wheel.sha256) for wheel in extended.wheels if wheel.package in extended.base}
    assert theirs == {(wheel.file, wheel.sha256) for wheel in alone.wheels}


def test_one_component_with_two_pins() -> None:
    with pytest.raises(FarandoleError, match=r"numpy is pinned to 2\.4\.6 and to 2\.3\.4: keep one of them"):
        request(BOTH, ["numpy==2.4.6"], "auto", ["numpy==2.3.4"])


def test_every_version_has_a_reason() -> None:
    resolved = problem(request(BOTH, ["numpy==2.3.4"], "auto"))
    reasons = solver.why(resolved, solver.solve(resolved))
    assert reasons["openmpi"].startswith(
        "every stack needs openmpi; horovod 0.28.1 needs openmpi<5; not 5.0.7: OpenMPI 5"
    )
    assert "not 14: Debian 12 has g++ 11 or 12" in reasons["gxx"]
    assert (
        reasons["numpy"] == "stack_pins (numpy==2.3.4); horovod 0.28.1 needs numpy (and 3 more); the newest that fits"
    )
    assert reasons["torch"].endswith("as in the set that ran on Debian 12")
    assert all(reasons.values())


@pytest.mark.parametrize(
    ("probes", "wanted", "reason"),
    [
        ((), "auto", "preflight has not probed any node yet"),
        ((BOOKWORM, TRIXIE, BOOKWORM), "auto", "the nodes have 2 platforms (node-1, node-3: Debian 12, x86_64, Python"),
        ((BOOKWORM, TRIXIE, BOOKWORM), "auto", "Move node-2 out of group cluster"),
        ((GPU, BOOKWORM), "auto", "node-1 with an NVIDIA driver, node-2 without one"),
        ((GPU, {**GPU, "cuda": "12.9"}), "auto", "node-1: CUDA 13; node-2: CUDA 12"),
        ((BOOKWORM,), "cuda", "node-1: no NVIDIA driver is loaded: install it, or set stack_accelerator: cpu"),
        (({**GPU, "cuda": ""},), "cuda", "an NVIDIA driver (580.95.05) but no CUDA toolkit"),
        (({**BOOKWORM, "python": "3.12"},), "auto", "/usr/bin/python3 is Python 3.12, and Debian 12 comes with 3.11"),
        (({**BOOKWORM, "os_version": "11"},), "auto", "the catalogue does not have debian-11"),
        (({**BOOKWORM, "arch": "aarch64"},), "auto", "horovod 0.28.1 needs arch x86_64 (built and ran there only)"),
    ],
)
def test_unsupported_nodes(probes: tuple[Mapping[str, str], ...], wanted: str, reason: str) -> None:
    with pytest.raises(FarandoleError) as refusal:
        solver.solve(Problem(load(), nodes.read(cluster(*probes)), Request(BOTH, accelerator=wanted)))
    assert reason in str(refusal.value)
