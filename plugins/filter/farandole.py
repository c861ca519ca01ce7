"""Jinja filters, which are functions of the package."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from farandole.core import programs
from farandole.core.errors import FarandoleError
from farandole.inventory import cluster, excluded, facts, host_keys, state
from farandole.inventory import mounts as storage
from farandole.links import fabric
from farandole.monitor import settings as monitor
from farandole.plays import folders, removal
from farandole.preflight import networks
from farandole.preflight.nodes import last_known
from farandole.queue import plan as slurm
from farandole.stack import cache, caffe, lock, nccl, parts, peers, plan, sources
from farandole.trust import rules as trust
from farandole.validation import files, nodes, trial

FILTERS: dict[str, Callable[..., Any]] = {
    "accounts": cluster.accounts,
    "builders": cluster.builders,
    "cache_root": lambda home: str(cache.cache_root(home)),
    "caffe_archive": caffe.archive,
    "certificate_files": trust.certificate_files,
    "cluster_checked": lambda known, reasons: facts.checked(known, reasons, networks.shared_in(known["state"])),
    "cluster_facts": lambda *values, **options: facts.plain(facts.describe(*values, **options)),
    "depot_debs": nccl.depot_debs,
    "fabric": fabric.choice,
    "folder_files": folders.folder_files,
    "horovod_source": sources.horovod_source,
    "host_table": cluster.host_table,
    "hostfile": fabric.hostfile,
    "member_addresses": cluster.member_addresses,
    "monitor_known": monitor.known,
    "monitor_rules": lambda _: monitor.rules(),
    "monitor_page": lambda _: monitor.page(),
    "monitor_scrape": monitor.scrape,
    "monitor_target": monitor.target,
    "nccl_decision": nccl.decision,
    "last_known": last_known,
    "job_keys": trust.job_keys,
    "login_files": trust.login_files,
    "node_address": cluster.node_address,
    "node_addresses": cluster.node_addresses,
    "program_folder": programs.program_folder,
    "program_files": programs.program_files,
    "principal_files": trust.principal_files,
    "shared_homes": storage.shared_homes,
    "slurm_accounts": slurm.accounts,
    "slurm_hardware": slurm.hardware,
    "slurm_new": slurm.new,
    "slurm_people": slurm.people,
    "slurm_settings": slurm.settings,
    "ssh_nodes": cluster.ssh_nodes,
    "ssh_options": lambda *folders: host_keys.ssh_options(state.state_folder(*folders)),
    "ssh_ports": cluster.ssh_ports,
    "stack_archives": parts.stack_archives,
    "stack_built": parts.stack_built,
    "stack_cached": parts.stack_cached,
    "stack_in_use": removal.in_use,
    "stack_known": lambda folder: cache.Builds(Path(folder).expanduser()).known(),
    "stack_modules": parts.stack_modules,
    "stack_own": lock.own_wheels,
    "stack_place": parts.stack_place,
    "stack_packed": parts.stack_packed,
    "stack_patches": parts.stack_patches,
    "stack_peers": peers.peers,
    "stack_requirements": parts.stack_requirements,
    "stack_trial": plan.trial,
    "stack_unavailable": plan.unavailable,
    "state_folder": lambda *folders: str(state.state_folder(*folders)),
    "storage_homes": storage.homes,
    "unmeasured_nodes": excluded.unmeasured,
    "validation_answers": nodes.answers,
    "validation_files": files.answers,
    "validation_hosts": nodes.chosen,
    "validation_jobs": nodes.jobs,
    "validation_manifest": nodes.read_manifest,
    "validation_program": nodes.program,
    "validation_queue": nodes.queued,
    "validation_refusal": trial.refusal,
    "validation_shared": files.shared,
    "validation_task": nodes.task,
    "validation_trial": trial.jobs,
    "validation_unmeasured": nodes.unmeasured,
    "validation_usable": files.usable,
}


def as_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its errors for the user become filter errors with the same message."""

    @wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        try:
            return function(*values, **options)
        except FarandoleError as error:
            raise AnsibleFilterError(str(error)) from None

    return call


# Once, as Ansible asks for all of them whenever a template names one.
WRAPPED = {name: as_filter(function) for name, function in FILTERS.items()}


class FilterModule:
    """The class that Ansible looks for."""

    def filters(self) -> dict[str, Any]:
        """Returns the filters by name."""
        return WRAPPED
