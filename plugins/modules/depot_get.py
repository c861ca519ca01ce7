#!/usr/bin/python
"""Documentation of the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = """
module: depot_get
short_description: Bring a file of a node to the control machine
description:
  - Checks the file by its sha256 and puts it in place only when it is whole. It has to be readable by the user that
    logs in.
options:
  path:
    description: The file on the node.
    type: path
    required: true
  sha256:
    description: What it must be.
    type: str
    required: true
  to:
    description: Where it goes on the control machine.
    type: path
    required: true
  about:
    description: What is written down beside it.
    type: dict
    default: {}
author: Farandole
"""

EXAMPLES = """
- name: Fetch the packed stack
  depot_get:
    path: /opt/farandole/build/out/stack.tar.zst
    sha256: 3b1f...
    to: /root/.cache/farandole/stacks/stack.tar.zst
"""

RETURN = """
file:
  description: What has arrived, with C(path), C(name), C(sha256), C(size) and all of O(about).
  type: dict
  returned: not in check mode
"""
