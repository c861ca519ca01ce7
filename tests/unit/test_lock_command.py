"""`farandole lock` and the action stack_lock on real inventories with preflight's results."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.stack import lock as locks
from farandole.stack import making, nodes
from farandole.stack.problem import request

from .loading import ROOT, act
from .packages import CP311, write_wheel
from .test_solver import BOOKWORM, GPU, TRIXIE, cluster

Offer = Callable[..., None]
pytestmark = pytest.mark.usefixtures("small_index")


class Inventory:
    """An inventory with preflight's results, and the user's commands on it."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "mine"
        self.folder.mkdir()
        self.path = locks.path_of(self.folder)
        self.probed(cluster(BOOKWORM, BOOKWORM))
        self.variables()

    def probed(self, probes: dict[str, Any]) -> None:
        self.probes = probes
        (self.root / "preflight.json").write_text(json.dumps({"schema": 1, "findings": [], "hosts": probes}))

    def variables(self, **own: Any) -> None:
        hosts = {name: {"_preflight_probe": {"probe": probe}} for name, probe in self.probes.items()}
        nodes = {"hosts": hosts, "vars": {"base_state_dir": str(self.root), **own}}
        inventory = {"cluster": nodes, "head": {"hosts": {next(iter(hosts)): None}}}
        (self.folder / "hosts.yml").write_text(yaml.safe_dump(inventory))

    def lock(self, *options: str, fails: bool = False) -> str:
        """Run the command in this process, where it starts at once."""
        done = CliRunner().invoke(app, ["lock", "-i", str(self.folder), *options])
        if done.exception and not isinstance(done.exception, FarandoleError):
            raise done.exception
        assert (done.exception is not None) is fails, done.output
        return f"{done.output}{f'error: {done.exception}' if fails else ''}"

    def task(self, *, check_mode: bool = False, limit: str = "", **arguments: Any) -> dict[str, Any]:
        """What the task of a playbook returns, or of what it refuses."""
        asked = {limit} if limit else self.probes.keys()
        hostvars = {
            name: {"_preflight_probe": {"probe": probe}} if name in asked else {} for name, probe in self.probes.items()
        }
        given = {"inventory_dir": str(self.folder), "nodes": [*self.probes], "frameworks": ["tensorflow", "pytorch"]}
        return act("stack_lock", {**given, **arguments}, {"hostvars": hostvars}, check_mode=check_mode)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("COLUMNS", "200")
    return Inventory(tmp_path)


def test_lock_writes_and_reports_only_changes(mine: Inventory) -> None:
    output = mine.lock()
    first = mine.path.read_bytes()
    assert f"{mine.path}: stack {locks.read(mine.path)['id']}; built and ran together" in output
    assert "unchanged" in mine.lock()
    assert mine.path.read_bytes() == first
    output = mine.lock("--want", "numpy==2.3.4")
    assert "numpy: 2.4.6 -> 2.3.4" in output
    assert "this exact set has not been built on debian-12 yet" in output
    assert f"next: farandole apply -i {mine.folder}" in output
    assert locks.read(mine.path)["wanted"]["pins"] == ["numpy==2.3.4"]
    assert "the old lock was made with numpy==2.3.4, this one is not" in mine.lock()


@pytest.mark.parametrize("damage", [("format: 2", "format: 3"), ("numpy", "nunpy"), ("\n", "\n<<<<<<< HEAD\n")])
def test_a_lock_that_cannot_be_read_is_not_overwritten(mine: Inventory, damage: tuple[str, str]) -> None:
    mine.lock()
    mine.path.write_text(damaged := mine.path.read_text().replace(*damage))
    output = mine.lock(fails=True)
    assert "which does not know its format; nothing was done" in output or f"rm {mine.path} && farandole lock" in output
    assert mine.path.read_text() == damaged


def test_a_path_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (odd := tmp_path / "[a] [" / "b] :key:").mkdir(parents=True)
    mine = Inventory(odd)
    assert f"{mine.path}: stack " in mine.lock()
    assert f"{mine.path}: stack " in mine.lock()


def test_explain_writes_nothing(mine: Inventory) -> None:
    output = mine.lock("--explain", "--want", "numpy==2.3.4")
    assert not mine.path.exists()
    assert "--want numpy==2.3.4; horovod 0.28.1 needs numpy" in output
    mine.lock()
    first = mine.path.read_bytes()
    assert "not 5.0.7: OpenMPI 5 changed its options" in mine.lock("--explain")
    assert mine.path.read_bytes() == first
    mine.lock("--want", "numpy==2.3.4")
    older = mine.path.read_bytes()
    assert "2.4.6" not in mine.lock("--explain")
    assert "2.4.6" in mine.lock("--explain", "--upgrade")
    assert mine.path.read_bytes() == older


