"""Queries of users' code, answered from the store: variables and connections, XComs, other runs, runs to be created.

The supervisor's environment takes precedence over the database: ``HEADGATE_VAR_<NAME>`` is the variable ``name``, and
``HEADGATE_CONN_<NAME>`` the connection. There the name is in upper case, so names that differ only in case are the same
variable. No child inherits these (I12): it gets only the values that it queries, and `StoreQueries.secrets` keeps them,
so that they are masked in the output of the child.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol, assert_never

import msgspec
import structlog

from headgate.protocol.masking import SecretMask
from headgate.protocol.messages.dags import ID_CHARS_MAX, XCOM_KEY_CHARS_MAX
from headgate.protocol.messages.queries import (
    XCOMS_PER_PAGE_MAX,
    CreateRun,
    EmitElements,
    EncodedValue,
    GetConnection,
    GetStartSignals,
    GetTaskStates,
    GetVariable,
    GetXCom,
    GetXComs,
    ListenSignals,
    ListSignals,
    Query,
    QueryResult,
    RunCreated,
    SecretText,
    SendSignals,
    SignalPage,
    SignalsHeard,
    SignalsSent,
    TaskStates,
    XComPage,
)
from headgate.protocol.messages.runner import ERROR_CHARS_MAX, FRAME_BYTES_MAX, KWARGS_BYTES_MAX
from headgate.protocol.messages.signals import StoredSignal
from headgate.store.errors import (
    BLAMELESS,
    BadKey,
    BadName,
    NoSuchRow,
    RowsRefused,
    SpecUnreadable,
    ValueRefused,
    described,
)
from headgate.store.ids import DagRunId
from headgate.store.signals import sending
from headgate.store.signals.reading import PAGE_BYTES_MAX, Signal
from headgate.store.store import Store
from headgate.store.triggers.watchers import NAME_CHARS_MAX, check_name

log = structlog.get_logger(__name__)

VARIABLE_PREFIX: Final = "HEADGATE_VAR_"
CONNECTION_PREFIX: Final = "HEADGATE_CONN_"
NO_RUN: Final = DagRunId(0)  # of a trigger: none has this id, so no signal for one run alone is its own
ENVELOPE_BYTES: Final = 64  # of a frame, in addition to the answer in it
NAME_SHOWN_CHARS_MAX: Final = 100
XCOM_PAGE_BYTES_MAX: Final = 1024 * 1024  # of the values in one page of XComs, but for the last of them


class QueryRefused(Exception):
    """A query has no answer; the text tells the author the reason, for example that there is no such DAG."""


class QueryHandler(Protocol):
    """Answers queries: `StoreQueries`, or its substitute when a log is replayed."""

    def answer(self, query: Query, *, dag_run_id: DagRunId | None, asker: str | None = None) -> QueryResult:
        """See `StoreQueries.answer`."""
        ...


class StoreQueries:
    """Answers queries from a store and an environment. ``secrets`` are all secrets in its results so far.

    Every answer fits a frame of ``frame_bytes_max`` bytes.
    """

    def __init__(self, store: Store, environ: Mapping[str, str], *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._store = store
        self._environ = {
            name: value for name, value in environ.items() if name.startswith((VARIABLE_PREFIX, CONNECTION_PREFIX))
        }
        self._answer_bytes_max = frame_bytes_max - ENVELOPE_BYTES
        self.secrets = SecretMask()

    def answer(self, query: Query, *, dag_run_id: DagRunId | None, asker: str | None = None) -> QueryResult:
        """Answer a query of a trigger, or of a step of the task ``asker`` in the run ``dag_run_id``.

        Raises `QueryRefused` with a text for the user, and `DatabaseAway` or another error of the store if the database
        is at fault: then ask again later, not at once.
        """
        try:
            result = self._look_up(query, dag_run_id, asker)
        except (BadName, BadKey, NoSuchRow, SpecUnreadable, ValueRefused, RowsRefused) as error:
            raise QueryRefused(str(error)[:ERROR_CHARS_MAX]) from error
        except (*BLAMELESS, QueryRefused):
            raise
        except Exception as error:  # nobody foresaw it: it costs who asks an error, and not all others the supervisor
            log.error("a query cannot be answered", query=type(query).__name__, exc_info=error)
            raise QueryRefused(f"headgate cannot answer this: {described(error)}"[:ERROR_CHARS_MAX]) from error
        try:
            answer_bytes = len(msgspec.msgpack.encode(result))
        except UnicodeEncodeError:  # an environment may hold any bytes
            raise QueryRefused(f"{_shown(query)} is not UTF-8 text") from None
        if answer_bytes > self._answer_bytes_max:
            problem = f"{answer_bytes:,} bytes; the limit is {self._answer_bytes_max:,}"
            raise QueryRefused(f"the answer to {_shown(query)} has {problem}")
        self.secrets.note(query, result)
        return result

    def _look_up(self, query: Query, dag_run_id: DagRunId | None, asker: str | None) -> QueryResult:
        tasks = self._store.tasks
        match query:
            case GetVariable(name):
                check_name(name, "the name of a variable")
                return self._secret(query, VARIABLE_PREFIX + name.upper(), tasks.variables.get, name)
            case GetConnection(name):
                check_name(name, "the name of a connection")
                return self._secret(query, CONNECTION_PREFIX + name.upper(), tasks.connections.get, name)
            case GetXCom(task_id, key, map_index):
                check_name(task_id, "the id of a task", chars_max=ID_CHARS_MAX)
                check_name(key, "the key of an XCom", chars_max=XCOM_KEY_CHARS_MAX)
                if dag_run_id is None:
                    raise QueryRefused("XComs belong to a run: only a step of a task can ask for them")
                return EncodedValue(tasks.pull_xcom(dag_run_id, task_id, key, map_index))
            case GetXComs():
                return self._xcoms(query, dag_run_id)
            case EmitElements():
                raise QueryRefused("only a step of a task can emit elements")
            case GetTaskStates():
                return self._task_states(query)
            case CreateRun():
                return self._create_run(query, asker)
            case SendSignals():
                if dag_run_id is not None:
                    raise QueryRefused("the signals of a step are sent for its task")
                sender = f"trigger {query.sender}" if query.sender else "a trigger"
                return SignalsSent(tuple(self._store.signals.send(sending.news_of(query.signals, sender, None))))
            case GetStartSignals():
                raise QueryRefused("only a step of a task has signals that have started it")
            case ListSignals():
                return self._list_signals(query, dag_run_id)
            case ListenSignals():
                return self._hear(query, dag_run_id)
            case _:
                assert_never(query)

    def _xcoms(self, query: GetXComs, dag_run_id: DagRunId | None) -> XComPage:
        check_name(query.task_id, "the id of a task", chars_max=ID_CHARS_MAX)
        if dag_run_id is None:
            raise QueryRefused("XComs belong to a run: only a step of a task can ask for them")
        if query.offset < 0 or not 1 <= query.limit <= XCOMS_PER_PAGE_MAX:
            page = f"{query.limit} values, {query.offset} further on"
            raise QueryRefused(f"a page has 1 to {XCOMS_PER_PAGE_MAX} values, not before the first one: not {page}")
        where: Any = {"after": query.after, "offset": query.offset, "limit": query.limit}
        where["bytes_max"] = min(XCOM_PAGE_BYTES_MAX, self._answer_bytes_max // 2)
        if query.key is None:
            return self._store.tasks.pull_elements(dag_run_id, query.task_id, **where)
        check_name(query.key, "the key of an XCom", chars_max=XCOM_KEY_CHARS_MAX)
        return self._store.tasks.pull_xcoms(dag_run_id, query.task_id, query.key, **where, is_counted=query.is_counted)

    def _secret(self, query: Query, variable: str, get: Callable[[str], bytes | None], name: str) -> SecretText:
        text = self._environ.get(variable)
        if text is not None:
            return SecretText(text)
        try:
            value = get(name)
        except BadKey:
            raise QueryRefused(f"{_shown(query)} cannot be decrypted: none of the supervisor's keys fits") from None
        try:
            return SecretText(None if value is None else value.decode())
        except UnicodeDecodeError:
            raise QueryRefused(f"{_shown(query)} is not UTF-8 text") from None

    def _task_states(self, query: GetTaskStates) -> TaskStates:
        check_name(query.dag_id, "the id of a DAG", chars_max=ID_CHARS_MAX)
        if query.run_id is not None:
            check_name(query.run_id, "the run_id", chars_max=NAME_CHARS_MAX)
        run = self._store.tasks.run_standing(
            query.dag_id, run_id=query.run_id, logical_date=_moment(query.logical_date_s)
        )
        if run is None:
            return TaskStates(has_dag=False)
        if run.run_id is None:
            return TaskStates()
        wanted = frozenset(query.task_ids)
        return TaskStates(
            run_id=run.run_id,
            run_state=run.state,
            tasks=tuple(sorted((id_, state) for id_, state in run.tasks.items() if not wanted or id_ in wanted)),
            missing=tuple(sorted(wanted - run.tasks.keys())),
        )

    def _create_run(self, query: CreateRun, asker: str | None) -> RunCreated:
        check_name(query.dag_id, "the id of a DAG", chars_max=ID_CHARS_MAX)
        if query.params is not None and len(query.params) > KWARGS_BYTES_MAX:
            raise QueryRefused(f"the conf has {len(query.params):,} bytes; the limit is {KWARGS_BYTES_MAX:,}")
        created = self._store.tasks.create_run(
            query.dag_id,
            query.run_id,
            logical_date=_moment(query.logical_date_s),
            conf=query.params,
            creator=asker,
        )
        return RunCreated(is_new=created is not None)

    def _list_signals(self, query: ListSignals, dag_run_id: DagRunId | None) -> SignalPage:
        dag_run_id = NO_RUN if dag_run_id is None else dag_run_id
        of = (query.key, query.namespace)
        if query.version is not None:
            one = self._store.signals.version(*of, query.version, dag_run=dag_run_id)
            return SignalPage(() if one is None else (_stored(one),))
        page = self._store.signals.page(*of, after=query.after, limit=query.limit, dag_run=dag_run_id)
        return SignalPage(tuple(map(_stored, page.signals)))

    def _hear(self, query: ListenSignals, dag_run_id: DagRunId | None) -> SignalsHeard:
        """Return what was sent by now; `headgate.supervisor.tasks.listeners` waits for what was not."""
        if dag_run_id is None:
            raise QueryRefused("only a step of a task can listen for signals")
        of, bytes_max = (query.key, query.namespace), min(PAGE_BYTES_MAX, self._answer_bytes_max // 2)
        heard = self._store.signals.hear(*of, after=query.after, dag_run=dag_run_id, bytes_max=bytes_max)
        return SignalsHeard(tuple(map(_stored, heard.signals)), heard.seen)


def _stored(one: Signal) -> StoredSignal:
    return StoredSignal(one.version, one.data, one.sender, one.sent_at.timestamp(), one.run_id is not None)


def _moment(seconds: float | None) -> datetime | None:
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        raise QueryRefused(f"{seconds!r} is not a logical date: it lies outside the years 1 to 9999") from None


def _shown(query: Query) -> str:
    match query:
        case GetVariable(name):
            return f"the variable {name[:NAME_SHOWN_CHARS_MAX]!r}"
        case GetConnection(name):
            return f"the connection {name[:NAME_SHOWN_CHARS_MAX]!r}"
        case EmitElements():
            return "its elements"
        case SendSignals() | GetStartSignals():
            return "its signals"
        case ListSignals(key) | ListenSignals(key):
            return f"the signals {key[:NAME_SHOWN_CHARS_MAX]!r}"
        case GetXCom(task_id, key) | GetXComs(task_id, key):
            return f"the XCom {(key or 'elements')[:NAME_SHOWN_CHARS_MAX]!r} of {task_id[:NAME_SHOWN_CHARS_MAX]!r}"
        case GetTaskStates(dag_id) | CreateRun(dag_id):
            return f"the run of DAG {dag_id[:NAME_SHOWN_CHARS_MAX]!r}"
        case _:
            assert_never(query)
