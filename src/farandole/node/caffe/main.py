"""Train with Intel Caffe on several nodes, and say whether they trained together.

Everything that a training needs is checked on every node before it starts. Whether it succeeded is read from its log
and from the model's file, because its launchers end with 0 even if each rank has trained alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farandole.node.allocation import counts
from farandole.node.caffe.job import AFTER_DONE, NOT_ENDED, EndedError, catch_signals, run
from farandole.node.caffe.log import judge
from farandole.node.caffe.nodes import Answer, allocation, ask, ask_all, find_hosts, has_omni_path, per_node
from farandole.node.caffe.nodes import judge as judge_nodes
from farandole.node.caffe.options import RefusedError, read_options, say
from farandole.node.caffe.plan import Plan, caffe_of, choose_launcher, folders_of, hydra, threads, variables
from farandole.node.caffe.solver import Solver, read_solver

# A plan, what it trains, and how to ask whether there is a new model where rank 0 has run.
Training = tuple[Plan, Solver, Callable[[], bool]]


def network_of(chosen: argparse.Namespace, answers: Mapping[str, Answer]) -> str:
    """The network; the guide's -PSM2 is Omni-Path where there is any."""
    without = [node for node, answer in answers.items() if not has_omni_path(answer)]
    if chosen.psm2 and without:
        say(f"-PSM2 means Omni-Path, which {', '.join(without[:5])} does not have, so the network is tcp")
    return "opa" if chosen.psm2 and not without else str(chosen.network)


def cores_of(answers: Mapping[str, Mapping[str, Any]], in_job: bool) -> tuple[int, str]:
    """The cores of the smallest node, or of the Slurm job on it, and where that was read."""
    if in_job and (given := counts(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))):
        return min(given), f"Slurm job {os.environ.get('SLURM_JOB_ID')}"
    least = min(answers, key=lambda node: int(answers[node]["cores"]))
    return int(answers[least]["cores"]), least


def prepare(chosen: argparse.Namespace) -> Training:
    """Check everything; nothing is started."""
    allocated = allocation()
    hosts, path = find_hosts(chosen.hostfile, allocated)
    nodes, ppn = list(hosts), chosen.ppn or per_node(hosts, path)
    solver, caffe = read_solver(chosen.solver), caffe_of(chosen.caffe_bin)
    launcher = choose_launcher(caffe, ppn * len(nodes))
    in_slurm = bool(allocated and shutil.which("srun"))
    files = {caffe: "the program", solver.path: "the solver", **dict.fromkeys(solver.nets, "the net")}
    request = {
        "cwd": str(Path.cwd()), "caffe": caffe, "folders": folders_of(caffe), "launcher": launcher, "files": files,
        "sources": solver.sources, "snapshots": solver.snapshots, "model": solver.model,
    }  # fmt: skip
    answers = ask_all(nodes, request, in_slurm)
    network = network_of(chosen, answers)
    if problems := list(judge_nodes(answers, files, network)):
        raise RefusedError(*problems)
    sound = {node: answer for node, answer in answers.items() if isinstance(answer, dict)}
    number = threads(chosen.num_omp_threads, *cores_of(sound, bool(allocated)), ppn)
    plan = Plan(nodes, ppn, launcher, [caffe, "train", "--solver", solver.path, *chosen.more])
    fabrics = [answer["fabric"] for answer in sound.values()]
    plan.environment = {**variables(caffe, ppn, number), **hydra(network, fabrics, in_slurm)}
    say(
        f"{plan.ranks} ranks on {', '.join(nodes)}, {ppn} per node with {number} threads; network {network}; "
        f"{launcher}; MLSL_NUM_SERVERS=0"
    )
    before = sound[nodes[0]]["model"]

    def is_written() -> bool:
        after = ask(nodes[0], request, in_slurm)
        return isinstance(after, dict) and bool(after.get("model")) and after["model"] != before

    return plan, solver, is_written


def train(training: Training, time_limit: int) -> int:
    """Run it, and say whether it was a training of all ranks together."""
    (plan, solver, is_written), begun = training, time.monotonic()
    log, status, ended = run(plan, time_limit)
    if ended == NOT_ENDED:
        say(f"all ranks were done, but {plan.launcher} did not end within {AFTER_DONE} seconds, so it was ended")
        status, ended = 0, ""
    why = [f"{plan.launcher} ended with status {status}"] if status else []
    why = [f"it was ended on all its nodes, because {ended}"] if ended else why
    if problems := judge(log, plan, solver, is_written(), why):
        say("red: the ranks did not all train together successfully", problems)
        return 1
    tested = "".join(f", {name} {value}" for name, value in log.tested.items())
    say(
        f"green: {plan.ranks} ranks on {len(plan.nodes)} machines trained together{tested}, "
        f"{plan.nodes[0]}:{solver.model}, {time.monotonic() - begun:.0f} s"
    )
    return 0


def main() -> int:
    """Run the launcher."""
    catch_signals()
    try:
        chosen = read_options(sys.argv[1:])
        training = prepare(chosen)
    except RefusedError as error:
        say("nothing was started", error.problems)
        return 1
    except EndedError as why:
        say(f"{why}: nothing was started")
        return 1
    try:
        return train(training, chosen.time)
    except (EndedError, BrokenPipeError) as why:
        with contextlib.suppress(OSError):
            say(f"red: the job was ended on all its nodes, because of {why}")
        return 1
