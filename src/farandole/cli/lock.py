"""`farandole lock`."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farandole.cli.options import WITHOUT_VAULT, Inventory, with_login
from farandole.core.errors import FarandoleError
from farandole.core.table import table
from farandole.inventory import state as states
from farandole.plays.playbook import Login, play
from farandole.stack import lock as locks
from farandole.stack import nodes
from farandole.stack.catalogue import load
from farandole.stack.problem import Request, request
from farandole.stack.settings import builds_of, cache_of, inventory_variables, own_packages, plain_list, sources_of

console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
progress = Console(highlight=False, soft_wrap=True, markup=False, emoji=False, stderr=True)
FACTS = ("python", "glibc", "nvidia_driver", "cuda")


@with_login(*WITHOUT_VAULT)
def lock(
    inventory: Inventory,
    want: Annotated[
        list[str] | None, typer.Option(metavar="NAME==VERSION", help="Require a version; may be repeated.")
    ] = None,
    frameworks: Annotated[
        str, typer.Option(help="Instead of stack_frameworks: tensorflow, pytorch, or tensorflow,pytorch.")
    ] = "",
    accelerator: Annotated[str, typer.Option(help="Instead of stack_accelerator: auto, cpu or cuda.")] = "",
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="What to upgrade.")] = None,
    *,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show why each version was chosen, and write nothing.")
    ] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Take newer versions than the former lock, of these packages or of all.")
    ] = False,
    login: Login,
) -> None:
    """Choose a version of everything for a cluster and write it to stack.lock.yml."""
    path = locks.path_of(inventory.absolute())
    if names and not upgrade:
        raise FarandoleError(f"{' '.join(names)}: names are for --upgrade; --want NAME==VERSION requires a version")
    wishes = Wishes(
        frameworks.split(",") if frameworks else (), accelerator, want or (), (names or []) if upgrade else None
    )
    new: locks.Lock
    old: locks.Lock | None
    if explain and path.exists() and not (want or frameworks or accelerator or upgrade):
        new, old, hint = locks.read(path), None, ""
    else:
        new, old, hint = _choose(inventory, path, wishes, login, write=not explain)
    if explain:
        _explain(new, inventory)
        return
    if old is None or old["id"] != new["id"]:
        locks.write(path, new)
    _report(path, old, new, inventory)
    console.print(hint or f"next: farandole apply -i {shlex.quote(str(inventory))}")


@dataclass(frozen=True)
class Wishes:
    """What was typed beside what the inventory says. Without `upgrade`, the former lock's versions stay."""

    frameworks: Sequence[str] = ()
    accelerator: str = ""
    pins: Sequence[str] = ()
    upgrade: Sequence[str] | None = None


def _choose(
    inventory: Path, path: Path, wishes: Wishes, login: Login, *, write: bool
) -> tuple[locks.Lock, locks.Lock | None, str]:
    """A new lock, the former one, and why site.yml would refuse the new one."""
    # Slow to import.
    from farandole.stack import making

    variables = inventory_variables(inventory)
    states.claim(variables["state"], variables["folder"], write=write)
    wanted = _request(variables, wishes, str(inventory))
    old, platform = former(path), nodes.read(probes(inventory, variables, login))
    known, configure = making.known_of(old, wishes.upgrade), plain_list(variables, "openmpi_configure")
    progress.print("choosing versions, with the package indexes of this machine's pip")
    new = making.new(platform, wanted, configure, known, cache_of(variables), _say)
    # As site.yml knows only the inventory's settings.
    against = locks.differences(new, platform, _request(variables, Wishes()), configure)
    hint = f"set this in the inventory too, or site.yml will refuse this lock: {'; '.join(against)}"
    return new, old, hint if against and (wishes.frameworks or wishes.accelerator) else ""


def _request(variables: Mapping[str, Any], wishes: Wishes, inventory: str = "") -> Request:
    return request(
        [name.strip() for name in wishes.frameworks or plain_list(variables, "stack_frameworks")],
        plain_list(variables, "stack_pins"),
        wishes.accelerator or variables["stack_accelerator"],
        wishes.pins,
        inventory=inventory,
        packages=own_packages(variables),
        sources=sources_of(variables),
    )


def _say(line: str) -> None:
    progress.print(line)


