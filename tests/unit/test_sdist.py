"""Packages of which there are only sources: which are chosen, and what is read of them without running any of it."""

import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from farandole.cli.bundle import cached
from farandole.core.errors import FarandoleError
from farandole.core.files import sha256 as digest
from farandole.stack import index, making, nodes, sdist
from farandole.stack import lock as locks
from farandole.stack.cache import Builds
from farandole.stack.catalogue import Need, Platform
from farandole.stack.collect import collect_wheels
from farandole.stack.index import Build, Question, UnsatisfiableError, Wheel
from farandole.stack.parts import modules_of
from farandole.stack.plan import plan
from farandole.stack.problem import Known, request

from .loading import ROOT
from .packages import offer, pip_settings, write_wheel
from .stack import pack, served
from .test_plan import BARE
from .test_solver import BOOKWORM as PROBE
from .test_solver import cluster

BOOKWORM = Platform("debian-12", "x86_64", "3.11", "2.36")
NODES = nodes.read(cluster(PROBE))
OF_SETUPTOOLS = """\
six

[:python_version < "3"]
enum34

[extra:python_version > "3"]
pandas
"""
# Nobody runs it.
SETUP = "raise SystemExit(1)"


def write_sdist(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """Write sources with these files."""
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in {"setup.py": SETUP, **files}.items():
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def about(*requires: str, version: str = "2.1") -> dict[str, str]:
    lines = [f"Metadata-Version: {version}", "Name: x", *(f"Requires-Dist: {requirement}" for requirement in requires)]
    return {"PKG-INFO": "\n".join([*lines, "", "The description."])}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Iterator[Path]:
    """The folder of this machine's only package index, beside the small one's wheels."""
    folder = tmp_path_factory.mktemp("root")
    with served(folder) as url, pytest.MonkeyPatch.context() as patch:
        for name, value in {**pip_settings(wheels), "PIP_NO_INDEX": "0", "PIP_INDEX_URL": f"{url}/simple"}.items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture
def pages(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same, empty: pip's settings do not change, and are asked for once."""
    # uv remembers pages there.
    monkeypatch.setattr(index, "default_root", lambda: tmp_path)
    yield root
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def chosen(pages: Path, *requirements: str) -> dict[str, Wheel]:
    question = Question(BOOKWORM, tuple(Need(*index.split(text), "a test") for text in requirements))
    return {wheel.package: wheel for wheel in sdist.choose(question, pages / "sources")}


def test_sources_are_taken_only_where_there_is_no_wheel(pages: Path) -> None:
    offer(pages, write_sdist(pages, "old", "1.0", about()), write_sdist(pages, "old", "1.1", about()))
    offer(pages, write_sdist(pages, "old", "2.0", about()))
    offer(pages, write_wheel(pages, "lib", "3.0", ["old<2"]))
    # Newer ones are not worth building where a wheel of an older one fits.
    offer(pages, write_sdist(pages, "six", "99.0", about()))
    wheels = chosen(pages, "lib", "six")
    assert {name: wheel.file for name, wheel in wheels.items()} == {
        "lib": "lib-3.0-py3-none-any.whl",
        "old": "old-1.1.tar.gz",
        "six": "six-1.17.0-py3-none-any.whl",
    }
    old = wheels["old"]
    assert (old.version, old.needed_by, old.sha256) == ("1.1", ("lib",), digest(pages / "simple/old/old-1.1.tar.gz"))
    assert old.size == (pages / "sources/old-1.1.tar.gz").stat().st_size
    assert old.url.endswith("/simple/old/old-1.1.tar.gz")
    assert old.build
    assert [tool.name for tool in old.tools] == ["setuptools", "wheel"]


def test_what_sources_require_comes_too(pages: Path) -> None:
    offer(pages, write_sdist(pages, "deep", "1.0", about()))
    offer(pages, write_sdist(pages, "old", "1.0", about("six", "deep>=1", 'none; python_version < "3"', version="2.4")))
    wheels = chosen(pages, "old")
    assert sorted(wheels) == ["deep", "old", "six"]
    assert wheels["old"].build
    assert wheels["old"].build.requires == ("six", "deep>=1", 'none; python_version < "3"')
    offer(pages, write_sdist(pages, "odd", "1.0", about("six<1")))
    with pytest.raises(UnsatisfiableError, match=r"odd==1\.0 depends on six<1|six<1"):
        chosen(pages, "odd")


def test_a_lock_says_what_to_build_and_its_base_does_not(pages: Path) -> None:
    files = {**about("six"), "old.egg-info/top_level.txt": "old\ntests\n_old\n"}
    offer(pages, write_sdist(pages, "old", "1.0", files))
    wishes = (("old", "stack_packages"),)
    wanted = request(["pytorch"], [], "auto", packages=wishes, sources=pages / "sources")
    lock = making.make(NODES, wanted, known=Known({}, "2026-01-01T00:00:00Z"))
    (source,) = lock["sources"]
    assert (source["file"], source["requires"]) == ("old-1.0.tar.gz", ["six"])
    assert [tool["file"] for tool in source["tools"]] == [
        *("setuptools-84.2.1-py3-none-any.whl", "wheel-1.0-py3-none-any.whl")
    ]
    assert (lock["own"], lock["versions"]["old"]) == (["old", "six"], "1.0")
    assert lock["why"]["old"] == "stack_packages (old); the newest that fits; built, as there is no wheel"
    assert {"old-1.0.tar.gz", "wheel-1.0-py3-none-any.whl"} < {*lock["index"]["files"]}
    assert "old" not in [wheel["name"] for wheel in lock["wheels"]]
    assert modules_of(lock, str(pages)) == ["old"]
    locks.write(pages / "stack.lock.yml", lock)
    assert locks.read(pages / "stack.lock.yml") == lock
    base = locks.base_of(lock)
    assert "sources" not in base
    assert base["id"] == making.make(NODES, request(["pytorch"], [], "auto"))["id"]
    # Built once by each builder.
    made = plan(lock, Builds(pages), {"node-1": BARE}, "node-1")["layer"]["sources"]
    assert [(source["name"], source["part"]) for source in made] == [("old", None)]
    pack(Path(made[0]["path"]), builder="node-1")
    assert plan(lock, Builds(pages), {"node-1": BARE}, "node-1")["layer"]["sources"][0]["part"]["builder"] == "node-1"
    assert plan(lock, Builds(pages), {"node-2": BARE}, "node-2")["layer"]["sources"][0]["part"] is None
    # Everything is collected, and carried.
    fetched: list[str] = []
    assert collect_wheels({**lock, "wheels": []}, pages / "cache", fetched.append)
    assert {"collecting old-1.0.tar.gz", "collecting 2 of 2 wheels into " + str(pages / "cache/wheels")} < {*fetched}
    assert not collect_wheels({**lock, "wheels": []}, pages / "cache", fetched.append)
    carried = [path.relative_to(pages / "cache") for path in cached(lock, pages / "cache").values()]
    assert {Path("sources/old-1.0.tar.gz"), Path("wheels/wheel-1.0-py3-none-any.whl")} < {*carried}
    # Without the setting the lock does not fit any more.
    with pytest.raises(FarandoleError, match="stack_build_wheels: the lock says true, now it is false"):
        locks.check(pages, lock, NODES, request(["pytorch"], [], "auto", packages=wishes))


@pytest.mark.parametrize(
    ("allowed", "reason"),
    [
        (False, "old can be built once, on the builder, where its own code then runs: stack_build_wheels: true"),
        (True, "only-windows==1.0 has no source distribution"),
    ],
)
def test_a_refusal_says_whether_building_would_help(pages: Path, *, allowed: bool, reason: str) -> None:
    name = "only-windows" if allowed else "old"
    offer(pages, write_sdist(pages, "old", "1.0", about()))
    sources = pages / "sources" if allowed else None
    wanted = request(["pytorch"], [], "auto", packages=((name, "stack_packages"),), sources=sources)
    with pytest.raises(FarandoleError) as refusal:
        making.make(NODES, wanted)
    assert reason in str(refusal.value)


def test_what_is_read_of_sources(tmp_path: Path) -> None:
    egg = {"x.egg-info/requires.txt": OF_SETUPTOOLS, "src/x.egg-info/top_level.txt": "x\n_x\n", "requires.txt": "no"}
    build = sdist.read(write_sdist(tmp_path, "x", "1", {**about(), **egg}))
    assert build == Build(
        ("six", 'enum34; python_version < "3"', 'pandas; python_version > "3" and extra == "extra"'),
        ("x", "_x"),
        ("setuptools>=40.8.0", "wheel"),
    )
    project = {"pyproject.toml": '[build-system]\nrequires = ["flit_core <4"]\n', "docs/pyproject.toml": "["}
    assert sdist.read(write_sdist(tmp_path, "y", "1", project)) == Build((), (), ("flit_core<4",))
    with zipfile.ZipFile(tmp_path / "z-1.zip", "w") as archive:
        archive.writestr("z-1/PKG-INFO", about("six")["PKG-INFO"])
    assert sdist.read(tmp_path / "z-1.zip").requires == ("six",)


def built_by(text: str) -> dict[str, str]:
    return {"pyproject.toml": f"[build-system]\nrequires = {text}\n"}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (b"", ""),
        (b"no archive", ""),
        (b"\x1f\x8b\x08", ""),
        ({"pyproject.toml": "[build-system\n"}, ""),
        ({"pyproject.toml": "build-system = 1\n"}, ""),
        (built_by("1"), ""),
        # Sources cannot say where to look.
        (about("six @ https://example.org/${HOME}/six.whl"), "it requires six @ https://example.org/${HOME}/six.whl"),
        (built_by('["six @ file:///etc/passwd"]'), "only what an index has"),
        (built_by('["six\\n--index-url http://example.org"]'), "--index-url"),
        (built_by('["-r /etc/passwd"]'), "-r /etc/passwd"),
        ({"x.egg-info/requires.txt": "six\n--index-url http://example.org\n"}, "--index-url"),
    ],
)
def test_sources_that_cannot_be_read(tmp_path: Path, files: bytes | dict[str, str], reason: str) -> None:
    if isinstance(files, bytes):
        (tmp_path / "x-1.tar.gz").write_bytes(files)
    else:
        write_sdist(tmp_path, "x", "1", files)
    with pytest.raises(FarandoleError, match=r"x-1\.tar\.gz cannot be read: ") as refusal:
        sdist.read(tmp_path / "x-1.tar.gz")
    assert reason in str(refusal.value)


