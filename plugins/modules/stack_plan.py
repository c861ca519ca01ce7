#!/usr/bin/python
"""Documentation of the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = """
module: stack_plan
short_description: Say what a run has to do about the stack
description:
  - Runs on the control machine alone, from the lock, what is built and what the nodes were found to have. What lies
    damaged there is thrown away.
options:
  lock:
    description: The lock, as M(stack_lock) returns it.
    type: dict
    default: {}
  back_to:
    description: Instead of O(lock), the id of a stack to go back to; empty for the one that was current before.
    type: str
  builds:
    description: Where the control machine keeps what the builder of this cluster made.
    type: path
    required: true
  nodes:
    description: The nodes of this run.
    type: list
    elements: str
    required: true
  builder:
    description: The node that compiles.
    type: str
    required: true
author: Farandole
"""

EXAMPLES = """
- name: Plan the run
  stack_plan:
    lock: "{{ stack_lock }}"
    builds: .farandole/mine/builds
    nodes: "{{ ansible_play_hosts }}"
    builder: node-1
  run_once: true
"""

RETURN = """
lock:
  description: O(lock), or the lock of the stack to go back to; only its id when no more is known.
  type: dict
  returned: always
plan:
  description: What is to be done.
  returned: always
  type: dict
  contains:
    lacking: {description: "Nodes that do not have the stack.", type: list}
    behind: {description: "Nodes that do not run it.", type: list}
    build: {description: "Whether something has to be compiled or put together.", type: bool}
    pack: {description: "Whether the builder has to pack its stack.", type: bool}
    archive: {description: "The packed stack, null when it is not there.", type: dict}
    parts: {description: "OpenMPI and Horovod as built before, each null when it has to be built.", type: dict}
"""
