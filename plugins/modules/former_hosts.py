#!/usr/bin/python
DOCUMENTATION = """
module: former_hosts
short_description: Remove the cluster's names from /etc/hosts
description:
  - Removes the block. If the machine's own name would then no longer resolve, it is mapped to 127.0.1.1, as Debian's
    installer does.
options:
  begin: {description: First line of the block., type: str, required: true}
  end: {description: Last line of the block., type: str, required: true}
"""

import re
import socket
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.folders import put

FILE = Path("/etc/hosts")
LOOPBACK = re.compile(r"127\.0\.0\.1\s")
# Where a name can be known, besides this file.
SERVICES = ("myhostname", "resolve", "dns")


def without(text: str, begin: str, end: str) -> str:
    """The text without the block; one that was cut off ends with the text."""
    return re.sub(rf"^{re.escape(begin)}\n.*?(^{re.escape(end)}(\n|\Z)|\Z)", "", text, flags=re.DOTALL | re.MULTILINE)


def names(text: str) -> set[str]:
    """All names in a table of hosts."""
    return {name for line in text.splitlines() for name in line.partition("#")[0].split()[1:]}


def with_own(text: str, name: str) -> str:
    """The text with the machine's own name, where Debian's installer puts it."""
    lines = text.splitlines(keepends=True)
    place = next((number for number, line in enumerate(lines, 1) if LOOPBACK.match(line)), 0)
    own = " ".join(dict.fromkeys([name, name.partition(".")[0]]))
    return "".join([*lines[:place], f"127.0.1.1\t{own}\n", *lines[place:]])


def main() -> None:
    """Write the file without the block."""
    module = AnsibleModule(
        argument_spec={"begin": {"type": "str", "required": True}, "end": {"type": "str", "required": True}},
        supports_check_mode=True,
    )
    before = FILE.read_text() if FILE.exists() else ""
    after, name = without(before, module.params["begin"], module.params["end"]), socket.gethostname()
    changed = after != before
    # A server that does not answer takes seconds, so it is asked last.
    if changed and name not in names(after):
        asked = (module.run_command(["timeout", "5", "getent", "-s", db, "ahosts", name])[0] for db in SERVICES)
        after = after if 0 in asked else with_own(after, name)
    if changed and not module.check_mode:
        put(FILE, after)
    module.exit_json(
        changed=changed,
        removed=["the cluster's names in /etc/hosts"] if changed else [],
        diff={"before_header": str(FILE), "after_header": str(FILE), "before": before, "after": after},
    )


if __name__ == "__main__":
    main()
