"""What a supervisor and a task worker say to each other: one frozen struct per message.

A worker is a process that runs users' code and nothing else: steps of tasks, and DAG files. It does one thing at a
time, and speaks only when spoken to, but for the queries of the step it is at::

    worker                                supervisor
    ------                                ----------
    WorkerHello               ------>
                              <------     WorkerWelcome
                              <------     RunStep
    Request(id=1)                 ------>
                              <------     Response(id=1)
    StepEnded                 ------>
                              <------     ParseFile
    FileParsed                ------>
                              (closes)

Frames and structs are those of `headgate.protocol.messages.runner`: tagged msgpack arrays, a new field at the end of
its
struct and with a default. Values are encoded by `headgate.protocol.values`; moments are seconds since the epoch.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headgate.protocol.messages.dags import DagSpec
from headgate.protocol.messages.queries import Query, QueryResult
from headgate.protocol.messages.runner import FRAME_BYTES_MAX
from headgate.protocol.messages.steps import StepOutcome

WORK_PROTOCOL_VERSION = 1


class _Wire(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False, gc=False):
    """What all structs of the wire have in common."""


# --- parts of messages ---------------------------------------------------------------------------


class WorkerSettings(_Wire, frozen=True):
    """What a worker goes by; part of `WorkerWelcome`."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    import_paths: tuple[str, ...] = ()  # folders of users' modules, put at the end of sys.path
    hook_timeout_s: float = 10.0  # how long on_kill() may take


class AssetEvent(_Wire, frozen=True):
    """One event that a run was made for; part of `Step`. ``payload`` is encoded."""

    asset: str
    payload: bytes
    stored_at_s: float


class Step(_Wire, frozen=True):
    """One step of a task: all that a worker has to know to run it.

    ``token`` names this step and no other, of this try or any; the outcome carries it back. ``next_method`` None: from
    ``execute``. ``next_kwargs`` is an encoded dict, ``event`` the encoded payload that resumes the task, ``params`` the
    run's encoded conf. ``data_interval_s`` is (start, end).
    """

    token: str
    task_instance_id: int
    file: str
    dag_id: str
    run_id: str
    task_id: str
    try_number: int
    next_method: str | None = None
    next_kwargs: bytes | None = None
    event: bytes | None = None
    params: bytes | None = None
    logical_date_s: float | None = None
    data_interval_s: tuple[float, float] | None = None
    asset_events: tuple[AssetEvent, ...] = ()


# --- supervisor to worker ------------------------------------------------------------------------


class WorkerWelcome(_Wire, frozen=True, tag="work_welcome"):
    """Supervisor to worker: the handshake's other half."""

    protocol_version: int
    settings: WorkerSettings


class RunStep(_Wire, frozen=True, tag="run_step"):
    """Supervisor to worker: run this now. Answered by `StepEnded`."""

    step: Step


class ParseFile(_Wire, frozen=True, tag="parse_file"):
    """Supervisor to worker: run this DAG file, an absolute path, and say what it holds. Answered by `FileParsed`."""

    file: str


class Response(_Wire, frozen=True, tag="answer"):
    """Supervisor to worker: the answer to the `Request` of this id; ``error`` is set where there is none."""

    id: int
    answer: QueryResult | None = None
    error: str = ""


# --- worker to supervisor ------------------------------------------------------------------------


class WorkerHello(_Wire, frozen=True, tag="work_hello"):
    """Worker to supervisor, first of all: who I am. Answered by `WorkerWelcome`."""

    protocol_version: int
    pid: int
    headgate_version: str


class StepEnded(_Wire, frozen=True, tag="step_ended"):
    """Worker to supervisor: what the step of this token came to. All it printed and logged was sent before."""

    token: str
    outcome: StepOutcome


class FileParsed(_Wire, frozen=True, tag="file_parsed"):
    """Worker to supervisor: what a DAG file holds, or why it holds nothing: ``error``, and its traceback.

    DAGs too long for one frame together come in several of these, all but the last with ``more``.
    """

    file: str
    dags: tuple[DagSpec, ...] = ()
    error: str = ""
    traceback: str = ""
    more: bool = False


class Request(_Wire, frozen=True, tag="ask"):
    """Worker to supervisor: a query of the step that is running. Answered by the `Response` with the same id."""

    id: int
    query: Query


FromWorker: TypeAlias = WorkerHello | StepEnded | FileParsed | Request
ToWorker: TypeAlias = WorkerWelcome | RunStep | ParseFile | Response
