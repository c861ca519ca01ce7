"""Which modules of tests/lab/ share a lab, and why some of their tests are skipped."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG_REASON = "takes long: `make test-NAME` runs it, with the name of its lab"


def labs() -> dict[str, list[Path]]:
    """The modules by the names of their labs. A module whose name begins like another's goes on with its lab."""
    modules: dict[str, list[Path]] = {}
    for path in sorted(ROOT.glob("tests/lab/test_*.py")):
        name = path.stem.removeprefix("test_")
        lab = next((first for first in modules if name.startswith(f"{first}_")), name)
        modules.setdefault(lab, []).append(path)
    return modules
