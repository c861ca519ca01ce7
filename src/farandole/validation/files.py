"""The proof that nodes share files: what each node is asked, and how its answers are judged."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from farandole.core.schema import UnfitError, fields, load, named, number, text, words
from farandole.inventory.cluster import HostVars
from farandole.inventory.mounts import shared_homes
from farandole.validation.answer import LONGEST, code
from farandole.validation.judge import GREEN, NOT_MEASURED, RED, Check
from farandole.validation.nodes import Answer, explained, unanswered

Folder = Mapping[str, Any]
# Seconds that a program may take besides mounting.
REST = 10
ANSWER = fields({"code": code("files", ""), "seen": text(400), "listing": words("[0-9a-f]{64}|"), "seconds": number})
ANSWERS = fields({"folders": named(text(200), ANSWER)})


def shared(hosts: Sequence[str], hostvars: HostVars, user: str, head: str) -> dict[str, list[Folder]]:
    """The folders that each node shares with others, by node."""
    own = {host: [*_mounts(hostvars[host], user), *_homes(host, hostvars[host], user, head)] for host in hosts}
    users: dict[tuple[str, str], list[str]] = {}
    for host, folders in own.items():
        for folder in folders:
            users.setdefault((folder["path"], folder["what"]), []).append(host)
    return {
        host: [
            {**each, "peers": [name for name in users[each["path"], each["what"]] if name != host]} for each in folders
        ]
        for host, folders in own.items()
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
    done = {path for path, step in _steps(written).items() if not step["code"]}
    return [folder for folder in folders if folder["writable"] and folder["path"] in done]


def _steps(answer: Answer) -> dict[str, Any]:
    """What shared_files.py reported, by folder; nothing if that is malformed."""
    try:
        steps: dict[str, Any] = ANSWERS(load(str(answer.get("stdout") or ""), LONGEST))["folders"]
    except UnfitError:
        return {}
    return steps


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
    paths = [path for path, _ in groups]
    return [_check(path, hosts, answers, only=paths.count(path) == 1) for (path, _), hosts in groups.items()]


def _check(path: str, hosts: list[str], answers: Mapping[str, Mapping[str, Any]], *, only: bool) -> Check:
    """A check for a folder; only says whether no other node has another folder there."""
    name = f"files.{path.strip('/').replace('/', '.')}"
    check = Check(name if only else f"{name}.{hosts[0]}", RED, path, hosts=hosts)
    folders = {host: next(each for each in answers[host]["folders"] if each["path"] == path) for host in hosts}
    steps = []
    for host in hosts:
        for phase in ("wrote", "read"):
            answer = answers[host][phase]
            if step := _steps(answer).get(path):
                steps.append((host, step))
                check.seconds = max(check.seconds, step["seconds"])
            elif phase == "wrote" or usable([folders[host]], answers[host]["wrote"]):
                malformed = "it names other folders or no results"
                return (
                    explained(check, "answer-malformed", malformed, host)
                    if answer.get("stdout")
                    else unanswered(check, answer, host)
                )
    if failed := list(_failures(steps)):
        check.words = f"{path} fails on {', '.join(dict.fromkeys(host for host, _, _ in failed))}"
        check.log = [f"{host}: {seen}" for host, _, seen in failed]
        host, code, seen = failed[0]
        return explained(check, code, f"{path} on {host}, from {folders[host]['what']}: {seen}", host)
    kept = [step["listing"] for _, step in steps if step["listing"]]
    result = "all see the same" if kept else "what each writes, the others read"
    if len(hosts) == 1:
        result = "no other node of this run shares it"
    source = "" if only else f", from {folders[hosts[0]]['what']}, unlike on other nodes"
    check.status = NOT_MEASURED if len(hosts) == 1 else GREEN
    check.words = f"{path} on {', '.join(hosts)}{source}: {result}"
    return check


def _failures(steps: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, str, str]]:
    """Node, code and words of each failure, the cause first: a file that is missing may not have been written."""
    failed = [(host, step["code"], step["seen"]) for host, step in steps if step["code"]]
    yield from sorted(failed, key=lambda failure: failure[1] == "files-missing")
    seen: dict[str, str] = {}
    for host, step in steps:
        if not step["code"] and step["listing"]:
            other = next(iter(seen.values()), host)
            if seen and step["listing"] not in seen:
                yield host, "files-differ", f"it does not show the same files as on {other}"
            seen.setdefault(step["listing"], host)
