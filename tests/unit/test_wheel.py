"""The wheel holds everything that a run needs, as the checkout has it, and so does one made from the sdist."""

import configparser
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from farandole.core.project import version

from .loading import ROOT

COLLECTION = "farandole/ansible_collections/farandole/cluster"
FOLDERS = ("playbooks/", "roles/", "plugins/", "files/", "group_vars/")


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0")[:-1] if (ROOT / name).exists()]


def build(kind: str, source: Path, target: Path) -> Path:
    """Build in a copy, as a build leaves files behind."""
    script = f"import setuptools.build_meta as backend; backend.build_{kind}({str(target)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    return next(target.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A wheel from the checkout, and one from the sdist."""
    place = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if not name.startswith(("tests/", "molecule/", "docs/")):
            (place / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / "source" / name, follow_symlinks=False)
    for name in ("wheel", "sdist", "second"):
        (place / name).mkdir()
    # Debian 12's own tarfile has no filter.
    subprocess.run(["tar", "-xf", build("sdist", place / "source", place / "sdist"), "-C", place], check=True)
    second = build("wheel", next(place.glob("farandole-*")), place / "second")
    return contents(build("wheel", place / "source", place / "wheel")), contents(second)


def test_the_wheel_has_every_file_of_a_run(wheels: tuple[dict[str, bytes], dict[str, bytes]]) -> None:
    from_tree, from_sdist = wheels
    files = [name for name in tracked() if name.startswith(FOLDERS) and not (ROOT / name).is_dir()]
    assert len(files) > 200
    wrong = [name for name in files if from_tree.get(f"{COLLECTION}/{name}") != (ROOT / name).read_bytes()]
    assert wrong == []
    assert not [name for name in from_tree if "__pycache__" in name]
    modules = [name for name in tracked() if name.startswith("src/farandole/")]
    assert [name for name in modules if from_tree.get(name.removeprefix("src/")) != (ROOT / name).read_bytes()] == []
    assert from_sdist == from_tree


def test_the_wheel_is_the_collection_of_its_own_settings(wheels: tuple[dict[str, bytes], dict[str, bytes]]) -> None:
    settings = configparser.ConfigParser()
    settings.read_string(wheels[0][f"{COLLECTION}/ansible.cfg"].decode())
    first = settings["defaults"]["collections_path"].split(":")[0]
    assert (Path("/site-packages") / COLLECTION / first).resolve() == Path("/site-packages/farandole")


def test_the_version_stands_in_one_place() -> None:
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version() == number, "run `make setup`"
    if (galaxy := ROOT / "galaxy.yml").exists():
        assert yaml.safe_load(galaxy.read_text())["version"] == number
    assert f"\n## {number}\n" in (ROOT / "CHANGELOG.md").read_text()
