"""The verbs for elements: those that a step emits before its end, and how far their task is ahead of what is made."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from sqlalchemy import bindparam, select

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.queries import ElementRoom, XComPage
from headgate.protocol.messages.steps import Emitted
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.db.verbs import leased, reading
from headgate.store.ids import DagRunId, Epoch, TaskInstanceId
from headgate.store.streams.rows import Stream
from headgate.store.tables import dag, dag_run, task_instance
from headgate.store.tasks import elements, stream_steps, task_rows, task_streams
from headgate.store.tasks.graphs import GraphVerbs

AHEAD_MAX = 1000  # elements that a step may emit before instances for them are made
_C = task_instance.c


class ElementVerbs(GraphVerbs):
    """The verbs for the elements of a task."""

    def emit(self, epoch: Epoch, instance: TaskInstanceId, token: str, emitted: Emitted) -> ElementRoom | None:
        """Store what a running step has emitted; return how much room there is, None if the token is not the task's.

        May be repeated. Raises `ValueRefused` as `store` does.
        """
        room = self._emit(epoch, instance, token, emitted)
        marks.reach("elements.committed")
        return room

    @leased
    def _emit(self, tx: LeasedTx, instance: TaskInstanceId, token: str, emitted: Emitted) -> ElementRoom | None:
        task = task_rows.locked(tx, instance, token=token, state=TaskState.RUNNING)
        if task is None:
            return None
        elements.store(tx, task, emitted)
        return ElementRoom(AHEAD_MAX - self._unmade(tx, task.id))

    @reading
    def stream_rooms(self, tx: Tx, triggers: Sequence[int]) -> dict[int, stream_steps.Room]:
        """Return how much may wait in the streams that these triggers feed, and how much does.

        Those that feed none are not in the result.
        """
        found = {}
        for trigger_id in triggers:
            stream = task_streams.read_by_trigger(tx, trigger_id)
            if stream is not None:
                found[trigger_id] = self._room(tx, stream)
        return found

    def _room(self, tx: Tx, stream: Stream) -> stream_steps.Room:
        room, unmade = stream_steps.room(tx, stream), self._unmade(tx, stream.task_instance_id)
        if stream.elements != "each":
            return room._replace(elements=unmade)
        # An event is a page here, and may have any number of elements: as many as those before had, or all that may be.
        length = elements.length_of(tx, stream.task_instance_id) or 0
        page = max(1, ceil(length / stream.handled)) if stream.handled else stream.ahead
        return room._replace(ahead=max(1, stream.ahead // page), elements=ceil(unmade / page))

    def _unmade(self, tx: Tx, instance: TaskInstanceId) -> int:
        """Return for how many elements of a task instances are still to be made, by the task that is furthest behind.

        Only tasks count that are expanded as the elements come: no other would be further if there were no more.
        """
        emitted = elements.length_of(tx, instance)
        if emitted is None:
            return 0
        task_id, run, dag_row, spec_hash = _TASK.run(tx.connection, of_id=instance).fetchone()
        if not self.graphs.is_readable(tx, dag_row, spec_hash):
            return 0  # a supervisor that can read it makes the instances
        graph = self.graphs.get(tx, dag_row, spec_hash)
        made = [_made(tx, run, name) for name in graph.expanded_as_emitted.get(task_id, ())]
        return max((emitted - count for count in made if count is not None), default=0)

    @reading
    def pull_elements(
        self, tx: Tx, dag_run: DagRunId, task_id: str, *, after: int, offset: int, limit: int, bytes_max: int
    ) -> XComPage:
        """Return a page of the elements that a task of a run has emitted; it ends with the value over ``bytes_max``."""
        emitter = elements.emitter_of(tx, dag_run, task_id)
        if emitter is None:
            return XComPage((), 0, 0)
        page: list[tuple[int, bytes | None]] = []
        for position, value in elements.read_page(tx, emitter[0], after=after + offset, limit=limit):
            page.append((position, value))
            bytes_max -= len(value)
            if bytes_max <= 0:
                break
        return XComPage(tuple(page), emitter[1], 0)


def _made(tx: Tx, run: DagRunId, task_id: str) -> int | None:
    """Return how many instances of a mapped task are made; None if that does not matter any more."""
    row = _MADE.run(tx.connection, of_run=run, of_task=task_id).fetchone()
    return None if row is None else int(row[0])


_TASK = Prepared(
    select(_C.task_id, _C.dag_run_id, dag.c.id, dag.c.spec_hash)
    .select_from(task_instance.join(dag_run).join(dag))
    .where(_C.id == bindparam("of_id"))
)
_MADE = Prepared(
    select(_C.map_made).where(
        task_rows.unmapped_of(bindparam("of_run")),
        _C.task_id == bindparam("of_task"),
        task_rows.is_in(TaskState.NONE),
    )
)
