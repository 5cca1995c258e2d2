"""Queries that users' code sends to the supervisor, their results, and the two messages that carry them.

A step of a task sends them from its worker, a trigger from the runner; both by `Request`, which is answered by the
`Response` with the same id. Users' code does not see the database (I12): the supervisor looks up the result. Values in
a result are encoded by `headgate.protocol.values`.
"""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.signals import (
    DEFAULT_NAMESPACE,
    LISTEN_S_MAX,
    SIGNALS_PER_PAGE_MAX,
    SentSignal,
    SignalSend,
    StoredSignal,
)

XCOMS_PER_PAGE_MAX: Final = 1000

# --- queries -----------------------------------------------------------------------------------


class GetStartSignals(WireStruct, frozen=True, tag="get_start_signals"):
    """The signals that have started the task, and its run, and those of its start before. For tasks.

    Answered by `StartSignals`.
    """


class LastEvent(WireStruct, frozen=True, tag="last_event"):
    """The newest stored event of a trigger, from which it can resume. For triggers. Answered by `StoredEvent`."""

    trigger_id: int


class GetXCom(WireStruct, frozen=True, tag="get_xcom"):
    """An XCom of a task in the same run. For tasks. Answered by `EncodedValue`.

    ``map_index`` is that of an instance, from 0; -1 for a task that is not mapped.
    """

    task_id: str
    key: str
    map_index: int = -1


class GetXComs(WireStruct, frozen=True, tag="get_xcoms"):
    """XComs of the instances of a mapped task in the same run that have succeeded. For tasks. Answered by `XComPage`.

    The page begins with the first instance whose index is above ``after``, ``offset`` further on, and has ``limit``
    values at most. Without ``key`` it is of the elements that a task has emitted. ``is_counted``: the answer has the
    number of all values, for which all instances are looked at.
    """

    task_id: str
    key: str | None
    after: int = -1
    offset: int = 0
    limit: int = XCOMS_PER_PAGE_MAX
    is_counted: bool = True


class EmitElements(WireStruct, frozen=True, tag="emit"):
    """Store elements that a task emits, before its step ends. For tasks. Answered by `ElementRoom`.

    ``values`` are encoded, and stand at the positions from ``first`` on. Those that are stored must be the same. With
    ``keys`` they are one by their keys (`headgate.protocol.messages.steps.Emitted`).
    """

    first: int
    values: tuple[bytes, ...]
    keys: tuple[bytes, ...] = ()


class GetVariable(WireStruct, frozen=True, tag="get_variable"):
    """The value of a variable. Answered by `SecretText`."""

    name: str


class GetConnection(WireStruct, frozen=True, tag="get_connection"):
    """The URI of a connection. Answered by `SecretText`."""

    name: str


class GetTaskStates(WireStruct, frozen=True, tag="get_task_states"):
    """The states of another DAG's run and its tasks. Answered by `TaskStates`.

    The run is the one with ``run_id`` or ``logical_date_s`` if given, otherwise the newest. If ``task_ids`` is empty,
    the result has all tasks.
    """

    dag_id: str
    run_id: str | None = None
    logical_date_s: float | None = None
    task_ids: tuple[str, ...] = ()


class CreateRun(WireStruct, frozen=True, tag="create_run"):
    """Create a run of a DAG. For tasks. Answered by `RunCreated`. ``params`` is an encoded dict."""

    dag_id: str
    run_id: str
    params: bytes | None = None
    logical_date_s: float | None = None


class SendSignals(WireStruct, frozen=True, tag="send_signals"):
    """Send signals, all or none. Answered by `SignalsSent`. ``sender`` is the class of a trigger, "" for a task."""

    signals: tuple[SignalSend, ...]
    sender: str = ""


class ListSignals(WireStruct, frozen=True, tag="list_signals"):
    """Versions of a key above ``after``, the oldest first; with ``version`` that one alone. Answered by `SignalPage`.

    Signals for another run alone are not among them.
    """

    key: str
    namespace: str = DEFAULT_NAMESPACE
    after: int = 0
    limit: int = SIGNALS_PER_PAGE_MAX
    version: int | None = None


class ListenSignals(WireStruct, frozen=True, tag="listen_signals"):
    """Versions of a key above ``after``, as soon as there are some. For tasks. Answered by `SignalsHeard`.

    If there are none, the answer comes with the next that is sent, or without one after ``within_s`` seconds, but not
    later than after `LISTEN_S_MAX`. With ``after`` None it comes at once, without versions, and says where the next one
    will be. Signals for another run alone are not among them.
    """

    key: str
    namespace: str = DEFAULT_NAMESPACE
    after: int | None = None
    within_s: float = LISTEN_S_MAX


