"""A job keeps the stack with which it began, however it was started."""

import os
import subprocess
from pathlib import Path

import pytest
from jinja2 import Environment

from .loading import ROOT
from .prefix import program

OLD, NEW = "aaaa00000000", "bbbb00000000"
SHOW = "basename $(dirname $(dirname $(dirname $(readlink -f $(command -v python)))))"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with two stacks of different OpenMPIs, and the role's files."""
    for stack, mpi in ((OLD, "m1"), (NEW, "m2")):
        folder = tmp_path / "opt/farandole/stacks" / stack
        program(folder / "venv/bin/python", "")
        program(folder / "venv/bin/horovodrun", '"$@"')
        program(folder.parents[1] / "mpi" / mpi / "bin/mpirun", 'echo "$0"; "$@"')
        program(folder.parents[1] / "mpi" / mpi / "bin/orted", f'echo {mpi}; "$@"')
        (folder / "mpi").symlink_to(f"../../mpi/{mpi}")
    switch(tmp_path, OLD)
    settings = {"_fabric_choice": {"network": "", "interfaces": {"node-1": "eth0"}}, "_fabric_interface": "eth0"}
    files = {"environment": ("environment", ""), "mpirun": ("wrapper", "mpi/bin/mpirun")}
    files |= {"horovodrun": ("wrapper", "venv/bin/horovodrun"), "orted": ("wrapper", "mpi/bin/orted")}
    for name, (template, started) in files.items():
        text = (ROOT / f"roles/fabric/templates/{template}.j2").read_text()
        templates = Environment(autoescape=False, trim_blocks=True)  # noqa: S701
        # As in Ansible.
        templates.filters["unique"] = lambda values: [*{*values}]
        made = templates.from_string(text).render(**settings, fabric_stall_shutdown=600, _fabric_program=started)
        made = made.replace("/opt/farandole", f"{tmp_path}/opt/farandole").replace("/etc/farandole", str(tmp_path))
        (tmp_path / name).write_text(made)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def switch(node: Path, stack: str) -> None:
    link = node / "opt/farandole/current"
    link.unlink(missing_ok=True)
    link.symlink_to(f"stacks/{stack}")


def ran(node: Path, script: str, **environment: str) -> list[str]:
    given = {"PATH": os.environ["PATH"], "HOME": str(node), "SHOW": SHOW, **environment}
    done = subprocess.run(["sh", "-euc", script], cwd=node, env=given, capture_output=True, text=True, check=True)
    return done.stdout.split()


SWITCH = f"ln -sfn stacks/{NEW} opt/farandole/current"


def test_a_job_keeps_its_stack_and_the_next_one_takes_the_current_one(node: Path) -> None:
    inner = f"{SWITCH}; eval $SHOW; ./mpirun sh -c 'eval $SHOW'; . ./environment; eval $SHOW"
    found = ran(node, f'./horovodrun sh -c "{inner}"; ./horovodrun sh -c "eval $SHOW"')
    assert found == [OLD, f"{node}/opt/farandole/stacks/{OLD}/mpi/bin/mpirun", OLD, OLD, NEW]


def test_a_shell_keeps_its_stack_while_it_is_there_and_starts_jobs_with_the_current_one(node: Path) -> None:
    gone = f"rm -r opt/farandole/stacks/{OLD}"
    script = f"{SWITCH}; eval $SHOW; ./horovodrun sh -c 'eval $SHOW'; {gone}; eval $SHOW; env"
    *found, settings = ran(node, f". ./environment; {script} | sed -n /FARANDOLE_STACK/p | wc -l")
    assert (found, settings) == ([OLD, NEW, NEW], "0")


def test_other_nodes_use_the_stack_of_the_one_where_mpirun_was_started(node: Path) -> None:
    switch(node, NEW)
    prefix = node / "opt/farandole"
    job = "./orted sh -c 'eval $SHOW'"
    assert ran(node, f"PATH={prefix}/stacks/{OLD}/mpi/bin:$PATH {job}") == ["m1", OLD]
    # By horovodrun, which passes its own path on to the ranks.
    assert ran(node, f"PATH={prefix}/mpi/m1/bin:$PATH {job}") == ["m1", NEW]
    # As scripts may name it, and as without a prefix; a node may lack the other one's stack.
    for path in (f"{prefix}/current/mpi/bin", f"{node}", f"{prefix}/stacks/cccc/mpi/bin", f"{prefix}/mpi/m3/bin"):
        assert ran(node, f"PATH={path}:$PATH {job}") == ["m2", NEW], path
