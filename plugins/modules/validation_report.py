"""The documentation of the action plugin of the same name; nothing of it runs on a node."""

from __future__ import annotations

DOCUMENTATION = """
module: validation_report
short_description: Judge the jobs that were run, and write the report
description:
  - Runs on the control machine alone, and shows the report as a table.
options:
  folder:
    description: Where reports are kept; each run makes a folder in it, and C(latest) points to the newest.
    type: path
    required: true
  trust:
    description: What F(trust.py) said, by the node on which it ran.
    type: dict
    required: true
  stacks:
    description: What M(stack_proof) said, by the node.
    type: dict
    default: {}
  inventory:
    description: The inventory, for the commands that mend.
    type: path
    default: inventory
  jobs:
    description: The registered results of the loop over the jobs.
    type: list
    elements: dict
    required: true
  bars:
    description: From what on a value is good, where that is not the default.
    type: dict
    default: {}
  about:
    description: What the report says of the run itself.
    type: dict
    required: true
  begun:
    description: When the run began, in seconds of the epoch.
    type: float
    required: true
  unmeasured:
    description: What could not be measured here, and why.
    type: dict
    default: {}
author: Farandole
"""

EXAMPLES = """
- name: Judge the cluster
  validation_report:
    folder: .farandole/mine/reports
    trust: {node-1: {rc: 0, stdout: "machines: 2 of 2"}}
    jobs: "{{ _validation_jobs.results }}"
    bars: {efficiency: 0.9}
    about: {cluster: mine}
    begun: 1700000000
"""

RETURN = """
verdict:
  description: C(green) when something was measured and nothing is red, else C(red).
  type: str
  returned: always
report:
  description: The folder of this run's report.
  type: str
  returned: always
"""
