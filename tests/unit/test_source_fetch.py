"""Where a source comes from, with real files and a real site."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.errors import FarandoleError
from farandole.stack.cache import sha256

from .loading import load
from .stack import Babbles, dead_url, run_action, served

fetch = load("action", "source_fetch")

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


def test_the_user_s_own_file_is_taken_under_any_name(tmp_path: Path) -> None:
    path = file(tmp_path / "mine.tar")
    sources = [{"file": "a.tar", "sha256": WRONG}, {**source(path), "file": "b.tar"}]
    assert fetch.of_file(path, sources) == path


def test_the_user_s_own_file_is_refused_when_the_lock_does_not_name_it(tmp_path: Path) -> None:
    path = file(tmp_path / "mine.tar")
    with pytest.raises(FarandoleError) as refusal:
        fetch.of_file(path, [{"file": "a", "sha256": WRONG}, {"file": "b", "sha256": "1" * 64}])
    assert f"{path} is not the source that the lock names: its sha256 is {sha256(path)}" in str(refusal.value)
    assert f"wanted is {WRONG} or {'1' * 64}" in str(refusal.value)
    with pytest.raises(FarandoleError, match=f"{tmp_path / 'no'} is not there on the control machine"):
        fetch.of_file(tmp_path / "no", [{"file": "a", "sha256": WRONG}])


def test_what_was_brought_before_is_found(tmp_path: Path) -> None:
    good = file(tmp_path / "b.tar")
    damaged = source(file(tmp_path / "a.tar"))
    (tmp_path / "a.tar").write_text("sour")
    assert fetch.cached(tmp_path, [damaged, source(good)]) == good
    assert fetch.cached(tmp_path, [damaged]) is None
    assert fetch.cached(tmp_path / "empty", [source(good)]) is None


def test_two_sites_may_have_two_files_of_one_name(tmp_path: Path) -> None:
    good = file(tmp_path / "a.tar")
    assert fetch.cached(tmp_path, [source(good), {"file": "a.tar", "sha256": WRONG}]) == good


def test_a_download_lands_only_when_it_is_what_was_wanted(tmp_path: Path) -> None:
    there = file(tmp_path / "site/a.tar")
    target = file(tmp_path / "cache/a.tar", "older")
    with served(tmp_path / "site") as url:
        with pytest.raises(FarandoleError, match=f"{url}/a.tar is not what the catalogue names: its sha256 is"):
            fetch.download(f"{url}/a.tar", target, WRONG)
        assert [(path.name, path.read_text()) for path in target.parent.iterdir()] == [("a.tar", "older")]
        fetch.download(f"{url}/a.tar", target, sha256(there))
    assert [(path.name, path.read_text()) for path in target.parent.iterdir()] == [("a.tar", "source")]


def test_a_site_that_does_not_answer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="refused"):
        fetch.download(f"{dead_url()}/a.tar", tmp_path / "a.tar", WRONG)
    assert list(tmp_path.iterdir()) == []


def test_the_first_place_that_has_it_is_taken(tmp_path: Path) -> None:
    good = source(file(tmp_path / "site/b.tar"))
    folder, dead = tmp_path / "cache", dead_url()
    with served(tmp_path / "site") as url, served(tmp_path, Babbles) as babbling:
        sources = [
            {"url": f"{dead}/a.tar", "file": "a.tar", "sha256": WRONG},
            {"url": f"{url}/gone.tar", "file": "c.tar", "sha256": WRONG},
            {"url": f"{babbling}/d.tar", "file": "d.tar", "sha256": WRONG},
        ]
        asked = {"folder": str(folder), "sources": sources}
        words = run_action("source_fetch", asked, tmp_path)["msg"]
        assert f"no source of a.tar can be reached: {dead}/a.tar: [Errno 111] Connection refused" in words
        assert f"{url}/gone.tar: File not found; {babbling}/d.tar: 220 mail" in words
        assert f"(openmpi_tarball), or put it into {folder}" in words
        sources.append({**good, "url": f"{url}/b.tar"})
        assert run_action("source_fetch", asked, tmp_path, check_mode=True)["changed"]
        assert list(folder.iterdir()) == []
        answer = run_action("source_fetch", asked, tmp_path)
        assert (answer["changed"], answer["path"], answer["sha256"]) == (True, str(folder / "b.tar"), good["sha256"])
    again = run_action("source_fetch", asked, tmp_path)
    assert (again["changed"], again["path"]) == (False, str(folder / "b.tar"))
