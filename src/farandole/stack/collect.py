"""Bring the files that a lock names into this machine's cache, each checked by its sha256."""

from __future__ import annotations

import errno
import html
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename
from pip._internal.models.index import PyPI

from farandole import fetching
from farandole.errors import FarandoleError
from farandole.stack.cache import sha256
from farandole.stack.catalogue import load
from farandole.stack.web import open_url
from farandole.words import without_passwords

Lock = Mapping[str, Any]
Say = Callable[[str], None]
# -P: the folder in which somebody calls farandole, such as /tmp, is not the place to look for modules.
PIP = (sys.executable, "-P", "-m", "pip")
# Neither a source archive nor the page of an index is a tenth of it; so long a page may take.
LARGEST, PAGE_S = 256 << 20, 300
# Not OSError as a whole, which a full disk is too.
UNREACHED = (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError)


def collect(lock: Lock, cache: Path, say: Say) -> bool:
    """Make sure that all wheels and Horovod's source are in the cache; whether anything had to be fetched."""
    wheels = [wheel for wheel in lock["wheels"] if not _have(cache / "wheels" / wheel["file"], wheel["sha256"], say)]
    horovod = lock["horovod"]
    sdist = not _have(cache / "sources" / horovod["file"], horovod["sha256"], say)
    with no_space(cache):
        if wheels:
            say(f"collecting {len(wheels)} of {len(lock['wheels'])} wheels into {cache / 'wheels'}")
            bring_wheels(wheels, lock["platform"]["python"], cache / "wheels", say)
        if sdist:
            say(f"collecting {horovod['file']}")
            _source("horovod", horovod, cache / "sources")
    return bool(wheels) or sdist


def _have(path: Path, wanted: str, say: Say) -> bool:
    if not path.exists():
        return False
    if sha256(path) == wanted:
        return True
    say(f"{path} is damaged (its sha256 is not {wanted}) and is fetched again")
    path.unlink()
    return False


def _settle(draft: Path, target: Path, wanted: str, source: str) -> None:
    """Give a fetched file its name, if it is the right one."""
    if (got := sha256(draft)) != wanted:
        raise FarandoleError(
            f"{target.name} from {source} is not the file that the lock names: its sha256 is {got}, wanted is "
            f"{wanted}. Nothing was kept of it; check that source, or lock another version"
        )
    draft.chmod(0o644)
    draft.replace(target)


@contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """A place beside the final one that is gone afterwards, whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def no_space(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FarandoleError(_full(cache)) from None
        where = error.filename or cache
        raise FarandoleError(f"{where} on this machine cannot be written: {error.strerror or error}") from None


def _full(cache: Path) -> str:
    free = shutil.disk_usage(cache).free // 2**20
    return f"no space left on this machine for {cache} ({free} MiB free): make room there, or set XDG_CACHE_HOME"


# Wheels


def bring_wheels(wheels: Sequence[Mapping[str, str]], python: str, folder: Path, say: Say) -> None:
    with draft_folder(folder) as drafts:
        wanted = drafts / "requirements.txt"
        # === takes the version to the letter: 2.13.0 is then not 2.13.0+cpu.
        lines = (f"{one['name']}==={one['version']} --hash=sha256:{one['sha256']}\n" for one in wheels)
        wanted.write_text("".join(lines))
        _pip([*_download(wheels, python), "--requirement", str(wanted), "--dest", str(drafts)], wheels, folder, say)
        for wheel in wheels:
            _settle(drafts / wheel["file"], folder / wheel["file"], wheel["sha256"], "the package index")


def _download(wheels: Sequence[Mapping[str, str]], python: str) -> list[str]:
    """pip's words for: exactly these files, for the nodes and not for this machine."""
    platforms = sorted({tag.platform for one in wheels for tag in parse_wheel_filename(one["file"])[3]} - {"any"})
    abis = [f"cp{python.replace('.', '')}", "abi3", "none"]
    return [
        *("download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--retries=2"),
        *("--progress-bar=off", "--disable-pip-version-check", "--implementation=cp", f"--python-version={python}"),
        *(f"--abi={abi}" for abi in abis),
        *(f"--platform={platform}" for platform in platforms),
    ]


def _pip(arguments: Sequence[str], wheels: Sequence[Mapping[str, str]], folder: Path, say: Say) -> None:
    """Run pip with this machine's own configuration; one line for each file."""
    command = [*PIP, *arguments]
    environment = {**os.environ, "TMPDIR": str(Path(arguments[-1]))}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            told = _follow(process, {wheel["file"] for wheel in wheels}, say)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise FarandoleError(_reason(without_passwords(told), wheels, folder))


def _follow(process: subprocess.Popen[str], files: set[str], say: Say) -> str:
    told, total, done = [], len(files), 0
    for line in process.stdout or ():
        told.append(line)
        words = {urllib.parse.unquote(word.rsplit("/", 1)[-1]) for word in line.split()}
        for file in words & files:
            files.discard(file)
            done += 1
            say(f"{done}/{total} {file}")
    return "".join(told)


UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|Failed to establish|Connection refused|Temporary failure in name|"
    r"timed out|ProxyError|SSLError|CERTIFICATE_VERIFY|Could not fetch URL|ConnectionReset|Network is unreachable",
)


def _reason(told: str, wheels: Sequence[Mapping[str, str]], folder: Path) -> str:
    """Why pip brought nothing, in words that help."""
    if "No space left" in told or "Disk quota" in told:
        return _full(folder)
    if mismatch := re.search(r"(\S+) from (\S+).*?Expected sha256 (\w+)\s+Got\s+(\w+)", told, re.DOTALL):
        return (
            f"{mismatch[1].split('===')[0]} from {mismatch[2]} is not the file that the lock names: its sha256 is "
            f"{mismatch[4]}, wanted is {mismatch[3]}. Nothing was kept of it"
        )
    if match := re.search(UNREACHABLE, told):
        line = next(line.strip() for line in told.splitlines() if match[0] in line)
        return (
            f"the package index cannot be reached from this machine ({line[:300]}): check network, proxy and "
            "`pip config list`, and run the same command again; what is here already is kept"
        )
    if missing := re.search(
        r"(?:No matching distribution found for|find a version that satisfies the requirement) ([\w.-]+)", told
    ):
        return _no_wheel(missing[1], wheels)
    lines = [line for line in told.splitlines() if line.startswith("ERROR")] or told.splitlines()[-3:]
    return f"`pip download` failed on this machine: {' '.join(lines) or 'it said nothing'}"


def _no_wheel(name: str, wheels: Sequence[Mapping[str, str]]) -> str:
    wheel = next((one for one in wheels if one["name"] == name), None)
    file = wheel["file"] if wheel else name
    where = ""
    for row in load().rows(name) if wheel else ():
        if wheel and row.version == wheel["version"] and (index := row.data.get("index")):
            where = f". It lies on an index of its own: pip config set global.extra-index-url {index}"
    return f"none of the package indexes of `pip config list` has {file}{where}"


# Sources


def _source(name: str, wanted: Mapping[str, str], folder: Path) -> None:
    """Fetch a source archive; pip would run its setup.py to do it."""
    with draft_folder(folder) as drafts:
        draft, reasons = drafts / wanted["file"], []
        for index in _indexes():
            told = without_passwords(index)
            try:
                url = _link(index, name, wanted["file"])
                if url is None:
                    reasons.append(f"{told} does not have it")
                    continue
                fetching.download(partial(open_url, url, index, certificates()), draft, LARGEST)
            except (
                urllib.error.URLError,
                HTTPException,
                ConnectionError,
                TimeoutError,
                fetching.TooMuchError,
            ) as error:
                reasons.append(f"{told}: {without_passwords(str(getattr(error, 'reason', error)))}")
                continue
            source = without_passwords(urllib.parse.urldefrag(url)[0])
            _settle(draft, folder / wanted["file"], wanted["sha256"], source)
            return
    raise FarandoleError(
        f"{wanted['file']} cannot be fetched ({'; '.join(reasons)}): check network, proxy and `pip config list`, "
        f"or put the file into {folder}"
    )


def _indexes() -> list[str]:
    settings = _pip_settings()
    found = [word for key in ("index-url", "extra-index-url") for word in settings.get(key, "").split()]
    # The default stands nowhere in pip's settings, only in pip itself.
    return found if "index-url" in settings else [*found, PyPI.simple_url]


def _pip_settings() -> dict[str, str]:
    """What pip is told on this machine; the environment has the last word."""
    command = [*PIP, "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    found = {
        key.rsplit(".", 1)[1]: value.strip("'") for key, _, value in lines if ".download." not in key and "." in key
    }
    return found | {key.rsplit(".", 1)[1]: value.strip("'") for key, _, value in lines if key.startswith(":env:")}


def certificates() -> ssl.SSLContext:
    """Those that pip is told to trust: where a proxy looks into TLS, they are the ones that count."""
    cafile = _pip_settings().get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or None
    return ssl.create_default_context(cafile=cafile)


def _page(url: str, index: str) -> bytes:
    with open_url(url, index, certificates()) as answer:
        return fetching.read(answer, LARGEST)


def _link(index: str, name: str, file: str) -> str | None:
    """Where an index says that a file is."""
    page = f"{index.rstrip('/')}/{name}/"
    try:
        text = fetching.within(PAGE_S, partial(_page, page, index)).decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    for link in re.findall(r'href="([^"]+)"', text):
        url = urllib.parse.urljoin(page, html.unescape(link))
        if urllib.parse.unquote(urllib.parse.urlparse(url).path).endswith(f"/{file}"):
            return url
    return None
