#!/usr/bin/python
"""Documentation of the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = """
module: dataset
short_description: Bring the data of the sample scripts into the control machine's cache
description:
  - Runs on the control machine alone. The data is one plain tar with four files in the format of MNIST and a line that
    says what they are, C(SOURCE).
  - Nodes are not asked what they have; what M(node_probe) found counts, registered as C(_preflight_probe).
options:
  data:
    description: V(mnist) or V(digits), which are those of scikit-learn; with V(auto) what is in the cache, else MNIST
      where it can be fetched, else the digits.
    type: str
    choices: [auto, mnist, digits]
    default: auto
  cache:
    description: Where this machine keeps what it collects; C(farandole) in the user's cache folder when empty.
    type: path
    default: ""
  nodes:
    description: The nodes that are to have it.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Fills the cache in check mode too, as the tasks that follow need to know the sha256.
    support: full
author: Farandole
"""

EXAMPLES = """
- name: Bring the data into the cache
  dataset:
    data: auto
    nodes: "{{ ansible_play_hosts }}"
  register: _samples_dataset
  run_once: true
"""

RETURN = """
name:
  description: C(mnist) or C(digits).
  type: str
  returned: always
source:
  description: The line of C(SOURCE).
  type: str
  returned: always
path:
  description: The tar on the control machine.
  type: str
  returned: always
file:
  description: What to call it elsewhere; another content has another name.
  type: str
  returned: always
sha256:
  description: Of the tar.
  type: str
  returned: always
files:
  description: The sha256 of each file in it.
  type: dict
  returned: always
lacking:
  description: The nodes that do not have just these files.
  type: list
  returned: always
"""
