"""Streams whose events are elements of their task: no step handles them (I20, I24).

The transaction that stores events stores what they give as elements as well, and moves the place of the stream behind
them. So a page costs no worker, and each event gives its elements once: those that come while the task does not wait,
between two tries, are taken when it waits again.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import bindparam, select

from headgate.protocol import marks
from headgate.protocol.encoded_values import split_items
from headgate.protocol.errors import ValueMalformed
from headgate.protocol.messages.task_streams import PAGE_ROWS
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.errors import ValueRefused
from headgate.store.streams import rows
from headgate.store.streams.rows import EVENTS, Stream
from headgate.store.tables import dag, dag_run, task_instance, trigger_event
from headgate.store.tasks import elements
from headgate.store.tasks.task_rows import LockedTask

EVENTS_MAX = 1000  # of one transaction
ELEMENTS_MAX = 10_000  # of one transaction, unless a single event gives more: some tenths of a second

_E = trigger_event.c
_PAYLOADS = Prepared(
    select(_E.id, _E.payload).where(*EVENTS, _E.id.between(bindparam("first"), bindparam("last"))).order_by(_E.id)
)
_NAMES = select(dag.c.name, task_instance.c.task_id).select_from(task_instance.join(dag_run).join(dag))


class Absorbed(NamedTuple):
    """What has become of the events that waited: whether there were any, whether more wait, and what was refused.

    With a ``problem`` the task fails, because what comes behind that event would be there without it.
    """

    task: LockedTask
    stream: Stream
    has_come: bool = False
    has_more: bool = False
    problem: str | None = None


def absorb(tx: Tx, task: LockedTask, stream: Stream) -> Absorbed:
    """Store the elements of the events behind the place of a locked task, and move the place: some of many events."""
    assert stream.elements is not None
    ids = rows.next_ids(tx, stream, EVENTS_MAX)
    if not ids:
        return Absorbed(task, stream)
    found = _PAYLOADS.run(tx.connection, of_trigger=stream.trigger_id, first=ids[0], last=ids[-1]).fetchall()
    values: list[bytes] = []
    taken = 0
    problem = None
    for _, payload in found:
        try:
            new = [bytes(payload)] if stream.elements == "event" else split_items(bytes(payload), of_dict=PAGE_ROWS)
        except ValueMalformed as error:
            problem = _problem(tx, task, stream.handled + taken, str(error))
            break
        if taken and len(values) + len(new) > ELEMENTS_MAX:
            break
        values += new
        taken += 1
    if not taken:
        return Absorbed(task, stream, problem=problem)
    try:
        elements.store_next(tx, task, tuple(values))
    except ValueRefused as error:
        return Absorbed(task, stream, problem=str(error))
    task, stream = rows.move(tx, task, stream, found[taken - 1][0], taken, stream.state or tx.encrypt(b"{}"))
    marks.reach("elements.absorbed")
    return Absorbed(task, stream, True, taken < len(found) or len(found) == EVENTS_MAX, problem)


def end(tx: Tx, task: LockedTask) -> str | None:
    """Return why a locked task may not end well with the elements that it has; None if it may."""
    try:
        elements.store_next(tx, task, (), is_end=True)
    except ValueRefused as error:
        return str(error)
    return None


def _problem(tx: Tx, task: LockedTask, position: int, problem: str) -> str:
    names = tx.connection.execute(_NAMES.where(task_instance.c.id == task.id)).one()
    return (
        f"DAG {names.name!r}, task {names.task_id!r}: elements='each' takes a list, or a page, which is a dict with a "
        f"list as its {PAGE_ROWS!r}, and event {position} of its trigger is neither: {problem}"
    )
