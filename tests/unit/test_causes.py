"""The known causes, compared with real logs, each produced by provoking its cause on nodes of a lab."""

import ast
import re
import string
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import explain as scoring
import pytest

from farandole.core.causes import CURE_FIELDS, READ, Cause, causes, parse, patterns, recognize
from farandole.explain.diagnosis import of_job
from farandole.node.probes.job import excerpt
from farandole.preflight.unreachable import judge_unreachable, login_fields
from farandole.validation.judge import explain

from .loading import ROOT

LOGS = scoring.EVIDENCE
CAUSES = list(causes().values())
LOGGED = [cause for cause in CAUSES if cause.pattern and not cause.unprovoked]
NODES = ("node-1", "node-2")
LOGIN = {"host": "192.0.2.1", "port": None, "user": "root", "command": "ssh root@192.0.2.1"}
# The fields that code passes to a cause's text in addition to the groups of its pattern.
WORDS = {
    "key-malformed": {"kind", "seen"},
    "key-shared": {"kind", "owner", "owner_kind"},
    "pair-slow-link": {"other", "to", "usual", "which"},
    "pair-slow-node": {"far", "usual"},
    "worker-failed": {"host", "rank", "seen"},
}


@pytest.fixture(scope="module")
def passed() -> list[tuple[str, set[str]]]:
    """The same for calls of finding() with a literal code, read from the source."""
    return [
        (str(node.args[0].value), {str(keyword.arg) for keyword in node.keywords})
        for path in (ROOT / "src/farandole").rglob("*.py")
        if "finding(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "finding"
        if isinstance(node.args[0], ast.Constant)
    ]


