"""The steps of a build: kills, failures, and what the code of a package reaches while it is built."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clusters import QUICK, ROOT, Cluster, Run

NODES = 1
SITE = QUICK
SCRATCH = "/opt/farandole/build/test"
Step = dict[str, object]


@dataclass
class Head:
    """The head, and a playbook that runs the steps of a build there."""

    cluster: Cluster
    playbook: Path

    def plan(self, *steps: Step) -> None:
        tasks = [{"name": "Build", "farandole.cluster.build_step": {"directory": SCRATCH, **step}} for step in steps]
        play = {"hosts": "head", "gather_facts": False, "become": True, "tasks": tasks}
        self.playbook.write_text(json.dumps([play]))

    def build(self, *steps: Step) -> Run:
        self.plan(*steps)
        return self.cluster.play(playbook=str(self.playbook))

    def build_well(self, *steps: Step) -> None:
        done = self.build(*steps)
        assert done.rc == 0, done.output

    def build_until(self, file: str, *steps: Step) -> None:
        """Kill the run on the control machine as soon as this file is in the scratch folder."""
        self.plan(*steps)
        self.cluster.play_while("node-1", f"test -e {SCRATCH}/{file}", playbook=str(self.playbook))

    def shell(self, script: str, folder: str = SCRATCH) -> str:
        """What a script of root prints."""
        return self.cluster.shell("node-1", f"cd {folder}; {script}").stdout

    def job_user(self, script: str) -> int:
        return self.cluster.ssh("node-1", "runuser", "-u", "trainer", "--", "sh", "-c", script).returncode


@pytest.fixture
def head(site: Cluster, tmp_path: Path) -> Iterator[Head]:
    yield Head(site, tmp_path / "build.yml")
    site.shell("node-1", "rm -rf /opt/farandole/build /var/cache/farandole-build /var/cache/*/farandole-build")


def test_a_build_survives_its_control_machine_and_is_not_restarted(head: Head) -> None:
    step: Step = {"name": "a long build", "script": "echo begun >>begun; sleep 15; echo ended >ended"}
    head.build_until("begun", step)
    assert head.shell("cat ended") == ""
    head.build_well(step)
    assert head.shell("cat begun ended").split() == ["begun", "ended"]
    # Each run is in the node's log, and not each look at how far it is.
    logged = head.shell("journalctl --quiet --output=cat --grep='^Invoked with .*echo ended >ended'")
    assert len(logged.splitlines()) == 2, logged


def two_steps(build: str, seconds: int) -> list[Step]:
    """Two steps, the second of which takes a while."""
    scripts = {"first": "true", "second": f"echo begun >>begun; sleep {seconds}"}
    return [
        {
            "name": name,
            "directory": f"{SCRATCH}/{name}",
            "script": f"{script}; echo done >>{SCRATCH}/{name}.done",
            "build": build,
            "creates": f"{SCRATCH}/{name}.done",
        }
        for name, script in scripts.items()
    ]


def test_later_steps_survive_too_and_finished_steps_are_not_repeated(head: Head) -> None:
    head.build_until("second/begun", *two_steps("a", 15))
    left = "cat first.done second/begun second.done 2>/dev/null"
    assert head.shell(left).split() == ["done", "begun"]
    head.build_well(*two_steps("a", 15))
    assert head.shell(left).split() == ["done", "begun", "done"]
    # Steps left running by another build are ended, so that the new one starts at once.
    head.shell(f"rm -r {SCRATCH}")
    head.build_until("second/begun", *two_steps("b", 600))
    head.build_well(*two_steps("c", 0))


AWAIT = "for i in $(seq 100); do [ ! -e ../second/done ] || break; sleep 0.1; done; rm ../second/done"


def beside(script: str) -> list[Step]:
    """A step that is started, a second one, and the wait for the first."""
    first = {"name": "first", "directory": f"{SCRATCH}/first", "unit": "farandole-build-first", "build": "a"}
    second: Step = {"name": "second", "directory": f"{SCRATCH}/second", "script": "touch done", "build": "a"}
    return [{**first, "script": script, "wait": False}, second, {**first, "script": script}]


def test_a_step_can_run_beside_another_and_be_waited_for(head: Head) -> None:
    head.build_well(*beside(f"echo begun >>begun; {AWAIT}"))
    assert head.shell("cat first/begun") == "begun\n"
    # If it fails, that is said when it is waited for.
    head.shell(f"rm -r {SCRATCH}")
    assert "first failed (7)" in head.build(*beside(f"{AWAIT}; exit 7")).output
    # If its build is given up, the first step of another build ends it.
    head.shell(f"rm -r {SCRATCH}")
    head.build_until("first/begun", *beside("echo begun >begun; sleep 600"))
    head.build_well(*two_steps("b", 0))
    assert head.shell("systemctl is-active farandole-build-first") == "inactive\n"


def test_a_failed_build_shows_the_end_and_the_path_of_its_log(head: Head) -> None:
    failed = head.build({"name": "a long build", "script": "echo 'x.c:1:1: error: no such thing' >&2; exit 7"})
    assert failed.rc != 0
    assert "a long build failed (7)" in failed.output
    assert "error: no such thing" in failed.output
    assert f"{SCRATCH}/a-long-build.log" in failed.output
    assert head.shell("systemctl is-active farandole-build") == "inactive\n"


@pytest.mark.parametrize("place", ["/var/tmp/farandole-build", "/home/trainer"])  # noqa: S108
def test_root_does_not_run_files_planted_by_the_job_user(head: Head, place: str) -> None:
    """Python searches its working directory first, so one planted file would be enough."""
    folder, owned = f"{place}/test", "/root/owned"
    assert head.job_user(f'mkdir -p {folder} && echo \'open("{owned}", "w")\' >{folder}/venv.py') == 0
    # The planted file works for whoever works there.
    assert head.shell(f"python3 -m venv --help && rm {owned} && echo worked", folder).endswith("worked\n")
    script = "echo begun >>begun; python3 -m venv --help"
    refused = head.build({"name": "a long build", "directory": folder, "script": script})
    assert refused.rc != 0
    assert f"a long build: root does not build in {folder}" in refused.output
    assert head.shell(f"ls {owned} {folder}/begun") == ""
    head.shell(f"rm -rf {folder} /var/tmp/farandole-build")


def test_a_build_is_isolated_from_the_job_user(head: Head) -> None:
    assert head.job_user(f"mkdir -p {SCRATCH} && touch {SCRATCH}/venv.py") != 0
    head.job_user("touch /tmp/planted")
    head.build_well({"name": "a long build", "script": "echo $PATH $HOME $PWD >seen; ls -A /tmp >>seen"})
    assert head.shell("cat seen; rm /tmp/planted") == f"/usr/sbin:/usr/bin:/sbin:/bin {SCRATCH} {SCRATCH}\n"


PACKAGE: Step = {"name": "the code of a package", "root": False}
LOG = "cat the-code-of-a-package.log"
CONFINED = """
id -u
for path in /opt /opt/farandole /etc /srv/farandole .; do touch $path/written && echo $path; done
ls /home/trainer /root && echo home
cat /etc/shadow && echo shadow
grep -c eth /proc/net/dev && echo network
touch $CACHE_DIRECTORY/made
sleep 600 &
"""


def test_the_code_of_a_package_is_confined_while_it_is_built(head: Head) -> None:
    head.shell("mkdir -p /srv/farandole")
    head.build_well({**PACKAGE, "script": CONFINED})
    output = head.shell(LOG).splitlines()
    refused = [line for line in output if "Permission denied" in line or "Read-only file system" in line]
    assert (len(refused), len(output)) == (8, 10), output
    assert head.shell("ls /var/cache/private/farandole-build; pgrep --full 'sleep [6]00'") == "made\n"


# Socket of a service, shared memory, a name space in which it is root; a program that outlives the step if it can.
REACHING = """
connect='import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(sys.argv[1])'
python3 -c "$connect" /run/systemd/journal/stdout && echo service
touch /dev/shm/left && echo memory
unshare --user --map-root-user id -u && echo namespace
(trap '' TERM HUP INT; while :; do sleep 0.2; done) &
"""


@pytest.mark.parametrize(("root", "reached"), [(False, ["memory"]), (True, ["service", "memory", "namespace"])])
def test_the_code_of_a_package_reaches_no_service_and_is_ended_at_once(
    head: Head, root: bool, reached: list[str]
) -> None:
    started = time.monotonic()
    head.build_well({**PACKAGE, "script": REACHING, "root": root})
    # Root's own steps, which are trusted, get the usual 90 seconds.
    assert (time.monotonic() - started > 60) == root
    assert [line for line in head.shell(LOG).splitlines() if line in ("service", "memory", "namespace")] == reached
    # The memory was its own.
    assert (head.shell("rm /dev/shm/left && echo removed") == "removed\n") == root


TAKING = """
mkdir -p $CACHE_DIRECTORY/wheel
cd $CACHE_DIRECTORY/wheel
touch evil-1.0-py3-none-any.whl other-1.0-py3-none-any.whl "$(printf 'evil-2\\n--pre\\nx.whl')"
chmod 4755 evil-1.0-py3-none-any.whl || chmod 755 evil-1.0-py3-none-any.whl
ln -s /etc/shadow evil-3-py3-none-any.whl
"""


@pytest.mark.parametrize("check", ["", "! -name '*[!A-Za-z0-9._+!-]*'", "-type f"])
def test_root_takes_the_wheel_and_nothing_else(head: Head, check: str) -> None:
    """Each of the two checks is needed."""
    take = (ROOT / "roles/stack/files/take.sh").read_text()
    assert check in take
    without = take.replace(check, "") if check else take
    head.build_well(
        {**PACKAGE, "script": TAKING}, {"name": "take the wheel", "script": without, "environment": {"NAME": "evil"}}
    )
    listed = head.shell("tar --list --verbose --zstd --file wheel.tar.zst")
    wheels = [line.split()[0] for line in listed.splitlines()[1:]]
    assert (wheels == ["-rwxr-xr-x"]) == (not check), listed
