"""`farandole apply` and `farandole watch`."""

import re
import shlex
import time
from importlib import import_module
from typing import Annotated

import typer

from farandole.cli.options import (
    AsJson,
    ExtraVars,
    Forks,
    Inventory,
    Limit,
    OneInventory,
    SkipTags,
    Tags,
    with_login,
    words,
)
from farandole.core.errors import FarandoleError, Interrupted
from farandole.inventory.variables import refuse_unknown
from farandole.plays.playbook import Login, viewed
from farandole.watch.events import LOG, is_alive, latest, new_folder, run_of
from farandole.watch.viewer import LOOK, Viewer

# What a run says of a node that passes again what it had failed, and of those that get no jobs until they are proven.
MENDED, LOST = "[node-mended]", re.compile(r"the queue has lost\s+([a-z0-9,\s-]+):\s+no\s+jobs\s+until")


@with_login()
def apply(
    inventory: Inventory,
    limit: Limit = "",
    tags: Tags = "",
    skip_tags: SkipTags = "",
    extra_vars: ExtraVars = None,
    *,
    check: Annotated[bool, typer.Option("--check", "-C", help="Change nothing, say what would change.")] = False,
    diff: Annotated[bool, typer.Option("--diff", "-D", help="Show what changes in files.")] = False,
    forks: Forks = None,
    login: Login,
    as_json: AsJson = False,
) -> None:
    """Set a cluster up, change it or repair it: site.yml, with its progress on the terminal and its output in a log."""
    refuse_unknown(inventory.absolute(), "--limit", limit)
    options = {"--limit": limit, "--tags": tags, "--skip-tags": skip_tags, "--forks": forks}
    arguments = [*words(options, extra_vars), *["--check"] * check, *["--diff"] * diff]
    folder = new_folder(inventory)
    interrupted = "run the same command again to continue where this one stopped"
    status = viewed(Viewer(folder, as_json=as_json), "site.yml", inventory, login, *arguments, interrupted=interrupted)
    if status:
        raise typer.Exit(status)
    whole = not (limit or tags or skip_tags)
    # To read the inventory takes longer than the log.
    log = (folder / LOG).read_text(errors="replace") if whole and not check else ""
    lost = lost_in(log)
    if MENDED in log or lost:
        # It takes time to import.
        import_module("farandole.cli.proof").take_back(
            inventory, login, words({"--forks": forks}, extra_vars), lost, as_json=as_json
        )
    if whole and not as_json:
        verb, purpose = ("apply", "to make these changes") if check else ("validate", "next")
        typer.echo(f"{purpose}: farandole {verb} -i {shlex.quote(str(inventory))}")


def lost_in(log: str) -> list[str]:
    """The nodes that the queue has lost, from what a run has printed; Ansible folds long lines."""
    return [name for names in LOST.findall(log) for name in re.split(r",\s+", names)]


def watch(inventory: OneInventory = None, as_json: AsJson = False) -> None:
    """Look at a run that somebody else started on this machine, or at the end of the last one."""
    folder = latest(inventory)
    if not folder:
        raise FarandoleError(f"no run of {inventory or 'any inventory'} was recorded here; farandole apply starts one")
    run = run_of(folder)
    with Viewer(folder, as_json=as_json) as viewer:
        if not is_alive(folder):
            viewer.skip(f"no run is in progress; the last one was started {run.since if run else 'some time ago'}:")
        try:
            while is_alive(folder):
                viewer.look()
                time.sleep(LOOK)
        except Interrupted:
            viewer.lines([])
            raise Interrupted("the run goes on") from None
    viewer.close()
