"""The catalogue is complete, and constraints, pins and frameworks are read correctly."""

import re

import pytest

from farandole.core.errors import FarandoleError
from farandole.stack.catalogue import Catalogue, Evidence, allows, load

CATALOGUE = load()


@pytest.mark.parametrize(
    ("constraint", "fitting", "others"),
    [
        ("", "1.0", "none"),
        ("none", "none", "1.0"),
        ("none | ==2.29.7", "none 2.29.7", "2.30"),
        ("11 | 12", "12", "13"),
        (">=525.60.13", "580.95.05", "none"),
        ("==2.13.0", "2.13.0+cpu >=2.11", ""),
        ("==2.13.0+cpu", ">=2.11", ""),
        ("==2.7.8-1+cuda10.1", "2.7.8-1+cuda10.1", ""),
        ("debian-12", "debian-12", ""),
        (">=2.4,<2.16", ">=2.4,<2.16", ""),
        ("<2.4", "", ">=2.4,<2.16"),
        ("==1.7.1", "<1.8", ""),
        ("<1.8", "", ">=1.8,<2.1"),
    ],
)
def test_constraints(constraint: str, fitting: str, others: str) -> None:
    versions = [*fitting.split(), *others.split()]
    assert [version for version in versions if allows(constraint, version)] == fitting.split()


def test_the_evidence_is_complete() -> None:
    for proof in CATALOGUE.evidence:
        assert proof.system in CATALOGUE.components["os"]
        assert {"gxx", "openmpi", "horovod"} < set(proof.set)
        assert {"torch", "tensorflow"} & set(proof.set)
        for name, version in proof.set.items():
            assert not CATALOGUE.is_component(name) or version in CATALOGUE.components[name]


@pytest.mark.parametrize("component", ["tensorflow", "torch"])
def test_the_ranges_of_a_package_have_neither_gaps_nor_overlaps(component: str) -> None:
    ranges = [row.version for row in CATALOGUE.rows(component)]
    for version in ("0.1", "1.7.1", "1.8", "2.0.1", "2.1", "2.3.1", "2.4", "2.10.0", "2.11", "2.13.0+cpu", "3"):
        assert [allows(f"=={version}", wanted) for wanted in ranges].count(True) == 1


def test_pins() -> None:
    pins = {
        "numpy==2.4.6": ("numpy", "2.4.6"),
        " tf_keras == 2.21.0 ": ("tf-keras", "2.21.0"),
        "pytorch==2.13.0": ("torch", "2.13.0"),
        "g++==7": ("gxx", "7"),
        "nccl==2.7.8-1+cuda10.1": ("nccl", "2.7.8-1+cuda10.1"),
    }
    assert {text: CATALOGUE.pin(text) for text in pins} == pins


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("numpy>=2", "'numpy>=2' is not a pin: write NAME==VERSION"),
        ("numpy", "'numpy' is not a pin"),
        ("", "'' is not a pin"),
        ("openmpi==4.1.9", "openmpi==4.1.9: the catalogue has no openmpi 4.1.9; it has 4.0.0"),
        ("g++==four", "g++==four: the catalogue has no g++ four"),
        ("numpy==two", "'numpy==two' is not a pin: two is not a package version"),
        ("python==3.12", "python cannot be pinned"),
    ],
)
def test_bad_pins(text: str, message: str) -> None:
    with pytest.raises(FarandoleError, match=re.escape(message)):
        CATALOGUE.pin(text)


def test_frameworks() -> None:
    assert CATALOGUE.check_frameworks(["pytorch", "tensorflow", "pytorch"]) == ("tensorflow", "pytorch")
    for names, message in ((["tensorflw"], r"did you mean tensorflow\?"), ([], "no framework is requested")):
        with pytest.raises(FarandoleError, match=message):
            CATALOGUE.check_frameworks(names)


def test_a_set_ran_only_if_its_frameworks_and_its_cuda_did() -> None:
    base = {"openmpi": "4.1.4", "numpy": "2.5.5"}
    torch, both = {**base, "torch": "2.13.0"}, {**base, "torch": "2.13.0", "tensorflow": "2.21.0"}
    cuda = {"cuda": "13.0"}
    rows = [
        Evidence("debian-13", works=True, ran=ran, set=own, others=others)
        for ran, own, others in (("torch", torch, {}), ("torch on GPUs", torch, cuda), ("both", both, {}))
    ]

    def seen(versions: dict[str, str], *runs: Evidence) -> str | None:
        found = Catalogue(CATALOGUE.data, runs).seen(versions, "debian-13")
        return found.ran if found else None

    assert seen({**torch, "cuda": "none", "six": "1.17.0"}, *rows) == "torch"
    assert seen({**torch, **cuda}, *rows) == "torch on GPUs"
    assert seen({**both, "cuda": "none"}, *rows) == "both"
    assert seen({**both, "cuda": "none"}, *rows[:2]) is None
    assert seen({**both, **cuda}, *rows) is None
    assert seen({**torch, "cuda": "none"}, *rows[1:]) is None
