"""Which PyTorch the compiled parts of a wheel need, as only the wheel itself tells what it was built for."""

import re
from pathlib import Path
from zipfile import ZipFile

# A name among those that a library gives to the loader: the half of PyTorch that its builds for CPUs do not have.
CUDA = re.compile(rb"\0(lib(?:torch|c10)_cuda\b[\w.-]*)\0")
NEEDS_TORCH = re.compile(rb"^Requires-Dist: torch\b", re.MULTILINE)
# Nothing that a wheel may contain takes more of this machine's memory.
LARGEST = 1 << 30


def for_cuda(wheel: Path) -> str:
    """The file in a wheel that loads only beside a PyTorch for CUDA, and the library that it needs; or nothing."""
    with ZipFile(wheel) as files:
        names = [member.filename for member in files.infolist() if member.file_size <= LARGEST]
        about = [name for name in names if name.endswith(".dist-info/METADATA")]
        if not any(NEEDS_TORCH.search(files.read(name)) for name in about):
            return ""
        for name in names:
            if name.endswith(".so") and (needed := CUDA.search(files.read(name))):
                return f"{name} needs {needed[1].decode()}"
    return ""
