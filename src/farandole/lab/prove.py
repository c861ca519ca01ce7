"""`farandole prove`: try a set of versions on hosts of its own, and write down what was seen as a row of evidence."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from farandole.core import files
from farandole.core.errors import FarandoleError
from farandole.core.project import INSTALLED, ROOT, environment
from farandole.core.text import one_line, visible
from farandole.inventory.state import state_folder
from farandole.lab.image import SYSTEMS, Suite
from farandole.report import evidence as evidence_file
from farandole.stack import lock as locks
from farandole.stack.catalogue import EVIDENCE

console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
LAB = "prove"
INVENTORY = ROOT / "inventory" / LAB
SETTINGS = INVENTORY / "group_vars" / "all.yml"
# What a row is about; everything else in the environment comes after it.
HEADLINE = (
    "gxx", "openmpi", "cuda", "horovod", "torch", "tensorflow", "tf-keras", "keras", "numpy", "protobuf", "setuptools",
)  # fmt: skip
HEAD = """\
---
# What was built and ran together, and what was seen to fail; `farandole prove` adds rows. See docs/catalogue.md.
# `set` is what a row is about; `with` is everything else that was in the environment, preferred to anything newer.
"""
# What kept a set from being tried.
OUTSIDE = re.compile(r"cannot be (?:fetched|reached)|no space left|not enough space")
Row = dict[str, Any]


class StepError(FarandoleError):
    """A step failed; the message is its cause."""


def prove(
    want: Annotated[
        list[str] | None, typer.Option(metavar="NAME==VERSION", help="Require a version; may be repeated.")
    ] = None,
    suite: Annotated[Suite, typer.Option(help="Debian release of the hosts.")] = Suite.bookworm,
    frameworks: Annotated[str, typer.Option(help="tensorflow, pytorch, or tensorflow,pytorch.")] = "tensorflow,pytorch",
    evidence: Annotated[Path, typer.Option(help="The file to which the row is added.")] = EVIDENCE,
    add_file: Annotated[
        Path | None, typer.Option("--add", metavar="FILE", help="Add what `farandole validate --evidence FILE` wrote.")
    ] = None,
    signers: Annotated[
        Path | None,
        typer.Option(
            help="Only if signed by a key in this file (allowed_signers of ssh-keygen).", exists=True, dir_okay=False
        ),
    ] = None,
    *,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Add a file that nobody has signed.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the hosts up, to look at a failure.")] = False,
) -> None:
    """Try a set of versions on two throw-away hosts: site.yml, the whole validation, and a row of evidence.

    A failure becomes a row too, with its cause. Takes five minutes, or fifteen if OpenMPI has to be compiled.
    With --add, it is somebody else's cluster that has tried it.
    """
    if INSTALLED:
        raise FarandoleError("the evidence is kept in the catalogue of a checkout: clone Farandole, and run it there")
    if add_file:
        content, fingerprint = evidence_file.read(add_file, signers, unsigned=unsigned)
        row = evidence_file.row(content, fingerprint)
        row |= parts({"versions": content["versions"], "own": ()})
        add(evidence, row)
        console.print(f"{row['verdict']}: {row['ran']}; {row['by']}; added to {evidence}")
        return
    if INVENTORY.exists():
        raise FarandoleError(f"{INVENTORY} exists: remove it with `farandole lab down --name {LAB}`")
    try:
        # If this fails, it says nothing about the set.
        run("lab", "up", "--name", LAB, "--nodes", "2", "--suite", suite.value)
        row = attempt(suite, frameworks.split(","), want or [])
        if OUTSIDE.search(row["ran"]):
            raise FarandoleError(f"{row['ran']}; this says nothing about the set, so no row was added")
        add(evidence, row)
        console.print(f"{row['verdict']}: {row['ran']}; added to {evidence}")
    finally:
        if not keep:
            shutil.rmtree(SETTINGS.parent, ignore_errors=True)
            run("lab", "down", "--name", LAB)
    if row["verdict"] != "works":
        sys.exit(1)


def attempt(suite: Suite, frameworks: Sequence[str], want: Sequence[str]) -> Row:
    """Take all steps, and describe how far they came."""
    row: Row = {"system": SYSTEMS[suite], "date": f"{datetime.now(UTC):%Y-%m-%d}", "verdict": "fails", "ran": ""}
    row["wanted"] = " ".join([",".join(frameworks), *want])
    try:
        SETTINGS.parent.mkdir()
        SETTINGS.write_text(json.dumps({"stack_frameworks": list(frameworks), "stack_pins": list(want)}))
        run("lock", "-i", str(INVENTORY))
        row |= parts(locks.read(locks.path_of(INVENTORY)))
        run("-i", str(INVENTORY), "site.yml", program="ansible-playbook")
        run("validate", "-i", str(INVENTORY))
        row |= {"verdict": "works", "ran": validated()}
    except StepError as error:
        row["ran"] = str(error)
    return row


def run(*arguments: str, program: str = "farandole") -> None:
    """Run a command and show its output; StepError if it fails."""
    console.print(f"== {program} {' '.join(arguments)}")
    output = []
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment() | {"ANSIBLE_NOCOLOR": "1", "NO_COLOR": "1"}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            print(visible(line, keep="\n"), end="", flush=True)
            output.append(line)
    if process.returncode:
        raise StepError(f"{arguments[-1 if program != 'farandole' else 0]}: {cause(''.join(output))}")


def parts(lock: Mapping[str, Any]) -> dict[str, str]:
    """The versions in a lock: what a row is about, and everything else."""
    versions = {name: version for name, version in lock["versions"].items() if version != "none"}
    own = set(lock["own"])
    heads = {name: versions[name] for name in HEADLINE if name in versions}
    others = {name: version for name, version in versions.items() if name not in heads and name not in own}
    return {"set": spelled(heads), **({"with": spelled(others)} if others else {})}


def spelled(versions: Mapping[str, str]) -> str:
    return " ".join(f"{name}=={version}" for name, version in versions.items())


def cause(output: str) -> str:
    """What a failed command's output gives as the reason."""
    patterns = (
        r"error: no set of [^\n]+\n\n *([^\n]+)",
        r"\n +cause: ([^\n]+)",
        r"\nfatal: .*?\berror: ([^\n]+)",
        # The last line of a traceback.
        r"\nfatal: .*\n +((?:\w+\.)*\w*Error: [^\n]+)",
        r"\nfatal: .*?\n    msg: (?:\|-\n)?(.+?)\n(?:    \S|\n)",
        r"\berror: ([^\n]+)",
    )
    reason = next((match[1] for pattern in patterns if (match := re.search(pattern, output, re.DOTALL))), output)
    return one_line(reason)


