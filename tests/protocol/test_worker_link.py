"""The worker link: messages come back as they were, in the order of the table; all else is refused, and why is said."""

from __future__ import annotations

import itertools
import typing
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.strategies import strategy_of

from headgate.protocol.errors import (
    FrameTooLong,
    LocalProtocolError,
    RemoteProtocolError,
    VersionMismatch,
)
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.session import Closed, Event, Session, State
from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.link.worker_dialect import (
    FILE_PIECES_MAX,
    RECALLS_OPEN_MAX,
    REQUESTS_OPEN_MAX,
    TRANSITIONS,
    WORKER_WIRE,
    WorkerDialect,
)
from headgate.protocol.messages import worker as work
from headgate.protocol.messages.queries import (
    GetVariable,
    LastEvent,
    Request,
    Response,
    SecretText,
    StartSignal,
)
from headgate.protocol.messages.runner import PROTOCOL_VERSION
from headgate.protocol.messages.steps import StepSucceeded
from headgate.protocol.messages.worker import (
    BUNDLE_MAX,
    DecideSignals,
    FileParsed,
    ParseFile,
    RecallSteps,
    RunStep,
    SignalsDecided,
    Step,
    StepEnded,
    StepLoaded,
    StepsReturned,
    WorkerHello,
    WorkerSettings,
    WorkerWelcome,
)

WORKER: Final = Role.WORKER
SUPERVISOR: Final = Role.SUPERVISOR
ROLES: Final = (WORKER, SUPERVISOR)
ANY_MESSAGE = {role: st.one_of([strategy_of(type_) for type_ in kinds]) for role, kinds in WORKER_WIRE.types.items()}
QUERY = GetVariable("v")


def step(token: str = "a") -> Step:
    return Step(token, 1, "/dag.py", "d", "r", "t", 1)


EVENTS: dict[type[Event], Event] = {
    WorkerHello: WorkerHello(PROTOCOL_VERSION, 4711, "0.1.0"),
    WorkerWelcome: WorkerWelcome(PROTOCOL_VERSION, WorkerSettings()),
    RunStep: RunStep(step("b")),
    RecallSteps: RecallSteps(("a",)),
    StepsReturned: StepsReturned(()),
    ParseFile: ParseFile("/dag.py"),
    DecideSignals: DecideSignals("asked", 1, "/dag.py", "d", "r", "t", 1, (StartSignal("k", "n", 1, b"1"),) * 3),
    SignalsDecided: SignalsDecided("asked"),
    Request: Request(2, QUERY),
    Response: Response(1, SecretText("x")),
    StepLoaded: StepLoaded("a"),
    StepEnded: StepEnded("a", StepSucceeded()),
    FileParsed: FileParsed("/dag.py"),
    Closed: Closed(),
}
START = [(WORKER, EVENTS[WorkerHello]), (SUPERVISOR, EVENTS[WorkerWelcome])]
RECALL = (SUPERVISOR, EVENTS[RecallSteps])
QUERYING = [*START, (SUPERVISOR, RunStep(step("a"))), (WORKER, Request(1, QUERY)), RECALL]
# In each state a query of id 1 and a recall are open, or were when the step ended, wherever there can have been one.
PATHS: dict[State, list[tuple[Role, Event]]] = {
    State.OPENING: [],
    State.HELLO_RECEIVED: START[:1],
    State.IDLE: [*QUERYING, (WORKER, EVENTS[StepEnded])],
    State.RUNNING: QUERYING,
    State.PARSING: [*START, (SUPERVISOR, EVENTS[ParseFile])],
    State.DECIDING: [*START, (SUPERVISOR, EVENTS[DecideSignals])],
    State.CLOSED: [(WORKER, EVENTS[Closed])],
}
STEPS = [RunStep(step(f"step-{number}")) for number in range(BUNDLE_MAX)]
# Written out once more, apart from the table under test.
LEGAL: dict[tuple[State, Role, type[Event]], State] = {
    (State.OPENING, WORKER, WorkerHello): State.HELLO_RECEIVED,
    (State.HELLO_RECEIVED, SUPERVISOR, WorkerWelcome): State.IDLE,
    (State.IDLE, SUPERVISOR, RunStep): State.RUNNING,
    (State.IDLE, SUPERVISOR, ParseFile): State.PARSING,
    (State.IDLE, SUPERVISOR, DecideSignals): State.DECIDING,
    (State.IDLE, SUPERVISOR, Response): State.IDLE,
    (State.IDLE, SUPERVISOR, RecallSteps): State.IDLE,
    (State.IDLE, WORKER, StepsReturned): State.IDLE,
    (State.RUNNING, SUPERVISOR, RunStep): State.RUNNING,
    (State.RUNNING, SUPERVISOR, RecallSteps): State.RUNNING,
    (State.RUNNING, WORKER, StepsReturned): State.RUNNING,
    (State.RUNNING, WORKER, Request): State.RUNNING,
    (State.RUNNING, SUPERVISOR, Response): State.RUNNING,
    (State.RUNNING, WORKER, StepLoaded): State.RUNNING,
    (State.RUNNING, WORKER, StepEnded): State.IDLE,
    (State.PARSING, WORKER, FileParsed): State.IDLE,
    (State.DECIDING, WORKER, SignalsDecided): State.IDLE,
    **{(state, role, Closed): State.CLOSED for state in TRANSITIONS for role in ROLES},
}
ALL = list(itertools.product(TRANSITIONS, ROLES, EVENTS))


