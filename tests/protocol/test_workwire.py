"""The worker link: messages come back as they were, in the order of the table; all else is refused, and why is said."""

from __future__ import annotations

import itertools
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.golden import fields_at_default, read_golden
from tests.protocol.strategies import strategy_of

from headgate.protocol.errors import (
    FrameTooLong,
    LocalProtocolError,
    RemoteProtocolError,
    WorkerVersionMismatch,
)
from headgate.protocol.link.workconnection import WorkConnection
from headgate.protocol.link.worksession import (
    ASKS_OPEN_MAX,
    FILE_PIECES_MAX,
    TRANSITIONS,
    WorkClosed,
    WorkEvent,
    WorkRole,
    WorkSession,
    WorkState,
)
from headgate.protocol.link.workwire import WORK_MESSAGE_TYPES, decode_work, encode_work
from headgate.protocol.messages import worker as work
from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, DagSpec, StartTrigger, TaskSpec
from headgate.protocol.messages.queries import (
    CreateRun,
    EncodedValue,
    GetConnection,
    GetTaskStates,
    GetVariable,
    GetXCom,
    RunCreated,
    SecretText,
    TaskStates,
)
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepSkipped, StepSucceeded, XCom
from headgate.protocol.messages.task_states import TaskState
from headgate.protocol.messages.worker import (
    WORK_PROTOCOL_VERSION,
    AssetEvent,
    FileParsed,
    ParseFile,
    Request,
    Response,
    RunStep,
    Step,
    StepEnded,
    WorkerHello,
    WorkerSettings,
    WorkerWelcome,
)

WORKER, SUPERVISOR = WorkRole.WORKER, WorkRole.SUPERVISOR
ANY_MESSAGE = {role: st.one_of([strategy_of(type_) for type_ in kinds]) for role, kinds in WORK_MESSAGE_TYPES.items()}
QUERY = GetVariable("v")


def step(token: str = "a") -> Step:
    return Step(token, 1, "/dag.py", "d", "r", "t", 1)


EVENTS: dict[type[WorkEvent], WorkEvent] = {
    WorkerHello: WorkerHello(WORK_PROTOCOL_VERSION, 4711, "0.1.0"),
    WorkerWelcome: WorkerWelcome(WORK_PROTOCOL_VERSION, WorkerSettings()),
    RunStep: RunStep(step()),
    ParseFile: ParseFile("/dag.py"),
    Request: Request(2, QUERY),
    Response: Response(1, SecretText("x")),
    StepEnded: StepEnded("a", StepSucceeded()),
    FileParsed: FileParsed("/dag.py"),
    WorkClosed: WorkClosed(),
}
START = [(WORKER, EVENTS[WorkerHello]), (SUPERVISOR, EVENTS[WorkerWelcome])]
ASKING = [*START, (SUPERVISOR, EVENTS[RunStep]), (WORKER, Request(1, QUERY))]
# In each state a query of id 1 is open, or was when the step ended, wherever there can have been one.
PATHS: dict[WorkState, list[tuple[WorkRole, WorkEvent]]] = {
    WorkState.OPENING: [],
    WorkState.GREETED: START[:1],
    WorkState.IDLE: [*ASKING, (WORKER, EVENTS[StepEnded])],
    WorkState.RUNNING: ASKING,
    WorkState.PARSING: [*START, (SUPERVISOR, EVENTS[ParseFile])],
    WorkState.CLOSED: [(WORKER, EVENTS[WorkClosed])],
}
# Written out once more, apart from the table under test.
LEGAL: dict[tuple[WorkState, WorkRole, type[WorkEvent]], WorkState] = {
    (WorkState.OPENING, WORKER, WorkerHello): WorkState.GREETED,
    (WorkState.GREETED, SUPERVISOR, WorkerWelcome): WorkState.IDLE,
    (WorkState.IDLE, SUPERVISOR, RunStep): WorkState.RUNNING,
    (WorkState.IDLE, SUPERVISOR, ParseFile): WorkState.PARSING,
    (WorkState.IDLE, SUPERVISOR, Response): WorkState.IDLE,
    (WorkState.RUNNING, WORKER, Request): WorkState.RUNNING,
    (WorkState.RUNNING, SUPERVISOR, Response): WorkState.RUNNING,
    (WorkState.RUNNING, WORKER, StepEnded): WorkState.IDLE,
    (WorkState.PARSING, WORKER, FileParsed): WorkState.IDLE,
    **{(state, role, WorkClosed): WorkState.CLOSED for state in WorkState for role in WorkRole},
}
ALL = list(itertools.product(WorkState, WorkRole, EVENTS))


