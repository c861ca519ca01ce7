DOCUMENTATION = """
module: dataset
short_description: Provide the data for the sample scripts in the control machine's cache
description:
  - Runs on the control machine. It also fetches the data in check mode, because later tasks need the sha256.
  - Determines from the results of M(node_probe), registered as C(_preflight_probe), which nodes lack the data.
options:
  data:
    description: MNIST, or scikit-learn's digits. V(auto) uses what is in the cache, else MNIST if it can be fetched,
      else the digits.
    type: str
    choices: [auto, mnist, digits]
    default: auto
  cache:
    description: Cache on the control machine; empty for C(farandole) in the user's cache folder.
    type: path
    default: ""
  nodes: {description: Names of the nodes that need the data., type: list, elements: str, default: []}
"""

from pathlib import Path
from typing import Any

from farandole.plays.action import LocalAction
from farandole.stack.cache import default_root
from farandole.stack.dataset import lacking, provide


class ActionModule(LocalAction):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Fills the cache and returns which nodes lack the data."""
        cache = Path(arguments["cache"]) if arguments["cache"] else default_root()
        data = provide(arguments["data"], cache, self.say(variables))
        without = lacking(data, arguments["nodes"], variables.get("hostvars") or {})
        # The cache is not part of the cluster.
        return {"changed": False, "source": data.source, "files": data.describe(), "lacking": without}