def session_after(path: list[tuple[Role, Event]], role: Role) -> Session:
    session = Session(WorkerDialect(), role)
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
        for role in ROLES
        for case in ALL
        if case in LEGAL and (role, *case) != (SUPERVISOR, State.IDLE, SUPERVISOR, Response)
    ],
)
def test_a_legal_event_moves_both_sides_alike(role: Role, state: State, sender: Role, event: type[Event]) -> None:
    session = session_after(PATHS[state], role)
    session.move(sender, EVENTS[event])
    assert session.state is LEGAL[state, sender, event]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("state", "sender", "event"), [case for case in ALL if case not in LEGAL])
def test_an_illegal_event_raises_and_changes_nothing(
    role: Role, state: State, sender: Role, event: type[Event]
) -> None:
    session = session_after(PATHS[state], role)
    fault = LocalProtocolError if sender is role else RemoteProtocolError
    with pytest.raises(fault, match=rf"the {sender.value} cannot send {event.__name__} in state {state.name}"):
        session.move(sender, EVENTS[event])
    assert session.state is state


# --- what answers what ---------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("path", "sender", "event", "problem"),
    [
        (QUERYING, WORKER, StepLoaded("b"), "its token is 'b', and 'a' is running"),
        ([*QUERYING, (WORKER, StepLoaded("a"))], WORKER, StepLoaded("a"), "the step has said so before"),
        (QUERYING, WORKER, StepEnded("b", StepSucceeded()), "its token is 'b', and 'a' is running"),
        (PATHS[State.PARSING], WORKER, FileParsed("/b.py"), "its file is '/b.py', and '/dag.py' is being parsed"),
        (PATHS[State.DECIDING], WORKER, SignalsDecided("other"), "its token is 'other', and 'asked' is to be decided"),
        (
            [*PATHS[State.DECIDING], (WORKER, SignalsDecided("asked", ("NONE",) * 2, more=True))],
            WORKER,
            SignalsDecided("asked", ("NONE",) * 2),
            "it has 2 decisions, and 1 signals are undecided",
        ),
        (
            START,
            SUPERVISOR,
            DecideSignals("asked", 1, "/dag.py", "d", "r", "t", 1, ()),
            "it has 0 signals, not 1..100",
        ),
        (QUERYING, WORKER, Request(2, LastEvent(1)), "LastEvent is not a query of tasks"),
        (QUERYING, WORKER, Request(1, QUERY), "its id is 1, and the last one was 1"),
        (QUERYING, SUPERVISOR, Response(2), "no request of id 2 is open"),
        ([*QUERYING, (SUPERVISOR, Response(1))], SUPERVISOR, Response(1), "no request of id 1 is open"),
        (
            [*PATHS[State.IDLE], (WORKER, StepsReturned(())), *[(SUPERVISOR, one) for one in STEPS]],
            SUPERVISOR,
            Response(1),
            "no request of id 1 is open",
        ),
        (
            [*START, *[(SUPERVISOR, one) for one in STEPS]],
            SUPERVISOR,
            RunStep(step("b")),
            f"the worker has {BUNDLE_MAX} steps already",
        ),
        (QUERYING, SUPERVISOR, RunStep(step("a")), "the worker has a step with the token 'a' already"),
        (START, WORKER, StepsReturned(()), "no steps are recalled"),
        (QUERYING, WORKER, StepsReturned(("a", "a")), "it has a token twice"),
        (QUERYING, WORKER, StepsReturned(("b",)), "the step 'b' is not recalled"),
        (PATHS[State.IDLE], WORKER, StepsReturned(("a",)), "the worker does not have the step 'a'"),
        (
            [*START, *[RECALL] * RECALLS_OPEN_MAX],
            SUPERVISOR,
            RecallSteps(("a",)),
            f"{RECALLS_OPEN_MAX} recalls are open already",
        ),
        (
            [*QUERYING, *[(WORKER, Request(n, QUERY)) for n in range(2, REQUESTS_OPEN_MAX + 1)]],
            WORKER,
            Request(REQUESTS_OPEN_MAX + 1, QUERY),
            f"{REQUESTS_OPEN_MAX} requests are open already",
        ),
        (
            START[:1],
            SUPERVISOR,
            WorkerWelcome(PROTOCOL_VERSION, WorkerSettings(frame_bytes_max=0)),
            "the frame limit must be",
        ),
    ],
)
def test_a_message_must_fit_what_it_answers(
    role: Role, path: list[tuple[Role, Event]], sender: Role, event: Event, problem: str
) -> None:
    session = session_after(path, role)
    before = session.state
    fault = LocalProtocolError if sender is role else RemoteProtocolError
    with pytest.raises(fault, match=f"the {sender.value} cannot send this {type(event).__name__}: {problem}"):
        session.move(sender, event)
    assert session.state is before


