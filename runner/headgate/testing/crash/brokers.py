"""`Broker`, the interface between a crash test and a broker, and its implementation for the file log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from headgate.brokers.filelog_writer import FileLogWriter


class Broker(Protocol):
    """A broker as seen from outside, written by the author of a producer. Both methods may block.

    For example, a folder, each file of which is a message::

        # folder.py
        import json


        class Folder:
            def __init__(self, path):
                self.path = path
                path.mkdir()

            def publish(self, messages):
                for message in messages:
                    draft = self.path / f"{message}.draft"
                    draft.write_text(json.dumps(message))
                    draft.rename(draft.with_suffix(".json"))

            def pending(self):
                return [path.name for path in self.path.glob("*.json")]
    """

    def publish(self, messages: Sequence[str]) -> None:
        """Publish one message for each name, with the name somewhere in it, and return when the broker has them.

        The trigger's events must carry the name too. Called in another thread while the pair runs, once for each
        name.
        """
        ...

    def pending(self) -> Iterable[str]:
        """Return all messages that the broker still holds: those to be delivered, and those not acknowledged.

        Any text that contains the name will do. Acknowledged messages are not among them.
        """
        ...


class FileLogBroker:
    """A file log read by one group, for ``crash_test(FileLogTrigger(folder, group), FileLogBroker(folder, group))``."""

    def __init__(self, folder: str | os.PathLike[str], group: str, *, partitions: int = 3) -> None:
        self._folder = Path(folder)
        self._group = group
        self._partitions = partitions
        self._published = 0
        self._writer = FileLogWriter(folder)

    def publish(self, messages: Sequence[str]) -> None:
        """Append one line for each, the partitions taking turns."""
        for message in messages:
            self._writer.append(f"p{self._published % self._partitions}", {"message": message})
            self._published += 1

    def pending(self) -> list[str]:
        """Return all lines behind the committed offsets, read from the files themselves."""
        try:
            offsets = json.loads((self._folder / ".groups" / f"{self._group}.json").read_bytes())["offsets"]
        except FileNotFoundError:
            offsets = {}
        lines: list[str] = []
        for path in self._folder.glob("*.jsonl"):
            lines += path.read_bytes()[offsets.get(path.stem, 0) :].decode().splitlines()
        return lines
