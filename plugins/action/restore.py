DOCUMENTATION = """
module: restore
short_description: Put on the head what another head had
description:
  - Runs on the head. If it is interrupted, it can be run again.
options:
  folder: {description: The folder of a backup that has been unpacked., type: path, required: true}
  queue: {description: Whether the head has a queue., type: bool, required: true}
  accounts: {description: Who starts jobs., type: list, elements: str, required: true}
  replace: {description: Forget jobs of the queue that the backup lacks., type: bool, default: false}
"""

from pathlib import Path
from typing import Any

from farandole.backup.head import REFUSE_STRANGERS, saved
from farandole.plays.streaming import Streaming


class ActionModule(Streaming):
    def act(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Restores each part, and says what was done."""
        if self._task.check_mode:
            return {"changed": True}
        folder, told = Path(arguments["folder"]) / "head", []
        people = sorted({part.account for part in saved(folder)} & {*arguments["accounts"]})
        self.stream(REFUSE_STRANGERS, *people, what="the accounts")
        for part in saved(folder):
            if part.account not in (*arguments["accounts"], "") or not (part.account or arguments["queue"]):
                told.append(f"{part.words}: left out, as this inventory has no such thing")
                continue
            self.tell(variables, part.words)
            source = folder / part.file
            words = [part.account] if part.account else [str(arguments["replace"]), str(source.stat().st_size)]
            done = self.stream(part.load, *words, what=part.words, source=source)
            told.append(f"{part.words}: {done or 'restored'}")
        return {**self.shown("\n".join(told)), "changed": True}
