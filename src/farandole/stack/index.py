"""Ask the package indexes of this machine's pip, through uv, which wheels fit together on the nodes."""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.markers import default_environment
from packaging.pylock import Package, Pylock
from packaging.utils import canonicalize_name

from farandole.core.errors import FarandoleError
from farandole.core.text import one_line, without_passwords
from farandole.stack import sources, web
from farandole.stack.cache import default_root
from farandole.stack.catalogue import IF_ANY, Need, Platform

UV = Path(sys.executable).with_name("uv")
TIMEOUT_S = 600
# The C libraries that uv knows, by minor version.
_GLIBC = (17, 28, *range(31, 41))
_UNREACHED = re.compile(
    r"error sending request|Failed to fetch|timed out|dns error|Connection (?:refused|reset)|HTTP status|"
    r"unexpected JSON"
)
_NOT_OURS = re.compile(
    r"^hint: (?:Wheels are required for|Pre-releases are available)|building from source is disabled"
)


@dataclass(frozen=True)
class Wheel:
    """A file that the index offers for the nodes, and the packages that need it."""

    # What packages call it, and its own name, which differs for tensorflow-cpu.
    package: str
    name: str
    version: str
    file: str
    sha256: str
    url: str
    size: int
    needed_by: tuple[str, ...]
    # How to make it, if `file` has only its sources, and the wheels of the tools.
    build: "Build | None" = None
    tools: tuple["Wheel", ...] = ()


@dataclass(frozen=True)
class Build:
    """What sources say about the wheel that is made of them."""

    # What it should require, the modules that it should have, and what it takes to build it.
    requires: tuple[str, ...]
    modules: tuple[str, ...]
    tools: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """What is asked of the index."""

    platform: Platform
    needs: tuple[Need, ...]
    # Packages that are installed in place of others of the same version.
    instead: Mapping[str, str] = field(default_factory=dict)
    # Versions to take if they fit, by name.
    prefer: Mapping[str, str] = field(default_factory=dict)
    # What was published later does not exist.
    until: str = ""
    # A pattern of builds that must not come, which are marked at the end of their versions, such as 2.13.0+cpu.
    never: str = ""
    # Packages that are taken as sources, and what each of their versions, or (without a version) any other, requires.
    sources: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)


class UnsatisfiableError(FarandoleError):
    """No wheels fit together; the message is uv's explanation."""

    def __init__(self, said: str, question: Question) -> None:
        super().__init__(said)
        self.question = question


def ask(question: Question) -> list[Wheel]:
    """The best wheels that fit together; UnsatisfiableError if there are none."""
    with tempfile.TemporaryDirectory(prefix="farandole-") as name:
        folder = Path(name)
        _write(folder / "requirements.txt", (spelled(need) for need in question.needs if not need.optional))
        _write(folder / "constraints.txt", (spelled(need) for need in question.needs if need.optional))
        # uv takes the versions in the file that it is about to write, where they fit.
        _write(folder / "chosen.txt", (f"{name}=={version}" for name, version in question.prefer.items()))
        given = ["requirements.txt", "--constraints", "constraints.txt", "--annotation-style", "line"]
        _uv(question, folder, [*given, "--output-file", "chosen.txt"])
        chosen = [_line(line) for line in (folder / "chosen.txt").read_text().splitlines()]
        if wrong := [pin for pin in chosen if re.fullmatch(question.never, build(pin[1]))] if question.never else []:
            text = "{} {} was not built for the rest of the stack"
            not_these = (
                Need(name, f"{IF_ANY}!={version}", "", text=text.format(name, version)) for name, version, _ in wrong
            )
            return ask(replace(question, needs=(*question.needs, *not_these)))
        named = {question.instead.get(package, package): (package, by) for package, _, by in chosen}
        _write(folder / "exact.txt", (f"{question.instead.get(name, name)}==={version}" for name, version, _ in chosen))
        _uv(question, folder, ["exact.txt", "--no-deps", "--format", "pylock.toml", "--output-file", "pylock.toml"])
        pylock = Pylock.from_dict({"packages": [], **tomllib.loads((folder / "pylock.toml").read_text())})
    platform = question.platform
    environment = default_environment()
    environment["python_full_version"] = f"{platform.python}.0"
    # The files that fit the platform best, or the sources.
    files = pylock.select(environment=environment, tags=platform.tags)
    return [_wheel(package, file, *named[package.name]) for package, file in files]


def build(version: str) -> str:
    """What a version was built for, if it says so."""
    return version.partition("+")[2]


def split(requirement: str) -> tuple[str, str]:
    """A requirement as name with extras, and the rest."""
    match = re.fullmatch(r"\s*([\w.-]+\s*(?:\[[^\]]*\])?)(.*)", requirement)
    return (match[1], match[2]) if match else (requirement, "")


def spelled(need: Need) -> str:
    """A requirement as a line of a requirements file."""
    return f"{need.component}{need.constraint.removeprefix(IF_ANY)}"


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def _line(line: str) -> tuple[str, str, tuple[str, ...]]:
    """A line such as "numpy==2.4.6  # via -r requirements, pandas": package, version, and the packages that need it."""
    wheel, _, by = line.partition("#")
    name, _, version = wheel.strip().partition("==")
    names = (word.strip() for word in by.strip().removeprefix("via").split(","))
    return canonicalize_name(name), version, tuple(parent for parent in names if parent and not parent.startswith("-"))


