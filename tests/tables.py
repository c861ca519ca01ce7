"""`make tables`: write the table of variables on each role's page from its argument specs."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROLES = sorted(path.parents[1] for path in (Path(__file__).parents[1] / "roles").glob("*/meta/argument_specs.yml"))
TABLE = re.compile(r"(?<=<!-- BEGIN_ANSIBLE_DOCS -->\n).*(?=<!-- END_ANSIBLE_DOCS -->)", re.DOTALL)


def options(role: Path) -> dict[str, dict[str, Any]]:
    """The variables of a role, by name."""
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    return {name: option for spec in specs.values() for name, option in spec.get("options", {}).items()}


def row(name: str, option: Mapping[str, Any]) -> str:
    """A variable's row, with Ansible's mark-up of code in that of Markdown."""
    text, kind, value = option["description"], option["type"], option.get("default", "")
    meaning = re.sub(r"\b[CV]\(([^)]+)\)", r"`\1`", text if isinstance(text, str) else " ".join(text)).strip()
    if kind == "list":
        kind = "list of dicts" if "options" in option else f"list of `{option['elements']}`"
    default = value if isinstance(value, str) else json.dumps(value)
    return f"| `{name}` | {meaning} | {kind} | {f'`{default}`' if default else ''} |\n"


def page(role: Path) -> str:
    """A role's page with the table as it has to be."""
    rows = "".join(row(name, option) for name, option in options(role).items())
    table = f"| Variable | Meaning | Type | Default |\n|---|---|---|---|\n{rows}"
    return TABLE.sub(lambda _: table, (role / "README.md").read_text())


if __name__ == "__main__":
    for each in ROLES:
        (each / "README.md").write_text(page(each))
