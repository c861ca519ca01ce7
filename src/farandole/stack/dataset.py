"""Data for the sample scripts, cached on the control machine: MNIST, or scikit-learn's digits in the same format."""

import gzip
import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any

import yaml

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256, write
from farandole.inventory.cluster import probe_of
from farandole.stack.cache import digest, draft_folder, keep, no_space, record_path
from farandole.stack.collect import download_wheels
from farandole.stack.sources import cached
from farandole.stack.sources import provide as fetch

Say = Callable[[str], None]
Facts = Mapping[str, Any]
Image = Sequence[Sequence[int]]
Digit = tuple[Image, int]

FILE = Path(__file__).with_name("dataset.yml")
# More than MNIST's largest file has.
LARGEST = 12 << 20
# Increase it when the same source is turned into different files.
RECIPE = 1
OLD, NEW, INK = 8, 28, 16


def load() -> Facts:
    """Load the addresses, versions and digests from dataset.yml."""
    facts: Facts = yaml.safe_load(FILE.read_text())
    return facts


@dataclass(frozen=True)
class Data:
    """What the samples train on: a folder of the cache with the sha256 of each file."""

    folder: Path
    source: str
    files: dict[str, str]

    def describe(self) -> list[dict[str, Any]]:
        """Describe its files, for a playbook that sends them to the depot and a node that fetches them."""
        return [
            {
                "path": str(self.folder / name),
                "name": f"data/{self.folder.name}/{name}",
                "sha256": good,
                "size": (self.folder / name).stat().st_size,
            }
            for name, good in self.files.items()
        ]


def provide(requested: str, root: Path, say: Say, facts: Facts | None = None) -> Data:
    """Return the data that `samples_data` requests, from the cache or made now."""
    facts, folder = facts or load(), root / "data"
    with no_space(root):
        if data := _kept(requested, facts, folder, say):
            return data
        folder.mkdir(parents=True, exist_ok=True)
        if requested == "digits":
            return _digits(facts, folder, say)
        try:
            return _mnist(facts, folder, say)
        except FarandoleError as error:
            failure = f"MNIST: {error}"
        if requested == "mnist":
            raise FarandoleError(f"{failure}, or set samples_data: digits")
        say(f"{failure}; the samples get {_digits_label(facts)} instead")
        try:
            return _digits(facts, folder, say)
        except FarandoleError as error:
            raise FarandoleError(
                f"there is no data for the sample scripts. {failure}. {_digits_label(facts)}: {error}. Fix "
                "one of them, or skip the samples: --skip-tags samples"
            ) from error


def _kept(requested: str, facts: Facts, folder: Path, say: Say) -> Data | None:
    """Data that was made before, MNIST first, or that can be made from files somebody put there."""
    if requested != "digits":
        data = _recall(folder / "mnist", _key(facts["mnist"]["files"]))
        if data or not _missing(facts["mnist"]["files"], folder):
            return data or _mnist(facts, folder, say)
    return _recall(folder / "digits", _key(facts["digits"])) if requested != "mnist" else None


def _recall(folder: Path, key: str) -> Data | None:
    """Data that was made before, unless its sources have changed or a file is damaged."""
    try:
        about = json.loads(record_path(folder).read_text())
        data = Data(folder, about["source"], about["files"])
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return data if about.get("key") == key and not _missing(data.files, folder) else None


def _key(*made_of: Any) -> str:
    return digest(RECIPE, *made_of)


def _missing(files: Mapping[str, str], folder: Path) -> list[str]:
    return [name for name, good in files.items() if not (folder / name).is_file() or sha256(folder / name) != good]


# MNIST


def _mnist(facts: Facts, folder: Path, say: Say) -> Data:
    """Provide the files, each from the first site that has it."""
    sites, files = facts["mnist"]["sites"], facts["mnist"]["files"]
    for name, good in files.items():
        sources = [{"url": f"{site}{name}", "file": name, "sha256": good} for site in sites]
        fetch(sources, folder, say, limit=LARGEST)
    return _pack(folder / "mnist", {name: (folder / name).read_bytes() for name in files}, "MNIST", _key(files))