def validated() -> str:
    """The verdict of the validation."""
    report = json.loads((state_folder(INVENTORY) / "reports/latest/result.json").read_text())
    counts = Counter(check["status"] for check in report["checks"])
    return "validation on 2 nodes: " + ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))


# The file


def add(path: Path, row: Row) -> None:
    """Add a row to a file of evidence, in place of an older one of the same people about the same set and system."""
    rows = (yaml.safe_load(path.read_text()) if path.exists() else None) or []
    if not isinstance(rows, list):
        raise FarandoleError(f"{path} is no file of evidence, which is a list of rows")
    # What is not signed may be anybody's.
    same = tuple(row) if row.get("by") == "unsigned" else ("system", "wanted", "set", "by")
    others = [other for other in rows if any(str(other.get(key)) != str(row.get(key)) for key in same)]
    newest = max((str(other.get("date", "")) for other in rows if other not in others), default="")
    if newest > str(row.get("date", "")):
        raise FarandoleError(f"no row was added: {path} has one of {newest} by the same people about the same set")
    files.write(path, HEAD + "".join(map(text, [*others, row])))


def text(row: Row) -> str:
    """A row as YAML that is read and compared line by line."""
    lines = []
    for key, value in row.items():
        shown = json.dumps(value, ensure_ascii=False) if key in ("ran", "wanted") else value
        # Versions contain dots and dashes, at which textwrap would break.
        wrapped = textwrap.wrap(f"{key}: {shown}", 116, break_on_hyphens=False, break_long_words=False)
        lines += [f"  {wrapped[0]}", *(f"    {line}" for line in wrapped[1:])]
    return "\n" + "\n".join([f"- {lines[0].strip()}", *lines[1:]]) + "\n"
