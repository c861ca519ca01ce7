"""The samples' data, from a real site and package index that are up, damaged or silent."""

import gzip
import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.core import fetching
from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.stack import dataset, sources
from farandole.stack.dataset import Data

from .loading import act, load
from .packages import write_wheel
from .stack import Endless, Quiet, Silent, Stalls, Truncates, dead_url, interrupt, served

NAMES = [f"{kind}-{what}-ubyte.gz" for kind in ("t10k", "train") for what in ("images-idx3", "labels-idx1")]
MEMBER = "sklearn/datasets/data/digits.csv.gz"
DIGITS = "digits of scikit-learn 1.0, scaled to 28x28"


def csv(count: int = 20) -> bytes:
    """Write a table of digits; a digit's pixels have its number as their brightness."""
    lines = (",".join([str(place % 10)] * 65) for place in range(count))
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)


class World:
    """A site with an MNIST of a few bytes, a package index with digits, and a cache."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.cache, self.site, self.url = root, root / "cache", root / "site", url
        self.folder, self.said = self.cache / "data", list[str]()
        self.site.mkdir()
        (root / "simple/scikit-learn").mkdir(parents=True)
        for name in NAMES:
            (self.site / name).write_bytes(name.encode())
        self.facts: dict[str, Any] = {
            "mnist": {"sites": [f"{url}/site/"], "files": {name: sha256(self.site / name) for name in NAMES}},
            "digits": {"python": "3.11", "member": MEMBER},
        }
        self.release(csv())

    def wheel(self, table: bytes) -> Path:
        folder = self.root / "simple/scikit-learn"
        return write_wheel(folder, "scikit-learn", "1.0", content={MEMBER: table})

    def release(self, table: bytes) -> None:
        """Offer a table of digits, and expect it."""
        path = self.wheel(table)
        wheel = {"name": "scikit-learn", "version": "1.0", "file": path.name, "sha256": sha256(path)}
        self.facts["digits"] |= {"wheel": wheel, "sha256": hashlib.sha256(table).hexdigest()}

    def bring(self, requested: str = "auto") -> Data:
        self.said.clear()
        return dataset.provide(requested, self.cache, self.said.append, self.facts)

    def refused(self, requested: str = "auto") -> str:
        with pytest.raises(FarandoleError) as refusal:
            self.bring(requested)
        return str(refusal.value)

    def sites(self, *urls: str) -> None:
        self.facts["mnist"]["sites"] = [f"{url}/" for url in urls]

    def copy(self) -> None:
        """Put MNIST into the cache by hand."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            (self.folder / name).write_bytes(name.encode())

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


@pytest.fixture
def world(tmp_path: Path, bare_pip: pytest.MonkeyPatch) -> Iterator[World]:
    with served(tmp_path) as url:
        bare_pip.setenv("PIP_INDEX_URL", f"{url}/simple")
        yield World(tmp_path, url)


def members(data: Data) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.folder.iterdir()}


def as_set(name: str) -> list[str]:
    """The files of a data set in the cache."""
    return [name, f"{name}.json", *(f"{name}/{file}" for file in ["SOURCE", *NAMES])]


MNIST_THERE = sorted([*NAMES, *as_set("mnist")])
DIGITS_THERE = sorted(["digits.csv.gz", *as_set("digits")])


def test_mnist_is_fetched_once_from_the_first_site_that_has_it(world: World) -> None:
    world.sites(dead_url(), f"{world.url}/site")
    data = world.bring()
    assert (data.source, [*dict.fromkeys(world.said)]) == ("MNIST", [f"collecting {name}" for name in NAMES])
    assert members(data) == {**{name: name.encode() for name in NAMES}, "SOURCE": b"MNIST\n"}
    assert data.files == {name: sha256(data.folder / name) for name in members(data)}
    assert world.files() == MNIST_THERE
    world.sites(dead_url())
    assert world.bring() == world.bring("mnist") == data
    assert world.said == []


def test_a_file_with_another_sha256_is_not_kept_and_those_before_it_are(world: World) -> None:
    right = (world.site / NAMES[2]).read_bytes()
    (world.site / NAMES[2]).write_text("a page that wants a password")
    said = world.refused("mnist")
    for value in (NAMES[2], world.url, sha256(world.site / NAMES[2]), world.facts["mnist"]["files"][NAMES[2]]):
        assert value in said
    assert world.files() == NAMES[:2]
    (world.site / NAMES[2]).unlink()
    assert "File not found" in world.refused("mnist")
    (world.site / NAMES[2]).write_bytes(right)
    world.bring("mnist")
    assert world.said == [f"collecting {name}" for name in NAMES[2:]]


