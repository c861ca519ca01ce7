"""How podman is restarted when it is stuck; tests/lab/test_lab.py kills real commands."""

import pytest

from farandole.core.errors import FarandoleError
from farandole.lab import host, podman


def test_a_power_cycle_starts_the_nodes_of_other_labs_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running, asked, errors = ["mine", "broken", "theirs"], list[str](), ["stuck"]

    def answer(verb: str, *arguments: str) -> str:
        if verb == "ps":
            return "\n".join(running)
        if verb == "rm" and errors:
            raise FarandoleError(errors.pop())
        if arguments[-1] == "broken":
            raise FarandoleError("no space left")
        asked.append(f"{verb} {arguments[-1]}")
        return ""

    monkeypatch.setattr(podman, "podman", answer)
    monkeypatch.setattr(host, "power_cycle", running.clear)
    podman.remove(["mine"])
    assert asked == ["start theirs", "rm mine"]
    told = capsys.readouterr().err
    assert "stuck" in told and "no space left" in told
