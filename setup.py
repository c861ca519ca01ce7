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
        if self.editable_mode:
            super().run()
            return
        # What an earlier build has left there would get into the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        target = Path(self.build_lib) / TARGET
        for name in FOLDERS:
            shutil.copytree(name, target / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for name in FILES:
            shutil.copy(name, target / name)
        # A wheel has no symlinks, by which a clone is a collection itself; here it lies where collections do.
        settings = (target / "ansible.cfg").read_text()
        (target / "ansible.cfg").write_text(settings.replace(" = collections:", " = ../../..:"))


setup(cmdclass={"build_py": BuildWithPlaybooks})
