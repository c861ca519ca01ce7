"""A port of a run's first node on this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.core.errors import FarandoleError
from farandole.jobs.forward import Ports, forwarded, listening, parsed
from farandole.jobs.login import Head
from farandole.node import relay

SERVE = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    connection.sendall(data[::-1])
    connection.close()
"""
ASK = """
import socket
with socket.create_connection(("127.0.0.1", PORT)) as connection:
    try:
        connection.send(b"x")
        connection.shutdown(socket.SHUT_WR)
        print(connection.recv(9) or "refused")
    except OSError:
        print("refused")
"""
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def there() -> Iterator[int]:
    """A port of a program that answers with what it gets, from its end to its beginning."""
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        yield int(server.stdout.readline())
        server.kill()


@pytest.fixture
def here() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def head(folder: Path) -> Head:
    """A head that is this machine."""
    text = Path(relay.__file__).read_text()
    (folder / "relay.py").write_text(text)
    (folder / "farandole").write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{folder}/relay.py" "$3"\n')
    (folder / "farandole").chmod(0o755)
    return Head("here", ("env", f"PATH={folder}:/usr/bin:/bin", "sh", "-c", 'eval "$1"', "sh"), "", ())


class Local(Head):
    """Without the name of a machine to log in to."""

    def command(self, *command: str) -> list[str]:
        return [*self.ssh, " ".join(command)]


def asked(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def test_connections_reach_the_port_until_the_command_ends(tmp_path: Path, here: int, there: int) -> None:
    local = Local(*vars(head(tmp_path)).values())
    data = os.urandom(300_000)
    with forwarded(local, "1", Ports(here, there)):
        for sent in (b"abc", data):
            assert asked(here, sent) == sent[::-1]
    with pytest.raises(ConnectionRefusedError):
        asked(here, b"abc")


@root_only
def test_another_account_of_this_machine_gets_nothing(tmp_path: Path, here: int, there: int) -> None:
    ask = ASK.replace("PORT", str(here))
    with forwarded(Local(*vars(head(tmp_path)).values()), "1", Ports(here, there)):
        done = subprocess.run(
            ["/usr/bin/python3", "-c", ask], user=65534, group=65534, capture_output=True, text=True, check=False
        )
    assert done.stdout == "refused\n"


@pytest.mark.parametrize(("text", "ports"), [("8888", Ports(8888, 8888)), ("9999:8888", Ports(9999, 8888))])
def test_ports(text: str, ports: Ports) -> None:
    assert parsed(text) == ports


@pytest.mark.parametrize("text", ["", "x", "0", "70000", "1:2:3", "1:", ":1"])
def test_no_ports(text: str) -> None:
    with pytest.raises(FarandoleError, match="--forward"):
        parsed(text)


def test_a_port_in_use_is_said_with_another(here: int) -> None:
    with listening(Ports(here, 80)), pytest.raises(FarandoleError, match=rf"port {here} of this machine: .*:80"):
        listening(Ports(here, 80))
