#!/usr/bin/python
"""Documentation of the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = """
module: ssh_ca
short_description: Sign host and user keys with the cluster's own CA
description:
  - Runs on the control machine alone; the CA's private keys are made there (ed25519, mode 0600) and never leave it.
  - A certificate that still says what is wished, and has more than a third of its life before it, is kept.
  - Every key that is signed is remembered; one in whose place a node has another is revoked.
  - A new CA is made where there is none, where half of it is missing, or where a former version kept no list of what it
    signed. All nodes have to take part in that.
options:
  folder:
    description: Where the CA lives on the control machine.
    type: path
    required: true
  nodes:
    description:
      - One entry per node with C(name), C(host_key), C(job_key) (empty where no jobs are launched), C(names) for the
        host certificate and C(sources), the addresses from which the user certificate is good.
      - The keys are what the node says; anything but one ed25519 public key, or the key of another node, is refused.
    type: list
    elements: dict
    required: true
  launchers:
    description:
      - Nodes where jobs are launched; no other gets a user certificate, and what another one ever had is revoked.
    type: list
    elements: str
    required: true
  user:
    description: The one principal of user certificates.
    type: str
    required: true
  host_days:
    description: Days for which a host certificate is good.
    type: int
    required: true
  user_days:
    description: Days for which a user certificate is good.
    type: int
    required: true
  passphrase:
    description: Passphrase of the CA's private keys.
    type: str
    default: ""
  revoked:
    description: Nodes whose keys are revoked from now on.
    type: list
    elements: str
    default: []
  rotate:
    description: Make a new CA, so that nothing signed by the old one stays valid. All nodes have to take part.
    type: bool
    default: false
author: Farandole
"""

EXAMPLES = """
- name: Sign the keys of the nodes
  ssh_ca:
    folder: .farandole/mine/ca
    nodes: "{{ nodes }}"
    launchers: "{{ groups['head'] }}"
    user: trainer
    host_days: 3650
    user_days: 365
"""

RETURN = """
host_ca:
  description: Public key of the host CA.
  type: str
  returned: always
user_ca:
  description: Public key of the user CA.
  type: str
  returned: always
host:
  description: Host certificate by name of node.
  type: dict
  returned: always
user:
  description: User certificate by name of node.
  type: dict
  returned: always
revoked:
  description: Every key revoked under this CA, a line each.
  type: list
  returned: always
"""
