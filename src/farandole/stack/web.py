"""The package indexes of this machine's pip; the password of one is given to nobody else."""

from __future__ import annotations

import base64
import netrc
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from pip._internal.models.index import PyPI

TIMEOUT_S = 60
# -P: the folder in which somebody calls farandole, such as /tmp, is not the place to look for modules.
PIP = (sys.executable, "-P", "-m", "pip")


def open_url(url: str, index: str, context: ssl.SSLContext) -> Any:
    """What lies there; with the index's password where it is of the index."""

    def signed(request: urllib.request.Request) -> urllib.request.Request:
        # Not one of the headers that urllib takes along to wherever it is sent on to.
        if value := authorization(request.full_url, index):
            request.add_unredirected_header("Authorization", value)
        request.full_url = bare(request.full_url)
        return request

    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), Redirects(signed))
    return opener.open(signed(urllib.request.Request(url)), timeout=TIMEOUT_S)  # noqa: S310 - the user's own indexes


class Redirects(urllib.request.HTTPRedirectHandler):
    """Whether a password goes along is decided anew for each place."""

    def __init__(self, signed: Callable[[urllib.request.Request], urllib.request.Request]) -> None:
        self.signed = signed

    def redirect_request(self, *arguments: Any, **more: Any) -> urllib.request.Request | None:
        """As ever, but signed for where it leads."""
        request = super().redirect_request(*arguments, **more)
        return self.signed(request) if request else None


def authorization(url: str, index: str) -> str:
    """The header for a URL: by its own user and password, the index's on the index's site, or those of .netrc."""
    there, home = urlsplit(url), urlsplit(index)
    own = there if there.username is not None or origin(there) != origin(home) else home
    if own.username is not None:
        known = (unquote(own.username), unquote(own.password or ""))
    elif found := of_netrc(there.hostname or ""):
        known = found
    else:
        return ""
    return f"Basic {base64.b64encode(':'.join(known).encode()).decode()}"


def of_netrc(host: str) -> tuple[str, str] | None:
    """Where pip looks too."""
    places = [Path(told)] if (told := os.environ.get("NETRC")) else [Path.home() / ".netrc", Path.home() / "_netrc"]
    try:
        found = next((netrc.netrc(str(place)).authenticators(host) for place in places if place.is_file()), None)
    except (netrc.NetrcParseError, OSError):
        return None
    return (found[0] or found[1] or "", found[2] or "") if found else None


def origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    """The site that a password is for."""
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def bare(url: str) -> str:
    """Without user and password, which urllib would take for a part of the host's name."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def indexes() -> list[str]:
    """Those that pip looks into on this machine."""
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
