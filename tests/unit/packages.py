"""A small package index: wheels with the names, versions and requirements of real ones, and without content."""

import os
import zipfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType

from farandole.core.files import sha256

CP311, CP313 = (f"cp3{minor}-cp3{minor}-manylinux_2_28_x86_64" for minor in (11, 13))
ANY = "py3-none-any"
TF215 = ("numpy<2.0.0,>=1.23.5", "keras<2.16,>=2.15.0", "protobuf<5.0.0,>=3.20.3", "ml-dtypes~=0.3.1", "setuptools")
TF221 = ("numpy>=1.26.0", "keras>=3.12.0", "protobuf<8.0.0,>=6.31.1", "ml-dtypes<1.0.0,>=0.5.1", "setuptools")
TORCH = ("setuptools>=77.0.3", "filelock")
ML_DTYPES = ("numpy>=1.21", "numpy>=2.1.0; python_version >= '3.13'")
PACKAGES: Sequence[tuple[str, str, Sequence[str], Sequence[str]]] = (
    ("numpy", "1.25.2", (), (CP311,)),
    ("numpy", "1.26.4", (), (CP311,)),
    *(("numpy", version, (), (CP311, CP313)) for version in ("2.3.4", "2.4.6")),
    ("numpy", "2.5.5", (), (CP313,)),
    ("torch", "2.5.0", (*TORCH, "nvidia-nccl-cu12==2.21.5"), (CP311,)),
    ("torch", "2.13.0+cpu", TORCH, (CP311,)),
    ("torch", "2.13.0", (*TORCH, "nvidia-nccl-cu13==2.29.7"), (CP311, CP313)),
    ("torch", "2.15.0", (*TORCH, "nvidia-nccl-cu13==2.30.7"), (CP311, CP313)),
    ("nvidia-nccl-cu12", "2.21.5", (), (ANY,)),
    *(("nvidia-nccl-cu13", version, (), (ANY,)) for version in ("2.29.7", "2.30.7")),
    *((name, "2.15.1", TF215, (CP311,)) for name in ("tensorflow", "tensorflow-cpu")),
    *((name, "2.21.0", TF221, (CP311, CP313)) for name in ("tensorflow", "tensorflow-cpu")),
    ("tf-keras", "2.15.1", ("tensorflow<2.16,>=2.15",), (ANY,)),
    ("tf-keras", "2.21.0", ("tensorflow<2.22,>=2.21",), (ANY,)),
    ("keras", "2.15.0", (), (ANY,)),
    ("keras", "3.15.1", ("numpy", "ml-dtypes"), (ANY,)),
    ("ml-dtypes", "0.3.2", ML_DTYPES, (CP311,)),
    ("ml-dtypes", "0.6.0", ML_DTYPES, (CP311, CP313)),
    ("protobuf", "4.25.9", (), (ANY,)),
    ("protobuf", "7.36.2", (), (ANY,)),
    ("setuptools", "80.10.2", (), (ANY,)),
    ("setuptools", "84.2.1", (), (ANY,)),
    *(
        (name, "1.0", (), (ANY,))
        for name in ("cffi", "cloudpickle", "filelock", "packaging", "psutil", "pyyaml", "wheel")
    ),
    ("pandas", "2.3.3", ("numpy>=1.26.0", "six"), (CP311, CP313)),
    ("pandas", "3.1.1", ("numpy>=1.26.0", "six"), (CP311, CP313)),
    ("six", "1.17.0", (), (ANY,)),
    ("torchvision", "0.20.0", ("torch==2.5.0",), (CP311,)),
    ("torchvision", "0.28.0", ("torch==2.13.0",), (CP311,)),
    ("wants-torch", "1.0", ("torch",), (ANY,)),
    ("only-windows", "1.0", (), ("cp311-cp311-win_amd64",)),
)


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    tag: str = ANY,
    content: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Write a valid wheel, by default without content; the same again has the same sha256."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-{tag}.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    files = {
        "METADATA": "\n".join([*lines, ""]),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(zipfile.ZipInfo(f"{stem}.dist-info/{file}"), text)
        for file, data in content.items():
            archive.writestr(zipfile.ZipInfo(file), data)
    return path


def write_all(folder: Path) -> None:
    """Write all packages, and a source without a wheel."""
    for name, version, requires, tags in PACKAGES:
        for tag in tags:
            write_wheel(folder, name, version, requires, tag)
    (folder / "only_source-1.0.tar.gz").write_bytes(b"")


def pip_settings(folder: Path) -> dict[str, str]:
    """Variables with which pip knows this index only."""
    others = dict.fromkeys((name for name in os.environ if name.startswith("PIP_")), "")
    return {**others, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


def offer(folder: Path, *files: Path, **data: str) -> None:
    """Put files on the page of their package on an index."""
    for file in files:
        page = folder / "simple" / file.name.split("-")[0].replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        (page.parent / file.name).hardlink_to(file)
        more = "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())
        with page.open("a") as lines:
            lines.write(f'<a href="{file.name}#sha256={sha256(file)}"{more}>{file.name}</a>\n')
