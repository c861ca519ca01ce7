"""Validation of what a node reports about itself, and the reason why a node does not answer."""

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from getpass import getuser
from ipaddress import ip_address
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.fetching import TooMuchError
from farandole.core.schema import (
    UnfitError,
    address,
    fields,
    load,
    many,
    named,
    number,
    optional,
    shown,
    whole,
    within,
    words,
    yes_or_no,
)
from farandole.core.text import one_line
from farandole.preflight.hardware import MACHINE

# Not allowed in account names; special in shells, URLs and messages.
FORBIDDEN = set("\"'`{}<>[]()|;&*?!#%:/,=~")
# A node with a thousand interfaces reports about 100 KB.
LONGEST = 1 << 20
# ssh's debug output (ansible -vvv), the frame around its warnings, and notes that are no reason.
NOISE = re.compile(r"^(debug\d:|OpenSSH_|@|Warning: Permanently added)")
# The limits on the time to answer, in addition to the time to connect, and on the memory that the answer takes here.
# Half of the time may pass until a shared connection is known to be dead.
ANSWER_S, MEMORY_MIB = 30, 32
# A node that has to read its whole stack may take as long.
PATIENT_S = 900
# A failure after as much time is a time-out, after which a node is not asked again.
QUICK_S = 6
# Characters of a reason that are looked at.
READ = 1 << 16
STACK = "[0-9a-f]{12}"
SHORT = words(r"[a-z0-9._-]{0,32}")
VERSION = words(r"|\d{1,9}(\.\d{1,9}){0,5}")
NUMBER = whole((1 << 32) - 1)


def account(value: Any) -> str:
    """An account name; a directory service may have spaces and non-ASCII letters in them."""
    if not isinstance(value, str) or not value.isprintable() or len(value) not in range(1, 257) or FORBIDDEN & {*value}:
        raise UnfitError(f"is {shown(value)}")
    return value


def interface(value: Any) -> dict[str, Any]:
    """An interface with one address and a valid prefix length."""
    link: dict[str, Any] = LINK(value)
    if link["prefix"] > ip_address(link["address"]).max_prefixlen:
        raise UnfitError(f".prefix is {link['prefix']}")
    return link


LINK = fields({"name": words(r"[\w.:@+~-]{1,15}"), "address": address, "prefix": whole(128)})
ACCOUNT = fields(
    {
        "user_id": optional(NUMBER),
        "group_id": optional(NUMBER),
        "id_owner": optional(account),
        "group_id_owner": optional(account),
    }
)
PROBE = fields(
    {
        "os_id": SHORT,
        "os_version": SHORT,
        "arch": words(r"\w{1,32}"),
        "python": VERSION,
        "glibc": VERSION,
        "nvidia_driver": VERSION,
        "cuda": VERSION,
        "hostname": words(r"[\w.-]{0,64}"),
        "machine_id": words(r"|uninitialized|[0-9a-f]{32}"),
        "addresses": optional(many(address)),
        "interfaces": many(interface),
        "gpus": whole(1024),
        "init": words(r"[\w.()@+-]{0,15}"),
        "accounts": named(words(r"[!-~]{1,255}"), ACCOUNT),
        "sshd_drop_ins": yes_or_no,
        "disk_free_mb": whole(1 << 44),
        "stacks": fields(
            {
                "current": words(f"|{STACK}"),
                "former": words(f"|{STACK}"),
                "installed": many(words(STACK)),
                "late": yes_or_no,
                "left": yes_or_no,
            }
        ),
        "data": named(words(r"[^\x00-\x1f\x7f-\x9f/]{1,255}"), words(r"|[0-9a-f]{64}")),
        "time": number,
        "root": yes_or_no,
        "firewall": optional(many(address)),
        "machine": MACHINE,
    }
)


def read(text: str) -> Mapping[str, Any]:
    """Parse a module's answer without checking its fields."""
    return load(text, LONGEST)


def check(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the probe in an answer, with every field validated."""
    checked: dict[str, Any] = within("probe", PROBE, answer.get("probe"))
    return checked


def reason(text: str) -> str:
    """Why there is no answer: the message of ssh or of a module as one line, without the text around it."""
    lines = (line.strip() for line in text[-READ:].splitlines())
    message = " ".join(line for line in lines if line and not NOISE.match(line))
    return one_line(message.removeprefix("Failed to connect to the host via ssh: "), 2000)


def is_late(answer: Mapping[str, Any]) -> bool:
    """Whether a node could not look at its stack in the time of a probe."""
    return bool(answer.get("probe", {}).get("stacks", {}).get("late"))


def time_limit(timeout: int | str | None, retries: int | str | None) -> int:
    """The seconds that a probe may take, given the connection's timeout and retries."""
    return ANSWER_S + int(timeout or 10) * (1 + int(retries or 0))


def failure(error: Exception) -> dict[str, str]:
    """The answer of a node that sent too much, or of one that gave no complete answer."""
    if isinstance(error, TooMuchError):
        return {"unfit": str(error)}
    return {"unreachable_reason": reason(str(error)) or "it gave no reason"}


def answer_of(out: str, err: str, only_json: Callable[[str], str]) -> dict[str, Any]:
    """The probe in a connection's output, or why there is none."""
    if len(out) > LONGEST:
        return {"unfit": f"it has {len(out) >> 10} KiB"}
    try:
        text = only_json(out)
    except ValueError:
        return {"unreachable_reason": reason(f"{err[-READ:]}\n{out}") or "it gave no reason"}
    try:
        answer = read(text)
        if "probe" in answer:
            return {"probe": check(answer)}
    except FarandoleError as error:
        return {"unfit": str(error)}
    return {"unreachable_reason": reason(f"{err[-READ:]}\n{answer.get('msg', '')}") or "it gave no reason"}


def ssh_command(login: Mapping[str, Any]) -> str:
    """The ssh command that makes the same connection."""
    parts = [
        *shlex.split(login["common_args"] or ""),
        *(["-p", str(login["port"])] if login["port"] else []),
        *(["-i", str(login["key"])] if login["key"] else []),
        f"{login['user']}@{login['host']}" if login["user"] else str(login["host"]),
    ]
    return shlex.join(["ssh", *parts])


def account_of(command: Sequence[str]) -> str:
    """Whom an ssh command logs in as, by the settings of this machine's ssh; without a command, who runs this."""
    said = ""
    with suppress(IndexError, OSError):
        asked = [command[0], "-G", *command[1:]]
        said = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
    match = re.search(r"^user (.+)$", said, re.MULTILINE)
    return match[1] if match else getuser()


def shared_connection(command: Sequence[str], ssh: str) -> list[str]:
    """Change an ssh command so that it never prompts; a program that supplies the password comes before ssh."""
    options = [word for word in command[command.index(ssh) + 1 :] if not re.fullmatch("-v+", word)]
    return [ssh, "-T", "-o", "BatchMode=yes", *options]
