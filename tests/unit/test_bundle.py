"""`farandole bundle`: the archive has what the lock names, and nothing that is private."""

import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from farandole.cli import bundle
from farandole.core.errors import FarandoleError
from farandole.stack import collect, dataset, sources
from farandole.stack import lock as locks

from .stack import LOCK, changed


def test_the_archive_is_written_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "run").touch(0o700)
    output = tmp_path / "bundle.tar"
    bundle.pack(output, {f"farandole/{name}": tmp_path / name for name in ("one", "link", "run")})
    with tarfile.open(output) as tar:
        members = {member.name: (member.mode, member.uid, member.uname, member.issym()) for member in tar}
    assert members == {
        "farandole/one": (0o644, 0, "root", False),
        "farandole/link": (0o755, 0, "root", True),
        "farandole/run": (0o755, 0, "root", False),
        "farandole/bundle/env": (0o644, 0, "root", False),
    }
    with pytest.raises(FarandoleError, match=r"none/bundle.tar cannot be written: No such file or dir"):
        bundle.pack(tmp_path / "none/bundle.tar", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.tar", "link", "one", "run"]


def test_the_files_are_those_of_the_lock(tmp_path: Path) -> None:
    place = "farandole/bundle/cache/farandole"
    files = bundle.cached(LOCK, tmp_path, tmp_path / "sources/openmpi.tar.bz2")
    wheels = [f"{place}/wheels/{wheel['file']}" for wheel in LOCK["wheels"]]
    assert list(files) == [*wheels, f"{place}/sources/openmpi.tar.bz2"]


def test_only_what_git_tracks_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"farandole/README.md", "farandole/Makefile"} <= bundle.project().keys()
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    tracked, inventories = (
        ("inventory/example/hosts.yml", "tracked"),
        ("inventory/mine/vault.yml", "inventory/hosts.yml"),
    )
    for name in (*tracked, *inventories, "private"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["git", "-C", tmp_path, "add", *tracked, *inventories], check=True)
    monkeypatch.setattr(bundle, "ROOT", tmp_path)
    assert bundle.project() == {f"farandole/{name}": tmp_path / name for name in tracked}
    monkeypatch.setattr(bundle, "ROOT", tmp_path / "none")
    with pytest.raises(FarandoleError, match="is not a git checkout"):
        bundle.project()


def test_without_a_lock_there_is_nothing_to_carry(tmp_path: Path) -> None:
    with pytest.raises(FarandoleError, match=r"there is no .*stack.lock.yml: run  farandole lock -i "):
        bundle.bundle(tmp_path)


@pytest.mark.parametrize("own", [{}, {"stack_cache": "~/.cache/farandole", "samples_data": "digits"}])
def test_what_the_inventory_says_of_data_and_cache_is_heeded(
    own: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    groups = {"cluster": {"hosts": {"node-1": {}}, "vars": own}, "head": {"hosts": {"node-1": {}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    lock = changed("wheels", to=[])
    locks.write(tmp_path / "stack.lock.yml", {**lock, "id": locks.identity(lock)})
    cache = tmp_path / ".cache/farandole"
    (cache / "data").mkdir(parents=True)
    for name in ("source", "data/made.json"):
        (cache / name).touch()
    asked = []

    def provide(requested: str, *_: object) -> dataset.Data:
        asked.append(requested)
        return dataset.Data(cache / "data/made", "", {})

    # All that would be downloaded.
    monkeypatch.setattr(dataset, "provide", provide)
    monkeypatch.setattr(sources, "provide", lambda *_: (cache / "source", False))
    monkeypatch.setattr(collect, "collect", lambda *_: None)
    monkeypatch.setattr(bundle, "download", lambda _: None)
    bundle.bundle(tmp_path, tmp_path / "bundle.tar")
    assert asked == [own.get("samples_data", "auto")]
    place = '-e stack_cache="$PWD/bundle/cache/farandole"'
    assert (place in capsys.readouterr().out) is bool(own)
