#!/usr/bin/python
"""Documentation of the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = """
module: stack_lock
short_description: Settle the versions of the stack
description:
  - Runs on the control machine alone. A lock that fits the nodes and the wish is given back as it is; one that does
    not, or that was edited, is refused. Where there is none, one is solved from what M(node_probe) found, registered
    as C(_preflight_probe) on the hosts of group C(cluster), and written to C(stack.lock.yml) beside the inventory.
options:
  inventory_dir:
    description: The folder of the inventory, where the lock lies.
    type: path
    required: true
  frameworks:
    description: What the cluster trains with. Without it the lock is only read.
    type: list
    elements: str
    choices: [tensorflow, pytorch]
  pins:
    description: Versions to insist on, each as C(NAME==VERSION).
    type: list
    elements: str
    default: []
  accelerator:
    description: With V(auto), V(cuda) where all nodes have a driver and the toolkit is found, else V(cpu).
    type: str
    choices: [auto, cpu, cuda]
    default: auto
  configure:
    description: Options for OpenMPI's configure instead of the catalogue's.
    type: list
    elements: str
    default: []
  cache:
    description: Where this machine keeps what it collects; C(farandole) in the user's cache folder when empty.
    type: path
    default: ""
  collect:
    description: Bring the wheels and sources that the lock names into the cache too.
    type: bool
    default: false
attributes:
  check_mode:
    description: Solves, and writes and fetches nothing.
    support: full
author: Farandole
"""

EXAMPLES = """
- name: Settle the versions
  stack_lock:
    inventory_dir: "{{ inventory_dir }}"
    frameworks: [tensorflow, pytorch]
  register: _stack_locked
  run_once: true
"""

RETURN = """
lock:
  description: The lock; in check mode it is not written.
  type: dict
  returned: always
lock_path:
  description: Where it lies.
  type: str
  returned: always
cache:
  description: Where this machine keeps what it collects.
  type: str
  returned: always
"""
