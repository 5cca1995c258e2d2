"""Steps that listen for signals: their queries wait in the supervisor, and are looked up when something is sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.signals.test_sending import new
from tests.supervisor.tasks.core_harness import Scene

from headgate.protocol.messages.queries import ListenSignals, Response, SendSignals, SignalsHeard
from headgate.protocol.messages.signals import LISTEN_S_MAX, SignalSend
from headgate.protocol.messages.steps import StepSucceeded
from headgate.store.store import Store
from headgate.supervisor.executors.base import StepQuery
from headgate.supervisor.queries import QueryRefused, StoreQueries
from headgate.supervisor.tasks import listeners


class Listening(Scene):
    """Tasks that run, and answers from the store."""

    def __init__(self, store: Store, query: Query, *names: str, **options: Any) -> None:
        super().__init__(store, query, *names, answers=StoreQueries(store, {}), **options)
        self.log = store.signals
        self.step()
        self.tokens = list(self.executor.steps)
        self.asked = 0

    def listen(
        self, after: int | None = 0, key: str = "a", *, by: int = 0, within_s: float = LISTEN_S_MAX, now: float = 0.0
    ) -> None:
        """Have a step ask, and the supervisor take it."""
        self.asked += 1
        query = ListenSignals(key, after=after, within_s=within_s)
        self.executor.pending.append(StepQuery(self.tokens[by], self.asked, query))
        self.step(now)

    def answered(self) -> list[tuple[int, list[int], int]]:
        """Return the answers since the last call: the id, the versions, and the place."""
        answers = [answer for _, answer in self.executor.answers]
        self.executor.answers.clear()
        found = []
        for answer in answers:
            assert isinstance(answer.result, SignalsHeard), answer
            found.append((answer.id, [one.version for one in answer.result.signals], answer.result.seen))
        return found

    def send(self, *keys: str, **options: Any) -> None:
        """Send signals as another process does, and have the bell rung."""
        self.log.send([new(key, **options) for key in keys])
        self.core.notify_signals()


@pytest.fixture
def scene(store: Store, query: Query) -> Listening:
    return Listening(store, query, "a", "b")


def test_what_is_there_is_the_answer(scene: Listening) -> None:
    scene.send("a", "b", "a")
    scene.listen(after=0)
    scene.listen(after=1)
    assert scene.answered() == [(1, [1, 2], 2), (2, [2], 2)]


def test_without_a_place_the_answer_is_the_place(scene: Listening) -> None:
    scene.listen(after=None)
    scene.send("a", "a")
    scene.listen(after=None)
    assert scene.answered() == [(1, [], 0), (2, [], 2)]


def test_a_query_without_an_answer_waits_until_something_is_sent(scene: Listening) -> None:
    scene.send("a")
    scene.listen(after=1)
    scene.step(1.0)
    assert scene.answered() == []
    scene.send("b")
    scene.step(2.0)
    assert scene.answered() == [], "another key"
    scene.send("a", "a")
    assert scene.core.wake_at() == 0.0
    scene.step(3.0)
    scene.step(4.0)
    assert scene.answered() == [(1, [2, 3], 3)]


def test_while_it_waits_the_database_is_asked_nothing(
    scene: Listening, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = []
    translating = store.database._translating

    def count() -> Any:
        transactions.append(1)
        return translating()

    monkeypatch.setattr(store.database, "_translating", count)
    scene.listen(after=0)
    scene.step(0.5)
    assert transactions, "they are counted"
    transactions.clear()
    for number in range(10):
        scene.step(1.0 + number / 10)
    assert transactions == []
    scene.core.notify_signals()  # the bell has rung for something else
    scene.step(2.5)
    scene.step(2.6)
    assert len(transactions) == 1


def test_one_statement_finds_the_keys_of_all_that_wait(scene: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    versions = scene.store.store.tasks.signal_versions

    def ask(addresses: Any) -> Any:
        asked.append(sorted(addresses))
        return versions(addresses)

    monkeypatch.setattr(scene.store.store.tasks, "signal_versions", ask)
    for key in ("a", "b", "a"):
        scene.listen(key=key)
    scene.send("b")
    scene.step(1.0)
    assert asked == [[("default", "a"), ("default", "b")]]
    assert scene.answered() == [(2, [1], 1)]


def test_it_is_answered_without_a_signal_after_a_while_and_asks_again(scene: Listening) -> None:
    scene.listen(after=0, now=100.0)
    scene.listen(after=0, within_s=2.0, now=101.0)
    scene.listen(after=0, within_s=math.inf, now=102.0)
    assert scene.core.wake_at() == 103.0
    scene.step(103.0)
    assert scene.answered() == [(2, [], 0)]
    assert scene.core.wake_at() <= 110.0
    scene.step(109.9)
    assert scene.answered() == []
    scene.step(110.0)
    assert scene.answered() == [(1, [], 0)]
    scene.step(112.0)
    assert scene.answered() == [(3, [], 0)]


@pytest.mark.parametrize("within_s", [0.0, -1.0, math.nan])
def test_a_step_that_does_not_wait_is_answered_at_once(scene: Listening, within_s: float) -> None:
    scene.listen(after=7, within_s=within_s)
    assert scene.answered() == [(1, [], 7)]


def test_signals_for_other_runs_alone_are_left_out_and_passed_over(scene: Listening, store: Store) -> None:
    other = store.tasks.create_run("etl", "r2")
    assert other is not None
    scene.send("a", dag_run=other)
    scene.listen(after=0)
    scene.send("a", dag_run=other)
    scene.step(1.0)
    assert scene.answered() == []
    scene.step(LISTEN_S_MAX)
    assert scene.answered() == [(1, [], 2)], "the next query begins behind them"
    scene.listen(after=2, now=20.0)
    scene.send("a", dag_run=scene.tasks.run)
    scene.step(21.0)
    assert scene.answered() == [(2, [3], 3)]


def test_what_a_step_of_this_supervisor_sends_is_heard_at_once(scene: Listening) -> None:
    listener, sender = scene.tokens
    scene.listen(after=0)
    scene.executor.pending.append(StepQuery(sender, 9, SendSignals((SignalSend("a", b"1", "d"),))))
    scene.step(1.0)
    assert [token for token, _ in scene.executor.answers] == [sender, listener]
    scene.executor.answers.clear()
    scene.listen(after=1, now=2.0)
    scene.executor.finish(StepSucceeded(signals=(SignalSend("a", b"2", "e"),)), sender)
    scene.step(3.0)
    assert scene.answered() == [(2, [2], 2)]


def test_many_that_are_woken_do_not_hold_up_other_duties(scene: Listening) -> None:
    many = 3 * listeners.LOOKS_A_STEP_MAX
    for _ in range(many):
        scene.listen(after=0)
    scene.send("a")
    for number in range(3):
        assert scene.core.wake_at() == 0.0
        scene.step(1.0)
        assert len(scene.answered()) == listeners.LOOKS_A_STEP_MAX, number
    assert scene.core.wake_at() > 1.0


def test_the_queries_of_a_step_that_has_ended_are_dropped(scene: Listening) -> None:
    listener, other = scene.tokens
    scene.listen(after=0)
    scene.listen(after=0, by=1)
    scene.executor.lose(listener, "its worker died")
    scene.send("a")
    scene.step(1.0)
    assert [token for token, _ in scene.executor.answers] == [other]


def test_a_query_that_was_read_with_the_end_of_its_step_does_not_wait(scene: Listening) -> None:
    scene.executor.pending.append(StepQuery(scene.tokens[0], 1, ListenSignals("a", after=0)))
    scene.executor.finish(StepSucceeded(), scene.tokens[0])
    scene.step()
    scene.step(LISTEN_S_MAX)
    assert scene.executor.answers == []


def test_a_step_that_a_user_has_cleared_is_ended_while_it_listens(scene: Listening) -> None:
    scene.listen(after=0)
    token = next(token for token, step in scene.executor.steps.items() if step.task_id == "a")
    scene.tasks.clear_it()
    scene.core.notify()
    scene.step(1.0)
    assert scene.executor.ended == [(token, "user")]


def test_a_step_goes_on_listening_while_its_supervisor_drains(scene: Listening) -> None:
    """It may be what it hears that lets it end; if not, it is ended as any other step that still runs."""
    scene.listen(after=0)
    assert not scene.core.drain(1.0)
    scene.send("a")
    scene.step(2.0)
    assert scene.answered() == [(1, [1], 1)]
    scene.listen(after=1, now=3.0)
    scene.step(3.0 + LISTEN_S_MAX)
    assert scene.answered() == [(2, [], 1)]


def test_nobody_is_answered_any_more_once_the_lease_is_lost(scene: Listening) -> None:
    scene.listen(after=0)
    scene.core.abandon()
    scene.send("a")
    scene.step(LISTEN_S_MAX)
    assert (scene.executor.answers, scene.executor.is_closed) == ([], True)


def test_a_look_that_fails_is_repeated(scene: Listening) -> None:
    scene.listen(after=0)
    scene.store.fails = "signal_versions"
    scene.send("a")
    scene.step(1.0)
    assert scene.answered() == []
    scene.step(5.0)
    assert scene.answered() == [(1, [1], 1)]


def test_a_step_is_told_what_cannot_be_listened_for(scene: Listening) -> None:
    scene.listen(key="k" * 513)
    scene.listen(after=-1)
    scene.listen(after=2**63)
    answers = [answer for _, answer in scene.executor.answers]
    assert all(isinstance(answer, Response) and answer.result is None for answer in answers)
    first, second, third = [answer.error for answer in answers]
    assert "must have 1..512 characters" in first
    assert second == "after must be a version, from 0 to 9,223,372,036,854,775,807, not -1"
    assert "from 0 to" in third


def test_a_long_log_is_heard_page_by_page(scene: Listening, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    other = store.tasks.create_run("etl", "r2")
    assert other is not None
    scene.send("a", value="x" * 40_000)
    scene.send("a", value="x" * 40_000, dag_run=other)
    scene.send("a", "a", value="x" * 40_000)
    scene.send("a", dag_run=other)
    hear = store.signals.hear
    page = hear("a", after=0, dag_run=scene.tasks.run, bytes_max=50_000)
    assert ([one.version for one in page.signals], page.seen) == ([1, 3], 3)
    page = hear("a", after=page.seen, dag_run=scene.tasks.run, bytes_max=50_000)
    assert ([one.version for one in page.signals], page.seen) == ([4], 5), "the last one is for another run"


def test_only_steps_listen(store: Store) -> None:
    with pytest.raises(QueryRefused, match="only a step of a task can listen"):
        StoreQueries(store, {}).answer(ListenSignals("a"), dag_run_id=None)
