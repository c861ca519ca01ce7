"""The nodes that are left out: since when, by whom, why; and which ones to leave out after a check."""

import fcntl
import json
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import yaml

from farandole.core.errors import FarandoleError
from farandole.core.files import write_private
from farandole.core.findings import Finding, finding, refused
from farandole.core.schema import UnfitError, fields, named, row, text, words, yes_or_no
from farandole.core.text import one_line
from farandole.inventory.run_lock import person

FILE = "excluded.yml"
# Those that were, a line for each time.
FORMER = "excluded.log"
# Whoever proves nodes holds this lock.
AT_WORK = ".upgrade.lock"
HEADER = "# Nodes that are left out. To change this: farandole node exclude, include, confirm\n---\n"
LONGEST = 1 << 20
# The code of nodes that are left out because they are being upgraded, or because that failed.
UPGRADE = "upgrade"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
# How the nodes are checked before a run.
PROBE = "preflight"
MARKS = ("proving", "mended", "included")


@dataclass(frozen=True)
class Entry:
    """Why a node is left out."""

    since: str
    # "check" or "person".
    by: str
    # Who excluded the node or confirmed that. Only a person takes back a node with this.
    person: str
    code: str
    why: str
    # What a check measured. The node has to pass the same to be taken back.
    measurement: str
    # It takes part so that it can be proven, as long as the command that does so holds its lock.
    proving: bool = False
    # It passes what it had failed, and takes part once it is proven.
    mended: bool = False
    # A person wants it back.
    included: bool = False

    @property
    def held(self) -> bool:
        """Whether only a person takes it back."""
        return bool(self.person) and not self.included

    @property
    def note(self) -> str:
        """The cause by which a run tells of it."""
        return "node-set-aside" if self.held else "node-mended" if self.mended else "node-excluded"

    @property
    def by_upgrade(self) -> bool:
        """Whether an upgrade that somebody has called has left it out, and takes it back by itself."""
        return self.by == "person" and self.code == UPGRADE

    @property
    def words(self) -> str:
        """The entry as part of a sentence."""
        who = self.person if self.by == "person" else self.measurement
        confirmed = f" (confirmed by {self.person})" if self.by == "check" and self.person else ""
        return f"excluded since {self.since} by {who}{confirmed}: {self.why}"


ENTRIES = named(
    words("[a-z0-9][a-z0-9-]{0,62}"),
    fields(
        {
            "since": words(TIME),
            "by": words("check|person"),
            "person": text(100),
            "code": words("[a-z0-9-]{0,64}"),
            "why": text(400),
            "measurement": words("[a-z0-9-]{0,32}"),
        },
        dict.fromkeys(MARKS, yes_or_no),
    ),
)

# Checked again as one of those above.
RETURNED = (words("[a-z0-9][a-z0-9-]{0,62}"), words(TIME), text(100), lambda entry: entry)


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def by_person(person: str, why: str) -> Entry:
    """The entry of a node that a person takes out."""
    return Entry(now(), "person", one_line(person, 100), "", one_line(why), "")


def read(state: Path) -> dict[str, Entry]:
    """The nodes that are left out, in the order in which they were."""
    entries = _all(state)
    proven = any(entry.proving for entry in entries.values()) and _at_work(state)
    return {name: entry for name, entry in entries.items() if not (entry.proving and proven)}


def former(state: Path) -> Iterator[tuple[str, str, str, Entry]]:
    """The nodes that were left out, as far as it can be read: until when, who took them back, and why they were."""
    with suppress(OSError), (state / FORMER).open(errors="replace") as log:
        for line in log:
            with suppress(ValueError, RecursionError, UnfitError):
                name, until, who, entry = row(*RETURNED)(json.loads(line))
                yield name, until, who, Entry(**ENTRIES({name: entry})[name])


def _all(state: Path) -> dict[str, Entry]:
    path = state / FILE
    try:
        content = path.read_text()
        if len(content) > LONGEST:
            raise UnfitError(f"it has {len(content) >> 10} KiB")
        entries = ENTRIES(yaml.safe_load(content) or {})
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError, UnfitError) as error:
        raise FarandoleError(
            f"{path} cannot be used: {one_line(error)}; correct it, or move it away, and no node is left out"
        ) from None
    return {name: Entry(**entry) for name, entry in entries.items()}


