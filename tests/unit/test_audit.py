"""Everything from outside is pinned, and the audit reports what is not."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import audit
import pytest

from farandole.stack.catalogue import Catalogue

ROOT = Path(__file__).parents[2]
REQUIREMENTS = (ROOT / "requirements.txt").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
GOOD = "0" * 64


def test_everything_that_comes_from_outside_is_pinned() -> None:
    assert [unpinned for kind in audit.survey() for unpinned in kind.unpinned] == []


def test_a_requirement_without_its_hashes_is_reported() -> None:
    name, _, rest = REQUIREMENTS.partition("==")
    version, _, others = rest.partition(" \\\n")
    entries = others[others.index("\nannotated-doc") :]
    assert audit.tools(f"{name}=={version}{entries}", PYPROJECT).unpinned == [f"requirements.txt: {name}=={version}"]
    shorter = REQUIREMENTS.replace("sha256:", "sha256:0", 1)
    assert audit.tools(shorter, PYPROJECT).unpinned == [f"requirements.txt: {name}=={version}"]


def test_a_build_backend_that_is_not_pinned_is_reported() -> None:
    other = PYPROJECT.replace('requires = ["setuptools>=77"]', 'requires = ["hatchling"]')
    assert "hatchling" in audit.tools(REQUIREMENTS, other).unpinned[0]


def test_rows_without_a_sha256_are_reported() -> None:
    rows: dict[str, Any] = {"openmpi": {"1.2.3": {"sha256": "later"}}, "horovod": {"3": {"sha256": GOOD}}}
    sources = audit.stack(Catalogue({"components": rows, "openmpi_site": "https://site/{version}.tar"}))
    assert (sources.count, [name.split()[-1] for name in sources.unpinned]) == (2, ["https://site/1.2.3.tar"])


def test_data_without_a_sha256_and_keys_without_fingerprints_are_reported() -> None:
    digits = {"member": "m", "sha256": GOOD, "wheel": {"file": "w", "sha256": GOOD[1:]}}
    assert len(audit.data({"mnist": {"files": {"f": None}}, "digits": digits}).unpinned) == 2
    assert audit.keys({"__nccl_nvidia_keys": {"debian12": {"fingerprint": "3BF863CC"}}}).unpinned


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("roles/x/tasks/main.yml", "- ansible.builtin.get_url: {url: a, dest: b}"),
        ("roles/x/tasks/main.yml", "- block:\n    - pip: {name: a}"),
        ("roles/x/tasks/main.yml", "- apt: {name: a, allow_unauthenticated: true}"),
        ("roles/x/files/build.sh", "curl -fsSL $URL | sh"),
        ("roles/x/files/build.sh", "wget https://example.org/x"),
        ("Makefile", "\tpip install --quiet molecule"),
        (".ci/run", "python -m pip install \\\n  --upgrade pip"),
        ("roles/x/templates/x.sources", "deb [trusted=yes] http://mirror stable main"),
    ],
)
def test_unchecked_downloads_are_reported(path: str, text: str) -> None:
    assert audit.tasks({path: text}).unpinned


def test_a_program_that_downloads_must_say_what_it_checks() -> None:
    texts = dict.fromkeys(audit.FETCHERS, "urllib.request.urlopen(url)")
    assert audit.programs(texts).unpinned == []
    assert "src/new.py" in audit.programs({**texts, "src/new.py": "urlopen(url)"}).unpinned[0]


def test_a_url_without_a_sha256_is_reported() -> None:
    where = "http" + "s://downloads.example.net/x.tar"
    texts = {
        "src/a.py": f'"{where}"',
        "docs/a.md": where,
        "src/b.py": f"# see {where}",
        "src/c.py": '"http://node-1:80/"',
    }
    assert audit.addresses(texts, ()).unpinned == [f"src/a.py:1: {where}"]
    assert audit.addresses(texts, ("https://downloads.example.net/",)).unpinned == []


@pytest.mark.parametrize("path", [".github/workflows/a.yml", "molecule/x/Dockerfile"])
def test_actions_and_images_are_reported(path: str) -> None:
    assert audit.images({path: ""}).unpinned == [path]
    assert audit.images({"molecule/x/molecule.yml": "platforms:\n  - image: debian\n"}).unpinned


@pytest.fixture
def index() -> Iterator[str]:
    """An index that lists a vulnerability of `bad`, a withdrawn one of `good`, and no other releases."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"bad": {"id": "CVE-1", "fixed_in": ["2"]}, "good": {"id": "CVE-2", "withdrawn": "yes"}}
            hole = known.get(self.path.split("/")[1])
            self.send_response(200 if hole else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"vulnerabilities": [hole]}).encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_vulnerabilities_are_reported_and_no_answer_does_not_count_as_none(index: str) -> None:
    good, bad, lost = ("good", "1"), ("bad", "1"), ("lost", "1")
    assert audit.ask([good], index) == ([], [])
    found, unanswered = audit.ask([good, lost, bad], index)
    assert found == ["bad 1: CVE-1, fixed in 2"]
    assert [one.split(" (")[0] for one in unanswered] == ["lost 1"]
    assert len(audit.ask([lost, good, bad], index)[1]) == 3
    assert len(audit.ask([good, bad], "http://127.0.0.1:9")[1]) == 2
