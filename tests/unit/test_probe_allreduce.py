"""What the job that proves itself makes of its ranks. It is run for real by playbooks/validate.yml."""

from __future__ import annotations

import argparse
import importlib.util
from types import ModuleType
from typing import Any

import pytest

from .loading import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("allreduce", ROOT / "files" / "probes" / "allreduce.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


allreduce = load()


def rank(host: str, **other: str) -> dict[str, str]:
    return {"host": host, "machine": f"id-of-{host}", "stack": "0a", "python": "/p", "version": "2", **other}


def judged(*ranks: dict[str, str], expect: int | None = 2, hosts: int | None = 2) -> list[str]:
    found: Any = allreduce.judge(ranks, argparse.Namespace(expect=expect, expect_hosts=hosts))
    return list(found)


def test_a_job_that_is_as_it_was_asked_for() -> None:
    assert judged(rank("a"), rank("b")) == []
    assert judged(rank("a"), rank("a"), hosts=1) == []
    assert judged(rank("a"), rank("a"), rank("b"), expect=None, hosts=None) == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([rank("a")], "1 of 2 ranks are in this job, a job of its own; launch it with /usr/local/bin/horovodrun"),
        ([rank("a"), rank("b"), rank("b")], "3 of 2 ranks are in this job; launch"),
        ([rank("a"), rank("a")], "the ranks are on 1 of 2 machines: a; correct -H"),
        ([rank("a"), rank("b", machine="id-of-a")], "the ranks are on 1 of 2 machines: a, b; "),
        ([rank("a"), rank("b", stack="1b")], "not the same stack on all ranks: 0a on a; 1b on b; run site.yml"),
        ([rank("a"), rank("b", stack="")], "not the same stack on all ranks: 0a on a; none on b"),
        ([rank("a"), rank("b", python="/q")], "not the same python on all ranks: /p on a; /q on b"),
        ([rank("a"), rank("b", version="3")], "not the same version on all ranks: 2 on a; 3 on b"),
    ],
)
def test_what_is_wrong_is_said_with_what_mends_it(ranks: list[dict[str, str]], words: str) -> None:
    assert words in judged(*ranks)[0]
