"""`make horovod-sdist`: Horovod's source with our patches and a version of its own, for installing it elsewhere."""

import gzip
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from farandole.stack import catalogue, sources
from farandole.stack.cache import default_root

ROOT = Path(__file__).parents[1]


def patched(archive: Path, patches: list[Path], folder: Path, version: str) -> Path:
    """Unpack it there, patch it, and give it that version."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    for path in patches:
        with path.open() as patch:
            subprocess.run(
                ["patch", "--strip=1", "--fuzz=0", "--forward", "--silent"], stdin=patch, cwd=source, check=True
            )
    old = source.name.removeprefix("horovod-")
    for name, line in (("horovod/__init__.py", "__version__ = '{}'"), ("PKG-INFO", "Version: {}")):
        text = (source / name).read_text()
        assert text.count(line.format(old) + "\n") == 1, name
        (source / name).write_text(text.replace(line.format(old) + "\n", line.format(version) + "\n"))
    return source.rename(folder / f"horovod-{version}")


def pack(source: Path, target: Path) -> None:
    """The same archive of the same files, whenever and by whomever it is made."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = "root"
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(source, source.name, filter=plain)
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(gzip.compress(content.getvalue(), mtime=0))


def main() -> None:
    """Write the archive for the newest Horovod that the catalogue has."""
    row = catalogue.load().rows("horovod")[-1]
    wanted = {"index": "horovod", "file": row.data["file"], "sha256": row.data["sha256"]}
    archive, _ = sources.provide([wanted], default_root() / "sources", print)
    patches = sorted((ROOT / row.data["patches"]).glob("*.patch"))
    own = f"{row.version}+farandole.{len(patches)}"
    target = Path(sys.argv[1]) / f"horovod-{own}.tar.gz"
    with tempfile.TemporaryDirectory() as folder:
        pack(patched(archive, patches, Path(folder), own), target)
    print(f"wrote {target}, with {len(patches)} patches")


if __name__ == "__main__":
    main()
