#!/usr/bin/python
"""The node's part of action build_step: run a script as a systemd unit, or report on the running one."""

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
from ansible_collections.farandole.cluster.plugins.module_utils.folders import flush

# Those of all steps.
UNITS = "farandole-build*.service"
TAIL = 25
# Lines searched for a percentage: a verbose build prints hundreds of lines between two of them.
RECENT = 2000
# Lines of the log with one of these usually show why a build failed.
REASONS = ("error:", "Error:", "ERROR", "No space left", "fatal:", "cannot find", "not found")
# A step runs as root, so it takes programs and modules only from where nobody else can write.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONNOUSERSITE": "1"}


def slug(name: str) -> str:
    """A file name for a step."""
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in name.lower())


def digest(parameters: dict[str, Any]) -> str:
    """Identify a step, to recognize it in a later run."""
    step = {key: parameters[key] for key in ("name", "script", "directory", "environment", "root")}
    return hashlib.sha256(json.dumps(step, sort_keys=True).encode()).hexdigest()[:16]


def states(module: AnsibleModule) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The properties in systemd of this step's unit, and of those that run beside it."""
    names = "Id,ActiveState,SubState,Description,ExecMainStatus,Result,ExecMainStartTimestampMonotonic"
    names += ",ExecMainExitTimestampMonotonic,WorkingDirectory"
    command = ["systemctl", "show", f"--property={names}", module.params["unit"], UNITS]
    _, out, _ = module.run_command(command, check_rc=True)
    own, *loaded = [dict(line.split("=", 1) for line in unit.splitlines() if "=" in line) for unit in out.split("\n\n")]
    return own, [unit for unit in loaded if unit["Id"] != own["Id"]]


def seconds(unit: dict[str, str]) -> float:
    """How long the unit has run."""
    started = int(unit.get("ExecMainStartTimestampMonotonic") or 0)
    ended = int(unit.get("ExecMainExitTimestampMonotonic") or 0) or time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return round(max(0, ended - started) / 1e6, 1)


def is_running(unit: dict[str, str]) -> bool:
    """Whether the unit's script is still running."""
    return unit["ActiveState"] in ("active", "activating", "deactivating") and unit["SubState"] != "exited"


def has_ended(unit: dict[str, str]) -> bool:
    """Whether the unit's script has ended without its result being recorded yet."""
    return unit["SubState"] == "exited" or unit["ActiveState"] == "failed"


def names_of(unit: dict[str, str]) -> tuple[str, str]:
    """The names of the unit's step and of the build that it belongs to."""
    match = re.fullmatch(r"(.*) \[(\S*) \w+\]", unit["Description"])
    return (match[1], match[2]) if match else ("", "")


def file_of(name: str, directory: Path, kind: str) -> Path:
    """The file with a step's script, log or result."""
    return directory / f"{slug(name)}.{kind}"


def record_result(module: AnsibleModule, unit: dict[str, str]) -> None:
    """Record how a step ended, for every run that may ask, and reset the unit."""
    (name, _), directory = names_of(unit), Path(unit["WorkingDirectory"].removeprefix("!"))
    if name and directory.is_dir():
        log = file_of(name, directory, "log")
        answer = {"changed": True, "running": False, "seconds": seconds(unit), "log": str(log)}
        if unit["SubState"] != "exited":
            answer |= {"failed": True, "msg": failure(name, unit, log)}
        # If this record survives a power cut, the result of the step must too.
        flush(directory)
        record = json.dumps({"description": unit["Description"], **answer})
        file_of(name, directory, "ended").write_text(record)
    reset(module, unit)


def recorded_result(name: str, directory: Path, description: str) -> dict[str, Any]:
    """The recorded result of exactly this step; empty if there is none."""
    ended = file_of(name, directory, "ended")
    record = json.loads(ended.read_text()) if ended.exists() else {}
    return record if record.pop("description", "") == description else {}


def report(unit: dict[str, str], **more: Any) -> dict[str, Any]:
    """Report the progress of the running step."""
    (name, _), directory = names_of(unit), Path(unit["WorkingDirectory"].removeprefix("!"))
    last = progress(lines_of(file_of(name, directory, "log")))
    return {"changed": True, "running": True, "step": name, "seconds": seconds(unit), "last": last, **more}


def reset(module: AnsibleModule, *units: dict[str, str]) -> None:
    """Stop units with all their processes and reset them."""
    for unit in units:
        module.run_command(["systemctl", "stop", unit["Id"]])
        module.run_command(["systemctl", "reset-failed", unit["Id"]])


def fault(folder: Path) -> str:
    """How an account other than root could change what is in a folder, and the cure; empty if none can."""
    status, shown = folder.lstat(), shlex.quote(str(folder))
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to uid {status.st_uid}: inspect its contents, then run  chown root:root {shown}"
    if folder.is_symlink():
        return "" if folder.exists() else f"{folder} is a dangling symlink: remove it"
    if not folder.is_dir():
        return f"{folder} is not a directory: remove it"
    if status.st_mode & stat.S_ISVTX and status.st_mode & stat.S_IWOTH:
        return f"every account can write to {folder}: choose another directory"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return f"other accounts can write to {folder} (mode {mode}): inspect its contents, then run  chmod go-w {shown}"
    return ""