def session_after(path: list[tuple[WorkRole, WorkEvent]], role: WorkRole) -> WorkSession:
    session = WorkSession(role)
    for sender, event in path:
        session.move(sender, event)
    return session


# --- the table -----------------------------------------------------------------------------------


def test_the_table_is_the_drawing() -> None:
    table = {(state, sender, event): to for state, row in TRANSITIONS.items() for (sender, event), to in row.items()}
    assert table == LEGAL


# What has just ended a step sends no more answers to it: there only the worker reads such a message.
@pytest.mark.parametrize(
    ("role", "state", "sender", "event"),
    [
        (role, *case)
        for role in WorkRole
        for case in ALL
        if case in LEGAL and (role, *case) != (SUPERVISOR, WorkState.IDLE, SUPERVISOR, Response)
    ],
)
def test_a_legal_event_moves_both_sides_alike(
    role: WorkRole, state: WorkState, sender: WorkRole, event: type[WorkEvent]
) -> None:
    session = session_after(PATHS[state], role)
    session.move(sender, EVENTS[event])
    assert session.state is LEGAL[state, sender, event]


@pytest.mark.parametrize("role", WorkRole)
@pytest.mark.parametrize(("state", "sender", "event"), [case for case in ALL if case not in LEGAL])
def test_an_illegal_event_raises_and_changes_nothing(
    role: WorkRole, state: WorkState, sender: WorkRole, event: type[WorkEvent]
) -> None:
    session = session_after(PATHS[state], role)
    fault = LocalProtocolError if sender is role else RemoteProtocolError
    with pytest.raises(fault, match=rf"the {sender.value} cannot send {event.__name__} in state {state.name}"):
        session.move(sender, EVENTS[event])
    assert session.state is state


# --- what answers what ---------------------------------------------------------------------------


@pytest.mark.parametrize("role", WorkRole)
@pytest.mark.parametrize(
    ("path", "sender", "event", "problem"),
    [
        (ASKING, WORKER, StepEnded("b", StepSucceeded()), "its token is 'b', and 'a' is running"),
        (PATHS[WorkState.PARSING], WORKER, FileParsed("/b.py"), "its file is '/b.py', and '/dag.py' was asked for"),
        (ASKING, WORKER, Request(1, QUERY), "its id is 1, and the last one was 1"),
        (ASKING, SUPERVISOR, Response(2), "no query of id 2 is open"),
        ([*ASKING, (SUPERVISOR, Response(1))], SUPERVISOR, Response(1), "no query of id 1 is open"),
        (
            [*PATHS[WorkState.IDLE], (SUPERVISOR, RunStep(step("b")))],
            SUPERVISOR,
            Response(1),
            "no query of id 1 is open",
        ),
        (
            [*ASKING, *[(WORKER, Request(n, QUERY)) for n in range(2, ASKS_OPEN_MAX + 1)]],
            WORKER,
            Request(ASKS_OPEN_MAX + 1, QUERY),
            f"{ASKS_OPEN_MAX} queries wait",
        ),
        (
            START[:1],
            SUPERVISOR,
            WorkerWelcome(WORK_PROTOCOL_VERSION, WorkerSettings(frame_bytes_max=0)),
            "the frame limit must be",
        ),
    ],
)
def test_a_message_must_fit_what_it_answers(
    role: WorkRole, path: list[tuple[WorkRole, WorkEvent]], sender: WorkRole, event: WorkEvent, problem: str
) -> None:
    session = session_after(path, role)
    before = session.state
    fault = LocalProtocolError if sender is role else RemoteProtocolError
    with pytest.raises(fault, match=f"the {sender.value} cannot send this {type(event).__name__}: {problem}"):
        session.move(sender, event)
    assert session.state is before


