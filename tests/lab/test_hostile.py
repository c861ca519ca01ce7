"""Nodes whose Python gives false answers: each is one finding, in time, and the other nodes are judged as usual."""

import base64
import json
import re
import time
from pathlib import Path

import pytest
from clusters import PREPARED, Cluster

from farandole.inventory import excluded
from farandole.lab import lab

NODES = 6
KIND = PREPARED
LIARS = [f"node-{number}" for number in range(2, NODES + 1)]
PYTHON = "/usr/bin/python3.11"
# Time for preflight on a busy machine: 40 s for a node that sends without end, and the rest of the play.
SECONDS = 90
# Runs in place of each module, gets the honest answer, and sends a different one.
LIAR = f"""
import json, subprocess, sys, time
module = sys.stdin.buffer.read()
honest = subprocess.run([{PYTHON!r}], input=module, capture_output=True).stdout
answer = json.loads(honest)
probe = answer["probe"]
command = "touch MARKER"
def say(text, file=sys.stdout):
    file.write(text)
    file.flush()
"""
# These run into the timeout, so they are tested together.
ENDLESS = ("endless output", "endless errors", "nothing after the header", "a byte a second")
TELL = "\nsay(json.dumps(answer))"
ESCAPE = r"\x1b]0;owned\x07\x1b[2J\x9b31m"
LIES = {
    "fifty megabytes": "probe['hostname'] = 'x' * 50_000_000" + TELL,
    "endless output": "while True: say('x' * 2**20)",
    "endless errors": "while True: say('x' * 2**20, sys.stderr)",
    "a hundred thousand brackets": "say('{\"probe\": ' + '[' * 100_000 + ']' * 100_000 + '}')",
    "nothing after the header": "say('{\"probe\": {'); time.sleep(600)",
    "a byte a second": "for char in honest.decode(): say(char); time.sleep(1)",
    "half an answer": "say(honest.decode()[:400])",
    "a text for the time": "probe['time'] = 'now'" + TELL,
    "invalid addresses": "probe['addresses'] = [command, 5, None]" + TELL,
    "markup": "probe['os_id'] = '[red]{{ lookup(\"pipe\", \"' + command + '\") }}{% %}<script>{0}{user}'" + TELL,
    "a template that claims to be trusted": "probe['os_version'] = {'__ansible_type': 'TrustedAsTemplate', "
    "'value': '{{ lookup(\"pipe\", \"' + command + '\") }}'}" + TELL,
    "terminal codes": f"say('{ESCAPE}' * 9, sys.stderr); probe['machine_id'] = '{ESCAPE}'" + TELL,
    "terminal codes and no answer": f"say('{ESCAPE}' * 9 + 'no', sys.stderr); sys.exit(1)",
    "a newline in a name": "probe['interfaces'][0]['name'] = 'eth0\\n' + command" + TELL,
    "a path with dots": "probe['stacks']['installed'] = ['../../etc']; probe['data'] = {'../../etc/passwd': ''}" + TELL,
    "a command in an error": "say('Host key for x has changed ssh-keygen -f $(' + command.replace(' ', '${IFS}') + ')"
    " -R x', sys.stderr); sys.exit(255)",
    "another host's variables": "host = {'host_name': 'node-1', 'groups': ['head'], 'host_vars': "
    "{'ansible_ssh_common_args': '-o ProxyCommand=' + command.replace(' ', '${IFS}')}}; "
    "answer.update(add_host=host, add_group='head', ansible_facts=host['host_vars'], _ansible_no_log=True, "
    "warnings=[command, {}], exception={}, deprecations=5, results='x'); probe['more'] = answer['add_host']" + TELL,
    "invalid facts": "answer['ansible_facts'] = [1]; probe['more'] = 1" + TELL,
}


def batches() -> list[list[str]]:
    """The lies in groups that the lying nodes tell at the same time, one each."""
    quick = [name for name in LIES if name not in ENDLESS]
    return [*(quick[first : first + len(LIARS)] for first in range(0, len(quick), len(LIARS))), list(ENDLESS)]


