"""Deliberate bugs of runners and workers, which import nothing of a supervisor: the cell of each must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headgate.child import queries
from headgate.protocol.messages.queries import SendSignals
from headgate.protocol.messages.signals import SignalSend
from headgate.runner.trigger_run import TriggerRun
from headgate.signals import outgoing
from headgate.tasks.maps import outputs


def credit_ignored() -> None:
    """A run never stands for want of credit."""
    TriggerRun.has_no_credit = False  # type: ignore[assignment,method-assign]


def values_of_others() -> None:
    """Values of an output are found by their place among those that are there, counted from the newest."""
    original: Any = outputs.MappedOutput.__iter__

    def from_newest(output: Any) -> Iterator[Any]:
        values: list[Any] = list(original(output))
        return iter(values[::-1])

    outputs.MappedOutput.__iter__ = from_newest  # type: ignore[method-assign]


def sent_before_the_outcome() -> None:
    """What should go with the outcome of a step is sent at once."""

    def send(signals: Iterable[SignalSend]) -> None:
        queries.send_query(SendSignals(tuple(signals)))

    outgoing.send_with_outcome = send


def dedup_of_each_send() -> None:
    """Whatever the author says, each send has a dedup of its own."""
    original = outgoing.encoded

    def encoded(key: str, value: Any, *, dedup: str | None, **options: Any) -> Any:
        return original(key, value, dedup=None, **options)

    outgoing.encoded = encoded


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug for bug in (credit_ignored, values_of_others, sent_before_the_outcome, dedup_of_each_send)
}
