"""The page of a validation, read back from any file and compared."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.findings import finding
from farandole.links.examine import links_in
from farandole.report.compare import compare
from farandole.report.figures import figures
from farandole.report.markdown import markdown
from farandole.report.matrix import grade, matrix
from farandole.report.page import page
from farandole.report.read import checked, read
from farandole.validation import kept
from farandole.validation.judge import Bars, judge

from .loading import ROOT, load_probe
from .shown import EVIL, check, result, seen


def test_the_page_shows_what_is_wrong_first_and_escapes_everything() -> None:
    hostile = result(hosts=[EVIL], cluster=EVIL, checks=[check(EVIL, "red", hosts=[EVIL], words=EVIL, log=[EVIL])])
    text = page(checked(hostile))
    assert "<script>" not in text and "<img" not in text
    text = page(checked(result()))
    assert text.index("Not measured:") < text.index("What to fix") < text.index("Figures")
    assert "farandole validate -i inventory/mine" in text
    text = page(checked(result(checks=[check("slower", "slow", code="too-slow"), check("wrong", "red")])))
    assert text.index("wrong</h3>") < text.index("slower</h3>")


def test_what_preflight_found_is_to_mend_too() -> None:
    findings = [
        seen(number, "pair-slow-node", f"cause {number}", severity)
        for number, severity in enumerate(("note", "warn", "stop"))
    ]
    text = page(checked(result(preflight={"findings": findings, "time": "2026-01-02T03:04:05Z"})))
    assert "preflight on 2 January 2026, 03:04 UTC found 1 problem and 1 warning." in text
    places = [text.index(part) for part in ("What to fix", "it is off", "cause 2", "cause 1", "Figures", "cause 0")]
    assert places == sorted(places)
    assert "farandole preflight -i inventory/mine" in text
    text = markdown(checked(result(preflight={"findings": findings})))
    places = [text.index(part) for part in ("it is off", "problem of preflight: node-2", "warning of", "Figures")]
    assert places == sorted(places) and "cause 0" not in text


def test_one_cause_on_many_nodes_is_one_card() -> None:
    findings = [
        seen(number, code, f"{code} of {number % 2}", "warn")
        for code in ("shm-small", "limit-low") for number in range(1, 9)
    ]  # fmt: skip
    read_back = checked(result(preflight={"findings": findings}, checks=[check("a", "red"), check("b", "red")]))
    text, short = page(read_back), markdown(read_back)
    assert "found 2 warnings." in text
    # And one for both checks.
    assert (text.count('<section class="problem'), text.count("<dt>Cure</dt>"), short.count("- cure: ")) == (3, 3, 3)
    for shown in (text, short):
        assert shown.count("node-1 to node-8") == 2
        assert shown.count("node-1, node-3, node-5, node-7: shm-small of 1") == 1
        assert shown.count("node-2, node-4, node-6, node-8: shm-small of 0") == 1
    assert len(read_back["preflight"]["findings"]) == len(findings)


def test_the_page_can_be_read_aloud() -> None:
    text = page(checked(result()), compare(checked(result(verdict="green")), checked(result())))
    levels = [*map(int, re.findall(r"<h(\d)", text))]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - former <= 1 for former, later in pairwise(levels))
    assert re.findall(r"<(?:header|main|footer)\b", text) == ["<header", "<main", "<footer"]
    assert not re.findall(r"<th(?! scope=\"(?:row|col)\")[ >]", text)
    assert not re.findall(r"<tr[^>]*>\s*<td", text)
    pictures = re.findall(r"<svg[^>]*>", text)
    assert len(pictures) > 8
    assert not [svg for svg in pictures if not re.search(r'role="img".* aria-label="[^"]{8}|aria-hidden="true"', svg)]


def contrast(colour: str, behind: str) -> float:
    """How well two colours are told apart, as WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((light(colour), light(behind)))
    return (high + 0.05) / (low + 0.05)


def test_words_stand_out_from_what_is_behind_them() -> None:
    style = (ROOT / "src/farandole/report/page.css").read_text()
    # In the light, in the dark, and on paper.
    palettes = [
        dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r":root {(.*?)}", style, re.DOTALL)
    ]
    assert len(palettes) == 3
    inks = ("ink", "mute", "ok", "slow", "bad", "a")
    for palette in palettes:
        colours = {
            name: colour if len(colour) == 7 else "#" + "".join(2 * part for part in colour[1:])
            for name, colour in palette.items()
        }
        seen = [(colour, behind) for colour in inks for behind in ("paper", "panel", "soft")]
        seen += [("ink", f"{colour}-soft") for colour in ("ok", "slow", "bad")]
        assert not [pair for pair in seen if contrast(*(colours[name] for name in pair)) < 4.5]


