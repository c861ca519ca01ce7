DOCUMENTATION = """
name: ready
short_description: Refuse an environment in which the playbooks would not do what they promise
description:
  - Returns its terms, unless the Python package farandole, which the other plugins import, is missing or not the one of
    this collection, or settings of Ansible would let a node deceive the control machine, or revoked nodes take part.
  - Imports nothing of the package.
options:
  _terms: {description: What to return., required: true}
"""

import json
import operator
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

COLLECTION = Path(__file__).resolve().parents[2]
CALLBACK = "farandole.cluster.plain_terminal"


def package(collection: Path) -> Iterator[str]:
    """Why the package cannot be used."""
    manifest, spec = collection / "MANIFEST.json", find_spec("farandole")
    wanted = json.loads(manifest.read_text())["collection_info"]["version"] if manifest.is_file() else ""
    install = f"install farandole {wanted} for {sys.executable}" if wanted else f"run  make -C {collection} setup"
    if spec is None or not spec.origin:
        yield f"this Ansible has no Python package farandole, which {collection} needs: {install}"
        return
    folder, version = Path(spec.origin).resolve().parent, metadata.version("farandole")
    if wanted and version != wanted:
        yield f"the Python package farandole has version {version}, and its collection {wanted}: {install}"
    # Without a version, one contains the other: a clone its package, an installed package its playbooks.
    if not wanted and collection not in folder.parents and folder not in collection.parents:
        yield f"the Python package farandole in {folder} is not that of {collection}: {install}"


def settings() -> Iterator[str]:
    """Settings of Ansible without which a node could pose as another, set variables, or write on the terminal."""
    for name, wanted, good in (
        ("HOST_KEY_CHECKING", "true", bool),
        ("INJECT_FACTS_AS_VARS", "false", operator.not_),
        ("CALLBACKS_ENABLED", CALLBACK, lambda enabled: CALLBACK in enabled),
    ):
        value, origin = constants.config.get_config_value_and_origin(name)
        kind, _, variable = origin.partition("env: ")
        if not good(value):
            yield f"{name.lower()} = {wanted}" + ("" if kind else f"  (unset {variable}, which overrides it)")


class LookupModule(LookupBase):  # type: ignore[misc]
    """The class that Ansible looks for."""

    def run(self, terms: list[Any], variables: Any = None, **options: Any) -> list[Any]:  # noqa: ARG002
        """Refuses, or returns the terms."""
        for why in package(COLLECTION):
            raise AnsibleError(f"nothing was changed: {why}")
        given = context.CLIARGS
        if "always" in (given.get("skip_tags") or ()) or given.get("start_at_task"):
            why = "--skip-tags always and --start-at-task would let nodes that are revoked or left out take part again"
            raise AnsibleError(f"nothing was changed: {why}. Leave this option out")
        if lines := [*settings()]:
            raise AnsibleError(
                f"nothing was changed: {constants.CONFIG_FILE or 'ansible.cfg'} would let a node deceive this machine. "
                f"Use Farandole's:  export ANSIBLE_CONFIG={COLLECTION}/ansible.cfg  or add to [defaults] of yours:\n"
                + "\n".join(lines)
            )
        return terms
