"""`make explain-score`: explain every stored log, and count the right answers."""

import sys
from dataclasses import dataclass
from pathlib import Path

from farandole.explain.diagnosis import Line, explain
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
# Logs that tell more than the message for which they are kept.
MORE = {"job-node-unreachable.txt": {"peer-timeout"}, "job-name-unknown.txt": {"peer-name-unknown"}}


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


def stored() -> list[Path]:
    """Every stored log."""
    return sorted([*LOGS.glob("*.txt"), *CORPUS.rglob("*.txt")])


def score(answers: list[Answer]) -> str:
    """The counts, as a sentence."""
    counts = {kind: sum(answered.kind == kind for answered in answers) for kind in ("right", "wrong", UNSURE)}
    share = 100 * counts["right"] / len(answers) if answers else 0
    return (
        f"{len(answers)} logs: {counts['right']} right ({share:.0f} %), {counts['wrong']} wrong, "
        f"{counts[UNSURE]} unknown although a cause was wanted"
    )


def groups(answers: list[Answer]) -> dict[Path, list[Answer]]:
    """The answers to logs with which the patterns were written, and to those that were made afterwards."""
    later = {folder: [answered for answered in answers if answered.path.parent == folder] for folder in FIRST_SIGHT}
    return {ROOT / "tests": [answered for answered in answers if answered.path.parent not in FIRST_SIGHT], **later}


def main() -> int:
    """Print the scores, and each answer that is not right."""
    every = [*map(answer, stored())]
    for answered in every:
        if answered.kind != "right":
            wanted, got = (", ".join(sorted(codes)) or "nothing" for codes in (answered.wanted, answered.got))
            print(f"{answered.kind}: {answered.path.relative_to(ROOT)}: wanted {wanted}, got {got}")
    for folder, group in groups(every).items():
        print(f"{folder.relative_to(ROOT)}: {score(group)}")
        if folder in FIRST_SIGHT:
            print(f"  at first sight: {FIRST_SIGHT[folder]}")
    return int(any(answered.kind == "wrong" for answered in every))


if __name__ == "__main__":
    sys.exit(main())
