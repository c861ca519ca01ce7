"""Fetch the wheels of a lock into this machine's cache, each checked by its sha256."""

import os
import re
import subprocess
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from packaging.utils import parse_wheel_filename

from farandole.core.errors import FarandoleError
from farandole.core.text import without_passwords
from farandole.stack import sources
from farandole.stack.cache import draft_folder, full, keep, no_space
from farandole.stack.catalogue import load
from farandole.stack.libraries import for_cuda
from farandole.stack.lock import own_wheels
from farandole.stack.own import SETTING
from farandole.stack.web import PIP

Lock = Mapping[str, Any]
# Also under the names that auditwheel gives, such as libmpi-3cf288f2.so.40.
FOREIGN = re.compile(r"(?:^|/)lib(?:mpi|mpi_cxx|mpicxx|open-rte|nccl)(?:-[0-9a-f]+)?\.so")
Say = Callable[[str], None]


def collect(lock: Lock, cache: Path, say: Say) -> bool:
    """Fetch all wheels and Horovod's source into the cache; return whether anything was missing."""
    wheels = collect_wheels(lock, cache, say)
    _, source = sources.provide([sources.horovod_source(lock)], cache / "sources", say)
    return wheels or source


def collect_wheels(lock: Lock, cache: Path, say: Say) -> bool:
    """Fetch all wheels, and what wheels are built of, into the cache; return whether anything was missing."""
    missing = _collect(lock["wheels"], lock, cache, say)
    for source in lock.get("sources", ()):
        wanted = {"index": source["name"], "file": source["file"], "sha256": source["sha256"]}
        _, fetched = sources.provide([wanted], cache / "sources", say)
        missing |= _collect(source["tools"], lock, cache, say) | fetched
    return missing


def _collect(wanted: Sequence[Mapping[str, str]], lock: Lock, cache: Path, say: Say) -> bool:
    wheels = [wheel for wheel in wanted if not sources.cached([wheel], cache / "wheels", say)]
    if wheels:
        with no_space(cache):
            say(f"collecting {len(wheels)} of {len(wanted)} wheels into {cache / 'wheels'}")
            download_wheels(wheels, lock["platform"]["python"], cache / "wheels", say)
    return bool(wheels)


def inspect(lock: Lock, cache: Path, say: Say) -> None:
    """Refuse packages of the user's with an MPI or an NCCL of their own, which only the wheels tell."""
    _collect(own_wheels(lock), lock, cache, say)
    conflicts = []
    for wheel in own_wheels(lock):
        with ZipFile(cache / "wheels" / wheel["file"]) as files:
            inside = sorted(name for name in files.namelist() if FOREIGN.search(name))
        conflicts += [f"{wheel['name']} {wheel['version']} contains {inside[0]}"] if inside else []
    if conflicts:
        raise FarandoleError(
            f"{SETTING}: {'; '.join(conflicts)}. A process would load two MPIs, or two NCCLs, and jobs would crash or "
            "hang: leave it out, or take a build that uses the stack's library; nothing was changed"
        )


def built_for_cuda(lock: Lock, cache: Path) -> str:
    """A package of the user's that does not load beside a PyTorch for CPUs, and why; nothing if there is none."""
    if not lock["versions"].get("torch", "").endswith("+cpu"):
        return ""
    for wheel in own_wheels(lock):
        if library := for_cuda(cache / "wheels" / wheel["file"]):
            return f"{wheel['name']} {wheel['version']} is a build for CUDA ({library})"
    return ""


# Wheels


def download_wheels(wheels: Sequence[Mapping[str, str]], python: str, folder: Path, say: Say) -> None:
    """Download wheels with pip to a folder, and check the sha256 of each."""
    with draft_folder(folder) as drafts:
        wanted = drafts / "requirements.txt"
        # === compares versions literally, so that 2.13.0 does not match 2.13.0+cpu.
        lines = (f"{wheel['name']}==={wheel['version']} --hash=sha256:{wheel['sha256']}\n" for wheel in wheels)
        wanted.write_text("".join(lines))
        _pip([*_download(wheels, python), "--requirement", str(wanted), "--dest", str(drafts)], wheels, folder, say)
        for wheel in wheels:
            keep(drafts / wheel["file"], folder / wheel["file"], wheel["sha256"], "the package index")


