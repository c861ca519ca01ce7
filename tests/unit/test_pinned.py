"""What comes from outside, beyond what pip and uv check themselves, is pinned by a sha256 or a signer's fingerprint."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from farandole.stack import dataset
from farandole.stack.catalogue import load

from .loading import ROOT

# Options that turn off a check, and commands that have none.
UNCHECKED = re.compile(
    r"allow.?unauthenticated|allow.?insecure|trusted[=:] ?yes|no-check-certificate|(?<!emit-)trusted-host|CERT_NONE|"
    r"_create_unverified_context|verify=False|validate_certs: (false|no)|disable_gpg_check|"
    r"(curl|wget) +(-|http|\"|'|\$)|"
    r"\bpip[\"']? (install|download) "
    r"(?!--dry-run|.*(--require-hashes|--no-index|--no-deps --no-build-isolation --editable))",
    re.IGNORECASE,
)
# Ansible's modules that download without checking what came.
MODULES = re.compile(r"\b(apt_key|get_url|git|pip|rpm_key|subversion):")


def tracked() -> Iterator[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.split("\n")
    files = (ROOT / name for name in names if name and not name.endswith((".md", "unit/test_pinned.py")))
    return (file for file in files if file.is_file() and not file.is_symlink())


def unchecked(text: str) -> list[str]:
    return [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if UNCHECKED.search(line)]


def test_every_source_has_a_sha256() -> None:
    catalogue, facts = load(), dataset.load()
    checksums = [source["sha256"] for row in catalogue.rows("openmpi") for source in catalogue.sources(row)]
    checksums += [row.data["sha256"] for row in catalogue.rows("horovod")]
    checksums += [*facts["mnist"]["files"].values(), facts["digits"]["sha256"], facts["digits"]["wheel"]["sha256"]]
    assert all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in checksums)


def test_every_key_of_a_package_source_has_its_fingerprint() -> None:
    keys = yaml.safe_load((ROOT / "roles/nccl/vars/main.yml").read_text())["__nccl_nvidia_keys"]
    assert all(re.fullmatch("[0-9A-F]{40}", key["fingerprint"]) for key in keys.values())


def test_nothing_is_downloaded_unchecked() -> None:
    for file in tracked():
        text = file.read_text(errors="replace")
        assert unchecked(text) == [], file
        if file.suffix == ".yml" and file.relative_to(ROOT).parts[0] in ("roles", "playbooks", "molecule"):
            assert not MODULES.search(text), file


@pytest.mark.parametrize(
    "line",
    [
        "- apt: {name: a, allow_unauthenticated: true}",
        "curl -fsSL $URL | sh",
        "wget https://example.org/x",
        "\tpip install --quiet molecule",
        "python -m pip install \\\n  --upgrade pip",
        "deb [trusted=yes] http://mirror stable main",
    ],
)
def test_an_unchecked_download_is_found(line: str) -> None:
    assert unchecked(line)
