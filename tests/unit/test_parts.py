"""The parts of a lock give what pip and the roles expect."""

import json
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.stack import parts
from farandole.stack.collect import inspect

from .stack import LOCK, changed, layered


def test_parts_have_the_names_that_pip_and_the_depot_expect() -> None:
    files = parts.stack_cached(LOCK["wheels"], "/cache")
    assert files[0] == {"path": "/cache/wheels/numpy-2.4.6.whl", "name": "numpy-2.4.6.whl", "sha256": "04"}
    assert [file["sha256"] for file in files] == ["04", "05", "06"]
    assert parts.stack_cached(LOCK["wheels"], "~/c")[0]["path"] == str(Path.home() / "c/wheels/numpy-2.4.6.whl")
    assert parts.stack_patches(LOCK["horovod"]["patches"], "/repo/patches") == [
        {"path": "/repo/patches/01-one.patch", "name": "01-one.patch", "sha256": "03"}
    ]
    names = ("numpy==2.4.6", "tensorflow-cpu==2.21.0", "torch==2.13.0")
    assert parts.stack_requirements(LOCK["wheels"]).splitlines() == [
        f"{name} --hash=sha256:{digest}" for name, digest in zip(names, ("04", "05", "06"), strict=True)
    ]
    whole = {"name": "a.tar.zst", "path": "/b/stacks/a.tar.zst", "sha256": "01"}
    changes = {**whole, "path": "/b/changes/a.tar.zst", "sha256": "02"}
    installs: list[dict[str, Any]] = [{"archive": None}, {"archive": changes, "whole": whole}]
    assert parts.stack_archives(installs) == [
        {**changes, "name": "changes/a.tar.zst"}, {**whole, "name": "stacks/a.tar.zst"},
    ]  # fmt: skip


def test_the_modules_of_a_stack_follow_its_frameworks() -> None:
    assert parts.stack_modules(LOCK) == ["horovod.tensorflow", "horovod.torch"]
    assert parts.stack_modules(changed("wanted", "frameworks", to=["pytorch"])) == ["horovod.torch"]
    # As after a rollback to a stack whose lock is unknown.
    assert parts.stack_modules({"id": LOCK["id"]}) == []


def wheel(cache: Path, file: str, names: Iterable[str]) -> None:
    (cache / "wheels").mkdir(parents=True, exist_ok=True)
    with ZipFile(cache / "wheels" / file, "w") as packed:
        for name in names:
            packed.writestr(name, "")


def test_the_packages_that_the_user_asked_for_must_load_too(tmp_path: Path) -> None:
    lock = layered("pandas")
    assert parts.stack_modules(lock, str(tmp_path)) == parts.stack_modules(LOCK)
    wheel(tmp_path, "pandas-3.0.whl", ["pandas/__init__.py"])
    assert parts.stack_modules(lock, str(tmp_path)) == [*parts.stack_modules(LOCK), "pandas"]
    assert parts.stack_modules(lock) == parts.stack_modules(LOCK)
    # What only a package of the user's needs is loaded by that one, or not at all.
    wheel(tmp_path, "tzdata-1.whl", ["tzdata/__init__.py"])
    more = {**lock, "wheels": [*lock["wheels"], {"name": "tzdata", "file": "tzdata-1.whl"}]}
    more["own"] = ["pandas", "tzdata"]
    assert parts.stack_modules(more, str(tmp_path))[-1] == "pandas"


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        (["pandas/__init__.py", "pandas/core/__init__.py", "pandas-3.dist-info/METADATA"], {"pandas"}),
        (["six.py", "_cffi.cpython-311-x86_64-linux-gnu.so", "fast.abi3.so"], {"six", "fast"}),
        (["google/cloud/storage/__init__.py", "google/cloud/storage/a.py"], {"google.cloud.storage"}),
        (["a/__init__.py", "tests/__init__.py", "docs/conf.py", "_private/__init__.py"], {"a"}),
        (["a-1.data/scripts/run.py", "requests-stubs/__init__.pyi", "bin/x.py"], set()),
    ],
)
def test_what_a_script_imports_of_a_wheel(files: list[str], modules: set[str]) -> None:
    assert parts.importable(files) == modules


@pytest.mark.parametrize(
    "library", ["mpi4py.libs/libmpi-3cf288f2.so.40.30.1", "a/lib/libmpi.so", "nvidia/nccl/lib/libnccl.so.2"]
)
def test_a_package_with_an_mpi_or_nccl_of_its_own_is_refused(tmp_path: Path, library: str) -> None:
    lock, said = layered("pandas"), list[str]()
    wheel(tmp_path, "pandas-3.0.whl", ["pandas/__init__.py", "pandas/libmpfr.so.6", "pandas/mylibmpi.so"])
    file = tmp_path / "wheels/pandas-3.0.whl"
    lock["wheels"][-1]["sha256"] = sha256(file)
    inspect(lock, tmp_path, said.append)
    wheel(tmp_path, "pandas-3.0.whl", ["pandas/__init__.py", library])
    lock["wheels"][-1]["sha256"] = sha256(file)
    with pytest.raises(FarandoleError, match=f"stack_packages: pandas 3.0 contains {library}. .* nothing was changed"):
        inspect(lock, tmp_path, said.append)
    assert said == []


PACKED = {
    "sha256": "ab" * 32,
    "unpacked": 2 << 30,
    "stack": "cd" * 32,
    "mpi": "ef" * 32,
    "changes": {"sha256": "", "former": ""},
}


def packed(**changes: object) -> str:
    return b64encode(json.dumps({**PACKED, **changes}).encode()).decode()


def test_a_packed_stack_is_recorded_with_the_contents_of_both_trees() -> None:
    assert parts.stack_packed(packed(), "aaaa", "bbbb") == {
        "sha256": "ab" * 32,
        "about": {"unpacked": 2 << 30, "contents": {"stacks/aaaa": "cd" * 32, "mpi/bbbb": "ef" * 32}},
        "changes": {"sha256": "", "former": ""},
    }


@pytest.mark.parametrize(
    "answer",
    [
        packed(unpacked=1 << 41), packed(unpacked="1"), packed(stack="{{ x }}"), packed(sha256=["ab" * 32]),
        packed(more=1), "e30=", "/w==", "x", "",
    ],
    ids=["large", "text", "template", "list", "more", "empty", "no text", "no base64", "nothing"],
)  # fmt: skip
def test_another_description_of_a_packed_stack_is_refused(answer: str) -> None:
    with pytest.raises(FarandoleError, match="no valid description of the stack that it packed: "):
        parts.stack_packed(answer, "aaaa", "bbbb")
