"""The context of a task: its run, and the XComs it pushes and pulls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, TypedDict, cast

from headgate.protocol.errors import ValueTooLong
from headgate.protocol.messages.dags import XCOM_BYTES_MAX, XCOMS_PER_STEP_MAX
from headgate.protocol.messages.dags import name_problem as _name_problem
from headgate.protocol.messages.maps import OwnValue
from headgate.protocol.messages.queries import StartSignal, StartSignals
from headgate.protocol.messages.steps import Appended, XCom
from headgate.protocol.messages.task_streams import StreamPart
from headgate.protocol.values import decode_value, encode_value
from headgate.signals.versions import SignalVersion, value_of
from headgate.tasks.maps.outputs import Computed, MappedOutput, XComPageReader
from headgate.triggers.airflow_names import CONTEXT

if TYPE_CHECKING:
    from headgate.tasks.groups.loops import Loop
    from headgate.tasks.maps.worklists import Appends
    from headgate.tasks.operator import BaseOperator

log = logging.getLogger(__name__)

TASKS_NAMED_MAX: Final = 50  # of a DAG, in one line of a log
RETURN_VALUE: Final = "return_value"  # the key of the value that a task returned


class XComReader(Protocol):
    """Return the encoded XCom that a task of this run, or an instance of it, has pushed under a key; None if none."""

    def __call__(self, task_id: str, key: str, map_index: int = -1) -> bytes | None: ...


class TaskInstance:
    """This task in this run: its ids, and its XComs.

    ``try_number`` counts from 1 and stays the same over deferrals. ``map_index`` is that of the instance of a mapped
    task, from 0, and ``map_name`` its name, None if it has none; of any other task they are -1 and None.
    ``map_length`` is the number of its instances, None as long as there may be more, ``given_digest`` that of the
    values that stood in the file when these were counted, and ``own`` the value at its index, each if it is known.
    ``read_xcom`` reads the XComs of other tasks, and ``read_xcoms`` those of ``mapped`` ones.
    ``beside`` are the tasks of the same mapped group, which have an instance at the same index, and ``tasks`` those of
    the DAG, if it is known.
    """

    def __init__(
        self,
        *,
        dag_id: str,
        task_id: str,
        run_id: str,
        try_number: int = 1,
        map_index: int = -1,
        map_length: int | None = None,
        given_digest: str = "",
        own: OwnValue | None = None,
        read_xcom: XComReader | None = None,
        read_xcoms: XComPageReader | None = None,
        mapped: Collection[str] = (),
        beside: Collection[str] = (),
        tasks: Collection[str] = (),
    ) -> None:
        self.dag_id = dag_id
        self.task_id = task_id
        self.run_id = run_id
        self.try_number = try_number
        self.map_index = map_index
        self.map_length = map_length
        self.given_digest = given_digest
        self.map_name: str | None = None
        self._own = own
        self._read_xcom = read_xcom
        self._read_xcoms = read_xcoms
        self._mapped = mapped
        self._beside = beside
        self._tasks = tasks
        self._appends: Appends | None = None
        self._pushed: dict[str, bytes] = {}

    def xcom_push(self, key: str, value: Any) -> None:
        """Store ``value`` for other tasks under ``key``; a second push of the same key replaces the first.

        It is stored with the outcome of this step. Raises `ValueNotSerializable`, `ValueTooLong` beyond
        ``XCOM_BYTES_MAX`` bytes, and ValueError for an invalid key or one key too many.
        """
        if (problem := _name_problem(key)) is not None:
            raise ValueError(f"the key of an XCom {problem}")
        if key not in self._pushed and len(self._pushed) >= XCOMS_PER_STEP_MAX:
            raise ValueError(f"{key!r} is one XCom too many: a step of a task may push {XCOMS_PER_STEP_MAX}")
        try:
            self._pushed[key] = encode_value(value, where=f"xcom {key!r}", bytes_max=XCOM_BYTES_MAX)
        except ValueTooLong as error:
            error.args = (f"{error}: write it to a file or an object store, and leave its path instead",)
            raise

    def xcom_pull(self, task_ids: str, key: str = RETURN_VALUE, *, default: Any = None) -> Any:
        """Return the XCom that the task ``task_ids`` of this run pushed under ``key``, or ``default`` if there is none.

        A task that the DAG does not have has none, and the log of the task warns of it. Of a mapped task it is a
        `MappedOutput`, with the XComs of its instances; of one of the same mapped group the value at the same index.
        Raises RuntimeError if the task does not run in a DAG run, as in some tests, and TypeError.
        """
        if not isinstance(task_ids, str):
            raise TypeError(f"xcom_pull takes one task_id, not {task_ids!r:.100}: call it once for each")
        if task_ids in self._beside:
            return self.pull_at(task_ids, self.map_index, key, default=default)
        if task_ids in self._mapped and self._read_xcoms is not None:
            return MappedOutput(task_ids, key, self._read_xcoms)
        return self.pull_at(task_ids, -1, key, default=default)

    def pull_at(self, task_id: str, map_index: int, key: str = RETURN_VALUE, *, default: Any = None) -> Any:
        """Return the XCom of one instance of a mapped task, or ``default`` if there is none.

        Raises RuntimeError as `xcom_pull` does.
        """
        if self._read_xcom is None:
            raise RuntimeError(f"xcom_pull({task_id!r}) needs a running DAG: there are no XComs of other tasks here")
        data = self._read_xcom(task_id, key, map_index)
        if data is None and self._tasks and task_id not in self._tasks:
            # No error, because the task may only be missing in this version of the file.
            names = sorted(self._tasks)
            more = f" and {len(names) - TASKS_NAMED_MAX:,} more" if len(names) > TASKS_NAMED_MAX else ""
            log.warning(
                "xcom_pull(%r) finds nothing: the DAG %s has no such task; it has %s%s",
                *(task_id, self.dag_id, ", ".join(names[:TASKS_NAMED_MAX]), more),
            )
        return default if data is None else decode_value(data)

    def append(self, value: Any, *, key: str | None = None) -> None:
        """Append a value to the worklist that the task is expanded over, unless one with this key is there already.

        It is stored with the outcome of this step, if the step goes well. Raises RuntimeError for a task that is
        expanded over no worklist, `ValueNotSerializable`, `ValueTooLong`, TypeError, ValueError, and `TooManyAppended`.
        """
        if self._appends is None:
            raise RuntimeError(f"append() is for tasks that are expanded over a worklist: {self.task_id!r} is not")
        self._appends.add(value, key)

    def take_appends(self, appends: Appends | None) -> None:
        """Have this take what the step appends."""
        self._appends = appends

    def take_appended(self) -> Appended | None:
        """Return what the step has appended; None if that is nothing."""
        return None if self._appends is None else self._appends.take()

    def appended_pairs(self) -> Sequence[tuple[bytes, str | None]]:
        """Return what the step has appended, each value encoded, with its key."""
        return () if self._appends is None else self._appends.pairs()

    def pull_elements(self, task_id: str) -> MappedOutput:
        """Return the elements that a task of this run has emitted. Raises RuntimeError as `xcom_pull` does."""
        if self._read_xcoms is None:
            raise RuntimeError(f"pull_elements({task_id!r}) needs a running DAG: there are no elements here")
        return MappedOutput(task_id, None, self._read_xcoms)

    def values_of_map(self, task_id: str, key: str | None, read: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return the values that a task has left, or emitted, of which the one of this instance may be known.

        All others are of ``read``, which asks for them.
        """
        own = self._own
        if own is None or (own.task_id, own.key) != (task_id, key):
            return read()
        value, index = own.value, self.map_index
        return Computed(own.length, lambda place: decode_value(value) if place == index else read()[place])

    def pushed(self, key: str) -> bytes | None:
        """Return what this step has pushed under ``key``, encoded."""
        return self._pushed.get(key)

    def take_pushed(self) -> tuple[XCom, ...]:
        """Return the pushed XComs, and clear them."""
        pushed, self._pushed = self._pushed, {}
        return tuple(XCom(key, value) for key, value in pushed.items())


