"""What package indexes are asked through uv: with pip's settings, and if they are down, strange or guarded."""

from __future__ import annotations

import os
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from packaging.utils import parse_wheel_filename

from farandole.core.errors import FarandoleError
from farandole.stack import index
from farandole.stack.catalogue import Need, Platform
from farandole.stack.index import Question, UnsatisfiableError, Wheel, ask

from .packages import pip_settings
from .stack import Forbids, Login, Quiet, dead_url, served
from .test_lock_collect import QUOTED, Guarded, digest

BOOKWORM = Platform("debian-12", "x86_64", "3.11", "2.36")
TRIXIE = Platform("debian-13", "x86_64", "3.13", "2.41")


def question(*requirements: str, platform: Platform = BOOKWORM, until: str = "") -> Question:
    return Question(platform, tuple(Need(*index.split(text), "a test") for text in requirements), until=until)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheels: Path) -> pytest.MonkeyPatch:
    """A pip without any settings."""
    for name in pip_settings(wheels):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return monkeypatch


@pytest.fixture
def simple(tmp_path: Path, wheels: Path) -> Path:
    """The folder of an index with a page for each package."""
    for file in wheels.glob("*.whl"):
        page = tmp_path / "simple" / parse_wheel_filename(file.name)[0] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        (page.parent / file.name).hardlink_to(file)
        with page.open("a") as lines:
            lines.write(f'<a href="{file.name}#sha256={digest(file)}">{file.name}</a>\n')
    return tmp_path


def files(found: list[Wheel]) -> list[str]:
    return [wheel.file for wheel in found]


@pytest.mark.usefixtures("small_index")
def test_the_best_wheels_for_the_nodes_and_not_for_this_machine() -> None:
    numpy = "numpy-{}-cp3{}-cp3{}-manylinux_2_28_x86_64.whl"
    assert files(ask(question("numpy"))) == [numpy.format("2.4.6", 11, 11)]
    assert files(ask(question("numpy", platform=TRIXIE))) == [numpy.format("2.5.5", 13, 13)]
    with pytest.raises(UnsatisfiableError, match="numpy"):
        ask(question("numpy", platform=Platform("debian-10", "x86_64", "3.11", "2.26")))


@pytest.mark.usefixtures("small_index")
def test_who_needs_a_package() -> None:
    found = {wheel.package: wheel.needed_by for wheel in ask(question("pandas", "numpy"))}
    assert found == {"numpy": ("pandas",), "pandas": (), "six": ("pandas",)}


def test_an_index_with_a_password(pip: pytest.MonkeyPatch, simple: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, directory=str(simple))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        pip.setenv("PIP_INDEX_URL", f"http://me:{QUOTED}@{host}/simple/")
        found = ask(question("six"))
        assert [(wheel.file, wheel.url) for wheel in found] == [
            (file, f"http://{host}/simple/six/{file}") for file in ("six-1.17.0-py3-none-any.whl",)
        ]
        pip.setenv("PIP_INDEX_URL", f"http://me:wrong@{host}/simple/")
        with pytest.raises(FarandoleError) as refusal:
            ask(question("pandas"))
        server.shutdown()
    assert "wrong" not in str(refusal.value)


def test_a_date_is_ignored_where_an_index_knows_none(pip: pytest.MonkeyPatch, simple: Path) -> None:
    with served(simple) as url:
        pip.setenv("PIP_INDEX_URL", f"{url}/simple/")
        assert files(ask(question("six", until="2026-01-01T00:00:00Z"))) == ["six-1.17.0-py3-none-any.whl"]


def test_an_index_that_is_down(pip: pytest.MonkeyPatch) -> None:
    pip.setenv("PIP_INDEX_URL", f"{dead_url()}/simple")
    with pytest.raises(
        FarandoleError, match=r"the package index cannot be reached from this machine .*pip config list"
    ):
        ask(question("six"))


@pytest.mark.parametrize(
    ("handler", "words"),
    [(Login, "/simple/six/ is another page: Please log in"), (Forbids, "/simple/six/: Not with me")],
)
def test_something_else_answers_instead_of_an_index(
    pip: pytest.MonkeyPatch, tmp_path: Path, handler: type[Quiet], words: str
) -> None:
    with served(tmp_path, handler) as url:
        pip.setenv("PIP_INDEX_URL", f"{url}/simple")
        with pytest.raises(FarandoleError, match=r"the package index cannot be reached .*pip config list") as refusal:
            ask(question("six"))
    assert words in str(refusal.value)


def test_an_index_that_does_not_have_a_package(pip: pytest.MonkeyPatch, simple: Path) -> None:
    page = simple / "simple/none/index.html"
    page.parent.mkdir()
    page.write_text("<html><body><h1>Links for none</h1></body></html>")
    with served(simple) as url:
        pip.setenv("PIP_INDEX_URL", f"{url}/simple")
        for name in ("none", "nowhere"):
            with pytest.raises(UnsatisfiableError) as refusal:
                ask(question(name))
            assert index.missing(str(refusal.value)) == name
