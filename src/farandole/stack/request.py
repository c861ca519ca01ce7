"""Parse and check what the user asks for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.stack.catalogue import load
from farandole.stack.problem import Request


def request(
    frameworks: Iterable[str],
    pins: Iterable[str],
    accelerator: str,
    command: Iterable[str] = (),
    inventory: str = "INVENTORY",
    packages: tuple[tuple[str, str], ...] = (),
    sources: Path | None = None,
) -> Request:
    """Build a request; refuse what the catalogue does not have. `command` are pins from the command line."""
    catalogue = load()
    settings = [catalogue.pin(text) for text in pins]
    options = [catalogue.pin(text) for text in command]
    if accelerator not in ("auto", "cpu", "cuda"):
        raise FarandoleError(f"stack_accelerator is {accelerator}; it must be auto, cpu or cuda")
    found = list(dict.fromkeys([*settings, *options]))
    for name in {name for name, _ in found}:
        if len(versions := [version for one, version in found if one == name]) > 1:
            raise FarandoleError(f"{name} is pinned to {' and to '.join(versions)}: keep one of them")
    from_command = frozenset(options) - frozenset(settings)
    wanted = catalogue.check_frameworks(frameworks)
    return Request(wanted, tuple(sorted(found)), accelerator, from_command, inventory, packages, sources)
