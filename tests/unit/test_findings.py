"""How findings are listed for a person."""

import pytest

from farandole.core.causes import Severity
from farandole.core.findings import Finding, finding, refused, report
from farandole.explain.diagnosis import OWN
from farandole.preflight.unreachable import judge_unreachable

from .machines import login

OFF = [Finding(f"node-{n}", "off", "it is off", "switch it on") for n in range(7)]
ODD = Finding("x", "odd", "strange", "even", "warn")


def test_hosts_with_the_same_finding_share_a_number_and_the_worst_comes_first() -> None:
    severities: tuple[Severity, ...] = ("note", "warn", "stop")
    lines = report([*OFF, *(Finding("x", kind, "it is so", "mend it", kind) for kind in severities)]).splitlines()
    assert lines[0] == "preflight found 2 problems, 1 warning and 1 note; nothing was changed."
    assert [line.split("[")[1].rstrip("]") for line in lines if "[" in line] == ["off", "stop", "warn", "note"]
    assert "1. node-0 to node-6: it is off [off]" in lines
    assert [line.partition("x: ")[2].partition(":")[0] for line in lines if " x: " in line][1:] == ["warning", "note"]


def test_what_one_cure_mends_is_one_item_with_a_line_for_each_value() -> None:
    values = {"node-1": 100, "node-2": 200, "node-3": 100}
    text = report(finding("memory-small", name, seen=seen, wanted=1024) for name, seen in values.items())
    assert text.startswith("preflight found 1 warning;")
    assert text.count("cure: ") == 1
    assert [line.partition(": ")[0] for line in text.splitlines() if "[memory-small]" in line] == [
        "1. node-1, node-3",
        "   node-2",
    ]
    assert all(OWN.match(line) for line in text.splitlines() if "[memory-small]" in line)
    # What is mended in another way is another item.
    text = report(finding("variable-misspelt", "node-1", seen=name, known=name.upper()) for name in ("abc", "xyz"))
    assert text.startswith("preflight found 2 problems;")
    assert text.count("cure: ") == 2


@pytest.mark.parametrize(
    ("code", "reason", "words"),
    [
        ("login-no-route", "ssh: connect to host 192.0.2.1 port 22: No route to host", ""),
        ("login-failed", "Connection closed by UNKNOWN port 65535", " shows where it stops"),
        ("login-incomplete", "no complete answer in 60 s", " top -bn1"),
    ],
)
def test_nodes_that_are_off_are_one_item_although_each_has_a_login_of_its_own(
    code: str, reason: str, words: str
) -> None:
    findings = [
        judge_unreachable(f"node-{last}", {"unreachable_reason": reason, "login": login(host=f"192.0.2.{last}")})
        for last in range(1, 9)
    ]
    assert {item.code for item in findings} == {code}
    text = report(findings)
    assert text.count("cure: ") == 1
    assert "1. node-1 to node-8: " in text
    assert f"root@192.0.2.1{words} (so for node-1; likewise for node-2 to node-8)" in text


def test_a_warning_refuses_nothing() -> None:
    assert refused([*OFF, ODD])
    assert not refused([ODD])
    assert not refused([])