def test_a_request_is_open_until_its_response() -> None:
    dialect = WorkerDialect()
    session = Session(dialect, SUPERVISOR)
    for sender, event in QUERYING:
        session.move(sender, event)
    assert dialect.is_open(1)
    session.move(SUPERVISOR, EVENTS[Response])
    assert not dialect.is_open(1)


def test_an_answer_that_crosses_the_end_of_its_step_is_taken_and_cannot_be_sent_afterwards() -> None:
    worker, supervisor = (session_after(PATHS[State.IDLE], role) for role in (WORKER, SUPERVISOR))
    worker.move(SUPERVISOR, EVENTS[Response])
    assert isinstance(supervisor.dialect, WorkerDialect)
    assert not supervisor.dialect.is_open(1)
    with pytest.raises(LocalProtocolError, match="no request of id 1 is open"):
        supervisor.move(SUPERVISOR, EVENTS[Response])


def test_an_answer_is_taken_as_long_as_the_supervisor_may_not_have_read_the_end_of_its_step() -> None:
    worker = session_after([*PATHS[State.IDLE], *[(SUPERVISOR, one) for one in STEPS[:-1]]], WORKER)
    worker.move(SUPERVISOR, Response(1))
    recall = (SUPERVISOR, RecallSteps(tuple(one.step.token for one in STEPS[1:])))
    path = [*PATHS[State.IDLE], (WORKER, StepsReturned(())), *[(SUPERVISOR, one) for one in STEPS[:-1]], recall]
    # Steps that have been returned do not count: the supervisor may have given others in their place.
    returned = (WORKER, StepsReturned(tuple(one.step.token for one in STEPS[1:-1])))
    worker = session_after([*path, returned, *[(SUPERVISOR, one) for one in STEPS[1:-1]]], WORKER)
    worker.move(SUPERVISOR, Response(1))


