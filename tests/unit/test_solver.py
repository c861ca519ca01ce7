"""The versions chosen for different nodes and requests, and the refusals when none fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from farandole.errors import FarandoleError
from farandole.findings import some
from farandole.stack import nodes, solver
from farandole.stack.catalogue import load
from farandole.stack.request import request
from farandole.stack.solver import Problem, Request, Solution

BOOKWORM = {
    "os_id": "debian",
    "os_version": "12",
    "arch": "x86_64",
    "python": "3.11",
    "glibc": "2.36",
    "nvidia_driver": "",
    "cuda": "",
}
TRIXIE = {**BOOKWORM, "os_version": "13", "python": "3.13", "glibc": "2.41"}
GPU = {**BOOKWORM, "nvidia_driver": "580.95.05", "cuda": "13.0"}
BOTH = ("tensorflow", "pytorch")
MANUAL = ("openmpi==4.0.0", "nccl==2.7.8-1+cuda10.1", "cuda==10.1", "g++==7")


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
    return [solution.rows[name].version if name in solution.rows else "none" for name in names]


def test_both_frameworks_on_debian_12() -> None:
    found = solved(Request(BOTH))
    names = ("torch", "tensorflow", "tf-keras", "numpy", "protobuf", "openmpi", "gxx", "horovod", "cuda", "nccl")
    assert versions(found, *names) == [
        *("2.13.0+cpu", "2.21.0", "2.21.0", "2.4.6", "7.36.2", "4.1.4", "12", "0.28.1", "none", "none")
    ]
    assert "horovod 0.28.1 needs setuptools<81" in [need.short for need in found.needs["setuptools"]]
    assert not [name for name in found.rows if name.startswith("nvidia-")]


def test_tensorflow_alone_on_debian_13() -> None:
    found = solved(Request(("tensorflow",)), TRIXIE)
    assert versions(found, "torch", "tensorflow", "openmpi", "gxx") == ["none", "2.21.0", "4.1.4", "14"]


def test_torch_alone_includes_numpy() -> None:
    assert versions(solved(Request(("pytorch",))), "numpy", "tensorflow", "keras") == ["2.4.6", "none", "none"]


def test_torch_on_debian_13_is_refused() -> None:
    said = refused(Request(BOTH, inventory="inventory/mine"), TRIXIE)
    assert "no wheel for CPython 3.13" in said
    assert "PyPI's Linux wheels of torch are CUDA builds" in said
    assert "in the inventory: stack_frameworks: [tensorflow]" in said
    assert said.endswith("farandole lock -i inventory/mine --frameworks tensorflow")


def test_the_old_manuals_set_on_debian_12_is_refused_with_every_reason() -> None:
    said = refused(request(BOTH, (), "auto", MANUAL))
    for reason in (
        "no node has an NVIDIA driver and a CUDA toolkit",
        "CUDA 10.1 needs driver>=418.39 (the oldest driver that runs CUDA 10.1); but node-1, node-2: no driver",
        "CUDA 10.1 needs g++<=8 (nvcc 10.1 refuses newer host compilers); but Debian 12 has g++ 11 or 12",
        "tensorflow 2.3.1 needs Python<3.9 (its wheels end at CPython 3.8); but node-1, node-2: Python 3.11",
        "torch 1.6.0+cu101 needs Python<3.9",
        "NCCL 2.7.8-1+cuda10.1 needs CUDA==10.1 (the deb was built for it)",
        "g++ 7:\n   - Debian 12 has g++ 11 or 12",
    ):
        assert reason in said
    # Of all that, only OpenMPI 4.0.0 remains.
    assert said.endswith("farandole lock -i INVENTORY --want openmpi==4.0.0")
    assert solved(request(BOTH, (), "auto", ["openmpi==4.0.0"])).rows["openmpi"].version == "4.0.0"


def test_the_old_manuals_set_on_gpus_is_refused() -> None:
    said = refused(request(("pytorch",), MANUAL, "auto"), GPU)
    assert "no node has an NVIDIA driver" not in said
    assert "CUDA 10.1 needs g++<=8" in said
    assert "node-1: CUDA toolkit 13.0" in said
    assert 'in the inventory: stack_pins: ["openmpi==4.0.0"]' in said


def test_torch_on_gpus_matches_the_nccl_debs() -> None:
    found = solved(Request(("pytorch",)), GPU, GPU)
    assert versions(found, "torch", "cuda", "nccl", "nvidia-nccl-cu13", "nvidia-cudnn-cu13") == [
        *("2.13.0", "13.0", "2.29.7-1+cuda13.2", "2.29.7", "9.20.0.48")
    ]


def test_tensorflow_on_gpus_is_refused_with_the_reason() -> None:
    said = refused(Request(BOTH), GPU)
    assert "Horovod's GPU part was never built against TensorFlow 2.21" in said
    assert said.endswith("farandole lock -i INVENTORY --accelerator cpu")
    assert versions(solved(Request(BOTH, accelerator="cpu"), GPU), "torch", "cuda") == ["2.13.0+cpu", "none"]


def test_an_old_driver() -> None:
    said = refused(Request(("pytorch",), accelerator="cuda"), {**GPU, "nvidia_driver": "535.129.03"})
    assert (
        "CUDA 13.0 needs driver>=580.65.06 (the oldest driver that runs CUDA 13); but node-1: driver 535.129.03" in said
    )


def test_conflicting_pins() -> None:
    said = refused(request(BOTH, ["numpy==1.26.4"], "auto"))
    assert "ml-dtypes 0.6.0 needs numpy>=2.0.0; but stack_pins (numpy==1.26.4)" in said
    assert "tensorflow 2.15.1 needs no torch (Horovod was built for it alone" in said
    assert "in the inventory: stack_pins: []" in said


def test_a_pin_selects_the_older_set_around_it() -> None:
    found = solved(request(("tensorflow",), ["numpy==1.26.4"], "auto"))
    assert versions(found, "tensorflow", "keras", "tf-keras", "torch") == ["2.15.1", "2.15.0", "none", "none"]
    assert versions(solved(request(BOTH, ["numpy==2.3.4"], "auto")), "numpy", "tensorflow") == ["2.3.4", "2.21.0"]


def test_openmpi_5_is_refused_with_a_link_to_the_issue() -> None:
    assert "https://github.com/open-mpi/ompi/issues/12090" in refused(request(BOTH, ["openmpi==5.0.7"], "auto"))


def test_one_component_with_two_pins() -> None:
    with pytest.raises(FarandoleError, match=r"numpy is pinned to 2\.4\.6 and to 2\.3\.4: keep one of them"):
        request(BOTH, ["numpy==2.4.6"], "auto", ["numpy==2.3.4"])


def test_every_version_has_a_reason() -> None:
    resolved = problem(request(BOTH, ["numpy==2.3.4"], "auto"))
    reasons = solver.why(resolved, solver.solve(resolved))
    assert reasons["openmpi"].startswith(
        "every stack needs openmpi; horovod 0.28.1 needs openmpi<5; not 5.0.7: OpenMPI 5"
    )
    assert "not 2.4.6: stack_pins (numpy==2.3.4)" in reasons["numpy"]
    assert "not 14: Debian 12 has g++ 11 or 12" in reasons["gxx"]
    assert all(reasons.values())


@pytest.mark.parametrize(
    ("probes", "wanted", "words"),
    [
        ((), "auto", "preflight has not probed any node yet"),
        (
            (BOOKWORM, TRIXIE, BOOKWORM),
            "auto",
            "the nodes have 2 platforms (node-1, node-3: Debian 12, x86_64, Python",
        ),
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
def test_unsupported_nodes(probes: tuple[Mapping[str, str], ...], wanted: str, words: str) -> None:
    with pytest.raises(FarandoleError) as refusal:
        solver.solve(Problem(load(), nodes.read(cluster(*probes)), Request(BOTH, accelerator=wanted)))
    assert words in str(refusal.value)


def test_many_hosts_stay_readable() -> None:
    assert some([f"node-{n}" for n in range(9)]) == "node-0, node-1, node-2, node-3, node-4 and 4 more"
