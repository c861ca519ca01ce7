"""Which hashes requirements.txt keeps."""

import pytest
from requirements import fits, only


@pytest.mark.parametrize(
    ("wheel", "wanted"),
    [
        ("py3-none-any", True),
        ("py2.py3-none-any", True),
        ("py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64", True),
        ("cp39-abi3-manylinux_2_28_aarch64", True),
        ("cp311-cp311-manylinux2014_x86_64", True),
        ("cp310-cp310-manylinux2014_x86_64", False),
        ("cp314-cp314t-manylinux2014_x86_64", False),
        ("pp311-pypy311_pp73-manylinux2014_x86_64", False),
        ("cp311-cp311-musllinux_1_2_x86_64", False),
        ("cp311-cp311-manylinux2014_s390x", False),
        ("cp311-cp311-macosx_11_0_arm64", False),
        ("py3-none-win_amd64", False),
    ],
)
def test_wheels_for_control_machines_are_kept(wheel: str, wanted: bool) -> None:
    assert fits(f"a-1-{wheel}.whl") is wanted


def test_only_hashes_are_left_out() -> None:
    one, two = (f" \\\n    --hash=sha256:{digit * 64}" for digit in "12")
    assert only(f"a==1{one}{two}\nb==2{two}{one}\n", {"2" * 64}) == f"a==1{two}\nb==2{two}\n"
