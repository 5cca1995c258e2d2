"""Stubs for the supervisor in tests: variables, connections, XComs, and the states of runs of other DAGs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias, assert_never

import trio

from headgate.child import queries
from headgate.protocol.messages.queries import (
    XCOMS_PER_PAGE_MAX,
    CreateRun,
    ElementRoom,
    EmitElements,
    EncodedValue,
    GetConnection,
    GetTaskStates,
    GetVariable,
    GetXCom,
    GetXComs,
    Query,
    QueryResult,
    RunCreated,
    SecretText,
    TaskState,
    TaskStates,
    TriggerQuery,
    XComPage,
)
from headgate.protocol.values import decode_value, encode_value

RETURN_VALUE = "return_value"
_UNFINISHED = frozenset({"none", "scheduled", "running", "deferred", "up_for_retry", "restarting"})

StubRun: TypeAlias = str | Mapping[str, str] | None
"""A run's state, or the states of its tasks by task id; None if the run does not exist yet."""


@dataclass(frozen=True)
class CreatedRun:
    """A run that a task has created."""

    dag_id: str
    run_id: str
    conf: Any
    logical_date: datetime | None


class Stubs:
    """Answers what users' code asks. ``created`` are the runs it has begun so far.

    The keys of ``xcoms`` are task ids or (task id, key). ``runs`` gives the state of the run of a DAG, or a list with
    one state for each look, the last of which stays.
    """

    def __init__(
        self,
        *,
        variables: Mapping[str, str] | None = None,
        connections: Mapping[str, str] | None = None,
        xcoms: Mapping[str | tuple[str, str], Any] | None = None,
        runs: Mapping[str, StubRun | Sequence[StubRun]] | None = None,
    ) -> None:
        self._variables = dict(variables or {})
        self._connections = dict(connections or {})
        self._xcoms = {
            (key, RETURN_VALUE) if isinstance(key, str) else key: encode_value(value, where=f"xcoms[{key!r}]")
            for key, value in (xcoms or {}).items()
        }
        self._runs: dict[str, list[StubRun]] = {
            dag_id: [states] if states is None or isinstance(states, str | Mapping) else list(states)
            for dag_id, states in (runs or {}).items()
        }
        for dag_id, looks in self._runs.items():
            if not looks:
                raise ValueError(f"runs[{dag_id!r}] is empty: give the state of the run")
        self.created: list[CreatedRun] = []
        self.elements: list[Any] = []  # that the task has emitted

    def answer(self, query: Query) -> QueryResult:
        """Answer as the supervisor would. Raises `QueryFailed`."""
        match query:
            case GetVariable(name):
                return SecretText(self._variables.get(name))
            case GetConnection(name):
                return SecretText(self._connections.get(name))
            case GetXCom(task_id, key):
                return EncodedValue(self._xcoms.get((task_id, key)))
            case GetXComs(task_id, key, after, offset, limit):
                return self.read_xcoms(task_id, key, after=after, offset=offset, limit=limit)
            case EmitElements(first, values):
                self.elements[first:] = map(decode_value, values)
                return ElementRoom(XCOMS_PER_PAGE_MAX)
            case GetTaskStates():
                return self._task_states(query)
            case CreateRun():
                return self._create_run(query)
            case _:
                assert_never(query)

    def read_xcom(self, task_id: str, key: str) -> bytes | None:
        """Return the encoded XCom of another task."""
        return self._xcoms.get((task_id, key))

    def read_xcoms(
        self, task_id: str, key: str | None, *, after: int = -1, offset: int = 0, limit: int = XCOMS_PER_PAGE_MAX
    ) -> XComPage:
        """Return the XComs of a mapped task, or elements, given as a list."""
        encoded = self._xcoms.get((task_id, key or RETURN_VALUE))
        values = [] if encoded is None else decode_value(encoded)
        if not isinstance(values, list):
            raise ValueError(f"xcoms[{task_id!r}] must be a list: the task is mapped, and each instance leaves a value")
        page = [(index, encode_value(value, where=f"xcoms[{task_id!r}]")) for index, value in enumerate(values)]
        return XComPage(tuple(page[after + 1 + offset :][:limit]), len(values), 0)

    async def answer_trigger(self, query: TriggerQuery) -> QueryResult:
        """Answer a trigger."""
        await trio.lowlevel.checkpoint()
        return self.answer(query)

    def _task_states(self, query: GetTaskStates) -> TaskStates:
        looks = self._runs.get(query.dag_id)
        begun = [run.run_id for run in self.created if run.dag_id == query.dag_id]
        if looks is None:
            return TaskStates(run_id=begun[-1], run_state="running") if begun else TaskStates(has_dag=False)
        state = looks.pop(0) if len(looks) > 1 else looks[0]
        if state is None:
            return TaskStates()
        run_id = query.run_id or (begun[-1] if begun else "the run")
        if isinstance(state, str):
            return TaskStates(run_id=run_id, run_state=state, missing=tuple(sorted(query.task_ids)))
        wanted = set(query.task_ids) or set(state)
        return TaskStates(
            run_id=run_id,
            run_state=_run_state(state),
            tasks=tuple((task_id, TaskState(state[task_id])) for task_id in sorted(wanted & state.keys())),
            missing=tuple(sorted(wanted - state.keys())),
        )

    def _create_run(self, query: CreateRun) -> RunCreated:
        if any((run.dag_id, run.run_id) == (query.dag_id, query.run_id) for run in self.created):
            return RunCreated(is_new=False)
        if self._runs and query.dag_id not in self._runs:
            raise queries.QueryFailed(f"there is no DAG named {query.dag_id!r}")
        conf = None if query.params is None else decode_value(query.params)
        moment = None if query.logical_date_s is None else datetime.fromtimestamp(query.logical_date_s, UTC)
        self.created.append(CreatedRun(query.dag_id, query.run_id, conf, moment))
        return RunCreated(is_new=True)


def _run_state(tasks: Mapping[str, str]) -> str:
    states = set(tasks.values())
    if states & _UNFINISHED:
        return "running"
    return "failed" if states & {"failed", "upstream_failed"} else "success"
