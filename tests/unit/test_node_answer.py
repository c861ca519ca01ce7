"""Which answers of a node are accepted, and how long to wait for one."""

import json
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.core import bounds
from farandole.core.bounds import bounded
from farandole.core.fetching import TooMuchError
from farandole.core.schema import UnfitError
from farandole.preflight import answer as probe

from .loading import PLUGINS, ROOT, acted, load
from .machines import machine
from .stack import run_action
from .test_playbooks import ansible_playbook

asking = load("action", "node_probe")
GOOD: dict[str, Any] = {
    "os_id": "debian", "os_version": "12", "arch": "x86_64", "python": "3.11", "glibc": "2.36",
    "nvidia_driver": "580.95.05", "cuda": "13.0", "hostname": "node-1", "machine_id": "0123456789abcdef" * 2,
    "addresses": ["127.0.0.1", "192.0.2.1", "fe80::1"], "gpus": 8, "init": "systemd",
    "interfaces": [{"name": "eth0.100", "address": "192.0.2.1", "prefix": 24}],
    "accounts": {
        "trainer": {
            "user_id": None, "group_id": 2000, "id_owner": "EXAMPLE\\jürgen groß",
            "group_id_owner": "domain users@example.org",
        }
    },
    "sshd_drop_ins": True, "disk_free_mb": 100_000, "data": {"SOURCE": "ab" * 32, "of somebody.txt": ""},
    "stacks": {"current": "0123456789ab", "former": "", "installed": ["0123456789ab"], "late": False, "left": False},
    "time": 1_800_000_000.25, "root": True, "firewall": None, "machine": machine(),
}  # fmt: skip
TRAINER = GOOD["accounts"]["trainer"]


def answer(**changes: Any) -> dict[str, Any]:
    return {"probe": GOOD | changes, "changed": False, "invocation": {}}


def test_a_valid_answer_is_kept_as_it_is() -> None:
    empty = dict.fromkeys(("os_id", "machine_id", "glibc", "python"), "")
    bare: dict[str, Any] = {**empty, "addresses": None, "interfaces": [], "data": {}}
    changed: tuple[dict[str, Any], ...] = ({}, bare, {"machine_id": "uninitialized"})
    for changes in changed:
        assert probe.check(answer(**changes)) == GOOD | changes


@pytest.mark.parametrize("field", GOOD)
@pytest.mark.parametrize(
    "value",
    [[1], {"a": {}}, "x" * 300, "\x1b[2J", "a\nb", -1, 1 << 70, 1e300, "{{ x }}", {"__ansible_type": "Any"}, [None]],
    ids=str,
)
def test_a_field_with_an_invalid_value_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UnfitError, match=rf"^probe.{field}[ .\[]"):
        probe.check(answer(**{field: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stacks": GOOD["stacks"] | {"installed": ["../../etc"]}}, "probe.stacks.installed[0] is '../../etc'"),
        ({"stacks": {"current": ""}}, "probe.stacks has missing or unknown fields: former, installed"),
        ({"data": {"../x": ""}}, "probe.data name is '../x'"),
        ({"data": {"x": "00"}}, "probe.data.x is '00'"),
        ({"interfaces": [GOOD["interfaces"][0] | {"name": "a b"}]}, "probe.interfaces[0].name is 'a b'"),
        ({"interfaces": [GOOD["interfaces"][0] | {"prefix": 33}]}, "probe.interfaces[0].prefix is 33"),
        ({"interfaces": [GOOD["interfaces"][0]] * 5000}, "probe.interfaces is a list"),
        ({"addresses": ["fe80::1%$(id)"]}, "probe.addresses[0] is 'fe80::1%$(id)', not an address"),
        ({"root": 1}, "probe.root is 1"),
        ({"gpus": True}, "probe.gpus is True"),
        ({"accounts": {"trainer": {**TRAINER, "user_id": -1}}}, "probe.accounts.trainer.user_id is -1"),
        ({"accounts": {"trainer": {**TRAINER, "id_owner": "a;b"}}}, "probe.accounts.trainer.id_owner is"),
        ({"os_id": "debian\n"}, r"probe.os_id is 'debian\n'"),
        ({"more": 1}, "probe has missing or unknown fields: more"),
        ({"arch": "x" * 100_000}, "probe.arch is … xxx"),
    ],
)
def test_the_error_names_the_field_and_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnfitError) as refusal:
        probe.check(answer(**changes))
    assert str(refusal.value).startswith(message)
    assert len(str(refusal.value)) < 150


@pytest.mark.parametrize(
    ("out", "err", "answer"),
    {
        "a login script prints": (f"hello\n{json.dumps(answer())}\nbye", "", {"probe": GOOD}),
        "deep": ('{"probe": ' + "[" * 200_000 + "]" * 200_000 + "}", "", {"unfit": "it is not JSON: maximum"}),
        "long": (json.dumps(answer(hostname="x" * 2_000_000)), "", {"unfit": "it has 19"}),
        "a number too long": ('{"probe": ' + "9" * 5000 + "}", "", {"unfit": "it is not JSON: "}),
        "not a number": (json.dumps(answer(time=float("nan"))), "", {"unfit": "it is not JSON: NaN is not a number"}),
        "a list": ("[1]", "", {"unreachable_reason": "[1]"}),
        "no probe": ('{"add_host": 1, "failed": 1}', "", {"unreachable_reason": "it gave no reason"}),
        "a probe of another kind": ('{"probe": []}', "", {"unfit": "probe is a list"}),
        "a complaint": ('{"failed": true, "msg": "no\\u001b[2J"}', "", {"unreachable_reason": r"no\x1b[2J"}),
        "nothing": ("", "", {"unreachable_reason": "it gave no reason"}),
        "another complaint": ("", "a\x00\nb", {"unreachable_reason": r"a\x00 b"}),
    }.values(),
)
def test_how_an_answer_is_read(out: str, err: str, answer: dict[str, Any]) -> None:
    ((kind, value),) = probe.answer_of(out, err, asking.only_json).items()
    ((wanted, begin),) = answer.items()
    assert kind == wanted
    assert value == begin if isinstance(begin, dict) else value.startswith(begin)


