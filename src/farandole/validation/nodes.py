"""The nodes' answers in a validation, and the checks that need no job."""

import re
import statistics
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from farandole.core.causes import patterns, recognize
from farandole.core.errors import FarandoleError
from farandole.core.programs import bundle, source
from farandole.core.schema import UnfitError
from farandole.core.text import one_line
from farandole.inventory.cluster import HostVars
from farandole.validation import plan
from farandole.validation.answer import connections, lines, manifest, stack
from farandole.validation.judge import GREEN, NOT_MEASURED, RED, Bars, Check, Explanation, explanation

Answer = Mapping[str, Any]


def read_manifest(slurped: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of the head's stack, as the head reports it; empty if it was not read."""
    if "content" not in slurped:
        return {}
    try:
        return manifest(b64decode(str(slurped["content"])).decode())
    except (ValueError, FarandoleError) as error:
        raise FarandoleError(
            f"Farandole did not write /opt/farandole/current/manifest.json on the head: {one_line(error)}; remove the "
            "stack's folder below /opt/farandole/stacks and run site.yml, which reinstalls it"
        ) from None


def chosen(hosts: str, cluster: Mapping[str, Any], *, checked: bool) -> list[str]:
    """The nodes to validate: without those that preflight has excluded, if it has checked them in this run.

    Otherwise, an excluded node is validated before it is included; one that a person keeps out, always.
    """
    out = {*cluster["excluded"]} - {*cluster["set_aside"]} if checked else set()
    return [name for name in hosts.split(",") if name not in out]


def queued(queue: Sequence[str], answer: Answer) -> list[str]:
    """The nodes to which the queue gives jobs, and those that should get some but do not answer it; all if it does not.

    It gives none to those that are drained, new to it, or down until they are proven, and for now none to full ones.
    """
    shown = str(answer.get("stdout", ""))
    given = re.findall(
        r"^NodeName=(\S+)(?!.* State=(?:\S*DRAIN|ALLOC|DOWN(?!\S*(?:\*|NOT_RESP))))", shown, re.MULTILINE
    )
    return [name for name in queue if name in given or answer.get("rc") != 0]


def jobs(
    nodes: list[str],
    manifest: Mapping[str, Any],
    seconds: int,
    bars: Mapping[str, float | None] | None = None,
    *,
    quick: bool,
    queue: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The jobs in their order; none if the head's manifest was not read."""
    if not manifest:
        return []
    wanted = manifest["wanted"]
    gpu = wanted["accelerator"] != "cpu"
    keras_3 = manifest["versions"].get("keras", "").startswith("3.")
    limits = Bars.changed(bars)
    return plan.jobs(
        nodes, wanted["frameworks"], int(seconds), limits, quick=quick, gpu=gpu, queue=queue, keras_3=keras_3
    )


def task(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job in the form that probe `job` takes."""
    argv = [program(job["probe"]) if word == "{probe}" else word for word in job["argv"]]
    reap = source("farandole.node.head.reap")
    return {"argv": argv, **{key: job[key] for key in ("nodes", "seconds")}, "patterns": patterns("job"), "reap": reap}


def program(probe: str) -> str:
    """The text of a probe, with all that it needs."""
    return bundle(f"farandole.node.probes.{probe}")


def unmeasured(hosts: Sequence[str], manifest: Mapping[str, Any], *, quick: bool) -> dict[str, str]:
    """What the jobs do not cover on this cluster, and why; nothing if the head's manifest was not read."""
    if not manifest:
        return {}
    reasons, wanted = {}, manifest["wanted"]
    if len(hosts) == 1:
        reasons["speed"] = "speed of messages and of training together: there is only one node"
    elif not quick and "pytorch" not in wanted["frameworks"]:
        reasons["speed"] = "speed of training together: it is measured with PyTorch, which the stack does not have"
    if wanted["accelerator"] == "cpu":
        reasons["nccl"] = "NCCL across nodes: the cluster runs on CPUs"
    return reasons


def answers(hostvars: HostVars, hosts: Iterable[str], name: str) -> dict[str, Any]:
    """What a task has registered by this name for each node that it was not skipped for."""
    known = {host: hostvars[host].get(name, {}) for host in hosts if host in hostvars}
    return {host: dict(answer) for host, answer in known.items() if answer and not answer.get("skipped")}


def trust_checks(trust: Mapping[str, Answer], hosts: Collection[str]) -> list[Check]:
    """A check for each node that launches jobs: whether it reaches every host, by name and by address."""
    return [_trust_check(name, answer, hosts) for name, answer in trust.items()]


def _trust_check(name: str, answer: Answer, hosts: Collection[str]) -> Check:
    check = Check(f"trust.{name}", RED, f"from {name}", hosts=[name])
    if not answer.get("stdout") or "rc" not in answer:
        return unanswered(check, answer, name)
    try:
        tried = connections(answer, hosts)
        failed = _failed(tried)
        if (answer["rc"] == 0) != (not failed):
            raise UnfitError("its exit status contradicts it")
    except UnfitError as error:
        check.log = lines(answer.get("stderr"))
        return explained(check, "answer-malformed", str(error), name)
    if failed:
        check.log = [cause for _, cause, _ in failed]
        return check.explain(failed[0])
    check.status, check.words = GREEN, f"machines: {len(hosts)} of {len(hosts)}, clean connections: {len(tried)}"
    return check


def _failed(tried: Collection[Answer]) -> list[Explanation]:
    """Code, cause and cure of each connection that failed, and of nodes that are the same machine."""
    failed: list[Explanation] = []
    machines: dict[str, set[str]] = {}
    for connection in tried:
        host, code, seen = connection["host"], connection["code"], one_line(connection["seen"])
        machines.setdefault(connection["machine"], set()).add(host)
        if code == "peer-failed" and (match := recognize("peer", connection["seen"])):
            code, seen = match.cause.code, match.seen
        if code:
            code, cause, cure = explanation(code, [host], host=host, seen=seen)
            failed.append((code, f"{host} as {connection['target']}: {cause}", cure))
    for machine, names in machines.items():
        if machine and len(names) > 1:
            failed.append(explanation("machines-shared", [], seen=" and ".join(sorted(names))))
    return failed


def unanswered(check: Check, answer: Answer, host: str) -> Check:
    """Say why a program on a node gave no answer: the last line that there is."""
    output = [
        line for source in ("msg", "module_stdout", "stderr", "module_stderr") for line in lines(answer.get(source))
    ]
    code = "node-unreachable" if answer.get("unreachable") else "node-unusable"
    return explained(check, code, output[-1] if output else "it gave no reason", host)


def explained(check: Check, code: str, seen: str, host: str, inventory: str = "") -> Check:
    """Give a check its cause and its cure."""
    return check.explain(explanation(code, [host], inventory, host=host, seen=seen))


def stack_checks(stacks: Mapping[str, Answer], inventory: str, hosts: Collection[str]) -> list[Check]:
    """A check for each node: whether its stack is exactly what was built; not measured if it was not asked."""
    absent = [name for name in hosts if name not in stacks]
    why = "only jobs were tried on it, as it was not asked itself in this run; was there a --limit?"
    checks = {name: _stack_check(name, answer, inventory) for name, answer in stacks.items()}
    # A job has the stack of the node where it was started, on all nodes, so it would not notice.
    current = {name: str(stacks[name]["stack"]) for name, check in checks.items() if check.status != RED}
    usual = statistics.mode(current.values()) if current else ""
    for name, has in current.items():
        if has != usual:
            checks[name].status, checks[name].words = RED, "its current stack is not that of the others"
            explained(
                checks[name], "nodes-differ", f"{has} is current there, and {usual} on the others", name, inventory
            )
    return [*checks.values(), *(Check(f"stack.{name}", NOT_MEASURED, why, hosts=[name]) for name in absent)]


def _stack_check(name: str, answer: Answer, inventory: str) -> Check:
    check = Check(f"stack.{name}", RED, "the stack could not be verified", hosts=[name])
    if "proven" not in answer:
        return unanswered(check, answer, name)
    try:
        proof = stack(answer)
    except UnfitError as error:
        return explained(check, "answer-malformed", str(error), name)
    if proof["proven"]:
        check.status, check.words = GREEN, "every file is as it was built"
        return check
    if proof["proven"] is None:
        check.status, check.words = NOT_MEASURED, "the stack has no list of contents"
        return explained(check, "stack-unlisted", "", name, inventory)
    return explained(check, "stack-altered" if proof["stack"] else "stack-missing", proof["wrong"], name, inventory)
