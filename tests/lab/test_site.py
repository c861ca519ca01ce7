"""Properties of the whole of site.yml, starting from bare nodes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clusters import LONG, PREPARED, QUICK, Cluster, web
from elsewhere import SAFE, install, run
from plays import play

from farandole.jobs.ask import COMMAND

NODES = 2
KIND = PREPARED
TWO = ("--limit", "node-1,node-2")
SECRET = "correct horse battery staple"  # noqa: S105, it protects the CA of a lab

# Like another control machine, which cannot see this one's processes.
ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc")
# Runs only what is tagged `always`: preflight, and the lock of site.yml.
LOCK = ("--tags", "no-such-tag", *QUICK)


def snapshot(cluster: Cluster, node: str) -> str:
    """All files below /etc, all accounts and all packages, as one text."""
    script = "cd / && find etc -type f -exec sha256sum {} + | sort -k 2; getent passwd; dpkg --get-selections"
    return cluster.shell(node, script).stdout


@pytest.fixture
def joining(cluster: Cluster) -> Cluster:
    """Two nodes after site.yml, and a third one that a run has left out."""
    if cluster.applied != TWO:
        if cluster.running() != 2:
            cluster.reset(2, *KIND)
        cluster.ensure()
        cluster.lab("up", "--nodes", "3")
        cluster.ensure(*TWO)
    return cluster


@pytest.fixture
def site(cluster: Cluster) -> Cluster:
    """Three nodes after site.yml."""
    if cluster.running() != 3:
        cluster.lab("up", "--nodes", "3")
        cluster.applied = None
    cluster.ensure()
    return cluster


def test_check_mode_changes_nothing_and_predicts_the_changes(bare: Cluster) -> None:
    # Regression test: with such a folder any account could keep the control machine from sending files.
    block = ("runuser", "-u", "nobody", "--", "mkdir", "/var/tmp/farandole-landing-0")  # noqa: S108
    assert bare.ssh("node-1", *block).returncode == 0
    before = snapshot(bare, "node-1")
    predicted = bare.play_ok("--check", "--diff")
    assert snapshot(bare, "node-1") == before
    assert not (bare.state / "ca").exists()
    done = bare.play_ok()
    assert predicted.changes == done.changes
    assert done.changes
    landings = bare.shell("node-1", "cd /var/tmp && ls -d farandole-*").stdout
    assert landings == "farandole-landing-0\n"
    assert web(bare) == ["8480", "masked"]


@LONG
def test_limit_leaves_a_third_node_bare(joining: Cluster) -> None:
    assert joining.ssh("node-3", "id", "trainer").returncode == 1
    assert joining.ssh("node-3", "test", "-e", "/etc/farandole").returncode == 1


@LONG
def test_a_node_that_loses_power_while_joining_recovers_and_leaves_the_others_unchanged(joining: Cluster) -> None:
    # The run is killed before it turns to the other nodes.
    killed = joining.play_while("node-3", "grep -qs half-installed /var/lib/dpkg/updates/*")
    joining.lab("fault", "kill", "node-3")
    assert "preflight : Check the nodes" in killed.tasks
    assert {host for _, host in killed.changes} <= {"node-3"}
    joining.lab("fault", "start", "node-3")
    # A state that is rarely hit: a package at the very end of unpacking, as dpkg records it.
    torn = "/^Package: libzstd1$/,/^Status:/ s/^Status: .*/Status: install reinstreq unpacked/"
    joining.ssh("node-3", "sed", "--in-place", torn, "/var/lib/dpkg/status")
    assert "libzstd1" in joining.ssh("node-3", "dpkg", "--audit").stdout
    done = joining.play_ok()
    assert joining.ssh("node-3", "dpkg", "--audit").stdout == ""
    assert {host for _, host in done.changes} == {"node-3", "node-1"}
    # The control machine signs; Ansible attributes that to the first host.
    assert {task for task, host in done.changes if host == "node-1"} == {
        "ssh_trust : Sign the keys of all nodes on the control machine"
    }
    assert joining.job_ssh("node-1", "node-3", "hostname").stdout == "node-3\n"


def test_the_second_run_changes_nothing_and_asks_each_node_once(site: Cluster) -> None:
    done = site.play_ok("-vvv")
    assert done.count("changed") == {"node-1": 0, "node-2": 0, "node-3": 0}, done.output
    logins = Counter(re.findall(r"^<(\S+)> SSH: EXEC", done.output, re.MULTILINE))
    # Other than the head, for all that the following tasks want to know.
    assert min(logins.values()) == 1, logins
    # Of a stack in which nothing was touched since, no file has to be read.
    for node in ("node-1", "node-3"):
        assert site.shell(node, "cd /opt/farandole/current/ && find . -newercc manifest.json").stdout == ""


@LONG
def test_the_user_and_the_key_that_are_typed_win_over_the_inventory(site: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    assert site.farandole("preflight").returncode == 0
    for option in (("--user", "nosuchuser"), ("--private-key", str(key))):
        refused = site.farandole("preflight", *option)
        assert (refused.returncode, "[login-denied]" in refused.stdout) == (1, True), option
        runs = site.farandole("runs", *option)
        assert (runs.returncode, "Permission denied" in runs.stderr) == (1, True), option
    # Plain Ansible takes its options for less than the inventory.
    plain = site.play("--user", "nosuchuser", playbook="playbooks/preflight.yml")
    assert (plain.rc, "[option-ignored]" in plain.output) == (2, True)


def status(cluster: Cluster) -> tuple[int, dict[str, Any], str]:
    """The exit status, and what is said to programs and to people."""
    done, shown = cluster.farandole("status", "--json"), cluster.farandole("status")
    assert done.returncode == shown.returncode, done.stderr
    assert CONTROL.search(shown.stdout) is None
    return done.returncode, json.loads(done.stdout), shown.stdout


# Root of a node can let it say anything, as much and as slowly as it likes.
LIES = {
    """printf '{"stack": "%s\\033[2J", "slots": {}, "uses": []}\\n' all-is-well""": "answer-malformed",
    "yes all is well": "answer-malformed",
    "sleep 60": "node-silent",
}
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def test_status_tells_the_truth_in_seconds_whatever_a_node_does(site: Cluster) -> None:
    code, answer, shown = status(site)
    assert (code, answer["good"]) == (0, True), shown
    lock = answer["lock"]
    assert {node["stack"] for node in answer["nodes"].values()} == {lock}
    assert all(node["slots"] > 0 for node in answer["nodes"].values())
    current = "/opt/farandole/current"
    assert site.ssh("node-2", "mv", current, f"{current}.away").returncode == 0
    code, answer, _ = status(site)
    assert (code, answer["nodes"]["node-2"]["code"]) == (1, "node-not-set-up")
    assert site.ssh("node-2", "mv", f"{current}.away", current).returncode == 0
    for lie, liar in LIES.items():
        attack = f"case $BASH_EXECUTION_STRING in '{COMMAND}') {lie};; esac"
        assert site.shell("node-2", f"echo {shlex.quote(attack)} > /root/.bashrc").returncode == 0
        code, answer, shown = status(site)
        assert (code, answer["nodes"]["node-1"]["code"], answer["nodes"]["node-2"]["code"]) == (1, "", liar), shown
    assert site.ssh("node-2", "rm", "/root/.bashrc").returncode == 0
    site.lab("fault", "pause", "node-2")
    code, answer, shown = status(site)
    assert (code, answer["nodes"]["node-2"]["code"]) == (1, "login-timeout"), shown
    assert "no answer (ssh root@" in shown
    site.lab("fault", "resume", "node-2")


LOOSEN = ("chmod", "600", "/etc/security/limits.d/90-farandole.conf")
LOOSENED = "changed: base : Write limits and package holds on node-2\n"


def test_apply_says_what_changes_also_in_another_terminal(site: Cluster) -> None:
    assert site.ssh("node-2", *LOOSEN).returncode == 0
    with site.begin("apply", *QUICK) as run:
        assert run.stdout
        assert run.stdout.readline() == "Preflight\n"
        watched = site.farandole("watch").stdout
        output = run.stdout.read()
    assert run.returncode == 0, output
    assert output.count("changed: ") == 1
    assert LOOSENED in output
    assert LOOSENED in watched
    # Plain Ansible has the same summary, and is watched in the same way.
    summary = r"^\d hosts in 0:\d\d: nothing changed, nothing failed$"
    assert re.search(summary, site.play_ok(*QUICK).output, re.MULTILINE)
    assert re.search(summary, site.farandole("watch").stdout, re.MULTILINE)


def test_apply_says_what_was_done_when_it_is_interrupted(site: Cluster) -> None:
    assert site.ssh("node-2", *LOOSEN).returncode == 0
    with site.begin("apply", *QUICK) as run:
        assert run.stdout
        assert LOOSENED in iter(run.stdout.readline, "")
        os.killpg(run.pid, signal.SIGINT)
        output, error = run.communicate(timeout=15)
    assert run.returncode == 130
    assert "interrupted during: " in output
    assert "until then 1 change on node-2\n" in output
    assert "run the same command again" in error


@LONG
def test_apply_ends_with_cause_and_cure(site: Cluster) -> None:
    site.lab("fault", "cut", "node-2")
    try:
        failed = site.farandole("apply", *QUICK)
    finally:
        site.lab("fault", "heal", "node-2")
    assert failed.returncode not in (0, 1)
    summary, _, why = failed.stdout.partition("\nlog: ")
    # The node is named by the finding, and no other one is blamed.
    assert summary.splitlines()[-1].endswith(": nothing changed, failed")
    assert "node-2" in why
    assert "cure:" in why.splitlines()[-1] + why.splitlines()[-2]


@LONG
def test_a_node_that_a_check_left_out_is_proven_before_it_takes_part_again(site: Cluster) -> None:
    # No check of nodes sees this, but jobs do.
    site.shell("node-3", "printf 'exit 7\\n' >~trainer/.bashrc")
    site.lab("fault", "kill", "node-3")
    try:
        without = site.farandole("apply", "-e", "on_bad_node=exclude")
        assert (without.returncode, "[node-excluded]" in without.stdout) == (0, True), without.stdout + without.stderr
    finally:
        site.lab("fault", "start", "node-3")
    red = site.farandole("apply")
    print(red.stdout, red.stderr)
    assert red.returncode == 1
    assert "[node-mended]" in red.stdout and "proven now, before they take part again: node-3" in red.stdout
    assert "left out as before, node-3: its validation is red" in red.stderr
    assert "node-3" in site.farandole("node list").stdout
    assert "node-3" not in site.ssh("node-1", "cat", "/etc/farandole/hostfile").stdout
    site.shell("node-3", "rm ~trainer/.bashrc")
    done = site.farandole("apply")
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "taking part again: node-3" in done.stdout
    assert site.farandole("node list").stdout == "no node is left out\n"
    assert "node-3" in site.ssh("node-1", "cat", "/etc/farandole/hostfile").stdout
    assert site.play_ok().changes == set()


@LONG
def test_state_of_another_inventory_with_the_same_name_is_refused(site: Cluster, tmp_path: Path) -> None:
    other = shutil.copytree(site.inventory, tmp_path / site.name)
    refused = play(other)
    assert refused.rc != 0
    assert refused.changed_hosts == set()
    assert f"belongs to the inventory {site.inventory}, and this one is {other}" in refused.flat
    # The recorded owner is the reason for the refusal.
    owner = (site.state / "inventory").rename(tmp_path / "owner")
    admitted = play(other, *LOCK)
    owner.rename(site.state / "inventory")
    assert admitted.rc == 0, admitted.output


@contextmanager
def halted_run(cluster: Cluster) -> Iterator[int]:
    """A run that is stopped in the middle of its changes, and killed at the end."""
    run = cluster.start(*QUICK)
    try:
        run.until(lambda seen: "base : Install the base packages" in seen.tasks)
        os.kill(run.process.pid, signal.SIGSTOP)
        yield run.process.pid
    finally:
        run.end(signal.SIGKILL)


def test_a_second_concurrent_run_is_refused(site: Cluster, tmp_path: Path) -> None:
    other_state = ("--extra-vars", f"base_state_dir={tmp_path / 'state'}")
    with halted_run(site) as pid:
        refused = site.play_failing()
        assert refused.changed_hosts == set()
        assert f"on this machine (process {pid}, since" in refused.flat
        assert f"kill {pid}" in refused.flat
        # Only the head knows about both: another clone here, and another machine with the same state folder.
        assert f"on this machine (process {pid}, since" in site.play(*LOCK, *other_state).flat
        elsewhere = site.play_failing(*LOCK, before=ELSEWHERE)
        assert re.search(rf"from 10\.94\.\d+\.1 \(process {pid}, since", elsewhere.flat), elsewhere.output
        # The record on the head is the reason for the refusal.
        site.ssh("node-1", "mv", "/var/lib/farandole-run", "/run/kept")
        admitted = site.play(*LOCK, before=ELSEWHERE)
        site.ssh("node-1", "mv", "/run/kept", "/var/lib/farandole-run")
        assert admitted.rc == 0, admitted.output
        assert site.play(*LOCK, before=ELSEWHERE).rc != 0
    # After the kill, runs from anywhere are admitted at once.
    done = site.play_ok(*LOCK, before=ELSEWHERE)
    done = site.play_ok(*LOCK)
    assert "WARNING" not in done.output


DRIFT = {
    ("base : Write limits and package holds", "echo x >>/etc/security/limits.d/90-farandole.conf"),
    (
        "base : Create the job user and the users' accounts",
        "groupadd --force other && usermod --gid other trainer && echo trainer:known | chpasswd",
    ),
    (
        "ssh_trust : Write certificates and settings of sshd and ssh",
        "chmod 600 /etc/ssh/ssh_config.d/10-farandole.conf",
    ),
    ("ssh_trust : Reload sshd if its settings have changed", "touch /etc/ssh/sshd_config.d/10-farandole.conf"),
    (
        "stack : Install the stack alongside the others",
        "cd /opt/farandole/current/venv/bin && cp --preserve horovodrun /tmp && "
        "sed --in-place s/import/imporT/ horovodrun && touch --reference=/tmp/horovodrun horovodrun",
    ),
}


def test_drift_is_predicted_and_mended_although_most_tasks_ask_no_node(site: Cluster) -> None:
    for _, command in DRIFT:
        assert site.shell("node-2", command).returncode == 0
    expected = {(task, "node-2") for task, _ in DRIFT}

    def told(changes: list[dict[str, Any]]) -> set[tuple[str, str]]:
        return {(change["task"], host) for change in changes for host in change["hosts"]}

    looked = site.farandole("drift", "--json")
    assert looked.returncode == 1, looked.stdout + looked.stderr
    assert told(json.loads(looked.stdout)["changes"]) == expected
    assert site.play_ok().changes == expected
    last = json.loads(site.farandole("history", "--json").stdout)["events"][-1]
    assert (last["what"], told(last["changes"])) == ("apply", expected)
    account = site.shell("node-2", "id -gn trainer; getent shadow trainer | cut -d : -f 2").stdout
    assert account.split() == ["trainer", "*"]
    assert site.play_ok().changes == set()


def test_all_nodes_have_the_same_host_table(site: Cluster) -> None:
    tables = {site.ssh(f"node-{index}", "cat", "/etc/hosts").stdout for index in (1, 2, 3)}
    assert len(tables) == 1


@LONG
def test_the_validation_play_is_green_and_names_faults(site: Cluster) -> None:
    assert "clean connections: 6" in site.play("--tags", "quick", playbook="playbooks/validate.yml").output
    limited = site.play_failing("--limit", "node-2", playbook="playbooks/validate.yml")
    assert "nothing would be proven" in limited.output
    site.lab("fault", "cut", "node-3")
    try:
        red = site.play_failing("--limit", "node-1", playbook="playbooks/validate.yml")
        assert re.search(r"\[peer-(timeout|no-route|unreachable|silent)\]", red.output), red.output
    finally:
        site.lab("fault", "heal", "node-3")


def test_no_secret_is_logged_and_the_ca_is_encrypted(site: Cluster, tmp_path: Path) -> None:
    vault, secrets = tmp_path / "vault-password", tmp_path / "secrets.yml"
    vault.write_text("of the vault\n")
    secrets.write_text(f"ssh_trust_ca_passphrase: {SECRET}\n")
    subprocess.run(["ansible-vault", "encrypt", "--vault-password-file", vault, secrets], check=True)
    unlocked = ("--vault-password-file", str(vault), "--extra-vars", f"@{secrets}")
    kept = shutil.copytree(site.state / "ca", tmp_path / "ca")
    verbose = site.play_ok("-vvv", "--diff", *unlocked)
    assert SECRET not in verbose.output
    assert "PRIVATE KEY" not in verbose.output
    opened = subprocess.run(
        ["ssh-keygen", "-y", "-P", "", "-f", site.state / "ca" / "user_ca"], capture_output=True, check=False
    )
    assert b"incorrect passphrase" in opened.stderr
    locked_out = site.play_failing()
    assert "ssh_trust_ca_passphrase" in locked_out.output
    site.play_ok(*QUICK, *unlocked)
    shutil.rmtree(site.state / "ca")
    kept.rename(site.state / "ca")


def test_a_user_with_sudo_works_like_root(site: Cluster) -> None:
    make = (
        "apt-get install --yes --no-install-recommends sudo >&2 && useradd --create-home admin"
        " && echo 'admin ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/admin"
        " && install -d -o admin -m 700 /home/admin/.ssh"
        " && install -o admin /root/.ssh/authorized_keys /home/admin/.ssh/"
    )
    for node in ("node-1", "node-2", "node-3"):
        assert site.shell(node, make).returncode == 0
    done = site.play_ok("--extra-vars", "ansible_user=admin")
    assert done.changed_hosts == set()
    assert "[1] node-2" in site.farandole("run", "-u", "admin", "--", "hostname").stdout


@LONG
def test_the_installed_collection_does_the_same_from_another_folder(site: Cluster, tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "ansible.cfg").write_text(
        f"{SAFE}collections_path = collections\n[ssh_connection]\npipelining = true\n"
    )
    done = run(tmp_path, "ansible-playbook", "-i", site.inventory, "farandole.cluster.site", *QUICK)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^node-\S+ .* changed=(\d+) .* failed=0 ", done.stdout, re.MULTILINE) == ["0"] * 3
    # It notes what the clone's ansible.cfg has besides.
    assert "forks = 32" in done.stdout
    assert "pipelining = true" not in done.stdout
