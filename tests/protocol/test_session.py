"""The session: what the table allows happens; everything else raises, names state and event, and changes nothing."""

from __future__ import annotations

import itertools

import pytest

from headgate.protocol.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from headgate.protocol.link.runner_dialect import RUNNER_WIRE, TRANSITIONS, Direction, RunnerDialect
from headgate.protocol.link.session import Closed, Event, Session, State
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.queries import CreateRun, GetXCom, LastEvent, Request, Response
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    Welcome,
)

RUNNER, SUPERVISOR = ROLES = Role.RUNNER, Role.SUPERVISOR
INCARNATION = 7

EVENTS: dict[type[Event], Event] = {
    Hello: Hello(PROTOCOL_VERSION, INCARNATION, 4711, "0.1.0"),
    Welcome: Welcome(PROTOCOL_VERSION, INCARNATION, RunnerSettings()),
    StateChanges: StateChanges(round=1),
    StateSync: StateSync(round=1),
    Request: Request(1, LastEvent(1)),
    Response: Response(1),
    Drain: Drain(5.0),
    Closed: Closed(),
}
PATHS: dict[State, list[tuple[Role, type[Event]]]] = {
    State.OPENING: [],
    State.HELLO_RECEIVED: [(RUNNER, Hello)],
    State.READY: [(RUNNER, Hello), (SUPERVISOR, Welcome)],
    State.DRAINING: [(RUNNER, Hello), (SUPERVISOR, Welcome), (SUPERVISOR, Drain)],
    State.CLOSED: [(RUNNER, Closed)],
}
# Written out once more, apart from the table under test.
LEGAL: dict[tuple[State, Role, type[Event]], State] = {
    (State.OPENING, RUNNER, Hello): State.HELLO_RECEIVED,
    (State.HELLO_RECEIVED, SUPERVISOR, Welcome): State.READY,
    (State.READY, SUPERVISOR, Drain): State.DRAINING,
    **{(state, role, Closed): State.CLOSED for state in TRANSITIONS for role in ROLES},
    **{
        (state, role, event): state
        for state in (State.READY, State.DRAINING)
        for role, event in (
            *((RUNNER, kind) for kind in (StateChanges, Request)),
            *((SUPERVISOR, kind) for kind in (StateSync, Response)),
        )
    },
}
ALL = list(itertools.product(TRANSITIONS, ROLES, EVENTS))


def session_in(state: State, role: Role) -> Session:
    session = Session(RunnerDialect(INCARNATION), role)
    for sender, event in PATHS[state]:
        session.move(sender, EVENTS[event])
    assert session.state is state
    return session


def test_the_table_is_the_drawing() -> None:
    table = {(state, sender, event): to for state, row in TRANSITIONS.items() for (sender, event), to in row.items()}
    assert table == LEGAL


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("state", "sender", "event"), [case for case in ALL if case in LEGAL])
def test_a_legal_event_moves_both_sides_alike(role: Role, state: State, sender: Role, event: type[Event]) -> None:
    session = session_in(state, role)
    session.move(sender, EVENTS[event])
    assert session.state is LEGAL[state, sender, event]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("state", "sender", "event"), [case for case in ALL if case not in LEGAL])
def test_an_illegal_event_raises_and_changes_nothing(
    role: Role, state: State, sender: Role, event: type[Event]
) -> None:
    session = session_in(state, role)
    fault = LocalProtocolError if sender is role else RemoteProtocolError
    with pytest.raises(fault, match=rf"the {sender.value} cannot send {event.__name__} in state {state.name}"):
        session.move(sender, EVENTS[event])
    assert session.state is state


def test_what_is_no_message_is_an_illegal_event() -> None:
    session = session_in(State.READY, RUNNER)
    with pytest.raises(LocalProtocolError, match="cannot send str in state READY"):
        session.move(RUNNER, "hello")  # type: ignore[arg-type]


