"""The catalogue is complete, and constraints, pins and frameworks are read correctly."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from farandole.errors import FarandoleError
from farandole.stack.catalogue import FACTS, Platform, Row, allows, load

BOOKWORM = Platform("debian-12", "x86_64", "3.11", "2.36")
TRIXIE = Platform("debian-13", "x86_64", "3.13", "2.41")
CATALOGUE = load()
ROWS = [row for component in CATALOGUE.components for row in CATALOGUE.rows(component)]


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


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_requirement_is_in_the_catalogue(row: Row) -> None:
    known = {*CATALOGUE.components, *FACTS}
    named = [need.component for need in row.needs(BOOKWORM)]
    named += [canonicalize_name(Requirement(text).name) for text in row.data.get("requires", ())]
    assert not set(named) - known


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_wheel], ids=str)
def test_every_wheel_matches_its_row_and_has_a_sha256(row: Row) -> None:
    for file, sha256 in row.data["files"].items():
        name, version, _, _ = parse_wheel_filename(file)
        assert (name, str(version)) == (canonicalize_name(row.distribution), row.version)
        assert re.fullmatch("[0-9a-f]{64}", sha256)


@pytest.mark.parametrize("row", CATALOGUE.rows("openmpi"), ids=str)
def test_every_openmpi_has_a_source_with_a_sha256(row: Row) -> None:
    for source in row.data["sources"]:
        assert row.version in source["file"]
        assert re.fullmatch("[0-9a-f]{64}", source["sha256"])


def test_the_evidence_refers_to_existing_rows() -> None:
    for one in CATALOGUE.data["evidence"]:
        assert one["system"] in CATALOGUE.components["os"]
        for component, version in one["set"].items():
            assert version in CATALOGUE.components[component]


def test_the_best_wheel_for_a_platform() -> None:
    numpy = CATALOGUE.row("numpy", "2.4.6")
    files = [found[0] for platform in (BOOKWORM, TRIXIE) if (found := numpy.wheel(platform))]
    assert ["cp311" in files[0], "cp313" in files[1]] == [True, True]
    assert CATALOGUE.row("torch", "2.13.0+cpu").wheel(TRIXIE) is None
    # A C library older than the wheel needs.
    assert numpy.wheel(Platform("debian-10", "x86_64", "3.11", "2.26")) is None
    # One wheel for all Pythons from 3.10 on, preferred over the pure Python one.
    assert "abi3-manylinux" in str(CATALOGUE.row("protobuf", "7.36.2").wheel(BOOKWORM))
    assert CATALOGUE.row("protobuf", "7.36.2").wheel(BOOKWORM) == CATALOGUE.row("protobuf", "7.36.2").wheel(TRIXIE)


def test_environment_markers_are_evaluated_for_the_nodes() -> None:
    row = CATALOGUE.row("ml-dtypes", "0.6.0")
    needs = {platform.python: {str(need) for need in row.needs(platform)} for platform in (BOOKWORM, TRIXIE)}
    assert "ml-dtypes 0.6.0 needs numpy>=2.1.0" not in needs["3.11"]
    assert "ml-dtypes 0.6.0 needs numpy>=2.1.0" in needs["3.13"]


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
        ("nunpy==2.4.6", "the catalogue has no component nunpy (did you mean numpy?)"),
        ("numpy==9.9", "numpy==9.9: the catalogue has no numpy 9.9; it has 1.26.4, 2.2.6, 2.3.4, 2.4.6"),
        ("numpy==two", "numpy==two: the catalogue has no numpy two"),
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