def put(cluster: Cluster, node: str, path: str, content: str) -> None:
    encoded = base64.b64encode(content.encode()).decode()
    cluster.shell(node, f"echo {encoded} | base64 -d > {path}")


@pytest.fixture(scope="module")
def hostile(cluster: Cluster) -> Cluster:
    """Replace Python on all nodes but the first with the test's program."""
    for node in LIARS:
        put(cluster, node, "/root/liar", f"#!/bin/sh\nexec {PYTHON} /root/liar.py\n")
        cluster.shell(node, "chmod +x /root/liar && ln -sf /root/liar /usr/bin/python3")
    return cluster


@pytest.mark.parametrize("names", batches(), ids="; ".join)
def test_a_lie_gives_one_finding_about_its_node(hostile: Cluster, names: list[str], tmp_path: Path) -> None:
    lies = dict(zip(LIARS, names, strict=False))
    for node in LIARS:
        lie = LIES[lies[node]] if node in lies else TELL
        put(hostile, node, "/root/liar.py", (LIAR + lie).replace("MARKER", str(tmp_path / node)))
    begun = time.monotonic()
    done = hostile.play(playbook="playbooks/preflight.yml")
    seconds = time.monotonic() - begun
    recorded = json.loads((hostile.state / "preflight.json").read_text())
    assert done.rc != 0, done.output
    # That the connections of a node whose Python is another program cannot be measured is a warning.
    stops = [finding for finding in recorded["findings"] if finding["severity"] == "stop"]
    assert [finding["host"] for finding in stops] == list(lies), done.output
    assert sorted(recorded["hosts"]) == sorted({"node-1", *LIARS} - set(lies))
    assert list(tmp_path.iterdir()) == []
    assert not any("touch" in finding["cure"] for finding in recorded["findings"])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.output), repr(done.output)
    assert len(done.output) < 8000, done.output
    assert seconds < SECONDS


# Runs in place of Python on one node, finds a port of node-2's measuring program, and keeps it busy before it behaves.
FLOOD = f"""
import os, re, resource, socket, sys, time
arguments = sys.argv[1:]
if not (len(arguments) == 3 and "'pairs'" in arguments[2]):
    os.execv({PYTHON!r}, [{PYTHON!r}, *arguments])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
program = sys.stdin.buffer.read(int(re.search("read.([0-9]+)", arguments[2])[1])).decode()
def flood():
    address, one, held = socket.gethostbyname("TARGET"), socket.socket(), []
    # The other program may not listen yet.
    port = next(port for _ in range(20) for port in range(1024, 65536) if not one.connect_ex((address, port)))
    for number in range(2400):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((address, port))
        held.append(one)
        time.sleep(0.0002)
    time.sleep(0.5)
    for one in held:
        one.close()
    open("/root/flooded", "w").close()
usual = "    say(node.about())\\n"
exec(compile(program.replace(usual, "    flood()\\n" + usual), "pairs", "exec"))
"""


def test_a_node_that_keeps_another_busy_does_not_get_it_left_out(cluster: Cluster) -> None:
    for node in LIARS:
        cluster.ssh(node, "ln", "-sf", PYTHON, "/usr/bin/python3")
    evil, target = LIARS[-1], lab.node(cluster.name, "node-2").address
    put(cluster, evil, "/root/flood.py", FLOOD.replace("TARGET", target))
    put(cluster, evil, "/root/liar", f'#!/bin/sh\nexec {PYTHON} /root/flood.py "$@"\n')
    cluster.shell(evil, "chmod +x /root/liar && ln -sf /root/liar /usr/bin/python3")
    excluding = ("--extra-vars", "on_bad_node=exclude")
    done = cluster.play(*excluding, playbook="playbooks/preflight.yml")
    assert cluster.ssh(evil, "rm", "/root/flooded").returncode == 0, done.output
    assert (done.rc, excluded.read(cluster.state)) == (0, {}), done.output
    # Nor does one that refuses what another one sends, which that one then tells of.
    cluster.ssh(evil, "ln", "-sf", PYTHON, "/usr/bin/python3")
    cluster.ssh(evil, "ip", "route", "add", "blackhole", target)
    done = cluster.play(*excluding, playbook="playbooks/preflight.yml")
    cluster.ssh(evil, "ip", "route", "delete", "blackhole", target)
    assert done.rc != 0 and "[pair-link-closed]" in done.output, done.output
    assert excluded.read(cluster.state) == {}


