"""Which PyTorch the compiled parts of a wheel need."""

from pathlib import Path

import pytest

from farandole.stack import libraries
from farandole.stack.libraries import for_cuda

from .packages import write_wheel

# Of the string table of a library.
NEEDS_CUDA = b"\x7fELF\x02\x01\0libc.so.6\0libc10_cuda.so\0"
TORCH = ("torch==2.13.0",)


@pytest.mark.parametrize(
    ("requires", "content", "needed"),
    [
        (TORCH, NEEDS_CUDA, "a.so needs libc10_cuda.so"),
        (TORCH, NEEDS_CUDA.replace(b"c10_cuda", b"torch_cuda-1f.so.2"), "a.so needs libtorch_cuda-1f.so.2.so"),
        (TORCH, NEEDS_CUDA.replace(b"c10_cuda", b"c10"), ""),
        (TORCH, b"this loads libc10_cuda.so if it is there", ""),
        # A zip that is no wheel of PyTorch's family may have libraries of any size.
        ((), NEEDS_CUDA, ""),
        (("torchmetrics",), NEEDS_CUDA, ""),
    ],
)
def test_a_wheel_for_cuda(tmp_path: Path, requires: tuple[str, ...], content: bytes, needed: str) -> None:
    assert for_cuda(write_wheel(tmp_path, "vision", "1.0", requires, content={"a.so": content})) == needed


def test_a_library_of_any_size_costs_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = write_wheel(tmp_path, "bomb", "1.0", TORCH, content={"a.so": NEEDS_CUDA + bytes(1000)})
    monkeypatch.setattr(libraries, "LARGEST", 1000)
    assert for_cuda(bomb) == ""
