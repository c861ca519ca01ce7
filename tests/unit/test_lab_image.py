"""What a lab's images are built from; tests/lab/ builds and starts them."""

from pathlib import Path

import pytest

from farandole.lab import image


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
