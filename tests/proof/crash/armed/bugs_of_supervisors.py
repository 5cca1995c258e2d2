"""Deliberate bugs of supervisors in streams of tasks, mapped tasks and signals: the cell of each must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy import case, func, insert, select, update

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import Available
from headgate.protocol.messages.steps import Appended
from headgate.protocol.messages.task_streams import Handled
from headgate.protocol.values import decode_value, encode_value
from headgate.scheduling import planning, signal_rules
from headgate.store.scheduling import expansion
from headgate.store.signals import dag_signals, waits
from headgate.store.tables import dag_signal, signal_wait, task_stream, trigger_event
from headgate.store.tasks import elements, run_states, stream_steps, task_streams, values
from headgate.store.tasks.run_states import OwnMap


def place_moved_without_the_outcome() -> None:
    """A try that failed, or whose worker died, has handled all that waited."""
    original = stream_steps.end
    of_stream = (trigger_event.c.trigger_id == task_stream.c.trigger_id) & (trigger_event.c.kind == "event")
    waits = of_stream & (trigger_event.c.id > task_stream.c.handled_to)
    newest = select(func.max(trigger_event.c.id)).where(of_stream).scalar_subquery()
    number = select(func.count()).select_from(trigger_event).where(waits).scalar_subquery()

    def end(tx: Any, task: Any, handled: Handled | None) -> None:
        if handled is None:
            # Before the first outcome there is no state, without which the database takes no count.
            counted = case((task_stream.c.state.is_(None), 0), else_=task_stream.c.handled + number)
            moved = {"handled_to": func.coalesce(newest, 0), "handled": counted}
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


def instance_left_out() -> None:
    """The instance behind the first window is never made: the next index is counted from the wrong end."""
    original = run_states.own_map

    def own_map(tx: Any, own: Any) -> OwnMap:
        found = original(tx, own)
        return found._replace(made=found.made + (found.made == 3))

    run_states.own_map = own_map


def value_of_another_in_its_trigger() -> None:
    """An instance begins in a trigger with the value at the index that another had before it."""
    original = values.value_of_instance
    before: list[bytes | None] = []

    def value_of_instance(tx: Any, instance: Any, source: Any) -> bytes | None:
        before.append(original(tx, instance, source))
        return before[max(len(before) - 2, 0)]

    values.value_of_instance = value_of_instance


def map_ended_with_its_first_window() -> None:
    """What was made by the first look is taken for all there are to be."""
    original = expansion.available

    def there(tx: Any, seen: Any, owns: Any, tasks: Any, mapped: Any) -> Available:
        return Available(min(original(tx, seen, owns, tasks, mapped).length, tasks[0].map.window), is_complete=True)

    expansion.available = there


def elements_of_every_try() -> None:
    """A new try emits behind what the one before has emitted."""
    elements.emit_again = lambda tx, instance: None


def first_element_twice() -> None:
    """The first element of what comes at once is stored twice."""
    original = elements.store_next

    def store_next(tx: Any, task: Any, values: Any, **changes: Any) -> int:
        original(tx, task, values[:1])
        return original(tx, task, values, **changes)

    elements.store_next = store_next


def keys_of_appends_forgotten() -> None:
    """The last value of a step is appended without its key."""
    original = elements.append

    def append(tx: Any, instance: Any, appended: Appended) -> None:
        is_last = decode_value(appended.values[-1]) == "k5"  # it leads back to others, which keep their keys
        keys = (*appended.keys[:-1], None) if is_last else appended.keys
        original(tx, instance, msgspec.structs.replace(appended, keys=keys))

    elements.append = append


def group_all_at_once() -> None:
    """At each index of a group all tasks begin together."""
    planning.decide_index = lambda graph, group, now, at: {
        task_id: "run" for task_id, state in at.items() if state is TaskState.NONE
    }


def signals_from_before_the_run() -> None:
    """A wait is held against all that was ever sent."""
    original = waits.begin

    def begin(tx: Any, run: Any, trigger_id: Any, wait: Any) -> None:
        original(tx, run, trigger_id, wait)
        tx.connection.execute(update(signal_wait).where(signal_wait.c.trigger_id == trigger_id).values(seen_version=0))

    waits.begin = begin


def start_forgotten_while_it_is_under_way() -> None:
    """A signal does not start a task that is under way, and is not remembered."""
    original = signal_rules.act

    def act(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        return "drop" if found == "wait" else found

    signal_rules.act = act


def signal_of_a_dag_passed_over() -> None:
    """The first signal that meets a rule of a DAG waits for no run."""
    original = dag_signals.keep
    calls: list[int] = []

    def keep(tx: Any, dag_id: Any, wait_id: int, rows: Any) -> None:
        calls.append(wait_id)
        if len(calls) > 1:
            original(tx, dag_id, wait_id, rows)

    dag_signals.keep = keep


def signal_of_a_dag_in_two_runs() -> None:
    """The first run has its signal, which waits for another one as well."""
    original = dag_signals.take
    taken: list[int] = []

    def take(tx: Any, dag_id: Any, dag_run_id: Any, run: Any) -> None:
        original(tx, dag_id, dag_run_id, run)
        taken.append(dag_run_id)
        if len(taken) > 1:
            return
        columns = [column for column in dag_signal.c if column.name not in ("id", "dag_run_id")]
        again = select(*columns).where(dag_signal.c.id == run.events[0].event_id)
        tx.connection.execute(insert(dag_signal).from_select([column.name for column in columns], again))

    dag_signals.take = take


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        place_moved_without_the_outcome,
        state_not_that_of_the_place,
        retry_from_the_first_event,
        instance_left_out,
        value_of_another_in_its_trigger,
        map_ended_with_its_first_window,
        elements_of_every_try,
        first_element_twice,
        keys_of_appends_forgotten,
        group_all_at_once,
        signals_from_before_the_run,
        start_forgotten_while_it_is_under_way,
        signal_of_a_dag_passed_over,
        signal_of_a_dag_in_two_runs,
    )
}
