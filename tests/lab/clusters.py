"""Real clusters for tests, driven by the commands that users run."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from labs import LONG_REASON
from plays import ENVIRONMENT, ROOT, Play, Run

from farandole.lab import lab
from farandole.stack.cache import Builds, lab_builds

__all__ = [
    "ENVIRONMENT",
    "EVERY",
    "LONG",
    "PREPARED",
    "ROOT",
    "Cluster",
    "Run",
    "built_stack",
    "people",
    "person",
    "until",
    "web",
]
# `make test` has no time for those that are marked.
EVERY = "FARANDOLE_EVERY" in os.environ
LONG = pytest.mark.skipif(not EVERY, reason=LONG_REASON)
# Everything but the stack.
QUICK = ("--skip-tags", "stack")
# Arguments with which site.yml leaves a cluster as it is, or sets up a part of it.
PARTLY = {"--check", "--tags"}
# Those that only show more.
SHOWN = {"-vvv", "--diff"}


def until(condition: Callable[[], object], seconds: float = 150) -> float:
    """Wait until something is true; returns the seconds that it took. Slurm looks at waiting jobs once in a minute."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it never happened"
        time.sleep(0.3)
    return time.monotonic() - begun


def built_stack() -> tuple[str, ...]:
    """The option of `farandole lab up` for what site.yml installs by default, if a lab has built it: the last one."""
    wanted = {"frameworks": ["tensorflow", "pytorch"], "pins": [], "accelerator": "cpu", "packages": []}
    built = sorted(Builds(lab_builds()).packed(), key=lambda one: one.path.stat().st_mtime)
    locks = [one.about["lock"] for one in built]
    ids = [lock["id"] for lock in locks if lock["platform"]["os"] == "debian-12" and lock.get("wanted") == wanted]
    return ("--stack", ids[-1]) if ids else ()


# Options of `farandole lab up` for nodes on which little is left to install.
PREPARED = ("--packages", "build-essential,cmake,curl,git,rsync,vim,wget,zstd", *built_stack())


def person(name: str, uid: int, folder: Path, **more: object) -> dict[str, object]:
    """An entry of cluster_users, with a key that is in a folder."""
    key = folder / name
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return {"name": name, "uid": uid, "ssh_keys": [key.with_suffix(".pub").read_text().strip()], **more}


def people(*entries: dict[str, object]) -> tuple[str, str]:
    """The option with which site.yml gets cluster_users."""
    return ("--extra-vars", json.dumps({"cluster_users": entries}))


def web(cluster: "Cluster") -> list[str]:
    """After the boot: where nginx listens on the head, whether Debian's unit may start, and any policy-rc.d."""
    script = (
        "systemctl is-system-running --wait >/dev/null;"
        "ss --no-header -ltnp | grep nginx | grep -o ':[0-9]* ' | tr -d ': ' | sort -u;"
        "systemctl is-enabled nginx; cat /usr/sbin/policy-rc.d 2>/dev/null"
    )
    return cluster.shell("node-1", script).stdout.split()


