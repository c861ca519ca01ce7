"""Jobs on two nodes with kernels of their own, whose packets are late or whose clocks are set while they run."""

import json
import re
import shlex
import time

import pytest
from clusters import Cluster, built_stack, until

from farandole.links.examine import links_in
from farandole.links.predict import TrainingJob, measured, predict

NODES = 2
PACKAGES = "build-essential,chrony,cmake,curl,git,rsync,vim,wget,zstd"
KIND = ("--kernel", "own", "--memory", "5000", "--packages", PACKAGES, *built_stack())
SITE = ()
BOTH = ["node-1", "node-2"]
SAMPLE = "/opt/farandole/samples/gradient_steps.py"
# What a prediction may differ from what is measured with two cores for both nodes, this test and Ansible.
FAR = 0.5


def step_ms(cluster: Cluster, *options: str) -> dict[str, float]:
    """What the sample measures with 10 MB of gradients and a step of a second."""
    job = ["horovodrun", "--gloo", "-np", "2", "-H", "node-1:1,node-2:1", "python", SAMPLE, *options]
    job += ["--model-mb", "10", "--step-ms", "1000", "--json", "--steps", "5", "--seconds", "20"]
    command = f"cd / && OMP_NUM_THREADS=1 {shlex.join(job)}"
    done = cluster.ssh("node-1", "runuser", "-u", "trainer", "--", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    took: dict[str, float] = json.loads(re.findall(r'\{"sample".*\}', done.stdout)[-1])
    return took


@pytest.mark.parametrize("delay_ms", [0.1, 1, 5, 20])
def test_a_prediction_holds_although_packets_are_late(site: Cluster, delay_ms: float) -> None:
    for node in BOTH:
        site.lab("fault", "throttle", node, "--mbit", "200")
    site.lab("fault", "netem", "node-2", "--delay", str(delay_ms))
    try:
        site.farandole("preflight")
        links = measured(links_in(site.state / "preflight.json"), BOTH)
        assert links
        for overlaps, options in ((True, ()), (False, ("--grouped",))):
            took = step_ms(site, *options)
            job = TrainingJob(10, took["alone_ms"], mpi=False, overlaps=overlaps, turns=False)
            error = predict(job, links.network, NODES).step_ms / took["together_ms"] - 1
            print(f"{delay_ms} ms, overlapping {overlaps}: {took['together_ms']:.0f} ms, predicted {error:+.0%}")
            assert abs(error) < FAR
    finally:
        for node in BOTH:
            site.lab("fault", "heal", node)


@pytest.mark.parametrize("node", BOTH)
@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_validation_survives_that_a_clock_is_set(site: Cluster, node: str, seconds: int) -> None:
    done = site.begin("validate", "--quick")
    try:
        until(lambda: site.shell(node, "pgrep -u trainer -f python").stdout)
        site.lab("fault", "skew", node, "--seconds", str(seconds))
        # Certificates are valid on a node whose clock has just been set back.
        assert site.job_ssh(*BOTH, "hostname").stdout == "node-2\n"
        begun = time.monotonic()
        output, errors = done.communicate(timeout=400)
        print(f"{node} {seconds:+d} s: validated after another {time.monotonic() - begun:.0f} s")
        assert done.returncode == 0, output + errors
    finally:
        done.kill()
        site.lab("fault", "heal", node)