def test_old_and_bare_results_have_a_page() -> None:
    bare = {"format": 2, "time": "x", "verdict": "red", "checks": []}
    assert "format 2, which has no series" in page(checked(bare))
    assert "0 checks" in page(checked(bare | {"format": 3}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (json.dumps(result())[:200], "cut off"),
        ("[]", "it is a list"),
        ("{}", "not the result of a validation"),
        (json.dumps(result(format=9)), "reads 2 and 3"),
        (json.dumps(result(format=True)), "reads 2 and 3"),
        (json.dumps(result(checks="x")), ".checks"),
        (json.dumps(result(jobs=[{"id": 1}])), ".jobs"),
        ("[" * 100_000, "not JSON"),
        ('{"format": 3, "x": NaN}', "not JSON"),
    ],
    ids=["empty", "half", "list", "not ours", "newer", "true", "checks", "jobs", "deep", "nan"],
)
def test_a_bad_file_is_a_message(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(FarandoleError, match=r"result\.json") as error:
        read(tmp_path)
    assert message in str(error.value)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a value, as the container and the key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


MISSING = object()


@pytest.mark.parametrize(
    "wrong",
    [MISSING, None, True, -1, 1e300, 2**2000, "", "\ud800\x1b[31m", [], {}, [[]], [None, None]],
    ids=lambda wrong: "missing" if wrong is MISSING else ascii(wrong)[:20],
)
def test_whatever_is_wrong_in_a_result_there_is_a_page_or_a_message(wrong: Any) -> None:
    whole, other = result(), checked(result())
    whole["checks"][0]["log"] = ["line"]
    for container, key in [*places(whole)]:
        right = container.pop(key) if wrong is MISSING else container[key]
        if wrong is not MISSING:
            container[key] = wrong
        try:
            content = checked(json.loads(json.dumps(whole)))
        except FarandoleError as error:
            assert str(error)
        else:
            page(content, compare(content, other)).encode()
            markdown(content).encode()
        if wrong is MISSING and isinstance(container, list):
            container.insert(key, right)
        else:
            container[key] = right


def test_a_huge_result_and_a_gigantic_log_are_cut() -> None:
    lines = [f"line {number} {'x' * 80}" for number in range(600_000)]
    text = page(checked(result(checks=[check("x", "red", log=lines), check("y", "red", log=["y" * 50_000_000])])))
    assert len(text.encode()) <= 2_000_000
    assert "line 599999 " in text and "line 0 " not in text
    many = [check(f"c{number}", "red", log=["x" * 390] * 40, words="w" * 1900) for number in range(900)]
    text = page(checked(result(checks=many)))
    assert len(text.encode()) <= 2_000_000
    assert "not shown; result.json has them all" in text


def test_a_change_is_noise_if_the_rounds_touch() -> None:
    def figure(value: float, *spread: float, **changes: Any) -> dict[str, Any]:
        own = {"value": value, "spread": [*spread] or None, **changes}
        return checked(result(checks=[check("speed.efficiency", **own)]))

    def judged(old: dict[str, Any], new: dict[str, Any]) -> str:
        return compare(old, new).figures[0].judgement

    assert judged(figure(0.9, 0.88, 0.92), figure(0.8, 0.78, 0.82)) == "more than noise"
    assert judged(figure(0.8, 0.78, 0.82), figure(0.9, 0.88, 0.92)) == "more than noise"
    assert judged(figure(0.9, 0.88, 0.92), figure(0.87, 0.85, 0.89)) == "within noise"
    assert judged(figure(0.9), figure(0.8, 0.78, 0.82)) == "noise not known"


def test_a_comparison_says_what_is_different_and_nothing_else() -> None:
    same = compare(checked(result()), checked(result()))
    assert (same.verdicts, same.stack) == ([], [])
    assert {figure.judgement for figure in same.figures} == {"the same"}
    old = result(
        versions={"torch": "1", "numpy": "2"},
        verdict="green",
        stack="ba9876543210",
        hosts=["node-1"],
        bars={"efficiency": 0.7, "pace": 0.5},
        data=["MNIST"],
        checks=[check("horovod.x"), check("gone"), check("parity.x", value=1e-6)],
        preflight={
            "hosts": {"node-1": {"kernel": "6.1"}},
            "pairs": [["a", "b", 900.0, 800.0], ["b", "a", 800.0, 800.0]],
        },
    )
    slow = [["a", "b", 900.0, 800.0], ["b", "a", 700.0, 800.0]]
    new = result(preflight={"hosts": {"node-1": {"kernel": "6.12"}}, "pairs": slow})
    new["checks"].append(check("parity.x", value=0.0))
    changed = compare(checked(old), checked(new))
    assert (changed.old_verdict, changed.new_verdict) == ("green", "red")
    assert changed.stack == [
        ("stack", "ba9876543210", "0123456789ab"), ("numpy", "2", "absent"), ("torch", "1", "2.13.0"),
        ("nodes", "node-1", "node-1, node-10"), ("data", "MNIST", "none"), ("kernel", "6.1", "6.12"),
        ("connections below their bar", "0 of 2", "1 of 2"), ("bar of efficiency", "0.7", "0.8"),
        ("bar of pace", "0.5", "none"),
    ]  # fmt: skip
    assert changed.verdicts == [
        ("horovod.x", "green", "red"), ("speed.efficiency", "absent", "green"), ("rdma", "absent", "not measured"),
        ("gone", "green", "absent"),
    ]  # fmt: skip
    assert [(row.id, row.share, row.judgement) for row in changed.figures] == [("parity.x", None, "noise not known")]
    unsure = [checked(result(checks=[check("speed.x", status, value=at, spread=[at, at])])) for status, at in
              (("green", 0.9), ("not measured", 0.5))]  # fmt: skip
    assert compare(*unsure).figures[0].judgement == "noise not known"
    # Without what preflight found, a kernel may be another one.
    unknown = [("kernel", "not known", "6.12"), ("connections below their bar", "not known", "1 of 2")]
    assert compare(checked(result(preflight=None)), checked(new)).stack == unknown


def test_only_what_is_known_of_both_is_said_to_be_the_same() -> None:
    def shown(**changes: Any) -> str:
        text = page(checked(result(**changes)), compare(checked(result(**changes)), checked(result(**changes))))
        return "".join(re.findall(r"The same in both: (.*?)\.<", text))

    preflight = {"hosts": {"node-1": {"kernel": "6.1"}}, "pairs": [["a", "b", 900.0, 800.0]]}
    assert shown(preflight=preflight) == "stack, nodes, kernel, connections below their bar, bars"
    assert shown(preflight=None, data=["MNIST"]) == "stack, nodes, data, bars"
    assert shown(preflight=None, stack="", hosts=[], bars={}) == ""


def test_what_is_cut_says_so() -> None:
    long = f"{'x' * 600} cannot be reached: it is off"
    shown, whole = load_probe("job").excerpt(f"{long}\n{'y' * 400}", [])
    assert (len(shown), whole) == (400, "y" * 400) and shown.startswith("x" * 299 + "…") and shown.endswith(long[600:])
    job = {"id": "mpi", "group": "mpi", "title": "a job", "nodes": ["node-1"], "seconds": 9}
    ran = {
        "job": job,
        "code": 1,
        "said": [f"[1,0]<stderr>:{'x' * 201}"],
        "ranks": [],
        "wrong": [],
        "left": {},
        "seconds": 1,
    }
    (verdict,) = judge({"mpi": ran}, Bars(), "inventory/mine")
    assert "x" * 199 + "…" in verdict.cause and "x" * 200 not in verdict.cause


def test_a_figure_has_the_limit_that_is_true_for_it() -> None:
    names = ("mpi.bandwidth", "speed.yardstick", "x.accuracy", "speed.efficiency", "speed.predicted", "parity.x")
    shown = figures([checked(result(checks=[check(name, value=0.9)]))["checks"][0] for name in names])
    # MPI may be faster than TCP, and Horovod than torch.distributed; the efficiency should be what is predicted.
    assert [row["limit"] for row in shown] == [None, None, 1.0, 0.9, 1.0, 0.0]


def test_a_bad_node_and_a_bad_link_are_told_apart() -> None:
    names = ["a", "b", "c", "d"]
    pairs = [
        [source, target, 300.0 if "c" in (source, target) else 900.0, 800.0]
        for source in names
        for target in names
        if source != target
    ]
    shown = matrix(pairs, names)
    assert [line.split(":")[0] for line in shown.nodes] == ["c"] and not shown.cells
    pairs = [[*way[:2], 300.0 if way[:2] == ["a", "b"] else 900.0, 800.0] for way in pairs]
    shown = matrix(pairs, names)
    assert (shown.nodes, shown.cells) == ([], ["a → b: 300 MB/s, bar 800"])
    assert [grade(*pair) for pair in ((800, 800), (799, 800), (300, 800), (None, None))] == [
        "good",
        "slow",
        "bad",
        "closed",
    ]


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result()))
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--against", str(tmp_path)])
    assert done.exit_code == 0 and "the verdict was red and is red" in done.output
    assert "node-1" in (tmp_path / "comparison.html").read_text()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "result.json"), "--markdown"])
    assert done.output == markdown(read(tmp_path))
    assert "&lt;script" in markdown(checked(result(hosts=["a"], checks=[check("x", "red", words=EVIL)])))


