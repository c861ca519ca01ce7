"""Which NCCL versions fit a node's driver and CUDA toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole import nccl

NEW = "2.27.3-1+cuda12.9"


@pytest.mark.parametrize(
    ("version", "driver", "cuda"),
    [
        (NEW, "", ""),
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
    assert nccl.nccl_misfit(version, driver, cuda) == ""


@pytest.mark.parametrize(
    ("version", "driver", "cuda", "words"),
    [
        (NEW, "470.57.02", "", "which needs the NVIDIA driver 525.60.13 or newer, and the node has 470.57.02"),
        (NEW, "525.60.12", "", "525.60.13"),
        ("2.18.3-1+cuda12.2", "525.60", "", "525.60.13"),
        ("2.29.7-1+cuda13.2", "575.57.08", "", "580.65.06"),
        ("2.7.8-1+cuda10.1", "410.48", "", "418.39"),
        (NEW, "96.43.23", "", "525.60.13"),
        (NEW, "580.95.05", "13.0", "built with CUDA 12.9, and the node has the CUDA toolkit 13.0"),
        (NEW, "", "11.8", "toolkit 11.8"),
        ("", "", "", "nccl_version is ''"),
        ("2.27.3", "", "", "give the exact version of the debs"),
        ("2.27.3-1 +cuda12.9", "", "", "give the exact version"),
    ],
)  # fmt: skip
def test_an_incompatible_version_is_explained(version: str, driver: str, cuda: str, words: str) -> None:
    assert words in nccl.nccl_misfit(version, driver, cuda)


def test_a_file_is_served_under_its_own_name(tmp_path: Path) -> None:
    deb, gone = tmp_path / "a.deb", tmp_path / "gone.deb"
    deb.write_text("deb")
    assert nccl.depot_debs([{"path": str(path), "sha256": "0"} for path in (deb, gone)]) == [
        {"path": str(deb), "sha256": "0", "name": "debs/a.deb", "size": 3},
        {"path": str(gone), "sha256": "0", "name": "debs/gone.deb", "size": 0},
    ]