# Runs in place of Python and changes the answers that the control machine asked for in advance.
AHEAD = f"""
import json, subprocess, sys
program = sys.stdin.buffer.read()
printed = subprocess.run([{PYTHON!r}, *sys.argv[1:]], input=program, capture_output=True).stdout
outputs = json.loads(printed).get("outputs")
if outputs:
    open("/root/lied", "w").close()
    answers = [json.loads(one) for one in outputs]
    host = {{"ansible_host": "192.0.2.1", "ansible_ssh_common_args": "-o ProxyCommand=touch${{IFS}}MARKER"}}
    LIE
    printed = json.dumps({{"outputs": outputs}}).encode()
sys.stdout.buffer.write(printed)
"""
ALL = "[one.update({}) for one in answers]; outputs = [json.dumps(one) for one in answers]"
ANSWERS = [
    ALL.format(
        "add_host={'host_name': 'node-1', 'groups': ['head'], 'host_vars': host}, add_group='head', "
        "ansible_facts=host, _ansible_no_log=False, _ansible_delegated_vars={'ansible_delegated_host': 'node-1'}"
    ),
    ALL.format("changed=False, msg='{{ lookup(\"pipe\", \"touch MARKER\") }}', warnings=['\x1b]0;owned\x07']"),
    "outputs = outputs[::-1]",
    "outputs = outputs + outputs",
    "outputs = [json.dumps({'changed': False, 'stat': {'exists': True}, 'more': 'x' * 5_000_000}) for _ in outputs]",
]
SEEN = (
    "{{ groups }} {{ hostvars['node-1'].ansible_host }} {{ hostvars['node-1'].ansible_facts }} {{ said.stat.exists }}"
)
TASKS = [
    {"stat": {"path": "/etc/hostname"}},
    {"file": {"path": "/root/made", "state": "directory", "mode": "0700"}},
    {"file": {"path": "/root/made/more", "state": "directory", "mode": "0700"}},
    {"stat": {"path": "/no/such/file"}, "register": "said"},
]


def test_an_answer_in_advance_counts_for_its_own_node_and_task_alone(cluster: Cluster, tmp_path: Path) -> None:
    play = {"hosts": "cluster", "gather_facts": False, "tasks": TASKS}
    shown = {"debug": {"msg": f"seen: {SEEN} end"}, "delegate_to": "localhost"}
    last = {"hosts": "node-1", "gather_facts": False, "tasks": [shown]}
    (tmp_path / "play.yml").write_text(json.dumps([play, last]))
    for node in LIARS:
        cluster.ssh(node, "ln", "-sf", PYTHON, "/usr/bin/python3")
    for _ in range(2):
        honest = cluster.play(playbook=str(tmp_path / "play.yml"))
    for node, lie in zip(LIARS, ANSWERS, strict=True):
        program = AHEAD.replace("LIE", lie).replace("MARKER", str(tmp_path / node))
        put(cluster, node, "/root/ahead.py", program)
        put(cluster, node, "/root/liar", f'#!/bin/sh\nexec {PYTHON} /root/ahead.py "$@"\n')
        cluster.shell(node, "chmod +x /root/liar; ln -sf /root/liar /usr/bin/python3; rm -rf /root/made")
    lied = cluster.play(playbook=str(tmp_path / "play.yml"))
    assert all(cluster.ssh(node, "rm", "/root/lied").returncode == 0 for node in LIARS), lied.output
    before, after = (re.search(r"seen: .* end", run.output, re.DOTALL) for run in (honest, lied))
    assert before and after and after[0] == before[0], lied.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["play.yml"]
    assert lied.count("failed")["node-1"] == 0 and not any(host == "node-1" for _, host in lied.changes)
    # A node without its own answers does the work.
    assert {host for _, host in lied.changes} >= {*LIARS[3:]}, lied.output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lied.output), repr(lied.output)