@pytest.mark.parametrize(("silent", "logins"), [(True, 1), (False, 2)], ids=["off", "refusing"])
def test_a_node_that_is_off_costs_one_time_out(silent: bool, logins: int, tmp_path: Path) -> None:
    server, kept = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def serve() -> None:
        with suppress(OSError):
            while True:
                kept.append(server.accept()[0])
                if not silent:
                    kept[-1].close()

    Thread(target=serve, daemon=True).start()
    node = {"ansible_host": "127.0.0.1", "cluster_ip": "192.0.2.1", "ansible_port": server.getsockname()[1]}
    hosts = {"cluster": {"hosts": {"node-1": node}}, "head": {"hosts": {"node-1": None}}}
    (tmp_path / "hosts.yml").write_text(json.dumps(hosts))
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_TIMEOUT": str(probe.QUICK_S + 1)}
    places = {"HOME": str(tmp_path), "FARANDOLE_STATE": str(tmp_path / "state")}
    done = ansible_playbook(ROOT, "-i", tmp_path, "playbooks/preflight.yml", **places, **settings)
    server.close()
    assert "[login-" in done.stdout and len(kept) == logins, done.stdout


def test_a_module_that_is_missing_here_is_no_fault_of_the_node(tmp_path: Path) -> None:
    arguments = {"accounts": {"nobody": 65534}}
    plugins = tmp_path / "collections/ansible_collections/farandole/cluster/plugins"
    plugins.mkdir(parents=True)
    (plugins / "action").symlink_to(PLUGINS / "action")
    answer = run_action("node_probe", arguments, tmp_path)
    assert "node_probe was not found" in answer.get("msg", "")
    assert "unreachable_reason" not in answer


@pytest.mark.parametrize(("lates", "asked"), [([False], 1), ([True, False], 2), ([True, True], 2)])
def test_a_node_that_needs_time_for_its_stack_is_asked_once_more(
    monkeypatch: pytest.MonkeyPatch, lates: list[bool], asked: int
) -> None:
    asks: list[bool] = []

    def answers(module_args: dict[str, Any], **options: Any) -> dict[str, Any]:
        asks.append(module_args.get("patient", False))
        # What has an option is not asked ahead by the next run.
        assert bool(options["delete_remote_tmp"]) is asks[-1]
        return answer(stacks=GOOD["stacks"] | {"late": lates[len(asks) - 1]})

    action = object.__new__(asking.ActionModule)
    action._task = SimpleNamespace(no_log=False)
    action._connection = SimpleNamespace(transport="local", get_option={}.__getitem__)
    monkeypatch.setattr(action, "_execute_module", answers)
    told = acted(action, {"accounts": {"trainer": 2000}}, {})
    assert told["probe"]["stacks"]["late"] is lates[-1]
    assert asks == [False, True][:asked]


def test_an_answer_is_bounded() -> None:
    assert bounds.answer(["sh", "-c", "cat; echo no >&2; exit 3"], 60, 100) == ("no\n", 3)
    begun = time.monotonic()
    assert bounds.answer(["sh", "-c", "sleep 60 | sleep 60"], 0.3, 100) == ("", -9)
    assert bounds.answer(["cat", "/dev/zero"], 60, 100) == ("\0" * 101, -9)
    assert time.monotonic() - begun < 10


def test_a_program_that_takes_too_long_or_sends_too_much_is_killed() -> None:
    begun = time.monotonic()
    # The error of the killed program is not the one that is reported.
    with pytest.raises(TimeoutError, match="no complete answer in 0 s"), bounded(0.3, 1000):
        subprocess.run(["sh", "-c", "sleep 60 | sleep 60"], stdout=subprocess.PIPE, check=True)
    assert time.monotonic() - begun < 10
    with pytest.raises(TooMuchError, match="an answer of more than 30 MiB"), bounded(60, 30):
        done = subprocess.run(["cat", "/dev/zero"], stdout=subprocess.PIPE, check=False)
    assert len(done.stdout) < 1 << 30
    with pytest.raises(subprocess.CalledProcessError), bounded(60, 1000):
        subprocess.run(["false"], check=True)
    # Connecting takes time as well.
    assert [probe.time_limit(*times) for times in ((15, 1), ("20", "0"), (None, None))] == [
        30 + 2 * 15,
        30 + 20,
        30 + 10,
    ]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TimeoutError("no complete answer in 40 s"), {"unreachable_reason": "no complete answer in 40 s"}),
        (TooMuchError("an answer of more than 32 MiB"), {"unfit": "an answer of more than 32 MiB"}),
        (ConnectionError(), {"unreachable_reason": "it gave no reason"}),
    ],
)
def test_silence_is_told_from_too_much(error: Exception, told: dict[str, str]) -> None:
    assert probe.failure(error) == told
