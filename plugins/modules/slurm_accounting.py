#!/usr/bin/python
DOCUMENTATION = """
module: slurm_accounting
short_description: Make the database of slurmdbd, and the accounts and users in it
description:
  - Without O(accounts), makes the database, which only the system account C(slurm) may use, by the socket and without
    a password.
  - With O(accounts), adds what is missing to the accounting of a running slurmdbd. It never removes anything, as the
    history of jobs depends on it; a user who is in an account no longer may not submit to it.
options:
  database: {description: Name of the database., type: str, required: true}
  cluster: {description: Name of the cluster in the accounting., type: str, required: true}
  accounts: {description: Users and share of each account., type: dict}
"""

import re
import shutil
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.farandole.cluster.plugins.module_utils.slurm import patient

PATIENCE_S = 30
SACCTMGR = ["sacctmgr", "--noheader", "--parsable2"]


class Accounting:
    """What the accounting has, and what it needs."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.added: list[str] = []

    def database(self, name: str) -> None:
        """Make the database and its user."""
        # A grant on a database that is gone would remain.
        asked = "SELECT db FROM mysql.db JOIN information_schema.schemata ON db = schema_name WHERE user = 'slurm'"
        code, out, err = self.module.run_command(["mariadb", "--batch", "--skip-column-names", "--execute", asked])
        if code and self.module.check_mode:
            # It would be installed and started before.
            self.added.append(name)
            return
        if code:
            why = self.last_error() if "Can't connect" in err else ""
            self.fail(f"MariaDB does not answer: {why or err.strip()}; see  journalctl --unit mariadb")
        if name not in out.split():
            self.added.append(f"database {name}")
            make = (
                f"CREATE DATABASE IF NOT EXISTS {name}; "
                "CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket; "
                f"GRANT ALL ON {name}.* TO slurm@localhost"
            )
            if not self.module.check_mode:
                self.module.run_command(["mariadb", "--execute", make], check_rc=True)

    def last_error(self) -> str:
        """The first error of MariaDB's last start; empty if there is none."""
        _, told, _ = self.module.run_command(["journalctl", "--unit=mariadb", "--lines=30", "--output=cat"])
        errors = re.findall(r"\[ERROR\] (.*)", re.split("Starting (?:mariadb.service|MariaDB)", told)[-1])
        return errors[0] if errors else ""

    def accounts(self, cluster: str, wanted: dict[str, Any]) -> None:
        """Add the cluster, accounts and users that are missing."""
        if patient(self.module, [*SACCTMGR, "list", "cluster"], PATIENCE_S)[0]:
            if not self.module.check_mode:
                self.fail(f"slurmdbd does not answer after {PATIENCE_S} s; see  journalctl --unit slurmdbd")
            self.added.append(cluster)
            return
        if cluster not in self.ask("list", "cluster", "format=cluster"):
            self.add("cluster", cluster)
        columns = ("list", "associations", f"cluster={cluster}", "format=account,user,fairshare")
        rows = [row.split("|") for row in self.ask(*columns)]
        # Those without a user are the accounts.
        have = {(row[0], row[1]): row[2] for row in rows if len(row) > 2}
        for account, wish in wanted.items():
            self.account(account, cluster, wish, have)

    def account(self, name: str, cluster: str, wish: dict[str, Any], have: dict[tuple[str, str], str]) -> None:
        """Add an account and its users, and let no others submit to it."""
        share = str(wish["share"])
        if (name, "") not in have:
            self.add("account", name, f"cluster={cluster}", f"fairshare={share}", "description=farandole")
        elif have[name, ""] != share:
            self.change("modify", "account", name, "set", f"fairshare={share}")
        users = {user: shares for (account, user), shares in have.items() if account == name and user}
        for user in wish["users"]:
            if user not in users:
                self.add("user", user, f"cluster={cluster}", f"account={name}")
            elif users[user] == "0":
                self.change(
                    "modify", "user", user, "where", f"account={name}", "set", "fairshare=1", "maxsubmitjobs=-1"
                )
        for user in users.keys() - {*wish["users"]}:
            if users[user] != "0":
                # Their history stays.
                self.change("modify", "user", user, "where", f"account={name}", "set", "fairshare=0", "maxsubmitjobs=0")

    def ask(self, *arguments: str) -> list[str]:
        _, out, _ = self.module.run_command([*SACCTMGR, *arguments], check_rc=True)
        return [*out.splitlines()]

    def add(self, *arguments: str) -> None:
        self.change("add", *arguments)

    def change(self, *arguments: str) -> None:
        self.added.append(" ".join(arguments))
        if not self.module.check_mode:
            code, out, err = self.module.run_command(["sacctmgr", "--immediate", "--quiet", *arguments])
            if code:
                self.fail(f"sacctmgr {' '.join(arguments)} failed: {(err or out).strip()}")

    def fail(self, message: str) -> None:
        self.module.fail_json(msg=message)


def main() -> None:
    """Add what is missing."""
    module = AnsibleModule(
        argument_spec={
            "database": {"type": "str", "required": True},
            "cluster": {"type": "str", "required": True},
            "accounts": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    if module.check_mode and not shutil.which("sacctmgr"):
        # They would be installed before.
        module.exit_json(changed=True, added=[module.params["database"]])
    accounting = Accounting(module)
    if module.params["accounts"] is None:
        accounting.database(module.params["database"])
    else:
        accounting.accounts(module.params["cluster"], module.params["accounts"])
    module.exit_json(changed=bool(accounting.added), added=accounting.added)


if __name__ == "__main__":
    main()
