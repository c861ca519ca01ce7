"""What the yardstick makes of its options, its images and its ranks. It is run for real by playbooks/validate.yml."""

from __future__ import annotations

import argparse
import array
import gzip
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .loading import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ddp", ROOT / "files" / "probes" / "ddp.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ddp = load()
TWO = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "4711"}


def options(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *given: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["ddp.py", *given])
    found: argparse.Namespace = ddp.arguments(environment)
    return found


def test_a_rank_knows_its_place() -> None:
    assert ddp.place(TWO) == (1, 2)
    assert ddp.place({}) == (0, 1)


def test_jobs_at_the_same_time_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [ddp.port({"PMIX_NAMESPACE": str(job)}) for job in range(1000, 1200)]
    assert all(20_000 <= one < 32_000 for one in ports)
    assert len(set(ports)) > 190
    found = options(monkeypatch, TWO, "--master", "node-1")
    assert (found.master, found.port) == ("node-1", ddp.port(TWO))
    assert options(monkeypatch, TWO, "--master", "node-1", "--port", "29500").port == 29500


@pytest.mark.parametrize(
    ("environment", "given", "words"),
    [
        (TWO, [], "--master is needed by more than one rank"),
        ({}, ["--steps", "5"], "--steps has to be more than 5"),
    ],
)
def test_options_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    given: list[str],
    words: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        options(monkeypatch, environment, *given)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_one_rank_needs_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options(monkeypatch, {}).batch_size == 128


def test_the_meter_leaves_the_beginning_out() -> None:
    meter = ddp.Meter()
    for _ in range(5):
        meter.step(1_000_000)
    assert meter.rate() == 0
    for _ in range(2):
        time.sleep(0.02)
        meter.step(10)
    assert meter.images == 20
    assert 100 < meter.rate() <= 500


def test_the_fingerprint_is_of_every_bit() -> None:
    one, other = array.array("f", [1, 2, 3]), array.array("f", [1, 2, 3])
    assert ddp.fingerprint([one, other]) == ddp.fingerprint([other, one])
    before = ddp.fingerprint([one])
    one[2] += 1e-6
    assert before != ddp.fingerprint([one])
    assert len(before) == 16


def idx(path: Path, shape: tuple[int, ...], content: bytes, kind: int = 8) -> None:
    head = bytes([0, 0, kind, len(shape)]) + b"".join(one.to_bytes(4, "big") for one in shape)
    path.write_bytes(gzip.compress(head + content))


def test_images_that_are_staged(tmp_path: Path) -> None:
    assert ddp.staged(tmp_path) is None
    idx(tmp_path / ddp.FILES[0], (2, 2, 2), bytes(range(8)))
    assert ddp.staged(tmp_path) is None
    idx(tmp_path / ddp.FILES[1], (2,), b"\1\2")
    assert ddp.staged(tmp_path) == [((2, 2, 2), bytes(range(8))), ((2,), b"\1\2")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"plain", "is damaged (Not a gzipped file (b'pl')); run site.yml"),
        (gzip.compress(b"\0"), "is damaged (unpack requires a buffer of 4 bytes); run site.yml"),
        (gzip.compress(b"\0\0\x08\1\0\0\0\3abc")[:-9], "is damaged (Compressed file ended before"),
        (gzip.compress(b"\0\0\x08\1\0\0\0\4abc"), "is damaged (no IDX file of bytes, or cut short); run site.yml"),
        (gzip.compress(b"\0\0\x09\1\0\0\0\3abc"), "is damaged (no IDX file of bytes, or cut short); run site.yml"),
    ],
)
def test_images_that_are_damaged(tmp_path: Path, content: bytes, words: str) -> None:
    for name in ddp.FILES:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match="train-images") as told:
        ddp.staged(tmp_path)
    assert words in str(told.value)


def rank(number: int, weights: str, loss: float = 0.5) -> dict[str, Any]:
    return {"rank": number, "host": f"node-{number + 1}", "weights": weights, "loss": loss}


def test_ranks_that_trained_together() -> None:
    assert list(ddp.judge([rank(0, "aa"), rank(1, "aa")])) == []


def test_ranks_that_did_not_are_told() -> None:
    assert list(ddp.judge([rank(0, "aa"), rank(1, "bb"), rank(2, "aa")])) == [
        "the weights differ: aa on node-1, node-3; bb on node-2"
    ]
    assert list(ddp.judge([rank(0, "aa"), rank(1, "aa", float("nan"))])) == ["the loss of rank 1 on node-2 is nan"]


def test_too_few_images_are_told() -> None:
    asked = argparse.Namespace(batch_size=64)
    assert ddp.short(128, asked, 2) == ""
    assert ddp.short(127, asked, 2) == "127 images are less than a batch of 64 for each of 2 ranks; see --images"


def test_what_is_wrong_is_in_the_line_and_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    own = rank(1, "aa")
    assert ddp.tell(own, [], here=True) == 0
    assert ddp.tell(own, ["no"], here=False) == 1
    assert ddp.tell(own, ["no"], here=True) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert all(line.startswith('{"rank"') for line in lines)
    assert [json.loads(line)["wrong"] for line in lines] == [[], ["no"], ["no"]]
    assert said.err == "node-2, rank 1: no\n"
