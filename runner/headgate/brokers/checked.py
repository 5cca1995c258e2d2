"""`CheckedProducer`: the base of producers of which ``headgate brokers check`` can say whether they could read."""

from __future__ import annotations

import abc
from typing import Final

import structlog

from headgate.triggers.named_values import Connection
from headgate.triggers.shared_stream import SharedStreamProducer

WARNINGS_MAX: Final = 100  # of one producer

_log = structlog.get_logger("headgate.brokers")


class CheckedProducer(SharedStreamProducer):
    """A producer that can look at its source and leave. ``connection_name`` is that of a stored connection.

    ``connection`` is that connection, which whoever calls `look` has set before; ``warnings`` are the sentences of
    `warn`.
    """

    def __init__(self, connection_name: str | None) -> None:
        self.connection_name = connection_name
        self.connection: Connection | None = None
        self.warnings: list[str] = []  # what is dangerous about the broker's settings, a sentence each

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What the stream is called in logs and errors, without secrets: ``"redis stream orders"``."""

    @abc.abstractmethod
    def look(self) -> None:
        """Connect only to see whether it can be read, without disturbing a running reader; it may block.

        Raises `headgate.brokers.broker_errors.BrokerMisconfigured`, and what the client raises.
        """

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close what `look` has opened, also if it has raised."""

    def lag(self) -> int | None:
        """Return how many messages the broker still has, those held included; None if that is unknown."""
        return None

    def warn(self, danger: str) -> None:
        """Note what the broker's settings may lose: it is logged once, and shown by ``headgate brokers check``."""
        if danger not in self.warnings and len(self.warnings) < WARNINGS_MAX:
            self.warnings.append(danger)
            _log.warning(danger, stream=self.name)
