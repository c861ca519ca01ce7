"""What `playbooks/remove.yml` says before and after it has removed everything."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.core.findings import some
from farandole.core.text import one_line
from farandole.inventory.cluster import HostVars
from farandole.inventory.facts import ClusterFacts

PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
# Without them nobody could log in or work as root, check what is downloaded, or know the time.
NEEDED = ("ca-certificates", "chrony", "openssh-server", "sudo", "systemd-timesyncd")
# More than a node has to say.
LINES = 100


def loss(names: Sequence[str], users: Sequence[str], accounts: bool) -> str:
    """What will be lost."""
    who = ", ".join(users)
    homes = (
        f"the accounts of those who start jobs ({who}) with their homes, and so all runs, their output and other files"
        if accounts
        else f"not the accounts of those who start jobs ({who}), their homes and runs (that takes --accounts)"
    )
    return (
        f"This removes from {', '.join(names)}:\n"
        "  all stacks, the samples and their data (/opt/farandole), and what the head serves (/srv/farandole)\n"
        "  the commands, settings, keys and certificates for jobs, so that no job can run there any more\n"
        f"  {homes}\n"
        "Packages stay. What is on this machine stays too, so site.yml can set the nodes up again."
    )


def in_use(nodes: Sequence[str], hostvars: HostVars) -> str:
    """Why nothing may be removed now; empty if no job or build is running."""
    used = {name: list(_answer(hostvars[name], "_stack_use").get("running") or ()) for name in nodes}
    busy = [
        f"{name}: {', '.join(one_line(line) for line in running[:LINES])}" for name, running in used.items() if running
    ]
    return (
        f"nothing was removed, because jobs or builds are running: {'; '.join(busy)}. Wait until they have ended, or "
        "end them: farandole stop ends a run, and farandole remove --force (-e stack_remove_running=true) all of them"
        if busy
        else ""
    )


# The report


@dataclass(frozen=True)
class Removal:
    """What was removed from a node, and what stays."""

    removed: tuple[str, ...]
    left: tuple[str, ...]
    packages: tuple[str, ...]

    def lines(self, names: Sequence[str], *, check_mode: bool) -> Iterator[str]:
        """The report about all nodes of which the same is true."""
        yield (
            f"{some(names)}: {'this would be removed' if check_mode else 'removed'}"
            if self.removed
            else (f"{some(names)}: there was nothing to remove")
        )
        yield from (f"  {line}" for line in self.removed)
        yield f"{some(names)}: what stays"
        yield from (f"  {line}" for line in self.left)
        yield "  the host name, because the former one is not known"
        if self.packages:
            yield f"  packages, because others may depend on them by now: {', '.join(self.packages)}"
        if purge := [name for name in self.packages if name not in NEEDED]:
            yield f"    to remove those that are not needed: apt-get purge {' '.join(purge)}"


def report(
    nodes: Sequence[str],
    hostvars: HostVars,
    answers: Sequence[str],
    cluster: ClusterFacts,
    *,
    inventory: str,
    check_mode: bool = False,
) -> tuple[str, str]:
    """What was removed and what stays, and which of the nodes are not done: without the last of these answers."""
    done = [name for name in nodes if "removed" in _answer(hostvars[name], answers[-1])]
    same: dict[Removal, list[str]] = {}
    for name in done:
        same.setdefault(_removal([_answer(hostvars[name], answer) for answer in answers]), []).append(name)
    lines = [line for node, names in same.items() for line in node.lines(names, check_mode=check_mode)]
    rest, where = [name for name in cluster.nodes if name not in nodes], shlex.quote(inventory)
    if done and rest:
        lines.append(
            f"Take {', '.join(done)} out of {where} and run site.yml, or the others go on starting jobs there. If "
            "a machine is gone for good, also name it in ssh_trust_revoked."
        )
    lines.append(
        f"On this machine stay the cluster's certificate authority and reports, {cluster.state}, and its inventory."
    )
    missed = [_missed(name, hostvars[name], cluster) for name in nodes if name not in done]
    return "\n".join(lines), "; ".join(missed)


def _missed(name: str, variables: Mapping[str, Any], cluster: ClusterFacts) -> str:
    """Why a node is not done, and what to do."""
    if name in cluster.revoked:
        return f"{name} is revoked, so nothing was done there: reinstall it"
    if (answer := _answer(variables, "_stack_use")).get("unreachable"):
        return (
            f"{name} does not answer ({one_line(answer.get('msg', ''))}): run this again for it when it does, or "
            "reinstall it"
        )
    return f"{name} is not done, for the reason above: run this again for it"


def _removal(answers: Sequence[Mapping[str, Any]]) -> Removal:
    packages = {str(name) for answer in answers for name in answer.get("packages") or ()}
    removed = _lines(answers, "removed")
    # One role could not remove a folder, and a later one could.
    left = [line for line in _lines(answers, "left") if line.partition(", because")[0] not in removed]
    return Removal(
        tuple(removed),
        tuple(left),
        # They become part of a command.
        tuple(sorted(name for name in packages if PACKAGE.fullmatch(name))[:LINES]),
    )


def _lines(answers: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    lines = [one_line(line) for answer in answers for line in answer.get(kind) or ()]
    return list(dict.fromkeys(lines))[:LINES]


def _answer(variables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    answer = variables.get(name)
    return answer if isinstance(answer, Mapping) else {}
