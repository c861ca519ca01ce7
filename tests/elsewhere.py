"""The collection, built from this clone and installed into a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# What no playbook begins without.
SAFE = "[defaults]\ninject_facts_as_vars = false\ncallbacks_enabled = farandole.cluster.plain_terminal\n"


def run(folder: Path, program: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Ansible there, without any settings of this clone."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    own = {"ANSIBLE_NOCOLOR": "1", "COLUMNS": "500", "PYTHONHASHSEED": "0"}
    command = [BIN / program, *arguments]
    return subprocess.run(
        command, cwd=folder, env={**known, **own, **variables}, capture_output=True, text=True, check=False
    )


def install(folder: Path) -> None:
    """Install it there, with the settings that it needs."""
    # Whatever lies in the folder is packed.
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True).stdout
    copy = ["rsync", "--archive", "--from0", "--files-from=-", "--ignore-missing-args"]
    subprocess.run([*copy, ROOT, folder / "tree"], input=names, check=True)
    built = run(folder, "ansible-galaxy", "collection", "build", "--output-path", folder, folder / "tree")
    assert built.returncode == 0, built.stderr
    (archive,) = folder.glob("farandole-cluster-*.tar.gz")
    done = run(folder, "ansible-galaxy", "collection", "install", "--offline", "-p", folder / "collections", archive)
    assert done.returncode == 0, done.stderr
    (folder / "ansible.cfg").write_text(f"{SAFE}collections_path = collections\n")
