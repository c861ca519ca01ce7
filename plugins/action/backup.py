DOCUMENTATION = """
module: backup
short_description: Save the state folder of a cluster, and what only its head has, in a folder of the control machine
description:
  - Runs on the head, whose files are streamed. It needs no space there.
options:
  folder: {description: "The folder, which only its owner can enter.", type: path, required: true}
  state_dir: {description: State folder of the cluster on the control machine., type: path, required: true}
  queue: {description: Whether the head has a queue., type: bool, required: true}
  accounts:
    description: Who starts jobs. The first one is the job user; the others may have no account yet.
    type: list
    elements: str
    required: true
  homes:
    description: Whether their homes are saved, instead of the records of their runs alone.
    type: bool
    default: false
"""

from pathlib import Path
from typing import Any

from farandole.backup.head import REFUSE_STRANGERS, wanted
from farandole.backup.state import save
from farandole.plays.streaming import Streaming


class ActionModule(Streaming):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Saves the state folder, then what the head has."""
        if self._task.check_mode:
            return {"changed": False, "skipped": True}
        folder = Path(arguments["folder"])
        self.stream(REFUSE_STRANGERS, arguments["accounts"][0], what="the accounts")
        save(Path(arguments["state_dir"]), folder)
        notes = []
        for part in wanted(arguments["accounts"], queue=arguments["queue"], homes=arguments["homes"]):
            target = folder / "head" / part.file
            target.parent.mkdir(parents=True, exist_ok=True)
            with self.telling(variables, lambda at=target: f"received {at.stat().st_size / 1e6:.0f} MB of {at.name}"):  # type: ignore[misc]
                note = self.stream(part.save, *[part.account] * bool(part.account), what=part.words, target=target)
            notes += [f"{part.words}: {note}"] if note else []
            if not target.stat().st_size:
                target.unlink()
        return self.shown("\n".join(notes)) if notes else {"changed": False}
