"""The user's own packages: read and check stack_packages, and the file that stack_requirements names."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from farandole.core.errors import FarandoleError
from farandole.stack.catalogue import Catalogue, load, title

SETTING = "stack_packages"
# A requirement, and where the user wrote it.
Wish = tuple[str, str]
HASH = re.compile(r"\s--hash[= ]\S+")
LARGEST = 1 << 20


def read(packages: Iterable[str], requirements: str, folder: Path) -> tuple[Wish, ...]:
    """All wishes, without those that every stack satisfies; `folder` is the inventory's."""
    wishes = [(text, SETTING) for text in packages]
    wishes += _of_file(folder / Path(requirements).expanduser()) if requirements else []
    return tuple(dict.fromkeys(checked for wish in wishes if (checked := _checked(*wish, load()))))


def _of_file(path: Path) -> list[Wish]:
    try:
        text = path.read_bytes()[: LARGEST + 1].decode()
    except FileNotFoundError:
        raise FarandoleError(f"stack_requirements: there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FarandoleError(f"stack_requirements: {path} cannot be read: {error}") from None
    if len(text) > LARGEST:
        raise FarandoleError(f"stack_requirements: {path} is larger than 1 MiB: is it a list of requirements?")
    return list(_of_project(path, text) if path.suffix == ".toml" else _of_lines(path.name, text))


def _of_project(path: Path, text: str) -> Iterator[Wish]:
    try:
        dependencies = tomllib.loads(text).get("project", {}).get("dependencies")
    except (tomllib.TOMLDecodeError, AttributeError) as error:
        raise FarandoleError(f"stack_requirements: {path} is not a valid pyproject.toml: {error}") from None
    if not isinstance(dependencies, list):
        raise FarandoleError(f"stack_requirements: {path} has no list `dependencies` in its section [project]")
    yield from ((str(text), path.name) for text in dependencies)


def _of_lines(name: str, text: str) -> Iterator[Wish]:
    number, lines = 0, iter(text.splitlines())
    for line in lines:
        number += 1
        whole, first = line, number
        while whole.endswith("\\"):
            whole, number = whole[:-1] + next(lines, ""), number + 1
        # What is locked has hashes of its own.
        if wanted := HASH.sub("", re.sub(r"(^|\s)#.*", "", whole)).strip():
            yield wanted, f"{name} line {first}"


def _checked(text: str, where: str, catalogue: Catalogue) -> Wish | None:
    """A wish in its canonical form; None for Horovod, which every stack has."""
    if re.match(r"-|\.|/|~|\w+:|git\+", text):
        raise FarandoleError(
            f"{where}: {text!r} is not the name of a package: a stack has only what a package index or a folder of "
            "`pip config list` (find-links) offers as a wheel. Put a wheel there and write its name; options such "
            "as -r, -c and -e are not read"
        )
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise FarandoleError(
            f'{where}: {text!r} is not a requirement ({reason}): write NAME or, for example, "pandas>=2,<4"'
        ) from None
    if requirement.url:
        raise FarandoleError(
            f"{where}: {text!r} names a place instead of a version: put that wheel where `pip config list` finds it "
            f"(find-links) and write {requirement.name}"
        )
    name = catalogue.data["aliases"].get(canonicalize_name(requirement.name), canonicalize_name(requirement.name))
    if name == "horovod" and requirement.specifier.contains(catalogue.rows("horovod")[-1].version):
        return None
    if catalogue.is_component(name):
        raise FarandoleError(
            f"{where}: {text!r}: {title(name)} is part of every stack: leave it out, or choose its version in "
            "stack_pins"
        )
    requirement.name = name
    return str(requirement), where
