"""Read the options of a PBS job script and of qsub's command line."""

import getopt
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from farandole.core.text import visible

# All letters of PBS Pro and Torque, as any of them may stand before one that is translated.
LETTERS = "a:A:c:C:d:D:e:F:hIj:J:k:l:m:M:nN:o:p:P:q:r:S:t:T:u:v:Vw:W:xXz"
COMMAND_LINE = "command line"
MARK = re.compile(r"#\s*PBS(?=[\s-]|$)", re.IGNORECASE)


class RefusedError(Exception):
    """A message for the user."""


@dataclass(frozen=True)
class Option:
    """An option by its letter, or a resource of -l by "l" and its name; and where it stands."""

    name: str
    value: str
    where: str

    def __str__(self) -> str:
        separator = "=" if self.name.startswith("l ") else " "
        value = separator + visible(shlex.quote(self.value)) if self.value else ""
        return f"{self.where}: -{self.name}{value}"

    def refused(self, why: str) -> RefusedError:
        return RefusedError(f"{self}: {why}")


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
    options: dict[str, str | int] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    # Where its output is written.
    folders: list[Path] = field(default_factory=list)
    interpreter: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def note(self, where: object, text: str) -> None:
        self.notes.append(f"{where}: {text}")

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Go on after a refusal, so that everything that is refused is said at once."""
        try:
            yield
        except RefusedError as error:
            self.refusals.append(str(error))

    def give(self, options: list[Option]) -> None:
        """Take options, of which the last one counts."""
        for option in options:
            before = self.given.get(option.name)
            if before and before.value != option.value and option.where != COMMAND_LINE:
                self.note(option, f"replaces {before}")
            self.given[option.name] = option


def options_of(arguments: list[str], where: str) -> tuple[list[Option], list[str]]:
    """The options at the beginning of these arguments, and what follows them."""
    try:
        pairs, rest = getopt.getopt(arguments, LETTERS)
    except getopt.GetoptError as error:
        raise RefusedError(f"{where}: {error}; qsub --help lists the options") from None
    options = []
    for letter, value in pairs:
        if letter == "-l":
            resources = (part.strip().partition("=") for part in value.split(","))
            options += [Option(f"l {name}", amount, where) for name, _, amount in resources]
        else:
            options.append(Option(letter[1:], value, where))
    return options, rest


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


def read_options(job: Submission) -> None:
    """Take the options before the script's first command; lines that only look like options get a note."""
    begun = False
    for number, raw in enumerate(job.script.split(b"\n"), start=1):
        line, where = raw.decode(errors="surrogateescape").strip(), f"line {number}"
        begun = begun or bool(line and not line.startswith("#") and line != ":")
        mark = MARK.match(line)
        if mark and mark[0] == "#PBS" and begun:
            job.note(where, "#PBS after the first command has no effect; move it up")
        elif mark and mark[0] == "#PBS":
            with job.refusing():
                job.give(options_of_line(line[mark.end() :], where))
        elif mark and not begun:
            job.note(where, "this is a comment, because it does not begin with #PBS")
