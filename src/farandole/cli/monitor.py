"""`farandole monitor`."""

import json
import shlex
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from farandole.cli.node import cluster_of
from farandole.cli.options import BY_KEY, Inventory, with_login
from farandole.core.causes import causes
from farandole.core.errors import FarandoleError, Interrupted
from farandole.core.findings import Finding, natural, report, several
from farandole.core.schema import Check, UnfitError, fields, load, many, text, words
from farandole.core.text import on_terminal, one_line
from farandole.inventory.facts import ClusterFacts
from farandole.inventory.variables import host_variables
from farandole.jobs.login import Head, head_of
from farandole.plays.playbook import Login

# Increased when a field gets another meaning.
FORMAT = 1
# In the state folder, while role monitoring watches the nodes.
RECORD = "monitored"
HOST, PORT, PAGE = "127.0.0.1", 909, "consoles/index.html"
# Seconds in which ssh has to open the way, and Prometheus to answer; the most that is read of it.
OPEN_S, ANSWER_S, LONGEST = 30, 10, 1 << 24
ALERTS = fields(
    {
        "alerts": many(
            fields(
                {
                    "labels": fields({"alertname": words("[a-z-]{1,64}"), "instance": text(100)}, {}),
                    "annotations": fields({"what": text(400)}, {}),
                    "state": words("pending|firing"),
                    "activeAt": text(40),
                },
                {},
            )
        )
    }
)
# One result for each node, however many the node itself sends.
MEASURED = f"api/v1/query?{urllib.parse.urlencode({'query': 'count by (instance) (up)'})}"
NODES = fields({"result": many(fields({"metric": fields({"instance": text(100)}, {})}, {}))}, {})
RULE = fields({"name": text(64), "health": words("ok|err|unknown")}, {"lastError": text(200)})
RULES = fields({"groups": many(fields({"rules": many(RULE)}, {}))}, {})


@with_login(*BY_KEY)
def monitor(
    inventory: Inventory,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
    *,
    as_text: Annotated[bool, typer.Option("--text", help="Print what to fix, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one object of JSON, and end.")] = False,
    login: Login,
) -> None:
    """Open the page of the cluster's monitoring, through ssh, until Ctrl-C.

    With --text or --json, exits with 1 if there is anything to fix that is more than a note, and with 2 if it cannot
    ask, or a node or an alert is not watched.
    """
    cluster = cluster_of(inventory, write=False)
    known = next(iter(host_variables(inventory.absolute(), "head").values()))
    if not (cluster.state / RECORD).exists():
        raise FarandoleError(
            "the nodes are not watched: set monitoring_enabled: true and firewall_enabled: true in the inventory, "
            f"then run  farandole apply -i {shlex.quote(str(inventory))}"
        )
    with opened(head_of(inventory, login), int(known.get("monitoring_port") or PORT), port) as (base, way):
        if not (as_text or as_json):
            typer.echo(f"{base}/{PAGE}")
            typer.echo("open it in a browser on this machine; Ctrl-C closes it")
            try:
                way.wait()
            except Interrupted:
                raise typer.Exit from None
            raise FarandoleError("ssh has ended: run the same command again")
        refuse_unwatched(base, cluster, inventory)
        refuse_failing(base, cluster.head)
        found, since = alerts(base, {*host_variables(inventory.absolute())})
    if as_json:
        about = [{**one.data(), "cause": one.cause, "since": since[one]} for one in found]
        typer.echo(json.dumps({"format": FORMAT, "alerts": about}))
    else:
        typer.echo(on_terminal(report(found, "The cluster's monitoring reports {problems}.")))
    if any(one.severity != "note" for one in found):
        raise typer.Exit(1)


