"""Which NCCL versions fit a node's driver and CUDA toolkit."""

from pathlib import Path
from typing import Any

import pytest

from farandole.stack import nccl

NEW = "2.27.3-1+cuda12.9"
FITS = "580.95.05"


def judge(settings: dict[str, Any], driver: str = "", cuda: str = "") -> list[tuple[str, str]]:
    findings = nccl.judge({"nccl_install": True, **settings}, "a", {"nvidia_driver": driver, "cuda": cuda})
    return [(finding.code, finding.severity) for finding in findings]


@pytest.mark.parametrize(
    ("version", "driver", "cuda"),
    [
        (NEW, "525.60.13", ""),
        (NEW, "580.95.05", "12.4"),
        ("2.29.7-1+cuda13.2", "580.65.06", "13.0.1"),
        ("2.7.8-1+cuda10.1", "418.39", "10.1"),
        # A version that the catalogue does not know is not judged.
        ("2.40.0-1+cuda99.0", "580.95.05", ""),
        ("2.6.4-1+cuda10.2", "410.48", ""),
        # Debian's own package does not name a CUDA version.
        ("2.22.3-1-1", "390.157", "11.8"),
    ],
)
def test_a_compatible_version_is_accepted(version: str, driver: str, cuda: str) -> None:
    assert judge({"nccl_version": version}, driver, cuda) == []


@pytest.mark.parametrize(
    ("version", "driver", "cuda", "code"),
    [
        (NEW, "470.57.02", "", "nccl-driver-old"),
        (NEW, "525.60.12", "", "nccl-driver-old"),
        ("2.18.3-1+cuda12.2", "525.60", "", "nccl-driver-old"),
        ("2.29.7-1+cuda13.2", "575.57.08", "", "nccl-driver-old"),
        ("2.7.8-1+cuda10.1", "410.48", "", "nccl-driver-old"),
        (NEW, "96.43.23", "", "nccl-driver-old"),
        (NEW, "580.95.05", "13.0", "nccl-toolkit-differs"),
        ("", "", "", "nccl-version-inexact"),
        ("2.27.3", "", "", "nccl-version-inexact"),
        ("2.27.3-1 +cuda12.9", "580.95.05", "", "nccl-version-inexact"),
    ],
)
def test_an_incompatible_version_is_a_finding(version: str, driver: str, cuda: str, code: str) -> None:
    assert judge({"nccl_version": version}, driver, cuda) == [(code, "stop")]


def test_a_missing_driver_is_a_warning() -> None:
    assert judge({"nccl_version": NEW}) == [("nccl-driver-missing", "warn")]
    assert judge({"nccl_version": NEW}, cuda="11.8") == [
        ("nccl-driver-missing", "warn"),
        ("nccl-toolkit-differs", "stop"),
    ]


def test_a_source_has_debs_or_a_key() -> None:
    wanted = {"nccl_version": NEW}
    assert judge({**wanted, "nccl_source": "files", "nccl_files": []}, FITS) == [("nccl-files-missing", "stop")]
    assert judge({**wanted, "nccl_source": "files", "nccl_files": [{"path": "x"}]}, FITS) == []
    unsigned = {"uri": "x", "key_url": "x", "key_fingerprint": ""}
    assert judge({**wanted, "nccl_repository": unsigned}, FITS) == [("nccl-repository-missing", "stop")]
    assert judge({**wanted, "nccl_repository": {**unsigned, "key_fingerprint": "A"}}, FITS) == []
    assert judge({**wanted, "nccl_repository": unsigned, "nccl_source": "distribution"}, FITS) == []


@pytest.mark.parametrize(
    ("install", "version", "driver", "wanted"),
    [
        ("auto", NEW, FITS, True),
        ("auto", NEW, "", False),
        ("auto", "", FITS, False),
        ("true", "", "", True),
        (True, "", "", True),
        ("false", NEW, FITS, False),
        (False, NEW, FITS, False),
    ],
)
def test_what_is_not_installed_is_not_judged(install: object, version: str, driver: str, wanted: bool) -> None:
    settings = {"nccl_install": install, "nccl_version": version, "nccl_source": "files"}
    decision = nccl.decision(settings, "a", {"nvidia_driver": driver})
    assert (decision["wanted"], decision["refused"], bool(decision["report"])) == (wanted, wanted, wanted)


def test_the_role_shows_a_warning_without_refusing() -> None:
    decision = nccl.decision({"nccl_install": True, "nccl_version": NEW}, "a", {})
    assert decision["refused"] is False
    assert decision["report"].startswith("NCCL: 1 warning.\n\n1. a: warning: ")


def test_a_file_is_served_under_its_own_name(tmp_path: Path) -> None:
    deb, gone = tmp_path / "a.deb", tmp_path / "gone.deb"
    deb.write_text("deb")
    assert nccl.depot_debs([{"path": str(path), "sha256": "0"} for path in (deb, gone)]) == [
        {"path": str(deb), "sha256": "0", "name": "debs/a.deb", "size": 3},
        {"path": str(gone), "sha256": "0", "name": "debs/gone.deb", "size": 0},
    ]
