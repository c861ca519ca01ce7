"""Who is in the cluster, and what its nodes have in common: the one description that playbooks and commands read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ansible.module_utils.parsing.convert_bool import boolean

from farandole.inventory import excluded
from farandole.inventory.cluster import JOB_USER, JOB_USER_ID, builders
from farandole.inventory.excluded import members
from farandole.inventory.state import state_folder
from farandole.inventory.variables import folder_of, groups_of, of_first_host


@dataclass(frozen=True)
class ClusterFacts:
    """The names are those of the inventory, in its order."""

    # All of group cluster.
    nodes: Sequence[str]
    # Empty in an inventory that preflight refuses.
    head: str
    # The first one builds.
    builders: Sequence[str]
    # Nothing that the cluster entrusts to its nodes is sent to these.
    revoked: Sequence[str]
    # Why each of these nodes is left out of runs and jobs.
    excluded: Mapping[str, str]
    # Those of them that are not even asked, as only a person takes them back.
    set_aside: Sequence[str]
    # The nodes that are not revoked.
    trusted: Sequence[str]
    # The nodes that are neither revoked nor excluded.
    members: Sequence[str]
    # The nodes that are either.
    left_out: Sequence[str]
    # The trusted nodes that take jobs from the queue; none without a queue.
    queue: Sequence[str]
    job_user: str
    job_user_id: int
    # The cluster's state folder on the control machine.
    state: Path
    # The network that carries jobs, if preflight chose another one than that of the nodes' addresses.
    network: str = ""
    # Each node's addresses in the networks that all nodes share, as preflight has seen them.
    addresses: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def without(self, reasons: Mapping[str, str]) -> Self:
        """The cluster with other nodes excluded."""
        return replace(
            self, excluded=dict(reasons), members=members(self.trusted, reasons), left_out=[*self.revoked, *reasons]
        )


def describe(
    groups: Mapping[str, Sequence[str]],
    state: str | Path,
    revoked: Sequence[str] = (),
    queued: bool = False,
    job_user: str = "",
    job_user_id: int = 0,
) -> ClusterFacts:
    """Describe the cluster of an inventory; queued is whether all nodes have a queue, if no group says which."""
    nodes = [*groups.get("cluster", ())]
    trusted, entries = members(nodes, revoked), excluded.read(Path(state))
    cluster = ClusterFacts(
        nodes=nodes,
        head=next(iter(groups.get("head", ())), ""),
        builders=builders(groups),
        revoked=[*revoked],
        excluded={},
        set_aside=[name for name, entry in entries.items() if entry.held],
        trusted=trusted,
        members=trusted,
        left_out=[],
        queue=members(groups.get("slurm", nodes if queued else ()), revoked),
        job_user=job_user or JOB_USER,
        job_user_id=int(job_user_id or JOB_USER_ID),
        state=Path(state),
    )
    return cluster.without({name: entry.words for name, entry in entries.items()})


def of_inventory(inventory: Path) -> ClusterFacts:
    """Describe the cluster for a command that runs no playbook."""
    own = of_first_host(inventory.absolute())
    return describe(
        groups_of(inventory.absolute()),
        state_folder(folder_of(inventory), own.get("base_state_dir") or ""),
        own.get("ssh_trust_revoked") or (),
        boolean(own.get("slurm_enabled"), strict=False),
        own.get("base_user") or "",
        own.get("base_user_id") or 0,
    )


def plain(facts: ClusterFacts) -> dict[str, Any]:
    """The description as a playbook has it."""
    return {**vars(facts), "state": str(facts.state)}


def typed(facts: Mapping[str, Any]) -> ClusterFacts:
    """The description that a playbook passes on."""
    return ClusterFacts(**{**facts, "state": Path(facts["state"])})


def checked(facts: Mapping[str, Any], reasons: Mapping[str, str], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The description for playbooks after preflight: other nodes are excluded, and the shared networks are known."""
    return plain(replace(typed(facts).without(reasons), **shared))
