#!/usr/bin/python
"""The node's half of the action build_step: run a script as a systemd unit, or report on the running one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

UNIT = "farandole-build.service"
TAIL = 25
# Lines in which a percentage is looked for: a verbose build writes hundreds between two.
RECENT = 2000
# Words in the log that best show why a build failed.
TELLING = ("error:", "Error:", "ERROR", "No space left", "fatal:", "cannot find", "not found")
# A step runs as root, so programs and modules are found only where nobody else can write.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONNOUSERSITE": "1"}


def slug(name: str) -> str:
    """A file name for a step."""
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in name.lower())


def digest(parameters: dict[str, Any]) -> str:
    """Identify a step, to recognize it in a later run."""
    told = {key: parameters[key] for key in ("name", "script", "directory", "environment")}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def state(module: AnsibleModule) -> dict[str, str]:
    """What systemd knows of the unit."""
    names = "ActiveState,SubState,Description,ExecMainStatus,Result,ExecMainStartTimestampMonotonic"
    names += ",ExecMainExitTimestampMonotonic,WorkingDirectory"
    _, out, _ = module.run_command(["systemctl", "show", f"--property={names}", UNIT], check_rc=True)
    return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)


def seconds(unit: dict[str, str]) -> float:
    """How long it has run."""
    begun = int(unit.get("ExecMainStartTimestampMonotonic") or 0)
    ended = int(unit.get("ExecMainExitTimestampMonotonic") or 0) or time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return round(max(0, ended - begun) / 1e6, 1)


def at_work(unit: dict[str, str]) -> bool:
    """Whether its script still runs."""
    return unit["ActiveState"] in ("active", "activating", "deactivating") and unit["SubState"] != "exited"


def over(unit: dict[str, str]) -> bool:
    """Whether its script has ended and its result has not been recorded yet."""
    return unit["SubState"] == "exited" or unit["ActiveState"] == "failed"


def parts_of(unit: dict[str, str]) -> tuple[str, str]:
    """The name of the step that it is, and the build of which that is a part."""
    found = re.fullmatch(r"(.*) \[(\S*) \w+\]", unit["Description"])
    return (found[1], found[2]) if found else ("", "")


def file_of(name: str, directory: Path, kind: str) -> Path:
    """Its script, its log, or how it ended."""
    return directory / f"{slug(name)}.{kind}"


def conclude(module: AnsibleModule, unit: dict[str, str]) -> None:
    """Record how a step ended, for every run that may ask, and reset the unit."""
    (name, _), directory = parts_of(unit), Path(unit["WorkingDirectory"].removeprefix("!"))
    if name and directory.is_dir():
        log = file_of(name, directory, "log")
        answer = {"changed": True, "running": False, "seconds": seconds(unit), "log": str(log)}
        if unit["SubState"] != "exited":
            answer |= {"failed": True, "msg": complaint(name, unit, log)}
        # What it made has to outlast a power cut if this does.
        os.sync()
        told = json.dumps({"description": unit["Description"], **answer})
        file_of(name, directory, "ended").write_text(told)
    forget(module)


def how_it_ended(name: str, directory: Path, description: str) -> dict[str, Any]:
    """The recorded result of exactly this step; empty if there is none."""
    ended = file_of(name, directory, "ended")
    told = json.loads(ended.read_text()) if ended.exists() else {}
    return told if told.pop("description", "") == description else {}


def running(unit: dict[str, str], **more: Any) -> dict[str, Any]:
    """The progress of the running step."""
    (name, _), directory = parts_of(unit), Path(unit["WorkingDirectory"].removeprefix("!"))
    last = progress(lines_of(file_of(name, directory, "log")))
    return {"changed": True, "running": True, "step": name, "seconds": seconds(unit), "last": last, **more}


def forget(module: AnsibleModule) -> None:
    """Stop the unit with all its processes and reset it."""
    module.run_command(["systemctl", "stop", UNIT])
    module.run_command(["systemctl", "reset-failed", UNIT])


def fault(folder: Path) -> str:
    """How an account other than root could change which files are found in a folder, and the cure."""
    status, shown = folder.lstat(), shlex.quote(str(folder))
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to uid {status.st_uid}: see what lies in it, then run  chown root:root {shown}"
    if folder.is_symlink():
        return "" if folder.exists() else f"{folder} leads nowhere: remove it"
    if not folder.is_dir():
        return f"{folder} is not a directory: remove it"
    if status.st_mode & stat.S_ISVTX and status.st_mode & stat.S_IWOTH:
        return f"every account may write in {folder}: choose a directory elsewhere"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return f"others may write in {folder} (mode {mode}): see what lies in it, then run  chmod go-w {shown}"
    return ""


def open_to_others(directory: Path) -> str:
    """The first fault on the way from the root to a directory; what is not there yet will be root's."""
    for folder in (*reversed(directory.parents), directory):
        if not folder.is_symlink() and not folder.exists():
            return ""
        if found := fault(folder):
            return found
        if folder.is_symlink():
            target = Path(os.path.normpath(folder.parent / folder.readlink()))
            return open_to_others(target / directory.relative_to(folder))
    return ""


