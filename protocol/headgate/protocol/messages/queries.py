"""What users' code may ask the supervisor while it runs: queries, and what they are answered with.

A task asks in its worker, by `headgate.protocol.messages.worker.Ask`; a trigger in the runner, by its `Request`.
Neither sees the
database (I12): the supervisor looks, and answers with values encoded by `headgate.protocol.values`, or with text.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headgate.protocol.messages.task_states import TaskState


class _Wire(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False, gc=False):
    """What all structs of the wire have in common."""


# --- queries -----------------------------------------------------------------------------------


class GetXCom(_Wire, frozen=True, tag="get_xcom"):
    """What a task of the asking step's run has left under a key. For tasks only. QueryResult by `EncodedValue`."""

    task_id: str
    key: str


class GetVariable(_Wire, frozen=True, tag="get_variable"):
    """The value of a variable. QueryResult by `SecretText`."""

    name: str


class GetConnection(_Wire, frozen=True, tag="get_connection"):
    """A connection, as the URI it was stored as. QueryResult by `SecretText`."""

    name: str


class GetTaskStates(_Wire, frozen=True, tag="get_task_states"):
    """How another DAG's run stands. QueryResult by `TaskStates`.

    The run is the one with ``run_id``, or with ``logical_date_s``; of several the newest. ``task_ids`` empty: all.
    """

    dag_id: str
    run_id: str | None = None
    logical_date_s: float | None = None
    task_ids: tuple[str, ...] = ()


class CreateRun(_Wire, frozen=True, tag="create_run"):
    """Begin a run of a DAG. For tasks only. QueryResult by `RunCreated`. ``params`` is an encoded dict."""

    dag_id: str
    run_id: str
    params: bytes | None = None
    logical_date_s: float | None = None


Query: TypeAlias = GetXCom | GetVariable | GetConnection | GetTaskStates | CreateRun
TriggerQuery: TypeAlias = GetVariable | GetConnection | GetTaskStates  # what a trigger may ask of these


# --- answers -------------------------------------------------------------------------------------


class EncodedValue(_Wire, frozen=True, tag="value"):
    """An encoded value; None where there is none."""

    value: bytes | None


class SecretText(_Wire, frozen=True, tag="secret"):
    """A variable or a connection, None where there is none. It is masked wherever frames and logs are kept."""

    value: str | None


class TaskStates(_Wire, frozen=True, tag="task_states"):
    """How a run stands: ``run_id`` None where there is no such run. ``tasks`` are in order of their names.

    ``run_state`` is ``queued``, ``running``, ``success`` or ``failed``. ``missing`` are tasks the run does not have.
    ``has_dag`` False: no DAG of this name was ever seen.
    """

    run_id: str | None = None
    run_state: str = ""
    tasks: tuple[tuple[str, TaskState], ...] = ()
    missing: tuple[str, ...] = ()
    has_dag: bool = True


class RunCreated(_Wire, frozen=True, tag="run_created"):
    """``is_new`` False: the DAG had a run of this name already."""

    is_new: bool


QueryResult: TypeAlias = EncodedValue | SecretText | TaskStates | RunCreated
