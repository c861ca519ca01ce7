"""What a server that means ill can make of a download: a file of the size that was asked for, or an error, in time."""

from __future__ import annotations

import hashlib
import io
import time
from pathlib import Path
from typing import Any

import pytest

from farandole import fetching
from farandole.stack import collect

from .loading import load
from .stack import BreaksOff, Endless, Trickles, dead_url, run_module, served

apt_source, source_fetch = load("modules", "apt_source"), load("action", "source_fetch")
CONTENT = b"what was built" * 1000


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def asked(tmp_path: Path, url: str, **more: Any) -> dict[str, Any]:
    (tmp_path / "file").write_bytes(CONTENT)
    (tmp_path / "node").mkdir()
    told = {"url": f"{url}/file", "sha256": hashlib.sha256(CONTENT).hexdigest(), "size": len(CONTENT)}
    return {**told, "path": str(tmp_path / "node/file"), **more}


def test_a_file_is_fetched_once(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        wish = asked(tmp_path, url)
        assert run_module("depot_fetch", wish, check_mode=True)["changed"]
        assert run_module("depot_fetch", wish)["changed"]
    assert (tmp_path / "node/file").read_bytes() == CONTENT
    assert not run_module("depot_fetch", wish)["changed"]
    (tmp_path / "node/file").write_text("damaged")
    assert run_module("depot_fetch", wish, check_mode=True)["changed"]


def test_no_byte_more_than_was_announced_is_written(tmp_path: Path) -> None:
    with served(tmp_path, Endless) as url:
        with pytest.raises(fetching.TooMuchError, match="more than 3000000 bytes were sent"):
            fetching.from_depot(f"{url}/file", tmp_path / "draft", 3_000_000)
        assert (tmp_path / "draft").stat().st_size <= 3_000_000
        answer = run_module("depot_fetch", asked(tmp_path, url))
    assert f"/file is damaged: it is longer than {len(CONTENT)} bytes" in answer["msg"]
    assert list((tmp_path / "node").iterdir()) == []


def test_what_breaks_off_is_told_from_what_is_damaged(tmp_path: Path) -> None:
    with served(tmp_path, BreaksOff) as url:
        answer = run_module("depot_fetch", asked(tmp_path, url))
    assert f"cannot be fetched: it broke off {len(CONTENT) // 2} bytes before the end" in answer["msg"]
    with served(tmp_path) as url:
        (tmp_path / "file").write_bytes(CONTENT[::-1])
        said = run_module("depot_fetch", {**asked_again(tmp_path, url)})["msg"]
    assert "is damaged: its sha256 is" in said
    assert list((tmp_path / "node").iterdir()) == []


def asked_again(tmp_path: Path, url: str) -> dict[str, Any]:
    (tmp_path / "node").rmdir()
    return {**asked(tmp_path, url), "sha256": "0" * 64}


def test_a_byte_now_and_then_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PATIENCE_S", 0.5)
    begun = time.monotonic()
    with served(tmp_path, Trickles) as url, pytest.raises(TimeoutError, match="not whole after 1 seconds"):
        fetching.from_depot(f"{url}/file", tmp_path / "draft", 30_000)
    assert time.monotonic() - begun < 5


def test_a_network_of_64_kib_a_second_is_fast_enough() -> None:
    assert fetching.patience(432_804_929) > 432_804_929 / 65536
    assert fetching.patience(1) < 130


def test_work_that_fails_fails_as_itself() -> None:
    with pytest.raises(OSError, match="refused"):
        fetching.from_depot(f"{dead_url()}/file", Path("/nowhere"), 1)
    with pytest.raises(FileNotFoundError):
        fetching.within(5, lambda: Path("/nowhere/at/all").read_bytes())


def test_the_control_machine_takes_no_endless_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_fetch, "LIMIT", 1 << 20)
    monkeypatch.setattr(collect, "LARGEST", 1 << 20)
    with served(tmp_path, Endless) as url:
        with pytest.raises(fetching.TooMuchError):
            source_fetch.download(f"{url}/file", tmp_path / "file", "0")
        with pytest.raises(fetching.TooMuchError):
            collect._link(url, "horovod", "file")
    assert list(tmp_path.iterdir()) == []


def test_no_key_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusedError(Exception):
        """In place of the end of the module."""

    class Module:
        def __init__(self) -> None:
            self.params = {"key_url": "http://key"}

        def fail_json(self, msg: str) -> None:
            raise RefusedError(msg)

    monkeypatch.setattr(apt_source, "fetch_url", lambda *_, **__: (io.BytesIO(bytes(65537)), {"status": 200}))
    with pytest.raises(RefusedError, match="the key http://key cannot be fetched: more than 65536 bytes were sent"):
        apt_source.fetch(Module(), "0" * 40)