def test_an_answer_that_crosses_the_end_of_its_step_is_taken_and_cannot_be_sent_afterwards() -> None:
    worker, supervisor = (session_after(PATHS[WorkState.IDLE], role) for role in (WORKER, SUPERVISOR))
    worker.move(SUPERVISOR, EVENTS[Response])
    assert not supervisor.is_open(1)
    with pytest.raises(LocalProtocolError, match="no query of id 1 is open"):
        supervisor.move(SUPERVISOR, EVENTS[Response])


def test_a_file_is_parsed_when_its_last_piece_has_come() -> None:
    session = session_after(PATHS[WorkState.PARSING], SUPERVISOR)
    session.move(WORKER, FileParsed("/dag.py", more=True))
    assert session.state is WorkState.PARSING
    session.move(WORKER, FileParsed("/dag.py"))
    assert session.state is WorkState.IDLE


@pytest.mark.parametrize("role", WorkRole)
def test_a_file_comes_in_so_many_pieces_and_the_next_one_in_as_many(role: WorkRole) -> None:
    session = session_after(PATHS[WorkState.PARSING], role)
    fault = LocalProtocolError if role is WORKER else RemoteProtocolError
    for _ in range(2):
        for _ in range(FILE_PIECES_MAX - 1):
            session.move(WORKER, FileParsed("/dag.py", more=True))
        with pytest.raises(fault, match=f"it is number {FILE_PIECES_MAX} for one file, and says that more will come"):
            session.move(WORKER, FileParsed("/dag.py", more=True))
        session.move(WORKER, FileParsed("/dag.py"))
        session.move(SUPERVISOR, ParseFile("/dag.py"))


def test_another_version_says_what_to_upgrade() -> None:
    newer = WORK_PROTOCOL_VERSION + 1
    with pytest.raises(WorkerVersionMismatch, match="that the supervisor is started from") as caught:
        WorkSession(SUPERVISOR).move(WORKER, WorkerHello(newer, 1, "9"))
    assert (caught.value.supervisor, caught.value.worker) == (WORK_PROTOCOL_VERSION, newer)
    with pytest.raises(WorkerVersionMismatch, match="that the worker is started from"):
        session_after(START[:1], WORKER).move(SUPERVISOR, WorkerWelcome(newer, WorkerSettings()))
    with pytest.raises(LocalProtocolError, match=f"it must carry protocol version {WORK_PROTOCOL_VERSION}"):
        WorkSession(WORKER).move(WORKER, WorkerHello(newer, 1, "9"))


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", WorkRole)
@settings(deadline=None)  # the first draw from a strategy builds it
@given(data=st.data())
def test_every_message_comes_back_as_it_was(role: WorkRole, data: st.DataObject) -> None:
    message = data.draw(ANY_MESSAGE[role])
    assert decode_work(role, encode_work(message)) == message


def test_the_unions_and_the_types_by_role_are_the_same() -> None:
    assert set(WORK_MESSAGE_TYPES[WORKER]) == set(typing.get_args(work.FromWorker))
    assert set(WORK_MESSAGE_TYPES[SUPERVISOR]) == set(typing.get_args(work.ToWorker))


@pytest.mark.parametrize("role", WorkRole)
@given(body=st.binary(max_size=200))
def test_garbage_raises_nothing_but_a_remote_error(role: WorkRole, body: bytes) -> None:
    try:
        assert type(decode_work(role, body)) in WORK_MESSAGE_TYPES[role]
    except RemoteProtocolError:
        pass


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\xc1", "the worker sent a malformed body of 1 bytes"),
        (msgspec.msgpack.encode(["goodbye", 1]), "the worker sent a message with the unknown tag 'goodbye'"),
        (msgspec.msgpack.encode(["step_ended", 1]), "the worker sent a malformed StepEnded"),
        (encode_work(ParseFile("/x")), "the worker sent ParseFile, which only the supervisor may send"),
    ],
)
def test_a_bad_body_is_refused_with_what_is_wrong(body: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode_work(WORKER, body)


def test_what_has_no_form_on_the_wire_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError, match="FileParsed cannot be encoded"):
        encode_work(FileParsed("/x", error="\ud800"))


# --- golden frames -------------------------------------------------------------------------------

