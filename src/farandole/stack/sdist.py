"""Packages of which there are only sources: found on an index, and read without running anything of them."""

from __future__ import annotations

import io
import tarfile
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PathDistribution
from itertools import islice
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urldefrag, urlsplit

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from farandole.core.errors import FarandoleError
from farandole.core.text import one_line
from farandole.stack import index, sources, web
from farandole.stack.catalogue import Need, Platform
from farandole.stack.index import Build, Question, UnsatisfiableError, Wheel

# What pip takes if a project does not say what it is built with.
USUAL = ("setuptools>=40.8.0", "wheel")
# How much is read of a file, and how many of an archive are looked at.
LARGEST, MOST = 1 << 20, 50_000
OUTER = ("PKG-INFO", "pyproject.toml")
DAMAGED = (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, ValueError, AttributeError, TypeError)


@dataclass(frozen=True)
class Sdist:
    """The sources of one version of a package, as an index offers them."""

    name: str
    version: str
    file: str
    sha256: str
    url: str
    python: str = ""

    def fetched(self, folder: Path) -> Path:
        """The file, in the folder where sources are kept."""
        source = {"index": self.name, "file": self.file, "sha256": self.sha256}
        return sources.provide([source], folder, lambda _: None)[0]


@dataclass(frozen=True)
class Content:
    """What sources say about themselves."""

    requires: tuple[str, ...]
    modules: tuple[str, ...]
    # What it takes to build them.
    tools: tuple[str, ...]


def choose(question: Question, folder: Path) -> list[Wheel]:
    """Like index.ask, but with the sources of what has no wheel; they are kept in the folder."""
    offers: dict[str, dict[str, Sdist]] = {}
    known: dict[str, Content] = {}
    with tempfile.TemporaryDirectory(prefix="farandole-") as name:
        more = Path(name)
        while True:
            try:
                wheels = index.ask(replace(question, more=more))
            except UnsatisfiableError as error:
                if not (new := index.without_wheel(str(error)) - offers.keys()):
                    raise
                for package in new:
                    offers[package] = offered(package, question.platform)
                    # What they require is read once a version is chosen.
                    for sdist in offers[package].values():
                        stand_in(sdist, (), more)
                continue
            chosen = {one.package: offers[one.package][one.version] for one in wheels if (more / one.file).exists()}
            if chosen.keys() <= known.keys():
                break
            for package, sdist in chosen.items():
                if package not in known:
                    known[package] = read(sdist.fetched(folder))
                    for other in offers[package].values():
                        (more / standing(other)).unlink(missing_ok=True)
                    stand_in(sdist, known[package].requires, more)
    return [
        _to_build(one, chosen[one.package], known[one.package], question, folder) if one.package in chosen else one
        for one in wheels
    ]


def _to_build(wheel: Wheel, sdist: Sdist, content: Content, question: Question, folder: Path) -> Wheel:
    needs = tuple(Need(*index.split(tool), sdist.name) for tool in content.tools)
    try:
        tools = index.ask(Question(question.platform, needs, until=question.until))
    except UnsatisfiableError as error:
        raise FarandoleError(
            f"{sdist.name} {sdist.version} has no wheel, and what builds it has none either: {one_line(error)}"
        ) from None
    build, size = Build(content.requires, content.modules, tuple(tools)), (folder / sdist.file).stat().st_size
    return replace(wheel, file=sdist.file, sha256=sdist.sha256, url=sdist.url, size=size, build=build)


def offered(name: str, platform: Platform) -> dict[str, Sdist]:
    """The versions of a package with sources of a known sha256, but without a wheel for the platform."""
    found: dict[str, Sdist] = {}
    wheels = set()
    for url, data in sources.links(canonicalize_name(name)):
        address, fragment = urldefrag(url)
        file = unquote(urlsplit(address).path).rsplit("/", 1)[-1]
        if file.endswith(".whl"):
            wheels |= _version_of_wheel(file, platform)
        elif fragment.startswith("sha256=") and "data-yanked" not in data:
            for version in _version_of_sdist(file, name):
                digest, python = fragment.removeprefix("sha256="), data.get("data-requires-python", "")
                found.setdefault(version, Sdist(name, version, file, digest, web.bare(address), python))
    return {version: sdist for version, sdist in found.items() if version not in wheels}


def _version_of_wheel(file: str, platform: Platform) -> set[str]:
    try:
        _, version, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return set()
    return {str(version)} if tags & platform.tags.keys() else set()


def _version_of_sdist(file: str, name: str) -> set[str]:
    try:
        found, version = parse_sdist_filename(file)
    except InvalidSdistFilename:
        return set()
    return {str(version)} if found == canonicalize_name(name) else set()


def read(path: Path) -> Content:
    """Read what sources say about themselves."""
    try:
        return _content(_texts(path))
    except DAMAGED as error:
        raise FarandoleError(f"{path.name} cannot be read: {one_line(error)}") from None


def _content(texts: dict[str, str]) -> Content:
    with tempfile.TemporaryDirectory() as name:
        for file in ("PKG-INFO", "requires.txt"):
            (Path(name) / file).write_text(texts.get(file, ""))
        requires = PathDistribution(Path(name)).requires or ()
    system = tomllib.loads(texts.get("pyproject.toml", "")).get("build-system", {})
    modules = texts.get("top_level.txt", "").split()
    return Content(_plain(requires), tuple(modules), _plain(system.get("requires", USUAL)))


def _plain(requirements: Iterable[str]) -> tuple[str, ...]:
    """Requirements in their canonical form, on one line, which name no place: whoever wrote the sources wrote them."""
    found = tuple(map(Requirement, requirements))
    if places := [str(one) for one in found if one.url]:
        raise ValueError(f"it requires {places[0]}, and only what an index has is taken")
    return tuple(map(str, found))


def _texts(path: Path) -> dict[str, str]:
    """The files that say something, by name."""
    found = {}
    for member, file in _files(path):
        folder, _, name = member.partition("/")[2].rpartition("/")
        if name in ("requires.txt", "top_level.txt") if folder.endswith(".egg-info") else name in OUTER and not folder:
            with file() as content:
                found[name] = content.read(LARGEST).decode()
    return found


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


def standing(sdist: Sdist) -> str:
    """The file of a stand-in."""
    return f"{canonicalize_name(sdist.name).replace('-', '_')}-{sdist.version}-py3-none-any.whl"


def stand_in(sdist: Sdist, requires: Iterable[str], folder: Path) -> None:
    """Write a wheel that only requires what a wheel of these sources would require, so that the index can choose it."""
    about = ["Metadata-Version: 2.1", f"Name: {sdist.name}", f"Version: {sdist.version}"]
    about += [f"Requires-Python: {sdist.python}"] if sdist.python else []
    about += [f"Requires-Dist: {one}" for one in requires]
    file = standing(sdist)
    inside = f"{file.removesuffix('-py3-none-any.whl')}.dist-info"
    with zipfile.ZipFile(folder / file, "w") as wheel:
        wheel.writestr(f"{inside}/METADATA", "\n".join([*about, ""]))
        wheel.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{inside}/RECORD", "")
