#!/usr/bin/python
DOCUMENTATION = """
module: nccl_proof
short_description: Call the installed NCCL, and find other copies that shadow it
description:
  - Loads the library of package libnccl2 and calls ncclGetVersion and ncclGetUniqueId, which need no GPU. Fails if a
    call fails or reports another version than the package's. No library is loaded as root, because it may come from a
    stack.
  - Looks for other libraries of that name in a virtual environment (PyTorch's wheels depend on one), on the loader's
    path and in LD_LIBRARY_PATH. One of another version causes a warning, or with O(gpu) a failure.
options:
  version: {description: Version of the packages., type: str, required: true}
  venv: {description: Virtual environment of the jobs; it does not have to exist., type: path, required: true}
  gpu: {description: "Whether the node has a GPU, so that jobs use NCCL.", type: bool, default: false}
attributes:
  check_mode: {description: Never changes anything., support: full}
"""

import re
import sys
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils import unprivileged

NAME = "libnccl.so.2"
# Each in a separate process, as one process cannot load two libraries of the same name, and either may crash.
CALL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
number = ctypes.c_int()
code = library.ncclGetVersion(ctypes.byref(number)) or library.ncclGetUniqueId(ctypes.create_string_buffer(128))
sys.exit(f"NCCL returned error {code}") if code else print(number.value)
"""
# The files from which logins and Farandole's jobs get environment variables.
ENVIRONMENTS = (Path("/etc/environment"), Path("/etc/farandole/environment"))


def version_text(number: int) -> str:
    """Format a version number from ncclGetVersion, whose scheme changed with 2.9."""
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def call(path: Path, user: str = "nobody") -> tuple[str, str]:
    """The version that a library reports, or why it reports none."""
    command = [sys.executable, "-I", "-c", CALL, str(path)]
    with tempfile.TemporaryDirectory() as folder:
        code, output = unprivileged.run(command, user, Path(folder), seconds=60)
    last = (output.splitlines() or [f"it was killed by {unprivileged.name(-code)}"])[-1]
    return (version_text(int(last)), "") if code == 0 and last.isdigit() else ("", last)


def packaged(listing: str) -> list[Path]:
    """The library, from a list of the package's files."""
    return [Path(line).resolve() for line in listing.splitlines() if Path(line).name == NAME]


def on_loader_path(cache: str) -> list[Path]:
    """The libraries in the output of `ldconfig -p`."""
    return [Path(path) for path in re.findall(rf"^\s*{re.escape(NAME)} .*=> (\S+)$", cache, re.MULTILINE)]


def library_paths(environment: str) -> list[Path]:
    """The folders of LD_LIBRARY_PATH in a file that sets variables."""
    values = re.findall(r"""^\s*(?:export\s+)?LD_LIBRARY_PATH=["']?([^"'\n]*)""", environment, re.MULTILINE)
    return [Path(folder) for value in values for folder in value.split(":") if folder.startswith("/")]


def candidates(module: AnsibleModule, venv: Path) -> list[Path]:
    """Every library of that name that a job might load."""
    ldconfig = module.get_bin_path("ldconfig", required=True, opt_dirs=["/sbin", "/usr/sbin"])
    texts = [file.read_text(errors="replace") for file in ENVIRONMENTS if file.exists()]
    return [
        *venv.glob(f"lib/python3*/site-packages/nvidia/nccl/lib/{NAME}"),
        *venv.glob(f"../base/venv/lib/python3*/site-packages/nvidia/nccl/lib/{NAME}"),
        *(folder / NAME for text in texts for folder in library_paths(text)),
        *on_loader_path(module.run_command([ldconfig, "-p"], check_rc=True)[1]),
    ]


def conflict(shadows: dict[str, str], own: str) -> str:
    """Describe the libraries of another version, and the cure; empty if there are none."""
    others = [f"{path} (NCCL {version or 'unknown'})" for path, version in shadows.items() if version != own]
    return (
        f"a job may load {', '.join(others)} instead of the installed NCCL {own}: make the versions equal, with "
        "nccl_version or a pin of the pip package nvidia-nccl-cu…, or remove the other library"
        if others
        else ""
    )


def main() -> None:
    """Call the package's library, then look for others."""
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str", "required": True},
            "venv": {"type": "path", "required": True},
            "gpu": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    libraries = packaged(module.run_command(["dpkg", "--listfiles", "libnccl2"])[1])
    if not libraries:
        module.fail_json(msg=f"package libnccl2 does not contain {NAME}, or is not installed")
    own = libraries[0]
    answered, reason = call(own)
    wanted = module.params["version"].partition("-")[0]
    if answered != wanted:
        problem = f"reports version {answered}" if answered else f"does not work: {reason}"
        module.fail_json(msg=f"{own} {problem}; the package is {module.params['version']}")
    others = {path.resolve() for path in candidates(module, Path(module.params["venv"])) if path.exists()} - {own}
    shadows = {str(path): call(path)[0] for path in sorted(others)}
    problem = conflict(shadows, answered)
    if problem and module.params["gpu"]:
        module.fail_json(msg=problem, shadows=shadows)
    if problem:
        module.warn(problem)
    module.exit_json(changed=False, library=str(own), answered=answered, shadows=shadows)


if __name__ == "__main__":
    main()
