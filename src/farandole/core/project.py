"""Where the files of Farandole itself are: playbooks, roles, plugins, patches."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Tasks of its roles have names that begin so.
COLLECTION = "farandole.cluster."
CONFIG = ROOT / "ansible.cfg"
