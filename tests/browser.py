"""A headless browser for tests, driven by the WebDriver protocol. As a program, it installs Debian's chromium."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver", "pdftotext": "poppler-utils"}
# Nothing goes through a proxy, and nothing leaves this machine.
OPEN = build_opener(ProxyHandler({})).open
READY = re.compile(r"started successfully on port (\d+)")


@dataclass
class Browser:
    """A session of chromedriver."""

    url: str

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """Send a command and return its value."""
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = Request(f"{self.url}/{path}".rstrip("/"), data, {"Content-Type": "application/json"}, method=method)  # noqa: S310
        with OPEN(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def devtools(self, command: str, **params: Any) -> Any:
        return self.ask("goog/cdp/execute", {"cmd": command, "params": params})

    def show(self, path: Path, width: int = 1200, height: int = 900, *, dark: bool = False, media: str = "") -> None:
        """Open a file in a window of a width, in dark mode or as on paper."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.ask("url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Run a script, which the page itself may not."""
        return self.ask("execute/sync", {"script": script, "args": []})

    def picture(self, path: Path, most: int = 12_000) -> None:
        """Save a picture of the whole page."""
        size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
        answer = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def paper(self) -> list[str]:
        """The text of the page as it would be printed, by sheets."""
        printed = base64.b64decode(self.ask("print"))
        done = subprocess.run(["pdftotext", "-layout", "-", "-"], input=printed, capture_output=True, check=True)
        return done.stdout.decode().removesuffix("\f").split("\f")


@contextmanager
def browser() -> Iterator[Browser]:
    """Start chromium and its driver on a free port; both are gone afterwards."""
    with tempfile.TemporaryDirectory() as home:
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "HOME": home, "TMPDIR": home},
        )  # fmt: skip
        try:
            lines = iter(driver.stdout or ())
            port = next(match[1] for line in lines if (match := READY.search(line)))
            # Its own sandbox does not start as root, nor in many containers; it shows only files of the tests.
            arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={home}/profile"]
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": {"args": arguments},
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            made = Browser(f"http://127.0.0.1:{port}").ask("session", {"capabilities": {"alwaysMatch": wanted}})
            session = Browser(f"http://127.0.0.1:{port}/session/{made['sessionId']}")
            try:
                yield session
            finally:
                session.ask("", method="DELETE")
        finally:
            driver.terminate()
            driver.wait()


def missing() -> list[str]:
    """The packages that are not installed."""
    return [package for program, package in PROGRAMS.items() if not shutil.which(program)]


def install() -> None:
    """Install what is missing, as `farandole lab setup` does."""
    if not (packages := missing()):
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if os.geteuid():
        sys.exit(f"the tests of the report need a browser: run `sudo apt-get update && sudo {' '.join(command)}`")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "--quiet"], command):
        subprocess.run(step, env=environment, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    install()
