"""The page of a validation: read back from any file, compared, masked, and looked at by a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser, missing
from typer.testing import CliRunner

from farandole.cli import app
from farandole.errors import FarandoleError
from farandole.report.compare import compare
from farandole.report.markdown import markdown
from farandole.report.mask import masked_alike
from farandole.report.matrix import grade, matrix
from farandole.report.page import LARGEST, page
from farandole.report.read import checked, read

EVIL = '"><img src=http://127.0.0.1:9/x onerror=document.title=1><script>document.title=2</script>'


def check(name: str, status: str = "green", **changes: Any) -> dict[str, Any]:
    bad = {"code": "node-silent", "cause": "it is off", "cure": "start it"} if status == "red" else {}
    return {"id": name, "status": status, "words": "seen", "hosts": ["node-1", "node-10"], **bad, **changes}


def result(**changes: Any) -> dict[str, Any]:
    job = {"nodes": ["node-1", "node-10"], "begin": 1.0, "seconds": 2.0, "title": "a job"}
    made = {
        "format": 3,
        "time": "2026-01-02T03:04:05Z",
        "verdict": "red",
        "hosts": ["node-1", "node-10"],
        "cluster": "mine",
        "seconds": 9.0,
        "stack": "0123456789ab",
        "versions": {"torch": "2.13.0"},
        "bars": {"efficiency": 0.8},
        "phases": [{"name": "jobs", "begin": 0.0, "seconds": 9.0}],
        "jobs": [
            {**job, "id": "mpi", "sizes": [[8, 5.0, 6.0], [4 << 20, 4000.0, 3900.0]]},
            {**job, "id": "parity.x.one", "loss": [[1, 2.0], [2, 1.0]]},
            {**job, "id": "parity.x.all", "loss": [[1, 2.0], [2, 1.0]]},
            {
                **job,
                "id": "training.x",
                "ranks": [{"host": one, "rate": 5.0, "step_ms": None} for one in ("node-1", "node-10")],
            },
        ],
        "scaling": [
            {
                "id": "speed",
                "gradients_mb": 1.0,
                "step_ms": 9.0,
                "workers": 2,
                "measured": 0.9,
                "predicted": [[1, 1.0], [2, 0.95]],
            }
        ],
        "checks": [
            check("horovod.x", "red", log=[f"line {number} {EVIL}" for number in range(300)]),
            check("speed.efficiency", value=0.9, bar=0.8, spread=[0.88, 0.92]),
            check("rdma", "not measured", hosts=[]),
        ],
        "preflight": {"hosts": {}, "nodes": {}, "pairs": [["node-1", "node-10", 500.0, 800.0]]},
    }
    return {**made, **changes}


def test_the_page_shows_what_is_wrong_first_and_escapes_everything() -> None:
    hostile = result(hosts=[EVIL], cluster=EVIL, checks=[check(EVIL, "red", hosts=[EVIL], words=EVIL, log=[EVIL])])
    text = page(checked(hostile))
    assert "<script>" not in text and "<img" not in text
    text = page(checked(result()))
    assert text.index("Not measured:") < text.index("What to mend") < text.index("Figures")
    assert "farandole validate -i inventory/mine" in text


def test_old_and_bare_results_have_a_page() -> None:
    bare = {"format": 2, "time": "x", "verdict": "red", "checks": []}
    assert "format 2" in page(checked(bare))
    assert "0 checks" in page(checked(bare | {"format": 3}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        (json.dumps(result())[:200], "cut off"),
        ("[]", "it is a list"),
        ("{}", "no result of a validation"),
        (json.dumps(result(format=9)), "reads 2 and 3"),
        (json.dumps(result(format=True)), "reads 2 and 3"),
        (json.dumps(result(checks="x")), ".checks"),
        (json.dumps(result(jobs=[{"id": 1}])), ".jobs"),
        ("[" * 100_000, "not JSON"),
        ('{"format": 3, "x": NaN}', "not JSON"),
    ],
    ids=["empty", "half", "list", "not ours", "newer", "true", "checks", "jobs", "deep", "nan"],
)
def test_a_bad_file_is_a_message(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(FarandoleError, match=r"result\.json") as error:
        read(tmp_path)
    assert words in str(error.value)


def test_a_huge_result_is_cut_and_says_so() -> None:
    many = [check(f"c{number}", "red", log=["x" * 390] * 40, words="w" * 1900) for number in range(900)]
    text = page(checked(result(checks=many)))
    assert len(text.encode()) <= LARGEST
    assert "not shown; result.json has them all" in text


def test_a_change_is_noise_if_the_rounds_touch() -> None:
    def figure(value: float, *spread: float, **changes: Any) -> dict[str, Any]:
        own = {"value": value, "spread": [*spread] or None, **changes}
        return checked(result(checks=[check("speed.efficiency", **own)]))

    def judged(old: dict[str, Any], new: dict[str, Any]) -> str:
        return compare(old, new).figures[0].judgement

    assert judged(figure(0.9, 0.88, 0.92), figure(0.8, 0.78, 0.82)) == "more than noise"
    assert judged(figure(0.9, 0.88, 0.92), figure(0.87, 0.85, 0.89)) == "within noise"
    assert judged(figure(0.9), figure(0.8, 0.78, 0.82)) == "noise not known"
    changed = compare(checked(result(versions={"torch": "1"}, verdict="green")), checked(result()))
    assert (changed.old_verdict, changed.stack[0]) == ("green", ("torch", "1", "2.13.0"))


def test_masked_results_name_no_host() -> None:
    log = ["trainer@NODE-1: x", "[node-10:12] 192.0.2.7:22 fe80::1 127.0.0.1", "f" * 32, "node-1.cluster 12:30:45"]
    (found,) = masked_alike([checked(result(checks=[check("trust.node-10", "red", log=log, cure="on node-10")]))])
    text = json.dumps(found).lower()
    assert not [word for word in ("node-1", "192.0.2.7", "fe80::1", "f" * 32, "mine") if word in text]
    (one,) = found["checks"]
    assert (one["id"], one["cure"], one["hosts"]) == ("trust.host-2", "on host-2", ["host-1", "host-2"])
    assert one["log"][1].endswith("127.0.0.1") and one["log"][3] == "host-1.cluster 12:30:45"


def test_a_bad_node_and_a_bad_link_are_told_apart() -> None:
    names = ["a", "b", "c", "d"]
    pairs = [
        [one, other, 300.0 if "c" in (one, other) else 900.0, 800.0] for one in names for other in names if one != other
    ]
    found = matrix(pairs, names)
    assert [words.split(":")[0] for words in found.nodes] == ["c"] and not found.cells
    pairs = [[*way[:2], 300.0 if way[:2] == ["a", "b"] else 900.0, 800.0] for way in pairs]
    found = matrix(pairs, names)
    assert (found.nodes, found.cells) == ([], ["a → b: 300 MB/s, bar 800"])
    assert [grade(*one) for one in ((800, 800), (799, 800), (300, 800), (None, None))] == [
        "good",
        "slow",
        "bad",
        "closed",
    ]


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result()))
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--against", str(tmp_path), "--mask"])
    assert done.exit_code == 0 and "the verdict was red and is red" in done.output
    assert "node-1" not in (tmp_path / "comparison-masked.html").read_text()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "result.json"), "--markdown"])
    assert done.output == markdown(read(tmp_path))
    assert "&lt;script" in markdown(checked(result(hosts=["a"], checks=[check("x", "red", words=EVIL)])))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if missing():
        pytest.skip("there is no chromium; make test installs it")
    with browser() as session:
        yield session


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page(checked(result(hosts=["node-1", EVIL]))))
    return path


def test_the_page_on_a_phone_and_in_the_dark(chromium: Browser, file: Path) -> None:
    chromium.show(file, width=360)
    assert chromium.run("return document.documentElement.scrollWidth") <= 360
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = chromium.run(paper)
    chromium.show(file, dark=True)
    assert sum(map(int, chromium.run(paper)[4:-1].split(","))) < 150 < sum(map(int, light[4:-1].split(",")))


def test_hostile_words_stay_text_and_nothing_is_fetched(chromium: Browser, file: Path) -> None:
    chromium.ask("se/log", {"type": "performance"})
    chromium.show(file)
    assert chromium.run("return document.querySelectorAll('script, img').length") == 0
    assert EVIL in chromium.run("return document.body.textContent")
    assert chromium.run("return document.title").startswith("red: mine")
    events = [json.loads(one["message"])["message"] for one in chromium.ask("se/log", {"type": "performance"})]
    urls = {one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"}
    assert urls <= {file.as_uri()}


def test_paper_shows_what_is_folded(chromium: Browser, file: Path) -> None:
    # What is folded takes no room.
    room = "return document.querySelector('details:has(pre)').getBoundingClientRect().height"
    chromium.show(file)
    assert chromium.run(room) < 100
    chromium.show(file, media="print", dark=True)
    assert chromium.run(room) > 1000
    assert chromium.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert chromium.pdf().startswith(b"%PDF")
