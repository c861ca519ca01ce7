"""Downloads from a malicious server give a file of the requested size, or an error, in time."""

from __future__ import annotations

import hashlib
import io
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farandole.core import fetching

from .loading import load
from .stack import Endless, Trickles, Truncates, dead_url, run_module, served

apt_source, depot = load("modules", "apt_source"), load("module_utils", "depot")
CONTENT = b"what was built" * 1000


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def asked(tmp_path: Path, url: str, **more: Any) -> dict[str, Any]:
    (tmp_path / "file").write_bytes(CONTENT)
    expected = {"name": "file", "sha256": hashlib.sha256(CONTENT).hexdigest(), "size": len(CONTENT), **more}
    return {"url": url, "files": [expected], "path": str(tmp_path / "node/files")}


def test_a_folder_is_fetched_once(tmp_path: Path) -> None:
    folder = tmp_path / "node/files"
    with served(tmp_path) as url:
        request = asked(tmp_path, url)
        (tmp_path / "below").mkdir()
        (tmp_path / "below/other").write_text("other")
        other = {"name": "below/other", "sha256": hashlib.sha256(b"other").hexdigest(), "size": 5}
        request["files"].append(other)
        assert run_module("depot_fetch", request, check_mode=True)["changed"]
        assert run_module("depot_fetch", request)["changed"]
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"file": CONTENT, "other": b"other"}
        assert not run_module("depot_fetch", request)["changed"]
        # A damaged file, a file of an earlier set, and leftovers of a killed run.
        (folder / "file").write_text("damaged")
        (folder / "former").write_text("former")
        (tmp_path / "node/.files.incoming/new").mkdir(parents=True)
        assert run_module("depot_fetch", request, check_mode=True)["changed"]
        assert run_module("depot_fetch", request)["changed"]
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"file": CONTENT, "other": b"other"}
        assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", "files"]
        # All or nothing.
        (tmp_path / "below/other").write_text("OTHER")
        (folder / "file").write_text("damaged")
        assert "/below/other is damaged: its sha256 is" in run_module("depot_fetch", request)["msg"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"file": "damaged", "other": "other"}


def test_the_target_of_a_symlink_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_bytes(CONTENT)
    (tmp_path / "node").mkdir()
    (tmp_path / "node/files").symlink_to(tmp_path / "elsewhere")
    with served(tmp_path) as url:
        assert run_module("depot_fetch", asked(tmp_path, url))["changed"]
    assert not (tmp_path / "node/files").is_symlink()
    assert (tmp_path / "elsewhere/file").exists()


def test_a_lost_network_is_told_from_a_full_disk(tmp_path: Path) -> None:
    # Reading the first page of one's own memory fails with a plain OSError, like reading from a network that went down.
    with pytest.raises(ConnectionError, match="Input/output error"):
        fetching.download(partial(Path("/proc/self/mem").open, "rb"), tmp_path / "draft", 9)
    with pytest.raises(OSError, match="No space left") as refused:
        fetching.download(lambda: io.BytesIO(CONTENT), Path("/dev/full"), len(CONTENT))
    assert not isinstance(refused.value, ConnectionError)


def test_no_more_than_the_announced_size_is_written(tmp_path: Path) -> None:
    with served(tmp_path, Endless) as url:
        with pytest.raises(depot.TooMuchError, match="more than 3000000 bytes were sent"):
            depot.from_depot(f"{url}/file", tmp_path / "draft", 3_000_000)
        assert (tmp_path / "draft").stat().st_size <= 3_000_000
        answer = run_module("depot_fetch", asked(tmp_path, url))
    assert f"/file is damaged: it is longer than {len(CONTENT)} bytes" in answer["msg"]
    assert nothing_is_left(tmp_path)


def test_truncated_and_damaged_downloads_have_different_messages(tmp_path: Path) -> None:
    with served(tmp_path, Truncates) as url:
        answer = run_module("depot_fetch", asked(tmp_path, url))
    assert f"cannot be fetched: the transfer stopped {len(CONTENT) // 2} bytes before the end" in answer["msg"]
    with served(tmp_path) as url:
        (tmp_path / "file").write_bytes(CONTENT[::-1])
        said = run_module("depot_fetch", asked(tmp_path, url, sha256="0" * 64))["msg"]
    assert "is damaged: its sha256 is" in said
    assert nothing_is_left(tmp_path)


def nothing_is_left(tmp_path: Path) -> bool:
    return [path.name for path in (tmp_path / "node").iterdir()] == [".lock"]


def test_single_bytes_do_not_count_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[depot.download.__module__], "BASE_S", 0.5)
    begun = time.monotonic()
    with served(tmp_path, Trickles) as url, pytest.raises(TimeoutError, match="incomplete after 1 seconds"):
        depot.from_depot(f"{url}/file", tmp_path / "draft", 30_000)
    assert time.monotonic() - begun < 5


def test_a_network_of_64_kib_a_second_is_fast_enough() -> None:
    assert fetching.time_limit(432_804_929) > 432_804_929 / 65536
    assert fetching.time_limit(1) < 130


def test_errors_of_the_work_are_passed_on() -> None:
    with pytest.raises(OSError, match="refused"):
        depot.from_depot(f"{dead_url()}/file", Path("/nowhere"), 1)
    with pytest.raises(FileNotFoundError):
        fetching.within(5, lambda: Path("/nowhere/at/all").read_bytes())


def test_a_large_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusedError(Exception):
        """Raised where the real module would exit."""

    class Module:
        def __init__(self) -> None:
            self.params = {"key_url": "http://key"}

        def fail_json(self, msg: str) -> None:
            raise RefusedError(msg)

    monkeypatch.setattr(apt_source, "fetch_url", lambda *_, **__: (io.BytesIO(bytes(65537)), {"status": 200}))
    with pytest.raises(RefusedError, match="the key http://key cannot be fetched: more than 65536 bytes were sent"):
        apt_source.fetch(Module())
