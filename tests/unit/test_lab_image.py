"""What a lab's images are built from; tests/lab/ builds and starts them."""

import os
from pathlib import Path

import pytest

from farandole.lab import host, image
from farandole.lab.host import Kernel


def test_the_mirrors_of_others_are_not_taken_for_debians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists, sources = tmp_path / "lists", tmp_path / "sources.list"
    (lists / "partial").mkdir(parents=True)
    lines = []
    for origin, part in (("Debian", "main"), ("Docker", "stable")):
        site = f"{origin.lower()}.example"
        lines.append(f"deb http://{site}/debian bookworm {part}")
        start = f"{site}_debian_dists_bookworm"
        (lists / f"{start}_Release").write_text(f"Origin: {origin}\nCodename: bookworm\nComponents: {part}\n")
        (lists / f"{start}_{part}_binary-amd64_Packages").write_text("")
    sources.write_text("\n".join(lines) + "\n")
    settings = tmp_path / "apt.conf"
    settings.write_text(
        f'Dir::State::lists "{lists}";\nDir::Etc::sourcelist "{sources}";\nDir::Etc::sourceparts "-";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(settings))
    monkeypatch.setattr(image, "_codename", lambda: "bookworm")
    mirror = "deb http://debian.example/debian"
    assert image._sources(image.Suite.trixie) == [f"{mirror} trixie main", f"{mirror} trixie-updates main"]


def test_the_user_who_runs_a_nodes_kernel_reads_its_disk_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(program: str, *arguments: str) -> str:
        made = arguments[-2] if program == "mke2fs" else arguments[3].removeprefix("--output=")
        Path(made).touch()
        return ""

    (tmp_path / "grub").touch()
    monkeypatch.setattr(host, "GRUB", tmp_path / "grub")
    monkeypatch.setattr(image, "DISKS", tmp_path / "disks")
    monkeypatch.setattr(image, "run", run)
    for name in ("_digest", "_root", "_forget", "_remove_unused_disks"):
        monkeypatch.setattr(image, name, lambda *_: "")
    mask = os.umask(0o077)
    disk = image.disk(image.Suite.bookworm, Kernel.stock)
    os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (disk.parent, *disk.parent.iterdir())}
    assert modes == {"disks": 0o755, disk.name: 0o644, f"{disk.name}.loader": 0o644}


def test_a_stack_changes_no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was built on a node, which may have put a link in it."""
    stacks = tmp_path / "build/root/opt/farandole/stacks"
    victims = tmp_path / "victim", tmp_path / "etc/manifest.json"

    def unpack(*_: str) -> str:
        for folder in (victims[1].parent, stacks / "link", stacks / "plain"):
            folder.mkdir(parents=True)
        for file in (*victims, stacks / "plain/manifest.json"):
            file.touch(0o600)
        (stacks / "link/manifest.json").symlink_to(victims[0])
        (stacks / "folder").symlink_to(victims[1].parent)
        return ""

    monkeypatch.setattr(host, "STORE", tmp_path)
    monkeypatch.setattr(image, "_build", lambda *_: stacks.parents[1].mkdir(parents=True))
    monkeypatch.setattr(image, "run", unpack)
    image._root(image.Suite.bookworm, Kernel.shared, (), tmp_path / "stack.tar.zst")
    modes = [file.stat().st_mode & 0o777 for file in (*victims, stacks / "plain/manifest.json")]
    assert modes == [0o600, 0o600, 0o644]
