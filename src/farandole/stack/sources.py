"""Fetch a source archive into this machine's cache from the first place that has it, and check its sha256."""

import html
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from farandole.core import fetching
from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.core.text import SHOWN, one_line, without_passwords
from farandole.stack.cache import draft_folder, keep, no_space
from farandole.stack.web import certificates, indexes, open_url

# A `file`, its `sha256`, and where it is: the `url` of a site, a project on a package index (`index`), or the name of a
# Debian source package (`apt`).
Source = Mapping[str, str]
Say = Callable[[str], None]
# Writes the file of a source to a path, and returns where it came from.
Fetch = Callable[[Source, Path], str]
# Time for a site to start sending.
ANSWER_S = 10
# The size limit, ten times that of any source archive or index page, and the time limit for a page.
LARGEST, PAGE_S = 256 << 20, 300
# Not OSError as such, which a full disk raises too.
UNREACHED = (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError, fetching.TooMuchError)


def horovod_source(lock: Mapping[str, Any]) -> Source:
    """The source of Horovod: the lock names the file, and this machine's package index has it."""
    return {"index": "horovod", "file": lock["horovod"]["file"], "sha256": lock["horovod"]["sha256"]}


def provide(
    sources: Sequence[Source], folder: Path, say: Say, *, apt: Fetch | None = None, variable: str = "", limit: int = 0
) -> tuple[Path, bool]:
    """Return the file in the cache, and whether it had to be fetched.

    `apt` fetches Debian source packages; `variable` is the one with which users can name a file of their own; no
    site may send more bytes than the limit."""
    if path := cached(sources, folder, say):
        return path, False
    tried = []
    with no_space(folder):
        for source in sources:
            say(f"collecting {source['file']}")
            try:
                return _fetch(source, folder, apt, limit), True
            except (*UNREACHED, FarandoleError) as error:
                tried.append(one_line(without_passwords(str(getattr(error, "reason", error))), 2 * SHOWN))
    named = f", or set {variable} to its path" if variable else ""
    files = " or ".join(dict.fromkeys(source["file"] for source in sources))
    raise FarandoleError(
        f"{sources[0]['file']} cannot be fetched ({'; '.join(tried)}): check the network, proxy and "
        "`pip config list`, or "
        f"put {files} into {folder}{named}"
    )


def cached(sources: Sequence[Source], folder: Path, say: Say) -> Path | None:
    """The file in the cache, if it is there and intact."""
    good = {source["sha256"] for source in sources}
    for path in dict.fromkeys(folder / source["file"] for source in sources):
        if path.is_file():
            if sha256(path) in good:
                return path
            say(f"{path} is damaged (its sha256 is not {' or '.join(sorted(good))}) and is fetched again")
    return None


def of_user(path: Path, sources: Sequence[Source]) -> Path:
    """A file of the user's own, if it is one of those in the lock."""
    if not path.is_file():
        raise FarandoleError(f"there is no file {path} on the control machine")
    wanted = [source["sha256"] for source in sources]
    if (got := sha256(path)) not in wanted:
        raise FarandoleError(
            f"{path} is not the source named in the lock: its sha256 is {got}, expected {' or '.join(wanted)}"
        )
    return path


def _fetch(source: Source, folder: Path, apt: Fetch | None, limit: int) -> Path:
    target = folder / source["file"]
    with draft_folder(folder) as drafts:
        draft = drafts / source["file"]
        fetch = partial(_of_site, limit or LARGEST) if "url" in source else _of_index if "index" in source else apt
        if fetch is None:
            raise ConnectionError(f"{source['apt']} is a Debian source package, which a builder fetches")
        keep(draft, target, source["sha256"], without_passwords(fetch(source, draft)))
    return target


def _of_site(limit: int, source: Source, draft: Path) -> str:
    url, trust = source["url"], certificates()

    def opened() -> Any:
        # No timeout of urllib covers the resolution of names.
        return fetching.within(
            ANSWER_S,
            # The lock gives the URL, and the sha256 by which the content is checked.
            lambda: urllib.request.urlopen(url, timeout=2 * ANSWER_S, context=trust),  # noqa: S310
            "no answer",
        )

    try:
        fetching.download(opened, draft, limit)
    except UNREACHED as error:
        raise ConnectionError(f"{url}: {getattr(error, 'reason', error)}") from error
    return url


def _of_index(source: Source, draft: Path) -> str:
    """Download from a package index, without pip, which would run setup.py."""
    tried = []
    for index in indexes():
        try:
            if url := next((url for url in _links(index, source["index"]) if _file(url) == source["file"]), ""):
                fetching.download(partial(open_url, url, index, certificates()), draft, LARGEST)
                return urllib.parse.urldefrag(url)[0]
            tried.append(f"{index} does not have it")
        except UNREACHED as error:
            tried.append(f"{index}: {getattr(error, 'reason', error)}")
    # Each on its own, as only the first password in a line is removed.
    raise ConnectionError("; ".join(map(without_passwords, tried)))


def _file(url: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlparse(url).path).rpartition("/")[2]


def _text(index: str, name: str) -> str:
    """The page of a project on a package index; empty if there is none."""

    def page() -> bytes:
        with open_url(_place(index, name), index, certificates()) as answer:
            return fetching.read(answer, LARGEST)

    try:
        return fetching.within(PAGE_S, page).decode()
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return ""


def _place(index: str, name: str) -> str:
    return f"{index.rstrip('/')}/{name}/"


def _links(index: str, name: str) -> Iterator[str]:
    """The URLs of all files of a project on a package index."""
    for link in re.findall(r"<a\s[^>]*?href=\"([^\"]*)\"", _text(index, name)):
        yield urllib.parse.urljoin(_place(index, name), html.unescape(link))


def strange(name: str) -> str:
    """Indexes that answer as none would if asked for a project that they do not have; empty if there are none."""
    answers = []
    for index in (url for url in indexes() if not url.startswith("file:")):
        try:
            if (text := _text(index, name)) and name not in text.lower():
                answers.append(f"{_place(index, name)} is another page: {one_line(re.sub('<[^>]*>', ' ', text))}")
        except (*UNREACHED, UnicodeDecodeError) as error:
            answers.append(f"{_place(index, name)}: {getattr(error, 'reason', error)}")
    return "; ".join(one_line(without_passwords(answer)) for answer in answers)