def test_files_put_there_by_hand_are_used_if_they_are_mnist(world: World) -> None:
    world.sites(dead_url())
    world.copy()
    (world.folder / NAMES[0]).write_text("fashion")
    assert f"into {world.folder}, or set samples_data: digits" in world.refused("mnist")
    assert f"{world.folder / NAMES[0]} is damaged" in world.said[0]
    assert world.bring().source == DIGITS
    world.copy()
    assert world.bring("digits").source == DIGITS
    assert world.bring().source == "MNIST"


@pytest.mark.parametrize(
    ("handler", "limit", "reason"),
    [
        (Silent, (sources, "ANSWER_S", 0.3), "no answer after 0.3 seconds"),
        (Stalls, (fetching, "BASE_S", 0.3), "incomplete after 0.3 seconds"),
        (Truncates, (dataset, "LARGEST", 1 << 20), "the transfer stopped 13 bytes before the end"),
        (Endless, (dataset, "LARGEST", 1 << 20), "more than 1048576 bytes were sent"),
    ],
)
def test_a_site_that_is_slow_stops_early_or_never_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, handler: type[Quiet], limit: tuple[Any, str, Any], reason: str
) -> None:
    monkeypatch.setattr(dataset, "LARGEST", 1)
    monkeypatch.setattr(*limit)
    with served(world.site, handler) as url:
        world.sites(url)
        assert reason in world.refused("mnist")
    assert world.files() == []


def test_digits_replace_an_unreachable_mnist_and_are_asked_for_alone(world: World) -> None:
    dead = dead_url()
    world.sites(dead)
    assert world.bring().source == DIGITS
    assert f"MNIST: {NAMES[0]} cannot be fetched ({dead}/{NAMES[0]}: [Errno 111] Connection refused)" in world.said[1]
    assert world.files() == DIGITS_THERE
    shutil.rmtree(world.folder)
    assert world.bring("digits").source == DIGITS
    assert not any("MNIST" in line for line in world.said)


