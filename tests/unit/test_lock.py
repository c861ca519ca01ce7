"""The lock file: equal on every machine, and refused if it was changed."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from farandole.core.errors import FarandoleError
from farandole.core.project import ROOT
from farandole.stack import lock as locks
from farandole.stack import making, nodes
from farandole.stack.catalogue import load
from farandole.stack.problem import request

from .test_solver import BOOKWORM, BOTH, GPU, TRIXIE, cluster

NODES = nodes.read(cluster(BOOKWORM, BOOKWORM))
KEPT, PATCHED = ROOT / "tests/unit/locks/pytorch.lock", ("openmpi", "horovod")
pytestmark = pytest.mark.usefixtures("small_index")


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return making.make(NODES, request(BOTH, [], "auto"))


def test_a_lock_contains_everything_that_is_installed(made: dict[str, Any]) -> None:
    assert made["platform"] == {"os": "debian-12", "arch": "x86_64", "python": "3.11"}
    wanted = {"frameworks": ["tensorflow", "pytorch"], "pins": [], "accelerator": "cpu", "packages": []}
    assert made["wanted"] == wanted
    assert made["nccl"] is None
    assert made["openmpi"]["configure"] == load().data["openmpi_configure"]
    archives = ["openmpi-4.1.4.tar.bz2", "openmpi_4.1.4.orig.tar.xz"]
    assert [source["file"] for source in made["openmpi"]["sources"]] == archives
    switches = ("OUT_MXNET", "_GLOO", "_MPI", "_PYTORCH", "_TENSORFLOW")
    flags = {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx -mf16c"} | {f"HOROVOD_WITH{switch}": "1" for switch in switches}
    assert made["horovod"]["environment"] == flags
    wheels = [wheel["name"] for wheel in made["wheels"]]
    assert wheels == sorted(wheels)
    assert {"tensorflow-cpu", "torch", "tf-keras", "numpy"} < set(wheels)
    assert not {"tensorflow", "horovod"} & set(wheels)
    assert all(re.fullmatch("[0-9a-f]{64}", wheel["sha256"]) for wheel in made["wheels"])
    for name, folder in (("horovod", "horovod-0.28.1"), ("openmpi", "openmpi-4")):
        patches = sorted(path.name for path in (ROOT / "files/patches" / folder).glob("*.patch"))
        assert [patch["file"] for patch in made[name]["patches"]] == patches
    assert {*made["index"]["files"]} == {wheel["file"] for wheel in made["wheels"]}
    assert made["own"] == []
    assert set(made["why"]) >= {"openmpi", "torch", "numpy"}
    # One line per version, so that a change of one is a change of one line.
    assert "  numpy: 2.4.6" in locks.text(made).splitlines()
    assert yaml.safe_load(locks.text(made)) == made


def test_a_lock_for_gpus_names_the_nccl_debs() -> None:
    lock = making.make(nodes.read(cluster(GPU)), request(["pytorch"], [], "auto"))
    assert lock["nccl"] == {"version": "2.29.7-1+cuda13.2"}
    assert lock["wanted"]["accelerator"] == "cuda"
    assert lock["horovod"]["environment"]["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert lock["horovod"]["environment"]["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert [wheel["version"] for wheel in lock["wheels"] if wheel["name"] == "torch"] == ["2.13.0"]


PANDAS, PANDAS_2 = ((("pandas", "stack_packages"),), (("pandas<3", "stack_packages"),))


def test_the_id_depends_only_on_the_content(made: dict[str, Any]) -> None:
    # Other host names, another order, pins from the command line: the same stack.
    other = nodes.read({f"gpu{number}": dict(BOOKWORM) for number in (7, 3, 1)})
    assert making.make(other, request(["pytorch", "tensorflow"], [], "cpu"))["id"] == made["id"]
    assert making.make(other, request(BOTH, ["numpy==2.3.4"], "auto"))["id"] != made["id"]
    assert (
        making.make(other, request(BOTH, ["numpy==2.3.4"], "auto"))["id"]
        == making.make(NODES, request(BOTH, [], "auto", ["numpy==2.3.4"]))["id"]
    )
    assert making.make(NODES, request(BOTH, [], "auto"), ["--with-x"])["id"] != made["id"]


@pytest.mark.parametrize("role", ["openmpi", "horovod"])
def test_the_id_depends_on_how_a_part_is_compiled(
    role: str, made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("files/patches", "roles/openmpi/files", "roles/horovod/files"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(making, "ROOT", tmp_path)
    script = tmp_path / f"roles/{role}/files/build.sh"
    ids = []
    for line in ("# A comment.", "make distclean"):
        script.write_text(f"{script.read_text()}{line}\n")
        ids.append(making.make(NODES, request(BOTH, [], "auto"))["id"])
    assert ids[0] == made["id"] != ids[1]


@pytest.fixture
def path(made: dict[str, Any], tmp_path: Path) -> Path:
    """A lock that was written."""
    place = locks.path_of(tmp_path)
    locks.write(place, made)
    return place


def test_a_written_lock_can_be_read(made: dict[str, Any], path: Path) -> None:
    first = path.read_bytes()
    assert locks.read(path) == made
    locks.write(path, locks.read(path))
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]
    # Neither a reason nor where its files are is a part of it; who wrote it may be unknown.
    other = {key: value for key, value in made.items() if key != "farandole"}
    other |= {"why": {"numpy": "because"}, "index": {"until": "", "files": {}}}
    locks.write(path, other)
    assert locks.read(path) == other


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("numpy: 2.4.6", "numpy: 2.4.7", "was edited or damaged"),
        ("version: 2.13.0+cpu", "version: 2.13.1+cpu", "was edited or damaged"),
        ("format: 2", "format: 0", "has format 0, and this version reads formats 1 and 2"),
        ("format: 2", "format: 3\nfarandole: 7.1.0", "was written by farandole 7.1.0, a newer version than this one"),
        ("nccl: null", "", "lacks nccl"),
        ("wanted:", "wanted", "is not YAML (line"),
    ],
)
def test_a_changed_lock_or_one_of_a_newer_version_is_refused(path: Path, old: str, new: str, reason: str) -> None:
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("farandole:"))
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(FarandoleError, match=re.escape(reason)) as refusal:
        locks.read(path)
    assert f"farandole lock -i {path.parent}" in str(refusal.value) or "newer" in reason


def test_a_lock_of_an_earlier_version_can_be_read(made: dict[str, Any], path: Path) -> None:
    old = {key: value for key, value in made.items() if key not in locks.NOT_IN_1}
    old |= {"format": 1, "wanted": {key: value for key, value in made["wanted"].items() if key != "packages"}}
    locks.write(path, {**old, "id": locks.identity(old)})
    assert locks.read(path)["format"] == 1
    locks.check(path, locks.read(path), NODES, request(BOTH, [], "auto"))


def test_a_lock_of_november_2026_is_taken_as_it_is_and_made_again() -> None:
    old, wanted = locks.read(KEPT), request(["pytorch"], [], "auto")
    locks.check(KEPT, old, NODES, wanted)
    new = making.make(NODES, wanted)
    del new["farandole"], new["openmpi"]["recipe"], new["horovod"]["recipe"]
    # Patches may change, and this index is in another place each time.
    new |= {"index": old["index"], **{name: {**new[name], "patches": old[name]["patches"]} for name in PATCHED}}
    assert locks.text({**new, "id": locks.identity(new)}) == KEPT.read_text()


def test_a_new_lock_keeps_what_the_former_one_decided() -> None:
    old = making.make(NODES, request(BOTH, ["numpy==2.3.4"], "auto", packages=PANDAS_2))
    same = making.make(NODES, request(BOTH, [], "auto", packages=PANDAS), known=making.known_of(old, None))
    assert [same["versions"][name] for name in ("numpy", "pandas", "torch")] == ["2.3.4", "2.3.3", "2.13.0+cpu"]
    assert same["index"]["until"] == old["index"]["until"]
    upgraded = making.make(NODES, request(BOTH, [], "auto", packages=PANDAS), known=making.known_of(old, ["pandas"]))
    assert [upgraded["versions"][name] for name in ("numpy", "pandas")] == ["2.3.4", "3.1.1"]
    new = making.make(NODES, request(BOTH, [], "auto", packages=PANDAS), known=making.known_of(old, []))
    assert [new["versions"][name] for name in ("numpy", "pandas")] == ["2.4.6", "3.1.1"]
    assert new["own"] == ["pandas", "six"]
    with pytest.raises(FarandoleError, match=re.escape("--upgrade pandsa: the lock has no package of that name (did")):
        making.known_of(old, ["pandsa"])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"probe": TRIXIE}, "platform.os: the lock says debian-12, now it is debian-13"),
        ({"frameworks": ["pytorch"]}, "frameworks: the lock says tensorflow, pytorch, now it is pytorch"),
        ({"probe": GPU}, "accelerator: the lock says cpu, now it is cuda"),
        ({"pins": ["numpy==2.3.4"]}, "pin numpy==2.3.4: the lock was made without it"),
        ({"configure": ["--with-x"]}, "openmpi_configure: the lock says --enable-orterun-prefix-by-default"),
    ],
)
def test_a_lock_for_other_nodes_or_another_request_is_refused(
    made: dict[str, Any], path: Path, changed: dict[str, Any], reason: str
) -> None:
    def check(probe: Any = BOOKWORM, frameworks: Any = BOTH, pins: Any = (), configure: Any = ()) -> None:
        locks.check(path, made, nodes.read(cluster(probe)), request(frameworks, [*pins], "auto"), [*configure])

    check()
    with pytest.raises(FarandoleError, match=re.escape(reason)) as refusal:
        check(**changed)
    assert f"farandole lock -i {path.parent}" in str(refusal.value)


def test_a_lock_with_command_line_pins_fits_an_inventory_without_pins(tmp_path: Path) -> None:
    lock = making.make(NODES, request(BOTH, [], "auto", ["numpy==2.3.4"]))
    assert lock["wanted"]["pins"] == ["numpy==2.3.4"]
    assert "--want numpy==2.3.4" in lock["why"]["numpy"]
    locks.check(tmp_path, lock, NODES, request(BOTH, [], "auto"))


def test_the_changes_of_a_new_lock(made: dict[str, Any]) -> None:
    new = making.make(NODES, request(["tensorflow"], ["numpy==2.3.4"], "auto"))
    assert "numpy: 2.4.6 -> 2.3.4" in locks.changes(made, new)
    assert "torch: 2.13.0+cpu -> none" in locks.changes(made, new)
    assert locks.changes(made, made) == []
