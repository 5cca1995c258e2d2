"""Signals as they leave a step: encoded, with a dedup, at once or together with its outcome.

A worker runs one step at a time, so those that go with its outcome belong to the process, and threads that the step
starts can add some as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from headgate.protocol.messages.signals import (
    AUTOMATIC,
    SENDS_BYTES_MAX,
    SENDS_MAX,
    SIGNAL_BYTES_MAX,
    SignalSend,
    signal_problem,
)
from headgate.protocol.values import encode_value


class TooManySignals(Exception):
    """More signals are sent at once, or by one step with its outcome, than fit into a message."""


class NoStep(RuntimeError):
    """A signal is to go with the outcome of a step, and none is running."""

    def __init__(self) -> None:
        super().__init__("with_outcome=True is for a step of a task: there is none here, whose outcome would be stored")


class Outgoing:
    """The signals that go with the outcome of one step."""

    def __init__(self) -> None:
        self._signals: list[SignalSend] = []

    def add(self, signals: Iterable[SignalSend]) -> None:
        """Have these signals sent with the outcome. Raises `TooManySignals`, and adds none then."""
        together = [*self._signals, *signals]
        check_size(together, "with the outcome of one step")
        self._signals = together

    def take(self) -> tuple[SignalSend, ...]:
        """Return all of them, in the order in which they were added."""
        return tuple(self._signals)


_outgoing: Outgoing | None = None


@contextmanager
def collected() -> Generator[Outgoing]:
    """Collect the signals that the step inside the block sends with its outcome."""
    global _outgoing
    before, _outgoing = _outgoing, Outgoing()
    try:
        yield _outgoing
    finally:
        _outgoing = before


def send_with_outcome(signals: Iterable[SignalSend]) -> None:
    """Have signals sent with the outcome of the step that runs. Raises `NoStep` and `TooManySignals`."""
    if _outgoing is None:
        raise NoStep
    _outgoing.add(signals)


def encoded(key: str, value: Any, *, dedup: str | None, namespace: str, is_of_run: bool = False) -> SignalSend:
    """Return a signal as it is sent; one without a ``dedup`` gets its own, so that it is sent once in any case.

    Raises ValueError for a key, a namespace or a dedup that cannot be stored, TypeError for one that is no text, and
    `ValueNotSerializable` and `ValueTooLong` for a value.
    """
    for name, text in (("key", key), ("namespace", namespace), ("dedup", dedup)):
        if not isinstance(text, str) and (text is not None or name != "dedup"):
            raise TypeError(f"the {name} of a signal must be a str, not {type(text).__name__}")
    data = encode_value(value, where=f"signal {key!a:.60}", bytes_max=SIGNAL_BYTES_MAX)
    signal = SignalSend(key, data, f"{AUTOMATIC}{uuid4().hex}" if dedup is None else dedup, namespace, is_of_run)
    if (problem := signal_problem(signal)) is not None:
        raise ValueError(problem)
    return signal


def check_size(signals: list[SignalSend], how: str) -> None:
    """Raise `TooManySignals` for more than can be sent together; ``how`` says how they are."""
    if len(signals) > SENDS_MAX:
        raise TooManySignals(f"{len(signals):,} signals are sent {how}; the limit is {SENDS_MAX:,}")
    needed = sum(len(signal.value) for signal in signals)
    if needed > SENDS_BYTES_MAX:
        raise TooManySignals(f"signals of {needed:,} bytes are sent {how}; the limit is {SENDS_BYTES_MAX:,}")