def open_to_others(directory: Path) -> str:
    """The first such fault of a directory and its parents; folders that do not exist yet will belong to root."""
    for folder in (*reversed(directory.parents), directory):
        if not folder.is_symlink() and not folder.exists():
            return ""
        if problem := fault(folder):
            return problem
        if folder.is_symlink():
            target = Path(os.path.normpath(folder.parent / folder.readlink()))
            return open_to_others(target / directory.relative_to(folder))
    return ""


def launch(module: AnsibleModule, description: str, directory: Path) -> None:
    """Write the script to a file and start it."""
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
        # Every account can write to the node's own /tmp.
        "PrivateTmp": "yes",
        "UMask": "0022",
        # Keeps the unit, so that its result can be read afterwards.
        "RemainAfterExit": "yes",
    }
    if not module.params["root"]:
        properties |= {"DynamicUser": "yes", "PrivateNetwork": "yes", "ProtectHome": "yes"}
        properties |= {"CacheDirectory": "farandole-build", "RestrictNamespaces": "yes"}
        # The sockets of the node's services are files, and so is the memory that its programs share.
        properties |= {"TemporaryFileSystem": "/run /dev/shm:mode=1777"}
        # What it left running could wait for a minute and a half after any other signal.
        properties |= {"KillSignal": "SIGKILL"}
    command = ["systemd-run", "--quiet", f"--unit={module.params['unit']}", f"--description={description}"]
    command += [f"--property={name}={value}" for name, value in properties.items()]
    code, _, err = module.run_command([*command, *environment, "sh", str(script)])
    if code:
        module.fail_json(msg=f"systemd could not start {module.params['name']}: {err.strip()}")


def lines_of(log: Path) -> list[str]:
    """The lines of a log, without empty ones."""
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []


def progress(lines: list[str]) -> str:
    """The last line with a percentage of CMake's, else the last line."""
    counted = [line for line in lines[-RECENT:] if re.match(r"\s*\[ *\d+%\]", line)]
    return ["", *lines[-1:], *counted[-1:]][-1].strip()[:200]


def failure(name: str, unit: dict[str, str], log: Path) -> str:
    """Describe a failed step: the lines that show the reason, then the end of the log."""
    lines = lines_of(log)
    reasons = [line for line in lines[:-TAIL] if any(word in line for word in REASONS)]
    # Of a compiler's errors, the first is the cause, and the others its consequences.
    shown = "\n".join([*reasons[:3], *reasons[3:][-3:], *lines[-TAIL:]])
    how = unit.get("ExecMainStatus") if unit.get("Result") == "exit-code" else unit.get("Result")
    return f"{name} failed ({how}) after {seconds(unit):.0f} s; its log is {log}:\n{shown}"


SPEC = {
    "name": {"type": "str", "required": True},
    "script": {"type": "str", "required": True},
    "directory": {"type": "path", "required": True},
    "environment": {"type": "dict", "default": {}},
    "build": {"type": "str", "default": ""},
    "creates": {"type": "path"},
    "root": {"type": "bool", "default": True},
    "unit": {"type": "str", "required": True},
    "start": {"type": "bool", "default": True},
}


def main() -> None:
    """Start the step unless it is running, and report its state."""
    module = AnsibleModule(argument_spec=SPEC)
    os.umask(0o022)
    name, directory = module.params["name"], Path(module.params["directory"])
    if problem := open_to_others(directory):
        module.fail_json(
            msg=f"{name}: root does not build in {directory}, where others could make it run their programs: {problem}"
        )
    build, creates = module.params["build"], module.params["creates"]
    description = f"{name} [{build} {digest(module.params)}]"
    unit, beside = states(module)
    ended_now = has_ended(unit) and unit["Description"]
    if ended_now:
        record_result(module, unit)
    elif is_running(unit) and unit["Description"] == description:
        module.exit_json(**report(unit))
    result = recorded_result(name, directory, description)
    if ended_now == description or not module.params["start"]:
        if not result:
            module.fail_json(msg=f"{name} no longer runs and left no result; the node may have rebooted: run again")
        module.exit_json(**result)
    if not ended_now and is_running(unit):
        if build and names_of(unit)[1] == build:
            module.exit_json(**report(unit, start=True))
        reset(module, unit)
    reset(module, *(other for other in beside if names_of(other)[1] != build))
    if result and not result.get("failed") and creates and Path(creates).exists():
        module.exit_json(**{**result, "changed": False})
    launch(module, description, directory)
    module.exit_json(**report(states(module)[0]))


if __name__ == "__main__":
    main()
