"""The parts of a lock give what pip and the roles expect."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

from farandole.errors import FarandoleError
from farandole.stack import parts

from .stack import LOCK, changed


def test_wheels_are_files_in_the_cache() -> None:
    files = parts.stack_wheels(LOCK["wheels"], "/cache")
    assert files[0] == {"path": "/cache/wheels/numpy-2.4.6.whl", "name": "numpy-2.4.6.whl", "sha256": "04"}
    assert [file["sha256"] for file in files] == ["04", "05", "06"]
    assert parts.stack_wheels(LOCK["wheels"], "~/c")[0]["path"] == str(Path.home() / "c/wheels/numpy-2.4.6.whl")


def test_patches_are_files_in_the_repository() -> None:
    assert parts.stack_patches(LOCK["horovod"]["patches"], "/repo/patches") == [
        {"path": "/repo/patches/01-one.patch", "name": "01-one.patch", "sha256": "03"}
    ]


def test_requirements_name_one_version_and_one_hash() -> None:
    assert parts.stack_requirements(LOCK["wheels"]).splitlines() == [
        "numpy==2.4.6 --hash=sha256:04",
        "tensorflow-cpu==2.21.0 --hash=sha256:05",
        "torch==2.13.0 --hash=sha256:06",
    ]


def test_the_modules_of_a_stack_follow_its_frameworks() -> None:
    assert parts.stack_modules(LOCK) == ["horovod.tensorflow", "horovod.torch"]
    assert parts.stack_modules(changed("wanted", "frameworks", to=["pytorch"])) == ["horovod.torch"]
    # As after a rollback to a stack whose lock is unknown.
    assert parts.stack_modules({"id": LOCK["id"]}) == []


PACKED = {"sha256": "ab" * 32, "unpacked": 2 << 30, "stack": "cd" * 32, "mpi": "ef" * 32}


def packed(**changes: object) -> str:
    return b64encode(json.dumps({**PACKED, **changes}).encode()).decode()


def test_a_packed_stack_is_recorded_with_the_contents_of_both_trees() -> None:
    assert parts.stack_packed(packed(), "aaaa", "bbbb") == {
        "sha256": "ab" * 32,
        "about": {"unpacked": 2 << 30, "contents": {"stacks/aaaa": "cd" * 32, "mpi/bbbb": "ef" * 32}},
    }


@pytest.mark.parametrize(
    "answer",
    [
        packed(unpacked=1 << 41),
        packed(unpacked="1"),
        packed(stack="{{ x }}"),
        packed(sha256=["ab" * 32]),
        packed(more=1),
        "e30=",
        "/w==",
        "x",
        "",
    ],
    ids=["large", "text", "template", "list", "more", "empty", "no text", "no base64", "nothing"],
)
def test_another_description_of_a_packed_stack_is_refused(answer: str) -> None:
    with pytest.raises(FarandoleError, match="no valid description of the stack that it packed: "):
        parts.stack_packed(answer, "aaaa", "bbbb")