def _at_work(state: Path) -> bool:
    """Whether a command that proves nodes still runs; one that was killed leaves them unproven."""
    with (state / AT_WORK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _rewriting(state: Path) -> Iterator[dict[str, Entry]]:
    """All entries, to be changed by one program at a time; written at the end if they were."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (state / f".{FILE}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = _all(state)
        before = dict(entries)
        yield entries
        if entries != before:
            # Ansible's own kinds of strings become plain ones.
            plain = json.loads(json.dumps({name: asdict(entry) for name, entry in entries.items()}))
            for entry in plain.values():
                # Earlier versions do not know these.
                for mark in MARKS:
                    if not entry[mark]:
                        del entry[mark]
            content = yaml.safe_dump(plain, sort_keys=False, width=1000)
            write_private(state / FILE, HEADER + content, durable=True)
            with (state / FORMER).open("a") as log:
                for name in before.keys() - entries.keys():
                    log.write(json.dumps([name, now(), person(), asdict(before[name])]) + "\n")


@contextmanager
def changing(state: Path) -> Iterator[dict[str, Entry]]:
    """The nodes that are left out, to be changed by one program at a time."""
    with _rewriting(state) as entries:
        known = read(state)
        proven = {name: entry for name, entry in entries.items() if name not in known}
        yield known
        entries.clear()
        entries |= proven | known


def begin_proof(state: Path, name: str, entry: Entry) -> None:
    """Let a node take part that is left out again by this entry if its proof fails, or is cut off."""
    with _rewriting(state) as entries:
        entries[name] = replace(entry, proving=True)


def end_proof(state: Path, name: str, entry: Entry, *, good: bool) -> None:
    """Take a node back, or leave it out again; what a person or a check has decided meanwhile stays."""
    with _rewriting(state) as entries:
        now = entries.get(name)
        decided = now is not None and not now.proving
        if now and decided and (now.held or not entry.held):
            return
        if good and not decided:
            entries.pop(name, None)
        else:
            entries[name] = replace(entry, proving=False)


def end_proofs(state: Path) -> None:
    """Leave out for good what killed commands were proving."""
    with _rewriting(state) as entries:
        for name, entry in entries.items():
            entries[name] = replace(entry, proving=False)


def members(cluster: Iterable[str], *left_out: Collection[str]) -> list[str]:
    """The nodes that take part."""
    return [name for name in cluster if not any(name in out for out in left_out)]


def unmeasured(
    reasons: Mapping[str, str], cluster: Collection[str], hosts: Collection[str], busy: str = ""
) -> dict[str, str]:
    """A line for a validation's report about each node that it leaves out, or that was named as busy."""
    out = {**dict.fromkeys(busy.split(","), "it runs jobs"), **reasons}
    return {f"node.{name}": why for name, why in out.items() if name in cluster and name not in hosts}


@dataclass(frozen=True)
class Decision:
    """Who is left out from now on, and what the user is told; a finding that still stops the run changes nothing."""

    entries: Mapping[str, Entry]
    findings: Sequence[Finding]


@dataclass(frozen=True)
class Checked:
    """What was checked: which nodes of the cluster, which of them all others depend on, and by which measurement."""

    cluster: Sequence[str]
    servers: Collection[str]
    tested: Collection[str]
    measurement: str
    inventory: str


def set_aside(entries: Mapping[str, Entry], checked: Checked) -> list[Finding]:
    """Tell of the nodes that are not even asked, as only a person takes them back."""
    return _noted({name: entry for name, entry in entries.items() if entry.held}, checked)


def decide(findings: Sequence[Finding], entries: Mapping[str, Entry], checked: Checked, *, exclude: bool) -> Decision:
    """Decide who is left out because of findings.

    A finding is about one node, or about a link ("node-2, node-5"). One about a node must rest on what this machine saw
    itself, on what the node said about itself, or on what two others measured: one node must never exclude another.
    """
    stops = [fault for fault in findings if fault.severity == "stop"]
    bad = {name for stop in stops for name in _about(stop)}
    kept = {
        name: replace(entry, mended=_healed(name, entry, bad, checked)) if name in checked.tested else entry
        for name, entry in entries.items()
    }
    # Nothing goes on without these, so nothing could prove them.
    proven = {*checked.servers} & {*checked.tested}
    kept = {name: entry for name, entry in kept.items() if not (entry.mended and name in proven)}
    new = _culprits([stop for stop in stops if not kept.keys() & _about(stop)], checked)
    possible = bool(new) and _goes_on(stops, kept, new, checked)
    added = {
        name: Entry(now(), "check", "", culprit.code, one_line(culprit.cause), checked.measurement)
        for name, culprit in (new.items() if possible and exclude else ())
    }
    out = {**kept, **added}
    spared = out.keys() - _needed(out, checked)
    # What is said of a node that is left out no longer stops a run.
    told = [
        replace(fault, severity="warn") if fault in stops and spared & _about(fault) else fault for fault in findings
    ]
    told += _noted(out, checked)
    if possible and not exclude:
        told += [finding("exclusion-possible", name, inventory=shlex.quote(checked.inventory)) for name in new]
    if refused(told):
        return Decision(entries, told)
    return Decision(out, told)


def _noted(out: Mapping[str, Entry], checked: Checked) -> list[Finding]:
    """Tell which nodes of this run are left out, and stop it if it needs them."""
    here = {name: entry for name, entry in out.items() if name in checked.tested or name in checked.servers}
    inventory = shlex.quote(checked.inventory)
    notes = [
        finding(entry.note, name, seen=entry.words, host=name, inventory=inventory) for name, entry in here.items()
    ]
    needed = _needed(out, checked)
    return [replace(note, severity="stop") if note.host in needed else note for note in notes]


def _needed(out: Mapping[str, Entry], checked: Checked) -> set[str]:
    """Those that a run cannot go on without: the servers, and all if there is no other node in it."""
    return {name for name in out if name in checked.servers} if members(checked.tested, out) else {*out}


def _about(problem: Finding) -> set[str]:
    """The nodes that a finding names."""
    return set(problem.host.split(", "))


def _healed(name: str, entry: Entry, bad: Collection[str], checked: Checked) -> bool:
    """Whether a node passes the check that excluded it, or any that a person waits for who wants it back."""
    same = entry.included or entry.measurement == checked.measurement
    return not entry.held and same and name in checked.tested and name not in bad


def _culprits(stops: Sequence[Finding], checked: Checked) -> dict[str, Finding]:
    """The nodes without which these findings would not be there.

    Of the two ends of a bad link that is the one that has such a link with a second node, too. Else it is neither, as
    either of them may be the cause; nor if one of them is bad by itself.
    """
    free = [name for name in checked.cluster if name not in checked.servers]
    culprits: dict[str, Finding] = {}
    for stop in stops:
        if stop.host in free:
            culprits.setdefault(stop.host, stop)
    links = [stop for stop in stops if len(_about(stop)) == 2 and _about(stop) <= {*checked.cluster}]
    others = defaultdict[tuple[str, int], set[str]](set)
    for link in links:
        for place, name in enumerate(ends := link.host.split(", ")):
            others[name, place].add(ends[1 - place])
    for link in links:
        met = {name: len(others[name, place]) for place, name in enumerate(link.host.split(", ")) if name in free}
        if max(met.values(), default=0) > 1 and not _about(link) & culprits.keys():
            culprits[max(met, key=lambda name: met[name])] = link
    return culprits


def _goes_on(stops: Iterable[Finding], kept: Mapping[str, Entry], new: Collection[str], checked: Checked) -> bool:
    """Whether a run can go on without these nodes: with two others, and half of those that no person took out.

    If most of the nodes fail, it is rarely their fault.
    """
    left = members(checked.cluster, kept, new)
    wanted = members(checked.cluster, [name for name, entry in kept.items() if entry.held])
    solved = all(_about(stop) & {*kept, *new} for stop in stops)
    return solved and len(left) >= 2 and 2 * len(left) >= len(wanted) and any(name in checked.tested for name in left)
