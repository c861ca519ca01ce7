"""Downloads from a malicious server give a file of the requested size, or an error, in time."""

import io
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.core import fetching
from farandole.core.files import sha256

from .loading import load
from .stack import Endless, Trickles, dead_url, run_module, served

apt_source, depot = load("modules", "apt_source"), load("module_utils", "depot")
CONTENT = b"what was built" * 1000


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def asked(tmp_path: Path, url: str, **more: Any) -> dict[str, Any]:
    (tmp_path / "file").write_bytes(CONTENT)
    expected = {"name": "file", "sha256": sha256(tmp_path / "file"), "size": len(CONTENT), **more}
    return {"url": url, "files": [expected], "path": str(tmp_path / "node/files")}


def test_the_target_of_a_symlink_is_not_changed(tmp_path: Path) -> None:
    for name in ("elsewhere", "node"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere/file").write_bytes(CONTENT)
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


def test_single_bytes_do_not_count_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[depot.download.__module__], "BASE_S", 0.5)
    begun = time.monotonic()
    with served(tmp_path, Trickles) as url, pytest.raises(TimeoutError, match="incomplete after 1 seconds"):
        depot.from_depot(f"{url}/file", tmp_path / "draft", 30_000)
    assert time.monotonic() - begun < 5
    with pytest.raises(OSError, match="refused"):
        depot.from_depot(f"{dead_url()}/file", Path("/nowhere"), 1)


def test_a_large_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_json(msg: str) -> None:
        raise AssertionError(msg)

    module = SimpleNamespace(params={"key_url": "http://key"}, fail_json=fail_json)
    monkeypatch.setattr(apt_source, "fetch_url", lambda *_, **__: (io.BytesIO(bytes(65537)), {"status": 200}))
    with pytest.raises(AssertionError, match="the key http://key cannot be fetched: more than 65536 bytes were sent"):
        apt_source.fetch(module)
