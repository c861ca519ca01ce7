"""Why a node gives no answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.causes import causes, recognize
from farandole.findings import Finding
from farandole.words import one_line

Answer = Mapping[str, Any]

FINGERPRINT = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"


def judge_unreachable(host: str, answer: Answer) -> Finding:
    login = answer.get("login") or {"host": host, "port": None, "user": None, "command": shlex.join(["ssh", host])}
    fields = login_fields(login)
    if unfit := answer.get("unfit"):
        cause, seen = causes()["answer-malformed"], str(unfit)
    else:
        reason = answer.get("unreachable_reason") or "it was not asked"
        sight = recognize("login", [reason])
        cause, seen = (sight.cause, sight.words["seen"]) if sight else (causes()["login-failed"], reason)
    told = cause.told({"seen": one_line(seen), "user": fields["user"]})
    return Finding(host, cause.code, told, cause.mended(fields))


def login_fields(login: Mapping[str, Any]) -> dict[str, str]:
    """What a cure may contain: all of it from the inventory, and quoted."""
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
        "fingerprint": FINGERPRINT,
    }


def known_hosts(ssh_arguments: str) -> list[str]:
    """The file in which ssh was told to keep host keys, for ssh-keygen; its own is the usual one."""
    told = re.findall(r"UserKnownHostsFile[= ](\S+)", " ".join(shlex.split(ssh_arguments)), re.IGNORECASE)
    return ["-f", str(Path(told[0]).expanduser())] if told else []
