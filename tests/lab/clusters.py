"""Real clusters for tests, driven by the commands that users run."""

import json
import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLLECTION = "farandole.cluster."
ENVIRONMENT = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}


@dataclass
class Run:
    """The result of a playbook."""

    rc: int
    output: str

    @property
    def changes(self) -> set[tuple[str, str]]:
        """(task, host) of everything that changed."""
        found, task = set(), ""
        for line in self.output.splitlines():
            if line.startswith("TASK ["):
                task = line.split("[", 1)[1].rsplit("]", 1)[0].removeprefix(COLLECTION)
            elif changed := re.match(r"changed: \[([^\]]+)\]", line):
                found.add((task, changed[1]))
        return found

    def count(self, what: str) -> dict[str, int]:
        """A column of the play recap, by host."""
        rows = re.findall(rf"^(\S+) +: .*\b{what}=(\d+)", self.output, re.MULTILINE)
        return {host: int(number) for host, number in rows}

    @property
    def tasks(self) -> list[str]:
        """The tasks that at least one node has answered, in order."""
        return re.findall(rf"^TASK \[(?:{COLLECTION})?(.*)\]", self.output, re.MULTILINE)


def person(name: str, uid: int, folder: Path, **more: object) -> dict[str, object]:
    """An entry of cluster_users, with a key that is in a folder."""
    key = folder / name
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return {"name": name, "uid": uid, "ssh_keys": [key.with_suffix(".pub").read_text().strip()], **more}


def people(*entries: dict[str, object]) -> tuple[str, str]:
    """The option with which site.yml gets cluster_users."""
    return ("--extra-vars", json.dumps({"cluster_users": entries}))


@dataclass
class Cluster:
    """A lab and the playbooks on it."""

    name: str

    @property
    def inventory(self) -> Path:
        return ROOT / "inventory" / self.name

    @property
    def state(self) -> Path:
        return ROOT / ".farandole" / self.name

    def command(self, *arguments: str, playbook: str = "site.yml") -> list[str]:
        return ["ansible-playbook", "-i", str(self.inventory), playbook, *arguments]

    def play(self, *arguments: str, playbook: str = "site.yml") -> Run:
        done = subprocess.run(
            self.command(*arguments, playbook=playbook),
            cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return Run(done.returncode, done.stdout)

    def play_until(self, task: int | str, playbook: str = "site.yml") -> Run:
        """Start a run and kill it, with all its processes, once the first node has answered that task (a number or a
        name)."""
        process = self._start(playbook, subprocess.PIPE)
        output, begun = "", 0
        assert process.stdout
        for line in process.stdout:
            output += line
            if line.startswith("TASK ["):
                begun += 1
                if task == begun or str(task) in line:
                    os.killpg(process.pid, signal.SIGKILL)
        return Run(process.wait(), output)

    def play_while(self, node: str, condition: str, playbook: str = "site.yml") -> None:
        """Start a run and kill it, with all its processes, as soon as a shell condition holds on a node."""
        process = self._start(playbook, subprocess.DEVNULL)
        script = f"for i in $(seq 6000); do {condition} && exit 0; sleep 0.05; done; exit 1"
        held = self.ssh(node, "sh", "-c", script)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert held.returncode == 0, f"never on {node}: {condition}"

    def _start(self, playbook: str, output: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(playbook=playbook),
            cwd=ROOT, env=ENVIRONMENT, text=True, stdout=output, start_new_session=True,
        )  # fmt: skip

    def farandole(self, *arguments: str) -> str:
        done = subprocess.run(
            ["farandole", "lab", *arguments, "--name", self.name], cwd=ROOT, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ssh(self, node: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as `farandole lab ssh` does, without the third of a second that it takes to start."""
        config = self.inventory / ".ssh" / "config"
        return subprocess.run(
            ["ssh", "-F", config, node, shlex.join(command)],
            text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def job_ssh(self, node: str, target: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run ssh from a node in the same way as a job."""
        return self.ssh(node, "runuser", "-u", "trainer", "--", "ssh", "-o", "BatchMode=yes", target, *command)

    def person_ssh(self, name: str, key: Path, node: str, script: str) -> subprocess.CompletedProcess[str]:
        """Log in as a person does, with a key of their own."""
        config = self.inventory / ".ssh" / "config"
        options = ["-o", "ControlPath=none", "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
        return subprocess.run(
            ["ssh", "-F", config, *options, "-i", key, "-l", name, node, script],
            text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def reset(self, nodes: int) -> None:
        """Replace all nodes with bare ones."""
        self.farandole("down")
        self.farandole("up", "--nodes", str(nodes))
