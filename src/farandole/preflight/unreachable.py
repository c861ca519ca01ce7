"""Why a node gives no answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from farandole.findings import Finding
from farandole.words import one_line

Answer = Mapping[str, Any]


class Reason(NamedTuple):
    """Why a node gives no answer: how it reads, what it means, what mends it."""

    pattern: str
    cause: str
    cure: str


FINGERPRINT = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
REASONS = (
    Reason(
        r"[Hh]ost key for \S+ was revoked",
        "its host key is revoked",
        "to keep it out, name it in ssh_trust_revoked; to take it back, make sure of it and on its console: "
        "rm /etc/ssh/ssh_host_ed25519_key* && ssh-keygen -A && systemctl restart ssh; then here: {forget} and {ssh}, "
        f"and say yes only to the fingerprint that its console shows for: {FINGERPRINT}",
    ),
    Reason(
        r"[Hh]ost key for \S+ has changed",
        "its host key is another than the known one: reinstalled, or another machine",
        f"compare on its console: {FINGERPRINT}; only if it is the new key: {{forget}}, then {{ssh}}",
    ),
    Reason(
        r"Host key verification failed",
        "its host key is not known here yet",
        f"{{ssh}} and say yes only to the fingerprint that its console shows for: {FINGERPRINT}",
    ),
    Reason(
        r"Permission denied \([\w,-]+\)|Too many authentication failures",
        "it does not let {user} in",
        "ssh-copy-id{port_option} {target}, or correct ansible_user or ansible_ssh_private_key_file, "
        "until this works: {ssh}",
    ),
    Reason(
        r"Could not resolve hostname [^:]+",
        "its name resolves to no address",
        "set ansible_host to its IP address",
    ),
    Reason(
        r"(connect to host \S+ port \d+: )?Connection refused",
        "nothing listens for ssh there",
        "systemctl enable --now ssh on it, or correct ansible_host or ansible_port, until this works: {ssh}",
    ),
    Reason(
        r"(connect to host \S+ port \d+: )?(No route to host|Network is unreachable)",
        "no way leads there",
        "correct ansible_host, or the network between, until this works: {ssh}",
    ),
    Reason(
        r"(connect to host \S+ port \d+: )?(Connection|Operation) timed out",
        "it does not answer",
        "start it, open its firewall, or correct ansible_host, until this works: {ssh}",
    ),
    Reason(
        r"Missing \w+ password|a (terminal|password) is required",
        "sudo wants a password of {user}",
        "run with --ask-become-pass, set ansible_become_password, or with visudo on it add: "
        "{user} ALL=(ALL) NOPASSWD: ALL",
    ),
    Reason(
        r"Incorrect \w+ password",
        "sudo refuses the password of {user}",
        "correct ansible_become_password, or run with --ask-become-pass",
    ),
    Reason(
        r"is not in the sudoers file|is not allowed to (execute|run)[^.]*",
        "sudo lets {user} do nothing",
        "set ansible_user: root, or with visudo on it add: {user} ALL=(ALL) NOPASSWD: ALL",
    ),
    Reason(
        r"sudo: (command )?not found",
        "it has no sudo",
        "apt-get install sudo on it, or set ansible_user: root",
    ),
    Reason(
        r"\S*python[\d.]*: (command )?not found|\S*python[\d.]*: No such file or directory",
        "it has no python3",
        "{ssh}, then apt-get update && apt-get install python3; or correct ansible_python_interpreter",
    ),
    Reason(
        r"requires a minimum of Python.*",
        "its python3 is too old",
        "install a supported system; preflight names them",
    ),
)
UNFIT_CURE = "look at that machine before anything is run on it, or take it out of group cluster"
OTHER = Reason("", "it gives no answer", "{verbose_ssh} shows where it stops")


def judge_unreachable(host: str, answer: Answer) -> Finding:
    if unfit := answer.get("unfit"):
        return Finding(host, f"its answer is none that a node gives: {one_line(unfit)}", UNFIT_CURE)
    reason = answer.get("unreachable_reason") or "it was not asked"
    login = answer.get("login") or {"host": host, "port": None, "user": None, "command": shlex.join(["ssh", host])}
    found, words = classify(reason)
    fields = login_fields(login)
    return Finding(host, f"{found.cause.format(**fields)} ({words})", found.cure.format(**fields))


def classify(reason: str) -> tuple[Reason, str]:
    """What is known to read like this, and the words that show it."""
    for known in REASONS:
        if match := re.search(known.pattern, reason):
            return known, one_line(match[0])
    return OTHER, one_line(reason)


def login_fields(login: Mapping[str, Any]) -> dict[str, str]:
    """All of it from the inventory, and quoted: what a node says enters no command."""
    host, port, user = login["host"], login["port"], login["user"]
    odd_port = port not in (None, 22, "22")
    known_as = f"[{host}]:{port}" if odd_port else str(host)
    return {
        "ssh": login["command"],
        "verbose_ssh": login["command"].replace("ssh", "ssh -v", 1),
        "user": user or "you",
        "target": shlex.quote(f"{user}@{host}" if user else str(host)),
        "port_option": f" -p {shlex.quote(str(port))}" if odd_port else "",
        "forget": shlex.join(["ssh-keygen", *known_hosts(login.get("common_args") or ""), "-R", known_as]),
    }


def known_hosts(ssh_arguments: str) -> list[str]:
    """The file in which ssh was told to keep host keys, for ssh-keygen; its own is the usual one."""
    told = re.findall(r"UserKnownHostsFile[= ](\S+)", " ".join(shlex.split(ssh_arguments)), re.IGNORECASE)
    return ["-f", str(Path(told[0]).expanduser())] if told else []