def _wheel(package: Package, file: Any, called: str, needed_by: tuple[str, ...]) -> Wheel:
    address = urlsplit(web.bare(file.url))
    return Wheel(
        package=called,
        name=package.name,
        version=str(package.version),
        file=file.filename,
        sha256=file.hashes["sha256"],
        # Without password and signature.
        url=urlunsplit(address._replace(query="", fragment="")),
        size=file.size or (Path(unquote(address.path)).stat().st_size if address.scheme == "file" else 0),
        needed_by=needed_by,
    )


def _uv(question: Question, folder: Path, arguments: list[str]) -> None:
    """Run uv; if an index does not say when files were published, once more with all of them."""
    until = [f"--exclude-newer={question.until}"] if question.until else []
    preferred = (folder / "chosen.txt").read_text()
    done = _run(question, folder, [*until, *arguments])
    if until and "is missing an upload date" in done.stderr:
        (folder / "chosen.txt").write_text(preferred)
        done = _run(question, folder, arguments)
    if done.returncode:
        said = without_passwords(done.stderr)
        if (name := missing(said)) and (answers := sources.strange(name)):
            raise FarandoleError(unreached(answers))
        if "No solution found" in said:
            raise UnsatisfiableError(reasons(said), question)
        if _UNREACHED.search(said):
            raise FarandoleError(unreached(one_line("; ".join(re.findall(r"(?m)^\s*(?:error|cause):\s*(.*)", said)))))
        raise FarandoleError(f"`uv pip compile` failed on this machine: {one_line(said)}")


def _run(question: Question, folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    platform = question.platform
    minor = max((minor for minor in _GLIBC if minor <= int(platform.glibc.split(".")[1])), default=_GLIBC[0])
    command = [
        *(str(UV), "pip", "compile", "--config-file=uv.toml", "--preview-features=index-exclude-newer"),
        *("--no-progress", "--color=never", "--no-header", "--only-binary=:all:", "--index-strategy=unsafe-best-match"),
        f"--python-version={platform.python}",
        f"--python-platform={platform.arch}-manylinux_2_{minor}",
        *(["--no-index"] if web.no_index() else []),
        *(f"--no-binary={name}" for name, version in question.sources if not version),
        *arguments,
    ]
    path = folder / "uv.toml"
    _configure(path, question.sources)
    try:
        return subprocess.run(
            command, cwd=folder, env=environment(), text=True, capture_output=True, check=False,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise FarandoleError(unreached(f"no answer within {TIMEOUT_S} s")) from None


def unreached(why: str) -> str:
    """The message for an index that does not answer."""
    return (
        f"the package index cannot be reached from this machine ({why}): check the network, proxy and "
        "`pip config list`, and run the same command again; nothing was changed"
    )


def reasons(said: str) -> str:
    """uv's explanation without its headings, one paragraph a line."""
    text = re.sub(r"^(?:error|warning): .*\n", "", said, flags=re.MULTILINE)
    text = re.sub(r"^\s*cause: ", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?:all versions of )?(\S+) (?:has|have) no usable wheels", r"\1 has no wheel, only sources", text)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n(?=hint:)|\n\n", text))
    kept = [part for part in paragraphs if part and not _NOT_OURS.search(part)]
    return "\n".join(kept)


def _configure(path: Path, sources: Mapping[tuple[str, str], tuple[str, ...]]) -> None:
    """Tell uv of the indexes of this machine's pip, whose URLs may contain passwords, and of what sources require.

    To know that, uv would run them."""
    *more, main = web.indexes()
    # A folder says of no file when it was published.
    dated = {url: "exclude-newer = false" for url in (*more, main) if url.startswith("file:")}
    _write(path, (f"[[index]]\nurl = {json.dumps(url)}\n{dated.get(url, '')}" for url in more))
    with path.open("a") as file:
        file.write(f"[[index]]\nurl = {json.dumps(main)}\ndefault = true\n{dated.get(main, '')}\n")
        for (name, version), requires in sources.items():
            about = {"name": name, **({"version": version} if version else {}), "requires-dist": requires}
            lines = (f"{key} = {json.dumps(value)}\n" for key, value in about.items())
            file.write(f"[[dependency-metadata]]\n{''.join(lines)}")


def environment() -> dict[str, str]:
    """The rest of pip's configuration, in uv's words."""
    settings = web.pip_settings()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    variables |= {
        "UV_CACHE_DIR": str(default_root() / "index"),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_FIND_LINKS": ",".join(settings.get("find-links", "").split()),
        "UV_HTTP_TIMEOUT": settings.get("timeout") or settings.get("default-timeout", "60"),
        "SSL_CERT_FILE": settings.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE", ""),
    }
    if proxy := settings.get("proxy"):
        variables |= {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}
    return {name: value for name, value in variables.items() if value}


def names(said: str, package: str) -> bool:
    """Whether uv's explanation is about a package."""
    return re.search(rf"(?<![\w-]){re.escape(split(package)[0])}(?![\w-])", said) is not None


def without_wheel(said: str) -> set[str]:
    """The packages that have sources, but no wheel for the nodes, among the versions that were asked for."""
    packages = re.findall(r"([\w.-]*\w)\S* has (?:no wheel, only sources|no wheels with a matching)", said)
    return set(map(canonicalize_name, packages))


def missing(said: str) -> str:
    match = re.search(r"there are no versions of ([\w.-]+)|([\w.-]+) was not found in the p", said)
    return (match[1] or match[2]) if match else ""
