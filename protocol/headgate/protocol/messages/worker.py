"""The messages between a task worker and its supervisor: one frozen struct per message.

A worker is a process that runs users' code: steps of tasks, DAG files, and what operators decide about signals. It
does one thing at a time, and sends nothing unasked except the queries of the step it runs. It may be given further
steps while one runs: it begins them in the order in which they were given, each after the outcome of the one before is
sent, unless they are recalled::

    worker                                supervisor
    ------                                ----------
    WorkerHello               ------>
                              <------     WorkerWelcome
                              <------     RunStep
    StepLoaded                ------>
    Request(id=1)             ------>
                              <------     Response(id=1)
                              <------     RunStep
                              <------     RunStep
                              <------     RecallSteps
    StepsReturned             ------>
    StepEnded                 ------>
    StepEnded                 ------>
                              <------     ParseFile
    FileParsed                ------>
                              <------     DecideSignals
    SignalsDecided            ------>
                              (closes)

`Request` and `Response` are in `headgate.protocol.messages.queries`. Values are encoded by
`headgate.protocol.values`; moments are seconds since the epoch.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.dags import DagSpec
from headgate.protocol.messages.maps import OwnValue
from headgate.protocol.messages.queries import Request, Response, StartSignal
from headgate.protocol.messages.rules import Action
from headgate.protocol.messages.runner import FRAME_BYTES_MAX
from headgate.protocol.messages.steps import StepNotBegun, StepOutcome
from headgate.protocol.messages.task_streams import StreamPart

# Steps that a worker has at once, with the one that runs: so many tries at most are lost with a supervisor for each of
# its workers, and more of them at once make nothing faster (docs/performance.md).
BUNDLE_MAX: Final = 64

# Signals about which one worker is asked at once: what a decision costs beside users' code is shared by so many.
DECIDED_MAX: Final = 100
DECIDED_BYTES_MAX: Final = 1024 * 1024  # of their values; more than the limit if one alone is longer

STEP_LINE: Final = b"\0headgate begins step "  # before the token, in the pipe of a worker's output

# --- parts of messages ---------------------------------------------------------------------------


class WorkerSettings(WireStruct, frozen=True):
    """The settings of a worker; part of `WorkerWelcome`."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    import_paths: tuple[str, ...] = ()  # folders of users' modules, put at the end of sys.path
    hook_timeout_s: float = 10.0  # how long on_kill() may take


class AssetEvent(WireStruct, frozen=True):
    """One event for which the run was created; part of `Step`. ``payload`` is encoded."""

    asset: str
    payload: bytes
    stored_at_s: float


