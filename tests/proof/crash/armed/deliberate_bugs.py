"""Deliberate bugs in streams of tasks and in mapped tasks, in real processes: the cell of each must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from sqlalchemy import func, select, update

from headgate.protocol.messages.maps import Available
from headgate.protocol.messages.task_streams import Handled
from headgate.protocol.values import decode_value, encode_value
from headgate.runner.trigger_run import TriggerRun
from headgate.store.scheduling import expansion
from headgate.store.tables import task_stream, trigger_event
from headgate.store.tasks import elements, stream_steps, task_streams
from headgate.tasks.maps import outputs


def place_moved_without_the_outcome() -> None:
    """A try that failed, or whose worker died, has handled all that waited."""
    original = stream_steps.end
    of_stream = (trigger_event.c.trigger_id == task_stream.c.trigger_id) & (trigger_event.c.kind == "event")
    waits = of_stream & (trigger_event.c.id > task_stream.c.handled_to)
    newest = select(func.max(trigger_event.c.id)).where(of_stream).scalar_subquery()
    number = select(func.count()).select_from(trigger_event).where(waits).scalar_subquery()

    def end(tx: Any, task: Any, handled: Handled | None) -> None:
        if handled is None:
            moved = {"handled_to": func.coalesce(newest, 0), "handled": task_stream.c.handled + number}
            tx.connection.execute(update(task_stream).where(task_stream.c.task_instance_id == task.id).values(moved))
        original(tx, task, handled)

    stream_steps.end = end


def state_not_that_of_the_place() -> None:
    """The chain is not stored with the place."""
    original = stream_steps.move

    def move(tx: Any, task: Any, handled: Handled) -> Any:
        state = {**decode_value(handled.state), "chain": ""}
        return original(tx, task, msgspec.structs.replace(handled, state=encode_value(state, where="state")))

    stream_steps.move = move


def retry_from_the_first_event() -> None:
    """A new try begins its stream anew."""
    original = task_streams.begin

    def begin(tx: Any, task: Any, classpath: str, kwargs: bytes, options: Any, timeout_s: float | None) -> Any:
        forgotten = {"handled_to": 0, "handled": 0, "state": None}
        tx.connection.execute(update(task_stream).where(task_stream.c.task_instance_id == task.id).values(forgotten))
        return original(tx, task, classpath, kwargs, options, timeout_s)

    task_streams.begin = begin


def credit_ignored() -> None:
    """A run never stands for want of credit."""
    TriggerRun.has_no_credit = False  # type: ignore[assignment,method-assign]


def instance_left_out() -> None:
    """The instance behind the first window is never made: the next index is counted from the wrong end."""
    original = expansion._made

    def made(tx: Any, own: Any) -> int:
        found = original(tx, own)
        return found + (found == 3)

    expansion._made = made


def values_of_others() -> None:
    """Values of an output are found by their place among those that are there, counted from the newest."""
    original: Any = outputs.MappedOutput.__iter__

    def from_newest(output: Any) -> Iterator[Any]:
        values: list[Any] = list(original(output))
        return iter(values[::-1])

    outputs.MappedOutput.__iter__ = from_newest  # type: ignore[method-assign]


def map_ended_with_its_first_window() -> None:
    """What was made by the first look is taken for all there are to be."""
    original = expansion._available

    def there(tx: Any, seen: Any, own: Any, task: Any, mapped: Any) -> Available:
        return Available(min(original(tx, seen, own, task, mapped).length, task.map.window), is_complete=True)

    expansion._available = there


def elements_of_every_try() -> None:
    """A new try emits behind what the one before has emitted."""
    elements.emit_again = lambda tx, instance: None


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        place_moved_without_the_outcome,
        state_not_that_of_the_place,
        retry_from_the_first_event,
        credit_ignored,
        instance_left_out,
        values_of_others,
        map_ended_with_its_first_window,
        elements_of_every_try,
    )
}
