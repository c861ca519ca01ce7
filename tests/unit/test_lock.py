"""The lock file: equal on every machine, and refused if it was changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from farandole.core.errors import FarandoleError
from farandole.core.project import ROOT
from farandole.stack import lock as locks
from farandole.stack import nodes
from farandole.stack.catalogue import load
from farandole.stack.request import request

from .test_solver import BOOKWORM, BOTH, GPU, TRIXIE, cluster

NODES = nodes.read(cluster(BOOKWORM, BOOKWORM))
pytestmark = pytest.mark.usefixtures("small_index")


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return locks.make(NODES, request(BOTH, [], "auto"))


def test_a_lock_contains_everything_that_is_installed(made: dict[str, Any]) -> None:
    assert made["platform"] == {"os": "debian-12", "arch": "x86_64", "python": "3.11"}
    assert made["wanted"] == {
        **{"frameworks": ["tensorflow", "pytorch"], "pins": [], "accelerator": "cpu", "packages": []}
    }
    assert made["nccl"] is None
    assert made["openmpi"]["configure"] == load().data["openmpi_configure"]
    assert [source["file"] for source in made["openmpi"]["sources"]] == [
        *("openmpi-4.1.4.tar.bz2", "openmpi_4.1.4.orig.tar.xz")
    ]
    assert made["horovod"]["environment"] == {
        "HOROVOD_BUILD_ARCH_FLAGS": "-mavx -mf16c",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
    }
    wheels = [wheel["name"] for wheel in made["wheels"]]
    assert wheels == sorted(wheels)
    assert {"tensorflow-cpu", "torch", "tf-keras", "numpy"} < set(wheels)
    assert "tensorflow" not in wheels
    assert "horovod" not in wheels
    assert all(re.fullmatch("[0-9a-f]{64}", wheel["sha256"]) for wheel in made["wheels"])
    for name, folder in (("horovod", "horovod-0.28.1"), ("openmpi", "openmpi-4")):
        patches = sorted(path.name for path in (ROOT / "files/patches" / folder).glob("*.patch"))
        assert [patch["file"] for patch in made[name]["patches"]] == patches
    assert {*made["index"]["files"]} == {wheel["file"] for wheel in made["wheels"]}
    assert made["own"] == []
    assert set(made["why"]) >= {"openmpi", "torch", "numpy"}


def test_a_lock_for_gpus_names_the_nccl_debs() -> None:
    found = locks.make(nodes.read(cluster(GPU)), request(["pytorch"], [], "auto"))
    assert found["nccl"] == {"version": "2.29.7-1+cuda13.2"}
    assert found["wanted"]["accelerator"] == "cuda"
    assert found["horovod"]["environment"]["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert found["horovod"]["environment"]["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert [wheel["version"] for wheel in found["wheels"] if wheel["name"] == "torch"] == ["2.13.0"]


PANDAS, PANDAS_2 = ((("pandas", "stack_packages"),), (("pandas<3", "stack_packages"),))


def test_the_id_depends_only_on_the_content(made: dict[str, Any]) -> None:
    # Other host names, another order, pins from the command line: the same stack.
    other = nodes.read({f"gpu{number}": dict(BOOKWORM) for number in (7, 3, 1)})
    assert locks.make(other, request(["pytorch", "tensorflow"], [], "cpu"))["id"] == made["id"]
    assert locks.make(other, request(BOTH, ["numpy==2.3.4"], "auto"))["id"] != made["id"]
    assert (
        locks.make(other, request(BOTH, ["numpy==2.3.4"], "auto"))["id"]
        == locks.make(NODES, request(BOTH, [], "auto", ["numpy==2.3.4"]))["id"]
    )
    assert locks.make(NODES, request(BOTH, [], "auto"), ["--with-x"])["id"] != made["id"]


def test_a_written_lock_can_be_read(made: dict[str, Any], tmp_path: Path) -> None:
    path = locks.path_of(tmp_path)
    locks.write(path, made)
    first = path.read_bytes()
    assert locks.read(path) == made
    locks.write(path, locks.read(path))
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("numpy: 2.4.6", "numpy: 2.4.7", "was edited or damaged"),
        ("version: 2.13.0+cpu", "version: 2.13.1+cpu", "was edited or damaged"),
        ("format: 2", "format: 0", "has format 0, and this version reads formats 1 and 2"),
        ("nccl: null", "", "lacks nccl"),
        ("wanted:", "wanted", "is not YAML (line"),
    ],
)
def test_a_changed_lock_is_refused(made: dict[str, Any], tmp_path: Path, old: str, new: str, words: str) -> None:
    path = locks.path_of(tmp_path)
    locks.write(path, made)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(FarandoleError, match=re.escape(words)) as refusal:
        locks.read(path)
    assert f"make a new one: farandole lock -i {tmp_path}" in str(refusal.value)


def test_a_lock_of_a_newer_version_is_refused_with_its_name(made: dict[str, Any], tmp_path: Path) -> None:
    path = locks.path_of(tmp_path)
    locks.write(path, {**made, "format": 3, "farandole": "7.1.0"})
    with pytest.raises(FarandoleError, match=r"was written by farandole 7\.1\.0, a newer version than this one"):
        locks.read(path)


def test_a_lock_of_a_version_without_a_number_is_taken_as_it_is(made: dict[str, Any], tmp_path: Path) -> None:
    path = locks.path_of(tmp_path)
    locks.write(path, {key: value for key, value in made.items() if key != "farandole"})
    assert locks.read(path)["id"] == made["id"]


def test_a_lock_of_an_earlier_version_can_be_read(made: dict[str, Any], tmp_path: Path) -> None:
    path = locks.path_of(tmp_path)
    old = {key: value for key, value in made.items() if key not in locks.NOT_IN_1}
    old |= {"format": 1, "wanted": {key: value for key, value in made["wanted"].items() if key != "packages"}}
    locks.write(path, {**old, "id": locks.identity(old)})
    assert locks.read(path)["format"] == 1
    locks.check(path, locks.read(path), NODES, request(BOTH, [], "auto"))


def test_a_new_lock_keeps_what_the_former_one_decided() -> None:
    old = locks.make(NODES, request(BOTH, ["numpy==2.3.4"], "auto", packages=PANDAS_2))
    same = locks.make(NODES, request(BOTH, [], "auto", packages=PANDAS), known=locks.known_of(old, None))
    assert [same["versions"][name] for name in ("numpy", "pandas", "torch")] == ["2.3.4", "2.3.3", "2.13.0+cpu"]
    assert same["index"]["until"] == old["index"]["until"]
    one = locks.make(NODES, request(BOTH, [], "auto", packages=PANDAS), known=locks.known_of(old, ["pandas"]))
    assert [one["versions"][name] for name in ("numpy", "pandas")] == ["2.3.4", "3.1.1"]
    new = locks.make(NODES, request(BOTH, [], "auto", packages=PANDAS), known=locks.known_of(old, []))
    assert [new["versions"][name] for name in ("numpy", "pandas")] == ["2.4.6", "3.1.1"]
    assert new["own"] == ["pandas", "six"]
    with pytest.raises(FarandoleError, match=re.escape("--upgrade pandsa: the lock has no package of that name (did")):
        locks.known_of(old, ["pandsa"])


def test_the_places_of_the_files_are_no_part_of_the_id(made: dict[str, Any]) -> None:
    moved = {**made, "index": {"until": "", "files": {}}}
    assert locks.identity(moved) == made["id"]


def test_a_reason_may_be_edited(made: dict[str, Any], tmp_path: Path) -> None:
    path = locks.path_of(tmp_path)
    locks.write(path, {**made, "why": {"numpy": "because"}})
    assert locks.read(path)["why"] == {"numpy": "because"}


@pytest.mark.parametrize(
    ("probe", "frameworks", "pins", "configure", "words"),
    [
        (BOOKWORM, BOTH, [], [], ""),
        (TRIXIE, BOTH, [], [], "platform.os: the lock says debian-12, now it is debian-13"),
        (BOOKWORM, ["pytorch"], [], [], "frameworks: the lock says tensorflow, pytorch, now it is pytorch"),
        (GPU, BOTH, [], [], "accelerator: the lock says cpu, now it is cuda"),
        (BOOKWORM, BOTH, ["numpy==2.3.4"], [], "pin numpy==2.3.4: the lock was made without it"),
        (BOOKWORM, BOTH, [], ["--with-x"], "openmpi_configure: the lock says --enable-orterun-prefix-by-default"),
    ],
)
def test_a_lock_for_other_nodes_or_another_request_is_refused(
    made: dict[str, Any],
    tmp_path: Path,
    probe: dict[str, str],
    frameworks: list[str],
    pins: list[str],
    configure: list[str],
    words: str,
) -> None:
    found = nodes.read(cluster(probe))
    wanted = request(frameworks, pins, "auto")
    if not words:
        locks.check(tmp_path, made, found, wanted, configure)
        return
    with pytest.raises(FarandoleError, match=re.escape(words)) as refusal:
        locks.check(locks.path_of(tmp_path), made, found, wanted, configure)
    assert "Make a new one: farandole lock -i" in str(refusal.value)


def test_a_lock_with_command_line_pins_fits_an_inventory_without_pins(tmp_path: Path) -> None:
    found = locks.make(NODES, request(BOTH, [], "auto", ["numpy==2.3.4"]))
    assert found["wanted"]["pins"] == ["numpy==2.3.4"]
    assert "--want numpy==2.3.4" in found["why"]["numpy"]
    locks.check(tmp_path, found, NODES, request(BOTH, [], "auto"))


def test_the_changes_of_a_new_lock(made: dict[str, Any]) -> None:
    new = locks.make(NODES, request(["tensorflow"], ["numpy==2.3.4"], "auto"))
    assert "numpy: 2.4.6 -> 2.3.4" in locks.changes(made, new)
    assert "torch: 2.13.0+cpu -> none" in locks.changes(made, new)
    assert locks.changes(made, made) == []


def test_a_lock_has_one_line_per_version(made: dict[str, Any], tmp_path: Path) -> None:
    path = locks.path_of(tmp_path)
    locks.write(path, made)
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# The stack of this cluster")
    assert "  numpy: 2.4.6" in lines
    assert yaml.safe_load(path.read_text()) == made
