"""The trigger of ``headgate demo --poison``: it fires each message of a file log, and has trouble with some of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

from headgate.brokers.filelog import FileLogTrigger
from headgate.triggers.base import TriggerEvent

SWOLLEN_BYTES: Final = 3 * 1024 * 1024  # of the payload derived from a message that swells: too much for an event
EXIT_CODE: Final = 13  # of a runner that a message kills
MENDED: Final = "mended"  # if there is a file of this name beside the log's folder, runs take every message


class Poisonous(FileLogTrigger):
    """Each argument has the ids of messages: it raises on some, ends the process on some, and makes some too large.

    Once it is mended, it still makes some large, and has no trouble with the others.
    """

    def __init__(
        self,
        path: str,
        group: str,
        *,
        raises: Sequence[int] = (),
        kills: Sequence[int] = (),
        swells: Sequence[int] = (),
    ) -> None:
        super().__init__(path, group)
        self.raises = list(raises)
        self.kills = list(kills)
        self.swells = list(swells)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """See the base class."""
        _, kwargs = super().serialize()
        ours = {"raises": self.raises, "kills": self.kills, "swells": self.swells}
        return "headgate.testing.poisonous.Poisonous", {"path": kwargs["path"], "group": kwargs["group"], **ours}

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Fire every message, as far as its id allows."""
        is_mended = Path(self.path).with_name(MENDED).exists()
        async for message in shared_stream:
            if message["id"] in self.raises and not is_mended:
                raise ValueError(f"message {message['id']} cannot be taken")
            if message["id"] in self.kills and not is_mended:
                os._exit(EXIT_CODE)
            swollen = {"padding": "." * SWOLLEN_BYTES} if message["id"] in self.swells else {}
            yield TriggerEvent({**message, **swollen})
