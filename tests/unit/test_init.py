"""`farandole init` writes a whole inventory with keys that were confirmed, or nothing."""

import base64
import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from farandole.cli import init
from farandole.cli.app import app
from farandole.inventory.reading import existing
from farandole.inventory.variables import host_variables
from farandole.preflight.unreachable import known_hosts

from .prefix import program

SCAN = """for last; do :; done
cat "$(dirname "$0")/$last" 2>/dev/null || printf 'connect: \\033[2JConnection refused\\n' >&2
"""


def blob(seed: str) -> str:
    return base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + hashlib.sha256(seed.encode()).digest()).decode()


def fingerprint(seed: str) -> str:
    digest = hashlib.sha256(base64.b64decode(blob(seed))).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


A, B = "192.0.2.11", "192.0.2.12"
GIVEN = ("--host-key", fingerprint(A), "--host-key", fingerprint(B))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, with two hosts that answer, and a home of its own."""
    programs = tmp_path / "programs"
    program(programs / "ssh-keyscan", SCAN)
    for address in (A, B):
        (programs / address).write_text(f"{address} ssh-rsa {blob('rsa')}\n{address} ssh-ed25519 {blob(address)}\n")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def run(*arguments: str, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["init", *arguments], input=answer)


def test_the_inventory_is_one_that_every_command_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("mine", "--head", f"a={A}", B, "--user", "admin", "--port", "2222", *GIVEN)
    assert done.exit_code == 0, done.output + str(done.exception)
    assert done.output.endswith("next: farandole apply -i mine\n")
    mine = Path("inventory/mine").absolute()
    assert [path.name for path in Path("inventory").iterdir()] == ["mine"]
    assert existing(Path("mine")) == Path("inventory/mine")
    monkeypatch.setenv("FARANDOLE_STATE", "state")
    hosts = host_variables(mine)
    assert {name: own["ansible_host"] for name, own in hosts.items()} == {"a": A, "node-2": B}
    assert list(host_variables(mine, "head")) == ["a"]
    # A folder that is moved takes its keys along.
    assert "{{ inventory_dir }}/.ssh/known_hosts" in Path("inventory/mine/group_vars/all.yml").read_text()
    assert (hosts["a"]["ansible_user"], hosts["a"]["ansible_port"]) == ("admin", 2222)
    file = mine / ".ssh/known_hosts"
    assert known_hosts(hosts["a"]["ansible_ssh_common_args"]) == ["-f", str(file)]
    assert file.read_text() == f"[{A}]:2222 ssh-ed25519 {blob(A)}\n[{B}]:2222 ssh-ed25519 {blob(B)}\n"


@pytest.mark.parametrize(("answer", "written"), [("y\n", True), ("n\n", False), ("", False)])
def test_fingerprints_are_confirmed(place: Path, monkeypatch: pytest.MonkeyPatch, answer: str, written: bool) -> None:
    monkeypatch.setattr(init, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    (place / ".ssh/known_hosts").write_text(f"{B} ssh-ed25519 {blob(B)}\n")
    done = run("mine", A, B, answer=answer)
    assert f"node-1  {A}  {fingerprint(A)}\n" in done.output.replace(" \n", "\n")
    assert f"node-2  {B}  {fingerprint(B)}  known\n" in done.output
    assert Path("inventory/mine").exists() == written


def test_the_head_is_the_one_named_or_the_first() -> None:
    assert init.read_hosts([A, B], "") == ({"node-1": A, "node-2": B}, "node-1")
    assert init.read_hosts([A, B], B) == ({"node-1": A, "node-2": B}, "node-2")
    assert init.read_hosts([f"x={A}", f"y={B}"], "y") == ({"x": A, "y": B}, "y")
    assert init.read_hosts([B], A) == ({"node-1": A, "node-2": B}, "node-1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mine", A, "192.0.2.99"), r"node-2 (192.0.2.99): connect: \x1b[2JConnection refused"),
        (("mine", f"a={A}", f"b={A}"), f"a={A} and b={A} have the same address"),
        (("mine", f"a={A}", f"a={B}"), f"a={A} and a={B} have the same name, a"),
        (("mine", "nowhere.invalid"), "nowhere.invalid has no IPv4 address here"),
        (("mine", f"A_b={A}"), "A_b cannot be a node's name"),
        (("mine", "localhost", A), "localhost: no other node can reach it at 127.0.0.1"),
        (("mine", "head1=127.0.1.1", A), "as head1=ADDRESS"),
        (("mine", "0.0.0.0"), "no other node can reach it at 0.0.0.0"),  # noqa: S104
        (("mine", f"a={A}", "b=224.0.0.1"), "b=224.0.0.1: no other node can reach it at 224.0.0.1"),
        (("mine",), "name at least one"),
        (("../mine", A), "../mine is not a valid cluster name"),
        (("mine", A, "--host-key", fingerprint(B)), "no --host-key has the fingerprint of node-1"),
        (("mine", A), "give them with --host-key"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code
    assert message in str(done.exception)
    assert not Path("inventory").exists()


def test_a_host_key_that_changed_is_refused(place: Path) -> None:
    (place / ".ssh/known_hosts").write_text(f"{A} ssh-ed25519 {blob('before')}\n")
    done = run("mine", A, B, *GIVEN)
    assert f"now {fingerprint(A)}, before {fingerprint('before')}" in str(done.exception)
    assert f"ssh-keygen -R '{A}'" in str(done.exception)
    assert not Path("inventory").exists()


def test_one_machine_with_two_addresses_is_no_two_nodes(place: Path) -> None:
    (place / "programs" / B).write_text(f"{B} ssh-ed25519 {blob(A)}\n")
    assert "node-1, node-2 have the same host key" in str(run("mine", A, B, *GIVEN).exception)


@pytest.mark.parametrize(
    "line", ["ssh-ed25519 $(touch x)", "ssh-ed25519 " + "A" * 9000, "own-type " + blob(A), "\x1b[2J"]
)
def test_what_is_no_key_is_not_taken(place: Path, line: str) -> None:
    (place / "programs" / A).write_text(f"{A} {line}\n")
    assert "no answer to ssh" in str(run("mine", A, *GIVEN).exception)


def test_a_folder_that_exists_is_left_alone() -> None:
    Path("inventory/mine").mkdir(parents=True)
    assert "inventory/mine exists, and nothing was written" in str(run("mine", A, *GIVEN).exception)
    assert not [*Path("inventory/mine").iterdir()]


def test_an_interrupted_init_leaves_no_half_an_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: str, **_: bool) -> None:
        path.write_text(content)
        if path.name == "all.yml":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(init, "write", full)
    assert "cannot be written, and was not: No space left" in str(run("mine", A, *GIVEN).exception)
    assert not [*Path("inventory").iterdir()]
