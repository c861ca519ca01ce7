"""Nodes whose operating system is upgraded one after the other, while a run goes on."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from clusters import Cluster, built_stack, until

NODES = 4
ALL = [f"node-{number}" for number in range(1, NODES + 1)]
PACKAGES = (
    "build-essential,chrony,cmake,curl,git,gpg,gpg-agent,rsync,vim,wget,zstd,"
    "libpmix-dev,mariadb-server,slurm-wlm,slurm-wlm-mysql-plugin,slurm-wlm-torque,slurmdbd"
)
KIND = ("--kernel", "own", "--memory", "3500", "--packages", PACKAGES, *built_stack())
SITE = ("--extra-vars", '{"stack_frameworks": ["tensorflow", "pytorch"], "slurm_enabled": true}')
# A package with two versions, whose second one cannot be installed as long as a file says so.
REPOSITORY = """
set -eu
rm -f /etc/bad /etc/slow
mkdir -p /srv/debs && cd /srv/debs
for version in 1 2; do
    mkdir -p $version/DEBIAN $version/etc
    cat >$version/DEBIAN/control <<END
Package: thing
Version: $version
Architecture: all
Maintainer: root
Description: thing
END
    echo /etc/thing >$version/DEBIAN/conffiles
    echo "version $version" >$version/etc/thing
    cat >$version/DEBIAN/postinst <<END
#!/bin/sh
[ ! -e /etc/slow ] || sleep 40
[ ! -e /etc/bad ] || { echo it is bad >&2; exit 1; }
END
    chmod 755 $version/DEBIAN/postinst
    dpkg-deb --build $version thing_$version.deb >/dev/null
done
dpkg-scanpackages --multiversion . >Packages
# Its own packages, so nobody else has signed them.
printf 'Date: %s\\nSHA256:\\n %s %s Packages\\n' "$(date -Ru)" "$(sha256sum <Packages | cut -d ' ' -f 1)" \\
    "$(stat --format %s Packages)" >Release