@pytest.mark.parametrize("role", ROLES)
def test_a_worker_runs_as_long_as_it_has_a_step(role: Role) -> None:
    session = session_after([*START, *[(SUPERVISOR, one) for one in STEPS[:4]]], role)
    session.move(WORKER, StepLoaded("step-0"))
    session.move(WORKER, StepEnded("step-0", StepSucceeded()))
    session.move(SUPERVISOR, RecallSteps(("step-1", "step-2", "step-3")))
    session.move(WORKER, StepLoaded("step-1"))
    session.move(WORKER, StepsReturned(("step-3", "step-2")))
    states = [session.state]
    session.move(WORKER, StepEnded("step-1", StepSucceeded()))
    states.append(session.state)
    session.move(SUPERVISOR, RunStep(step("step-3")))
    session.move(SUPERVISOR, RecallSteps(("step-3",)))
    session.move(WORKER, StepsReturned(("step-3",)))
    assert [*states, session.state] == [State.RUNNING, State.IDLE, State.IDLE]


def test_a_file_is_parsed_when_its_last_piece_has_come() -> None:
    session = session_after(PATHS[State.PARSING], SUPERVISOR)
    states = []
    for more in (True, True, False):
        session.move(WORKER, FileParsed("/dag.py", more=more))
        states.append(session.state)
    assert states == [State.PARSING, State.PARSING, State.IDLE]


@pytest.mark.parametrize("role", ROLES)
def test_a_file_comes_in_so_many_pieces_and_the_next_one_in_as_many(role: Role) -> None:
    session = session_after(PATHS[State.PARSING], role)
    fault = LocalProtocolError if role is WORKER else RemoteProtocolError
    for _ in range(2):
        for _ in range(FILE_PIECES_MAX - 1):
            session.move(WORKER, FileParsed("/dag.py", more=True))
        with pytest.raises(
            fault, match=f"it is number {FILE_PIECES_MAX} for one file and has more; the limit is {FILE_PIECES_MAX}"
        ):
            session.move(WORKER, FileParsed("/dag.py", more=True))
        session.move(WORKER, FileParsed("/dag.py"))
        session.move(SUPERVISOR, ParseFile("/dag.py"))


def test_another_version_says_what_to_upgrade() -> None:
    newer = PROTOCOL_VERSION + 1
    with pytest.raises(VersionMismatch, match="that the supervisor is started from") as caught:
        Session(WorkerDialect(), SUPERVISOR).move(WORKER, WorkerHello(newer, 1, "9"))
    assert (caught.value.supervisor, caught.value.child) == (PROTOCOL_VERSION, newer)
    with pytest.raises(VersionMismatch, match="that the worker is started from"):
        session_after(START[:1], WORKER).move(SUPERVISOR, WorkerWelcome(newer, WorkerSettings()))
    with pytest.raises(LocalProtocolError, match=f"it must carry protocol version {PROTOCOL_VERSION}"):
        Session(WorkerDialect(), WORKER).move(WORKER, WorkerHello(newer, 1, "9"))


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
@settings(deadline=None)  # the first draw from a strategy builds it
@given(data=st.data())
def test_every_message_comes_back_as_it_was(role: Role, data: st.DataObject) -> None:
    message = data.draw(ANY_MESSAGE[role])
    assert WORKER_WIRE.decode(role, encode_message(message)) == message


def test_the_unions_and_the_types_by_role_are_the_same() -> None:
    assert set(WORKER_WIRE.types[WORKER]) == set(typing.get_args(work.FromWorker))
    assert set(WORKER_WIRE.types[SUPERVISOR]) == set(typing.get_args(work.ToWorker))


