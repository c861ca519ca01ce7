"""The settings of Ansible that the playbooks rely on, where another ansible.cfg than ours is in use."""

from configparser import RawConfigParser
from pathlib import Path

from ansible import constants

from farandole.core.findings import Finding, finding
from farandole.core.project import CONFIG

# What finds the collection, which has been found.
FOUND = "collections_path"


def judge_ansible() -> list[Finding]:
    """Note the settings that ours has besides those without which no playbook begins."""
    lines = lacking(CONFIG, *([Path(constants.CONFIG_FILE)] if constants.CONFIG_FILE else []))
    return [finding("ansible-settings", "all", seen="; ".join(lines))] if lines else []


def lacking(ours: Path, *used: Path) -> list[str]:
    """The lines of our ansible.cfg, by section, that set what the one in use does not."""
    own, other = RawConfigParser(), RawConfigParser()
    own.read(ours)
    other.read(used)
    lines = []
    for section in own.sections():
        options = [name for name in own[section] if name != FOUND and not other.has_option(section, name)]
        lines += [f"[{section}]"] * bool(options)
        lines += [f"{name} = {' '.join(own[section][name].split())}" for name in options]
    return lines
