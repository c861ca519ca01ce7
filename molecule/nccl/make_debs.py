"""Make real debs of NCCL from the library and header in NVIDIA's wheels, for a release that has none.

    make_debs.py FOLDER

The wheels stay in Farandole's cache; the debs have the layout of NVIDIA's. Prints their paths and sha256."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "farandole" / "wheels"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
# Wheel: the CUDA version that the library was built with, and the wheel's sha256.
WHEELS = {
    "nvidia_nccl_cu12-2.21.5-py3-none-manylinux2014_x86_64.whl": (
        "12.4", "8579076d30a8c24988834445f8d633c697d42397e92ffc3f63fa26766d25e0a0",
    ),
    "nvidia_nccl_cu12-2.22.3-py3-none-manylinux2014_x86_64.whl": (
        "12.5", "f9f5e03c00269dee2cd1aa57019f9a024478a74ae6e9b32d5341c849fe6f6302",
    ),
}  # fmt: skip


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wheel(file: str, sha256: str) -> Path:
    """Get a wheel from the cache or the package index."""
    path = CACHE / file
    name, version = file.split("-")[:2]
    if not path.exists() or checksum(path) != sha256:
        path.unlink(missing_ok=True)
        requirements = CACHE / f".{name}-requirements.txt"
        CACHE.mkdir(parents=True, exist_ok=True)
        requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(CACHE)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, "--requirement", requirements], check=True)
        requirements.unlink()
    return path


def build(root: Path, target: Path, name: str, version: str, depends: str) -> None:
    """Pack a deb from the files below root."""
    control = {
        "Package": name,
        "Version": version,
        "Architecture": "amd64",
        "Maintainer": "Farandole <root@localhost>",
        "Section": "libs",
        "Priority": "optional",
        "Depends": depends,
        "Description": "NVIDIA Collective Communication Library, from NVIDIA's wheel",
    }
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text("".join(f"{key}: {value}\n" for key, value in control.items()))
    if name == "libnccl2":
        (root / "DEBIAN" / "triggers").write_text("activate-noawait ldconfig\n")
    # Not compressed, which would take longer than everything else.
    deb = target / f"{name}_{version}_amd64.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", root, deb], check=True, capture_output=True)
    shutil.rmtree(root)


def debs(file: str, cuda: str, sha256: str, target: Path) -> None:
    """Write the files of the runtime and the development package."""
    version, files = file.split("-")[1], target / "wheel"
    deb = f"{version}-1+cuda{cuda}"
    with zipfile.ZipFile(wheel(file, sha256)) as archive:
        archive.extractall(files)
    runtime, development = target / "runtime", target / "development"
    for folder in (runtime / LIBRARIES, development / LIBRARIES, development / "usr/include"):
        folder.mkdir(parents=True)
    (files / "nvidia/nccl/lib/libnccl.so.2").rename(runtime / LIBRARIES / f"libnccl.so.{version}")
    (runtime / LIBRARIES / "libnccl.so.2").symlink_to(f"libnccl.so.{version}")
    (development / LIBRARIES / "libnccl.so").symlink_to("libnccl.so.2")
    (files / "nvidia/nccl/include/nccl.h").rename(development / "usr/include/nccl.h")
    shutil.rmtree(files)
    build(runtime, target, "libnccl2", deb, "libc6 (>= 2.17)")
    build(development, target, "libnccl-dev", deb, f"libnccl2 (= {deb})")


def main() -> None:
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file, (cuda, sha256) in WHEELS.items():
        debs(file, cuda, sha256, target)
    print(json.dumps([{"path": str(deb), "sha256": checksum(deb)} for deb in sorted(target.glob("*.deb"))]))


if __name__ == "__main__":
    main()
