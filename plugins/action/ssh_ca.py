DOCUMENTATION = """
module: ssh_ca
short_description: Sign host and user keys with the cluster's own certificate authority
description:
  - Runs on the control machine. The private keys of the authority (ed25519, mode 0600) are generated there and never
    leave it.
  - A certificate is kept while it matches the request and has more than a third of its lifetime left.
  - Every signed key is recorded. When a node's key changes, its former key is revoked.
  - A new authority is created if there is none, if one of its two keys is missing, or if it comes from a version that
    kept no record of signed keys. All nodes must take part in that run.
options:
  folder: {description: The authority's folder on the control machine., type: path, required: true}
  nodes:
    description:
      - One entry per node with C(name), C(host_key), C(job_keys) by user (empty if it launches no jobs), C(names) for
        the host certificate and C(sources), the addresses from which user certificates are valid.
      - The keys come from the nodes and are not trusted. Anything but a single ed25519 public key, or another node's
        key, is refused.
    type: list
    elements: dict
    required: true
  launchers:
    description: Nodes that launch jobs. Only they get a user certificate; the job keys of other nodes are revoked.
    type: list
    elements: str
    required: true
  mounters:
    description: Nodes where root mounts homes from the head, by a certificate for files alone.
    type: list
    elements: str
    default: []
  homes: {description: Users whose homes these nodes mount., type: list, elements: str, default: []}
  users:
    description: Those who launch jobs, the job user first. Each one's name is the only principal of the certificates.
    type: list
    elements: str
    required: true
  host_days: {description: Lifetime of a host certificate in days., type: int, required: true}
  user_days: {description: Lifetime of a user certificate in days., type: int, required: true}
  passphrase: {description: Passphrase of the authority's private keys., type: str, default: "", no_log: true}
  revoked: {description: Nodes whose keys are revoked from now on., type: list, elements: str, default: []}
  excluded:
    description: Nodes that are left out, for which a new authority does not wait.
    type: list
    elements: str
    default: []
  rotate:
    description: Create a new authority; everything signed so far becomes invalid. All nodes must take part.
    type: bool
    default: false
"""

from pathlib import Path
from typing import Any

from farandole.inventory.state import claim
from farandole.plays.action import LocalAction
from farandole.trust.authority import Authority, serve


class ActionModule(LocalAction):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Signs, renews and revokes as necessary."""
        check_mode, folder = self._task.check_mode, Path(arguments["folder"])
        claim(folder.parent, Path(variables["inventory_dir"]), write=not check_mode)
        authority = Authority(folder, arguments["passphrase"], check_mode=check_mode)
        signed, notice = serve(authority, arguments, variables["groups"]["cluster"])
        if notice:
            self._display.warning(notice)
        return {"changed": authority.changed, **signed}
