"""The calls of a run and the answers to them, in files, because each task has a process of its own."""

import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote

from farandole.core.files import write, write_private

# Asking ahead does not pay for fewer calls, nor on a host where task after task changes something.
WORTHWHILE, ATTEMPTS = 3, 3
# Between two plays, a stack may be compiled.
FRESH_S = 600


@dataclass(frozen=True)
class Call:
    """A module with its arguments and its environment, both as JSON, and the user it runs as."""

    module: str
    arguments: str
    environment: str
    user: str

    @property
    def key(self) -> str:
        """The same for equal calls only."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


@dataclass(frozen=True)
class Answer:
    """What a module has printed, and how that is serialized."""

    output: str
    profile: str


@dataclass(frozen=True)
class HostCalls:
    """The calls and answers of a host; its tasks run one after the other."""

    path: Path
    record: Path

    def add(self, call: Call) -> None:
        """Note a call of this run."""
        with self._file("calls").open("a") as file:
            file.write(f"{json.dumps(asdict(call))}\n")

    def keep(self) -> None:
        """Keep the calls of this run for the next one, if there are any and they can be written."""
        with suppress(OSError):
            write_private(self.record, self._file("calls").read_bytes())

    def due(self, call: Call) -> Sequence[Call]:
        """The calls to ask for: this one and those that followed it in the last run; none if it does not pay."""
        calls = [former for former in self._former() if former.user == call.user]
        rest = list(dict.fromkeys(calls[calls.index(call) :])) if call in calls else []
        attempts = self._file("attempts")
        if len(rest) < WORTHWHILE or (attempts.exists() and attempts.stat().st_size >= ATTEMPTS):
            return []
        with attempts.open("a") as file:
            file.write(".")
        return rest

    def answers(self) -> dict[str, Answer] | None:
        """The answers by the keys of their calls; None if the host has to be asked."""
        answers = self._file("answers")
        with suppress(FileNotFoundError):
            if time.time() - answers.stat().st_mtime < FRESH_S:
                return {key: Answer(**answer) for key, answer in json.loads(answers.read_text()).items()}
        return None

    def store(self, answers: Mapping[str, Answer]) -> None:
        """Store answers for the following tasks."""
        write(self._file("answers"), json.dumps({key: asdict(answer) for key, answer in answers.items()}), 0o600)

    def forget(self) -> None:
        """Discard the answers, because something on the host has changed."""
        self._file("answers").unlink(missing_ok=True)

    def _file(self, kind: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{kind}")

    def _former(self) -> list[Call]:
        """The calls of the last run; none if their record is missing or damaged."""
        with suppress(OSError, ValueError, TypeError):
            return [Call(**json.loads(line)) for line in self.record.read_text().splitlines()]
        return []


@dataclass(frozen=True)
class RunCalls:
    """The temporary folder of a run, and the folder with the record of the last run of its kind."""

    folder: Path
    record: Path

    @property
    def packed(self) -> Path:
        """The folder for archives of modules, which all kinds of runs share."""
        return self.record.parent / "modules"

    @classmethod
    def begin(cls, folder: Path, record: Path) -> None:
        """Let the following tasks ask ahead."""
        folder.mkdir(mode=0o700)
        (folder / "record").symlink_to(record)

    @classmethod
    def current(cls, folder: Path) -> Self | None:
        with suppress(OSError):
            return cls(folder, (folder / "record").readlink())
        return None

    def host(self, name: str) -> HostCalls:
        return HostCalls(self.folder / quote(name, safe=""), self.record / quote(name, safe=""))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the other processes of the run waiting."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
