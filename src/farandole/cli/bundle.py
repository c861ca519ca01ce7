"""`farandole bundle`: everything that a control machine without a package index needs, in one archive."""

import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farandole.cli.options import Inventory
from farandole.core.errors import FarandoleError
from farandole.core.project import ROOT
from farandole.core.text import one_line, without_passwords
from farandole.stack import lock as locks
from farandole.stack.settings import cache_of, inventory_variables, plain
from farandole.stack.web import PIP

console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
TOP = "farandole"
# Where `make setup` and `bundle/env` expect them.
CACHE, PYTHON = f"{TOP}/bundle/cache/farandole", f"{TOP}/bundle/python"
ENV = "# Read by a shell: . bundle/env\nexport XDG_CACHE_HOME=$PWD/bundle/cache PIP_NO_INDEX=1\n"


def bundle(
    inventory: Inventory,
    output: Annotated[Path, typer.Option("--output", "-o", help="The archive to write.")] = Path(
        "farandole-bundle.tar"
    ),
) -> None:
    """Put everything that a control machine without a package index needs into one archive.

    It has Farandole, the packages of its own Python environment, and the wheels, sources and sample data of the
    cluster's lock, but not your inventory, which may have secrets. That machine needs the same Python and processor
    architecture as this one.
    """
    # Slow to import.
    from farandole.stack import dataset, sources
    from farandole.stack.collect import collect

    members, path = project(), locks.path_of(inventory.absolute())
    if not path.exists():
        raise FarandoleError(f"there is no {path}: run  {locks.command(path)}")
    lock, variables = locks.read(path), inventory_variables(inventory)
    requested, cache = plain(variables, "samples_data"), cache_of(variables)
    collect(lock, cache, _say)
    openmpi, _ = sources.provide(lock["openmpi"]["sources"], cache / "sources", _say)
    horovod, _ = sources.provide([sources.horovod_source(lock)], cache / "sources", _say)
    data = dataset.provide(requested, cache, _say)
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder))
        members |= {**_below(Path(folder), PYTHON), **cached(lock, cache, openmpi, horovod)}
        members |= _below(data.folder, f"{CACHE}/data/{data.folder.name}")
        members[f"{CACHE}/data/{data.folder.name}.json"] = data.folder.with_name(f"{data.folder.name}.json")
        pack(output, members)
    # The inventory's own cache would hide that of the archive.
    option = f'with  -e stack_cache="$PWD/{CACHE.removeprefix(f"{TOP}/")}"  ' if variables["stack_cache"] else ""
    console.print(
        f"{output}: {output.stat().st_size / 1e6:.0f} MB, {len(members)} files, for stack {lock['id']}. On the other "
        f"machine:\n  tar xf {output.name} && cd {TOP} && . bundle/env && make setup\n"
        f"then copy your inventory, with its {locks.NAME}, into inventory/ and run site.yml {option}in that shell"
    )


def _say(line: str) -> None:
    console.print(line)


def download(folder: Path) -> None:
    """Download the packages of Farandole's own environment."""
    _say("collecting the packages of Farandole's own Python environment")
    command = [*PIP, "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--require-hashes"]
    done = subprocess.run(
        [*command, "--requirement", str(ROOT / "requirements.txt"), "--dest", str(folder)],
        env={**os.environ, "TMPDIR": str(folder)},
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise FarandoleError(f"`pip download` failed on this machine: {one_line(without_passwords(done.stderr))}")


def project() -> dict[str, Path]:
    """The files of this checkout, without your inventories."""
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FarandoleError(
            f"{ROOT} is not a git checkout, so it is unknown which of its files belong to Farandole: clone it"
        )
    names = [name for name in done.stdout.split("\0")[:-1] if not re.match("inventory/(?!example/)", name)]
    return {f"{TOP}/{name}": ROOT / name for name in names if os.path.lexists(ROOT / name)}


def cached(lock: Mapping[str, Any], cache: Path, *archives: Path) -> dict[str, Path]:
    """The files of a lock in the cache."""
    built = lock.get("sources", [])
    wheels = [*lock["wheels"], *(tool for source in built for tool in source["tools"])]
    files = [cache / "wheels" / wheel["file"] for wheel in wheels]
    files += [*(cache / "sources" / source["file"] for source in built), *archives]
    return {f"{CACHE}/{path.relative_to(cache)}": path for path in files}


def _below(folder: Path, place: str) -> dict[str, Path]:
    return {f"{place}/{path.relative_to(folder)}": path for path in sorted(folder.rglob("*")) if path.is_file()}


def pack(output: Path, members: Mapping[str, Path]) -> None:
    """Write the archive as a whole, or nothing."""
    _say(f"packing {sum(path.lstat().st_size for path in members.values()) / 1e6:.0f} MB into {output}")
    draft = output.with_name(f".{output.name}.part")
    try:
        with tarfile.open(draft, "w") as tar:
            for name, path in members.items():
                tar.add(path, name, recursive=False, filter=_anonymous)
            with tempfile.NamedTemporaryFile("w") as env:
                env.write(ENV)
                env.flush()
                tar.add(env.name, f"{TOP}/bundle/env", filter=_anonymous)
        draft.replace(output)
    except OSError as error:
        raise FarandoleError(f"{output} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member