def test_settings_come_from_the_inventory(mine: Inventory) -> None:
    mine.variables(stack_frameworks=["tensorflow"], stack_pins=["numpy==2.3.4"], openmpi_configure=["--with-x"])
    mine.lock()
    lock = locks.read(mine.path)
    wanted = {"frameworks": ["tensorflow"], "pins": ["numpy==2.3.4"], "accelerator": "cpu", "packages": []}
    assert lock["wanted"] == wanted
    assert lock["openmpi"]["configure"] == ["--with-x"]
    output = mine.lock("--frameworks", "tensorflow,pytorch")
    assert "or site.yml will refuse this lock: frameworks: the lock says tensorflow, pytorch, now it is tens" in output
    assert "site.yml will refuse" not in mine.lock("--accelerator", "cpu")


def test_packages_of_the_users_own(mine: Inventory) -> None:
    mine.lock()
    lines = "# What train.py imports\nhorovod\npandas<3 \\\n    --hash=sha256:01\n"
    (mine.folder / "requirements.txt").write_text(lines)
    mine.variables(stack_packages=["six"], stack_requirements="requirements.txt")
    asked: dict[str, Any] = {"packages": ["six"], "requirements": "requirements.txt"}
    assert "packages: the lock says none, now it is pandas<3, six" in mine.task(**asked)["msg"]
    output = mine.lock()
    assert "pandas: none -> 2.3.3" in output
    assert "torch:" not in output
    lock = locks.read(mine.path)
    assert (lock["own"], lock["wanted"]["packages"]) == (["pandas", "six"], ["pandas<3", "six"])
    assert mine.task(**asked)["changed"] is False
    mine.variables(stack_packages=["pandas"])
    assert "the versions are unchanged; what is wanted" in mine.lock()
    assert locks.read(mine.path)["versions"]["pandas"] == "2.3.3"
    mine.lock("--upgrade", "pandas")
    assert locks.read(mine.path)["versions"]["pandas"] == "3.1.1"
    assert "names are for --upgrade" in mine.lock("pandas", fails=True)


CUDA, CPU = ("libtorch_cpu.so", "libc10_cuda.so"), ("libtorch_cpu.so",)