@contextmanager
def opened(head: Head, port: int, here: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A way through ssh to a port that the head alone can reach; ends with the block."""
    with socket.socket() as taken:
        try:
            taken.bind((HOST, here))
        except OSError as error:
            raise FarandoleError(f"port {here} of this machine cannot be used: {error.strerror}") from None
        here = taken.getsockname()[1]
    # Not through a connection that others share, which would keep the port.
    options = ["-N", "-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes", "-L", f"{HOST}:{here}:{HOST}:{port}"]
    command = [head.ssh[0], *options, *head.ssh[1:], head.target]
    way = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        until = time.monotonic() + OPEN_S
        while not reachable(here):
            if way.poll() is not None:
                raise FarandoleError(f"{head.name}: {one_line(way.communicate()[1])}")
            if time.monotonic() > until:
                raise FarandoleError(f"{head.name}: ssh did not open the way to Prometheus within {OPEN_S} s")
            time.sleep(0.05)
        base = f"http://{HOST}:{here}"
        asked(base, "-/ready", head.name)
        yield base, way
    finally:
        way.terminate()
        way.communicate()


def reachable(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def asked(base: str, path: str, head: str) -> str:
    """What Prometheus answers."""
    # Never by a proxy of this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{base}/{path}", timeout=ANSWER_S) as answer:
            return str(answer.read(LONGEST).decode(errors="replace"))
    except OSError as error:
        raise FarandoleError(
            f"{head}: Prometheus does not answer ({one_line(error)}); systemctl status farandole-prometheus on it "
            "shows why, and site.yml starts it"
        ) from None


def answer(base: str, path: str, form: Check, head: str) -> Any:
    """The data of what Prometheus answers, if it has this form."""
    try:
        return form(load(asked(base, path, head), LONGEST).get("data"))
    except UnfitError as error:
        raise FarandoleError(f"{head}: Prometheus answers something else: {error}") from None


def refuse_unwatched(base: str, cluster: ClusterFacts, inventory: Path) -> None:
    """Refuse to report on nodes that Prometheus has not measured lately, whose faults would not be seen."""
    head, known = cluster.head, answer(base, MEASURED, NODES, cluster.head)["result"]
    measured = {one["metric"]["instance"] for one in known}
    # These are in prometheus.yml.
    missing = [name for name in cluster.trusted if name not in measured]
    if not missing:
        return
    cures = [
        f"farandole apply -i {shlex.quote(str(inventory))}, with no --limit that leaves {head} out",
        f"systemctl status farandole-prometheus and df /var/lib/farandole/prometheus on {head}",
    ]
    likely, other = cures if len(missing) < len(cluster.trusted) else reversed(cures)
    raise FarandoleError(
        f"{head}: Prometheus has no measurement of {several(missing)} from the last five minutes, so a fault there "
        "would not be seen. If a node has just joined, or Prometheus has just started, ask again after "
        f"monitoring_interval seconds; else: {likely}; if that is not it: {other}"
    )


def refuse_failing(base: str, head: str) -> None:
    """Refuse to report while Prometheus cannot compute an alert, which would not be seen."""
    rules = [rule for group in answer(base, "api/v1/rules", RULES, head)["groups"] for rule in group["rules"]]
    failing = {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"}
    if failing:
        why = next(filter(None, failing.values()), "it has just started: ask again after monitoring_interval seconds")
        raise FarandoleError(
            f"{head}: Prometheus does not compute {several([*failing])}, so such a fault would not be seen ({why}); "
            f"systemctl status farandole-prometheus and df /var/lib/farandole/prometheus on {head} show more"
        )


def alerts(base: str, names: set[str]) -> tuple[Sequence[Finding], dict[Finding, str]]:
    """What fires, and since when: the head's words about what it saw, and this machine's about what mends it."""
    known = answer(base, "api/v1/alerts", ALERTS, "head")["alerts"]
    since: dict[Finding, str] = {}
    for one in sorted(known, key=lambda one: natural(one["labels"]["instance"])):
        code, name = one["labels"]["alertname"], one["labels"]["instance"]
        if one["state"] == "firing" and code in causes() and name in names:
            since[told(code, name, one["annotations"]["what"])] = one["activeAt"]
    return [*since], since


def told(code: str, name: str, what: str) -> Finding:
    cause = causes()[code]
    return Finding(name, code, what, cause.remedy({"host": name}), cause.severity, {"what": what})