_XCOMS = (XCom("k", b"1"),)
_DAG = DagSpec(
    dag_id="d",
    schedule=CronSchedule(cron="0 3 * * *", timezone="Europe/Berlin"),
    start_date_s=1.5,
    catchup=True,
    max_active_runs=2,
    tasks=(
        TaskSpec(
            task_id="t",
            operator="O",
            upstream=("s",),
            trigger_rule="all_done",
            retries=3,
            retry_delay_s=4.5,
            retry_exponential_backoff=True,
            max_retry_delay_s=5.5,
            execution_timeout_s=6.5,
            priority_weight=7,
            queue="q",
            pool="p",
            pool_slots=8,
            start_trigger=StartTrigger(
                classpath="a.B", kwargs=b"{}", next_method="m", next_kwargs=b'{"a":1}', timeout_s=9.5
            ),
        ),
    ),
    is_paused_upon_creation=True,
    description="words",
    tags=("x",),
)
# One of each, and of each part that a message can have, every field apart from its default.
GOLDEN: dict[str, work.FromWorker | work.ToWorker] = {
    "WorkerHello": WorkerHello(protocol_version=1, pid=4711, headgate_version="0.1.0"),
    "StepSucceeded": StepEnded(token="a", outcome=StepSucceeded(xcoms=_XCOMS, skips=("u",))),
    "StepSkipped": StepEnded(token="a", outcome=StepSkipped(reason="none", xcoms=_XCOMS)),
    "StepFailed": StepEnded(
        token="a", outcome=StepFailed(error="Error", traceback="Traceback", may_retry=False, xcoms=_XCOMS)
    ),
    "StepDeferred": StepEnded(
        token="a",
        outcome=StepDeferred(
            classpath="a.B", kwargs=b"{}", next_method="m", next_kwargs=b'{"a":1}', timeout_s=1.5, xcoms=_XCOMS
        ),
    ),
    "FileParsed": FileParsed(
        file="/dag.py",
        dags=(_DAG,),
        error="Error",
        traceback="Traceback",
        more=True,
    ),
    "FileParsedAssets": FileParsed(
        file="/dag.py",
        dags=(
            msgspec.structs.replace(
                _DAG,
                schedule=AssetSchedule(assets=("s3://x",), contract="batch", batch_count=10, batch_seconds=11.5),
                tasks=(),
            ),
        ),
        error="Error",
        traceback="Traceback",
        more=True,
    ),
    "AskXCom": Request(id=1, query=GetXCom(task_id="t", key="k")),
    "AskVariable": Request(id=2, query=GetVariable(name="v")),
    "AskConnection": Request(id=3, query=GetConnection(name="c")),
    "AskStates": Request(id=4, query=GetTaskStates(dag_id="d", run_id="r", logical_date_s=1.5, task_ids=("t",))),
    "AskRun": Request(id=5, query=CreateRun(dag_id="d", run_id="r", params=b"{}", logical_date_s=1.5)),
    "WorkerWelcome": WorkerWelcome(
        protocol_version=1, settings=WorkerSettings(frame_bytes_max=1, import_paths=("dags",), hook_timeout_s=2.5)
    ),
    "RunStep": RunStep(
        step=Step(
            token="a",
            task_instance_id=70000,
            file="/dag.py",
            dag_id="d",
            run_id="r",
            task_id="t",
            try_number=2,
            next_method="m",
            next_kwargs=b"{}",
            event=b"1",
            params=b'{"a":1}',
            logical_date_s=1.5,
            data_interval_s=(2.5, 3.5),
            asset_events=(AssetEvent(asset="s3://x", payload=b"2", stored_at_s=4.5),),
        )
    ),
    "ParseFile": ParseFile(file="/dag.py"),
    "AnswerValue": Response(id=1, answer=EncodedValue(value=b"1"), error="none"),
    "AnswerSecret": Response(id=2, answer=SecretText(value="s"), error="none"),
    "AnswerStates": Response(
        id=4,
        answer=TaskStates(
            run_id="r", run_state="running", tasks=(("t", TaskState.DEFERRED),), missing=("u",), has_dag=False
        ),
        error="none",
    ),
    "AnswerRun": Response(id=5, answer=RunCreated(is_new=True), error="none"),
}


