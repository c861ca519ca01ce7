"""`make requirements`: keep in requirements.txt the hashes of what a control machine installs, and no others."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.pylock import Pylock
from packaging.utils import parse_wheel_filename

FILE = Path(__file__).parents[1] / "requirements.txt"
PLATFORM = re.compile(r"any|manylinux\w+_(x86_64|aarch64)")
HASH = re.compile(r" \\\n +--hash=sha256:(\w+)")
# A wheel for any Python, for each from some version on, or for one that pyproject.toml allows.
PYTHON = re.compile(r"\w+-(none|abi3)|(cp3(1[1-9]|[2-9]\d))-\2")


def fits(wheel: str) -> bool:
    """Whether a control machine may install a wheel."""
    *_, tags = parse_wheel_filename(wheel)
    return any(PLATFORM.fullmatch(tag.platform) and PYTHON.fullmatch(f"{tag.interpreter}-{tag.abi}") for tag in tags)


def useful(requirements: Path) -> set[str]:
    """The sha256 of all wheels that fit, and of all sources, from which other machines may build."""
    options = ["--universal", "--no-deps", "--format", "pylock.toml"]
    command = ["uv", "pip", "compile", "--quiet", *options, str(requirements)]
    lock = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    packages = Pylock.from_dict(tomllib.loads(lock)).packages
    wheels = [wheel.hashes for package in packages for wheel in package.wheels or () if fits(wheel.filename)]
    return {hashes["sha256"] for hashes in (*wheels, *(each.sdist.hashes for each in packages if each.sdist))}


def only(requirements: str, hashes: set[str]) -> str:
    """The requirements with these hashes alone."""
    return HASH.sub(lambda found: found[0] if found[1] in hashes else "", requirements)


if __name__ == "__main__":
    FILE.write_text(only(FILE.read_text(), useful(FILE)))
