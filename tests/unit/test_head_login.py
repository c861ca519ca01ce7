"""How runs log in to the head: as ssh itself understands it."""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.jobs.login import head_of, without_keys
from farandole.plays.playbook import Login

KEYS = "-i a -ib -o IdentityFile=c -oidentityfile=d -o 'IdentityFile e' -o CertificateFile=f"


def logs_in(tmp_path: Path, login: Login, **variables: str) -> dict[str, list[str]]:
    """The options with which ssh would connect."""
    hosts = {"node-1": {"ansible_host": "192.0.2.1", **variables}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"head": {"hosts": hosts}}))
    head = head_of(tmp_path / "hosts.yml", login)
    settings = subprocess.run([*head.ssh, "-G", head.target], capture_output=True, text=True, check=True).stdout
    options: dict[str, list[str]] = {}
    for line in settings.splitlines():
        name, _, value = line.partition(" ")
        options.setdefault(name, []).append(value)
    return options


@pytest.mark.parametrize(
    "variables",
    [
        {"ansible_user": "other"},
        {"ansible_ssh_common_args": "-l other"},
        {"ansible_ssh_common_args": "-o User=other", "ansible_user": "another"},
        {"ansible_ssh_extra_args": "-oUser=other"},
    ],
)
def test_the_user_that_is_typed_logs_in(tmp_path: Path, variables: dict[str, str]) -> None:
    assert logs_in(tmp_path, Login(), **variables)["user"] != ["typed"]
    assert logs_in(tmp_path, Login("typed"), **variables)["user"] == ["typed"]


@pytest.mark.parametrize("variable", ["ansible_ssh_common_args", "ansible_ssh_extra_args"])
def test_no_other_key_than_the_one_that_is_typed_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("k", "typed", *"abcdef"):
        (tmp_path / name).touch()
    variables = {"ansible_ssh_private_key_file": "k", variable: f"-v {KEYS} -o Compression=yes -C"}
    assert {*"kabcde"} <= {*logs_in(tmp_path, Login(), **variables)["identityfile"]}
    typed = logs_in(tmp_path, Login(private_key=Path("typed")), **variables)
    assert (typed["identitiesonly"], typed["compression"]) == (["yes"], ["yes"])
    assert "typed" in typed["identityfile"]
    others = ["-v", "-o", "UserKnownHostsFile=/a b", "-p", "22", "-oPort=1"]
    assert [*without_keys(others)] == others
    assert not {*"kabcdef"} & {*typed["identityfile"], *typed.get("certificatefile", ())}


def test_the_socket_of_a_connection_fits_below_a_long_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as short:
        monkeypatch.setenv("HOME", f"{short}/{'x' * (60 - len(short))}")
        ways: list[dict[str, str]] = [{}, {"ansible_port": "2222"}, {"ansible_user": "other"}]
        ways += [{"ansible_ssh_common_args": "-J gate"}, {"ansible_host": "192.0.2.2"}]
        sockets = [
            logs_in(tmp_path, login, **way)["controlpath"] for way in ways for login in (Login(), Login("typed"))
        ]
        sockets += [logs_in(tmp_path, Login(private_key=Path("typed")))["controlpath"]]
        again = logs_in(tmp_path, Login())["controlpath"]
    # The typed user replaces the inventory's.
    assert sockets[5] == sockets[1]
    assert len({path for (path,) in sockets}) == len(sockets) - 1
    assert again == sockets[0]
    # While ssh makes it, a dot and 16 characters follow the name; the kernel takes less than 108.
    assert {len(path) + 17 < 108 for (path,) in sockets} == {True}


def test_a_typed_key_that_does_not_exist_is_no_reason_to_try_others(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("cluster: {hosts: {node-1: }}\n")
    done = CliRunner().invoke(app, ["runs", "-i", str(tmp_path), "--private-key", "/none"])
    assert done.exit_code == 2
    assert "/none" in done.output
