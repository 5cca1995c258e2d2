"""Two connections, back to back: what one sends is what the other gets, and a fault is always whose it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.protocol import Connection, Message, Role, State
from headgate.protocol.errors import FrameTooLong, LocalProtocolError, RemoteProtocolError, VersionMismatch
from headgate.protocol.link.framing import encode_frame
from headgate.protocol.link.runner_dialect import RUNNER_WIRE, RunnerDialect
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.queries import LastEvent, Request, Response
from headgate.protocol.messages.runner import (
    FRAME_BYTES_MAX,
    PROTOCOL_VERSION,
    Drain,
    FiredEvent,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    Welcome,
)

HELLO = Hello(PROTOCOL_VERSION, 1, 4711, "0.1.0")
WELCOME = Welcome(PROTOCOL_VERSION, 1, RunnerSettings())


class Pair:
    """A runner's and a supervisor's connection; everything sent is delivered at once, and checked on arrival."""

    def __init__(self, *, incarnation: int = 1, settings: RunnerSettings | None = None) -> None:
        self.seen: dict[Role, list[tuple[Role, Message, bytes]]] = {role: [] for role in RUNNER_WIRE.types}
        self.sides: dict[Role, Connection[Any, Any]] = {
            Role.RUNNER: Connection(RunnerDialect(incarnation), Role.RUNNER, observer=self._observer(Role.RUNNER)),
            Role.SUPERVISOR: Connection(
                RunnerDialect(incarnation), Role.SUPERVISOR, observer=self._observer(Role.SUPERVISOR)
            ),
        }
        self._settings = settings or RunnerSettings()
        self._incarnation = incarnation

    def _observer(self, role: Role) -> Any:
        return lambda sender, message, body: self.seen[role].append((sender, message, body))

    def say(self, sender: Role, message: Message, *, chunk_bytes: int = 1_000_000) -> None:
        data = self.sides[sender].send(message)
        receiver = self.sides[RUNNER_WIRE.peer(sender)]
        got = []
        for start in range(0, len(data), chunk_bytes):
            receiver.receive_data(data[start : start + chunk_bytes])
            while (received := receiver.next_message()) is not None:
                got.append(received)
        assert got == [message]
        assert self.sides[sender].state is receiver.state

    def shake_hands(self) -> Pair:
        self.say(Role.RUNNER, Hello(PROTOCOL_VERSION, self._incarnation, 4711, "0.1.0"))
        self.say(Role.SUPERVISOR, Welcome(PROTOCOL_VERSION, self._incarnation, self._settings))
        return self


def supervisor_after_hello() -> Connection[Any, Any]:
    connection = Connection(RunnerDialect(1), Role.SUPERVISOR)
    connection.receive_data(encode_frame(encode_message(HELLO), FRAME_BYTES_MAX))
    assert connection.next_message() == HELLO
    return connection


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1_000_000])
def test_a_whole_conversation_passes(chunk_bytes: int) -> None:
    pair = Pair().shake_hands()
    event = FiredEvent(5, "run", 0, 1, b'{"a":1}')
    conversation: list[tuple[Role, Message]] = [
        (Role.SUPERVISOR, StateSync()),
        (Role.RUNNER, StateChanges(1, events=(event,))),
        (Role.SUPERVISOR, StateSync(1, persisted=(1,))),
        (Role.RUNNER, Request(1, LastEvent(5))),
        (Role.SUPERVISOR, Response(1)),
        (Role.SUPERVISOR, Drain(1.0)),
        (Role.RUNNER, StateChanges(2)),
        (Role.RUNNER, Request(2, LastEvent(5))),
        (Role.SUPERVISOR, Response(2, error="draining")),
        (Role.SUPERVISOR, StateSync(2)),
    ]
    for sender, message in conversation:
        pair.say(sender, message, chunk_bytes=chunk_bytes)
    assert pair.sides[Role.RUNNER].state is State.DRAINING

    pair.sides[Role.RUNNER].close()
    pair.sides[Role.SUPERVISOR].receive_eof()
    assert [side.state for side in pair.sides.values()] == [State.CLOSED, State.CLOSED]


def test_what_the_runner_sent_before_it_read_the_drain_is_still_taken() -> None:
    pair = Pair().shake_hands()
    runner, supervisor = pair.sides[Role.RUNNER], pair.sides[Role.SUPERVISOR]
    changes = runner.send(StateChanges(1))
    runner.receive_data(supervisor.send(Drain(1.0)))
    supervisor.receive_data(changes)
    assert supervisor.next_message() == StateChanges(1)
    assert runner.next_message() == Drain(1.0)


def test_both_sides_observe_every_frame_with_its_body() -> None:
    pair = Pair().shake_hands()
    pair.say(Role.RUNNER, StateChanges(1))
    assert pair.seen[Role.RUNNER] == pair.seen[Role.SUPERVISOR]
    assert [(sender, type(message)) for sender, message, _ in pair.seen[Role.RUNNER]] == [
        (Role.RUNNER, Hello),
        (Role.SUPERVISOR, Welcome),
        (Role.RUNNER, StateChanges),
    ]
    assert all(body == encode_message(message) for _, message, body in pair.seen[Role.RUNNER])


def test_a_message_out_of_state_is_observed_before_it_is_refused() -> None:
    seen: list[Message] = []
    supervisor = Connection(
        RunnerDialect(1), Role.SUPERVISOR, observer=lambda sender, message, body: seen.append(message)
    )
    supervisor.receive_data(encode_frame(encode_message(StateChanges(1)), FRAME_BYTES_MAX))
    with pytest.raises(RemoteProtocolError, match="the runner cannot send StateChanges in state OPENING"):
        supervisor.next_message()
    assert seen == [StateChanges(1)]


def test_a_message_too_long_is_not_sent_and_changes_nothing() -> None:
    """I11: the limit holds where a frame is made, not only where it arrives."""
    pair = Pair(settings=RunnerSettings(frame_bytes_max=100)).shake_hands()
    runner = pair.sides[Role.RUNNER]
    observed = len(pair.seen[Role.RUNNER])
    with pytest.raises(FrameTooLong, match="StateChanges needs a frame of"):
        runner.send(StateChanges(1, events=(FiredEvent(1, "run", 0, 1, bytes(100)),)))
    assert len(pair.seen[Role.RUNNER]) == observed
    pair.say(Role.RUNNER, StateChanges(1))

    hello = Connection(RunnerDialect(1), Role.RUNNER, frame_bytes_max=5)
    with pytest.raises(FrameTooLong):
        hello.send(HELLO)
    assert hello.state is State.OPENING


def test_the_limit_of_the_welcome_holds_for_both_sides_from_then_on() -> None:
    pair = Pair(settings=RunnerSettings(frame_bytes_max=12_345)).shake_hands()
    assert [side.frame_bytes_max for side in pair.sides.values()] == [12_345, 12_345]
    pair.sides[Role.SUPERVISOR].receive_data(b"\x00\x00\x30\x39")
    with pytest.raises(RemoteProtocolError, match=r"12,346 bytes; the limit is 12,345"):
        pair.sides[Role.RUNNER].receive_data(b"\x00\x00\x30\x3a")


def test_a_higher_limit_holds_for_a_frame_right_behind_the_welcome() -> None:
    runner = Connection(RunnerDialect(1), Role.RUNNER, frame_bytes_max=1000)
    runner.send(HELLO)
    welcome = msgspec.structs.replace(WELCOME, settings=RunnerSettings(frame_bytes_max=2000))
    response = Response(1, error="x" * 1500)
    runner.receive_data(b"".join(encode_frame(encode_message(message), 2000) for message in (welcome, response)))
    assert runner.next_message() == welcome
    assert runner.next_message() == response


def test_a_local_fault_breaks_nothing() -> None:
    pair = Pair().shake_hands()
    with pytest.raises(LocalProtocolError, match="the runner cannot send StateSync in state READY"):
        pair.sides[Role.RUNNER].send(StateSync())
    with pytest.raises(LocalProtocolError, match="cannot be encoded"):
        pair.sides[Role.RUNNER].send(StateChanges(2**64))
    pair.say(Role.RUNNER, StateChanges(1))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode_frame(b"\xc1", 100), "malformed body"),
        (encode_frame(msgspec.msgpack.encode(["bye"]), 100), "unknown tag 'bye'"),
        (encode_frame(encode_message(Drain(1.0)), 100), "only the supervisor may send"),
        (encode_frame(encode_message(Welcome(1, 1, RunnerSettings())), 1000), "only the supervisor may send"),
        (encode_frame(encode_message(HELLO), 100), "cannot send Hello in state READY"),
        (bytes(4), "empty frame"),
        (b"\xff\xff\xff\xff", "4,294,967,295 bytes"),
    ],
)
def test_after_a_remote_fault_every_call_raises(data: bytes, reason: str) -> None:
    supervisor = supervisor_after_hello()
    supervisor.send(WELCOME)

    def receive() -> None:
        supervisor.receive_data(data)
        supervisor.next_message()

    with pytest.raises(RemoteProtocolError, match=reason):
        receive()
    assert supervisor.state is State.READY
    for call in (
        lambda: supervisor.receive_data(b""),
        lambda: supervisor.send(StateSync()),
        supervisor.next_message,
        supervisor.receive_eof,
    ):
        with pytest.raises(RemoteProtocolError, match=f"the link is broken: .*{reason}"):
            call()


def test_the_handshake_is_checked_by_version_and_incarnation() -> None:
    for hello, fault in (
        (msgspec.structs.replace(HELLO, protocol_version=1), VersionMismatch),
        (msgspec.structs.replace(HELLO, incarnation=2), RemoteProtocolError),
    ):
        supervisor = Connection(RunnerDialect(1), Role.SUPERVISOR)
        supervisor.receive_data(encode_frame(encode_message(hello), 100))
        with pytest.raises(fault):
            supervisor.next_message()
        assert supervisor.state is State.OPENING


def test_whole_messages_before_the_end_are_given_before_it_counts() -> None:
    supervisor = supervisor_after_hello()
    supervisor.send(WELCOME)
    supervisor.receive_data(encode_frame(encode_message(StateChanges(1)), 100) * 2)
    supervisor.receive_eof()
    states = [supervisor.state]
    for message in (StateChanges(1), StateChanges(1), None):
        assert supervisor.next_message() == message
        states.append(supervisor.state)
    assert states == [State.READY, State.READY, State.READY, State.CLOSED]
    assert supervisor.next_message() is None
    with pytest.raises(LocalProtocolError, match="in state CLOSED"):
        supervisor.send(StateSync(1))
    with pytest.raises(LocalProtocolError, match="after the end"):
        supervisor.receive_data(b"x")


def test_a_peer_that_leaves_within_a_frame_is_a_remote_fault() -> None:
    supervisor = supervisor_after_hello()
    supervisor.receive_data(b"\x00\x00\x00\x09half")
    with pytest.raises(RemoteProtocolError, match="within a frame"):
        supervisor.receive_eof()
    with pytest.raises(RemoteProtocolError, match="the link is broken"):
        supervisor.send(WELCOME)


def test_after_closing_here_nothing_can_be_sent_or_received() -> None:
    supervisor = supervisor_after_hello()
    supervisor.close()
    supervisor.close()
    assert supervisor.state is State.CLOSED
    for call in (lambda: supervisor.send(WELCOME), lambda: supervisor.receive_data(b"x"), supervisor.next_message):
        with pytest.raises(LocalProtocolError, match="closed the link"):
            call()


@settings(deadline=None)
@given(chunks=st.lists(st.binary(max_size=300), max_size=10), shaken=st.booleans())
def test_garbage_raises_nothing_but_protocol_errors(chunks: list[bytes], shaken: bool) -> None:
    supervisor = supervisor_after_hello()
    if shaken:
        supervisor.send(WELCOME)
    for chunk in chunks:
        try:
            supervisor.receive_data(chunk)
            while supervisor.next_message() is not None:
                pass
        except RemoteProtocolError:
            with pytest.raises(RemoteProtocolError, match="the link is broken"):
                supervisor.receive_data(b"")
            return
