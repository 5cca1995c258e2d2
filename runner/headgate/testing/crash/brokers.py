"""What a crash test must be able to do at a broker, and the file log's way of doing it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from headgate.brokers.filelog_writer import FileLogWriter


class Broker(Protocol):
    """A broker as seen from outside, written by whoever wants to prove a producer. Both methods may block."""

    def publish(self, messages: Sequence[str]) -> None:
        """Put one message for each of these names in, with the name somewhere in it, and return when they are in.

        The trigger's events must carry the name too. Called in a thread of its own while the pair runs, with each
        name once.
        """
        ...

    def pending(self) -> Iterable[str]:
        """Return what the broker still holds: every message that it would deliver, or has delivered and not forgotten.

        Texts in which the names stand are enough. A message whose processing is acknowledged is not among them.
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
