"""The samples' data, from a real site and package index that are up, damaged or silent."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.core import fetching
from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.stack import dataset
from farandole.stack.dataset import Data

from .loading import load
from .stack import Endless, Quiet, Silent, Stalls, Truncates, dead_url, run_action, served

NAMES = [
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
]
WHEEL = "scikit_learn-1.0-py3-none-any.whl"
MEMBER = "sklearn/datasets/data/digits.csv.gz"
DIGITS = "digits of scikit-learn 1.0, scaled to 28x28"


def write_wheel(folder: Path, csv: bytes) -> Path:
    """A wheel like scikit-learn's, as far as it is read."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "scikit_learn-1.0.dist-info"
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        MEMBER: csv,
    }
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return folder / WHEEL


def csv(count: int = 20) -> bytes:
    """Write a table of digits; a digit's pixels have its number as their brightness."""
    lines = (",".join([str(place % 10)] * 64 + [str(place % 10)]) for place in range(count))
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)


class World:
    """A site with an MNIST of a few bytes, a package index with digits, and a cache."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.cache, self.site, self.index = root, root / "cache", root / "site", root / "simple"
        self.folder, self.said = self.cache / "data", list[str]()
        self.site.mkdir()
        for name in NAMES:
            (self.site / name).write_bytes(name.encode())
        wheel = write_wheel(self.index / "scikit-learn", csv())
        self.facts: dict[str, Any] = {
            "mnist": {"sites": [f"{url}/site/"], "files": {name: sha256(self.site / name) for name in NAMES}},
            "digits": {
                "python": "3.11",
                "wheel": {"name": "scikit-learn", "version": "1.0", "file": WHEEL, "sha256": sha256(wheel)},
                "member": MEMBER,
                "sha256": hashlib.sha256(csv()).hexdigest(),
            },
        }

    def bring(self, requested: str = "auto") -> Data:
        return dataset.provide(requested, self.cache, self.said.append, self.facts)

    def refused(self, requested: str = "auto") -> str:
        with pytest.raises(FarandoleError) as refusal:
            self.bring(requested)
        return str(refusal.value)

    def sites(self, *urls: str) -> None:
        self.facts["mnist"]["sites"] = [f"{url}/" for url in urls]

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with served(tmp_path) as url:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1")
        yield World(tmp_path, url)


def members(data: Data) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.folder.iterdir()}


def as_set(name: str) -> list[str]:
    """The files of a data set in the cache."""
    return [name, f"{name}.json", *(f"{name}/{file}" for file in ["SOURCE", *NAMES])]


MNIST_THERE = sorted([*NAMES, *as_set("mnist")])
DIGITS_THERE = sorted(["digits.csv.gz", *as_set("digits")])


# MNIST


def test_mnist_is_fetched_once(world: World) -> None:
    built = world.bring()
    assert members(built) == {**{name: name.encode() for name in NAMES}, "SOURCE": b"MNIST\n"}
    assert built.files == {name: sha256(built.folder / name) for name in members(built)}
    assert world.files() == MNIST_THERE
    world.said.clear()
    world.sites(dead_url())
    assert world.bring() == world.bring("mnist") == built
    assert world.said == []


def test_the_second_site_is_used_when_the_first_is_down(world: World) -> None:
    world.sites(dead_url(), *(site.rstrip("/") for site in world.facts["mnist"]["sites"]))
    assert world.bring().source == "MNIST"
    assert len(world.said) == 4


def test_a_file_with_another_sha256_is_not_kept(world: World) -> None:
    (world.site / NAMES[2]).write_text("a page that wants a password")
    said = world.refused("mnist")
    assert f"{NAMES[2]} from {world.facts['mnist']['sites'][0]} is not the expected file" in said
    assert f"its sha256 is {sha256(world.site / NAMES[2])}" in said
    assert f"expected {world.facts['mnist']['files'][NAMES[2]]}" in said
    assert world.files() == NAMES[:2]


def test_files_fetched_before_a_failure_are_not_fetched_again(world: World) -> None:
    (world.site / NAMES[2]).rename(world.site / "gone")
    assert "Not Found" in world.refused("mnist") or "File not found" in world.refused("mnist")
    (world.site / "gone").rename(world.site / NAMES[2])
    world.said.clear()
    world.bring("mnist")
    assert [line.split()[0] for line in world.said] == NAMES[2:]


def test_files_put_there_by_hand_are_used(world: World) -> None:
    world.sites(dead_url())
    assert world.bring().source == DIGITS
    for name in NAMES:
        (world.folder / name).write_bytes((world.site / name).read_bytes())
    assert world.bring("digits").source == DIGITS
    assert world.bring().source == "MNIST"


def test_files_put_there_that_are_not_mnist_are_named(world: World) -> None:
    world.sites(dead_url())
    world.folder.mkdir(parents=True)
    for name in NAMES:
        (world.folder / name).write_bytes((world.site / name).read_bytes())
    (world.folder / NAMES[0]).write_text("fashion")
    assert f"Wrong sha256 there: {NAMES[0]}." in world.refused("mnist")
    assert world.bring().source == DIGITS


def test_without_mnist_there_is_a_cause_and_a_cure(world: World) -> None:
    dead = dead_url()
    world.sites(dead)
    said = world.refused("mnist")
    assert said.startswith(f"MNIST cannot be fetched ({dead}/: [Errno 111] Connection refused): put {NAMES[0]}, ")
    assert said.endswith(f" into {world.folder}, or set samples_data: digits.")


@pytest.mark.parametrize(
    ("handler", "limit", "words"),
    [
        (Silent, (dataset, "ANSWER_S"), "no answer after 0.3 seconds"),
        (Stalls, (fetching, "BASE_S"), "incomplete after 0.3 seconds"),
    ],
)
def test_a_slow_site_times_out(
    world: World, monkeypatch: pytest.MonkeyPatch, handler: type[Quiet], limit: tuple[Any, str], words: str
) -> None:
    monkeypatch.setattr(*limit, 0.3)
    monkeypatch.setattr(dataset, "LARGEST", 1)
    with served(world.root, handler) as url:
        world.sites(url)
        assert words in world.refused("mnist")


def test_a_truncated_download_leaves_nothing(world: World) -> None:
    with served(world.site, Truncates) as url:
        world.sites(url)
        assert "the transfer stopped 13 bytes before the end" in world.refused("mnist")
    assert world.files() == []


def test_an_endless_download_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "LARGEST", 1 << 20)
    with served(world.site, Endless) as url:
        world.sites(url)
        assert "more than 1048576 bytes were sent" in world.refused("mnist")
    assert world.files() == []


# Digits


def test_digits_replace_an_unreachable_mnist(world: World) -> None:
    dead = dead_url()
    world.sites(dead)
    assert world.bring().source == DIGITS
    assert world.said[0] == (
        f"MNIST cannot be fetched ({dead}/: [Errno 111] Connection refused), so the samples get {DIGITS}"
    )
    assert world.files() == DIGITS_THERE


def test_a_request_for_digits_does_not_fetch_mnist(world: World) -> None:
    world.bring()
    world.said.clear()
    assert world.bring("digits").source == DIGITS
    assert not any("MNIST" in line for line in world.said)


def test_the_files_are_in_mnist_format(world: World) -> None:
    files = members(world.bring("digits"))
    assert files.pop("SOURCE").decode() == f"{DIGITS}\n"
    assert sorted(files) == NAMES
    count = {"t10k": 4, "train": 16}
    for kind, numbers in (("t10k", [0, 6, 12, 18]), ("train", [one for one in range(20) if one % 6])):
        images = gzip.decompress(files[f"{kind}-images-idx3-ubyte.gz"])
        labels = gzip.decompress(files[f"{kind}-labels-idx1-ubyte.gz"])
        assert struct.unpack(">4I", images[:16]) == (2051, count[kind], 28, 28)
        assert struct.unpack(">2I", labels[:8]) == (2049, count[kind])
        assert list(labels[8:]) == [number % 10 for number in numbers]
        pixels = [images[16 + 784 * place : 16 + 784 * (place + 1)] for place in range(count[kind])]
        assert pixels == [bytes([(number % 10 * 255 + 8) // 16]) * 784 for number in numbers]


def test_an_image_keeps_its_shape() -> None:
    image = [[0] * 8 for _ in range(8)]
    image[2][5] = 16
    # 28 / 8 = 3.5: an old pixel is 3.5 new ones wide and fades out over 3.5 more.
    down = [max(0, 1 - abs(row - 8.25) / 3.5) for row in range(28)]
    right = [max(0, 1 - abs(column - 18.75) / 3.5) for column in range(28)]
    wanted = [255 * one * other for one in down for other in right]
    assert all(abs(got - want) <= 0.5 for got, want in zip(dataset.scale(image), wanted, strict=True))
    assert dataset.scale([[16] * 8] * 8) == b"\xff" * 784


def test_equal_digits_give_equal_bytes(world: World) -> None:
    built = world.bring("digits")
    first = members(built)
    shutil.rmtree(built.folder)
    assert world.bring("digits") == built
    assert members(built) == first


def test_a_damaged_file_is_made_again_without_the_index(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    built = world.bring("digits")
    whole = members(built)
    (built.folder / NAMES[0]).write_bytes(whole[NAMES[0]][:-1])
    (built.folder / "SOURCE").unlink()
    monkeypatch.setenv("PIP_INDEX_URL", f"{dead_url()}/simple")
    assert world.bring("digits") == built
    assert members(built) == whole


def test_a_damaged_table_of_digits_is_fetched_again(world: World) -> None:
    world.bring("digits")
    for name in ("digits.json", "digits.csv.gz"):
        (world.folder / name).write_text("half")
    world.bring("digits")
    assert sha256(world.folder / "digits.csv.gz") == world.facts["digits"]["sha256"]


def test_another_version_is_stored_as_other_data(world: World) -> None:
    world.bring("digits")
    wheel = write_wheel(world.index / "scikit-learn", csv(30))
    world.facts["digits"]["wheel"]["sha256"] = sha256(wheel)
    world.facts["digits"]["sha256"] = hashlib.sha256(csv(30)).hexdigest()
    images = gzip.decompress(members(world.bring("digits"))[NAMES[0]])
    assert struct.unpack(">4I", images[:16]) == (2051, 5, 28, 28)


def test_another_wheel_is_refused(world: World) -> None:
    write_wheel(world.index / "scikit-learn", csv(3))
    said = world.refused("digits")
    assert world.facts["digits"]["wheel"]["sha256"] in said
    assert world.files() == []


def test_another_table_in_the_wheel_is_refused(world: World) -> None:
    world.facts["digits"]["sha256"] = "0" * 64
    assert f"digits.csv.gz from {WHEEL} is not the expected file" in world.refused("digits")
    assert world.files() == []


def test_if_both_fail_both_causes_are_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{dead_url()}/simple")
    world.sites(dead_url())
    said = world.refused()
    assert "MNIST cannot be fetched" in said
    assert "the package index cannot be reached from this machine" in said
    assert f"into {world.folder}, or skip the samples: --skip-tags samples" in said


def test_an_interruption_leaves_no_partial_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site is slow to send one file, and the user presses Ctrl-C."""
    # A shell ignores SIGINT for what it starts in the background.
    code = "import sys, json, signal; from pathlib import Path; from farandole.stack.dataset import provide; "
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "provide('auto', Path(sys.argv[1]), print, json.loads(sys.argv[2]))"
    asked = threading.Event()

    original = Quiet.do_GET

    def do_get(handler: Quiet) -> None:
        if handler.path.endswith(NAMES[2]):
            asked.set()
            threading.Event().wait(2)
        original(handler)

    monkeypatch.setattr(Quiet, "do_GET", do_get)
    with served(world.site) as url:
        world.sites(url)
        command = [sys.executable, "-c", code, str(world.cache), json.dumps(world.facts)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            assert asked.wait(30)
            running.send_signal(signal.SIGINT)
            running.wait(30)
        assert running.returncode != 0
        assert world.files() == NAMES[:2]
        monkeypatch.setattr(Quiet, "do_GET", original)
        assert world.bring().source == "MNIST"
    assert world.files() == MNIST_THERE


def test_a_cache_that_cannot_be_written(world: World) -> None:
    world.cache.write_text("in the way")
    assert f"{world.cache}" in world.refused()


# As a task


def in_cache(cache: Path) -> Data:
    """Fill a cache as an earlier run would."""
    folder = cache / "data"
    folder.mkdir(parents=True)
    facts = dataset.load()
    files = {name: name.encode() for name in NAMES}
    return dataset._pack(folder / "digits", files, "digits", dataset._key(facts["digits"]))


def test_the_task_returns_the_data_in_the_cache(tmp_path: Path) -> None:
    built = in_cache(tmp_path / "cache")
    for check_mode in (False, True):
        answer = run_action("dataset", {"cache": str(tmp_path / "cache")}, tmp_path, check_mode=check_mode)
        assert answer["changed"] is False
        assert answer["source"] == "digits"
        assert {one["name"]: one["sha256"] for one in answer["files"]} == {
            f"data/digits/{name}": good for name, good in built.files.items()
        }
        assert [(sha256(Path(one["path"])), Path(one["path"]).stat().st_size) for one in answer["files"]] == [
            (one["sha256"], one["size"]) for one in answer["files"]
        ]
        assert built.files["SOURCE"] == hashlib.sha256(b"digits\n").hexdigest()


def test_the_task_fails_with_a_cure_if_mnist_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", dead_url())
    answer = run_action("dataset", {"cache": str(tmp_path / "cache"), "data": "mnist"}, tmp_path)
    assert "MNIST cannot be fetched" in answer["msg"]
    assert "or set samples_data: digits" in answer["msg"]


def test_nodes_lack_what_their_probe_did_not_report(tmp_path: Path) -> None:
    built = in_cache(tmp_path)
    has = {"_preflight_probe": {"probe": {"data": built.files}}}
    other = {"_preflight_probe": {"probe": {"data": {**built.files, "SOURCE": "0"}}}}
    known: dict[str, Any] = {"has": has, "other": other, "none": {"_preflight_probe": {"probe": {}}}, "silent": {}}
    assert dataset.lacking(built, known, known) == ["other", "none", "silent"]


# On a node


def test_a_node_reports_the_files_that_were_packed(tmp_path: Path) -> None:
    built = in_cache(tmp_path / "cache")
    for sums in (load("modules", "node_probe").sums, load("module_utils", "folders").checksums):
        assert sums(built.folder) == built.files
        assert sums(tmp_path / "none") == {}


# dataset.yml


def test_dataset_yml_is_complete() -> None:
    facts = dataset.load()
    assert sorted(facts["mnist"]["files"]) == NAMES
    assert all(site.startswith("https://") and site.endswith("/") for site in facts["mnist"]["sites"])
    sums = [*facts["mnist"]["files"].values(), facts["digits"]["wheel"]["sha256"], facts["digits"]["sha256"]]
    assert all(len(bytes.fromhex(one)) == 32 for one in sums)
    assert f"-{facts['digits']['wheel']['version']}-" in facts["digits"]["wheel"]["file"]