def launch(module: AnsibleModule, description: str, directory: Path) -> None:
    """Write the script down and start it."""
    script, log, ended = (file_of(module.params["name"], directory, kind) for kind in ("sh", "log", "ended"))
    directory.mkdir(parents=True, exist_ok=True)
    ended.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    script.write_text(f"set -eu\n{module.params['script']}")
    variables = {**ENVIRONMENT, "HOME": str(directory), **module.params["environment"]}
    environment = [f"--setenv={name}={value}" for name, value in variables.items()]
    properties = {
        "WorkingDirectory": str(directory),
        "StandardOutput": f"append:{log}",
        "StandardError": f"append:{log}",
        # What lies in the node's own /tmp is anybody's.
        "PrivateTmp": "yes",
        "UMask": "0022",
        # So that its end can be asked for afterwards.
        "RemainAfterExit": "yes",
    }
    command = ["systemd-run", "--quiet", f"--unit={UNIT}", f"--description={description}"]
    command += [f"--property={name}={value}" for name, value in properties.items()]
    code, _, err = module.run_command([*command, *environment, "sh", str(script)])
    if code:
        module.fail_json(msg=f"systemd did not start {module.params['name']}: {err.strip()}")


def lines_of(log: Path) -> list[str]:
    """What the script wrote, without empty lines."""
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []


def progress(lines: list[str]) -> str:
    """Where it is: CMake's last percentage when it counts, else the last line."""
    counted = [line for line in lines[-RECENT:] if re.match(r"\s*\[ *\d+%\]", line)]
    return ["", *lines[-1:], *counted[-1:]][-1].strip()[:200]


def complaint(name: str, unit: dict[str, str], log: Path) -> str:
    """Why it failed: the lines that say so, then the end of the log."""
    lines = lines_of(log)
    telling = [line for line in lines[:-TAIL] if any(word in line for word in TELLING)][-5:]
    shown = "\n".join([*telling, *lines[-TAIL:]])
    how = unit.get("ExecMainStatus") if unit.get("Result") == "exit-code" else unit.get("Result")
    return f"{name} failed ({how}) after {seconds(unit):.0f} s; its log is {log}:\n{shown}"


def main() -> None:
    """Start the step unless it is running, and report its state."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "script": {"type": "str", "required": True},
            "directory": {"type": "path", "required": True},
            "environment": {"type": "dict", "default": {}},
            "build": {"type": "str", "default": ""},
            "creates": {"type": "path"},
            "start": {"type": "bool", "default": True},
        },
    )
    os.umask(0o022)
    name, directory = module.params["name"], Path(module.params["directory"])
    if found := open_to_others(directory):
        module.fail_json(
            msg=f"{name}: root builds nothing in {directory}, as others could have it run their programs: {found}"
        )
    build, creates = module.params["build"], module.params["creates"]
    description = f"{name} [{build} {digest(module.params)}]"
    unit = state(module)
    ended_now = over(unit) and unit["Description"]
    if ended_now:
        conclude(module, unit)
    elif at_work(unit) and unit["Description"] == description:
        module.exit_json(**running(unit))
    told = how_it_ended(name, directory, description)
    if ended_now == description or not module.params["start"]:
        if not told:
            module.fail_json(msg=f"{name} is gone from the node, which may have been restarted: run again")
        module.exit_json(**told)
    if not ended_now and at_work(unit):
        if build and parts_of(unit)[1] == build:
            module.exit_json(**running(unit, start=True))
        forget(module)
    if told and not told.get("failed") and creates and Path(creates).exists():
        module.exit_json(**{**told, "changed": False})
    launch(module, description, directory)
    module.exit_json(**running(state(module)))


if __name__ == "__main__":
    main()
