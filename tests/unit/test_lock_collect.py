"""The files of a lock, from real package indexes that are up, damaged, incomplete or down."""

import json
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.stack import web
from farandole.stack.collect import collect

from .packages import write_wheel
from .stack import QUOTED, SECRET, Guarded, Quiet, dead_url, interrupt, served

SOURCE = "horovod-0.28.1.tar.gz"
WHOLE = ["alpha-1.0-py3-none-any.whl", "beta-1.0-py3-none-any.whl", SOURCE]


class World:
    """A package index on this machine, a cache, and a lock of two wheels and a source."""

    def __init__(self, root: Path) -> None:
        self.cache, self.simple, self.said = root / "cache", root / "index/simple", list[str]()
        self.source = self.simple / "horovod" / SOURCE
        self.lock: dict[str, Any] = {"platform": {"python": "3.11"}, "wheels": []}
        for name in ("alpha", "beta", "horovod"):
            (self.simple / name).mkdir(parents=True)
        for name in ("alpha", "beta"):
            path = write_wheel(self.simple / name, name, "1.0")
            self.lock["wheels"].append({"name": name, "version": "1.0", "file": path.name, "sha256": sha256(path)})
        self.source.write_bytes(b"source")
        self.lock["horovod"] = {"file": SOURCE, "sha256": sha256(self.source)}

    def collect(self) -> bool:
        self.said.clear()
        return collect(self.lock, self.cache, self.said.append)

    def refused(self) -> str:
        with pytest.raises(FarandoleError) as refusal:
            self.collect()
        return str(refusal.value)

    def fatten(self, content: bytes) -> Path:
        """Replace the first wheel in the index."""
        path = self.simple / "alpha" / WHOLE[0]
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("alpha/more", content)
        return path

    def files(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*") if path.is_file())


@pytest.fixture
def world(tmp_path: Path, bare_pip: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    with served(made.simple.parent) as url:
        bare_pip.setenv("PIP_INDEX_URL", f"{url}/simple")
        yield made


@pytest.fixture
def guarded(world: World, bare_pip: pytest.MonkeyPatch) -> Iterator[str]:
    """The host of an index that wants a password, which pip knows."""
    with served(world.simple.parent, Guarded) as url:
        host = url.removeprefix("http://")
        bare_pip.setenv("PIP_INDEX_URL", f"http://me:{QUOTED}@{host}/simple")
        yield host


def test_everything_is_downloaded_once_and_what_is_damaged_again(world: World) -> None:
    # pip would prefer this one, but 1.0 is not 1.0+cpu.
    write_wheel(world.simple / "alpha", "alpha", "1.0+cpu")
    assert world.collect() is True
    assert world.files() == WHOLE
    assert "2/2 beta-1.0-py3-none-any.whl" in world.said
    assert world.collect() is False
    assert world.said == []
    damaged = world.cache / "wheels" / WHOLE[0]
    damaged.write_bytes(b"half")
    assert world.collect() is True
    assert sha256(damaged) == world.lock["wheels"][0]["sha256"]
    assert f"{damaged} is damaged" in world.said[0]
    assert "collecting 1 of 2 wheels" in world.said[1]


def test_another_file_under_the_same_name_is_refused(world: World) -> None:
    world.source.write_bytes(b"other")
    said = world.refused()
    assert f"{SOURCE} from http://127.0.0.1:" in said
    assert world.lock["horovod"]["sha256"] in said
    assert SOURCE not in world.files()
    for name in WHOLE[:2]:
        (world.cache / "wheels" / name).unlink()
    other = sha256(world.fatten(b""))
    said = world.refused()
    for part in ("alpha", world.lock["wheels"][0]["sha256"], other, "from http://127.0.0.1:"):
        assert part in said
    assert world.files() == []


@pytest.mark.usefixtures("guarded")
def test_wheels_and_source_come_from_an_index_with_a_password(world: World) -> None:
    assert world.collect() is True
    assert world.files() == WHOLE


def test_a_password_from_netrc_is_used(
    world: World, guarded: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{guarded}/simple")
    world.lock["wheels"] = []
    world.collect()
    assert world.files() == [SOURCE]


@pytest.mark.parametrize("way", ["redirect", "link"])
@pytest.mark.usefixtures("guarded")
def test_the_password_is_never_sent_to_another_site(world: World, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    heard: list[str | None] = []

    class Other(Quiet):
        def do_GET(self) -> None:  # noqa: N802, the name that http.server calls
            heard.append(self.headers.get("Authorization"))
            super().do_GET()

    def redirect(handler: Guarded) -> None:
        if not handler.path.endswith(SOURCE):
            original(handler)
            return
        handler.send_response(302)
        handler.send_header("Location", f"{elsewhere}{handler.path}")
        handler.end_headers()

    original = Guarded.do_GET
    with served(world.simple.parent, Other) as elsewhere:
        if way == "redirect":
            monkeypatch.setattr(Guarded, "do_GET", redirect)
        else:
            link = f'<a href="{elsewhere}/simple/horovod/{SOURCE}">{SOURCE}</a>'
            world.source.with_name("index.html").write_text(link)
        world.lock["wheels"] = []
        world.collect()
    assert heard == [None]
    assert world.files() == [SOURCE]


def test_no_message_contains_a_password(world: World, guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world.source.write_bytes(b"other")
    (world.simple / "alpha" / WHOLE[0]).write_bytes(b"other")
    said = [world.refused(), *world.said]
    wheels, world.lock["wheels"] = world.lock["wheels"], []
    said.append(world.refused())
    assert f"from http://***@{guarded}/simple/horovod" in said[-1]
    # The second is a token, which some indexes use instead of a user name.
    for user in ("me:wr%40ng", "wr%40ng"):
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{user}@{guarded}/simple")
        said.append(world.refused())
        assert f"(http://***@{guarded}/simple: Unauthorized)" in said[-1]
    world.lock["wheels"] = wheels
    said += [world.refused(), *world.said]
    assert not any(secret in line for line in said for secret in (QUOTED, SECRET, "wr%40ng", "wr@ng")), said


def test_an_unreachable_index(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = dead_url()
    monkeypatch.setenv("PIP_INDEX_URL", f"{dead}/simple")
    assert "the package index cannot be reached from this machine" in world.refused()
    world.lock["wheels"] = []
    assert f"{SOURCE} cannot be fetched ({dead}/simple: [Errno 111] Connection refused)" in world.refused()


def test_a_file_that_no_index_has_is_named(world: World) -> None:
    world.source.unlink()
    assert f"{SOURCE} cannot be fetched (http://127.0.0.1:" in world.refused()
    (world.simple / "beta" / WHOLE[1]).unlink()
    (world.cache / "wheels" / WHOLE[1]).unlink()
    assert f"none of the package indexes of `pip config list` has {WHOLE[1]}" in world.refused()


def test_a_folder_that_cannot_be_created(world: World) -> None:
    world.cache.write_text("in the way")
    assert f"{world.cache}" in world.refused()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file system of its own")
def test_a_full_disk(world: World) -> None:
    world.cache.mkdir()
    world.lock["wheels"][0]["sha256"] = sha256(world.fatten(os.urandom(1 << 20)))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", world.cache], check=True)
    try:
        said = world.refused()
        assert f"no space left on this machine for {world.cache}" in said
        assert "set XDG_CACHE_HOME" in said
        assert world.files() == []
    finally:
        subprocess.run(["umount", world.cache], check=True)


def test_an_interruption_leaves_no_partial_file(world: World) -> None:
    code = "import json, os, sys; from pathlib import Path; from farandole.stack.collect import collect; "
    code += "os.environ['PIP_INDEX_URL'] = f'{sys.argv[1]}/simple'; "
    code += "collect(json.loads(sys.argv[2]), Path(sys.argv[3]), print)"
    interrupt(world.simple.parent, WHOLE[1], code, json.dumps(world.lock), str(world.cache))
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
    assert world.collect()
    assert not (called / "owned").exists()


def test_without_settings_pip_s_own_index_is_used(bare_pip: pytest.MonkeyPatch) -> None:
    (default,) = web.indexes()
    assert default.startswith("https://") and default.endswith("/simple")
    bare_pip.setenv("PIP_INDEX_URL", "https://index.test/simple")
    assert web.indexes() == ["https://index.test/simple"]
    bare_pip.setattr(web, "PIP", ("true",))
    bare_pip.delenv("PIP_INDEX_URL")
    with pytest.raises(FarandoleError, match="pip has no package index"):
        web.indexes()
