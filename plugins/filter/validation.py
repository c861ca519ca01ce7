"""The jobs that prove a cluster, for the role that runs them."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from farandole.errors import FarandoleError
from farandole.stack.cache import Builds
from farandole.validation.answer import manifest
from farandole.validation.plan import jobs
from farandole.words import one_line


def validation_manifest(slurped: Mapping[str, Any]) -> dict[str, Any]:
    """What the head runs, as it says itself; nothing where it was not asked."""
    if "content" not in slurped:
        return {}
    try:
        return manifest(b64decode(str(slurped["content"])).decode())
    except (ValueError, FarandoleError) as error:
        raise AnsibleFilterError(
            f"/opt/farandole/current/manifest.json of the head is none that Farandole wrote: {one_line(error)}; "
            "site.yml installs the stack anew where its folder below /opt/farandole/stacks is removed"
        ) from None


def validation_jobs(nodes: list[str], manifest: dict[str, Any], seconds: int, *, quick: bool) -> list[dict[str, Any]]:
    """In their order; none on a node that was not asked what it runs."""
    if not manifest:
        return []
    wanted = manifest["wanted"]
    return jobs(nodes, wanted["frameworks"], int(seconds), quick=quick, gpu=wanted["accelerator"] != "cpu")


def validation_task(job: dict[str, Any], source: str) -> dict[str, Any]:
    """A job as files/probes/job.py takes it."""
    argv = [source if word == "{probe}" else word for word in job["argv"]]
    return {"argv": argv, "nodes": job["nodes"], "seconds": job["seconds"]}


def validation_trust(hostvars: Mapping[str, Any], hosts: list[str]) -> dict[str, Any]:
    """What the nodes from which jobs are launched said of the others."""
    answers = {host: hostvars[host].get("_validation_trust", {}) for host in hosts if host in hostvars}
    return {host: dict(answer) for host, answer in answers.items() if answer and not answer.get("skipped")}


def validation_known(folder: str) -> dict[str, list[str]]:
    """What the control machine knows of the contents of stacks."""
    return Builds(Path(folder)).known()


def validation_stacks(hostvars: Mapping[str, Any], hosts: list[str]) -> dict[str, Any]:
    """What the nodes said of their stacks."""
    answers = {host: hostvars[host].get("_validation_stack", {}) for host in hosts if host in hostvars}
    return {host: dict(answer) for host, answer in answers.items() if answer and not answer.get("skipped")}


def validation_unmeasured(manifest: dict[str, Any]) -> dict[str, str]:
    """What no job of this cluster shows, and why."""
    found = {"rdma": "InfiniBand, RoCE: no job asks for them"}
    if manifest["wanted"]["accelerator"] == "cpu":
        found = {"nccl": "NCCL across nodes: the cluster is on CPUs", **found}
    return found


class FilterModule:
    """Gives Ansible the filters."""

    def filters(self) -> dict[str, Any]:
        """By name."""
        return {
            "validation_jobs": validation_jobs,
            "validation_known": validation_known,
            "validation_manifest": validation_manifest,
            "validation_stacks": validation_stacks,
            "validation_task": validation_task,
            "validation_trust": validation_trust,
            "validation_unmeasured": validation_unmeasured,
        }