class RunAsset(NamedTuple):
    """One event of an asset that the run was created for, with its ``payload``."""

    asset: str
    payload: Any
    stored_at: datetime


class TaskStream(NamedTuple):
    """``context["stream"]``: the stream as it was when the step began.

    ``handled`` and ``waiting`` are numbers of events; those that the step gets are still waiting. ``state`` is what the
    step before has left, None if no event is handled yet.
    """

    handled: int
    waiting: int
    state: dict[str, Any] | None

    @classmethod
    def of(cls, part: StreamPart | None) -> TaskStream | None:
        """Return the view of a step's part. Raises as `decode_value`."""
        if part is None:
            return None
        return cls(part.handled, part.waiting, None if part.state is None else decode_value(part.state))


class _CheckedContext(dict[str, Any]):
    def __missing__(self, key: str) -> NoReturn:
        instead = f": {CONTEXT[key]}" if key in CONTEXT else f"; it has {', '.join(sorted(self))}"
        raise KeyError(f"the context has no {key!r}{instead}")


class Context(TypedDict):
    """The ``context`` that a task's methods get. Datetimes are aware; ``params`` are the run's conf.

    ``asset_events`` are the events that the run was created for, oldest first; empty for a cron schedule or by hand.
    ``stream`` is that of a task that has deferred with ``stream=``, in this try or an earlier one; else None. ``loop``
    is the iteration that a task of a loop is in; else None. ``signals`` are those that have started a task with rules
    about signals, one for each rule that was met, and ``previous_signals`` those of its start before. ``run_signals``
    are those that the run was created for, in the order in which they met its schedule. ``traceparent`` names the span
    of the try, as the W3C's "Trace Context" writes it; None in tests.
    """

    ti: TaskInstance
    task_instance: TaskInstance
    task: BaseOperator
    dag_id: str
    task_id: str
    run_id: str
    try_number: int
    logical_date: datetime | None
    data_interval_start: datetime | None
    data_interval_end: datetime | None
    params: Mapping[str, Any]
    asset_events: tuple[RunAsset, ...]
    stream: TaskStream | None
    loop: Loop | None
    signals: tuple[SignalVersion, ...]
    previous_signals: tuple[SignalVersion, ...]
    run_signals: tuple[SignalVersion, ...]
    traceparent: str | None


