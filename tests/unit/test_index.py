"""What package indexes are asked through uv: with pip's settings, and if they are down, strange or guarded."""

from pathlib import Path

import pytest

from farandole.core.errors import FarandoleError
from farandole.stack import index
from farandole.stack.catalogue import Need, Platform
from farandole.stack.index import Question, UnsatisfiableError, ask

from .packages import offer
from .stack import QUOTED, Forbids, Guarded, Login, Quiet, dead_url, served

BOOKWORM = Platform("debian-12", "x86_64", "3.11", "2.36")
TRIXIE = Platform("debian-13", "x86_64", "3.13", "2.41")


def question(*requirements: str, platform: Platform = BOOKWORM, until: str = "") -> Question:
    return Question(platform, tuple(Need(*index.split(text), "a test") for text in requirements), until=until)


def files(*requirements: str, **about: str | Platform) -> list[str]:
    return [wheel.file for wheel in ask(question(*requirements, **about))]  # type: ignore[arg-type]


@pytest.fixture
def pip(bare_pip: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    bare_pip.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = index.environment
    bare_pip.setattr(index, "environment", lambda: {**settings(), "UV_HTTP_RETRIES": "0"})
    return bare_pip


@pytest.fixture
def simple(tmp_path: Path, wheels: Path) -> Path:
    """The folder of an index with a page for each package."""
    offer(tmp_path, *wheels.glob("*.whl"))
    return tmp_path


@pytest.mark.usefixtures("small_index")
def test_the_best_wheels_for_the_nodes_and_not_for_this_machine() -> None:
    numpy = "numpy-{}-cp3{}-cp3{}-manylinux_2_28_x86_64.whl"
    assert files("numpy") == [numpy.format("2.4.6", 11, 11)]
    assert files("numpy", platform=TRIXIE) == [numpy.format("2.5.5", 13, 13)]
    with pytest.raises(UnsatisfiableError, match="numpy"):
        files("numpy", platform=Platform("debian-10", "x86_64", "3.11", "2.26"))
    needed = {wheel.package: wheel.needed_by for wheel in ask(question("pandas", "numpy"))}
    assert needed == {"numpy": ("pandas",), "pandas": (), "six": ("pandas",)}


def test_an_index_with_a_password(pip: pytest.MonkeyPatch, simple: Path) -> None:
    file = "six-1.17.0-py3-none-any.whl"
    with served(simple, Guarded) as url:
        host = url.removeprefix("http://")
        pip.setenv("PIP_INDEX_URL", f"http://me:{QUOTED}@{host}/simple/")
        assert [(wheel.file, wheel.url) for wheel in ask(question("six"))] == [(file, f"{url}/simple/six/{file}")]
        pip.setenv("PIP_INDEX_URL", f"http://me:wrong@{host}/simple/")
        with pytest.raises(FarandoleError) as refusal:
            ask(question("pandas"))
    assert "wrong" not in str(refusal.value)


def test_an_index_that_knows_no_dates_or_does_not_have_a_package(pip: pytest.MonkeyPatch, simple: Path) -> None:
    page = simple / "simple/none/index.html"
    page.parent.mkdir()
    page.write_text("<html><body><h1>Links for none</h1></body></html>")
    with served(simple) as url:
        pip.setenv("PIP_INDEX_URL", f"{url}/simple")
        assert files("six", until="2026-01-01T00:00:00Z") == ["six-1.17.0-py3-none-any.whl"]
        for name in ("none", "nowhere"):
            with pytest.raises(UnsatisfiableError) as refusal:
                files(name)
            assert index.missing(str(refusal.value)) == name


@pytest.mark.parametrize(
    ("handler", "reason"),
    [(None, "refused"), (Login, "/simple/six/ is another page: Please log in"), (Forbids, "/simple/six/: Not with me")],
)
def test_nothing_or_something_else_answers_instead_of_an_index(
    pip: pytest.MonkeyPatch, tmp_path: Path, handler: type[Quiet] | None, reason: str
) -> None:
    with served(tmp_path, handler or Quiet) as url:
        pip.setenv("PIP_INDEX_URL", f"{url if handler else dead_url()}/simple")
        with pytest.raises(FarandoleError, match=r"the package index cannot be reached .*pip config list") as refusal:
            files("six")
    assert reason in str(refusal.value)
