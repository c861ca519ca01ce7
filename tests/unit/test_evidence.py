"""Evidence of other clusters: what leaves them, who has signed it, and what the catalogue makes of it."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from farandole.cli import validate
from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.lab import prove
from farandole.plays.playbook import Login
from farandole.report import evidence
from farandole.stack import lock as locks
from farandole.stack.catalogue import load
from farandole.validation import plan
from farandole.validation.judge import Bars

LOCK: dict[str, Any] = {
    "id": "aaaa00000000",
    "platform": {"os": "debian-12", "arch": "x86_64", "python": "3.11"},
    "wanted": {"frameworks": ["tensorflow", "pytorch"], "accelerator": "cuda", "packages": ["secret-tool"]},
    "versions": {
        "openmpi": "4.1.4", "horovod": "0.28.1", "torch": "2.13.0", "cuda": "13.0", "nccl": "none", "secret-tool": "1.0"
    },
    "own": ["secret-tool"],
}  # fmt: skip
MACHINE = {
    "kernel": "6.1.0-50-amd64",
    "links": {"eno1": {"mtu": 1500, "speed": 10000, "duplex": "full"}},
    "rdma": {},
    "gpus": {"found": 2},
}
HOSTS = ("frodo", "sam", "sam2")
PREFLIGHT: dict[str, Any] = {
    # Not each calls its interface the same.
    "hosts": {
        "frodo": {"machine": MACHINE},
        "sam": {"machine": MACHINE},
        "sam2": {"machine": {**MACHINE, "links": {"eth7": {"speed": 25000}, "eno1": {"speed": 1}}}},
    },
    "fabric": {"interfaces": {"frodo": "eno1", "sam": "eno1", "sam2": "eth7"}},
}


def check(name: str, status: str = "green", code: str = "") -> dict[str, Any]:
    words = "frodo:/home/alice"
    return {"id": name, "status": status, "words": words, "value": 1.5, "code": code, "log": ["of alice"], "bar": None}


RESULT = {
    "time": "2026-11-26T20:00:00Z", "hosts": list(HOSTS), "stack": "aaaa00000000", "quick": False, "verdict": "red",
    "cluster": "shire", "inventory": "/home/alice/shire",
    "checks": [
        check("mpi"), check("trust.sam2"), check("network.frodo", "red", "link-slow"), check("nccl", "not measured"),
        # Of a node that is left out, of a head that is not among the hosts, of folders.
        check("node.gollum"), check("trust.gandalf"), check("files.home.alice"), check("files.data.bob and alice"),
    ],
}  # fmt: skip


@pytest.fixture
def found() -> evidence.Evidence:
    return evidence.gather(RESULT, LOCK, PREFLIGHT, "1.0.0")


def key(folder: Path, name: str) -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "alice@frodo", "-f", folder / name], check=True
    )
    return folder / name


@pytest.fixture
def signed(tmp_path: Path, found: evidence.Evidence) -> Path:
    evidence.write(tmp_path / "file.json", found, key(tmp_path, "alice"))
    return tmp_path / "file.json"


def test_no_name_of_a_host_or_a_person_or_their_packages_leaves(signed: Path) -> None:
    text = signed.read_text()
    for name in (*HOSTS, "gollum", "gandalf", "alice", "bob", "shire", "secret"):
        assert name not in text
    ids = [one["id"] for one in json.loads(text)["evidence"]["checks"]]
    named = ["node.<node>", "trust.<node>", "files.<folder>", "files.<folder>"]
    assert ids == ["mpi", "trust.<node>", "network.<name>", "nccl", *named]


def test_no_id_of_a_job_or_of_what_it_measures_is_taken_for_a_name() -> None:
    nodes = ["frodo", "sam"]
    planned = plan.jobs(nodes, [*plan.MODULES], 60, Bars(), quick=False, gpu=True, queue=nodes, keras_3=True)
    ids = {name for job in planned for name in (job["id"], job["id"].removesuffix(".one"))}
    ids |= {"mpi.bandwidth", "mpi.latency", "rdma", "horovod.torch.gloo.pace", "training.keras_3.accuracy", "nccl"}
    ids |= {f"{job}.{kind}" for job in ("network", "speed") for kind in ("efficiency", "predicted")} | {
        "speed.yardstick"
    }
    assert {evidence.anonymous(name) for name in ids} == ids


def test_evidence_that_an_earlier_version_has_written_is_read(tmp_path: Path, found: evidence.Evidence) -> None:
    old = [{"id": name, "status": "green", "value": None, "code": ""} for name in ("network.<node>", "files.data")]
    evidence.write(tmp_path / "file.json", {**found, "checks": old}, None)
    assert evidence.read(tmp_path / "file.json", unsigned=True)[0]["checks"] == old


def test_the_speed_is_that_of_the_chosen_interfaces(found: evidence.Evidence) -> None:
    assert found["mbit"] == [10000, 25000]


def test_it_becomes_a_row(tmp_path: Path, signed: Path) -> None:
    rows = tmp_path / "rows.yml"
    # What we have seen ourselves stays.
    ours = {"system": "debian-12", "verdict": "works", "ran": "here", "wanted": "tensorflow,pytorch"}
    prove.add(rows, {**ours, "set": "openmpi==4.1.4 horovod==0.28.1 torch==2.13.0"})
    for _ in range(2):
        done = CliRunner().invoke(app, ["prove", "--add", str(signed), "--evidence", str(rows)])
        assert done.exit_code == 0, done.output
    first, row = yaml.safe_load(rows.read_text())
    assert first["ran"] == "here"
    assert row["ran"] == (
        "validation on 3 nodes of others: 6 green, 1 not measured, 1 red (link-slow); "
        "kernel 6.1.0-50-amd64, 10000 Mbit/s, 2 GPUs a node"
    )
    assert (row["system"], row["verdict"], row["set"]) == (
        "debian-12",
        "fails",
        "openmpi==4.1.4 cuda==13.0 horovod==0.28.1 torch==2.13.0",
    )
    assert row["by"].startswith("SHA256:")


def test_what_says_less_replaces_no_failure(tmp_path: Path, found: evidence.Evidence) -> None:
    rows, file = tmp_path / "rows.yml", tmp_path / "file.json"
    green = {**found, "verdict": "green", "checks": found["checks"][:1]}
    for content, fails in (
        ({**found, "verdict": "green"}, False), ({**green, "quick": True}, True), ({**green, "nodes": 1}, True),
        ({**green, "checks": []}, True), ({**green, "checks": [{**found["checks"][3], "value": None}]}, True),
        # Of the same versions on CPUs.
        ({**green, "versions": {**found["versions"], "cuda": "none"}}, False),
    ):  # fmt: skip
        evidence.write(file, content, None)
        done = CliRunner().invoke(app, ["prove", "--add", str(file), "--unsigned", "--evidence", str(rows)])
        assert isinstance(done.exception, FarandoleError) is fails, done.output
    verdicts = [(row["verdict"], "cuda" in row["set"]) for row in yaml.safe_load(rows.read_text())]
    # One red check is a failure, whatever the verdict is.
    assert verdicts == [("fails", True), ("works", False)]


def test_a_row_is_replaced_only_by_a_later_one_of_the_same_people(tmp_path: Path, found: evidence.Evidence) -> None:
    rows, file = tmp_path / "rows.yml", tmp_path / "file.json"
    green = {**found, "verdict": "green", "checks": found["checks"][:1]}
    for who, content, refused in (
        ("alice", found, False), ("alice", {**green, "date": "2025-01-01"}, True), ("bob", green, False),
        ("", found, False), ("", green, False), ("", green, False), ("alice", {**green, "date": "2027-01-01"}, False),
    ):  # fmt: skip
        signing = tmp_path / who if who else None
        if signing and not signing.exists():
            key(tmp_path, who)
        evidence.write(file, content, signing)
        done = CliRunner().invoke(app, ["prove", "--add", str(file), "--unsigned", "--evidence", str(rows)])
        assert ("of 2026-11-26 by the same people" in str(done.exception)) is refused, done.output
    verdicts = [(row["by"] == "unsigned", row["verdict"]) for row in yaml.safe_load(rows.read_text())]
    assert verdicts == [(False, "works"), (True, "fails"), (True, "works"), (False, "works")]
    rows.write_text("{}\n")
    done = CliRunner().invoke(app, ["prove", "--add", str(file), "--evidence", str(rows)])
    assert done.exit_code == 0, done.output
    # As a lock reads it.
    (one,) = load(evidence=rows).evidence
    assert (one.works, one.others) == (True, {})
    rows.write_text("a: b\n")
    assert "is no file of evidence" in str(
        CliRunner().invoke(app, ["prove", "--add", str(file), "--evidence", str(rows)]).exception
    )


def test_one_that_was_edited_is_refused(signed: Path) -> None:
    signed.write_text(signed.read_text().replace('"verdict": "red"', '"verdict": "green"'))
    with pytest.raises(FarandoleError, match="is not what was signed"):
        evidence.read(signed)


def test_one_that_somebody_else_has_made_is_refused(tmp_path: Path, signed: Path, found: evidence.Evidence) -> None:
    signers = tmp_path / "signers"
    signers.write_text(f"alice {(tmp_path / 'alice.pub').read_text()}")
    assert evidence.read(signed, signers)[1] == evidence.read(signed)[1]
    evidence.write(signed, found | {"verdict": "green"}, key(tmp_path, "mallory"))
    assert evidence.read(signed)[1]
    with pytest.raises(FarandoleError, match=r"signed by SHA256:.*, a key that is not in"):
        evidence.read(signed, signers)
    # Whoever changed it is not a stranger.
    signed.write_text(signed.read_text().replace('"verdict": "green"', '"verdict": "slow"'))
    with pytest.raises(FarandoleError, match="is not what was signed"):
        evidence.read(signed, signers)
    # Her signature under his words.
    other = json.loads(signed.read_text())
    evidence.write(signed, found, tmp_path / "alice")
    signed.write_text(json.dumps({**json.loads(signed.read_text()), "evidence": other["evidence"]}))
    with pytest.raises(FarandoleError, match="is not what was signed"):
        evidence.read(signed, signers)


@pytest.mark.parametrize(
    ("lines", "good"),
    [
        (("alice",), True), (("*@example.org",), True), (("# of the site", "bob", "alice,bob"), True),
        (('alice namespaces="git"', "bob"), True), (('alice namespaces="git"',), False),
        (('alice valid-before="20200101"',), False),
    ],
)  # fmt: skip
def test_a_key_may_sign_what_its_lines_allow(tmp_path: Path, signed: Path, lines: Sequence[str], good: bool) -> None:
    signers, public = tmp_path / "signers", (tmp_path / "alice.pub").read_text()
    signers.write_text("".join(f"{line}\n" if line[0] == "#" else f"{line} {public}" for line in lines))
    if good:
        assert evidence.read(signed, signers)[1].startswith("SHA256:")
    else:
        with pytest.raises(FarandoleError, match="or not for this there"):
            evidence.read(signed, signers)
    done = CliRunner().invoke(app, ["prove", "--add", str(signed), "--signers", str(tmp_path / "nope")])
    assert (done.exit_code, "--signers" in done.output) == (2, True)


def test_one_that_nobody_has_signed_needs_an_option(tmp_path: Path, found: evidence.Evidence) -> None:
    path = tmp_path / "file.json"
    assert evidence.write(path, found, None) == ""
    with pytest.raises(FarandoleError, match="--unsigned"):
        evidence.read(path)
    assert evidence.row(*evidence.read(path, unsigned=True))["by"] == "unsigned"
    with pytest.raises(FarandoleError, match="is not signed"):
        evidence.read(path, tmp_path / "signers", unsigned=True)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("lock", "x\nverdict: works"), ("nodes", 0), ("kernels", ["6.1\n"]), ("more", 1), ("date", "2026-99-99"),
        *(("platform", {**LOCK["platform"], "os": system}) for system in ("~", "debian-12:", "windows")),
        ("platform", {}),
        *(("versions", {**LOCK["versions"], **one}) for one in ({"a b": "1"}, {"numpy": "~1"}, {"torch": "none"})),
        ("versions", {"torch": "2.13.0"}),
    ],
)  # fmt: skip
def test_what_it_may_not_say_is_refused(tmp_path: Path, found: evidence.Evidence, part: str, value: object) -> None:
    evidence.write(tmp_path / "file.json", {**found, part: value}, key(tmp_path, "alice"))
    with pytest.raises(FarandoleError, match="is no evidence"):
        evidence.read(tmp_path / "file.json")


def test_it_is_of_the_stack_in_the_lock() -> None:
    with pytest.raises(FarandoleError, match="run site"):
        evidence.gather({**RESULT, "stack": "bbbb00000000"}, LOCK, PREFLIGHT, "1.0.0")


def test_it_is_of_all_nodes() -> None:
    less = {**PREFLIGHT, "hosts": {name: one for name, one in PREFLIGHT["hosts"].items() if name != "sam"}}
    with pytest.raises(FarandoleError, match=r"has not looked at sam$"):
        evidence.gather(RESULT, LOCK, less, "1.0.0")


@pytest.fixture
def shire(tmp_path: Path) -> Path:
    """An inventory of nodes that do not answer."""
    nodes = {name: {"ansible_host": f"127.0.0.{place}", "ansible_port": 1} for place, name in enumerate(HOSTS, 1)}
    cluster = {"hosts": nodes, "vars": {"base_state_dir": str(tmp_path / "state")}}
    (tmp_path / "shire").mkdir()
    (tmp_path / "shire/hosts.yml").write_text(yaml.safe_dump({"cluster": cluster, "head": {"hosts": {"frodo": None}}}))
    return tmp_path / "shire"


def test_the_nodes_are_looked_at_anew(shire: Path) -> None:
    command = ["validate", "-i", str(shire), "--evidence", str(shire / "file.json")]
    done = CliRunner().invoke(app, command)
    assert "preflight found 1 problem" in done.output
    assert "this validation wrote no report" in str(done.exception)


def test_what_could_not_be_written_or_signed_is_refused_before_it_is_measured(shire: Path) -> None:
    (shire.parent / "no key").write_text("")
    for more, why in (
        (("none/file.json",), "none/file.json cannot be written"), (("",), f"{shire} cannot be written"),
        (("file.json", "--evidence-key", str(shire.parent / "no key")), "no key cannot sign: "),
    ):  # fmt: skip
        command = ["validate", "-i", str(shire), "--evidence", str(shire / more[0]), *more[1:]]
        done = CliRunner().invoke(app, command)
        assert (done.output, why in str(done.exception)) == ("", True), done.exception


def test_it_is_judged_as_everywhere_and_told_beside_the_json(shire: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def play(_playbook: str, _inventory: Path, _login: Login, *arguments: str, **_: object) -> int:
        """Leaves what a validation does."""
        asked.extend(arguments)
        report = shire.parent / "state/reports/latest"
        report.mkdir(parents=True)
        (report / "result.json").write_text(json.dumps({"format": 3, **RESULT}))
        (shire.parent / "state/preflight.json").write_text(json.dumps(PREFLIGHT))
        return 0

    monkeypatch.setattr(validate, "play", play)
    monkeypatch.setattr(locks, "read", lambda _: LOCK)
    done = CliRunner().invoke(app, ["validate", "-i", str(shire), "--json", "--evidence", str(shire / "file.json")])
    assert (done.exit_code, done.stdout) == (0, ""), done.exception
    assert f"evidence: {shire}/file.json, not signed" in done.stderr
    assert json.loads(asked[-1])["validation_bars"] == {}


def test_a_key_that_cannot_sign_is_named(tmp_path: Path, found: evidence.Evidence) -> None:
    (tmp_path / "key").write_text("no key")
    with pytest.raises(FarandoleError, match="key cannot sign"):
        evidence.write(tmp_path / "file.json", found, tmp_path / "key")
