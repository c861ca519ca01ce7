"""Train with Intel Caffe on several nodes, and say whether they trained together.

Everything that a training needs is checked on every node before it starts. Whether it succeeded is read from its log
and from the model's file, because its launchers end with 0 even if each rank has trained alone.
"""

import argparse
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.node.allocation import counts, tasks
from farandole.node.arguments import duration, positive
from farandole.node.caffe.nodes import HOSTFILE, ask, ask_all, find_hosts, request_of
from farandole.node.caffe.nodes import judge as judge_nodes
from farandole.node.caffe.plan import Plan, find_launcher, folders_of, read_solver, threads, variables
from farandole.node.caffe.training import catch_signals, judge, run

INSTALLED = "/opt/farandole/caffe/current/bin/caffe"


def say(text: str, problems: Iterable[str] = ()) -> None:
    for line in (text, *(f"{number}. {problem}" for number, problem in enumerate(problems, 1))):
        print(f"caffe.sh: {line}", file=sys.stderr, flush=True)


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Read the options of the guide's run_intelcaffe.sh, and a few more."""
    more = "Train with Intel Caffe on several nodes. Further options for `caffe train` follow after --."
    parser = argparse.ArgumentParser(prog="caffe.sh", allow_abbrev=False, description=more)
    add, given = parser.add_argument, os.environ.get
    caffe, number = shutil.which("caffe") or INSTALLED, given("OMP_NUM_THREADS") or given("SLURM_CPUS_PER_TASK")
    add("--hostfile", default=given("PBS_NODEFILE"), help=f"default: $PBS_NODEFILE, the nodes of Slurm, {HOSTFILE}")
    add("--caffe_bin", default=caffe, help=f"the program caffe, on all nodes; default: caffe on PATH, {INSTALLED}")
    add("--solver", required=True, help="solver.prototxt, on all nodes")
    add("--network", choices=["tcp", "opa", "psm2"], default="tcp", help="psm2: opa if all nodes have it, else tcp")
    add("--ppn", type=positive, help="processes per node; default: what the nodefile gives, else 1")
    add("--num_omp_threads", type=positive, default=number, help="default: $OMP_NUM_THREADS, what Slurm gives, all")
    add("--time", type=duration, default="4h", help="end the job after that time; default: 4h")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:end], argparse.Namespace(more=arguments[end + 1 :]))


def prepare(chosen: argparse.Namespace) -> tuple[Plan, Callable[[], bool]]:
    """Check everything, and start nothing; the function says whether there is a new model where rank 0 runs."""
    allocated = tasks(os.environ) if "SLURM_JOB_NODELIST" in os.environ else {}
    in_slurm = bool(allocated)
    nodes, ppn = find_hosts(chosen.hostfile, chosen.ppn, allocated)
    solver, caffe, launcher = read_solver(chosen.solver), str(Path(chosen.caffe_bin).absolute()), find_launcher()
    request = request_of(caffe, folders_of(caffe), launcher, solver)
    answers, network = ask_all(nodes, request, in_slurm), chosen.network
    if network == "psm2":
        network = "opa" if all(answer.get("omni_path") for answer in answers.values()) else "tcp"
    if problems := list(judge_nodes(answers, network)):
        raise FarandoleError(*problems)
    # In a job of Slurm's, a node was asked by a step that has one core.
    cores = dict(zip(allocated, counts(os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")), strict=False))
    number = threads(chosen.num_omp_threads, cores or {node: answers[node]["cores"] for node in nodes}, ppn)
    environment = variables(caffe, ppn, number, network, in_slurm)
    plan = Plan(nodes, ppn, launcher, [caffe, "train", "--solver", solver.path, *chosen.more], environment, solver)
    shape = f"{plan.ranks} ranks on {', '.join(nodes)}, {ppn} per node with {number} threads; network {network}"
    say(f"{shape}; {launcher}; MLSL_NUM_SERVERS=0 KMP_AFFINITY={environment['KMP_AFFINITY']}")
    old = (None, 0, answers[nodes[0]]["model"])
    return plan, lambda: ask(nodes[0], request, in_slurm).get("model") not in old


def train(plan: Plan, has_model: Callable[[], bool], time_limit: int) -> int:
    """Run it, and say whether it was a training of all ranks together."""
    begun = time.monotonic()
    log, why = run(plan, time_limit)
    if problems := judge(log, plan, has_model(), why):
        say("red: the ranks did not all train together successfully", problems)
        return 1
    tested = "".join(f", {output}" for output in log.tested())
    together = f"{plan.ranks} ranks on {len(plan.nodes)} machines trained together{tested}"
    say(f"green: {together}, {plan.nodes[0]}:{plan.solver.model}, {time.monotonic() - begun:.0f} s")
    return 0


def main() -> int:
    """Run the launcher."""
    catch_signals()
    try:
        chosen = read_options(sys.argv[1:])
        return train(*prepare(chosen), chosen.time)
    except (KeyboardInterrupt, BrokenPipeError):
        with suppress(OSError):
            say("red: everything was ended on all nodes, by a signal or because nobody reads the output")
    except FarandoleError as error:
        say("nothing was started", error.args)
    except OSError as error:
        if not error.filename:
            raise
        cure = "Put it there (the program by caffe_archive), or correct its path"
        say("nothing was started", [f"{socket.gethostname()}: {error.filename}: {error.strerror}. {cure}"])
    return 1