[ -e key.gpg ] || gpg --batch --quiet --passphrase '' --quick-generate-key thing
gpg --batch --yes --export >key.gpg
gpg --batch --yes --clearsign --output InRelease Release
echo 'deb [signed-by=/srv/debs/key.gpg] file:/srv/debs ./' >/etc/apt/sources.list.d/thing.list
dpkg --force-confold --install thing_1.deb >/dev/null
echo mine >>/etc/thing
"""
# As if its package had been upgraded while it runs.
OTHER_DRIVER = """
set -eu
modprobe 8021q
cd "/lib/modules/$(uname -r)"
mkdir -p updates
sed 's/version=1\\.8/version=1.9/' "$(modinfo -n 8021q)" >updates/8021q.ko
depmod
"""
WAITS = (
    "import pathlib, time\nwhile not pathlib.Path.home().joinpath('go').exists():\n    time.sleep(1)\nprint('whole')\n"
)
TRIES = "for try in $(seq 20000); do ps -eo args | grep -q '^dpkg .*--configure' && exit; done; exit 1"
# Until a file is gone.
LOCKED = """
touch /run/locked
python3 -c '
import fcntl, pathlib, time
with open("/var/lib/dpkg/lock-frontend", "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    while pathlib.Path("/run/locked").exists():
        time.sleep(0.5)
' >/dev/null 2>&1 &
"""


def versions(cluster: Cluster) -> list[str]:
    return [cluster.ssh(node, "dpkg-query", "-W", "-f", "${Version}", "thing").stdout for node in ALL]


def boots(cluster: Cluster) -> list[str]:
    return [cluster.ssh(node, "cat", "/proc/sys/kernel/random/boot_id").stdout for node in ALL]


@pytest.fixture(scope="module", autouse=True)
def queue(cluster: Cluster) -> Iterator[None]:
    """The inventory has what SITE says of a queue."""
    folder = cluster.inventory / "group_vars"
    folder.mkdir(exist_ok=True)
    (folder / "cluster.yml").write_text("slurm_enabled: true\n")
    yield
    (folder / "cluster.yml").unlink()
    folder.rmdir()


@pytest.fixture
def due(site: Cluster) -> Cluster:
    """The nodes have one package to upgrade, and it fails on the second one."""
    for node in ALL:
        done = site.shell(node, REPOSITORY)
        assert done.returncode == 0, done.stderr
    site.shell("node-2", "touch /etc/bad")
    return site


def test_the_first_that_fails_stops_it_and_it_goes_on_from_there(due: Cluster, tmp_path: Path) -> None:
    assert due.shell("node-3", OTHER_DRIVER).returncode == 0
    said = due.farandole("upgrade", "--check").stdout
    assert re.search(r"node-1, node-2, node-4 +1 package\n", said), said
    assert re.search(r"node-3 +1 package, a reboot for the driver 8021q\n", said), said
    assert "thing 1 to 2" in said
    done = due.farandole("upgrade", "--yes")
    assert done.returncode == 1
    assert "node-2: its upgrade failed" in done.stderr
    assert "it is bad" in done.stdout
    assert "its upgrade failed" in due.farandole("node list").stdout
    assert versions(due)[2:] == ["1", "1"]
    due.shell("node-2", "rm /etc/bad")
    (tmp_path / "wait.py").write_text(WAITS)
    started = due.farandole("run", "--detach", "--hosts", "node-3,node-4", "--", "python", "wait.py", folder=tmp_path)
    assert started.returncode == 0, started.stderr
    before = boots(due)
    upgrade = due.begin("upgrade", "--yes", "--reboot", "always")
    # node-3 waits for its run, and what is submitted now for node-3.
    until(lambda: "node-3" in due.farandole("node list").stdout, 1800)
    batch = "sbatch --parsable --nodelist=node-3 --output=/dev/null --wrap=true"
    job = due.ssh("node-1", "runuser", "-l", "trainer", "-c", batch).stdout.strip()
    time.sleep(60)
    assert (versions(due)[2], boots(due)[2]) == ("1", before[2])
    for node in ("node-3", "node-4"):
        due.ssh(node, "touch", "/home/trainer/go")
    said, failed = upgrade.communicate()
    print(said)
    assert upgrade.returncode == 0, said + failed
    assert re.search(r"^queue\.node-2 +not measured .* the queue gives it no jobs now$", said, re.MULTILINE)
    state = f"sacct --noheader --parsable2 --allocations --jobs={job} --format=state,nodelist"
    assert due.shell("node-1", state).stdout == "COMPLETED|node-3\n"
    assert "drain" not in due.ssh("node-1", "sinfo", "--noheader", "--format=%T").stdout
    assert versions(due) == ["2"] * NODES
    assert not {*before} & {*boots(due)}
    assert [due.ssh(node, "tail", "-n", "1", "/etc/thing").stdout for node in ALL] == ["mine\n"] * NODES
    assert "whole" in due.farandole("logs", folder=tmp_path).stdout
    assert due.farandole("node list").stdout == "no node is left out\n"
    assert due.farandole("status").returncode == 0
    said = due.farandole("upgrade", "--yes").stdout
    assert re.search(r"node-1 to node-4 +nothing", said), said


def test_an_upgrade_waits_for_a_job_that_has_no_process_on_the_node(due: Cluster) -> None:
    # Its one step is on the first of its nodes.
    batch = (
        "sbatch --parsable --nodelist=node-3,node-4 --output=/dev/null --wrap='until [ -e ~/end ]; do sleep 1; done'"
    )
    job = due.ssh("node-1", "runuser", "-l", "trainer", "-c", batch).stdout.strip()
    until(lambda: "RUNNING" in due.shell("node-1", f"squeue --noheader --format=%T --jobs={job}").stdout)
    # On nodes with cgroups, there is one called "slurmstepd infinity".
    assert due.shell("node-4", "pgrep --full '^slurmstepd: '").returncode == 1
    upgrade = due.begin("upgrade", "--yes", "--reboot", "never", "--hosts", "node-4")
    until(lambda: "node-4" in due.farandole("node list").stdout, 600)
    time.sleep(90)
    assert versions(due)[3] == "1"
    due.ssh("node-3", "touch", "/home/trainer/end")
    said, failed = upgrade.communicate()
    assert upgrade.returncode == 0, said + failed
    state = f"sacct --noheader --parsable2 --allocations --jobs={job} --format=state"
    assert due.shell("node-1", state).stdout == "COMPLETED\n"
    assert versions(due)[3] == "2"


def descendants(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from descendants(int(child))


def configures(cluster: Cluster, node: str) -> bool:
    """Whether dpkg is configuring the package."""
    return "thing.postinst" in cluster.ssh(node, "ps", "-eo", "args").stdout


def cut_off(upgrade: subprocess.Popen[str]) -> None:
    """What a power cut of the control machine leaves of a command."""
    for pid in [*descendants(upgrade.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    upgrade.wait()


def test_an_upgrade_goes_on_after_power_cuts_of_the_control_machine_and_of_the_head(
    due: Cluster, tmp_path: Path
) -> None:
    due.shell("node-2", "rm /etc/bad")
    for node in ("node-1", "node-2"):
        due.shell(node, "touch /etc/slow")
    wave = ("--hosts", "node-2,node-1", "--yes")
    upgrade = due.begin("upgrade", *wave)
    until(partial(configures, due, "node-2"), 900)
    cut_off(upgrade)
    assert "node-2" in due.farandole("node list").stdout
    # Others use apt, too, as unattended upgrades do.
    until(lambda: not configures(due, "node-2"))
    assert due.shell("node-2", LOCKED).returncode == 0
    upgrade = due.begin("upgrade", *wave)
    for _ in range(2):
        assert due.shell("node-2", TRIES).returncode == 0
        # Each one ends at once, and the next comes after five seconds.
        time.sleep(3)
    due.ssh("node-2", "rm", "/run/locked")
    until(partial(configures, due, "node-1"), 900)
    refused = due.farandole("run", "--hosts", "node-3", "--", "true", folder=tmp_path)
    assert "the head or the builder is being upgraded, and may reboot: try again later" in refused.stderr, (
        refused.stderr
    )
    due.lab("fault", "kill", "node-1")
    said = "".join(upgrade.communicate())
    assert upgrade.returncode == 1
    assert "node-1: its upgrade failed" in said, said
    due.lab("fault", "start", "node-1")
    due.shell("node-1", "rm /etc/slow")
    done = due.farandole("upgrade", *wave)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(due)[:2] == ["2", "2"]
    assert [due.ssh(node, "dpkg", "--audit").stdout for node in ("node-1", "node-2")] == ["", ""]
    assert due.farandole("node list").stdout == "no node is left out\n"
    assert due.farandole("status").returncode == 0


def test_a_node_that_does_not_come_back_stops_it(due: Cluster) -> None:
    due.shell("node-2", "rm /etc/bad")
    wave = ("--hosts", "node-2,node-3", "--yes")
    before = due.ssh("node-3", "cat", "/proc/sys/kernel/random/boot_id").stdout
    upgrade = due.begin("upgrade", *wave, "--reboot", "always")
    until(lambda: due.ssh("node-2", "systemctl", "is-system-running").stdout not in {"running\n", "degraded\n"}, 900)
    due.lab("fault", "kill", "node-2")
    said = "".join(upgrade.communicate())
    print(said)
    assert upgrade.returncode == 1
    assert "node-2: its upgrade failed" in said, said
    assert "root cause [reboot-lost]: it did not come back from its reboot in time" in said, said
    assert "node-2" in due.farandole("node list").stdout
    assert versions(due)[2] == "1"
    assert due.ssh("node-3", "cat", "/proc/sys/kernel/random/boot_id").stdout == before
    due.lab("fault", "start", "node-2")
    done = due.farandole("upgrade", *wave)
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(due)[1:3] == ["2", "2"]
    assert due.farandole("node list").stdout == "no node is left out\n"


def test_a_node_that_was_away_is_proven_before_it_gets_jobs(site: Cluster) -> None:
    assert site.farandole("node exclude", "node-3", "--why", "its fan is loud").returncode == 0
    site.play_ok("--limit", "node-1", "--tags", "fabric")
    hosts = site.ssh("node-1", "cat", "/etc/farandole/hostfile").stdout
    assert "node-3" not in hosts and "node-2" in hosts
    # Meanwhile somebody has changed it.
    site.shell("node-3", "echo >>/opt/farandole/current/venv/pyvenv.cfg; rm /etc/farandole/hostfile")
    done = site.farandole("node include", "node-3", "--prove")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "green" in done.stdout and "node-3 takes part again" in done.stdout
    assert "node-3" in site.ssh("node-1", "cat", "/etc/farandole/hostfile").stdout
    assert site.farandole("status").returncode == 0


def test_after_a_power_cut_of_all_nodes_the_queue_gives_jobs_to_those_that_are_proven(site: Cluster) -> None:
    """Slurm alone would not see that they have booted, as it was off as well."""
    batch = "sbatch --parsable --nodes=4 --output=/dev/null --wrap='srun hostname'"
    for verb in ("kill", "start"):
        for node in ALL:
            site.lab("fault", verb, node)
    states = partial(site.shell, "node-1", "sinfo --Node --noheader --format='%N %T'")
    until(lambda: "node-4" in states().stdout and not re.search(r"idle|mixed|\*", states().stdout), 600)
    job = site.ssh("node-1", "runuser", "-l", "trainer", "-c", batch).stdout.strip()
    time.sleep(60)
    assert site.shell("node-1", f"squeue --noheader --format=%T --jobs={job}").stdout == "PENDING\n"
    assert "next, to take back what was down: farandole apply" in site.farandole("status").stdout
    done = site.farandole("apply", *SITE)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the queue gives them jobs again: node-1 to node-4" in done.stdout
    until(lambda: "COMPLETED" in site.shell("node-1", f"sacct -nXj {job} --format=state").stdout, 300)
    assert site.farandole("status").returncode == 0


def test_a_new_machine_takes_the_place_of_one_that_is_gone(site: Cluster) -> None:
    former = site.ssh("node-4", "cat", "/etc/ssh/ssh_host_ed25519_key").stdout
    of_queue = partial(site.ssh, "node-1", "sha256sum", "/etc/munge/munge.key")
    known = of_queue().stdout
    print_of = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub | cut -d ' ' -f 2"
    refused = site.farandole("replace", "node-4", "--host-key", "SHA256:x")
    assert refused.returncode == 1
    assert "knows from before" in refused.stderr
    # A bare machine with keys of its own.
    assert site.farandole("remove", "--hosts", "node-4", "--accounts", "--yes").returncode == 0
    assert site.console("node-4", "rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh").returncode == 0
    site.farandole("node exclude", "node-4", "--why", "its board is broken")
    key = site.console("node-4", print_of).stdout.strip()
    assert "--host-key" in site.farandole("replace", "node-4").stderr
    batch = "sbatch --parsable --nodes=2 --nodelist=node-2,node-3 --output=/dev/null --wrap='srun sleep 3000'"
    job = site.ssh("node-1", "runuser", "-l", "trainer", "-c", batch).stdout.strip()
    done = site.farandole("replace", "node-4", "--host-key", key)
    assert done.returncode == 0, done.stdout + done.stderr
    # It is proven first, and jobs on other nodes go on while the queue gets a new key.
    assert re.search(r"^queue\.node-4 +not measured .* the queue gives it no jobs now$", done.stdout, re.MULTILINE)
    assert site.shell("node-1", f"squeue --noheader --format=%T --jobs={job}; scancel {job}").stdout == "RUNNING\n"
    assert site.farandole("status").returncode == 0
    assert of_queue().stdout != known
    everywhere = site.ssh("node-1", "runuser", "-l", "trainer", "-c", "srun --nodes=4 hostname")
    assert sorted(everywhere.stdout.split()) == ALL, everywhere.stderr
    # The former machine comes back.
    back = f"cat >/etc/ssh/ssh_host_ed25519_key <<'END'\n{former}END\nrm /etc/ssh/*-cert.pub; systemctl restart ssh"
    assert site.console("node-4", back).returncode == 0
    assert "revoked by file" in site.job_ssh("node-1", "node-4", "true").stderr
    assert site.farandole("status").returncode == 1
