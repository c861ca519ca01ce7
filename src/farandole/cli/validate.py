"""`farandole validate`."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.node import cluster_of
from farandole.cli.options import AsJson, Hosts, Inventory, with_login
from farandole.core.errors import FarandoleError
from farandole.core.findings import several
from farandole.core.project import version
from farandole.jobs.ask import ask
from farandole.jobs.login import head_of
from farandole.plays.playbook import Login, play
from farandole.report import evidence as files
from farandole.report.read import read
from farandole.stack import lock as locks

# Nothing was done, and later it may be: EX_TEMPFAIL of sysexits.h.
BUSY = 75


@with_login()
def validate(
    inventory: Inventory,
    hosts: Hosts = "",
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip training, speed and Horovod over MPI; takes half a minute.")
    ] = False,
    on_bad_node: Annotated[
        str, typer.Option(metavar="stop|exclude", help="Check the nodes first, and go on without the bad ones.")
    ] = "",
    idle: Annotated[
        bool,
        typer.Option("--idle", help=f"Leave out nodes that run jobs; exit with {BUSY} if fewer than two are left."),
    ] = False,
    evidence: Annotated[
        Path | None,
        typer.Option(help="Write versions, numbers and verdicts to this file, for the catalogue: no names."),
    ] = None,
    evidence_key: Annotated[
        Path | None, typer.Option(help="Sign it with this key of ssh.", exists=True, dir_okay=False)
    ] = None,
    login: Login,
    as_json: AsJson = False,
) -> None:
    """Validate a cluster with jobs on its nodes and write a report; exit with 1 if anything is red."""
    if evidence_key and not evidence:
        raise FarandoleError("--evidence-key signs the file of --evidence, which is missing")
    if evidence:
        files.refuse_early(evidence, evidence_key)
    begun = time.time()
    names = [name.strip() for name in hosts.split(",")] if hosts else []
    busy: list[str] = []
    if idle:
        names, busy = idle_nodes(inventory, login, names, as_json=as_json)
    given = {"validation_hosts": ",".join(names), "validation_busy": ",".join(busy), "on_bad_node": on_bad_node}
    # Evidence tells of the nodes as they are now, and was judged as everywhere.
    own = {"evidence": True, "validation_bars": {}} if evidence else {}
    # As NAME=VALUE, a value would end at its first space.
    settings = json.dumps({**{name: value for name, value in given.items() if value}, **own})
    arguments = [*(["--tags", "quick"] if quick else []), "--extra-vars", settings]
    status = play(
        "playbooks/validate.yml",
        inventory,
        login,
        *arguments,
        as_json=as_json,
        interrupted="the job on the nodes is being ended; there is no report of this run",
    )
    if evidence:
        typer.echo(gather(inventory, begun, evidence, evidence_key), err=as_json)
    if status:
        raise typer.Exit(1)


def idle_nodes(inventory: Path, login: Login, names: list[str], *, as_json: bool) -> tuple[list[str], list[str]]:
    """Those of these nodes, or of all, that run no job, as far as the head knows, and those that run one."""
    cluster = cluster_of(inventory, write=False)
    answer = ask(head_of(inventory, login))
    if not answer.up:
        raise FarandoleError(f"{cluster.head}: {answer.why}")
    if answer.used is None:
        raise FarandoleError(f"{cluster.head}: its queue does not answer, so nobody knows which nodes are idle")
    wanted = names or cluster.members
    busy = [name for name in wanted if answer.used.get(name)]
    idle = [name for name in wanted if name not in busy]
    if busy and len(idle) < 2:
        typer.echo(f"nothing was validated, as fewer than two nodes are idle: {several(busy)} run jobs", err=as_json)
        raise typer.Exit(BUSY)
    if busy:
        typer.echo(f"not validated, as they run jobs: {several(busy)}", err=as_json)
    return idle, busy


def gather(inventory: Path, begun: float, target: Path, key: Path | None) -> str:
    """Write the evidence of a validation that began then, and say where it is."""
    state = cluster_of(inventory, write=False).state
    report = state / "reports" / "latest" / "result.json"
    if not report.exists() or report.stat().st_mtime < begun:
        raise FarandoleError("this validation wrote no report, so there is no evidence")
    preflight = state / "preflight.json"
    known = json.loads(preflight.read_text()) if preflight.exists() else {}
    content = files.gather(read(report.parent), locks.read(locks.path_of(inventory)), known, version())
    by = files.write(target, content, key)
    return f"evidence: {target}, {f'signed by {by}' if by else 'not signed (--evidence-key)'}"
