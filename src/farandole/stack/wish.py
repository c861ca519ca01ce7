"""What the user wants, read and judged."""

from __future__ import annotations

from collections.abc import Iterable

from farandole.errors import FarandoleError
from farandole.stack.catalogue import load
from farandole.stack.solver import Wish


def wish(
    frameworks: Iterable[str],
    pins: Iterable[str],
    accelerator: str,
    command: Iterable[str] = (),
    inventory: str = "INVENTORY",
) -> Wish:
    """A wish that names only what there is; `command` are the pins of the command line."""
    catalogue = load()
    written = [catalogue.pin(text) for text in pins]
    typed = [catalogue.pin(text) for text in command]
    if accelerator not in ("auto", "cpu", "cuda"):
        raise FarandoleError(f"stack_accelerator is {accelerator}; it is auto, cpu or cuda")
    found = list(dict.fromkeys([*written, *typed]))
    for name in {name for name, _ in found}:
        if len(versions := [version for one, version in found if one == name]) > 1:
            raise FarandoleError(f"{name} is pinned to {' and to '.join(versions)}: leave one of them")
    from_command = frozenset(typed) - frozenset(written)
    return Wish(catalogue.check_frameworks(frameworks), tuple(sorted(found)), accelerator, from_command, inventory)
