"""What there is to upgrade on the nodes, and in which order."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.findings import count, several
from farandole.core.schema import fields, many, named, row, words, yes_or_no
from farandole.core.table import table

FILE = "upgrade.json"
NAME, VERSION = words(r"[a-z0-9][a-z0-9+.:-]{0,100}"), words(r"[\w.+:~-]{0,100}")
KERNEL = words(r"[\w.+~-]{1,100}")
WANTED = {
    "packages": many(row(NAME, VERSION, VERSION)),
    "kept": many(NAME),
    "kernel": KERNEL,
    "next_kernel": KERNEL,
    "drivers": many(words(r"\w{1,60}")),
    "reboot": yes_or_no,
    "stack": words("|[0-9a-f]{12}"),
}
ANSWERS = named(words("[a-z0-9][a-z0-9-]{0,62}"), fields(WANTED))


@dataclass(frozen=True)
class Due:
    """What is due on a node: packages with the versions before and after, and a boot of the next kernel."""

    packages: Sequence[Sequence[str]]
    # Cannot be upgraded without removing others.
    kept: Sequence[str]
    kernel: str
    next_kernel: str
    # They run in another version than the installed one.
    drivers: Sequence[str]
    reboot: bool
    # The current one; empty if there is none.
    stack: str

    def words(self) -> str:
        """The cells of a table but the first one."""
        kernels = [f"kernel {self.kernel} to {self.next_kernel}"] if self.kernel != self.next_kernel else []
        why = f" for the driver {', '.join(self.drivers)}" if self.drivers else ""
        boots = [f"a reboot{why}"] if self.reboot and not kernels else []
        kept = [f"{count(len(self.kept), 'package')} kept back ({', '.join(self.kept)})"] if self.kept else []
        packages = [count(len(self.packages), "package")] if self.packages else []
        return ", ".join([*packages, *kernels, *boots, *kept]) or "nothing"


def note(state: Path, answers: Mapping[str, Any]) -> None:
    """Keep what the nodes have answered, for the command that asked them."""
    write_private(state / FILE, json.dumps(ANSWERS(answers)))


def forget(state: Path) -> None:
    """What they have answered before counts no more."""
    write_private(state / FILE, "{}")


def noted(state: Path) -> dict[str, Due]:
    """What the nodes have answered."""
    try:
        return {name: Due(**answer) for name, answer in ANSWERS(json.loads((state / FILE).read_text())).items()}
    except (OSError, ValueError, RecursionError) as error:
        raise FarandoleError(f"{state / FILE} cannot be read: {error}") from None


def shown(due: Mapping[str, Due]) -> Iterator[str]:
    """What is due, a line for nodes that are alike, and the packages."""
    groups: dict[str, list[str]] = {}
    for name, one in due.items():
        groups.setdefault(one.words(), []).append(name)
    yield from table(
        [["nodes", "to upgrade"], *([several(names), what] for what, names in groups.items())]
    ).splitlines()
    changes = {tuple(package): None for one in due.values() for package in one.packages}
    yield from (f"  {name} {f'{old} to ' if old else ''}{new}" for name, old, new in sorted(changes))


def waves(due: Sequence[str], needed: Sequence[str], canary: str, size: int) -> list[list[str]]:
    """One node alone to begin with, then as many as wanted at a time, and at the end those that all depend on."""
    free = sorted((name for name in due if name not in needed), key=lambda name: name != canary)
    rest = free[1:]
    parts = [free[:1], *(rest[start : start + size] for start in range(0, len(rest), size))]
    return [part for part in [*parts, *([name] for name in needed if name in due)] if part]


def plain(due: Mapping[str, Due]) -> dict[str, Any]:
    """The same for programs."""
    return {name: asdict(one) for name, one in due.items()}