def test_a_version_mismatch_names_both_versions_and_what_to_upgrade() -> None:
    supervisor = Session(RunnerDialect(INCARNATION), SUPERVISOR)
    with pytest.raises(VersionMismatch) as caught:
        supervisor.move(RUNNER, Hello(PROTOCOL_VERSION - 1, INCARNATION, 1, "0.0.1"))
    assert (caught.value.supervisor, caught.value.child) == (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)
    assert str(caught.value) == (
        f"the supervisor speaks protocol version {PROTOCOL_VERSION}, the runner version {PROTOCOL_VERSION - 1}: "
        "upgrade the headgate that the runner is started from"
    )
    assert supervisor.state is State.OPENING

    runner = session_in(State.HELLO_RECEIVED, RUNNER)
    with pytest.raises(VersionMismatch, match="that the supervisor is started from") as caught:
        runner.move(SUPERVISOR, Welcome(PROTOCOL_VERSION - 1, INCARNATION, RunnerSettings()))
    assert (caught.value.supervisor, caught.value.child) == (PROTOCOL_VERSION - 1, PROTOCOL_VERSION)
    assert runner.state is State.HELLO_RECEIVED


@pytest.mark.parametrize("role", ROLES)
def test_a_handshake_of_another_incarnation_is_refused(role: Role) -> None:
    """I6: nothing of an earlier incarnation reaches a later one."""
    session = Session(RunnerDialect(INCARNATION), role)
    fault = LocalProtocolError if role is RUNNER else RemoteProtocolError
    with pytest.raises(fault, match="this Hello: it is of incarnation 6, and this is incarnation 7"):
        session.move(RUNNER, Hello(PROTOCOL_VERSION, 6, 1, "0.1.0"))
    assert session.state is State.OPENING

    session = session_in(State.HELLO_RECEIVED, role)
    fault = LocalProtocolError if role is SUPERVISOR else RemoteProtocolError
    with pytest.raises(fault, match="this Welcome: it is of incarnation 8, and this is incarnation 7"):
        session.move(SUPERVISOR, Welcome(PROTOCOL_VERSION, 8, RunnerSettings()))
    assert session.state is State.HELLO_RECEIVED


@pytest.mark.parametrize("role", ROLES)
def test_a_handshake_of_another_version_cannot_be_sent(role: Role) -> None:
    event = Hello(1, INCARNATION, 1, "") if role is RUNNER else Welcome(1, INCARNATION, RunnerSettings())
    session = session_in(State.OPENING if role is RUNNER else State.HELLO_RECEIVED, role)
    with pytest.raises(LocalProtocolError, match=f"must carry protocol version {PROTOCOL_VERSION}"):
        session.move(role, event)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("limit", [0, 2**32])
def test_a_welcome_with_an_impossible_frame_limit_is_refused(role: Role, limit: int) -> None:
    session = session_in(State.HELLO_RECEIVED, role)
    fault = LocalProtocolError if role is SUPERVISOR else RemoteProtocolError
    with pytest.raises(fault, match="frame limit"):
        session.move(SUPERVISOR, Welcome(PROTOCOL_VERSION, INCARNATION, RunnerSettings(frame_bytes_max=limit)))
    assert session.state is State.HELLO_RECEIVED


def test_a_direction_and_its_sender_name_each_other() -> None:
    assert [Direction.of(role).sender for role in ROLES] == list(ROLES)
    assert [RUNNER_WIRE.peer(role) for role in ROLES] == [SUPERVISOR, RUNNER]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("query", [GetXCom("t", "k"), CreateRun("d", "r")])
def test_a_runner_cannot_send_a_query_of_tasks(role: Role, query: GetXCom | CreateRun) -> None:
    session = session_in(State.READY, role)
    fault = LocalProtocolError if role is RUNNER else RemoteProtocolError
    with pytest.raises(fault, match=f"the runner cannot send this Request: {type(query).__name__} is not a query"):
        session.move(RUNNER, Request(1, query))


def test_a_link_has_two_sides() -> None:
    with pytest.raises(ValueError, match="between supervisor and runner, so it has no worker"):
        Session(RunnerDialect(1), Role.WORKER)
