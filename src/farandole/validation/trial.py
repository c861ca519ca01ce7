"""Jobs on two nodes with a stack that is installed and not yet current, before the others switch to it."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from farandole.validation import nodes
from farandole.validation.answer import job_result
from farandole.validation.judge import explain, failure

# Lines of a job's output.
SHOWN = 10
# Of a job, as there are only two ranks.
LONGEST_S = 120
Lock = Mapping[str, Any]


def jobs(names: Sequence[str], lock: Lock, seconds: int) -> list[dict[str, Any]]:
    """The jobs of a quick validation, with this stack; none without nodes."""
    if not names:
        return []
    manifest = {"wanted": lock["wanted"], "versions": {}}
    chosen = ("env", f"FARANDOLE_STACK=/opt/farandole/stacks/{lock['id']}")
    planned = nodes.jobs([*names], manifest, min(int(seconds), LONGEST_S), quick=True)
    return [{**job, "argv": (*chosen, *job["argv"])} for job in planned]


def refusal(answers: Sequence[Mapping[str, Any]], lock: Lock, inventory: str) -> str:
    """Why nobody may switch to this stack; empty if all jobs ran with it."""
    for result in map(job_result, answers):
        job, why, mend = result["job"], failure(result), ""
        ran = {str(rank.get("stack")) for rank in result["ranks"]}
        if why:
            _, cause, cure = explain(result)
            # It was just run.
            mend = f": {cause}" if "site.yml" in cure else f": {cause}. What mends that: {cure}"
            mend += ". Another job on their GPUs may be why" * (lock["wanted"]["accelerator"] != "cpu")
        elif ran != {lock["id"]}:
            why = f"ran with stack {', '.join(sorted(ran))}"
        if why:
            output = "".join(f"\n  {line}" for line in result["said"][-SHOWN:])
            return (
                f"no node has switched to stack {lock['id']}, as a job with it failed on {' and '.join(job['nodes'])}: "
                f"{job['title']}: {why}{mend}. If `farandole validate --quick -i {shlex.quote(inventory)}` fails, too, "
                "it is not the stack; with -e stack_trial=false, site.yml switches without these jobs. To stay with "
                "the present stack, put the former stack.lock.yml back"
            ) + (f"\nThe job's output ends with:{output}" if output else "")
    return ""
