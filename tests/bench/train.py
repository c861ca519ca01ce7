"""`make bench-train`: how sums and training on two nodes compare with the network, torch.distributed and one node.

    train.py [--rounds N] [--delay-ms MS [MS ...] [--loss PERCENT]] [--largest MIB]

Only ratios can be compared between machines. With delays the nodes have kernels of their own, as only these can delay
and lose packets; their processors are slower.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAB = "bench-train"
LAUNCHERS = ("--gloo", "--mpi")
# In bytes; below it, milliseconds say more than the rate.
SMALL = 1 << 17


def farandole(verb: str, *arguments: str, folder: Path = ROOT) -> str:
    """Run a command of farandole, and return what it prints."""
    command = [sys.executable, "-m", "farandole", verb, *arguments]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"farandole {verb} failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.stdout


def lab(verb: str, *arguments: str) -> None:
    """Run a `farandole lab` command on the benchmark's lab."""
    farandole("lab", verb, *arguments, "--name", LAB)


def measured(launcher: str, folder: Path, *options: str) -> dict[str, Any]:
    """One job of all measurements."""
    inventory = ["-i", str(ROOT / "inventory" / LAB)]
    printed = farandole("run", *inventory, launcher, "--", "python", "wire.py", *options, folder=folder)
    result: dict[str, Any] = json.loads(printed[printed.index('{"sums"') :].splitlines()[0])
    return result


def size_of(count: int) -> str:
    """A size as people write it."""
    return next(f"{count >> shift} {unit}" for shift, unit in ((20, "MiB"), (10, "KiB"), (0, "B")) if count >> shift)


def spread(values: list[float], form: str) -> str:
    """The median, and from the smallest to the largest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def sums(jobs: list[dict[str, Any]]) -> None:
    """Print how long sums take; below that, the ratios within each job."""
    print("| | wire | torch.distributed | Horovod | of the wire | times torch.distributed |\n|---|---|---|---|---|---|")
    for size in jobs[0]["sums"]:
        took = {way: [job["sums"][size][way] for job in jobs] for way in ("wire", "torch", "horovod")}
        small = int(size) < SMALL
        shown = [
            spread([1000 * each if small else int(size) * 8 / each / 1e9 for each in some], ".2f" if small else ".1f")
            for some in took.values()
        ]
        ratios = [
            spread([other / own for other, own in zip(took[way], took["horovod"], strict=True)], ".2f")
            for way in ("wire", "torch")
        ]
        print(f"| {size_of(int(size))}, {'ms' if small else 'Gbit/s'} | {' | '.join([*shown, *ratios])} |")


def training(jobs: list[dict[str, Any]]) -> None:
    """Print how training goes."""
    for name in jobs[0]["training"]:
        took = {way: [job["training"][name][way][0] for job in jobs] for way in ("alone", "torch", "horovod")}
        used = {way: [job["training"][name][way][1] for job in jobs] for way in took}
        efficiency = [alone / own for alone, own in zip(took["alone"], took["horovod"], strict=True)]
        against = [other / own for other, own in zip(took["torch"], took["horovod"], strict=True)]
        busier = [own / alone for alone, own in zip(used["alone"], used["horovod"], strict=True)]
        print(
            f"{name}: a step {spread([1000 * each for each in took['horovod']], '.1f')} ms, efficiency "
            f"{spread(efficiency, '.2f')}, {spread(against, '.2f')} times as fast as torch.distributed, "
            f"{spread(busier, '.2f')} times the processor time of a step alone"
        )
    print(f"processor of a job that waits: {spread([100 * job['idle'] for job in jobs], '.1f')} %")


def main() -> None:
    """Measure, and print a table for each launcher, and each delay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--delay-ms", nargs="+", type=float, default=[])
    parser.add_argument("--loss", type=float, default=0, help="per cent of node-2's packets")
    parser.add_argument("--largest", default="64", help="MiB of the largest sum: 64 take up to half a minute with loss")
    wanted = parser.parse_args()
    if wanted.loss and not wanted.delay_ms:
        parser.error("--loss needs --delay-ms")
    try:
        own = ("--kernel", "own", "--memory", "5000") if wanted.delay_ms else ()
        options = [*(["--no-training"] if own else []), "--largest", wanted.largest]
        lab("up", "--nodes", "2", *own)
        farandole("apply", "-i", f"inventory/{LAB}")
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(ROOT / "tests/bench/wire.py", folder)
            for delay in wanted.delay_ms or [None]:
                if delay is not None:
                    lab("fault", "netem", "node-2", "--delay", str(delay), "--loss", str(wanted.loss))
                    print(f"\n## {delay} ms, {wanted.loss} % lost")
                jobs: dict[str, list[dict[str, Any]]] = {launcher: [] for launcher in LAUNCHERS}
                for number in range(wanted.rounds):
                    print(f"round {number + 1} of {wanted.rounds}", file=sys.stderr, flush=True)
                    for launcher, some in jobs.items():
                        some.append(measured(launcher, Path(folder), *options))
                for launcher, some in jobs.items():
                    print(f"\n{launcher}\n")
                    sums(some)
                    print()
                    training(some)
    finally:
        lab("down")


if __name__ == "__main__":
    main()