@dataclass
class Cluster:
    """A lab and the playbooks on it."""

    name: str
    # Whether nothing has been done to its nodes, and the arguments of the last site.yml that succeeded.
    bare: bool = False
    applied: tuple[str, ...] | None = None

    @property
    def inventory(self) -> Path:
        return ROOT / "inventory" / self.name

    @property
    def state(self) -> Path:
        return ROOT / ".farandole" / self.name

    def start(
        self, *arguments: str, playbook: str = "site.yml", before: tuple[str, ...] = (), own_session: bool = True
    ) -> Play:
        """Start a playbook. It is known from then on that the nodes are not bare, and what was done to them."""
        self.bare = False
        if playbook == "site.yml" and not PARTLY & {*arguments}:
            self.applied = None
        return Play(self.inventory, playbook, *arguments, before=before, own_session=own_session)

    def play(self, *arguments: str, playbook: str = "site.yml", before: tuple[str, ...] = ()) -> Run:
        """Run a playbook to its end."""
        before_it, bare = self.applied, self.bare
        done = self.start(*arguments, playbook=playbook, before=before, own_session=False).end()
        if playbook == "site.yml" and not PARTLY & {*arguments}:
            same = tuple(argument for argument in arguments if argument not in SHOWN)
            # A run that was refused leaves everything as it was.
            self.applied = same if done.rc == 0 else None if done.changes else before_it
        self.bare = bare and not done.changes
        return done

    def play_ok(self, *arguments: str, playbook: str = "site.yml", before: tuple[str, ...] = ()) -> Run:
        """Run a playbook that has to succeed."""
        done = self.play(*arguments, playbook=playbook, before=before)
        assert done.rc == 0, done.output
        return done

    def play_failing(self, *arguments: str, playbook: str = "site.yml", before: tuple[str, ...] = ()) -> Run:
        """Run a playbook that has to fail."""
        done = self.play(*arguments, playbook=playbook, before=before)
        assert done.rc != 0, done.output
        return done

    def ensure(self, *arguments: str) -> None:
        """Run site.yml with these arguments, unless that was the last thing that was done with it."""
        if self.applied != arguments:
            self.play_ok(*arguments)

    def play_until(self, task: int | str, playbook: str = "site.yml") -> Run:
        """Start a run and kill it, with all its processes, once a node has answered that task (a number or a name)."""
        run = self.start(playbook=playbook)
        if isinstance(task, int):
            run.until(lambda seen: len(seen.tasks) >= task)
        else:
            run.until(lambda seen: any(task in name for name in seen.tasks))
        return run.end(signal.SIGKILL)

    def play_while(self, node: str, condition: str, playbook: str = "site.yml") -> Run:
        """Start a run and kill it, with all its processes, as soon as a shell condition holds on a node."""
        run = self.start(playbook=playbook)
        held = self.shell(node, f"for i in $(seq 6000); do {condition} && exit 0; sleep 0.05; done; exit 1")
        done = run.end(signal.SIGKILL)
        assert held.returncode == 0, f"never on {node}: {condition}"
        return done

    def _farandole(self, verb: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "farandole", *verb.split(), "-i", str(self.inventory), *arguments]

    def farandole(self, verb: str, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Run a command of farandole, as a user does."""
        return subprocess.run(
            self._farandole(verb, *arguments), cwd=folder, env=ENVIRONMENT, text=True, capture_output=True, check=False
        )

    def begin(
        self, verb: str, *arguments: str, folder: Path = ROOT, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a command of farandole, in a session of its own."""
        return subprocess.Popen(
            self._farandole(verb, *arguments), cwd=folder, env=ENVIRONMENT, text=True,
            stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
        )  # fmt: skip

    def lab(self, *arguments: str) -> str:
        """Run a command of `farandole lab`."""
        done = subprocess.run(
            ["farandole", "lab", *arguments, "--name", self.name], cwd=ROOT, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ssh(self, node: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as `farandole lab ssh` does, without the third of a second that it takes to start."""
        return self._ssh(node, shlex.join(command))

    def shell(self, node: str, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script as root."""
        return self.ssh(node, "sh", "-c", script)

    def _ssh(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ssh", "-F", self.inventory / ".ssh/config", *arguments],
            text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def job_ssh(self, node: str, target: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run ssh from a node in the same way as a job."""
        return self.ssh(node, "runuser", "-u", "trainer", "--", "ssh", "-o", "BatchMode=yes", target, *command)

    def person_ssh(self, name: str, key: Path, node: str, script: str) -> subprocess.CompletedProcess[str]:
        """Log in as a person does, with a key of their own."""
        options = ("-o", "ControlPath=none", "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes")
        return self._ssh(*options, "-i", key, "-l", name, node, script)

    def console(self, node: str, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script as root without checking the node's host key, as at its console."""
        options = ("-o", "GlobalKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no")
        return self._ssh(*options, node, script)

    def readmit(self, node: str) -> None:
        """Give a revoked node a new host key; its other keys it replaces by itself."""
        renew = "rm /etc/ssh/ssh_host_ed25519_key* && ssh-keygen -A && systemctl restart ssh"
        assert self.console(node, renew).returncode == 0
        self.lab("inventory")

    def reset(self, nodes: int, *options: str) -> None:
        """Replace all nodes with bare ones, which may be of another kind."""
        self.lab("down")
        self.lab("up", "--nodes", str(nodes), *options)
        self.bare, self.applied = True, None

    def running(self) -> int:
        """How many nodes it has."""
        up = [node for node in lab.nodes(self.name) if node.state == "running"]
        return len(up) if (self.inventory / "hosts.yml").exists() else 0
