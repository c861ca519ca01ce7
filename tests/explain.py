"""`make explain-score`: explain every stored log, and count the right answers; `docs` writes docs/causes.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farandole.core.causes import READ, Cause, causes
from farandole.core.files import write
from farandole.explain.diagnosis import UNKNOWN, Line, explain, thread
from farandole.explain.logs import lines

ROOT = Path(__file__).parents[1]
LOGS, CORPUS = ROOT / "tests/unit/logs", ROOT / "tests/corpus"
# Logs that were made after all patterns of their time, and the score that they got before any pattern was changed.
FIRST_SIGHT = {
    CORPUS / "unseen/1": "62 logs: 14 right (23 %), 5 wrong, 43 unknown although a cause was wanted",
    CORPUS / "unseen/2": "17 logs: 8 right (47 %), 3 wrong, 6 unknown although a cause was wanted",
}
# Each cause has a log in one of these.
EVIDENCE = (LOGS, *FIRST_SIGHT)
UNSURE = "don't know"
PAGE = ROOT / "docs/causes.md"
# Logs that tell more than the message for which they are kept.
MORE = {"job-node-unreachable.txt": {"peer-timeout"}, "job-name-unknown.txt": {"peer-name-unknown"}}
PLACES = {
    "login": "when this machine logs in to a node",
    "peer": "when one node logs in to another",
    "job": "in the output of a job",
    "log": "in a log",
    "trust": "by the check of connections between nodes",
    "files": "by the check of shared files",
    "probe": "by a job of the validation",
    "check": "by a check of Farandole's own",
}


@dataclass(frozen=True)
class Answer:
    """A stored log, the codes that it should get, and those that it got."""

    path: Path
    wanted: frozenset[str]
    got: frozenset[str]

    @property
    def kind(self) -> str:
        """Whether the answer is right, wrong, or that it does not know."""
        return "right" if self.got == self.wanted else "wrong" if self.got else UNSURE


def label(path: Path) -> frozenset[str]:
    """The codes that a log should get, from its name: CODE+CODE.WORD.txt, or none for `healthy` and `unknown`."""
    name = path.name.split(".")[0]
    return frozenset(MORE.get(path.name) or set(name.split("+")) - {"healthy", "unknown"})


def answer(path: Path) -> Answer:
    """Explain a log."""
    with path.open("rb") as stream:
        verdict = explain(Line(path.name, number, text) for number, text in lines(stream, path.name))
    looks_bad = {"looks like a failure"} if verdict.telling and path.name.startswith("healthy") else set()
    return Answer(path, label(path), frozenset({*verdict.codes, *looks_bad}))


def answers() -> list[Answer]:
    """Explain every stored log."""
    return [answer(path) for path in sorted([*LOGS.glob("*.txt"), *CORPUS.rglob("*.txt")])]


def score(found: list[Answer]) -> str:
    """The counts, as a sentence."""
    counts = {kind: sum(one.kind == kind for one in found) for kind in ("right", "wrong", UNSURE)}
    share = 100 * counts["right"] / len(found) if found else 0
    return (
        f"{len(found)} logs: {counts['right']} right ({share:.0f} %), {counts['wrong']} wrong, "
        f"{counts[UNSURE]} unknown although a cause was wanted"
    )


def groups(found: list[Answer]) -> dict[Path, list[Answer]]:
    """The answers to logs with which the patterns were written, and to those that were made afterwards."""
    later = {folder: [one for one in found if one.path.parent == folder] for folder in FIRST_SIGHT}
    return {ROOT / "tests": [one for one in found if one.path.parent not in FIRST_SIGHT], **later}


def page() -> str:
    """docs/causes.md: one section for each cause."""
    known, first, second = (score(group) for group in groups(answers()).values())
    then, afterwards = FIRST_SIGHT.values()
    before = (
        "# Causes\n\n<!-- Written by `make docs` from src/farandole/core/causes.yml and the stored logs. -->\n\n"
        "Every failure that Farandole can name. `farandole explain LOG` finds those that are read from logs, and "
        "site.yml, `farandole validate` and `farandole run` do so by themselves when they fail.\n\n"
        "How often it is right (`make explain-score`), on real logs that were made by causing each failure:\n\n"
        "| Logs | At first sight, before any pattern was changed | Now |\n|---|---|---|\n"
        f"| with which the patterns were written | not measured | {known} |\n"
        "| made when these patterns were finished, of failures of other kinds or in the words of other programs and "
        f"languages | {then} | {first} |\n"
        f"| made when what was missing had been added | {afterwards} | {second} |\n\n"
        "Expect the figures at first sight of a failure that nobody has met here. To those, the answer is "
        "the lines that look most telling. The wrong answers of the last round were healthy logs with a line that "
        "looked like a failure. [trouble.md](trouble.md#three-failures-as-a-user-sees-them) has examples.\n"
    )
    return "\n".join([before, *(line for cause in causes().values() for line in section(cause))])


def section(cause: Cause) -> Iterator[str]:
    """What is to be known of one cause."""
    role = "root cause" if not cause.cascade else "consequence of another failure"
    role = "root cause if no other is found" if cause.leads else role
    yield f"## {cause.code}\n"
    yield f"A {role}, seen {PLACES[cause.seen]}.\n"
    yield f"- What: {shown(cause.what)}"
    if cause.pattern:
        yield f"- Looks like: `` {cause.pattern} ``"
    yield f"- Cure: {shown(cause.cure)}"
    if cause.upstream:
        yield f"- Upstream: [{cause.upstream}](https://{thread(cause)})"
    if cause.seen in READ:
        paths = [path for folder in EVIDENCE for path in sorted(folder.glob(f"{cause.code}.*"))]
        logs = ", ".join(f"[{path.name}](../{path.relative_to(ROOT)})" for path in paths)
        yield f"- Evidence: {logs or 'no log: ' + cause.unprovoked}"
    yield ""


def shown(text: str) -> str:
    """A text of the catalogue with its fields as words, safe in Markdown."""
    for name, word in UNKNOWN.items():
        text = text.replace(f"{{{name}}}", word)
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def main() -> int:
    """Print the scores, and each answer that is not right."""
    if sys.argv[1:] == ["docs"]:
        write(PAGE, page())
        return 0
    found = answers()
    for one in found:
        if one.kind != "right":
            wanted, got = (", ".join(sorted(codes)) or "nothing" for codes in (one.wanted, one.got))
            print(f"{one.kind}: {one.path.relative_to(ROOT)}: wanted {wanted}, got {got}")
    for folder, group in groups(found).items():
        print(f"{folder.relative_to(ROOT)}: {score(group)}")
        if folder in FIRST_SIGHT:
            print(f"  at first sight: {FIRST_SIGHT[folder]}")
    return int(any(one.kind == "wrong" for one in found))


if __name__ == "__main__":
    sys.exit(main())
