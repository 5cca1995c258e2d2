"""Read-only queries about supervisors, watchers and triggers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, and_, func, literal_column, or_, select

from headgate.scheduling.why import RunnerEnds
from headgate.store.db.transaction import Tx, is_alive
from headgate.store.db.verbs import Verbs, reading
from headgate.store.errors import NoSuchRow
from headgate.store.facts import trigger_runs
from headgate.store.facts.supervisor_status import PublishedStatus, published, runner_told
from headgate.store.facts.trigger_runs import TriggerRunRow
from headgate.store.ids import instance_name
from headgate.store.inspect.dags import NEWEST_SHOWN, ROWS_PER_PAGE_MAX
from headgate.store.inspect.strikes import StrikeLine, count_passed_over, strikes_of
from headgate.store.inspect.why_facts import BY_SILENCE, Liveness, state_of
from headgate.store.tables import (
    OPEN_TRIGGER,
    asset,
    asset_watcher,
    dag,
    dag_run,
    redelivery,
    stream,
    task_instance,
    task_stream,
    trigger,
    trigger_event,
    triggerer,
)
from headgate.store.triggers.leases import TriggererRow, triggerer_row

PAST_S = 86_400.0  # a supervisor that ended longer ago is listed if that is asked for
LIST_WATCHERS_MAX = 100_000  # in one list: a hundred supervisors at full capacity
EVENTS_COUNTED_MAX = 10_001  # of one trigger, which may have millions: its newest ones
_T = triggerer.c
_PREFIX = "trigger-"  # of the name of a trigger without a watcher, in lists and logs


class TriggererLine(TriggererRow, frozen=True):
    """One lease, with the numbers of its open triggers and tasks.

    ``state`` is a `SupervisorState`, but `running` or `draining` for one that is alive and `stopped` for one that has
    ended. Of those that are alive, ``runner`` is the state of the runner, and ``runner_ends`` how it has ended of late.
    ``dag_files`` is a digest of the DAG files of one that runs tasks, the same on all that have the same files, and
    ``dag_files_since`` when they have become these.
    """

    triggers: int = 0
    tasks: int = 0
    state: str = ""
    runner: str = ""
    runner_ends: RunnerEnds | None = None
    dag_files: str | None = None
    dag_files_since: datetime | None = None

    def runner_told(self) -> str:
        """Return how its runner is, in words."""
        return runner_told(self.runner, self.runner_ends)


class WatcherRow(msgspec.Struct, frozen=True):
    """One watcher that was not removed, with the state of its trigger.

    ``signal`` is the key under which its events are sent as signals, in ``signal_namespace``.
    """

    id: int
    name: str
    asset: str | None
    trigger_id: int
    classpath: str
    queue: str
    created_date: datetime
    triggerer_id: int | None
    failure_count: int
    last_error: str | None
    last_failed_at: datetime | None
    finished_at: datetime | None
    hold: str | None
    hold_reason: str | None
    held_at: datetime | None
    max_deliveries: int
    signal: str | None = None
    signal_namespace: str | None = None


class TriggerLine(msgspec.Struct, frozen=True):
    """One trigger. ``name`` is its watcher's, or ``trigger-<id>``.

    ``dag``, ``run_id``, ``task_id`` and ``trigger_timeout`` are those of the task that waits for it.
    """

    id: int
    name: str
    classpath: str
    created_date: datetime
    queue: str
    triggerer_id: int | None
    failure_count: int
    last_error: str | None
    last_failed_at: datetime | None
    finished_at: datetime | None
    dag: str | None
    run_id: str | None
    task_id: str | None
    trigger_timeout: datetime | None
    removed_at: datetime | None
    hold: str | None
    hold_reason: str | None
    held_at: datetime | None
    map_index: int | None = None

    @property
    def task(self) -> str | None:
        """The name of the task, or of the instance of a mapped one, that waits for it."""
        return (
            None
            if self.task_id is None
            else instance_name(self.task_id, -1 if self.map_index is None else self.map_index)
        )


class TriggerDetail(msgspec.Struct, frozen=True):
    """All details of a trigger except its kwargs.

    ``events`` counts its newest ones up to `EVENTS_COUNTED_MAX`, and ``redelivered`` the later deliveries of these.

    ``strikes`` are the newest messages that it has failed on; ``passed_over`` counts those that it is not given any
    more, because it has failed on them ``max_deliveries`` times.
    """

    line: TriggerLine
    asset: str | None
    last_failed_run_id: str | None
    events: int
    redelivered: int
    newest_event_id: int | None
    newest_event_at: datetime | None
    stream: str | None
    max_deliveries: int
    passed_over: int
    strikes: tuple[StrikeLine, ...]
    signal: str | None = None
    signal_namespace: str | None = None


_COLUMNS = (
    *(trigger.c.id, asset_watcher.c.name, trigger.c.classpath, trigger.c.created_date, trigger.c.queue),
    *(trigger.c.triggerer_id, trigger.c.failure_count, trigger.c.last_error, trigger.c.last_failed_at),
    *(trigger.c.finished_at, dag.c.name.label("dag"), dag_run.c.run_id, task_instance.c.task_id),
    *(task_instance.c.trigger_timeout, trigger.c.removed_at, trigger.c.hold, trigger.c.hold_reason, trigger.c.held_at),
    task_instance.c.map_index,
)
_waiting = task_instance.alias()
_ITS_TASK = func.coalesce(  # the stream of a task is its trigger whether the task waits or not
    task_stream.c.task_instance_id, select(_waiting.c.id).where(_waiting.c.trigger_id == trigger.c.id).scalar_subquery()
)
_FROM = (
    trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id)
    .outerjoin(task_stream, task_stream.c.trigger_id == trigger.c.id)
    .outerjoin(task_instance, task_instance.c.id == _ITS_TASK)
    .outerjoin(dag_run, dag_run.c.id == task_instance.c.dag_run_id)
    .outerjoin(dag, dag.c.id == dag_run.c.dag_id)
)
_WATCHED = trigger.outerjoin(asset_watcher, asset_watcher.c.trigger_id == trigger.c.id)
_WATCHERS = select(
    *(asset_watcher.c.id, asset_watcher.c.name, asset.c.name.label("asset"), asset_watcher.c.trigger_id),
    *(trigger.c.classpath, trigger.c.queue, asset_watcher.c.created_date, trigger.c.triggerer_id),
    *(trigger.c.failure_count, trigger.c.last_error, trigger.c.last_failed_at, trigger.c.finished_at),
    *(trigger.c.hold, trigger.c.hold_reason, trigger.c.held_at, trigger.c.max_deliveries),
    *(asset_watcher.c.signal_key.label("signal"), asset_watcher.c.signal_namespace),
).select_from(asset_watcher.join(trigger).outerjoin(asset))


def _line(row: Any) -> TriggerLine:
    fields = {name: row._mapping[name] for name in TriggerLine.__struct_fields__}
    fields["name"] = fields["name"] or f"{_PREFIX}{row.id}"
    return TriggerLine(**fields)


def _lines(tx: Tx, where: ColumnElement[bool], beyond_id: int, limit: int) -> list[TriggerLine]:
    statement = (
        select(*_COLUMNS).select_from(_FROM).where(where, trigger.c.id > beyond_id).order_by(trigger.c.id).limit(limit)
    )
    return [_line(row) for row in tx.connection.execute(statement)]


def _troubled_ids(tx: Tx, *where: ColumnElement[bool], beyond_id: int, limit: int) -> list[int]:
    """Return the first open triggers beyond an id that fail or are held: each from a partial index of its own."""
    found: set[int] = set()
    for is_troubled in (trigger.c.failure_count > literal_column("0"), trigger.c.hold.is_not(None)):
        some = (
            select(trigger.c.id)
            .select_from(_WATCHED)
            .where(OPEN_TRIGGER, is_troubled, trigger.c.id > beyond_id, *where)
        )
        found.update(tx.connection.execute(some.order_by(trigger.c.id).limit(limit)).scalars())
    return sorted(found)[:limit]


def _triggerer_line(tx: Tx, row: Any, liveness: Liveness, said: PublishedStatus | None) -> TriggererLine:
    lease = triggerer_row({column.name: row._mapping[column] for column in _T}, tx.now)
    state = state_of(lease, liveness)
    words = {"alive": "running", "ended": "stopped"}
    line = TriggererLine(
        **msgspec.structs.asdict(lease), triggers=row.triggers, tasks=row.tasks, state=words.get(state, state)
    )
    if said is None or state != "alive":
        return line
    told = said.status
    state_told = "draining" if told.is_draining else line.state
    line = msgspec.structs.replace(line, state=state_told, runner=told.runner, runner_ends=told.runner_ends)
    if (folder := told.dag_folder) is None:
        return line
    since = datetime.fromtimestamp(folder.since, UTC)
    return msgspec.structs.replace(line, dag_files=folder.files_shown, dag_files_since=since)


class TriggerInspection(Verbs):
    """The queries about supervisors, watchers and triggers."""

    @reading
    def triggerers(
        self, tx: Tx, limit: int = NEWEST_SHOWN, *, with_past: bool = False, liveness: Liveness = BY_SILENCE
    ) -> list[TriggererLine]:
        """Return the newest leases, newest first, with the numbers of their triggers and tasks.

        Without ``with_past`` those that ended or were fenced more than `PAST_S` ago are left out.
        """
        triggers = select(func.count()).where(trigger.c.triggerer_id == triggerer.c.id, OPEN_TRIGGER)
        tasks = select(func.count()).where(task_instance.c.triggerer_id == triggerer.c.id)
        statement = select(
            triggerer,
            triggers.correlate(triggerer).scalar_subquery().label("triggers"),
            tasks.correlate(triggerer).scalar_subquery().label("tasks"),
        )
        if not with_past:
            since = tx.now - timedelta(seconds=PAST_S)
            statement = statement.where(or_(is_alive(), func.coalesce(_T.stopped_at, _T.fenced_at) > since))
        rows = tx.connection.execute(statement.order_by(_T.id.desc()).limit(limit)).all()
        said = published(tx, [row.id for row in rows if row.stopped_at is None and row.fenced_at is None])
        return [_triggerer_line(tx, row, liveness, said.get(row.id)) for row in rows]

    @reading
    def watchers(
        self, tx: Tx, *, name: str | None = None, beyond: str | None = None, limit: int = LIST_WATCHERS_MAX
    ) -> list[WatcherRow]:
        """Return the watchers by name, those beyond a name; ``name`` is a part of it, in any case of its letters."""
        where: list[ColumnElement[bool]] = [asset_watcher.c.removed_at.is_(None)]
        if name is not None:
            where.append(asset_watcher.c.name.icontains(name, autoescape=True))
        if beyond is not None:
            where.append(asset_watcher.c.name > beyond)
        some = select(asset_watcher.c.id).where(*where).order_by(asset_watcher.c.name).limit(limit).subquery()
        statement = _WATCHERS.join(some, some.c.id == asset_watcher.c.id).order_by(asset_watcher.c.name)
        return [WatcherRow(**row._mapping) for row in tx.connection.execute(statement)]

    @reading
    def troubled_watchers(self, tx: Tx, *, beyond_id: int = 0, limit: int = ROWS_PER_PAGE_MAX) -> list[WatcherRow]:
        """Return the watchers that fail or are held, by the ids of their triggers."""
        watched = asset_watcher.c.removed_at.is_(None)
        some = _troubled_ids(tx, watched, beyond_id=beyond_id, limit=limit)
        statement = _WATCHERS.where(trigger.c.id.in_(some), watched).order_by(trigger.c.id)
        return [WatcherRow(**row._mapping) for row in tx.connection.execute(statement)]

    @reading
    def triggers(
        self,
        tx: Tx,
        *,
        with_ended: bool = False,
        is_troubled: bool = False,
        queue: str | None = None,
        beyond_id: int = 0,
        limit: int = ROWS_PER_PAGE_MAX,
    ) -> list[TriggerLine]:
        """Return triggers by id: those that are open, and those of watchers that have finished.

        ``with_ended``: all others as well, the removed ones included. ``is_troubled``: open ones alone that fail or
        are held.
        """
        of_queue = [] if queue is None else [trigger.c.queue == queue]
        if is_troubled:
            some = _troubled_ids(tx, *of_queue, beyond_id=beyond_id, limit=limit)
            return _lines(tx, trigger.c.id.in_(some), beyond_id, limit)
        present = and_(asset_watcher.c.id.is_not(None), asset_watcher.c.removed_at.is_(None))
        where = and_(True) if with_ended else or_(OPEN_TRIGGER, present)
        return _lines(tx, and_(where, *of_queue), beyond_id, limit)

    @reading
    def orphans(self, tx: Tx, *, limit: int = ROWS_PER_PAGE_MAX) -> list[TriggerLine]:
        """Return open triggers that neither a watcher nor a task has: `TaskVerbs.remove_orphans` removes them."""
        is_orphan = and_(asset_watcher.c.id.is_(None), task_instance.c.id.is_(None))
        return _lines(tx, and_(OPEN_TRIGGER, is_orphan), 0, limit)

    @reading
    def slow(self, tx: Tx, *, longer_than_s: float, limit: int = ROWS_PER_PAGE_MAX) -> list[TriggerLine]:
        """Return the open triggers that tasks have waited for longer than this, the oldest first."""
        is_old = trigger.c.created_date < tx.now - timedelta(seconds=longer_than_s)
        return _lines(tx, and_(OPEN_TRIGGER, task_instance.c.id.is_not(None), is_old), 0, limit)

    @reading
    def find_trigger(self, tx: Tx, name: str) -> int:
        """Return the id of a trigger by its number, by ``trigger-<id>``, or by the name of its watcher.

        If several watchers had the name, it is the newest. Raises `NoSuchRow`.
        """
        digits = name.removeprefix(_PREFIX)
        if digits.isascii() and digits.isdecimal() and len(digits) <= 18:
            numbered = select(trigger.c.id).where(trigger.c.id == int(digits))
            found = tx.connection.execute(numbered).scalar_one_or_none()
            if found is not None:
                return int(found)
        named = select(asset_watcher.c.trigger_id).where(asset_watcher.c.name == name)
        found = tx.connection.execute(named.order_by(asset_watcher.c.id.desc()).limit(1)).scalar_one_or_none()
        if found is None:
            raise NoSuchRow("trigger or watcher", name)
        return int(found)

    @reading
    def trigger_line(self, tx: Tx, trigger_id: int) -> TriggerLine:
        """Return one trigger, without numbers that take long to count. Raises `NoSuchRow`."""
        found = _lines(tx, trigger.c.id == trigger_id, 0, 1)
        if not found:
            raise NoSuchRow("trigger", str(trigger_id))
        return found[0]

    @reading
    def trigger(self, tx: Tx, trigger_id: int) -> TriggerDetail:
        """Return all details of a trigger except its kwargs. Raises `NoSuchRow`."""
        names = (asset.c.name.label("asset"), stream.c.name.label("stream"))
        sends = (asset_watcher.c.signal_key, asset_watcher.c.signal_namespace)
        columns = (*_COLUMNS, *names, *sends, trigger.c.last_failed_run_id, trigger.c.max_deliveries)
        from_ = _FROM.outerjoin(asset, asset.c.id == asset_watcher.c.asset_id)
        from_ = from_.outerjoin(stream, stream.c.id == trigger.c.stream_id)
        row = tx.connection.execute(select(*columns).select_from(from_).where(trigger.c.id == trigger_id)).first()
        if row is None:
            raise NoSuchRow("trigger", str(trigger_id))
        of_it = trigger_event.c.trigger_id == trigger_id
        some = select(trigger_event.c.id).where(of_it).order_by(trigger_event.c.id.desc()).limit(EVENTS_COUNTED_MAX)
        counted = some.subquery()
        events = tx.connection.execute(select(func.count()).select_from(counted)).scalar_one()
        came_again = select(func.coalesce(func.sum(redelivery.c.count), 0))
        came_again = came_again.select_from(counted.join(redelivery, redelivery.c.trigger_event_id == counted.c.id))
        redelivered = tx.connection.execute(came_again).scalar_one()
        newest = select(trigger_event.c.id, trigger_event.c.stored_at).where(of_it).order_by(trigger_event.c.id.desc())
        found = tx.connection.execute(newest.limit(1)).first()
        return TriggerDetail(
            line=_line(row),
            asset=row.asset,
            last_failed_run_id=row.last_failed_run_id,
            events=events,
            redelivered=int(redelivered),
            newest_event_id=None if found is None else found.id,
            newest_event_at=None if found is None else found.stored_at,
            stream=row.stream,
            max_deliveries=row.max_deliveries,
            passed_over=count_passed_over(tx, trigger_id),
            strikes=tuple(strikes_of(tx, trigger_id)),
            signal=row.signal_key,
            signal_namespace=row.signal_namespace,
        )

    @reading
    def trigger_runs(self, tx: Tx, trigger_id: int) -> list[TriggerRunRow]:
        """Return the newest runs of a watcher's trigger that have ended, the newest first."""
        return trigger_runs.newest(tx, trigger_id)

    @reading
    def trigger_kwargs(self, tx: Tx, trigger_id: int) -> bytes:
        """Return the kwargs of a trigger in clear, encoded. Raises `NoSuchRow` and `BadKey`."""
        kwargs = select(trigger.c.kwargs).where(trigger.c.id == trigger_id)
        found = tx.connection.execute(kwargs).scalar_one_or_none()
        if found is None:
            raise NoSuchRow("trigger", str(trigger_id))
        return tx.secrets.decrypt(found)
