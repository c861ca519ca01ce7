"""A role's interface is defined once: argument_specs.yml, defaults and README must agree."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from tables import ROLES, options, page

from farandole.inventory.cluster import JOB_USER, JOB_USER_ID
from farandole.preflight.inventory import OUR_VARIABLES

from .loading import load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_defaults_match_the_argument_specs(role: Path) -> None:
    defaults = yaml.safe_load((role / "defaults/main/main.yml").read_text())
    required = {name for name, option in options(role).items() if option.get("required")}
    assert set(defaults) == set(options(role)) - OUR_VARIABLES - required
    for name, value in defaults.items():
        if "{{" not in str(value):
            assert options(role)[name].get("default") == value, name


def test_every_filter_is_used_and_reports_errors() -> None:
    used = "".join(path.read_text() for folder in ("roles", "playbooks") for path in (ROOT / folder).rglob("*.[yj]*"))
    filters = load("filter", "farandole").FilterModule().filters()
    assert {name for name in filters if f"| farandole.cluster.{name}" not in used} == set()
    with pytest.raises(AnsibleFilterError, match="Farandole did not write"):
        filters["validation_manifest"]({"content": "x"})


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_knows_the_cluster_also_if_it_is_used_alone(role: Path) -> None:
    known = role / "defaults/main/cluster.yml"
    assert known.is_symlink() and known.resolve() == ROOT / "playbooks/group_vars/all/cluster.yml"


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_public_variables_start_with_the_roles_name(role: Path) -> None:
    assert all(name.startswith(f"{role.name}_") for name in set(options(role)) - OUR_VARIABLES)


# With -e NAME=false it is a string, and as such true.
def test_every_use_of_a_boolean_option_converts_it() -> None:
    names = [name for role in ROLES for name, option in options(role).items() if option["type"] == "bool"]
    # Not a filter of that name, nor where it is set: NAME: true, or -e NAME=true in a message.
    use = re.compile(rf"(?<!cluster\.)\b({'|'.join(names)})\b(?!:|=[^=])")
    converted = re.compile(r"\s*(\|\s*default\([^)]*\)\s*)?\|\s*bool\b|\s+is\s+(not\s+)?defined\b")
    wrong = []
    for path in (path for folder in ("roles", "playbooks") for path in (ROOT / folder).rglob("*.[yj]*")):
        text = path.read_text() if path.suffix == ".j2" else re.sub(r"(?m)^ *#.*", "", path.read_text())
        wrong += [
            f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}: {found[1]} without | bool"
            for found in use.finditer(text)
            if path.parent.name != "meta" and not converted.match(text, found.end())
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_the_readmes_table_matches_the_argument_specs(role: Path) -> None:
    assert page(role) == (role / "README.md").read_text(), "run `make tables`"


def test_the_job_user_is_the_same_without_role_base() -> None:
    defaults = yaml.safe_load((ROOT / "roles/base/defaults/main/main.yml").read_text())
    assert (defaults["base_user"], defaults["base_user_id"]) == (JOB_USER, JOB_USER_ID)


@pytest.mark.parametrize("script", ["frameworks/files/build.sh", "horovod/files/install.sh", "stack/files/layer.sh"])
def test_byte_code_is_the_same_in_each_stack(script: str, tmp_path: Path) -> None:
    """Otherwise all of it would be sent to nodes that have the same package in another stack."""
    kept = ("packages=", "python3 -I -m compileall")
    lines = [line for line in (ROOT / "roles" / script).read_text().splitlines() if line.startswith(kept)]
    made = []
    for stack in ("aaaa", "bbbb"):
        venv = tmp_path / stack / "venv"
        file = venv / "lib/python3.11/site-packages/horovod/common.py"
        file.parent.mkdir(parents=True)
        file.write_text("def size():\n    return 1\n")
        given = {**os.environ, "VENV": str(venv), "venv": str(venv)}
        subprocess.run(["sh", "-euc", "\n".join(lines)], env=given, check=True)
        made += [path.read_bytes() for path in venv.rglob("*.pyc")]
    assert len(made) == 2 and made[0] == made[1]
