"""The supervisor's end of the socket, against a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)
from headgate.supervisor.children import link as link_module
from headgate.supervisor.children.link import RunnerLink


class Peer:
    """The runner's end: a connection of its own over the other socket of the pair."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.link = RunnerLink(ours, Connection(RunnerDialect(1), Role.SUPERVISOR), "runner")
        self.connection = Connection(RunnerDialect(1), Role.RUNNER)

    def shake_hands(self) -> None:
        self.socket.sendall(self.connection.send(Hello(PROTOCOL_VERSION, 1, 1, "1.0")))
        assert len(self.link.receive()) == 1
        self.link.send(Welcome(PROTOCOL_VERSION, 1, RunnerSettings()))
        self.connection.receive_data(self.socket.recv(65536))
        assert isinstance(self.connection.next_message(), Welcome)

    def close(self) -> None:
        self.link.close()
        self.socket.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    peer.shake_hands()
    yield peer
    peer.close()


def test_what_came_whole_before_the_protocol_was_broken_is_handed_over(peer: Peer) -> None:
    peer.socket.sendall(peer.connection.send(StateChanges(1)) + b"\x00\x00\x00\x00")
    assert peer.link.receive() == [StateChanges(1)]
    assert isinstance(peer.link.error, RemoteProtocolError)
    with pytest.raises(RemoteProtocolError):
        peer.link.send(StateSync(1))


def test_a_socket_with_nothing_to_read_gives_nothing_and_one_that_ended_says_so(peer: Peer) -> None:
    assert peer.link.receive() == []
    assert not peer.link.is_ended
    peer.socket.close()
    assert peer.link.receive() == []
    assert peer.link.is_ended
    peer.link.send(StateSync(1))  # nobody is there, and whoever reaps the runner knows


def test_a_message_longer_than_the_socket_takes_is_sent_bit_by_bit(peer: Peer) -> None:
    sync = StateSync(1, persisted=tuple(range(10**9, 10**9 + 500_000)))
    peer.link.send(sync)
    assert peer.link.has_unsent
    received = None
    while received is None:
        peer.connection.receive_data(peer.socket.recv(1024 * 1024))
        received = peer.connection.next_message()
        peer.link.flush()
    assert received == sync
    assert not peer.link.has_unsent


def test_a_runner_that_reads_nothing_is_a_broken_peer(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "UNSENT_BYTES_MAX", 100_000)
    longest = StateSync(1, persisted=tuple(range(10**9, 10**9 + 200_000)))
    peer.link.send(longest)
    with pytest.raises(RemoteProtocolError, match="reads nothing"):
        peer.link.send(longest)


def test_one_message_may_be_longer_than_what_may_pile_up(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "UNSENT_BYTES_MAX", 100_000)
    handed_over = StateSync(to_create=tuple(TriggerSpec(n, "run", "t", "a.T", bytes(900_000)) for n in range(30)))
    peer.link.send(handed_over)  # in many frames, which a runner that is busy with the first of them has not read
    peer.link.send(StateSync(1, persisted=(1,)))
    created: list[TriggerSpec] = []
    while len(created) < 30:
        peer.connection.receive_data(peer.socket.recv(1024 * 1024))
        while (message := peer.connection.next_message()) is not None:
            assert isinstance(message, StateSync)
            created += message.to_create
        peer.link.flush()
    assert tuple(created) == handed_over.to_create