class Step(WireStruct, frozen=True):
    """One step of a task, with all that a worker needs to run it.

    ``token`` is unique among all steps; the outcome carries it back. If ``next_method`` is None, the step calls
    ``execute``. ``next_kwargs`` is an encoded dict, ``event`` the encoded payload that resumes the task, ``params`` the
    run's encoded conf. ``data_interval_s`` is (start, end). ``ends_at_s`` is the end of the try by the machine's
    monotonic clock, which its processes share: the author's code does not begin after it, unless to fail. ``stream`` is
    set if the task has a stream: the step handles its events, or begins with ``execute`` if ``next_method`` is None.
    ``map_index`` says which instance of a mapped task it is, from 0; -1 if the task is not mapped.
    ``emitted`` is the number of elements that the earlier steps of its try have emitted. ``map_length`` is the number
    of values that the mapped task was expanded over, None as long as more may come, and ``given_digest`` says which
    stood in the file then (`headgate.protocol.messages.maps.MapSpec`), "" if that is not known. If signals have started
    the run, it ``is_of_signals``. ``own`` is the value of the instance, if the supervisor knows it; else the worker
    asks for it. ``traceparent`` is the span of the try, for those that the author's code makes.
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
    ends_at_s: float | None = None
    stream: StreamPart | None = None
    map_index: int = -1
    emitted: int = 0
    map_length: int | None = None
    is_of_signals: bool = False
    own: OwnValue | None = None
    traceparent: str | None = None
    given_digest: str = ""


# --- supervisor to worker ------------------------------------------------------------------------


class WorkerWelcome(WireStruct, frozen=True, tag="work_welcome"):
    """Supervisor to worker: the answer to `WorkerHello`."""

    protocol_version: int
    settings: WorkerSettings


class RunStep(WireStruct, frozen=True, tag="run_step"):
    """Supervisor to worker: run this step, after those given before. Answered by `StepEnded`, unless it is recalled.

    ``is_behind`` another one: then the worker writes a line to its output where this one begins (`STEP_LINE`), because
    the supervisor may read what this one prints before it has read the end of the other.
    """

    step: Step
    is_behind: bool = False


class RecallSteps(WireStruct, frozen=True, tag="recall_steps"):
    """Supervisor to worker: do not begin the steps with these tokens. Answered by `StepsReturned`, whatever runs."""

    tokens: tuple[str, ...]


class ParseFile(WireStruct, frozen=True, tag="parse_file"):
    """Supervisor to worker: run this DAG file, an absolute path, and report its DAGs. Answered by `FileParsed`."""

    file: str


class DecideSignals(WireStruct, frozen=True, tag="decide_signals"):
    """Supervisor to worker: call ``on_signal`` of a task for each of these signals, in their order.

    At most `DECIDED_MAX`. ``try_number`` is that of the log which the decision belongs to. Answered by
    `SignalsDecided`.
    """

    token: str
    task_instance_id: int
    file: str
    dag_id: str
    run_id: str
    task_id: str
    try_number: int
    signals: tuple[StartSignal, ...]


# --- worker to supervisor ------------------------------------------------------------------------


class WorkerHello(WireStruct, frozen=True, tag="work_hello"):
    """Worker to supervisor: the first message. Answered by `WorkerWelcome`."""

    protocol_version: int
    pid: int
    headgate_version: str


class StepLoaded(WireStruct, frozen=True, tag="step_loaded"):
    """Worker to supervisor: the DAG file of the step with this token is loaded, and the task's own code begins."""

    token: str


class StepEnded(WireStruct, frozen=True, tag="step_ended"):
    """Worker to supervisor: the outcome of the step with this token, sent after all its output and log records.

    ``map_name`` is the name of the instance of a mapped task, if it has one. ``took_s`` is how long the worker was busy
    with the step, in seconds, without its waits for what other tasks have left. ``unfit``: what the step has left in
    the process that nobody can undo; this worker begins no other step, and leaves.
    """

    token: str
    outcome: StepOutcome | StepNotBegun
    map_name: str | None = None
    took_s: float = 0.0
    unfit: str | None = None


class StepsReturned(WireStruct, frozen=True, tag="steps_returned"):
    """Worker to supervisor: these are the recalled steps that had not begun, and now never will."""

    tokens: tuple[str, ...]


class FileParsed(WireStruct, frozen=True, tag="file_parsed"):
    """Worker to supervisor: the DAGs of a file, or ``error`` and its traceback.

    If all DAGs together are too long for one frame, they are sent in several messages, all but the last with ``more``.
    ``source_digest`` is that of the text that was run, "" if it could not be read.
    """

    file: str
    dags: tuple[DagSpec, ...] = ()
    error: str = ""
    traceback: str = ""
    more: bool = False
    source_digest: str = ""


class SignalsDecided(WireStruct, frozen=True, tag="signals_decided"):
    """Worker to supervisor: what the next signals of `DecideSignals` are to do, or ``error`` and its traceback.

    Each decision is sent at once, with ``more``: so it is known which signal a worker has died with. The last message
    may leave signals undecided; with ``error`` the first of these is the one that could not be decided, or nobody could
    be asked, because the DAG file ``is_unloaded``.
    """

    token: str
    actions: tuple[Action, ...] = ()
    error: str = ""
    traceback: str = ""
    more: bool = False
    is_unloaded: bool = False


FromWorker: TypeAlias = WorkerHello | StepLoaded | StepEnded | StepsReturned | FileParsed | SignalsDecided | Request
ToWorker: TypeAlias = WorkerWelcome | RunStep | RecallSteps | ParseFile | DecideSignals | Response
