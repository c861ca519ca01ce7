"""Documentation of the action of this name, which runs on the controller alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Judge the inventory and the nodes
description:
  - Looks for what would make a later step fail, and names host, cause and cure of each.
  - Fails when there is a finding. Opens no connection and changes no host. Meant for C(run_once).
options:
  phase:
    description:
      - V(inventory) judges groups, names, addresses and variables of the inventory.
      - V(hosts) judges what the module M(node_probe) found, registered as C(_preflight_probe) on each host of
        the play, and writes it with the findings to C(preflight.json) in O(state_dir), in check mode too.
    type: str
    choices: [inventory, hosts]
    required: true
  roles_dir:
    description: Where the roles lie; their argument specs say which variables exist. Needed by V(inventory).
    type: path
  state_dir:
    description:
      - Directory on the controller for C(preflight.json). It belongs to the first inventory that uses it, and any
        other is refused.
    type: path
    required: true
attributes:
  check_mode:
    description: Changes no host, in check mode or out of it.
    support: full
author: Farandole
"""

EXAMPLES = r"""
- name: Judge the inventory
  preflight:
    phase: inventory
    roles_dir: "{{ role_path | dirname }}"
    state_dir: "{{ preflight_state_dir }}"
  run_once: true
"""

RETURN = r"""
msg:
  description: The findings as a numbered text, or one line that says there is none.
  returned: always
  type: str
  sample: "4 nodes, Debian 12: no finding"
"""