def make_context(
    task: BaseOperator,
    *,
    run_id: str,
    try_number: int = 1,
    logical_date: datetime | None = None,
    data_interval: tuple[datetime, datetime] | None = None,
    params: Mapping[str, Any] | None = None,
    map_index: int = -1,
    map_length: int | None = None,
    given_digest: str = "",
    own: OwnValue | None = None,
    read_xcom: XComReader | None = None,
    read_xcoms: XComPageReader | None = None,
    assets: tuple[RunAsset, ...] = (),
    stream: TaskStream | None = None,
    signals: StartSignals | None = None,
    traceparent: str | None = None,
) -> Context:
    """Return the context of one step of ``task``."""
    dag_id, tasks = ("", {}) if task.dag is None else (task.dag.dag_id, task.dag.tasks)
    mapping = task.mapping
    instance = TaskInstance(
        dag_id=dag_id,
        task_id=task.task_id,
        run_id=run_id,
        try_number=try_number,
        map_index=map_index,
        map_length=map_length,
        given_digest=given_digest,
        own=own,
        read_xcom=read_xcom,
        read_xcoms=read_xcoms,
        mapped={task_id for task_id, one in tasks.items() if one.is_mapped},
        beside=() if mapping is None else mapping.task_ids,
        tasks=tasks,
    )
    start, end = data_interval or (None, None)
    context = Context(
        ti=instance,
        task_instance=instance,
        task=task,
        dag_id=dag_id,
        task_id=task.task_id,
        run_id=run_id,
        try_number=try_number,
        logical_date=logical_date,
        data_interval_start=start,
        data_interval_end=end,
        params=dict(params or {}),
        asset_events=assets,
        stream=stream,
        loop=None if mapping is None else mapping.loop_of(instance),
        signals=() if signals is None else _versions(signals.signals),
        previous_signals=() if signals is None else _versions(signals.previous),
        run_signals=() if signals is None else _versions(signals.of_run),
        traceparent=traceparent,
    )
    return cast(Context, _CheckedContext(context))


def _versions(signals: Sequence[StartSignal]) -> tuple[SignalVersion, ...]:
    return tuple(
        SignalVersion(one.key, value_of(one.value), version=one.version, namespace=one.namespace) for one in signals
    )
