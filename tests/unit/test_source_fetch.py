"""Fetching a source archive, with real files and a real site."""

from pathlib import Path

import pytest

from farandole.core import fetching
from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.stack import sources

from .loading import act
from .stack import Endless, NotHttp, dead_url, served

WRONG = "0" * 64


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def file(path: Path, content: str = "source") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def source(path: Path, **more: str) -> dict[str, str]:
    return {"file": path.name, "sha256": sha256(path), **more}


def bring(folder: Path, *places: dict[str, str]) -> Path:
    path, fetched = sources.provide(places, folder, print)
    assert fetched
    return path


def test_the_users_own_file_is_accepted_under_any_name(tmp_path: Path) -> None:
    path = file(tmp_path / "mine.tar")
    assert sources.of_user(path, [{"file": "a.tar", "sha256": WRONG}, {**source(path), "file": "b.tar"}]) == path


def test_the_users_own_file_is_refused_if_it_is_not_in_the_lock(tmp_path: Path) -> None:
    path = file(tmp_path / "mine.tar")
    with pytest.raises(FarandoleError) as refusal:
        sources.of_user(path, [{"file": "a", "sha256": WRONG}, {"file": "b", "sha256": "1" * 64}])
    assert f"{path} is not the source named in the lock: its sha256 is {sha256(path)}" in str(refusal.value)
    assert f"expected {WRONG} or {'1' * 64}" in str(refusal.value)
    with pytest.raises(FarandoleError, match=f"there is no file {tmp_path / 'no'} on the control machine"):
        sources.of_user(tmp_path / "no", [{"file": "a", "sha256": WRONG}])


def test_a_cached_source_is_found(tmp_path: Path) -> None:
    said: list[str] = []
    good = file(tmp_path / "b.tar")
    damaged = source(file(tmp_path / "a.tar"))
    (tmp_path / "a.tar").write_text("sour")
    assert sources.cached([damaged, source(good)], tmp_path, said.append) == good
    assert sources.cached([damaged], tmp_path, said.append) is None
    assert said[-1].startswith(f"{tmp_path / 'a.tar'} is damaged (its sha256 is not {damaged['sha256']})")
    assert sources.cached([source(good)], tmp_path / "empty", said.append) is None
    # Two sites may have two files of one name.
    assert sources.cached([source(good), {"file": "b.tar", "sha256": WRONG}], tmp_path, print) == good


def test_a_download_is_kept_only_if_its_sha256_matches(tmp_path: Path) -> None:
    there = file(tmp_path / "site/a.tar")
    target = file(tmp_path / "cache/a.tar", "older")
    with served(tmp_path / "site") as url:
        place = {"url": f"{url}/a.tar", "file": "a.tar", "sha256": WRONG}
        with pytest.raises(FarandoleError, match=f"{url}/a.tar is not the expected file: its sha256 is"):
            bring(target.parent, place)
        assert [(path.name, path.read_text()) for path in target.parent.iterdir()] == [("a.tar", "older")]
        assert bring(target.parent, {**place, "sha256": sha256(there)}) == target
    assert [(path.name, path.read_text()) for path in target.parent.iterdir()] == [("a.tar", "source")]


def test_an_unreachable_or_endless_site_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST", 1 << 20)
    place = {"file": "a.tar", "sha256": WRONG}
    with pytest.raises(FarandoleError, match="refused"):
        bring(tmp_path / "cache", {**place, "url": f"{dead_url()}/a.tar"})
    with served(tmp_path, Endless) as url:
        with pytest.raises(FarandoleError, match="more than 1048576 bytes were sent"):
            bring(tmp_path / "cache", {**place, "url": f"{url}/a.tar"})
        with pytest.raises(fetching.TooMuchError):
            sources._text(url, "horovod")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_source_package_needs_a_builder(tmp_path: Path) -> None:
    place = {"apt": "openmpi", "release": "bookworm", "file": "a.tar", "sha256": WRONG}
    with pytest.raises(FarandoleError, match="openmpi is a Debian source package, which a builder fetches"):
        bring(tmp_path, place)

    def from_builder(_: sources.Source, draft: Path) -> str:
        draft.write_text("source")
        return "the builder"

    with pytest.raises(FarandoleError, match=r"a\.tar from the builder is not the expected file"):
        sources.provide([place], tmp_path, print, apt=from_builder)
    good = {**place, "sha256": sha256(file(tmp_path / "elsewhere/a.tar"))}
    assert sources.provide([good], tmp_path / "cache", print, apt=from_builder) == (tmp_path / "cache/a.tar", True)


def test_the_first_site_with_the_file_is_used(tmp_path: Path) -> None:
    good = source(file(tmp_path / "site/b.tar"))
    folder, dead = tmp_path / "cache", dead_url()
    with served(tmp_path / "site") as url, served(tmp_path, NotHttp) as other:
        places = [
            {"url": f"{dead}/a.tar", "file": "a.tar", "sha256": WRONG},
            {"url": f"{url}/gone.tar", "file": "c.tar", "sha256": WRONG},
            {"url": f"{other}/d.tar", "file": "d.tar", "sha256": WRONG},
        ]
        asked = {"folder": str(folder), "sources": places, "variable": "openmpi_tarball"}
        message = act("source_fetch", asked)["msg"]
        assert f"a.tar cannot be fetched ({dead}/a.tar: [Errno 111] Connection refused; " in message
        assert f"{url}/gone.tar: File not found; {other}/d.tar: 220 mail" in message
        assert message.endswith(f", or put a.tar or c.tar or d.tar into {folder}, or set openmpi_tarball to its path")
        places.append({**good, "url": f"{url}/b.tar"})
        assert act("source_fetch", asked, check_mode=True)["changed"]
        assert list(folder.iterdir()) == []
        answer = act("source_fetch", asked)
        assert (answer["changed"], answer["path"], answer["sha256"]) == (True, str(folder / "b.tar"), good["sha256"])
    again = act("source_fetch", asked)
    assert (again["changed"], again["path"]) == (False, str(folder / "b.tar"))
