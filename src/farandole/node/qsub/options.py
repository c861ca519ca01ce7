"""Read the options of a PBS job script and of qsub's command line."""

from __future__ import annotations

import getopt
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# All letters of PBS Pro and Torque, as any of them may stand before one that is translated.
LETTERS = "a:A:c:C:d:D:e:F:hIj:J:k:l:m:M:nN:o:p:P:q:r:S:t:T:u:v:Vw:W:xXz"
COMMAND_LINE = "command line"
OPTION = re.compile(r"#PBS(?=[\s-]|$)")
ALMOST = re.compile(r"#\s*PBS(?=[\s-]|$)", re.IGNORECASE)


class RefusedError(Exception):
    """A message for the user."""


@dataclass(frozen=True)
class Option:
    """An option or a resource of -l, and where it stands."""

    letter: str
    value: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: -{self.letter} {self.value}".rstrip()

    def parts(self) -> Iterator[tuple[str, Option]]:
        """The option under its letter, or each of its resources under its name."""
        if self.letter != "l":
            yield self.letter, self
            return
        for part in self.value.split(","):
            yield f"l {part.partition('=')[0].strip()}", Option("l", part.strip(), self.where)


@dataclass
class Submission:
    """What is to be submitted."""

    script: bytes
    name: str
    folder: str
    environment: dict[str, str]
    # Of the script.
    arguments: list[str]
    given: dict[str, Option] = field(default_factory=dict)
    # Options of sbatch.
    options: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    interpreter: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def note(self, where: object, text: str) -> None:
        self.notes.append(f"{where}: {text}")


def options_of(arguments: list[str], where: str) -> tuple[list[Option], list[str]]:
    """The options at the beginning of these arguments, and what follows them."""
    try:
        pairs, rest = getopt.getopt(arguments, LETTERS)
    except getopt.GetoptError as error:
        raise RefusedError(f"{where}: {error}; qsub --help lists the options") from None
    return [Option(letter[1:], value, where) for letter, value in pairs], rest


def options_of_line(line: str, where: str) -> list[Option]:
    try:
        arguments = shlex.split(line)
    except ValueError:
        raise RefusedError(f"{where}: a quote is not closed: {line}") from None
    comment = next((place for place, text in enumerate(arguments) if text.startswith("#")), len(arguments))
    options, rest = options_of(arguments[:comment], where)
    if rest:
        cure = "options begin with -, values with spaces need quotes"
        raise RefusedError(f"{where}: qsub cannot read {rest[0]!r}; {cure}")
    return options


def options_in(job: Submission) -> Iterator[Option]:
    """The options before the script's first command; lines that only look like options get a note."""
    begun = False
    for number, raw in enumerate(job.script.split(b"\n"), start=1):
        line, where = raw.decode(errors="surrogateescape").strip(), f"line {number}"
        begun = begun or bool(line and not line.startswith("#") and line != ":")
        option = OPTION.match(line)
        if option and begun:
            job.note(where, "#PBS after the first command has no effect; move it up")
        elif option:
            try:
                yield from options_of_line(line[option.end() :], where)
            except RefusedError as error:
                job.refusals.append(str(error))
        elif not begun and ALMOST.match(line):
            job.note(where, "this is a comment, because it does not begin with #PBS")
        elif not begun and line.startswith("#SBATCH"):
            job.note(where, "Slurm reads #SBATCH too; where both say something, #PBS wins")


def collect(job: Submission, options: Iterable[Option]) -> None:
    """Sort options and resources, of which the last one counts."""
    for option in options:
        for name, part in option.parts():
            before = job.given.get(name)
            if before and before.value != part.value and part.where != COMMAND_LINE:
                job.note(part, f"replaces {before}")
            job.given[name] = part
