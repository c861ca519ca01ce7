"""`make bench-predict`: compare `farandole predict` with jobs on two to four nodes whose links carry 200 Mbit/s.

    predict.py [WORKERS ...]

As the network is what limits, errors can be compared between machines, and so can most milliseconds. Networks that are
far away are compared in tests/lab/test_delay.py.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from farandole.links.examine import links_in
from farandole.links.predict import TrainingJob, measured, predict

ROOT = Path(__file__).parents[2]
LAB = "bench-predict"
MBIT = "200"
SAMPLE = "/opt/farandole/samples/gradient_steps.py"
# Megabytes of gradients and milliseconds of a step: limited by the network, balanced, hidden behind the backward pass,
# and so small that only the delays count.
CASES = ((100.0, 250.0), (10.0, 500.0), (10.0, 2000.0), (0.1, 20.0))
HEADER = """\
| workers | MB | step, ms | sent | alone, ms | predicted, ms | measured, ms | error | predicted | measured |
|---|---|---|---|---|---|---|---|---|---|"""
WAYS = ("--gloo", "--gloo --grouped", "--mpi --grouped")


def run(*command: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.stdout


def lab(verb: str, *arguments: str) -> None:
    """Run a `farandole lab` command on the benchmark's lab."""
    run(sys.executable, "-m", "farandole", "lab", verb, *arguments, "--name", LAB)


def job(workers: int, way: str, megabytes: float, step_ms: float) -> dict[str, float]:
    """Run the sample on the first nodes, as a user on the head would."""
    launcher, *options = way.split()
    hosts = ",".join(f"node-{number}:1" for number in range(1, workers + 1))
    arguments = ["horovodrun", launcher, "-np", str(workers), "-H", hosts, "python", SAMPLE, *options]
    arguments += ["--model-mb", str(megabytes), "--step-ms", str(step_ms), "--json", "--steps", "5", "--seconds", "20"]
    command = f"cd / && OMP_NUM_THREADS=1 {shlex.join(arguments)}"
    ssh = ["ssh", "-F", f"inventory/{LAB}/.ssh/config", "node-1"]
    output = run(*ssh, f"runuser -u trainer -- sh -c {shlex.quote(command)}")
    result: dict[str, float] = json.loads(re.findall(r'\{"sample".*\}', output)[-1])
    return result


def outcomes(workers: int) -> Iterator[str]:
    """Run jobs on so many nodes, and compare each with its prediction."""
    links = links_in(ROOT / ".farandole" / LAB / "preflight.json")
    result = measured(links, [f"node-{number}" for number in range(1, workers + 1)])
    assert result
    for megabytes, step_ms in CASES:
        for way in WAYS:
            took = job(workers, way, megabytes, step_ms)
            alone, together = took["alone_ms"], took["together_ms"]
            for turns in (False, True) if "--mpi" in way else (False,):
                planned = TrainingJob(
                    megabytes, alone, mpi="--mpi" in way, overlaps="--grouped" not in way, turns=turns
                )
                ahead = predict(planned, result.network, workers)
                cells = [f"{workers}", f"{megabytes:g}", f"{step_ms:.0f}", f"{way}{', in turns' * turns}"]
                cells += [f"{alone:.0f}", f"{ahead.step_ms:.0f}", f"{together:.0f}"]
                cells += [f"{100 * (ahead.step_ms / together - 1):+.0f} %"]
                cells += [f"{100 * ahead.efficiency:.1f} %", f"{100 * alone / together:.1f} %"]
                yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print a row as soon as it is complete."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workers", nargs="*", type=int, default=[2, 3, 4])
    wanted = parser.parse_args()
    try:
        nodes = max(wanted.workers)
        lab("up", "--nodes", str(nodes))
        run("ansible-playbook", "-i", f"inventory/{LAB}", "site.yml")
        for number in range(1, nodes + 1):
            lab("fault", "throttle", f"node-{number}", "--mbit", MBIT)
        run(sys.executable, "-m", "farandole", "preflight", "-i", f"inventory/{LAB}")
        print(HEADER)
        for workers in wanted.workers:
            for row in outcomes(workers):
                print(row, flush=True)
    finally:
        lab("down")


if __name__ == "__main__":
    main()
