"""`make check ROLE=name`: what a change in a role needs at first, in three minutes."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from plays import ENVIRONMENT, ROOT, play

# It stays, so that the next check finds a cluster.
LAB = "check"
INVENTORY = ROOT / "inventory" / LAB
PLUGINS = [*ROOT.glob("plugins/*/*.py")]


def plugins_of(role: str) -> set[Path]:
    """The plugins whose actions a role's tasks use, with the parts of the same name that run on the node."""
    text = "\n".join(path.read_text() for path in (ROOT / "roles" / role).rglob("*.yml"))
    names = set(re.findall(r"^ +(?:- )?(?:\w+\.\w+\.)?(\w+):", text, re.MULTILINE))
    return {path for path in PLUGINS if path.stem in names and path.parent.name in ("action", "modules")}


def tests_of(role: str) -> list[Path]:
    """The unit tests that load a role's plugins or read its files, and those that compare all roles."""
    plugins = "|".join(path.stem for path in plugins_of(role)) or "none"
    names = re.compile(rf'(load\("\w+", |run_module\(|run_action\()"({plugins})"|roles/{role}\b')
    always = {f"test_{name}.py" for name in ("roles", "playbooks", "removal", role, *plugins.split("|"))}
    files = sorted(ROOT.glob("tests/unit/test_*.py"))
    return [path for path in files if path.name in always or names.search(path.read_text())]


def step(title: str, *command: str | Path) -> None:
    """Run a program; ends everything if it fails."""
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False)
    print(f"{time.monotonic() - begun:>4.0f} s  {title}", flush=True)
    if done.returncode:
        sys.exit(f"{title}: failed: {' '.join(map(str, command))}")


def apply(title: str, *arguments: str) -> tuple[set[tuple[str, str]], list[str]]:
    """Run site.yml on the lab; returns what changed, and the tasks that did anything."""
    begun = time.monotonic()
    done = play(INVENTORY, *arguments)
    print(f"{time.monotonic() - begun:>4.0f} s  {title}: {len(done.changes)} changes", flush=True)
    if done.rc:
        sys.exit(done.output)
    return done.changes, done.tasks


def on_lab(role: str, variables: Sequence[str]) -> None:
    """Apply a role twice to a cluster that is there already, or is made once."""
    made = not INVENTORY.exists()
    step("lab", "farandole", "lab", "up", "--name", LAB, "--nodes", "2")
    if made:
        apply("site.yml, once for this lab")
    listed = subprocess.run(
        ["ansible-playbook", "-i", INVENTORY, "site.yml", "--list-tags"],
        cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=True,
    ).stdout  # fmt: skip
    only = ("--tags", role) if re.search(rf"[\[ ]{role}[,\]]", listed) else ()
    _, tasks = apply(f"role {role}", *only, *variables)
    if not any(task.startswith(f"{role} : ") for task in tasks):
        sys.exit(
            f"no task of role {role} has anything to do here; turn it on: make check ROLE={role} WITH='NAME=VALUE'"
        )
    again, _ = apply(f"role {role} again", *only, *variables)
    if again:
        sys.exit(f"the second run changed something: {json.dumps(sorted(again))}")


def main(role: str, *with_: str) -> None:
    """Lint, test and apply one role."""
    folder = ROOT / "roles" / role
    if not folder.is_dir():
        sys.exit(f"there is no role {role}; there are: {', '.join(sorted(path.name for path in ROOT.glob('roles/*')))}")
    begun = time.monotonic()
    own = sorted(plugins_of(role))
    step("ansible-lint", "env", "ANSIBLE_INVENTORY=inventory/example", "ansible-lint", "--strict", "-q", folder)
    step("yamllint", "yamllint", "--strict", folder)
    step("ruff", "ruff", "check", "--quiet", *own, "src")
    step("unit tests", "pytest", "--quiet", "--numprocesses", "auto", *tests_of(role))
    on_lab(role, [word for value in with_ if value for word in ("--extra-vars", value)])
    print(f"{time.monotonic() - begun:>4.0f} s  in all; `farandole lab down --name {LAB}` removes the lab")


if __name__ == "__main__":
    main(*sys.argv[1:])
