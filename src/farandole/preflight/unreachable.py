"""Why a node does not answer."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.core.causes import recognize
from farandole.core.findings import Finding, finding
from farandole.core.text import one_line
from farandole.inventory.host_keys import SHOW

Answer = Mapping[str, Any]


def judge_unreachable(host: str, answer: Answer) -> Finding:
    if unfit := answer.get("unfit"):
        return finding("answer-malformed", host, seen=one_line(unfit))
    login = answer.get("login") or {"host": host, "port": None, "user": None, "command": shlex.join(["ssh", host])}
    reason = answer.get("unreachable_reason") or "it was not contacted"
    match = recognize("login", reason)
    code, seen = (match.cause.code, match.seen) if match else ("login-failed", reason)
    return finding(code, host, seen=one_line(seen), **login_fields(login))


def login_fields(login: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a cure, all taken from the inventory and quoted."""
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
        "fingerprint": SHOW,
    }


def known_hosts(ssh_arguments: str) -> list[str]:
    """ssh-keygen's option for the known_hosts file that ssh's arguments name; nothing for the default one."""
    words = " ".join(shlex.split(ssh_arguments))
    files = re.findall(r'UserKnownHostsFile[= ]+("[^"]+"|[^"\s]+)', words, re.IGNORECASE)
    return ["-f", str(Path(files[0].strip('"')).expanduser())] if files else []
