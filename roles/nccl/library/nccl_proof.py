#!/usr/bin/python
"""Call the NCCL that is installed, and find every other one that a job may load in its place."""

from __future__ import annotations

DOCUMENTATION = """
module: nccl_proof
short_description: Call the installed NCCL, and find others that shadow it
description:
  - Loads the library of the package libnccl2 and calls ncclGetVersion and ncclGetUniqueId, which need no GPU. Fails
    when a call fails or the answer is not the version of the package. Root loads none of
    them, as a stack may have brought it.
  - Looks for other libraries of that name in a virtual environment (pip brings them with PyTorch), on the loader's path
    and in LD_LIBRARY_PATH. One of another version is warned of; with O(gpu) it is a failure.
options:
  version:
    description: The version of the packages.
    type: str
    required: true
  venv:
    description: Virtual environment of the jobs; it need not be there.
    type: path
    required: true
  gpu:
    description: Whether the node has a GPU, so that jobs use NCCL.
    type: bool
    default: false
attributes:
  check_mode:
    description: Changes nothing, in check mode or out of it.
    support: full
author: Farandole
"""

EXAMPLES = """
- name: Call the installed NCCL
  nccl_proof:
    version: 2.27.3-1+cuda12.9
    venv: /opt/farandole/current/venv
"""

RETURN = """
library:
  description: The library of the package.
  type: str
  returned: always
  sample: /usr/lib/x86_64-linux-gnu/libnccl.so.2.27.3
answered:
  description: What ncclGetVersion said.
  type: str
  returned: always
  sample: 2.27.3
shadows:
  description: The version of every other library of that name, by its path; empty where it cannot be loaded.
  type: dict
  returned: always
"""

import re
import sys
import tempfile
from pathlib import Path

from ansible.module_utils import unprivileged
from ansible.module_utils.basic import AnsibleModule

NAME = "libnccl.so.2"
# A process of its own for each: two libraries of one name do not meet, and a crash is an answer too.
CALL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
number = ctypes.c_int()
code = library.ncclGetVersion(ctypes.byref(number)) or library.ncclGetUniqueId(ctypes.create_string_buffer(128))
sys.exit(f"NCCL answers with error {code}") if code else print(number.value)
"""
# Where a login or a job of this product gets its variables from.
ENVIRONMENTS = (Path("/etc/environment"), Path("/etc/farandole/environment"))


def spoken(number: int) -> str:
    """The version that a number of ncclGetVersion means; the scheme changed with 2.9."""
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def call(path: Path, user: str = "nobody") -> tuple[str, str]:
    """The version that a library reports, or why it reports none."""
    command = [sys.executable, "-I", "-c", CALL, str(path)]
    with tempfile.TemporaryDirectory() as folder:
        code, words = unprivileged.run(command, user, Path(folder), seconds=60)
    last = (words.splitlines() or [f"it ended by signal {-code}"])[-1]
    return (spoken(int(last)), "") if code == 0 and last.isdigit() else ("", last)


def packaged(listing: str) -> list[Path]:
    """The library among the files of the package."""
    return [Path(line).resolve() for line in listing.splitlines() if Path(line).name == NAME]


def on_loader_path(cache: str) -> list[Path]:
    """Among what `ldconfig -p` prints."""
    return [Path(found) for found in re.findall(rf"^\s*{re.escape(NAME)} .*=> (\S+)$", cache, re.MULTILINE)]


def library_paths(environment: str) -> list[Path]:
    """The folders of LD_LIBRARY_PATH in a file of variables."""
    values = re.findall(r"""^\s*(?:export\s+)?LD_LIBRARY_PATH=["']?([^"'\n]*)""", environment, re.MULTILINE)
    return [Path(folder) for value in values for folder in value.split(":") if folder.startswith("/")]


def candidates(module: AnsibleModule, venv: Path) -> list[Path]:
    """Every library of that name that a job may come by."""
    ldconfig = module.get_bin_path("ldconfig", required=True, opt_dirs=["/sbin", "/usr/sbin"])
    texts = [file.read_text(errors="replace") for file in ENVIRONMENTS if file.exists()]
    return [
        *venv.glob(f"lib/python3*/site-packages/nvidia/nccl/lib/{NAME}"),
        *(folder / NAME for text in texts for folder in library_paths(text)),
        *on_loader_path(module.run_command([ldconfig, "-p"], check_rc=True)[1]),
    ]


def complaint(shadows: dict[str, str], own: str) -> str:
    """What to say of libraries of another version."""
    others = [f"{path} (NCCL {version or 'unknown'})" for path, version in shadows.items() if version != own]
    return (
        f"a job may load {', '.join(others)} in place of the installed NCCL {own}: bring them to one version by "
        "nccl_version or by a pin of the pip package nvidia-nccl-cu…, or remove the other"
        if others
        else ""
    )


def main() -> None:
    """Call the package's own, then look for others."""
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
        module.fail_json(msg=f"the package libnccl2 has no {NAME}, or is not installed")
    own = libraries[0]
    answered, reason = call(own)
    wanted = module.params["version"].partition("-")[0]
    if answered != wanted:
        said = f"says that it is NCCL {answered}" if answered else f"does not work: {reason}"
        module.fail_json(msg=f"{own} {said}, and the package is {module.params['version']}")
    others = {path.resolve() for path in candidates(module, Path(module.params["venv"])) if path.exists()} - {own}
    shadows = {str(path): call(path)[0] for path in sorted(others)}
    words = complaint(shadows, answered)
    if words and module.params["gpu"]:
        module.fail_json(msg=words, shadows=shadows)
    if words:
        module.warn(words)
    module.exit_json(changed=False, library=str(own), answered=answered, shadows=shadows)


if __name__ == "__main__":
    main()