Query: TypeAlias = (
    GetXCom
    | GetXComs
    | EmitElements
    | GetVariable
    | GetConnection
    | GetTaskStates
    | CreateRun
    | SendSignals
    | ListSignals
    | ListenSignals
    | GetStartSignals
)
# Those for what other tasks have left.
VALUE_QUERIES: Final = (GetXCom, GetXComs)
# Those that a trigger may send.
TriggerQuery: TypeAlias = GetVariable | GetConnection | GetTaskStates | SendSignals | ListSignals


# --- results -------------------------------------------------------------------------------------


class StoredEvent(WireStruct, frozen=True, tag="stored_event"):
    """One event, as stored in the database."""

    trigger_run_id: str
    sequence_index: int
    payload: bytes
    key: str | None = None


class EncodedValue(WireStruct, frozen=True, tag="value"):
    """An encoded value; None if there is none."""

    value: bytes | None


class XComPage(WireStruct, frozen=True, tag="xcom_page"):
    """A part of the XComs of a mapped task: (index of the instance, encoded value, None if it left none), by index.

    ``count`` is the number of instances that have succeeded, ``missing`` that of the others that are in the run. Of
    elements the index is the position, ``count`` the number of those that are emitted, and none is missing. Both are 0
    if the query did not ask for them.
    """

    values: tuple[tuple[int, bytes | None], ...]
    count: int
    missing: int


class ElementRoom(WireStruct, frozen=True, tag="element_room"):
    """The elements are stored; ``room`` more may be emitted before those that expand over them have to catch up."""

    room: int


class SecretText(WireStruct, frozen=True, tag="secret"):
    """A variable or a connection; None if there is none. It is masked in frame logs and in the output of children."""

    value: str | None


class TaskState(enum.StrEnum):
    """The state of a task of a run; `headgate.scheduling.states` has the transitions between them."""

    NONE = "none"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    DEFERRED = "deferred"
    UP_FOR_RETRY = "up_for_retry"
    RESTARTING = "restarting"
    SUCCESS = "success"
    FAILED = "failed"
    SKIPPED = "skipped"
    UPSTREAM_FAILED = "upstream_failed"
    REMOVED = "removed"


class TaskStates(WireStruct, frozen=True, tag="task_states"):
    """The states of a run and its tasks, sorted by task id. ``run_id`` is None if there is no such run.

    ``run_state`` is ``queued``, ``running``, ``success`` or ``failed``. ``missing`` are requested tasks that the run
    does not have. ``has_dag`` is False if no DAG of this name is known.
    """

    run_id: str | None = None
    run_state: str = ""
    tasks: tuple[tuple[str, TaskState], ...] = ()
    missing: tuple[str, ...] = ()
    has_dag: bool = True


class RunCreated(WireStruct, frozen=True, tag="run_created"):
    """The run exists now; ``is_new`` is False if it existed before, unless the same task had asked for it."""

    is_new: bool


class SignalsSent(WireStruct, frozen=True, tag="signals_sent"):
    """The signals are sent: what each has become, in the order in which they were given."""

    sent: tuple[SentSignal, ...]


class SignalPage(WireStruct, frozen=True, tag="signal_page"):
    """Versions of a key, the oldest first; there may be more."""

    signals: tuple[StoredSignal, ...]


class StartSignal(WireStruct, frozen=True):
    """A signal that has met a rule of a task, and the version of its key; part of `StartSignals`.

    Of the end of another task ``key`` is the id of that, ``value`` its encoded state, and ``version`` its start number.
    """

    key: str
    namespace: str
    version: int
    value: bytes


class StartSignals(WireStruct, frozen=True, tag="start_signals"):
    """The signals that have started a task, those of its start before, and those that its run was created for."""

    signals: tuple[StartSignal, ...] = ()
    previous: tuple[StartSignal, ...] = ()
    of_run: tuple[StartSignal, ...] = ()


class SignalsHeard(WireStruct, frozen=True, tag="signals_heard"):
    """Versions of a key that a task listens for, the oldest first; there may be more.

    It goes on after ``seen``, also if there are none.
    """

    signals: tuple[StoredSignal, ...]
    seen: int


QueryResult: TypeAlias = (
    StoredEvent
    | EncodedValue
    | XComPage
    | ElementRoom
    | SecretText
    | TaskStates
    | RunCreated
    | SignalsSent
    | SignalPage
    | SignalsHeard
    | StartSignals
)


# --- the messages --------------------------------------------------------------------------------


class Request(WireStruct, frozen=True, tag="request"):
    """Child to supervisor: a query of users' code. Answered by the `Response` with the same id."""

    id: int
    query: Query | LastEvent


class Response(WireStruct, frozen=True, tag="response"):
    """Supervisor to child: the result of the `Request` with this id, or ``error``.

    Both are empty for a `LastEvent` of a trigger that has no event yet.
    """

    id: int
    result: QueryResult | None = None
    error: str = ""
