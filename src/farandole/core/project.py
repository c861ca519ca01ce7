"""Where the files of Farandole itself are: playbooks, roles, plugins, patches."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "ansible.cfg"
