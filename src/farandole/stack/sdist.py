"""Packages of which there are only sources: found on an index, and read without running anything of them."""

import io
import tarfile
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PathDistribution
from itertools import islice
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement

from farandole.core.errors import FarandoleError
from farandole.core.text import one_line
from farandole.stack import index, sources
from farandole.stack.catalogue import IF_ANY, Need
from farandole.stack.index import Build, Question, UnsatisfiableError, Wheel

# What pip takes if a project does not say what it is built with.
USUAL = ("setuptools>=40.8.0", "wheel")
# How much is read of a file, and how many of an archive are looked at.
LARGEST, MOST = 1 << 20, 50_000
OUTER = ("PKG-INFO", "pyproject.toml")
DAMAGED = (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, ValueError, AttributeError, TypeError)


def choose(question: Question, folder: Path) -> list[Wheel]:
    """Like index.ask, but with the sources of what has no wheel; they are kept in the folder."""
    without_wheel: set[str] = set()
    known: dict[tuple[str, str], Build] = {}
    while True:
        try:
            wheels = index.ask(_with_sources(question, without_wheel, known))
        except UnsatisfiableError as error:
            if (new := index.without_wheel(str(error))) <= without_wheel:
                raise
            without_wheel |= new
            continue
        chosen = {(wheel.package, wheel.version): wheel for wheel in wheels if wheel.package in without_wheel}
        if chosen.keys() <= known.keys():
            return [_to_build(wheel, known.get((wheel.package, wheel.version)), question, folder) for wheel in wheels]
        known |= {key: read(_fetched(chosen[key], folder)) for key in chosen.keys() - known.keys()}


def _with_sources(question: Question, names: Iterable[str], known: Mapping[tuple[str, str], Build]) -> Question:
    """A version that was chosen stays; what another one requires is read once it is chosen, and until then nothing."""
    unread = {(name, ""): tuple[str, ...]() for name in names}
    stay = (Need(name, f"{IF_ANY}=={version}", "") for name, version in known)
    return replace(
        question, sources=unread | {key: build.requires for key, build in known.items()}, needs=(*question.needs, *stay)
    )


def _fetched(wheel: Wheel, folder: Path) -> Path:
    source = {"index": wheel.name, "file": wheel.file, "sha256": wheel.sha256}
    return sources.provide([source], folder, lambda _: None)[0]


def _to_build(wheel: Wheel, build: Build | None, question: Question, folder: Path) -> Wheel:
    if not build:
        return wheel
    needs = tuple(Need(*index.split(tool), wheel.name) for tool in build.tools)
    try:
        tools = index.ask(Question(question.platform, needs, until=question.until))
    except UnsatisfiableError as error:
        raise FarandoleError(
            f"{wheel.name} {wheel.version} has no wheel, and what builds it has none either: {one_line(error)}"
        ) from None
    return replace(wheel, size=(folder / wheel.file).stat().st_size, build=build, tools=tuple(tools))


def read(path: Path) -> Build:
    """Read what sources say about themselves."""
    try:
        return _content(_texts(path))
    except DAMAGED as error:
        raise FarandoleError(f"{path.name} cannot be read: {one_line(error)}") from None


def _content(texts: dict[str, str]) -> Build:
    with tempfile.TemporaryDirectory() as name:
        for file in ("PKG-INFO", "requires.txt"):
            (Path(name) / file).write_text(texts.get(file, ""))
        requires = PathDistribution(Path(name)).requires or ()
    system = tomllib.loads(texts.get("pyproject.toml", "")).get("build-system", {})
    modules = texts.get("top_level.txt", "").split()
    return Build(_plain(requires), tuple(modules), _plain(system.get("requires", USUAL)))


def _plain(requirements: Iterable[str]) -> tuple[str, ...]:
    """Requirements in their canonical form, on one line, which name no place: whoever wrote the sources wrote them."""
    parsed = tuple(map(Requirement, requirements))
    if places := [str(requirement) for requirement in parsed if requirement.url]:
        raise ValueError(f"it requires {places[0]}, and only what an index has is taken")
    return tuple(map(str, parsed))


def _texts(path: Path) -> dict[str, str]:
    """The files that say something, by name."""
    texts = {}
    for member, file in _files(path):
        folder, _, name = member.partition("/")[2].rpartition("/")
        if name in ("requires.txt", "top_level.txt") if folder.endswith(".egg-info") else name in OUTER and not folder:
            with file() as content:
                texts[name] = content.read(LARGEST).decode()
    return texts


def _files(path: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist()[:MOST]:
                yield name, partial(archive.open, name)
    else:
        with tarfile.open(path) as tar:
            for member in islice(tar, MOST):
                if member.isfile():
                    yield member.name, partial(_opened, tar, member)


def _opened(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    return tar.extractfile(member) or io.BytesIO()