def test_an_interrupted_report_leaves_the_page_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result()))
    (tmp_path / "index.html").write_text("old")

    def interrupt(*_: object) -> None:
        raise Interrupted("now")

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(Interrupted, match="the same command again"):
        CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (tmp_path / "index.html").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "index.html"}


@pytest.mark.parametrize(
    ("clusters", "arguments", "message"),
    [
        ((), (), "no cluster here has a report"),
        (("one", "two"), (), "several clusters have reports: one, two"),
        (("one",), ("-i", "inventory/gone"), "there is no inventory inventory/gone"),
        (("one",), ("-i", "inventory/gone"), "removed with it"),
        (("one",), ("elsewhere",), "there is no report elsewhere"),
    ],
)
def test_a_report_that_is_not_there_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clusters: tuple[str, ...], arguments: tuple[str, ...], message: str
) -> None:
    for name in clusters:
        (tmp_path / name / "reports" / "latest").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARANDOLE_STATE", str(tmp_path))
    error = CliRunner().invoke(app, ["report", *arguments]).exception
    assert isinstance(error, FarandoleError) and message in str(error)


def test_the_only_cluster_with_a_report_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine" / "reports" / "latest"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result()))
    monkeypatch.setenv("FARANDOLE_STATE", str(tmp_path))
    assert CliRunner().invoke(app, ["report"]).exit_code == 0
    assert (folder / "index.html").exists()