@pytest.fixture
def offered(mine: Inventory, small_index: Path, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Adds builds of torchaudio, which needs torch 2.13.0, to the index."""
    folder = mine.root / "more"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", f"{small_index} {folder}")

    def offer(version: str, *needs: str) -> None:
        # Of the string table of a library.
        content = {"torchaudio/_C.so": b"\x7fELF\0" + b"".join(name.encode() + b"\0" for name in needs)}
        write_wheel(folder, "torchaudio", version, ("torch==2.13.0",), CP311, content)

    mine.variables(stack_packages=["torchaudio"])
    return offer


def builds(mine: Inventory) -> list[str]:
    versions = locks.read(mine.path)["versions"]
    return [versions[name] for name in ("torch", "torchaudio")]


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ({"2.11.0": CUDA, "2.11.0+cpu": CPU, "2.11.0+cu130": CUDA}, ["2.13.0+cpu", "2.11.0+cpu"]),
        # What needs no CUDA leaves torch alone.
        ({"2.11.0": (*CPU, "lib_cuda_stub.so")}, ["2.13.0+cpu", "2.11.0"]),
    ],
)
def test_builds_for_cpus_are_chosen_together(
    mine: Inventory, offered: Offer, offers: dict[str, Sequence[str]], chosen: list[str]
) -> None:
    for version, needs in offers.items():
        offered(version, *needs)
    mine.lock()
    assert builds(mine) == chosen


def test_builds_for_cuda_are_chosen_together(mine: Inventory, offered: Offer) -> None:
    """Nothing but its library tells that the only build is one for CUDA, as on PyPI."""
    offered("2.11.0", *CUDA)
    output = mine.lock()
    assert "torchaudio 2.11.0 is a build for CUDA (torchaudio/_C.so needs libc10_cuda.so)" in output
    assert "torch 2.13.0 is a build for CUDA, which also runs on CPUs" in output
    assert builds(mine) == ["2.13.0", "2.11.0"]
    lock = locks.read(mine.path)
    assert lock["own"] == ["torchaudio"]
    assert "a build for CUDA, as torchaudio 2.11.0 is" in lock["why"]["torch"]
    assert lock["id"] in mine.lock()


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130"])
def test_a_build_for_cuda_beside_a_torch_for_cpus_is_refused(mine: Inventory, offered: Offer, version: str) -> None:
    offered(version, *CUDA)
    mine.variables(stack_packages=["torchaudio"], stack_pins=["torch==2.13.0+cpu"])
    output = mine.lock(fails=True)
    assert "no set of packages satisfies the request; nothing was changed" in output
    assert "pip config set global.extra-index-url https://" in output
    assert "nearest set that works" in output
    assert not mine.path.exists()


def test_a_lock_of_builds_that_do_not_fit_is_refused_before_anything_is_built(mine: Inventory, offered: Offer) -> None:
    """As locks were made before the libraries of wheels were read."""
    offered("2.11.0", *CUDA)
    wanted = request(["tensorflow", "pytorch"], [], "auto", packages=(("torchaudio", "x"),))
    made = making.make(nodes.read(mine.probes), wanted)
    assert made["versions"]["torch"] == "2.13.0+cpu"
    locks.write(mine.path, made)
    assert "make a new lock, in which they fit" in mine.task(packages=["torchaudio"], collect=True)["msg"]
    mine.lock()
    assert builds(mine) == ["2.13.0", "2.11.0"]


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"stack_cache": "/proc/x", "stack_packages": ["pandas"]}, [], "/proc/x on this machine cannot be written"),
        ({"stack_cache": "{{ x }}"}, [], "error: stack_cache must be a plain path here"),
        ({}, ["--frameworks", "tensorflw"], "error: there is no framework tensorflw (did you mean tensorflow?)"),
        ({}, ["--want", "openmpi==5.0.7"], "error: no set of versions satisfies the request"),
        ({"stack_pins": "numpy==2.3.4"}, [], "error: stack_pins must be a plain list here"),
    ],
)
def test_invalid_requests(mine: Inventory, variables: dict[str, Any], options: list[str], message: str) -> None:
    mine.variables(**variables)
    assert message in mine.lock(*options, fails=True)
    assert not mine.path.exists()


def test_builds_in_a_place_that_only_a_playbook_knows_do_not_prevent_a_lock(mine: Inventory) -> None:
    mine.variables(stack_builds="{{ x }}")
    assert "stack_builds must be a plain path here" in mine.lock("--want", "numpy==2.3.4")
    assert mine.path.exists()


def test_nodes_of_two_platforms_or_none(mine: Inventory) -> None:
    mine.probed(cluster(BOOKWORM, TRIXIE))
    mine.variables()
    assert "the nodes have 2 platforms (node-1: Debian 12, x86_64, Python 3.11; node-2" in mine.lock(fails=True)
    (mine.folder / "hosts.yml").write_text("all:\n  hosts:\n    a:\n")
    assert "group cluster is missing or empty" in mine.lock(fails=True)


def test_nodes_that_were_not_probed_are_probed(mine: Inventory) -> None:
    mine.probed(cluster(BOOKWORM))
    mine.probes = cluster(BOOKWORM, BOOKWORM)
    mine.variables()
    command = ["farandole", "lock", "-i", str(mine.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # This inventory has no addresses. Only preflight reports that, so it must have run.
    assert done.returncode
    assert "preflight has not checked these nodes yet" in done.stderr
    assert "[address-missing]" in done.stdout


def test_a_playbook_writes_a_lock_once_and_then_reads_it(mine: Inventory) -> None:
    predicted = mine.task(check_mode=True)
    assert not mine.path.exists()
    made = mine.task()
    lock = locks.read(mine.path)
    assert (predicted["changed"], predicted["lock"]["id"]) == (True, lock["id"])
    assert (made["changed"], made["lock"]) == (True, lock)
    assert mine.task() == {**made, "changed": False}


def test_the_toolkit_may_be_on_a_node_outside_limit(mine: Inventory) -> None:
    without = {**GPU, "cuda": ""}
    mine.probed(cluster(GPU, without))
    made = mine.task(frameworks=["pytorch"])
    assert made["lock"]["wanted"]["accelerator"] == "cuda"
    for accelerator in ("auto", "cuda"):
        limited = mine.task(limit="node-2", frameworks=["pytorch"], accelerator=accelerator)
        assert limited == {**made, "changed": False}
    gone = "accelerator: the lock says cuda, now it is cpu"
    mine.probed(cluster(GPU, BOOKWORM))
    assert gone in mine.task(limit="node-2", frameworks=["pytorch"])["msg"]
    mine.probed(cluster(without, without))
    assert gone in mine.task(frameworks=["pytorch"])["msg"]
    assert "but no CUDA toolkit" in mine.task(frameworks=["pytorch"], accelerator="cuda")["msg"]


def test_a_limited_run_for_gpus_with_a_lock_for_cpus_is_refused_for_the_lock(mine: Inventory) -> None:
    mine.probed(cluster(GPU, {**GPU, "cuda": ""}))
    mine.task(frameworks=["pytorch"], accelerator="cpu")
    refusal = mine.task(limit="node-2", frameworks=["pytorch"], accelerator="cuda")["msg"]
    assert "accelerator: the lock says cpu, now it is cuda" in refusal
