"""Put playbooks, roles and plugins into the wheel, as a collection inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TARGET = "farandole/ansible_collections/farandole/cluster"
FOLDERS = ("playbooks", "roles", "plugins", "files", "group_vars", "inventory/example")
# The last one leads back to the clone.
LEFT_OUT = ("__pycache__", "*.pyc", "collections")
FILES = ("ansible.cfg", "site.yml", "LICENSE", "SECURITY.md")


class BuildWithPlaybooks(build_py):
    """Copies what a run needs; an editable install uses the checkout itself."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / TARGET
        shutil.rmtree(target, ignore_errors=True)
        for name in FOLDERS:
            shutil.copytree(name, target / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for name in FILES:
            shutil.copy(name, target / name)


setup(cmdclass={"build_py": BuildWithPlaybooks})
