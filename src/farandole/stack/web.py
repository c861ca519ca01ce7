"""Download from the package indexes of this machine's pip; an index's password is sent nowhere else."""

import ast
import base64
import netrc
import os
import re
import ssl
import subprocess
import sys
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from farandole.core.errors import FarandoleError

TIMEOUT_S = 60
# -P: the folder in which somebody calls farandole, such as /tmp, is not the place to look for modules.
PIP = (sys.executable, "-P", "-m", "pip")


def open_url(url: str, index: str, context: ssl.SSLContext) -> Any:
    """Open a URL; the index's password is sent only to the index's own site."""
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), Passwords(index))
    return opener.open(url, timeout=TIMEOUT_S)


class Passwords(urllib.request.BaseHandler):
    """Decides for every request, a redirected one too, whether to send a password."""

    # Before urllib's own handlers, which read the host from the URL.
    handler_order = 100

    def __init__(self, index: str) -> None:
        self.index = index

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        # An unredirected header: urllib does not forward it on redirects.
        if value := authorization(request.full_url, self.index):
            request.add_unredirected_header("Authorization", value)
        request.full_url = bare(request.full_url)
        return request

    https_request = http_request


def authorization(url: str, index: str) -> str:
    """The header for a URL: from its own user and password, the index's if on the same site, or .netrc."""
    there, home = urlsplit(url), urlsplit(index)
    own = there if there.username is not None or origin(there) != origin(home) else home
    if own.username is not None:
        known = (unquote(own.username), unquote(own.password or ""))
    elif login := of_netrc(there.hostname or ""):
        known = login
    else:
        return ""
    return f"Basic {base64.b64encode(':'.join(known).encode()).decode()}"


def of_netrc(host: str) -> tuple[str, str] | None:
    """Look up a host in the same .netrc files as pip."""
    places = [Path(file)] if (file := os.environ.get("NETRC")) else [Path.home() / ".netrc", Path.home() / "_netrc"]
    try:
        entry = next((netrc.netrc(str(place)).authenticators(host) for place in places if place.is_file()), None)
    except (netrc.NetrcParseError, OSError):
        return None
    return (entry[0] or entry[1] or "", entry[2] or "") if entry else None


def origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    """The scheme, host and port of a URL."""
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def bare(url: str) -> str:
    """Strip user and password, which urllib would take as part of the host name."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def indexes() -> list[str]:
    """The indexes that pip uses on this machine, the main one last."""
    settings = pip_settings()
    return [*settings.get("extra-index-url", "").split(), settings.get("index-url") or _default_index(PIP)]


def no_index() -> bool:
    """Whether pip uses no index on this machine, but only folders."""
    return pip_settings().get("no-index", "").lower() in ("1", "true", "yes", "on")


@cache
def _default_index(pip: tuple[str, ...]) -> str:
    """The index that pip uses if none is set; only its help names it."""
    done = subprocess.run([*pip, "download", "--help"], capture_output=True, text=True, check=False)
    if not (found := re.search(r"\(default\s+(https?://[^\s)]+)\)", done.stdout)):
        raise FarandoleError("pip has no package index: set one with `pip config set global.index-url URL`")
    return found[1]


def pip_settings() -> dict[str, str]:
    """Pip's settings on this machine; environment variables override files."""
    # What pip looks at to find them.
    return _read_settings(
        frozenset(item for item in os.environ.items() if item[0].startswith(("PIP_", "XDG_CONFIG_", "HOME")))
    )


@cache
def _read_settings(_: frozenset[tuple[str, str]]) -> dict[str, str]:
    done = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    # The later line overrides: those of `pip download` come after the global ones, and the environment's last.
    rank = {"global": 0, "download": 1, ":env:": 2}
    lines = (line.partition("=") for line in done.stdout.splitlines())
    settings = sorted((rank.get(key.split(".")[0], -1), key.partition(".")[2], value) for key, _, value in lines)
    return {key: str(ast.literal_eval(value)) for place, key, value in settings if place >= 0}


def certificates() -> ssl.SSLContext:
    """The certificates that pip trusts, which matter behind a proxy that inspects TLS."""
    cafile = pip_settings().get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or None
    return ssl.create_default_context(cafile=cafile)