def test_a_result_keeps_what_preflight_measured_of_its_own_nodes(tmp_path: Path) -> None:
    names = ("node-1", "node-2", "node-3")
    pairs = [[source, target, 900.0, 800.0] for source in names for target in names if source != target]
    hosts = {name: {"os_id": "debian", "os_version": "12", "arch": "x86_64"} for name in names}
    links = {
        "nodes": {name: {"delay_us": 9.0, "mb_per_s": 900.0} for name in names}, "usual_mb_per_s": 900.0,
        "rates_measured": "2026-01-02T03:04:05Z", "pairs": pairs,
    }  # fmt: skip
    path = tmp_path / "preflight.json"
    findings = [asdict(finding("shm-small", "node-1", seen=1, wanted=2))]
    path.write_text(json.dumps({"findings": findings, "hosts": hosts, "links": links}))
    record = kept.preflight(path, names[:2], links_in(path))
    assert record is not None
    assert [finding["code"] for finding in record["findings"]] == ["shm-small"]
    assert [pair[:2] for pair in record["pairs"]] == [["node-1", "node-2"], ["node-2", "node-1"]]
    assert {*record["nodes"]} == {*record["hosts"]} == {*names[:2]}
    assert record["rates_measured"] == "2026-01-02T03:04:05Z"
    text = page(checked(result(hosts=[*names[:2]], preflight=record)))
    assert "2 of 2 measured by preflight on 2 January 2026, 03:04 UTC" in text
    # Nodes to which nothing was measured are in the matrix, too.
    assert "2 of 6 measured" in page(checked(result(hosts=[*names], preflight=record)))
    path.write_text("{")
    assert kept.preflight(path, names, {}) is None
