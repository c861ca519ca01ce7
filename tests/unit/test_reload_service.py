"""Whether a service answers after it was reloaded."""

import socket
import subprocess
from types import SimpleNamespace

import pytest

from .loading import load

reload_service = load("modules", "reload_service")
OWN = subprocess.run(["hostname", "--all-ip-addresses"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("address", ["127.0.0.1", *OWN.split()[:1]])
def test_a_service_answers_at_any_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(run_command=lambda _: (0, OWN, ""))
    monkeypatch.setattr(reload_service, "TIMEOUT_S", 0.5)
    with socket.socket() as closed:
        # Nobody else can listen there meanwhile.
        closed.bind(("", 0))
        port = closed.getsockname()[1]
        assert not reload_service.answers(module, port)
    with socket.create_server((address, port)):
        assert reload_service.answers(module, port)
