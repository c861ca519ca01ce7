#!/usr/bin/python
DOCUMENTATION = """
module: former_jobs
short_description: Cancel the jobs of people who may start none
description:
  - Cancels whatever waits in the queue, held and delayed jobs too, of all users that are not listed.
options:
  uids: {description: Who may start jobs., type: list, elements: int, required: true}
  running: {description: "Whether to cancel what runs, too.", type: bool, default: false}
  wait:
    description: Seconds in which all of it has to end. Where slurmctld does not answer, nothing is cancelled then.
    type: int
    default: 0
"""

import shutil
import time

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Compare and cancel."""
    module = AnsibleModule(
        argument_spec={
            "uids": {"type": "list", "elements": "int", "required": True},
            "running": {"type": "bool", "default": False},
            "wait": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    wait, until = module.params["wait"], time.monotonic() + module.params["wait"]
    if (module.check_mode or wait) and not shutil.which("squeue"):
        # It would be installed before, or somebody has removed it.
        module.exit_json(changed=False, cancelled=[])
    states = [] if module.params["running"] else ["--state=PENDING"]
    command = ["squeue", "--noheader", "--format=%U", *states]
    code, out, err = module.run_command(command)
    if code and not module.check_mode and not wait:
        module.fail_json(msg=f"slurmctld does not answer: {err.strip()}; see  journalctl --unit slurmctld")
    former = sorted({int(uid) for uid in out.split()} - {*module.params["uids"]}) if code == 0 else []
    for uid in former if not module.check_mode else ():
        module.run_command(["scancel", *states, f"--user={uid}"], check_rc=True)
    while former and wait and not module.check_mode:
        code, out, err = module.run_command(command)
        if not (code or out.split()):
            break
        if time.monotonic() > until:
            left = f"slurmctld does not say which are left: {err.strip()}" if code else f"{len(out.split())} are left"
            module.fail_json(msg=f"not all jobs have ended within {wait} s: {left}; see  squeue")
        time.sleep(1)
    module.exit_json(changed=bool(former), cancelled=former)


if __name__ == "__main__":
    main()
