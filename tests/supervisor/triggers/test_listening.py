"""When a supervisor listens for what others write, and how often it polls because of that: the clock of the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.supervisor.triggers.test_leases import TIMES, Supervisor

from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store
from headgate.supervisor.triggers.leases import LISTEN_PAUSE_S

WRITES = 1000  # within one second


class Listening:
    """A supervisor on a SQLite database, driven as the arbiter does it, and the times of its polls."""

    def __init__(self, store: Store) -> None:
        self.now = 0.0
        self.polled_at: list[float] = []
        self.heard = 0
        self.store = store
        self._poll, self._has_changes = store.poll, store.has_changes
        store.poll = self._note_poll  # type: ignore[method-assign, assignment]
        store.has_changes = self._note_look  # type: ignore[method-assign]
        self.supervisor = Supervisor(store, 1)
        self.pass_time(1.0)
        assert self.supervisor.leases.is_listening
        self.polled_at.clear()
        self.heard = 0

    def _note_poll(self, *args: object) -> object:
        self.polled_at.append(self.now)
        return self._poll(*args)  # type: ignore[arg-type]

    def _note_look(self) -> bool:
        self.heard += 1
        return self._has_changes()

    def turn(self) -> None:
        """What a turn of the loop does, which the bell begins only if the supervisor listens."""
        leases = self.supervisor.leases
        if leases.is_listening:
            leases.listen(self.now, owned=0)
        self.supervisor.run(self.now)

    def pass_time(self, seconds: float) -> None:
        ends_at = self.now + seconds
        while self.now < ends_at:
            self.turn()
            self.now = min(ends_at, max(self.supervisor.leases.wake_at(), self.now + 1e-6))
        self.turn()


@pytest.fixture
def other(sqlite_url: str, secrets: Secrets) -> Iterator[Store]:
    with Store(open_engine(sqlite_url), secrets=secrets) as store:
        yield store


@pytest.fixture
def listening(sqlite_url: str, secrets: Secrets) -> Iterator[Listening]:
    with Store(open_engine(sqlite_url), secrets=secrets) as store:
        yield Listening(store)


def write(other: Store) -> None:
    with other.database.writing() as tx:
        tx.notify()


def test_a_single_write_is_polled_for_at_once(listening: Listening, other: Store) -> None:
    for _ in range(3):
        listening.pass_time(0.3)
        write(other)
        listening.turn()
        assert listening.polled_at.pop() == listening.now
    assert listening.polled_at == []


def test_nothing_is_looked_for_while_nobody_writes(listening: Listening) -> None:
    listening.pass_time(TIMES.poll_interval_s - 1.5)
    assert listening.polled_at == []
    assert listening.heard <= 2 * (TIMES.poll_interval_s / TIMES.heartbeat_s) + 2, "once at the end of each step"
    listening.pass_time(1.5)
    assert len(listening.polled_at) == 1, "in case that a bell was missed"


def test_thousands_of_writes_take_a_few_polls_and_the_last_is_not_missed(listening: Listening, other: Store) -> None:
    begun_at = listening.now
    for _ in range(WRITES):
        write(other)
        listening.pass_time(1.0 / WRITES)
    in_storm = [at for at in listening.polled_at if at <= begun_at + 1.0]
    assert in_storm[0] == begun_at, "the first is noticed at once"
    assert 10 <= len(in_storm) <= 1.0 / TIMES.listen_pause_max_s + 5
    listening.pass_time(0.2)
    listening.polled_at.clear()
    write(other)
    listening.turn()
    assert listening.polled_at == [listening.now], "after a moment of silence it is as before"


def test_the_bell_is_not_listened_to_for_a_moment_after_it_has_rung(listening: Listening, other: Store) -> None:
    leases = listening.supervisor.leases
    write(other)
    listening.turn()
    assert not leases.is_listening
    assert leases.wake_at() == pytest.approx(listening.now + LISTEN_PAUSE_S)
    write(other)
    listening.pass_time(LISTEN_PAUSE_S)
    assert listening.polled_at[-1] == listening.now, "what was written meanwhile"
    listening.pass_time(2 * LISTEN_PAUSE_S)
    assert leases.is_listening


def test_while_the_database_is_away_nobody_listens(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> bool:
        raise DatabaseAway("sqlite", "gone")

    leases = listening.supervisor.leases
    with monkeypatch.context() as patch:
        patch.setattr(listening.store, "has_changes", away)
        listening.turn()
        assert not leases.is_listening
        assert leases.wake_at() > listening.now
    listening.pass_time(leases.wake_at() - listening.now + 0.1)
    assert leases.is_listening


def test_where_no_bell_rings_the_supervisor_looks_by_itself(sqlite_url: str, secrets: Secrets, other: Store) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    with open(f"{path}-bells", "w", encoding="utf-8"):  # in the place of the folder
        pass
    with Store(open_engine(sqlite_url), secrets=secrets) as store:
        supervisor = Supervisor(store, 1)
        now = 0.0
        while now < 3.0:
            supervisor.run(now)
            assert not supervisor.leases.is_listening
            assert supervisor.leases.wake_at() <= now + TIMES.look_interval_s
            now = supervisor.leases.wake_at()
        other.add_watcher("new", "a.Trigger", {})
        assert supervisor.run(supervisor.leases.wake_at()) == 1
