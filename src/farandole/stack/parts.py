"""Parts of a lock in the forms that the roles' tasks need."""

import re
from base64 import b64decode
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from farandole.core.errors import FarandoleError
from farandole.core.schema import fields, load, whole, within, words
from farandole.core.text import one_line
from farandole.stack.lock import own_wheels

File = dict[str, str]
# The outermost folders of wheels that no script imports.
PUBLIC, NO_MODULES = re.compile(r"[a-zA-Z]\w*"), {"benchmarks", "docs", "examples", "test", "tests"}
SHA256 = words("[0-9a-f]{64}")
# Empty if nothing was packed for nodes that have a former stack.
CHANGES = fields({"sha256": words("([0-9a-f]{64})?"), "former": words("([0-9a-f]{12})?")})
PACKED = fields({"sha256": SHA256, "unpacked": whole(1 << 40), "stack": SHA256, "mpi": SHA256, "changes": CHANGES})


def stack_cached(files: list[File], cache: str, folder: str = "wheels") -> list[dict[str, str]]:
    """Files in a folder of the cache, as the action send_files takes them."""
    place = Path(cache).expanduser() / folder
    return [{"path": str(place / file["file"]), "name": file["file"], "sha256": file["sha256"]} for file in files]


def stack_built(layer: dict[str, Any], folder: str) -> str:
    """The archives of the wheels that were built for a layer, below a folder on the builder."""
    archives = {
        source["name"]: source["part"]["name"] if source["part"] else "wheel.tar.zst" for source in layer["sources"]
    }
    return " ".join(f"{folder}/{name}/{archive}" for name, archive in archives.items())


def stack_patches(patches: list[dict[str, str]], folder: str) -> list[dict[str, str]]:
    """The patches, as the action send_files takes them."""
    return [{"path": f"{folder}/{file['file']}", "name": file["file"], "sha256": file["sha256"]} for file in patches]


def stack_requirements(wheels: list[File]) -> str:
    """The wheels as a requirements file with hashes."""
    return "\n".join(f"{wheel['name']}=={wheel['version']} --hash=sha256:{wheel['sha256']}" for wheel in wheels)


def stack_archives(installs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The archives of stacks, as they lie on the depot."""
    archives = [archive for part in installs for archive in (part["archive"], part.get("whole")) if archive]
    return [{**archive, "name": stack_place(archive)} for archive in archives]


def stack_place(archive: dict[str, Any] | None) -> str:
    """Where an archive lies on the depot: its folder and name here."""
    return "/".join(Path(archive["path"]).parts[-2:]) if archive else ""


def stack_modules(lock: dict[str, Any], cache: str = "") -> list[str]:
    """Horovod's modules for the frameworks of a stack, and those of the packages that the user asked for."""
    by_framework = {"pytorch": "horovod.torch", "tensorflow": "horovod.tensorflow"}
    wanted = lock.get("wanted", {})
    return [by_framework[name] for name in wanted.get("frameworks", [])] + (modules_of(lock, cache) if cache else [])


def modules_of(lock: dict[str, Any], cache: str) -> list[str]:
    """The modules that a script imports of the packages that the user asked for."""
    asked = {canonicalize_name(Requirement(text).name) for text in lock["wanted"].get("packages", [])}
    folder = Path(cache).expanduser() / "wheels"
    files = [folder / wheel["file"] for wheel in own_wheels(lock) if canonicalize_name(wheel["name"]) in asked]
    modules = {name for file in files if file.exists() for name in importable(ZipFile(file).namelist())}
    built = (source for source in lock.get("sources", ()) if canonicalize_name(source["name"]) in asked)
    return sorted(modules | {name for source in built for name in source["modules"] if _is_public((name,))})


def importable(files: Iterable[str]) -> set[str]:
    """The outermost packages and modules among the files of a wheel, without tests and what is private."""
    paths = [PurePosixPath(file) for file in files]
    packages = {path.parent for path in paths if path.name == "__init__.py"}
    outer = {path for path in packages if path.parent not in packages}
    single = {
        PurePosixPath(path.name.partition(".")[0])
        for path in paths
        if len(path.parts) == 1 and path.suffix in (".py", ".so")
    }
    names = [path.parts for path in outer | single if path.parts]
    return {".".join(parts) for parts in names if _is_public(parts)}


def _is_public(parts: Sequence[str]) -> bool:
    return all(map(PUBLIC.fullmatch, parts)) and parts[0] not in NO_MODULES


def stack_packed(answer: str, stack: str, mpi: str) -> dict[str, Any]:
    """The sha256 of the archive that the builder packed, of that of the changes, and what is recorded about both.

    The answer is base64."""
    try:
        packed = within("packed.json", PACKED, load(b64decode(str(answer)).decode(), 1 << 16))
    except (ValueError, FarandoleError) as error:
        raise FarandoleError(
            f"the builder gives no valid description of the stack that it packed: {one_line(error)}; inspect it"
        ) from None
    contents = {f"stacks/{stack}": packed["stack"], f"mpi/{mpi}": packed["mpi"]}
    about = {"unpacked": packed["unpacked"], "contents": contents}
    return {"sha256": packed["sha256"], "about": about, "changes": packed["changes"]}
