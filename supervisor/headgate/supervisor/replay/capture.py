"""Records every frame of the link to the runner, in both directions, in a frame log."""

from __future__ import annotations

import structlog

from headgate.protocol.framelog.log import FrameLogError, FrameLogWriter
from headgate.protocol.link.connection import Observer
from headgate.protocol.link.runner_dialect import Direction, Message
from headgate.protocol.link.wire import Role

log = structlog.get_logger(__name__)


class Capture:
    """Records frames until the disk refuses one; then it stops, and the supervisor goes on."""

    def __init__(self, writer: FrameLogWriter) -> None:
        self._writer = writer
        self._is_recording = True

    def of(self, incarnation: int) -> Observer:
        """Return a function that records the frames of one incarnation."""

        def record(sender: Role, message: Message, body: bytes) -> None:
            if not self._is_recording:
                return
            try:
                self._writer.record(Direction.of(sender), incarnation, message, body)
            except FrameLogError as exc:
                self._is_recording = False
                log.error("the capture ends here", error=str(exc))

        return record

    def close(self) -> None:
        """Close the current file."""
        self._writer.close()
