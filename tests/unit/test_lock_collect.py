"""The files of a lock, from real package indexes that are up, damaged, incomplete or down."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.stack import web
from farandole.stack.collect import collect

# A port that nothing listens on.
DEAD = "http://127.0.0.1:9/simple"
SOURCE = "horovod-0.28.1.tar.gz"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel(folder: Path, name: str, version: str = "1.0") -> dict[str, str]:
    """Write a valid, empty wheel."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return {"name": name, "version": version, "file": path.name, "sha256": digest(path)}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, *_: Any) -> None:
        pass


# The same password, quoted for a URL and as the user knows it.
QUOTED, SECRET = "s%40cr%2Fet%3A1", "s@cr/et:1"


class Guarded(Quiet):
    """Requires a password, and may redirect elsewhere."""

    elsewhere = ""

    def do_GET(self) -> None:
        said = self.headers.get("Authorization")
        if self.elsewhere and self.path.endswith(SOURCE):
            self.send_response(302)
            self.send_header("Location", f"{self.elsewhere}{self.path}")
            self.end_headers()
        elif said == "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode():
            super().do_GET()
        else:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="index"')
            self.end_headers()


class World:
    """A package index on this machine, a cache, and a lock of two wheels and a source."""

    def __init__(self, root: Path) -> None:
        self.cache, self.simple = root / "cache", root / "index" / "simple"
        self.said: list[str] = []
        self.lock: dict[str, Any] = {"platform": {"python": "3.11"}, "wheels": []}
        for name in ("alpha", "beta"):
            (self.simple / name).mkdir(parents=True)
            self.lock["wheels"].append(wheel(self.simple / name, name))
        (self.simple / "horovod").mkdir()
        source = self.simple / "horovod" / SOURCE
        source.write_bytes(b"source")
        self.lock["horovod"] = {"file": SOURCE, "sha256": digest(source)}

    def collect(self) -> bool:
        return collect(self.lock, self.cache, self.said.append)

    def refused(self) -> str:
        with pytest.raises(FarandoleError) as refusal:
            self.collect()
        return str(refusal.value)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*") if path.is_file())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(made.simple.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield made
    server.shutdown()


WHOLE = ["alpha-1.0-py3-none-any.whl", "beta-1.0-py3-none-any.whl", SOURCE]


def test_everything_is_downloaded_once(world: World) -> None:
    assert world.collect() is True
    assert world.files() == WHOLE
    assert "2/2 beta-1.0-py3-none-any.whl" in world.said
    world.said.clear()
    assert world.collect() is False
    assert world.said == []


def test_a_damaged_file_is_fetched_again(world: World) -> None:
    world.collect()
    damaged = world.cache / "wheels" / WHOLE[0]
    damaged.write_bytes(b"half")
    world.said.clear()
    assert world.collect() is True
    assert digest(damaged) == world.lock["wheels"][0]["sha256"]
    assert f"{damaged} is damaged" in world.said[0]
    assert "collecting 1 of 2 wheels" in world.said[1]


def test_another_file_under_the_same_name_is_refused(world: World) -> None:
    wanted = world.lock["wheels"][0]["sha256"]
    with zipfile.ZipFile(world.simple / "alpha" / WHOLE[0], "a") as archive:
        archive.writestr("alpha/more.py", "")
    said = world.refused()
    assert "alpha" in said
    assert f"expected {wanted}" in said
    assert f"its sha256 is {digest(world.simple / 'alpha' / WHOLE[0])}" in said
    assert "from http://127.0.0.1:" in said
    assert world.files() == []


def test_another_source_is_refused(world: World) -> None:
    (world.simple / "horovod" / SOURCE).write_bytes(b"other")
    said = world.refused()
    assert f"{SOURCE} from http://127.0.0.1:" in said
    assert world.lock["horovod"]["sha256"] in said
    assert SOURCE not in world.files()


