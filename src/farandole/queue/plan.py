"""The nodes, partitions and accounts in Slurm's settings, decided on the control machine."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.schema import UnfitError, fields, load, many, named, text, whole, words
from farandole.inventory import cluster
from farandole.inventory.cluster import HostVars, node_address

# MiB that are left to the system: a twentieth, and at least this.
SYSTEM_MIB = 512
LONGEST = 1 << 20
COUNT = whole(1 << 16, 1)
# What a node says of itself, which becomes a line of slurm.conf.
HARDWARE = fields(
    {
        "sockets": COUNT,
        "cores": COUNT,
        "threads": COUNT,
        "memory": whole(1 << 30, 1),
        "gpus": whole(64),
        "cgroups": words("v2|v2-memory|v1|none"),
        "version": words(r"\d{2}\.\d{2}"),
    }
)
HOST = words("[a-z0-9][a-z0-9-]{0,62}")
HARDWARES = named(HOST, HARDWARE)
PARTITION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}")
# Minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.
TIME = re.compile(r"\d{1,7}(:\d\d){0,2}|\d{1,4}-\d{1,2}(:\d\d){0,2}|(?i:UNLIMITED|INFINITE)", re.ASCII)
PARTITIONS = many(fields({"name": words(PARTITION.pattern), "nodes": many(HOST), "limit": text(30)}))
EVERYBODY = "users"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")


def hardware(members: Sequence[str], hostvars: HostVars, record: str) -> dict[str, dict[str, Any]]:
    """The hardware of each node: what it has just answered, or else what was recorded of an earlier run."""
    try:
        known = HARDWARES(load(record or "{}", LONGEST))
    except UnfitError as error:
        raise FarandoleError(f"the record of the nodes' hardware is damaged: {error}; remove it") from None
    for name in members:
        if (answer := hostvars[name].get("_slurm_probe", {}).get("hardware")) is not None:
            try:
                present = HARDWARE(answer)
            except UnfitError as error:
                raise FarandoleError(f"{name}: Slurm cannot use what it says of its hardware: {error}") from None
            recorded = known.get(name, present)["memory"]
            known[name] = {**present, "memory": recorded if same(recorded, present["memory"]) else present["memory"]}
    return {name: known[name] for name in members if name in known}


def new(members: Sequence[str], record: str) -> list[str]:
    """The nodes that the queue has not had in an earlier run; none if that is not known."""
    try:
        known = load(record or "{}", LONGEST)
    except FarandoleError:
        return []
    return [name for name in members if name not in known]


def settings(
    known: Mapping[str, Mapping[str, Any]],
    hostvars: HostVars,
    partitions: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
    times: Mapping[str, Any],
) -> dict[str, Any]:
    """The nodes and partitions of slurm.conf, and how limits are enforced; refuses the settings that are no times."""
    for name, value in times.items():
        _refuse_no_time(f"{name} is", value)
    nodes = [
        {
            **hardware,
            "name": name,
            "address": node_address(hostvars[name]),
            "cpus": hardware["sockets"] * hardware["cores"] * hardware["threads"],
            "memory": usable_mib(hardware["memory"]),
        }
        for name, hardware in known.items()
    ]
    # In check mode, bare nodes cannot say yet what they have.
    wanted = [_partition(partition, [*known], groups) for partition in partitions if known]
    return {
        "nodes": nodes,
        "partitions": wanted,
        "ending": _ending(hostvars[groups["head"][0]], [row["name"] for row in wanted], [*known]) if known else [],
        # Settings are the same for all nodes, so what one of them cannot is used on none.
        "cgroups": _cgroups({node["cgroups"] for node in nodes}),
        "memory_per_cpu": min((node["memory"] // node["cpus"] for node in nodes), default=1),
        "version": min((node["version"] for node in nodes), default="22.05"),
        "gpus": any(node["gpus"] for node in nodes),
    }


def _cgroups(kinds: set[str]) -> str:
    """What limits jobs on nodes of all these kinds."""
    if len(kinds) < 2:
        return min(kinds, default="v2")
    return "v2-memory" if kinds == {"v2", "v2-memory"} else "none"


def same(recorded: int, memory: int) -> bool:
    """Whether memory differs only as much as it does from boot to boot, which changes no settings."""
    return abs(recorded - memory) * 100 < memory


def usable_mib(memory: int) -> int:
    """The memory that jobs may ask for."""
    return max(memory - max(SYSTEM_MIB, memory // 20), 1)


def _partition(wish: Mapping[str, Any], nodes: Sequence[str], groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    group = wish.get("group") or ""
    if not PARTITION.fullmatch(str(wish["name"])):
        raise FarandoleError(
            f"slurm_partitions: {wish['name']!r} is not a partition name: use letters, digits, - and _"
        )
    if wish.get("limit") not in (None, ""):
        _refuse_no_time(f"slurm_partitions: {wish['name']} has the limit", wish["limit"])
    if group and group not in groups:
        raise FarandoleError(f"slurm_partitions: {wish['name']} names the group {group}, which the inventory lacks")
    own = [name for name in nodes if not group or name in groups[group]]
    if not own:
        raise FarandoleError(f"slurm_partitions: {wish['name']} has no node; its group is {group}")
    return {**wish, "nodes": own}


def _refuse_no_time(what: str, value: Any) -> None:
    # YAML takes 1:30:00 without quotes for 5400, which Slurm would take for minutes.
    if not isinstance(value, str) or not TIME.fullmatch(value):
        raise FarandoleError(f'{what} {value!r}; write 12:00:00 or 2-00:00:00, in quotes: "12:00:00"')


def _ending(head: Mapping[str, Any], wanted: Sequence[str], nodes: Sequence[str]) -> list[dict[str, Any]]:
    """The partitions that nobody wants any more and that have jobs, which Slurm would end with them."""
    try:
        used = PARTITIONS(head.get("_slurm_probe", {}).get("partitions", []))
    except UnfitError as error:
        raise FarandoleError(f"the head's slurm.conf has a partition that is not Farandole's: {error}") from None
    kept = [{**partition, "nodes": [name for name in partition["nodes"] if name in nodes]} for partition in used]
    ending = [partition for partition in kept if partition["nodes"] and partition["name"] not in wanted]
    return [row if TIME.fullmatch(row["limit"]) else {**row, "limit": "UNLIMITED"} for row in ending]


def accounts(
    users: Sequence[Mapping[str, Any]], job_user: str, more: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, dict[str, Any]]:
    """Who may use which account, and its share; the first account is everybody's own."""
    everybody = [job_user, *(str(person["name"]) for person in users)]
    shares: dict[str, dict[str, Any]] = {EVERYBODY: {"users": everybody, "share": 1}}
    for name, settings in more.items():
        wish = settings or {}
        if not NAME.fullmatch(name):
            raise FarandoleError(f"slurm_accounts: {name!r} is not an account name: use a-z, 0-9, - and _")
        own = [str(person) for person in wish.get("users") or everybody]
        if unknown := [person for person in own if person not in everybody]:
            raise FarandoleError(
                f"slurm_accounts: {name} names {', '.join(unknown)}, not in cluster_users: {', '.join(everybody)}"
            )
        shares[name] = {"users": own, "share": int(wish.get("share") or 1)}
    return shares


def people(
    users: Sequence[Mapping[str, Any]], job_user: str, job_user_id: int, more: Mapping[str, Mapping[str, Any] | None]
) -> dict[int, list[str]]:
    """The accounts that each person may use, by uid."""
    known = accounts(users, job_user, more)
    uids = cluster.accounts(users, job_user, job_user_id)
    return {uid: [account for account, share in known.items() if name in share["users"]] for name, uid in uids.items()}
