"""Whether the files of an inventory can be read at all, and where they cannot."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import yaml

from farandole.core.errors import FarandoleError
from farandole.core.findings import Finding, finding
from farandole.core.project import INSTALLED, ROOT

# Where `farandole init` makes inventories.
FOLDER = Path("inventory")
# In a clone people know it by its short path.
EXAMPLE = str(ROOT / "inventory/example/hosts.yml") if INSTALLED else "inventory/example/hosts.yml"
SUFFIXES = (".yml", ".yaml", ".json", "")
# It lies in the same folder; stack/lock.py reads it.
LOCK = "stack.lock.yml"
PARTS = ("hosts", "children", "vars")
VARIABLES = ("group_vars", "host_vars")
NO_HOSTS = (LOCK, *VARIABLES)
# In the order in which Ansible looks for variables; it reads the first, which may be a folder.
ENDINGS = ("", ".yml", ".yaml", ".json")
ENCRYPTED = "$ANSIBLE_VAULT"


def only() -> Path:
    """The inventory of the working directory, if there is exactly one."""
    known = [path for path in sorted(FOLDER.glob("*")) if path.is_dir() and path.name != Path(EXAMPLE).parent.name]
    if len(known) == 1:
        return known[0]
    seen = (
        f"there are {', '.join(map(str, known))}" if known else "there is none in ./inventory; farandole init makes one"
    )
    raise FarandoleError(f"which inventory? {seen}. Name it with -i, or set FARANDOLE_INVENTORY")


def named(inventory: Path | None) -> Path | None:
    """The path of an inventory; that of ./inventory/mine may be said as mine."""
    short = FOLDER / (inventory or "")
    return short if inventory and not inventory.exists() and short.exists() else inventory


def existing(inventory: Path) -> Path:
    """Refuse an inventory that does not exist, has no file, or has one that is not YAML."""
    inventory = named(inventory) or inventory
    if not inventory.exists():
        raise FarandoleError(f"there is no inventory {inventory}; farandole init makes one")
    if inventory.is_dir() and not any(
        path.name[0] != "." and path.name not in NO_HOSTS for path in inventory.iterdir()
    ):
        raise FarandoleError(f"{inventory} has no inventory: put a hosts.yml into it, as {EXAMPLE}")
    own, variables = files(inventory)
    for hidden in unread(inventory):
        raise FarandoleError(f"{hidden.cause}: {hidden.cure}")
    for file in [*own, *variables]:
        if why := fault(file, groups=file in own):
            raise FarandoleError(f"{why}\nnothing was done; correct it and run the same command again")
    return inventory


def files(inventory: Path) -> tuple[list[Path], list[Path]]:
    """The files with hosts, and those with variables of groups and hosts."""
    if not inventory.is_dir():
        folder, own = inventory.parent, [inventory]
    else:
        folder, own = inventory, [path for path in sorted(inventory.iterdir()) if is_read(path)]
    named = [path for name in VARIABLES for path in sorted((folder / name).rglob("*"))]
    return own, [path for path in named if is_read(path)]


def is_read(path: Path) -> bool:
    """Whether Ansible reads such a file as YAML."""
    return path.is_file() and path.suffix in SUFFIXES and path.name[0] != "." and path.name != LOCK


def unread(inventory: Path) -> list[Finding]:
    """Files of variables that Ansible does not read, as another, or a folder, has their names."""
    found = []
    for path in files(inventory)[1]:
        places = [path.with_suffix(ending) for ending in ENDINGS]
        first = next((place for place in places if place.exists()), path)
        if path.parent.name in VARIABLES and first != path:
            found.append(finding("settings-unread", "inventory", seen=path, other=first))
    return found


def fault(path: Path, *, groups: bool) -> str:
    """Where and why a file is no YAML, or no inventory; empty if it is."""
    try:
        content = path.read_text()
        if content.startswith(ENCRYPTED) or is_json(content):
            return ""
        tree = yaml.compose(content, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        return f"{path} cannot be read: {error}"
    except yaml.MarkedYAMLError as error:
        return located(path, error)
    except yaml.YAMLError as error:
        return f"{path} is not YAML: {error}"
    if groups and not isinstance(tree, yaml.MappingNode):
        return f"{path} is empty, or not a mapping of groups to hosts as {EXAMPLE} is"
    faults = [*repeated(tree), *(misshapen(tree) if groups else ())]
    return next((f"{place(path, mark)}: {why}" for why, mark in faults), "")


def is_json(content: str) -> bool:
    """Whether it is JSON, which may have tabs that YAML refuses."""
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(content), dict)
    return False


def located(path: Path, error: yaml.MarkedYAMLError) -> str:
    """What YAML expected, with the line where it gave up."""
    mark = error.problem_mark or error.context_mark
    if not mark:
        return f"{path} is not YAML: {error.problem}"
    begun = error.context_mark
    since = f" ({error.context}{f' that begins in line {begun.line + 1}' if begun else ''})" if error.context else ""
    return f"{place(path, mark)}: {error.problem}{since}\n{mark.get_snippet(indent=2)}"


def place(path: Path, mark: yaml.Mark) -> str:
    return f"{path}, line {mark.line + 1}, column {mark.column + 1}"


def repeated(tree: yaml.Node | None) -> Iterator[tuple[str, yaml.Mark]]:
    """The names that a mapping has twice, of which one would be lost."""
    if isinstance(tree, yaml.MappingNode):
        seen: dict[str, yaml.Mark] = {}
        for key, value in tree.value:
            if key.value in seen and isinstance(key.value, str):
                yield f"{key.value} is already in line {seen[key.value].line + 1}", key.start_mark
            if isinstance(key.value, str):
                seen[key.value] = key.start_mark
            yield from repeated(value)
    elif isinstance(tree, yaml.SequenceNode):
        for item in tree.value:
            yield from repeated(item)


def misshapen(groups: yaml.Node | None) -> Iterator[tuple[str, yaml.Mark]]:
    """The parts of groups that are lists, where Ansible wants names with colons."""
    for name, group in groups.value if isinstance(groups, yaml.MappingNode) else ():
        for part, value in group.value if isinstance(group, yaml.MappingNode) else ():
            if part.value in PARTS and isinstance(value, yaml.SequenceNode):
                why = f"{part.value} of {name.value} has to be lines as in {EXAMPLE}, `node-1:` and not `- node-1`"
                yield why, value.start_mark
            if part.value == "children":
                yield from misshapen(value)
