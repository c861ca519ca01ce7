"""List a folder of scripts, or the modules of a program, in the form that write_files takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import farandole

PROGRAMS = (".py", ".sh")
# How a program without suffix begins.
SHEBANG = "#!"
SOURCE = Path(farandole.__file__).parents[1]
# Where nodes have the modules of our programs, in the same folders as here.
LIBRARY = "/usr/local/lib/farandole"
LAUNCHER = f"""\
#!/usr/bin/python3 -IB
import sys

sys.path.insert(0, "{LIBRARY}")
from MODULE import main

sys.exit(main())
"""


def folder_files(source: str, target: str, group: str) -> list[dict[str, str]]:
    """Every file below a folder of the control machine, except what editors and Python leave there."""
    root = Path(source)
    inside = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    listed = (path for path in inside if not any(part.startswith((".", "__pycache__")) for part in path.parts))
    texts = {path: (root / path).read_text() for path in listed}
    return [
        {
            "path": f"{target}/{path}",
            "content": text,
            "mode": "0755" if path.suffix in PROGRAMS or text.startswith(SHEBANG) else "0644",
            "group": group,
        }
        for path, text in texts.items()
    ]


def program_files(program: str, commands: Mapping[str, str]) -> list[dict[str, str]]:
    """A package or a module that runs on nodes, and the commands that call the function `main` of a module, by path."""
    own = SOURCE / program.replace(".", "/")
    modules = sorted(own.glob("*.py")) if own.is_dir() else [own.with_suffix(".py")]
    packages = [folder / "__init__.py" for folder in reversed(own.parents) if SOURCE in folder.parents]
    files = {f"{LIBRARY}/{path.relative_to(SOURCE)}": path.read_text() for path in [*packages, *modules]}
    # The commands come last, as a node may lose its power meanwhile.
    launchers = {path: LAUNCHER.replace("MODULE", module) for path, module in commands.items()}
    return [{"path": path, "content": text, "mode": "0644"} for path, text in files.items()] + [
        {"path": path, "content": text, "mode": "0755"} for path, text in launchers.items()
    ]