@contextmanager
def serving(handler: type[Quiet], folder: Path) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture
def guarded(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("NETRC", os.devnull)
    with serving(Guarded, world.simple.parent) as port:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://me:{QUOTED}@127.0.0.1:{port}/simple")
        yield port


@pytest.mark.usefixtures("guarded")
def test_wheels_and_source_come_from_an_index_with_a_password(world: World) -> None:
    assert world.collect() is True
    assert world.files() == WHOLE


def test_a_password_from_netrc_is_used(
    world: World, guarded: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{guarded}/simple")
    world.lock["wheels"] = []
    world.collect()
    assert world.files() == [SOURCE]


@pytest.mark.parametrize("way", ["redirect", "link"])
@pytest.mark.usefixtures("guarded")
def test_the_password_is_never_sent_to_another_site(world: World, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    heard: list[str | None] = []

    class Other(Quiet):
        def do_GET(self) -> None:
            heard.append(self.headers.get("Authorization"))
            super().do_GET()

    with serving(Other, world.simple.parent) as port:
        if way == "redirect":
            monkeypatch.setattr(Guarded, "elsewhere", f"http://127.0.0.1:{port}")
        else:
            link = f"http://127.0.0.1:{port}/simple/horovod/{SOURCE}"
            (world.simple / "horovod" / "index.html").write_text(f'<a href="{link}">{SOURCE}</a>')
        world.lock["wheels"] = []
        world.collect()
    assert heard == [None]
    assert world.files() == [SOURCE]


def test_no_message_contains_a_password(world: World, guarded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.simple / "horovod" / SOURCE).write_bytes(b"other")
    (world.simple / "alpha" / WHOLE[0]).write_bytes(b"other")
    said = [world.refused()]
    wheels, world.lock["wheels"] = world.lock["wheels"], []
    said.append(world.refused())
    assert f"from http://***@127.0.0.1:{guarded}/simple/horovod" in said[-1]
    # The second is a token, which some indexes use instead of a user name.
    for user in ("me:wr%40ng", "wr%40ng"):
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{user}@127.0.0.1:{guarded}/simple")
        said.append(world.refused())
        assert f"(http://***@127.0.0.1:{guarded}/simple: Unauthorized)" in said[-1]
    world.lock["wheels"] = wheels
    said += [world.refused(), *world.said]
    assert not any(secret in line for line in said for secret in (QUOTED, SECRET, "wr%40ng", "wr@ng")), said


def test_an_unreachable_index(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", DEAD)
    assert "the package index cannot be reached from this machine" in world.refused()
    world.lock["wheels"] = []
    assert f"{SOURCE} cannot be fetched ({DEAD}: [Errno 111] Connection refused)" in world.refused()


def test_a_wheel_that_no_index_has(world: World) -> None:
    (world.simple / "beta" / WHOLE[1]).unlink()
    assert world.refused() == f"none of the package indexes of `pip config list` has {WHOLE[1]}"


def test_a_source_that_no_index_has(world: World) -> None:
    (world.simple / "horovod" / SOURCE).unlink()
    assert f"{SOURCE} cannot be fetched (http://127.0.0.1:" in world.refused()


def test_versions_are_matched_exactly(world: World) -> None:
    """1.0 is not 1.0+cpu, which pip would prefer."""
    wheel(world.simple / "alpha", "alpha", "1.0+cpu")
    world.collect()
    assert world.files() == WHOLE


def test_a_folder_that_cannot_be_created(world: World) -> None:
    world.cache.write_text("in the way")
    assert f"{world.cache}" in world.refused()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file system of its own")
def test_a_full_disk(world: World) -> None:
    world.cache.mkdir()
    with zipfile.ZipFile(world.simple / "alpha" / WHOLE[0], "a") as archive:
        archive.writestr("alpha/large", os.urandom(1 << 20))
    world.lock["wheels"][0]["sha256"] = digest(world.simple / "alpha" / WHOLE[0])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", world.cache], check=True)
    try:
        said = world.refused()
        assert said.startswith(f"no space left on this machine for {world.cache}")
        assert "set XDG_CACHE_HOME" in said
        assert world.files() == []
    finally:
        subprocess.run(["umount", world.cache], check=True)


def test_an_interruption_leaves_no_partial_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is slow to send one file, and the user presses Ctrl-C."""
    # A shell ignores SIGINT for what it starts in the background.
    code = "import sys, json, signal; from pathlib import Path; from farandole.stack.collect import collect; "
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "collect(json.loads(sys.argv[1]), Path(sys.argv[2]), lambda line: print(line, flush=True))"
    slow = threading.Event()
    original = Quiet.do_GET

    def do_get(handler: Quiet) -> None:
        if handler.path.endswith(WHOLE[1]):
            slow.set()
            threading.Event().wait(5)
        original(handler)

    with monkeypatch.context() as patched:
        patched.setattr(Quiet, "do_GET", do_get)
        command = [sys.executable, "-c", code, json.dumps(world.lock), str(world.cache)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            assert slow.wait(30)
            running.send_signal(2)
            running.wait(30)
    assert running.returncode != 0
    assert world.files() == []
    assert world.collect() is True
    assert world.files() == WHOLE


def test_modules_in_the_working_directory_are_not_imported(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = tmp_path / "called"
    called.mkdir()
    for name in ("pip", "json"):
        (called / f"{name}.py").write_text(f"open({str(called / 'owned')!r}, 'w')")
    monkeypatch.chdir(called)
    assert collect(world.lock, world.cache, world.said.append)
    assert not (called / "owned").exists()


def test_without_settings_pip_s_own_index_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (default,) = web.indexes()
    assert default.startswith("https://") and default.endswith("/simple")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.test/simple")
    assert web.indexes() == ["https://index.test/simple"]
    monkeypatch.setattr(web, "PIP", ("true",))
    monkeypatch.delenv("PIP_INDEX_URL")
    with pytest.raises(FarandoleError, match="pip has no package index"):
        web.indexes()
