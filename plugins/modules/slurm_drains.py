#!/usr/bin/python
DOCUMENTATION = """
module: slurm_drains
short_description: Drain the nodes that are left out
description:
  - Drains nodes with the reason why they are left out. Running jobs there go on.
  - Takes back only nodes that this module has drained, and those that Slurm has drained because they had less than its
    settings said, for which it was given what they have. Those that were down, or have booted, stay so until they are
    proven, and are told as C(lost).
options:
  excluded: {description: Why each of these nodes is left out., type: dict, required: true}
  proven: {description: These nodes are proven., type: list, elements: str, default: []}
  booted: {description: These have booted since they were proven., type: list, elements: str, default: []}
"""

import re
import shutil
import time
from collections.abc import Collection

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.slurm import patient

OURS = "farandole: "
# With which node/health.py drains its own node, and takes it back once the fault is gone.
HEALTH = "farandole health: "
# Slurm's own words. It drains such a node again if it still has less than it should.
LESS = re.compile(r"Low (RealMemory|CPUs|socket\*core\S*|TmpDisk)\b|gres/gpu count ")
WAS_DOWN, BOOTED = f"{OURS}it was down", f"{HEALTH}it has booted (farandole apply proves it)"
# Why the queue gives a node no jobs until it is proven.
LOST = re.compile(rf"Not responding|Node unexpectedly rebooted|{WAS_DOWN}|{HEALTH}it (?:has booted|was mended)")
GETS_NONE = re.compile("DOWN|DRAIN|drain")
PATIENCE_S = 20


def nodes(printed: str) -> dict[str, tuple[str, str]]:
    """The state of each node, and the reason, from `scontrol --oneliner show nodes`."""
    known = {}
    for line in printed.splitlines():
        name, flags = re.match(r"NodeName=(\S+)", line), re.search(r" State=(\S+)", line)
        reason = re.search(r" Reason=(.*?)(?: \[[^\]\[]*@[^\]\[]*\])?$", line.rstrip())
        if name and flags:
            known[name[1]] = (flags[1], reason[1].strip() if reason else "")
    return known


def changes(
    known: dict[str, tuple[str, str]],
    excluded: dict[str, str],
    proven: Collection[str] = (),
    booted: Collection[str] = (),
) -> dict[str, tuple[str, str]]:
    """The state and reason to set, by node."""
    due = {}
    for name, (flags, reason) in known.items():
        drained, down = "DRAIN" in flags, "DOWN" in flags
        if name in excluded:
            wanted = re.sub(r'[\s"]+', " ", OURS + excluded[name])[:400].strip()
            if not drained or (reason.startswith((OURS, HEALTH)) and reason != wanted):
                due[name] = ("drain", wanted)
        elif name in proven and LOST.match(reason) and (drained or down):
            due[name] = ("resume", "")
        elif name in booted and not down and (not drained or reason.startswith(OURS) or LESS.match(reason)):
            due[name] = ("drain", BOOTED)
        elif drained and (reason.startswith(OURS) or LESS.match(reason)):
            due[name] = ("undrain", WAS_DOWN) if down and name not in proven else ("resume", "")
    return due


def main() -> None:
    """Compare and change."""
    module = AnsibleModule(
        argument_spec={
            "excluded": {"type": "dict", "required": True},
            "proven": {"type": "list", "elements": "str", "default": []},
            "booted": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    excluded, proven = module.params["excluded"], module.params["proven"]
    if module.check_mode and not shutil.which("scontrol"):
        # It would be installed before.
        module.exit_json(changed=False, changed_nodes=[], lost=[])
    code, out, err = patient(module, ["scontrol", "--oneliner", "show", "nodes"], PATIENCE_S)
    if code and module.check_mode:
        # What it says before a run does not count.
        module.exit_json(changed=False, skipped=True, changed_nodes=[], lost=[])
    if code:
        module.fail_json(msg=f"slurmctld does not answer: {err.strip()}; see  journalctl --unit slurmctld")
    known, until = nodes(out), time.monotonic() + PATIENCE_S
    wanted = changes(known, excluded, proven, module.params["booted"])
    for name, (state, reason) in wanted.items() if not module.check_mode else ():
        settings = [f"NodeName={name}", f"State={state}", *([f"Reason={reason}"] if reason else [])]
        # A node whose settings have changed cannot be taken back until it has registered with them.
        code, _, err = patient(module, ["scontrol", "update", *settings], until - time.monotonic())
        if code and (name in proven or not LESS.match(known[name][1])):
            module.fail_json(msg=f"{name} could not be changed to {state}: {err.strip()}")
        if code:
            module.warn(f"Slurm does not take {name} back: {known[name][1]}; run site.yml again when it answers")
    after = known | wanted
    lost = [name for name, (flags, why) in after.items() if GETS_NONE.search(flags) and LOST.match(why)]
    module.exit_json(changed=bool(wanted), changed_nodes=sorted(wanted), lost=lost)


if __name__ == "__main__":
    main()
