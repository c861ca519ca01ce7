"""Read the options of a PBS job script and of qsub's command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

WITH_VALUE, FLAGS = "aAcCdDeFjJklmMNopPqrStTuvwW", "hInVxXz"
COMMAND_LINE = "command line"
OPTION = re.compile(r"#PBS(?=[\s-]|$)")
ALMOST = re.compile(r"#\s*PBS(?=[\s-]|$)", re.IGNORECASE)


class RefusedError(Exception):
    """A message for the user."""


@dataclass(frozen=True)
class Given:
    """An option, a resource of -l or an attribute of -W, and where it stands."""

    letter: str
    value: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: -{self.letter} {self.value}".rstrip()

    @property
    def assigned(self) -> str:
        """What stands after the = of a resource or attribute."""
        return self.value.partition("=")[2]

    def parts(self) -> Iterator[tuple[str, Given]]:
        """The option under its letter, or each of its resources or attributes under its name."""
        if self.letter not in "lW":
            yield self.letter, self
            return
        for part in re.split("," if self.letter == "l" else ",(?=[a-z_]+=)", self.value):
            name, _, value = part.strip().partition("=")
            # A name of one letter would be taken for an option.
            yield name if len(name) > 1 else f"-{self.letter} {name}", Given(self.letter, f"{name}={value}", self.where)


@dataclass
class Job:
    """What is to be submitted."""

    script: bytes
    name: str
    folder: str
    environment: dict[str, str]
    words: list[str]
    given: dict[str, Given] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    interpreter: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def note(self, where: object, text: str) -> None:
        self.notes.append(f"{where}: {text}")


def options_of(words: list[str], where: str) -> tuple[list[Given], list[str]]:
    """The options at the beginning of these words, and the words after them."""
    found: list[Given] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        cluster = rest.pop(0)[1:]
        while cluster:
            letter, cluster = cluster[0], cluster[1:]
            if letter in FLAGS:
                found.append(Given(letter, "", where))
                continue
            if letter not in WITH_VALUE:
                raise RefusedError(f"{where}: qsub does not know -{letter}; qsub --help lists the options")
            if not cluster and not rest:
                raise RefusedError(f"{where}: -{letter} needs a value")
            found.append(Given(letter, cluster or rest.pop(0), where))
            cluster = ""
    return found, rest


def options_of_line(line: str, where: str) -> list[Given]:
    try:
        words = shlex.split(line)
    except ValueError:
        raise RefusedError(f"{where}: a quote is not closed: {line}") from None
    comment = next((place for place, word in enumerate(words) if word.startswith("#")), len(words))
    found, rest = options_of(words[:comment], where)
    if rest:
        cure = "options begin with -, values with spaces need quotes"
        raise RefusedError(f"{where}: qsub cannot read {rest[0]!r}; {cure}")
    return found


def options_in(job: Job) -> Iterator[Given]:
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


def collect(job: Job, given: Iterable[Given]) -> None:
    """Sort options, resources and attributes, of which the last one counts."""
    for option in given:
        for name, part in option.parts():
            before, now = job.given.get(name), part
            if before and name == "v" and before.where == part.where:
                now = Given("v", f"{before.value},{part.value}", part.where)
            elif before and before.value != part.value and part.where != COMMAND_LINE:
                job.note(part, f"replaces {before}")
            job.given[name] = now
