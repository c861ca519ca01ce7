"""A change of a few nodes that are left out of jobs until they are proven: what upgrade, replace and include share."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from farandole.cli.options import as_given
from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.findings import several
from farandole.inventory import excluded
from farandole.inventory.facts import ClusterFacts
from farandole.inventory.run_lock import person, refuse_another, this_run
from farandole.plays.playbook import Login, play

# In the state folder, the nodes whose upgrade has begun and has not come to its end.
BEGUN = ".upgrade.begun"
PLAYBOOK = "playbooks/upgrade.yml"
# Seconds between two looks whether another run has ended.
LOOK_S = 2


@dataclass(frozen=True)
class Change:
    """A change of nodes that are left out of jobs meanwhile."""

    inventory: Path
    login: Login
    cluster: ClusterFacts
    # The command that continues it.
    again: str
    # What its runs are told besides.
    more: Sequence[str] = ()
    as_json: bool = False
    # Whether all nodes learn who takes part, as from apply, and not only the head.
    everyone: bool = False
    # Those that were left out when the others switched to another stack.
    late: Collection[str] = ()

    @property
    def needed(self) -> list[str]:
        """The nodes that are not left out, as all depend on them, in the order in which they are changed."""
        return [*dict.fromkeys([*self.cluster.builders[:1], self.cluster.head])]

    @property
    def apply(self) -> str:
        """The command that tells all nodes who takes part."""
        return f"farandole apply {as_given(self.inventory, self.login)}"

    def wait_for_others(self) -> None:
        """Let a run end that somebody has started on this machine between two steps."""
        told = False
        while True:
            try:
                return refuse_another(self.cluster.state, this_run(os.getpid()))
            except FarandoleError as refused:
                if not told:
                    typer.echo(f"waiting: {refused}", err=True)
                told = True
                time.sleep(LOOK_S)

    def run(self, playbook: str, *arguments: str) -> bool:
        """Run a playbook; returns whether it succeeded."""
        self.wait_for_others()
        interrupted = (
            f"nodes that are not proven yet stay left out; to continue: {self.again}; if not, so that the head knows "
            f"who takes part: {self.apply}"
        )
        more, login = (*self.more, *arguments), self.login
        return play(playbook, self.inventory, login, *more, as_json=self.as_json, interrupted=interrupted) == 0

    def leave_out(self, names: Sequence[str], why: str) -> None:
        """Leave nodes out of jobs, if they can be."""
        with excluded.changing(self.cluster.state) as entries:
            for name in names:
                if name not in self.needed and (name not in entries or entries[name].by_upgrade):
                    entries[name] = replace(excluded.by_person(person(), why), code=excluded.UPGRADE)

    def take_back(self, names: Sequence[str]) -> None:
        """Let nodes take part again that nobody else has left out meanwhile."""
        with excluded.changing(self.cluster.state) as entries:
            for name in names:
                if name in entries and entries[name].by_upgrade:
                    entries.pop(name)

    def others(self, names: Sequence[str]) -> list[str]:
        """The other nodes that take part in jobs."""
        out = excluded.read(self.cluster.state)
        return [name for name in self.cluster.trusted if name not in names and name not in out]

    def partner(self, names: Sequence[str]) -> str:
        """A node that takes part in jobs, with which these are proven: the head if possible."""
        others = self.others(names)
        if not others:
            raise FarandoleError("a changed node is proven with one that takes part in jobs, and there is none")
        return self.cluster.head if self.cluster.head in others else others[0]

    def have_stack(self, names: Sequence[str]) -> bool:
        """Set those up that lack the present stack; they stay left out."""
        out = excluded.read(self.cluster.state)
        late = {name: out[name] for name in names if name in self.late and name in out}
        for name, entry in late.items():
            excluded.begin_proof(self.cluster.state, name, entry)
        try:
            return not late or self.run("site.yml", "--limit", ",".join(late), "--skip-tags", "slurm")
        finally:
            for name, entry in late.items():
                excluded.end_proof(self.cluster.state, name, entry, good=False)

    def is_proven(self, names: Sequence[str]) -> bool:
        """Run jobs on these nodes and another one, if they are not all."""
        hosts = [*([self.partner(names)] if self.others(names) else []), *names]
        pair = json.dumps({"validation_hosts": ",".join(hosts)})
        return self.run("playbooks/validate.yml", "--tags", "quick", "--extra-vars", pair) and self.are_in(hosts)

    def are_in(self, names: Sequence[str]) -> bool:
        """Whether no check has left one of these out in the last run, which with on_bad_node went on without it."""
        out = excluded.read(self.cluster.state)
        return not any(name in out and out[name].by == "check" for name in names)

    def tell_head(self, *back: str) -> bool:
        """Let the queue, those who start jobs on the head, and nodes that are back know who takes part; jobs go on."""
        limit = [] if self.everyone else ["--limit", ",".join(dict.fromkeys([self.cluster.head, *back]))]
        return self.run("site.yml", *limit, "--tags", "fabric,slurm,monitoring", *proven(back))

    def brought_back(self, entries: Mapping[str, excluded.Entry], steps: Callable[[], str]) -> str:
        """Let nodes take part while they are set up and proven, and leave them out again if it fails; returns why."""
        state, why = self.cluster.state, "it was interrupted"
        for name, entry in entries.items():
            excluded.begin_proof(state, name, entry)
        try:
            why = steps()
        finally:
            for name, entry in entries.items():
                excluded.end_proof(state, name, entry, good=not why)
        if not why and (out := entries.keys() & excluded.read(state).keys()):
            why = f"somebody has left out {several(sorted(out))} meanwhile"
        return why

    def untold(self) -> str:
        """Tell the head that a node is left out again; returns what follows if it cannot be told."""
        return "" if self.tell_head() else f", and the head may give it jobs until this succeeds: {self.apply}"

    def unlocked(self) -> str:
        """Let runs begin on the head, as Ansible itself does not where the node could not be reached."""
        if self.run("site.yml", "--limit", self.cluster.head, "--tags", "jobs"):
            return ""
        return f", and runs may be refused until this succeeds: {self.apply}"

    def returning(self, names: Sequence[str]) -> str:
        """Set nodes up that were left out, and prove them before the head gives them jobs; returns what failed."""
        # Of the queue later, as slurmd does not start on a node that the head's slurmctld has never heard of.
        if not self.run("site.yml", "--limit", ",".join(names), "--skip-tags", "slurm"):
            return "site.yml failed"
        if not self.is_proven(names):
            return "its validation is red"
        if not self.tell_head(*names):
            return f"the head could not be told, and may give it jobs until {self.apply} succeeds"
        return "" if self.are_in(names) else "preflight has left it out again"

    def upgrade(self, names: Sequence[str], settings: str) -> str:
        """Upgrade a few nodes and prove them before they take part again; returns what failed, if anything did."""
        head, limit = self.cluster.head, ",".join(names)
        self.leave_out(names, "it is being upgraded")
        out = excluded.read(self.cluster.state)
        if others := [name for name in names if name in out and not out[name].by_upgrade and name not in self.needed]:
            return f"somebody has left out {several(others)} meanwhile"
        self.note_begun({*self.begun(), *names})
        if names != [head] and not self.tell_head():
            return "the head could not be told to leave it out"
        if not self.run(PLAYBOOK, "--limit", limit, "--extra-vars", settings):
            return "its upgrade failed"
        if not self.have_stack(names):
            return "site.yml failed"
        if not self.is_proven(names):
            return "its validation is red after its upgrade"
        self.take_back(names)
        if not self.run("site.yml", "--limit", ",".join(dict.fromkeys([*names, head])), *proven(names)):
            return "site.yml failed after its upgrade"
        if not self.are_in(names):
            return "preflight has left it out after its upgrade"
        self.note_begun(self.begun() - {*names})
        return ""

    def begun(self) -> set[str]:
        """The nodes whose upgrade has begun and has not come to its end."""
        path = self.cluster.state / BEGUN
        return {*path.read_text().split()} if path.exists() else set()

    def note_begun(self, names: Collection[str]) -> None:
        """Record which these are, so that a power cut does not make them forgotten."""
        write_private(self.cluster.state / BEGUN, "".join(f"{name}\n" for name in sorted(names)), durable=True)


def proven(names: Sequence[str]) -> list[str]:
    """Arguments with which the queue takes nodes back that were down."""
    return ["--extra-vars", json.dumps({"slurm_proven": names})] if names else []


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Refuse a second upgrade of the same cluster on this machine."""
    with (state / excluded.AT_WORK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FarandoleError("another upgrade of this cluster is running on this machine") from None
        excluded.end_proofs(state)
        yield
