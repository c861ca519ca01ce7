"""What the nodes answered to a validation, and the checks that follow from it without a job."""

from __future__ import annotations

import re
import shlex
from base64 import b64decode
from collections.abc import Iterable, Mapping
from typing import Any

from farandole.errors import FarandoleError
from farandole.validation import plan
from farandole.validation.answer import lines, manifest
from farandole.validation.judge import GREEN, NOT_MEASURED, RED, Check
from farandole.words import one_line

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


def trust_checks(answers: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """A check for each node that launches jobs: whether it reaches the others."""
    checks = []
    for host, answer in answers.items():
        said = lines(answer.get("stdout") or answer.get("stderr") or answer.get("msg"))
        if answer.get("rc") == 0 and said:
            checks.append(Check(f"trust.{host}", GREEN, said[-1], hosts=[host]))
            continue
        cause = "not every node is reached by name and by address as the job user"
        cure = "start or reconnect what does not answer; for all else site.yml"
        if answer.get("unreachable"):
            cause, cure = "it does not answer to ssh", f"start or reconnect {host}; playbooks/preflight.yml says more"
        elif "rc" not in answer:
            cause, said = f"nothing could be run there: {said[-1] if said else 'it does not say why'}", []
            cure = (
                "give the password of sudo with --ask-become-pass, if it wants one; playbooks/preflight.yml says more"
            )
        # The ways that work end with their seconds.
        bad = [line for line in said if not re.search(r"\d\.\d\d s$", line)]
        checks.append(Check(f"trust.{host}", RED, f"from {host}", hosts=[host], cause=cause, cure=cure, log=bad))
    return checks


def stack_checks(answers: Mapping[str, Mapping[str, Any]], inventory: str) -> list[Check]:
    """A check for each node: whether its stack is what was built."""
    checks = []
    for host, answer in answers.items():
        name, proven = f"stack.{host}", answer.get("proven", False)
        if proven is True:
            checks.append(Check(name, GREEN, "every file is what was built", hosts=[host]))
        elif proven is None:
            words = "it was made before lists of contents were; without manifest.json, site.yml installs it with one"
            checks.append(Check(name, NOT_MEASURED, words, hosts=[host]))
        else:
            cause = one_line(answer.get("wrong") or answer.get("msg") or "it gave no answer")
            cure = f"start or reconnect {host}" if answer.get("unreachable") else _reinstall(host, inventory)
            words = "the stack is not known to be what was built"
            checks.append(Check(name, RED, words, hosts=[host], cause=cause, cure=cure))
    return checks


def _reinstall(host: str, inventory: str) -> str:
    """The commands by which a node gets its stack again."""
    mark = "path=/opt/farandole/current/manifest.json state=absent"
    one, where = shlex.quote(host), shlex.quote(inventory)
    return f"ansible {one} -i {where} --become -m file -a '{mark}', then ansible-playbook -i {where} site.yml"
