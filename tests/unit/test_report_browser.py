"""The page of a validation, looked at by a real browser."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, missing

from farandole.report.compare import compare
from farandole.report.page import page
from farandole.report.read import checked

from .shown import EVIL, check, job, ranks, result


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


@pytest.mark.parametrize("width", [360, 721, 900, 1185])
def test_nothing_is_wider_than_the_window(chromium: Browser, tmp_path: Path, width: int) -> None:
    nodes = [f"a-rather-long-name-of-a-node-{number}.example.org" for number in range(12)]
    jobs = [
        job(f"training.a_sample_with_a_long_name_{number}", nodes, ranks=ranks(nodes, 12345.0)) for number in range(8)
    ]
    pairs = [[source, target, 900.0, 800.0] for source in nodes for target in nodes if source != target]
    hosts = {name: {"system": "Debian 12, x86_64", "kernel": "6.1.0-35-amd64"} for name in nodes}
    path = tmp_path / "index.html"
    sizes = [[1 << power, 12.5, 1234.5] for power in range(3, 23)]
    jobs.append(job("mpi", nodes, sizes=sizes))
    checks = [check("speed.efficiency", "not measured", value=0.9, bar=0.8, spread=[0.88, 0.92])]
    content = checked(result(hosts=nodes, jobs=jobs, preflight={"hosts": hosts, "pairs": pairs}, checks=checks))
    path.write_text(page(content, compare(checked(result(verdict="green")), content)))
    chromium.show(path, width=width)
    chromium.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    # Beside each other while there is room, below each other on a phone.
    rows = "return [...document.querySelectorAll('.stacked tbody tr')].map(row => getComputedStyle(row).display)"
    assert {*chromium.run(rows)} == ({"grid"} if width == 360 else {"table-row"})


def test_the_page_in_the_dark(chromium: Browser, file: Path) -> None:
    chromium.show(file)
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
    events = [json.loads(entry["message"])["message"] for entry in chromium.ask("se/log", {"type": "performance"})]
    urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert urls <= {file.as_uri()}


def test_paper_shows_what_is_folded(chromium: Browser, file: Path) -> None:
    # What is folded takes no room.
    room = "return document.querySelector('details:has(pre)').getBoundingClientRect().height"
    chromium.show(file)
    assert chromium.run(room) < 100
    chromium.show(file, media="print", dark=True)
    assert chromium.run(room) > 1000
    assert chromium.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    sheets = chromium.paper()
    assert "Red: 2 nodes of mine" in sheets[0] and "What to fix" in sheets[0]
    # The last line of the log, which is folded on the screen, the versions, and the end of the page.
    text = " ".join(" ".join(sheets).split())
    assert "line 299 " in text and "torch 2.13.0" in text and "3 checks" in text and "runs no script" in text
