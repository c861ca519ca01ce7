"""What the nodes answered to a validation, and the checks that follow from it without a job."""

from __future__ import annotations

import shlex
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from farandole.causes import Cause, causes, recognize
from farandole.errors import FarandoleError
from farandole.form import UnfitError
from farandole.validation import plan
from farandole.validation.answer import connections, lines, manifest
from farandole.validation.judge import GREEN, NOT_MEASURED, RED, Check
from farandole.words import one_line

Answer = Mapping[str, Any]
HostVars = Mapping[str, Mapping[str, Any]]


def read_manifest(slurped: Mapping[str, Any]) -> dict[str, Any]:
    """What the head runs, as it says itself; nothing where it was not asked."""
    if "content" not in slurped:
        return {}
    try:
        return manifest(b64decode(str(slurped["content"])).decode())
    except (ValueError, FarandoleError) as error:
        raise FarandoleError(
            f"/opt/farandole/current/manifest.json of the head is none that Farandole wrote: {one_line(error)}; "
            "site.yml installs the stack anew where its folder below /opt/farandole/stacks is removed"
        ) from None


def jobs(nodes: list[str], manifest: Mapping[str, Any], seconds: int, *, quick: bool) -> list[dict[str, Any]]:
    """The jobs in their order; none if the head was not asked what it runs."""
    if not manifest:
        return []
    wanted = manifest["wanted"]
    return plan.jobs(nodes, wanted["frameworks"], int(seconds), quick=quick, gpu=wanted["accelerator"] != "cpu")


def task(job: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A job as files/probes/job.py takes it."""
    argv = [source if word == "{probe}" else word for word in job["argv"]]
    return {"argv": argv, "nodes": job["nodes"], "seconds": job["seconds"]}


def unmeasured(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What no job of this cluster shows, and why."""
    found = {"rdma": "InfiniBand, RoCE: no job asks for them"}
    if manifest["wanted"]["accelerator"] == "cpu":
        found = {"nccl": "NCCL across nodes: the cluster is on CPUs", **found}
    return found


def trust_answers(hostvars: HostVars, hosts: Iterable[str]) -> dict[str, Any]:
    """What the nodes that launch jobs said about reaching the others."""
    return _answers(hostvars, hosts, "_validation_trust")


def stack_answers(hostvars: HostVars, hosts: Iterable[str]) -> dict[str, Any]:
    """What the nodes said about their stacks."""
    return _answers(hostvars, hosts, "_validation_stack")


def _answers(hostvars: HostVars, hosts: Iterable[str], name: str) -> dict[str, Any]:
    answers = {host: hostvars[host].get(name, {}) for host in hosts if host in hostvars}
    return {host: dict(answer) for host, answer in answers.items() if answer and not answer.get("skipped")}


def trust_checks(trust: Mapping[str, Answer], hosts: Collection[str]) -> list[Check]:
    """A check for each node from which jobs are launched: it reaches every host, by name and by address."""
    return [_trusted(name, answer, hosts) for name, answer in trust.items()]


def _trusted(name: str, answer: Answer, hosts: Collection[str]) -> Check:
    check = Check(f"trust.{name}", RED, f"from {name}", hosts=[name])
    said = lines(answer.get("stderr") or answer.get("msg"))
    last = said[-1] if said else "it does not say why"
    if answer.get("unreachable"):
        return _explained(check, "node-unreachable", last, name)
    if "rc" not in answer or not answer.get("stdout"):
        return _explained(check, "node-unusable", last, name)
    try:
        tried = connections(answer, hosts)
        failed = _failed(tried)
        if (answer["rc"] == 0) != (not failed):
            raise UnfitError("its exit status contradicts it")
    except UnfitError as error:
        check.log = said
        return _explained(check, "answer-malformed", str(error), name)
    if failed:
        check.code, check.cause, check.cure = failed[0]
        check.log = [cause for _, cause, _ in failed]
        return check
    check.status, check.words = GREEN, f"machines: {len(hosts)} of {len(hosts)}, clean connections: {len(tried)}"
    return check


def _failed(tried: Collection[Answer]) -> list[tuple[str, str, str]]:
    """Code, cause and cure of each connection that is not clean, and of nodes that are one machine."""
    found = []
    for one in tried:
        if one["code"]:
            cause, seen = _cause(one["code"], one["seen"])
            told = f"{one['host']} as {one['target']}: {cause.told({'seen': seen})}"
            found.append((cause.code, told, cause.mended({"host": shlex.quote(one["host"])})))
    machines: dict[str, set[str]] = {}
    for one in tried:
        machines.setdefault(one["machine"], set()).add(one["host"])
    shared = causes()["machines-shared"]
    for machine, names in machines.items():
        if machine and len(names) > 1:
            found.append((shared.code, shared.told({"seen": " and ".join(sorted(names))}), shared.mended({})))
    return found


def _cause(code: str, seen: str) -> tuple[Cause, str]:
    """What a connection failed of, and the words that show it."""
    sight = recognize("peer", [seen]) if code == "peer-failed" else None
    return (sight.cause, sight.words["seen"]) if sight else (causes()[code], one_line(seen))


def _explained(check: Check, code: str, seen: str, host: str, inventory: str = "") -> Check:
    cause, fields = causes()[code], {"host": shlex.quote(host), "inventory": shlex.quote(inventory)}
    check.code, check.cause, check.cure = code, cause.told({"seen": seen}), cause.mended(fields)
    return check


def stack_checks(stacks: Mapping[str, Answer], inventory: str) -> list[Check]:
    """A check for each node: whether its stack is what was built."""
    return [_whole(name, answer, inventory) for name, answer in stacks.items()]


def _whole(name: str, answer: Answer, inventory: str) -> Check:
    check = Check(f"stack.{name}", RED, "the stack is not known to be what was built", hosts=[name])
    proven = answer.get("proven", False)
    if proven is True:
        check.status, check.words = GREEN, "every file is what was built"
    elif proven is None:
        check.status = NOT_MEASURED
        check.words = "it was made before lists of contents were; without manifest.json, site.yml installs it with one"
    else:
        code = "node-unreachable" if answer.get("unreachable") else "stack-altered"
        seen = one_line(answer.get("wrong") or answer.get("msg") or "it gave no answer")
        return _explained(check, code, seen, name, inventory)
    return check
