"""The cache on real files: which keys are equal, and which files are valid."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from farandole.stack import cache
from farandole.stack.cache import Builds, Lock

from .stack import LOCK, changed, pack, pack_stack

NUMPY, TENSORFLOW, TORCH = range(3)
SAME, OTHER = True, False


@pytest.mark.parametrize(
    ("lock", "openmpi", "horovod"),
    [
        (changed("id", to="bbbb00000000"), SAME, SAME),
        # The order does not matter.
        (dict(reversed(changed("openmpi", to=dict(reversed(LOCK["openmpi"].items()))).items())), SAME, SAME),
        (changed("why", to={}), SAME, SAME),
        (changed("wanted", "pins", to=["numpy==2.4.6"]), SAME, SAME),
        (changed("wheels", NUMPY, "sha256", to="14"), SAME, SAME),
        (changed("versions", "numpy", to="2.3.4"), SAME, SAME),
        (changed("wheels", TORCH, "sha256", to="16"), SAME, OTHER),
        (changed("wheels", TENSORFLOW, "sha256", to="15"), SAME, OTHER),
        (changed("wheels", TENSORFLOW, "name", to="tensorflow"), SAME, OTHER),
        (changed("horovod", "patches", 0, "sha256", to="13"), SAME, OTHER),
        (changed("horovod", "environment", to={"HOROVOD_WITH_PYTORCH": "0"}), SAME, OTHER),
        (changed("nccl", to={"version": "2.27.3-1+cuda12.9"}), SAME, OTHER),
        (changed("versions", "cuda", to="12.9"), SAME, OTHER),
        (changed("openmpi", "configure", to=["--disable-mpi-fortran"]), OTHER, OTHER),
        (changed("openmpi", "patches", 0, "sha256", to="18"), OTHER, OTHER),
        (changed("openmpi", "recipe", to="0123456789ab"), OTHER, OTHER),
        (changed("horovod", "recipe", to="0123456789ab"), SAME, OTHER),
        (changed("openmpi", "sources", 0, "sha256", to="11"), SAME, SAME),
        (changed("versions", "gxx", to="14"), OTHER, OTHER),
        (changed("platform", "os", to="debian-13"), OTHER, OTHER),
        (changed("platform", "arch", to="aarch64"), OTHER, OTHER),
        (changed("platform", "python", to="3.13"), OTHER, OTHER),
    ],
)
def test_a_part_is_rebuilt_only_if_its_inputs_change(lock: Lock, openmpi: bool, horovod: bool) -> None:
    assert (cache.openmpi_key(lock) == cache.openmpi_key(LOCK)) is openmpi
    assert (cache.horovod_key(lock) == cache.horovod_key(LOCK)) is horovod


def test_each_part_has_its_own_file_name(tmp_path: Path) -> None:
    there = Builds(tmp_path)
    assert there.stack(LOCK) == tmp_path / "stacks/aaaa00000000.debian-12-x86_64.tar.zst"
    assert there.openmpi(LOCK) == tmp_path / f"parts/openmpi-4.1.4-{cache.openmpi_key(LOCK)}.tar.zst"
    assert there.horovod(LOCK) == tmp_path / f"parts/horovod-0.28.1-{cache.horovod_key(LOCK)}.tar.zst"


def test_the_cache_follows_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_root() == tmp_path / "farandole"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache.default_root() == Path("/home/ada/.cache/farandole")


def test_a_recorded_file_is_recalled(tmp_path: Path) -> None:
    built = pack(tmp_path / "a.tar.zst", "12345", lock={"id": "a"}, unpacked=7)
    assert cache.recall(built.path) == built
    assert cache.recall_whole(built.path) == built
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar.zst", "a.tar.zst.json"}
    own = {"path": str(built.path), "name": "a.tar.zst", "sha256": hashlib.sha256(b"12345").hexdigest(), "size": 5}
    assert built.describe() == {"lock": {"id": "a"}, "unpacked": 7, **own}


@pytest.mark.parametrize("left", ["", "a.tar.zst", "a.tar.zst.json", "half a record"])
def test_a_file_without_its_record_is_ignored(tmp_path: Path, left: str) -> None:
    built = pack(tmp_path / "a.tar.zst")
    for path in tmp_path.iterdir():
        if left == "half a record":
            cache.record_path(built.path).write_text('{"sha2')
        elif path.name != left:
            path.unlink()
    assert cache.recall(built.path) is None
    assert cache.recall_whole(built.path) is None


def test_a_damaged_file_is_deleted(tmp_path: Path) -> None:
    built = pack(tmp_path / "a.tar.zst", "whole")
    built.path.write_text("who")
    assert cache.recall(built.path) == built
    assert cache.recall_whole(built.path) is None
    assert not built.path.exists()
    assert cache.recall(built.path) is None


def test_only_complete_stacks_are_listed(tmp_path: Path) -> None:
    there = Builds(tmp_path)
    assert there.packed() == []
    first, second, gone, old = (pack_stack(there, f"{letter * 4}00000000") for letter in "bacd")
    gone.path.unlink()
    # Older versions packed archives without a list of their contents.
    cache.record(cache.Built(old.path, old.sha256, {"lock": LOCK, "unpacked": 1}))
    (there.stacks / ".eeee.tar.zst.json.0a1b2c3d").write_text("{")
    assert there.packed() == [second, first]
    assert there.known() == {"stacks/aaaa00000000": ["07"], "stacks/bbbb00000000": ["07"]}


def test_drafts_of_killed_runs_are_removed_but_not_those_in_use(tmp_path: Path) -> None:
    for name, age in (("killed", 90_000), ("in-use", 80_000)):
        (tmp_path / f".part-{name}").mkdir()
        (tmp_path / f".part-{name}/file").touch()
        then = time.time() - age
        os.utime(tmp_path / f".part-{name}", (then, then))
    with cache.draft_folder(tmp_path) as drafts:
        assert {path.name for path in tmp_path.iterdir()} == {".part-in-use", drafts.name}
    assert [path.name for path in tmp_path.iterdir()] == [".part-in-use"]