# Digits


def _digits_label(facts: Facts) -> str:
    return f"digits of scikit-learn {facts['digits']['wheel']['version']}, scaled to {NEW}x{NEW}"


def _digits(facts: Facts, folder: Path, say: Say) -> Data:
    digits = _parse(_csv(facts["digits"], folder, say))
    test, train = digits[::6], [digit for place, digit in enumerate(digits) if place % 6]
    files = {**_idx("t10k", test), **_idx("train", train)}
    return _pack(folder / "digits", files, _digits_label(facts), _key(facts["digits"]))


def _csv(digits: Facts, folder: Path, say: Say) -> bytes:
    """Return the CSV from the cache, or from the wheel, which pip downloads with this machine's configuration."""
    target = folder / Path(digits["member"]).name
    if not cached([{"file": target.name, "sha256": digits["sha256"]}], folder, say):
        wheel = digits["wheel"]
        with draft_folder(folder) as drafts:
            say(f"collecting {wheel['file']}")
            download_wheels([wheel], digits["python"], drafts, say)
            draft = drafts / target.name
            draft.write_bytes(zipfile.ZipFile(drafts / wheel["file"]).read(digits["member"]))
            keep(draft, target, digits["sha256"], wheel["file"])
    return target.read_bytes()


def _parse(csv: bytes) -> list[Digit]:
    """Parse lines of 64 pixels and a label."""
    lines = ([int(word) for word in line.split(",")] for line in gzip.decompress(csv).decode().splitlines())
    return [([line[row * OLD : row * OLD + OLD] for row in range(OLD)], line[-1]) for line in lines]


# What each of the old pixels in a line contributes to each of the new ones, in fourteenths.
WEIGHTS = [[max(0, 14 - abs(min(max(4 * new - 5, 0), 98) - 14 * old)) for old in range(OLD)] for new in range(NEW)]


def scale(image: Image) -> bytes:
    """Scale 8x8 pixels of 0..16 to 28x28 of 0..255, bilinear; in integers, so every machine gets the same result."""
    wide = [[sum(map(mul, weights, row)) for weights in WEIGHTS] for row in image]
    columns, full = list(zip(*wide, strict=True)), 14 * 14 * INK
    return bytes(
        (sum(map(mul, weights, column)) * 255 + full // 2) // full for weights in WEIGHTS for column in columns
    )


def _idx(kind: str, digits: Sequence[Digit]) -> dict[str, bytes]:
    images = struct.pack(">4I", 0x803, len(digits), NEW, NEW) + b"".join(scale(image) for image, _ in digits)
    labels = struct.pack(">2I", 0x801, len(digits)) + bytes(label for _, label in digits)
    return {f"{kind}-images-idx3-ubyte.gz": _gzip(images), f"{kind}-labels-idx1-ubyte.gz": _gzip(labels)}


def _gzip(content: bytes) -> bytes:
    """Compress without name and time, so that equal content gives equal files."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as file:
        file.write(content)
    return packed.getvalue()


# Files


def _pack(folder: Path, made: Mapping[str, bytes], source: str, key: str) -> Data:
    """Write the files and a line that says what they are to a folder; it is valid only with the record beside it."""
    members = {**dict(sorted(made.items())), "SOURCE": f"{source}\n".encode()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in members.items():
        write(folder / name, content)
    data = Data(folder, source, {name: hashlib.sha256(content).hexdigest() for name, content in members.items()})
    about = {"source": data.source, "files": data.files, "key": key}
    write(record_path(folder), json.dumps(about, indent=1))
    return data


# Nodes


def lacking(data: Data, nodes: Iterable[str], known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The nodes whose probe did not report exactly these files."""
    return [name for name in nodes if probe_of(known[name]).get("data") != data.files]