def test_digits_are_in_mnist_format_and_equal_in_every_run(world: World) -> None:
    data = world.bring("digits")
    files = members(data)
    shutil.rmtree(data.folder)
    assert world.bring("digits") == data
    assert members(data) == files
    assert files.pop("SOURCE").decode() == f"{DIGITS}\n"
    assert sorted(files) == NAMES
    for kind, numbers in (("t10k", range(0, 20, 6)), ("train", [number for number in range(20) if number % 6])):
        images = gzip.decompress(files[f"{kind}-images-idx3-ubyte.gz"])
        labels = gzip.decompress(files[f"{kind}-labels-idx1-ubyte.gz"])
        assert struct.unpack(">4I", images[:16]) == (2051, len(numbers), 28, 28)
        assert struct.unpack(">2I", labels[:8]) == (2049, len(numbers))
        assert list(labels[8:]) == [number % 10 for number in numbers]
        pixels = [images[16 + 784 * place : 16 + 784 * (place + 1)] for place in range(len(numbers))]
        assert pixels == [bytes([(number % 10 * 255 + 8) // 16]) * 784 for number in numbers]


def test_an_image_keeps_its_shape() -> None:
    image = [[0] * 8 for _ in range(8)]
    image[2][5] = 16
    # 28 / 8 = 3.5: an old pixel is 3.5 new ones wide and fades out over 3.5 more.
    down = [max(0, 1 - abs(row - 8.25) / 3.5) for row in range(28)]
    right = [max(0, 1 - abs(column - 18.75) / 3.5) for column in range(28)]
    wanted = [255 * row * column for row in down for column in right]
    assert all(abs(got - want) <= 0.5 for got, want in zip(dataset.scale(image), wanted, strict=True))
    assert dataset.scale([[16] * 8] * 8) == b"\xff" * 784


def test_what_is_damaged_is_made_again_with_the_index_only_for_the_table(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = world.bring("digits")
    whole = members(data)
    for name in ("digits.json", "digits.csv.gz"):
        (world.folder / name).write_text("half")
    world.bring("digits")
    assert sha256(world.folder / "digits.csv.gz") == world.facts["digits"]["sha256"]
    monkeypatch.setenv("PIP_INDEX_URL", f"{dead_url()}/simple")
    (data.folder / NAMES[0]).write_bytes(whole[NAMES[0]][:-1])
    (data.folder / "SOURCE").unlink()
    assert world.bring("digits") == data
    assert members(data) == whole


def test_another_wheel_or_another_table_in_it_is_refused_and_another_version_is_other_data(world: World) -> None:
    good = world.facts["digits"]["sha256"]
    world.facts["digits"]["sha256"] = "0" * 64
    assert "digits.csv.gz from scikit_learn-1.0-py3-none-any.whl is not the expected file" in world.refused("digits")
    world.facts["digits"]["sha256"] = good
    world.wheel(csv(3))
    assert world.facts["digits"]["wheel"]["sha256"] in world.refused("digits")
    assert world.files() == []
    for count, tests in ((20, 4), (30, 5)):
        world.release(csv(count))
        images = gzip.decompress(members(world.bring("digits"))[NAMES[0]])
        assert struct.unpack(">4I", images[:16]) == (2051, tests, 28, 28)


def test_if_both_fail_both_causes_are_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{dead_url()}/simple")
    world.sites(dead_url())
    said = world.refused()
    for part in ("MNIST: ", "the package index cannot be reached", f"into {world.folder}", "or skip the samples"):
        assert part in said
    shutil.rmtree(world.cache)
    world.cache.write_text("in the way")
    assert f"{world.cache}" in world.refused()


def test_an_interruption_leaves_no_partial_file(world: World) -> None:
    code = "import sys, json; from pathlib import Path; from farandole.stack.dataset import provide; "
    code += "facts = json.loads(sys.argv[2]); facts['mnist']['sites'] = [f'{sys.argv[1]}/']; "
    code += "provide('auto', Path(sys.argv[3]), print, facts)"
    interrupt(world.site, NAMES[2], code, json.dumps(world.facts), str(world.cache))
    assert world.files() == NAMES[:2]
    assert world.bring().source == "MNIST"
    assert world.files() == MNIST_THERE


def in_cache(cache: Path) -> Data:
    """Fill a cache as an earlier run would."""
    folder = cache / "data"
    folder.mkdir(parents=True)
    files = {name: name.encode() for name in NAMES}
    return dataset._pack(folder / "digits", files, "digits", dataset._key(dataset.load()["digits"]))


def test_the_task_returns_the_data_in_the_cache_and_who_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = in_cache(tmp_path)
    said = {"has": {"data": data.files}, "other": {"data": {**data.files, "SOURCE": "0"}}, "none": {}}
    known = {name: {"_preflight_probe": {"probe": probe}} for name, probe in said.items()} | {"silent": {}}
    for check_mode in (False, True):
        asked = {"cache": str(tmp_path), "nodes": [*known]}
        answer = act("dataset", asked, {"hostvars": known}, check_mode=check_mode)
        assert (answer["changed"], answer["source"]) == (False, "digits")
        assert answer["lacking"] == ["other", "none", "silent"]
        assert {file["name"]: file["sha256"] for file in answer["files"]} == {
            f"data/digits/{name}": good for name, good in data.files.items()
        }
        for file in answer["files"]:
            assert (sha256(Path(file["path"])), Path(file["path"]).stat().st_size) == (file["sha256"], file["size"])
    monkeypatch.setenv("https_proxy", dead_url())
    refused = act("dataset", {"cache": str(tmp_path / "empty"), "data": "mnist"})
    assert "-ubyte.gz cannot be fetched" in refused["msg"]


def test_a_node_reports_the_files_that_were_packed(tmp_path: Path) -> None:
    data = in_cache(tmp_path / "cache")
    for sums in (load("modules", "node_probe").sums, load("module_utils", "folders").checksums):
        assert sums(data.folder) == data.files
        assert sums(tmp_path / "none") == {}


def test_dataset_yml_is_complete() -> None:
    facts = dataset.load()
    assert sorted(facts["mnist"]["files"]) == NAMES
    assert all(site.startswith("https://") and site.endswith("/") for site in facts["mnist"]["sites"])
    sums = [*facts["mnist"]["files"].values(), facts["digits"]["wheel"]["sha256"], facts["digits"]["sha256"]]
    assert all(len(bytes.fromhex(digest)) == 32 for digest in sums)
    assert f"-{facts['digits']['wheel']['version']}-" in facts["digits"]["wheel"]["file"]
