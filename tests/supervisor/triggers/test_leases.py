"""What a supervisor claims where others could claim it as well: real stores, and the clock of the test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

import pytest
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore
from tests.supervisor.tasks_harness import WAIT, S, Tasks, task_states

from headgate.protocol.messages.dags import TaskSpec
from headgate.store.errors import DatabaseAway, LeaseLost
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers import leases as leases_module
from headgate.supervisor.triggers.leases import FAIR_WAIT_S, Identity, Leases, LeaseTimes, Silences

TIMES = LeaseTimes(5.0, 30.0, 5.0)


class Supervisor:
    """The leases of one supervisor, and what it has claimed."""

    def __init__(
        self,
        store: Store,
        pid: int,
        *,
        capacity: int = 100,
        queues: tuple[str, ...] = QUEUES,
        retry: DatabaseRetry | None = None,
    ) -> None:
        self.leases = Leases(
            store,
            Identity("here", pid, "machine", 1.0),
            capacity=capacity,
            queues=queues,
            times=TIMES,
            is_gone=lambda _row: False,
            retry=retry or DatabaseRetry("leases", 1.0, 10.0),
        )
        self.owned: list[int] = []

    def look(self, now: float) -> int:
        """Look for what can be claimed; return how many triggers were."""
        self.leases.poll_soon()
        return self.run(now)

    def run(self, now: float) -> int:
        """Do everything that is due at this moment; return how many triggers were claimed."""
        before = len(self.owned)
        while self.leases.wake_at() <= now:
            news = self.leases.step(now, owned=len(self.owned), claiming=True)
            self.owned += [trigger.id for trigger in news.claimed]
            self.leases.listen(now, owned=len(self.owned))
        return len(self.owned) - before


def add(store: Store, count: int) -> None:
    for number in range(count):
        store.add_watcher(f"w{number}", "a.Trigger", {})


def with_neighbours(store: Store, count: int = 1) -> Supervisor:
    """Return a supervisor that knows of so many others."""
    supervisors = [Supervisor(store, pid) for pid in range(1, count + 2)]
    for now in (0.0, 5.0):
        for supervisor in supervisors:
            supervisor.run(now)
    return supervisors[0]


def test_a_supervisor_that_is_alone_claims_all(store: Store) -> None:
    add(store, 10)
    assert Supervisor(store, 1).run(0.0) == 10


def test_several_share_what_there_is_to_claim(store: Store) -> None:
    supervisors = [Supervisor(store, pid) for pid in (1, 2, 3)]
    for now in (0.0, 5.0):  # at the first look around not all have registered
        for supervisor in supervisors:
            supervisor.run(now)
    add(store, 30)
    assert [supervisor.look(5.5) for supervisor in supervisors] == [10, 7, 5]  # a third each of what the others left
    for supervisor in supervisors:
        supervisor.run(5.5 + FAIR_WAIT_S + 0.1)
    assert sum(len(supervisor.owned) for supervisor in supervisors) == 30


def test_what_others_leave_is_claimed_after_a_moment(store: Store) -> None:
    busy, idle = Supervisor(store, 1, capacity=1), Supervisor(store, 2)
    for now in (0.0, 5.0):
        busy.run(now)
        idle.run(now)
    add(store, 9)
    assert idle.look(5.5) == 5
    assert busy.look(5.5) == 1
    assert idle.run(5.5 + FAIR_WAIT_S + 0.1) == 3


def test_nothing_starts_while_others_are_left_some_of_what_belongs_together(store: Store) -> None:
    """What a neighbour that is leaving had may be the other half of a stream."""
    supervisor = with_neighbours(store)
    add(store, 4)
    assert supervisor.look(5.5) == 2
    assert supervisor.leases.is_claiming
    assert supervisor.run(5.5 + FAIR_WAIT_S + 0.1) == 2
    assert not supervisor.leases.is_claiming


def test_a_poll_in_between_does_not_let_the_first_half_begin(store: Store, query: object) -> None:
    supervisor = with_neighbours(store, 3)
    add(store, 4)
    assert supervisor.look(5.5) == 1
    tasks = Tasks(store, query, tasks=(TaskSpec("t", "Op", priority_weight=9),))  # type: ignore[arg-type]
    tasks.plan()
    (task,) = tasks.dispatch()
    assert ends.defer(store.tasks, tasks.epoch, task.id, task.token, WAIT)
    assert supervisor.look(5.6) == 1, "which is that of the task, for its priority"
    assert supervisor.leases.is_claiming, "three watchers are still left"


def test_one_trigger_alone_is_waited_for_by_nobody(store: Store) -> None:
    supervisor = with_neighbours(store)
    add(store, 1)
    assert supervisor.look(5.5) == 1
    assert not supervisor.leases.is_claiming


def test_nothing_starts_while_nobody_knows_whether_the_claim_was_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "CLAIM_TRIGGERS_MAX", 3)
    add(store, 4)
    supervisor = Supervisor(store, 1)
    claim_triggers = store.claim_triggers

    def claim_whose_answer_is_lost(*args: Any, **kwargs: Any) -> NoReturn:
        claim_triggers(*args, **kwargs)
        raise DatabaseAway("postgresql", "the answer is lost")

    with monkeypatch.context() as patched:
        patched.setattr(store, "claim_triggers", claim_whose_answer_is_lost)
        assert supervisor.run(0.0) == 0
    now = 0.0
    while not supervisor.owned:
        now = max(now, supervisor.leases.wake_at())
        supervisor.owned += [trigger.id for trigger in supervisor.leases.step(now, owned=0, claiming=True).claimed]
        supervisor.leases.listen(now, owned=0)
    assert len(supervisor.owned) == 3
    assert supervisor.leases.is_claiming, "the fourth may share a stream with them"
    assert supervisor.run(now) == 1
    assert not supervisor.leases.is_claiming


def test_who_serves_other_queues_has_no_share(store: Store) -> None:
    supervisor, other = Supervisor(store, 1), Supervisor(store, 2, queues=("reports",))
    for now in (0.0, 5.0):
        supervisor.run(now)
        other.run(now)
    add(store, 10)
    assert supervisor.look(5.5) == 10


@pytest.mark.parametrize("weights", [(1, 5, 3)])
def test_triggers_are_claimed_by_the_priorities_of_the_tasks_that_wait(
    store: Store, query: object, weights: tuple[int, ...]
) -> None:
    specs = tuple(TaskSpec(f"t{weight}", "Op", priority_weight=weight) for weight in weights)
    tasks = Tasks(store, query, tasks=specs)  # type: ignore[arg-type]
    tasks.plan()
    for task in sorted(tasks.dispatch(), key=lambda task: task.id):
        assert ends.defer(store.tasks, tasks.epoch, task.id, task.token, WAIT)
    assert set(task_states(store, tasks.run).values()) == {S.DEFERRED}
    names = []
    while claimed := store.claim_triggers(tasks.epoch, limit=1, queues=QUEUES):
        names.append(claimed[0].name.rpartition(".")[2])
    assert names == ["t5", "t3", "t1"]


# --- others that are silent ----------------------------------------------------------------------


def away(*_: object, **__: object) -> NoReturn:
    raise DatabaseAway("db", "no answer")


class Neighbours:
    """Three supervisors of one database, whose clock can be set, and which can be away."""

    def __init__(self, open_store: OpenStore) -> None:
        self.now = 0.0
        self.clock_jumps = timedelta()
        self._clock = Clock()
        self._began_at = self._clock.now
        self.all = [Supervisor(open_store(clock=self._clock), pid) for pid in (1, 2, 3)]

    def at(self, now: float, *which: Supervisor) -> None:
        """Have these do what is due at this second. Raises `LeaseLost` for one that was fenced."""
        self.now = now
        self._clock.now = self._began_at + self.clock_jumps + timedelta(seconds=now)
        for supervisor in which:
            supervisor.run(now)

    def add(self, open_store: OpenStore) -> Supervisor:
        """Return one more, which has not registered."""
        self.all.append(Supervisor(open_store(clock=self._clock), len(self.all) + 1))
        return self.all[-1]

    def at_without_database(self, now: float, *which: Supervisor) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("heartbeat", "poll", "has_changes", "live_triggerers"):
                patch.setattr(Store, name, away)
            self.at(now, *which)


@pytest.fixture
def neighbours(open_store: OpenStore) -> Neighbours:
    found = Neighbours(open_store)
    for now in (0.0, 5.0, 10.0):
        found.at(now, *reversed(found.all))  # so the first one has seen the latest heartbeats of the others
    return found


def test_who_is_back_first_after_an_outage_does_not_fence_the_others(neighbours: Neighbours) -> None:
    first, second, third = neighbours.all
    neighbours.at_without_database(16.0, *neighbours.all)
    neighbours.at_without_database(60.0, *neighbours.all)
    for now in (100.0, 105.0, 110.0):
        neighbours.at(now, first)
    for now in (112.0, 117.0, 122.0, 127.0):
        neighbours.at(now, first, second)
    neighbours.at(129.0, first, second, third)
    for now in (134.0, 139.0, 144.0, 149.0, 154.0, 159.0, 164.0):
        neighbours.at(now, first, second)
    with pytest.raises(LeaseLost):  # it has had as long as a lease lasts
        neighbours.at(165.0, third)


def test_a_short_outage_gives_nobody_more_time(neighbours: Neighbours) -> None:
    first, _, third = neighbours.all
    for now in (15.0, 20.0):
        neighbours.at(now, first)
    neighbours.at_without_database(26.0, first)
    for now in (36.0, 41.0):
        neighbours.at(now, first)
    with pytest.raises(LeaseLost):
        neighbours.at(42.0, third)


def test_without_an_outage_a_lease_lasts_no_longer_than_it_did(neighbours: Neighbours) -> None:
    first, second, third = neighbours.all
    for now in (15.0, 20.0, 25.0, 30.0, 35.0, 40.0):
        neighbours.at(now, first, second)
    with pytest.raises(LeaseLost):
        neighbours.at(41.0, third)


def test_a_supervisor_that_stood_still_judges_nobody_by_that_time(neighbours: Neighbours) -> None:
    """As one whose machine was suspended, or whose query to a database that stood still is answered at last."""
    first, second, third = neighbours.all
    neighbours.at(15.0, *reversed(neighbours.all))
    for now in (100.0, 105.0, 110.0, 115.0, 120.0, 125.0):
        neighbours.at(now, first)
    neighbours.at(126.0, second)
    neighbours.at(127.0, first)
    neighbours.at(132.0, first)
    with pytest.raises(LeaseLost):
        neighbours.at(133.0, third)


def test_one_that_is_started_as_the_database_is_back_judges_nobody_by_the_time_before(
    neighbours: Neighbours, open_store: OpenStore
) -> None:
    first, _, third = neighbours.all
    fourth = neighbours.add(open_store)
    fourth.leases._is_gone = lambda row: row.pid == 3
    for now in (100.0, 105.0):
        neighbours.at(now, fourth)
    neighbours.at(107.0, first)
    with pytest.raises(LeaseLost):  # its process is known to have ended
        neighbours.at(107.0, third)


def test_a_clock_of_the_database_that_is_set_costs_nobody_a_lease(neighbours: Neighbours) -> None:
    first, second, third = neighbours.all
    for jump in (timedelta(days=1), timedelta(days=-2)):
        neighbours.clock_jumps += jump
        neighbours.at(neighbours.now + 5.0, first, second, third)
    for _ in range(7):
        neighbours.at(neighbours.now + 5.0, first, second)
    with pytest.raises(LeaseLost):
        neighbours.at(neighbours.now + 1.0, third)


def test_a_heartbeat_that_is_written_while_others_are_looked_at_is_not_older_than_the_answer() -> None:
    """A look took ten seconds, and nobody knows when in that time the heartbeat was written that it has found."""
    silences = Silences(TIMES)
    other, beat = Epoch(2), datetime(2026, 1, 1, tzinfo=UTC)
    assert silences.look({other: beat}, 0.0) == {}
    silences.answered(10.0)
    for now in (10.0, 20.0, 30.0, 39.9):
        assert silences.look({other: beat}, now) == {}
        silences.answered(now)
    assert silences.look({other: beat}, 40.0) == {other: beat}


def test_a_heartbeat_is_due_after_an_outage_no_later_than_without(store: Store) -> None:
    supervisor = Supervisor(store, 1, retry=DatabaseRetry("leases", 1_000.0, 10_000.0))
    supervisor.run(0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "heartbeat", away)
        supervisor.run(5.0)
    assert supervisor.leases.wake_at() <= 5.0 + TIMES.heartbeat_s