def by_code(causes: list[Cause]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cause", causes, ids=lambda cause: str(cause.code))


def fields(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def logs(cause: Cause, folders: tuple[Path, ...] = LOGS) -> list[list[str]]:
    """The logs of a cause as the code gets them: a job's line by line, ssh's output as one line."""
    texts = [path.read_text() for folder in folders for path in sorted(folder.glob(f"{cause.code}.*"))]
    return [text.splitlines() if cause.seen in ("job", "log") else [" ".join(text.split())] for text in texts]


def lines(cause: Cause) -> list[str]:
    return [line for log in logs(cause) for line in log]


def explained(log: list[str]) -> tuple[str, str, str]:
    """How a job with this log is explained."""
    job = {"nodes": NODES, "seconds": 60, "size": 2, "group": "mpi"}
    left = {node: list[str]() for node in NODES}
    return explain({"job": job, "code": 1, "said": log, "ranks": [], "wrong": [], "left": left, "seconds": 1.0})


@by_code(CAUSES)
def test_an_entry_is_complete(cause: Cause) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", cause.code)
    assert cause.what.strip() and cause.cure.strip()
    assert not cause.cascade or cause.seen in ("job", "log")
    assert not cause.excuses or cause.cascade
    assert not cause.unprovoked or cause.pattern
    assert re.fullmatch(r"([\w.-]+/[\w.-]+#\d+)?", cause.upstream)


@by_code(CAUSES)
def test_a_text_has_only_known_fields(cause: Cause, passed: list[tuple[str, set[str]]]) -> None:
    known = {"seen", *re.compile(cause.pattern).groupindex} | WORDS.get(cause.code, set())
    known |= dict(passed).get(cause.code, set())
    known |= {"login": {"user"}, "job": {"host"}, "log": {"host"}, "probe": {"host"}}.get(cause.seen, set())
    assert fields(cause.what) <= known


def test_findings_get_the_fields_of_their_texts(passed: list[tuple[str, set[str]]]) -> None:
    assert len(passed) > 50
    for code, given in passed:
        assert fields(causes()[code].what) | fields(causes()[code].cure) == given, code


@by_code(CAUSES)
def test_a_cure_uses_only_the_inventory(cause: Cause) -> None:
    mine = {"login": set(login_fields(LOGIN)), "check": CURE_FIELDS}.get(cause.seen, {"host"})
    assert fields(cause.cure) <= mine <= CURE_FIELDS
    harmless = {name: f"<{name}>" for name in CURE_FIELDS}
    assert cause.remedy({**harmless, "seen": "$(reboot)"}) == cause.cure.format(**harmless)
    # What a node says is never part of it.
    with pytest.raises(KeyError):
        replace(cause, cure="run {seen}").remedy({**harmless, "seen": "$(reboot)"})


@by_code(LOGGED)
def test_a_real_log_is_recognized_as_its_cause(cause: Cause) -> None:
    assert all(len(log) <= 40 for log in logs(cause))
    for log in logs(cause, LOGS[:1]):
        if cause.seen == "job":
            code, description, _ = explained(log)
            assert (code, "{" in description) == (cause.code, False)
        if cause.seen in ("login", "peer"):
            match = recognize(cause.seen, log[0])
            assert match and match.cause.code == cause.code
        if cause.seen == "login":
            assert judge_unreachable("node-2", {"unreachable_reason": log[0], "login": LOGIN}).code == cause.code


def alternatives(pattern: str) -> list[str]:
    """A pattern once for each alternative in it."""
    parts = re.findall(r"\\.|\[[^]]*\]|.", pattern)
    groups = [[-1]]
    for at, part in enumerate([*parts, ")"]):
        if part == "(":
            groups.append([at])
        elif part == "|":
            groups[-1].append(at)
        elif part == ")" and len(edges := [*groups.pop(), at]) > 2:
            before, after = parts[: edges[0] + 1], parts[at:]
            ways = ("".join([*before, *parts[start + 1 : end], *after]) for start, end in pairwise(edges))
            return [pattern for way in ways for pattern in alternatives(way)]
    return [pattern]


@by_code([cause for cause in LOGGED if cause.seen == "job"])
def test_each_alternative_of_a_pattern_is_in_a_real_log(cause: Cause) -> None:
    real = [line for other in LOGGED if other.seen == "job" for line in lines(other)]
    for pattern in alternatives(cause.pattern):
        assert any(re.search(pattern, line) for line in real), pattern


@by_code([cause for cause in LOGGED if cause.seen == "job"])
def test_a_cause_is_found_before_a_long_end(cause: Cause) -> None:
    """As job.py sends a log, with sixty lines after it that say nothing."""
    for log in logs(cause):
        shown = excerpt("\n".join([*log, *(f"harmless line {number}" for number in range(60))]), patterns("job"))
        assert shown[-1] == "harmless line 59"
        assert explained(shown)[0] == cause.code


@by_code([cause for cause in LOGGED if not cause.cascade])
def test_root_causes_are_distinct_whatever_their_order(cause: Cause) -> None:
    """Except general messages, such as ssh's after one about a host key, or horovodrun's after one from ssh."""
    general = {other.code for other in CAUSES if other.general}
    alike = [other for other in CAUSES if other.seen == cause.seen and not other.cascade]
    fitting = {other.code for other in alike if any(re.search(other.pattern, line) for line in lines(cause))}
    assert fitting - general == {cause.code} - general


def test_a_root_cause_takes_precedence_over_every_cascade() -> None:
    cascades = [line for cause in LOGGED if cause.cascade for line in lines(cause)]
    for cause in LOGGED:
        if cause.seen == "job" and not cause.cascade:
            assert cause.code in {hit.cause.code for hit in of_job([*cascades, *lines(cause)]).roots}
    verdict = of_job(cascades)
    assert verdict.cascades and not verdict.roots


def test_patterns_and_logs_belong_together() -> None:
    codes = {path.name.split(".")[0] for folder in LOGS for path in folder.iterdir()}
    assert codes - {"unknown", "healthy"} == {cause.code for cause in LOGGED}
    assert all(cause.pattern for cause in CAUSES if cause.seen in READ)


def test_probes_print_the_codes_in_the_file() -> None:
    """And those of a job nothing but lines of JSON."""
    sources = {path.name: path.read_text() for path in (ROOT / "src/farandole/node/probes").glob("*.py")}
    printed = {"trust": set(re.findall(r'"(peer-[a-z-]+)"', sources.pop("trust.py")))}
    printed["files"] = set(re.findall(r'"(files-[a-z-]+)"', sources.pop("shared_files.py")))
    del sources["job.py"]
    calls = r'\b(?:error|fail|WayError)\(\s*"([a-z-]+)"'
    printed["probe"] = {code for source in sources.values() for code in re.findall(calls, source)}
    for place, codes in printed.items():
        assert codes == {cause.code for cause in CAUSES if cause.seen == place}
    assert not any(re.search(r"\bprint\(|sys\.exit\(f?\"", source) for source in sources.values())


def test_every_other_code_is_used() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/farandole").rglob("*.py"))
    assert [cause.code for cause in CAUSES if cause.seen == "check" and f'"{cause.code}"' not in source] == []


def test_a_cause_is_in_a_log_or_from_a_check_unless_it_says_where() -> None:
    assert parse("- {code: a, pattern: x, what: y, cure: z}")["a"].seen == "log"
    assert parse("- {code: a, what: y, cure: z}")["a"].seen == "check"


ENTRY = "- {code: a, seen: job, pattern: x, what: y, cure: z}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY + ENTRY, "same code"),
        (ENTRY.replace("job", "dream"), "pattern"),
        (ENTRY.replace("pattern: x, ", ""), "pattern"),
        (ENTRY.replace("job", "check"), "pattern"),
        (ENTRY.replace("what", "waht"), "waht"),
        (ENTRY.replace("seen", "severity: loud, seen"), "severity"),
        (ENTRY.replace("pattern: x", "pattern: ("), "unterminated"),
    ],
)
def test_a_broken_file_is_not_loaded(text: str, message: str) -> None:
    assert parse(ENTRY)["a"].seen == "job"
    with pytest.raises((ValueError, TypeError, re.error), match=message):
        parse(text)
