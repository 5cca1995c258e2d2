"""A server that stops answering: the store gives up on it, whatever the network says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DisconnectionError
from tests.waiting import WITHIN_S, wait_until

from headgate.store.db.deadline import Deadline
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store

READ_BYTES_MAX = 65536


class Forwarder:
    """Stands between the store and the server, and falls silent when told to: it takes bytes and passes none on."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.is_silent = False
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pump, args=(source, target))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(READ_BYTES_MAX):
                if not self.is_silent:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def forwarder(postgres_url: str) -> Iterator[Forwarder]:
    url = make_url(postgres_url)
    forwarder = Forwarder(url.host or "127.0.0.1", url.port or 5432)
    yield forwarder
    forwarder.close()


def test_a_server_that_falls_silent_is_given_up_in_time_and_asked_again_later(
    postgres_url: str, forwarder: Forwarder, secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.store.db.transaction.ANSWER_MAX_S", 0.5)
    url = make_url(postgres_url).set(host="127.0.0.1", port=forwarder.port)
    with Store(open_engine(url.render_as_string(hide_password=False)), secrets=secrets) as store:
        assert store.inspect.watchers() == []
        forwarder.is_silent = True
        with pytest.raises(DatabaseAway, match=r"is away: a transaction has taken longer than 0\.5 s$"):
            store.inspect.watchers()
        forwarder.is_silent = False
        assert store.inspect.watchers() == []


def test_a_server_that_falls_silent_after_the_login_is_given_up_in_time(
    postgres_url: str, forwarder: Forwarder, secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pooler that is paused: the session has no limits yet."""
    monkeypatch.setattr("headgate.store.db.transaction.ANSWER_MAX_S", 0.5)
    url = make_url(postgres_url).set(host="127.0.0.1", port=forwarder.port)
    engine = open_engine(url.render_as_string(hide_password=False))

    @event.listens_for(engine, "connect", insert=True)
    def fall_silent(*_: object) -> None:
        forwarder.is_silent = True

    with Store(engine, secrets=secrets) as store:
        with pytest.raises(DatabaseAway, match=r"is away: a transaction has taken longer than 0\.5 s$"):
            store.inspect.watchers()
        event.remove(engine, "connect", fall_silent)
        forwarder.is_silent = False
        assert store.inspect.watchers() == []


def test_a_connection_that_has_got_the_number_of_a_closed_one_goes_on() -> None:
    ours, theirs = socket.socketpair()
    deadline = Deadline(0.02)
    with theirs:
        with deadline.watching(ours.fileno()):
            number = ours.fileno()
            ours.close()
            new = [socket.socketpair() for _ in range(4)]
            reused = next(pair for pair in new if number in (pair[0].fileno(), pair[1].fileno()))
            wait_until(lambda: deadline._has_cut, "the limit is over")
            assert theirs.recv(1) == b""
        reused[0].sendall(b"1")
        assert reused[1].recv(1) == b"1"
        for pair in new:
            for each in pair:
                each.close()


def test_errors_before_the_limit_and_of_others_stay_as_they_are() -> None:
    ours, theirs = socket.socketpair()
    deadline = Deadline(0.02)
    with ours, theirs:
        with pytest.raises(OverflowError, match="too large"), deadline.watching(ours.fileno()):
            raise OverflowError("too large")
        assert deadline.take_cut() is None
        with pytest.raises(LookupError, match="its own"), deadline.watching(ours.fileno()):
            raise LookupError("its own" if theirs.recv(1) == b"" else "not shut down")
        assert deadline.take_cut() == "a transaction has taken longer than 0.02 s"
        assert deadline.take_cut() is None


def test_a_transaction_that_cannot_be_watched_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = socket.socketpair()
    deadline = Deadline(0.02)
    with ours, theirs:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="new thread"), deadline.watching(ours.fileno()):
                pytest.fail("it has begun")
        with deadline.watching(ours.fileno()):
            assert theirs.recv(1) == b"", "the next one is watched"
    closed = ours.fileno()
    with pytest.raises(DisconnectionError, match="cannot be watched: Bad file"), deadline.watching(closed):
        pytest.fail("it has begun")


def test_a_deadline_has_a_thread_only_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store has one of its own: of those that are closed, or only kept, no thread may be left."""
    made: list[threading.Thread] = []

    class Recorded(threading.Thread):
        def start(self) -> None:
            made.append(self)
            super().start()

    monkeypatch.setattr(threading, "Thread", Recorded)
    ours, theirs = socket.socketpair()
    deadline = Deadline(0.02)
    with ours, theirs:
        for number in (1, 2):
            with deadline.watching(ours.fileno()):
                pass
            assert len(made) == number
            made[-1].join(WITHIN_S)
            assert not made[-1].is_alive()
        with deadline.watching(ours.fileno()):
            assert theirs.recv(1) == b"", "the new one watches as well"
    assert len(made) == 3
