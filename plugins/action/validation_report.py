DOCUMENTATION = """
module: validation_report
short_description: Judge the results of a validation and write the report
description:
  - Runs on the control machine and shows the report as a table. A red verdict does not fail this task.
options:
  folder:
    description: Folder for reports; each run gets a subfolder, and C(latest) points to the newest.
    type: path
    required: true
  trust: {description: "The results of C(trust.py), by the node that ran it.", type: dict, required: true}
  stacks: {description: "The results of M(stack_proof), by node.", type: dict, default: {}}
  files:
    description: "By node: the folders that it shares with others, and the results of C(shared_files.py)."
    type: dict
    default: {}
  inventory: {description: "The inventory, for the commands in the report.", type: path, default: inventory}
  jobs: {description: Registered results of the job loop., type: list, elements: dict, required: true}
  bars:
    description: Pass thresholds that differ from their defaults; the README of role validation lists them.
    type: dict
    suboptions:
      accuracy: {description: See the role., type: float}
      parity: {description: See the role., type: float}
      mpi_bandwidth: {description: See the role., type: float}
      mpi_latency: {description: See the role., type: float}
      efficiency: {description: See the role., type: float}
      yardstick: {description: See the role., type: float}
      pace: {description: See the role., type: float}
  about: {description: Information about the run to include in the report., type: dict, required: true}
  started: {description: "Start of the run, in seconds since 1970.", type: float, required: true}
  phases: {description: "When each part of the run began, in seconds since 1970, by its name.", type: dict, default: {}}
  unmeasured: {description: "What could not be measured here, each with the reason.", type: dict, default: {}}
"""

from pathlib import Path
from typing import Any

from farandole.inventory.state import claim
from farandole.plays.action import LocalAction
from farandole.validation.report import make


class ActionModule(LocalAction):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Judges the results and writes the report; the play acts on the verdict."""
        folder = Path(arguments["folder"])
        claim(folder.parent, Path(variables["inventory_dir"]))
        made = make(folder, arguments)
        return {**made, **self.shown(made["msg"])}
