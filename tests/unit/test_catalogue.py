"""The catalogue is complete, and constraints, pins and frameworks are read correctly."""

from __future__ import annotations

import re

import pytest

from farandole.core.errors import FarandoleError
from farandole.stack.catalogue import allows, load

CATALOGUE = load()


@pytest.mark.parametrize(
    ("constraint", "version", "good"),
    [
        ("", "1.0", True),
        ("", "none", False),
        ("none", "none", True),
        ("none", "1.0", False),
        ("none | ==2.29.7", "none", True),
        ("none | ==2.29.7", "2.29.7", True),
        ("none | ==2.29.7", "2.30", False),
        ("11 | 12", "12", True),
        ("11 | 12", "13", False),
        (">=525.60.13", "580.95.05", True),
        (">=525.60.13", "none", False),
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.7.8-1+cuda10.1", "2.7.8-1+cuda10.1", True),
        ("debian-12", "debian-12", True),
    ],
)
def test_constraints(constraint: str, version: str, good: bool) -> None:
    assert allows(constraint, version) is good


def test_the_evidence_is_complete() -> None:
    for one in CATALOGUE.evidence:
        assert one.system in CATALOGUE.components["os"]
        assert {"gxx", "openmpi", "horovod"} < set(one.set)
        assert {"torch", "tensorflow"} & set(one.set)
        for name, version in one.set.items():
            assert not CATALOGUE.is_component(name) or version in CATALOGUE.components[name]


@pytest.mark.parametrize(
    ("one", "other", "good"),
    [
        ("==2.13.0", ">=2.11", True),
        ("==2.13.0+cpu", ">=2.11", True),
        (">=2.4,<2.16", ">=2.4,<2.16", True),
        ("<2.4", ">=2.4,<2.16", False),
        ("==1.7.1", "<1.8", True),
        ("<1.8", ">=1.8,<2.1", False),
    ],
)
def test_ranges(one: str, other: str, good: bool) -> None:
    assert allows(one, other) is good


@pytest.mark.parametrize("component", ["tensorflow", "torch"])
def test_the_ranges_of_a_package_have_neither_gaps_nor_overlaps(component: str) -> None:
    ranges = [row.version for row in CATALOGUE.rows(component)]
    for version in (
        "0.1",
        "1.7.1",
        "1.8",
        "2.0.1",
        "2.1",
        "2.3.1",
        "2.4",
        "2.10.0",
        "2.11",
        "2.13.0+cpu",
        "2.15.1",
        "3",
    ):
        assert [allows(f"=={version}", one) for one in ranges].count(True) == 1


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("numpy==2.4.6", ("numpy", "2.4.6")),
        (" tf_keras == 2.21.0 ", ("tf-keras", "2.21.0")),
        ("pytorch==2.13.0", ("torch", "2.13.0")),
        ("g++==7", ("gxx", "7")),
        ("nccl==2.7.8-1+cuda10.1", ("nccl", "2.7.8-1+cuda10.1")),
    ],
)
def test_pins(text: str, pin: tuple[str, str]) -> None:
    assert CATALOGUE.pin(text) == pin


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("numpy>=2", "'numpy>=2' is not a pin: write NAME==VERSION, for example numpy==2.4.6"),
        ("numpy", "'numpy' is not a pin"),
        ("", "'' is not a pin"),
        ("openmpi==4.1.9", "openmpi==4.1.9: the catalogue has no openmpi 4.1.9; it has 4.0.0"),
        ("g++==four", "g++==four: the catalogue has no g++ four"),
        ("numpy==two", "'numpy==two' is not a pin: two is no version of a package"),
        ("python==3.12", "python cannot be pinned: the nodes determine it"),
    ],
)
def test_bad_pins(text: str, words: str) -> None:
    with pytest.raises(FarandoleError, match=re.escape(words)):
        CATALOGUE.pin(text)


def test_bad_frameworks() -> None:
    with pytest.raises(FarandoleError, match=re.escape("there is no framework tensorflw (did you mean tensorflow?)")):
        CATALOGUE.check_frameworks(["tensorflw"])
    with pytest.raises(FarandoleError, match="no framework is requested"):
        CATALOGUE.check_frameworks([])
    assert CATALOGUE.check_frameworks(["pytorch", "tensorflow", "pytorch"]) == ("tensorflow", "pytorch")