def former(path: Path) -> dict[str, Any] | None:
    """The existing lock, which a new one is about to replace; None if there is none."""
    return locks.read(path) if path.exists() else None


def _report(path: Path, old: locks.Lock | None, new: locks.Lock, inventory: Path) -> None:
    lines = locks.changes(old, new)
    if old and (lost := sorted({*old["wanted"]["pins"]} - {*new["wanted"]["pins"]})):
        lines.append(
            f"the old lock was made with {', '.join(lost)}, this one is not: add that to stack_pins to keep it"
        )
    if old and old["id"] == new["id"]:
        console.print(f"{path}: stack {new['id']}, unchanged")
        return
    was = f", was {old['id']}" if old else ""
    console.print(f"{path}: stack {new['id']}{was}; {_proof(new, inventory)}")
    for line in _sizes(new):
        console.print(line)
    if old:
        for line in lines or ["the versions are unchanged; what is wanted, sources, patches or options have changed"]:
            console.print(f"  {line}")


def _sizes(new: locks.Lock) -> list[str]:
    """What the wheels weigh, and what of it serves no purpose on these nodes."""
    sizes = {wheel["name"]: new["index"]["files"][wheel["file"]]["size"] for wheel in new["wheels"]}
    lines = [f"{len(sizes)} wheels, {sum(sizes.values()) / 1e6:.0f} MB"]
    if built := [source["name"] for source in new.get("sources", ())]:
        lines.append(f"to build on the builder, as there is no wheel: {', '.join(built)}")
    gpu = sum(size for name, size in sizes.items() if name.startswith(("nvidia-", "cuda-", "triton")))
    if new["wanted"]["accelerator"] == "cpu" and gpu:
        torch = new["versions"]["torch"]
        lines.append(
            f"torch {torch} is a build for CUDA, which also runs on CPUs; {gpu / 1e6:.0f} MB of it serve GPUs only. "
            f"For a CPU build: pip config set global.extra-index-url {load().data['cpu_builds']['torch']}"
        )
    return lines


def _explain(new: locks.Lock, inventory: Path) -> None:
    proven, platform, chip = load().proven, new["platform"], new["wanted"]["accelerator"]
    none = f"the cluster runs on {'CPUs' if chip == 'cpu' else 'GPUs'}"
    rows = [["component", "version", "built and ran on", "why"]]
    for name, version in new["versions"].items():
        rows.append([name, version, ", ".join(proven(name, version)), new["why"].get(name, none)])
    console.print(table(rows))
    console.print(f"stack {new['id']}: {platform['os']}, {platform['arch']}, Python {platform['python']}, {chip}")
    console.print(_proof(new, inventory))


def _proof(new: locks.Lock, inventory: Path) -> str:
    if seen := load().seen(new["versions"], new["platform"]["os"]):
        without = ", without your own packages" if new["own"] else ""
        return f"{'built and ran together' if seen.works else 'seen to fail'}{without}: {seen.ran}"
    try:
        folders = builds_of(inventory)
    except FarandoleError as error:
        return f"unknown whether it is packed: {error}"
    if any(built.about["lock"]["id"] == new["id"] for builds in folders for built in builds.packed()):
        return "packed on this machine"
    return f"this exact set has not been built on {new['platform']['os']} yet"


def probes(inventory: Path, variables: Mapping[str, Any], login: Login) -> dict[str, Any]:
    """What preflight found about exactly these hosts, after running it if necessary."""
    file = variables["state"] / "preflight.json"
    if not (known := _found(file, variables["hosts"])):
        progress.print(f"preflight has not checked these nodes yet ({file}); running it")
        if play("playbooks/preflight.yml", inventory, login):
            raise FarandoleError("preflight failed, see above")
        known = _found(file, variables["hosts"])
    if not known:
        raise FarandoleError(
            f"{file} does not cover all nodes: run  farandole preflight -i {shlex.quote(str(inventory))}"
        )
    return known


def _found(file: Path, hosts: Sequence[str]) -> dict[str, Any] | None:
    try:
        known: dict[str, Any] = json.loads(file.read_text())["hosts"]
    except (FileNotFoundError, ValueError, KeyError):
        return None
    complete = set(known) == set(hosts) and all(fact in probe for probe in known.values() for fact in FACTS)
    return {host: known[host] for host in hosts} if complete else None