@pytest.mark.parametrize("role", ROLES)
@given(body=st.binary(max_size=200))
def test_garbage_raises_nothing_but_a_remote_error(role: Role, body: bytes) -> None:
    try:
        assert type(WORKER_WIRE.decode(role, body)) in WORKER_WIRE.types[role]
    except RemoteProtocolError:
        pass


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\xc1", "the worker sent a malformed body of 1 bytes"),
        (msgspec.msgpack.encode(["goodbye", 1]), "the worker sent a message with the unknown tag 'goodbye'"),
        (msgspec.msgpack.encode(["step_ended", 1]), "the worker sent a malformed StepEnded"),
        (encode_message(ParseFile("/x")), "the worker sent ParseFile, which only the supervisor may send"),
    ],
)
def test_a_bad_body_is_refused_with_what_is_wrong(body: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        WORKER_WIRE.decode(WORKER, body)


def test_what_has_no_form_on_the_wire_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError, match="FileParsed cannot be encoded"):
        encode_message(FileParsed("/x", error="\ud800"))


# --- connections ---------------------------------------------------------------------------------


class Pair:
    """A worker's and a supervisor's connection; everything sent is delivered byte by byte."""

    def __init__(self, settings: WorkerSettings | None = None) -> None:
        self.sides: dict[Role, Connection[Any, Any]] = {
            WORKER: Connection(WorkerDialect(), WORKER),
            SUPERVISOR: Connection(WorkerDialect(), SUPERVISOR),
        }
        self.say(WORKER, EVENTS[WorkerHello])
        self.say(SUPERVISOR, WorkerWelcome(PROTOCOL_VERSION, settings or WorkerSettings()))

    def say(self, sender: Role, message: Any) -> None:
        receiver, got = self.sides[WORKER_WIRE.peer(sender)], []
        for byte in self.sides[sender].send(message):
            receiver.receive_data(bytes((byte,)))
            while (received := receiver.next_message()) is not None:
                got.append(received)
        assert got == [message]


def test_a_conversation() -> None:
    pair = Pair()
    pair.say(SUPERVISOR, RunStep(step()))
    pair.say(WORKER, Request(1, QUERY))
    pair.say(SUPERVISOR, Response(1, SecretText("x")))
    pair.say(WORKER, StepEnded("a", StepSucceeded()))
    pair.say(SUPERVISOR, ParseFile("/dag.py"))
    pair.say(WORKER, FileParsed("/dag.py"))
    supervisor = pair.sides[SUPERVISOR]
    supervisor.receive_eof()
    assert supervisor.state is State.CLOSED


def test_a_message_over_the_limit_is_not_sent_and_changes_nothing() -> None:
    pair = Pair(WorkerSettings(frame_bytes_max=200))
    assert pair.sides[WORKER].frame_bytes_max == 200
    with pytest.raises(FrameTooLong, match="ParseFile needs a frame of"):
        pair.sides[SUPERVISOR].send(ParseFile("/" + "x" * 300))
    pair.say(SUPERVISOR, ParseFile("/dag.py"))


def test_after_a_remote_error_the_link_is_broken() -> None:
    supervisor: Connection[Any, Any] = Connection(WorkerDialect(), SUPERVISOR)
    supervisor.receive_data(b"\x00\x00\x00\x01\xc1")
    with pytest.raises(RemoteProtocolError, match="malformed body"):
        supervisor.next_message()
    for call in (supervisor.next_message, supervisor.receive_eof, lambda: supervisor.receive_data(b"")):
        with pytest.raises(RemoteProtocolError, match="the link is broken: the worker sent a malformed body"):
            call()


def test_a_peer_that_leaves_within_a_frame_is_at_fault() -> None:
    supervisor: Connection[Any, Any] = Connection(WorkerDialect(), SUPERVISOR)
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
