"""The proof that nodes share files: what each node is asked, and how its answers are judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from farandole.core.schema import UnfitError, fields, load, named, number, text, words
from farandole.inventory.mounts import shared_homes
from farandole.validation.answer import LONGEST, code
from farandole.validation.judge import GREEN, RED, Check
from farandole.validation.nodes import Answer, HostVars, explained, unanswered

Folder = Mapping[str, Any]
# Seconds that a program may take besides mounting.
REST = 10
ANSWER = fields(
    {"code": code("files", ""), "seen": text(400), "listing": words("[0-9a-f]{64}|"), "seconds": number},
)
ANSWERS = fields({"folders": named(text(200), ANSWER)})


def shared(hosts: Sequence[str], hostvars: HostVars, user: str, head: str) -> dict[str, list[Folder]]:
    """The folders that each node shares with others, by node."""
    found = {host: [*_mounts(hostvars[host], user), *_homes(host, hostvars[host], user, head)] for host in hosts}
    users: dict[tuple[str, str], list[str]] = {}
    for host, folders in found.items():
        for one in folders:
            users.setdefault((one["path"], one["what"]), []).append(host)
    return {
        host: [
            {**one, "peers": [other for other in users[one["path"], one["what"]] if other != host]} for one in folders
        ]
        for host, folders in found.items()
    }


def _mounts(own: Mapping[str, Any], user: str) -> Iterator[Folder]:
    for mount in own.get("storage_mounts") or []:
        yield {
            "path": mount["where"],
            "what": mount["what"],
            "user": user,
            "mounted": True,
            "writable": "ro" not in str(mount.get("options", "")).split(","),
            "seconds": int(mount.get("timeout", 10)) + REST,
        }


def _homes(host: str, own: Mapping[str, Any], job_user: str, head: str) -> Iterator[Folder]:
    if own.get("storage_home", "none") == "none":
        return
    for user in shared_homes(own.get("cluster_users") or [], job_user):
        path, mounted = f"/home/{user}", host != head
        yield {"path": path, "what": head, "user": user, "mounted": mounted, "writable": True, "seconds": 10 + REST}


def usable(folders: Iterable[Folder], written: Answer) -> list[Folder]:
    """The folders where a node can read what others wrote; if it could not write, there is nothing to wait for."""
    found = _answers(written)
    return [one for one in folders if one["writable"] and not _code(found, one)]


def _answers(answer: Answer) -> dict[str, Any]:
    """What shared_files.py reported; nothing if that is malformed."""
    try:
        found: dict[str, Any] = ANSWERS(load(str(answer.get("stdout") or ""), LONGEST))["folders"]
    except UnfitError:
        return {}
    return found


def _code(answers: Mapping[str, Any], folder: Folder) -> str:
    return str(answers[folder["path"]]["code"]) if folder["path"] in answers else "answer-malformed"


def answers(hostvars: HostVars, shared: Mapping[str, Sequence[Folder]]) -> dict[str, Any]:
    """What the nodes reported about the folders that they share, by node."""
    return {
        host: {
            "folders": folders,
            "wrote": dict(hostvars[host].get("_validation_wrote") or {}),
            "read": dict(hostvars[host].get("_validation_read") or {}),
        }
        for host, folders in shared.items()
        if folders
    }


def file_checks(answers: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """A check for each folder on the nodes that share it; by node: its folders, and what it wrote and read."""
    groups: dict[tuple[str, frozenset[str]], list[str]] = {}
    for host, own in answers.items():
        for folder in own["folders"]:
            groups.setdefault((folder["path"], frozenset([host, *folder["peers"]])), []).append(host)
    return [_check(path, hosts, answers) for (path, _), hosts in groups.items()]


def _check(path: str, hosts: list[str], answers: Mapping[str, Mapping[str, Any]]) -> Check:
    check = Check(f"files.{path.strip('/').replace('/', '.')}", RED, path, hosts=hosts)
    found = {host: [_step(answers[host], path, step) for step in ("wrote", "read")] for host in hosts}
    steps = [(host, step) for host, both in found.items() for step in both if step]
    check.seconds = max((step["seconds"] for _, step in steps), default=0.0)
    for host in hosts:
        for step, answer in zip(("wrote", "read"), found[host], strict=True):
            asked = step == "wrote" or usable(_own(answers[host], path), answers[host]["wrote"])
            if asked and not answer:
                return _unusable(check, answers[host][step], host)
    failed = list(_failures(steps))
    if failed:
        check.words = f"{path} fails on {', '.join(dict.fromkeys(host for host, _, _ in failed))}"
        host, which, seen = failed[0]
        what = _own(answers[host], path)[0]["what"]
        explained(check, which, f"{path} on {host}, from {what}: {seen}", host)
        check.log = [f"{one}: {words}" for one, _, words in failed]
        return check
    kept = [step["listing"] for _, step in steps if step["listing"]]
    what = "all see the same" if kept else "what each writes, the others read"
    check.status, check.words = GREEN, f"{path} on {', '.join(hosts)}: {what}"
    return check


def _failures(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, str, str]]:
    """Node, code and words of each failure, the cause first: a file that is missing may not have been written."""
    failed = [(host, step["code"], step["seen"]) for host, step in steps if step["code"]]
    yield from sorted(failed, key=lambda one: one[1] == "files-missing")
    seen: dict[str, str] = {}
    for host, step in steps:
        if not step["code"] and step["listing"]:
            other = next(iter(seen.values()), host)
            if seen and step["listing"] not in seen:
                yield host, "files-differ", f"it does not show the same files as on {other}"
            seen.setdefault(step["listing"], host)


def _own(answer: Mapping[str, Any], path: str) -> list[Folder]:
    return [one for one in answer["folders"] if one["path"] == path]


def _step(answer: Mapping[str, Any], path: str, step: str) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = _answers(answer[step]).get(path)
    return found


def _unusable(check: Check, answer: Answer, host: str) -> Check:
    if not answer.get("stdout"):
        return unanswered(check, answer, host)
    return explained(check, "answer-malformed", "it names other folders or no results", host)