def test_the_golden_frames_hold_every_message_and_no_field_of_them_is_at_its_default() -> None:
    kinds = {*WORK_MESSAGE_TYPES[WORKER], *WORK_MESSAGE_TYPES[SUPERVISOR]}
    assert {type(message) for message in GOLDEN.values()} == kinds
    # A DAG that has a schedule by assets needs no tasks here: the other one has them.
    assert fields_at_default(GOLDEN.values()) == [("DagSpec", "tasks")]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_wire_is_what_it_was(name: str) -> None:
    """Golden frames are added to, never changed; DAGs of this form are in databases as well."""
    golden = read_golden("work-messages-v1.txt")
    sender = WORKER if type(GOLDEN[name]) in WORK_MESSAGE_TYPES[WORKER] else SUPERVISOR
    assert encode_work(GOLDEN[name]) == golden[name]
    assert decode_work(sender, golden[name]) == GOLDEN[name]
    assert golden.keys() == GOLDEN.keys()


def test_a_field_that_a_newer_peer_appended_is_skipped() -> None:
    parts = msgspec.msgpack.decode(encode_work(GOLDEN["RunStep"]))
    assert decode_work(SUPERVISOR, msgspec.msgpack.encode([*parts, "new"])) == GOLDEN["RunStep"]


# --- connections ---------------------------------------------------------------------------------


class Pair:
    """A worker's and a supervisor's connection; everything sent is delivered byte by byte."""

    def __init__(self, settings: WorkerSettings | None = None) -> None:
        self.sides: dict[WorkRole, WorkConnection[Any, Any]] = {
            WORKER: WorkConnection(WORKER),
            SUPERVISOR: WorkConnection(SUPERVISOR),
        }
        self.say(WORKER, EVENTS[WorkerHello])
        self.say(SUPERVISOR, WorkerWelcome(WORK_PROTOCOL_VERSION, settings or WorkerSettings()))

    def say(self, sender: WorkRole, message: Any) -> None:
        receiver, got = self.sides[sender.peer], []
        for byte in self.sides[sender].send(message):
            receiver.receive_data(bytes((byte,)))
            while (received := receiver.next_message()) is not None:
                got.append(received)
        assert got == [message]


def test_a_conversation() -> None:
    pair = Pair()
    pair.say(SUPERVISOR, RunStep(step()))
    pair.say(WORKER, Request(1, QUERY))
    assert pair.sides[SUPERVISOR].is_open(1)
    pair.say(SUPERVISOR, Response(1, SecretText("x")))
    pair.say(WORKER, StepEnded("a", StepSucceeded()))
    pair.say(SUPERVISOR, ParseFile("/dag.py"))
    pair.say(WORKER, FileParsed("/dag.py"))
    supervisor = pair.sides[SUPERVISOR]
    supervisor.receive_eof()
    assert supervisor.state is WorkState.CLOSED


def test_a_message_over_the_limit_is_not_sent_and_changes_nothing() -> None:
    pair = Pair(WorkerSettings(frame_bytes_max=200))
    assert pair.sides[WORKER].frame_bytes_max == 200
    with pytest.raises(FrameTooLong, match="ParseFile needs a frame of"):
        pair.sides[SUPERVISOR].send(ParseFile("/" + "x" * 300))
    pair.say(SUPERVISOR, ParseFile("/dag.py"))


def test_after_a_remote_error_the_link_is_broken() -> None:
    supervisor: WorkConnection[Any, Any] = WorkConnection(SUPERVISOR)
    supervisor.receive_data(b"\x00\x00\x00\x01\xc1")
    with pytest.raises(RemoteProtocolError, match="malformed body"):
        supervisor.next_message()
    for call in (supervisor.next_message, supervisor.receive_eof, lambda: supervisor.receive_data(b"")):
        with pytest.raises(RemoteProtocolError, match="the link is broken: the worker sent a malformed body"):
            call()


def test_a_peer_that_leaves_within_a_frame_is_at_fault() -> None:
    supervisor: WorkConnection[Any, Any] = WorkConnection(SUPERVISOR)
    supervisor.receive_data(b"\x00\x00")
    with pytest.raises(RemoteProtocolError, match="ended within a frame"):
        supervisor.receive_eof()


def test_a_side_that_has_closed_says_nothing_more() -> None:
    pair = Pair()
    worker = pair.sides[WORKER]
    worker.close()
    worker.close()
    with pytest.raises(LocalProtocolError, match="this side has closed the link"):
        worker.send(Request(1, QUERY))