def _download(wheels: Sequence[Mapping[str, str]], python: str) -> list[str]:
    """pip's arguments to download exactly these files, for the nodes' platform and not for this machine's."""
    platforms = sorted({tag.platform for wheel in wheels for tag in parse_wheel_filename(wheel["file"])[3]} - {"any"})
    abis = [f"cp{python.replace('.', '')}", "abi3", "none"]
    return [
        *("download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--retries=2"),
        *("--progress-bar=off", "--disable-pip-version-check", "--implementation=cp", f"--python-version={python}"),
        *(f"--abi={abi}" for abi in abis),
        *(f"--platform={platform}" for platform in platforms),
    ]


def _pip(arguments: Sequence[str], wheels: Sequence[Mapping[str, str]], folder: Path, say: Say) -> None:
    """Run pip with this machine's configuration, and show a line for each file."""
    command = [*PIP, *arguments]
    environment = {**os.environ, "TMPDIR": str(Path(arguments[-1]))}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output = _follow(process, {wheel["file"] for wheel in wheels}, say)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise FarandoleError(_reason(without_passwords(output), wheels, folder))


def _follow(process: subprocess.Popen[str], files: set[str], say: Say) -> str:
    output, total, done = [], len(files), 0
    for line in process.stdout or ():
        output.append(line)
        names = {urllib.parse.unquote(word.rsplit("/", 1)[-1]) for word in line.split()}
        for file in names & files:
            files.discard(file)
            done += 1
            say(f"{done}/{total} {file}")
    return "".join(output)


UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|Failed to establish|Connection refused|Temporary failure in name|"
    r"timed out|ProxyError|SSLError|CERTIFICATE_VERIFY|Could not fetch URL|ConnectionReset|Network is unreachable"
)


def _reason(output: str, wheels: Sequence[Mapping[str, str]], folder: Path) -> str:
    """Turn the output of a failed pip into a message for the user."""
    if "No space left" in output or "Disk quota" in output:
        return full(folder)
    if mismatch := re.search(r"(\S+) from (\S+).*?Expected sha256 (\w+)\s+Got\s+(\w+)", output, re.DOTALL):
        return (
            f"{mismatch[1].split('===')[0]} from {mismatch[2]} is not the file named in the lock: its sha256 is "
            f"{mismatch[4]}, expected {mismatch[3]}. Nothing of it was kept: take the index that the "
            "lock was made with, or make a new lock"
        )
    if match := re.search(UNREACHABLE, output):
        line = next(line.strip() for line in output.splitlines() if match[0] in line)
        return (
            f"the package index cannot be reached from this machine ({line[:300]}): check the network, proxy and "
            "`pip config list`, and run the same command again; files fetched so far are kept"
        )
    if missing := re.search(
        r"(?:No matching distribution found for|find a version that satisfies the requirement) ([\w.-]+)", output
    ):
        return _no_wheel(missing[1], wheels)
    lines = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-3:]
    return f"`pip download` failed on this machine: {' '.join(lines) or 'it printed nothing'}"


def _no_wheel(name: str, wheels: Sequence[Mapping[str, str]]) -> str:
    wheel = next((wheel for wheel in wheels if wheel["name"] == name), None)
    file = wheel["file"] if wheel else name
    where = ""
    if wheel and wheel["version"].endswith("+cpu") and (index := load().data["cpu_builds"].get(name)):
        where = f". It is on an index of its own: pip config set global.extra-index-url {index}"
    return f"none of the package indexes of `pip config list` has {file}{where}"