def test_what_cannot_be_taken(pages: Path) -> None:
    offer(pages, write_sdist(pages, "yanked", "1.0", about()), yanked="broken")
    offer(pages, write_sdist(pages, "new", "1.0", about()), **{"requires-python": ">=3.13"})
    for name in ("new", "yanked"):
        with pytest.raises(UnsatisfiableError, match=name):
            chosen(pages, name)
    offer(pages, write_sdist(pages, "changed", "1.0", about()))
    (pages / "simple/changed/changed-1.0.tar.gz").write_bytes(b"other")
    with pytest.raises(FarandoleError, match=r"changed-1\.0\.tar\.gz from .* is not the expected file: its sha256 is"):
        chosen(pages, "changed")
    offer(pages, write_sdist(pages, "made", "1.0", built_by('["six>99"]')))
    with pytest.raises(FarandoleError, match=r"made 1\.0 has no wheel, and what builds it has none either: .*six>99"):
        chosen(pages, "made")


BACKEND = """
import zipfile
def build_wheel(folder, *_):
    with zipfile.ZipFile(folder + "/x-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("x-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: x\\nVersion: 1\\n" + REQUIRES)
        wheel.writestr("x-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
    return "x-1-py3-none-any.whl"
"""


def test_a_wheel_that_needs_more_than_its_sources_said_is_refused(tmp_path: Path) -> None:
    requires = 'Requires-Dist: six<2,>=1\\nRequires-Dist: A.b\\nRequires-Dist: no; extra == "x"\\n'
    files = {"backend.py": BACKEND.replace("REQUIRES", f"'{requires}'"), "setup.py": ""}
    files["pyproject.toml"] = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    source, made = write_sdist(tmp_path, "x", "1", files), tmp_path / "cache"
    (made / "left").mkdir(parents=True)
    variables = {"SOURCE": source.name, "TOOLS": "", "REQUIRES": '["six", "a-b"]', "CACHE_DIRECTORY": str(made)}
    environment = {**os.environ, **variables, "VENV": "/none", "MPI": "/none"}
    script = (ROOT / "roles/stack/files/wheel.sh").read_text()

    def status(command: list[str], expected: str) -> int:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.stderr.strip().rpartition("\n")[2] == expected
        return done.returncode

    message = "error: it needs six<2,>=1, which its sources do not say: add that to stack_packages"
    assert status(["sh", "-euc", script], message) == 1
    (wheel,) = (made / "wheel").iterdir()
    assert wheel.name == "x-1-py3-none-any.whl"
    assert not (made / "left").exists()
    # What it checks in the end, of sources that say it all.
    _, check = script.rstrip().removesuffix("END").split("<<'END'\n")
    assert status([str(made / "venv/bin/python"), "-c", check, '["Six>=1,<2", "a_b", "more"]', str(wheel)], "") == 0
