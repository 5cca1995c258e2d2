"""Rules of tasks about signals, and transactions that meet on PostgreSQL: with real connections (I29)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec
import pytest
from sqlalchemy import select
from tests.store import ends
from tests.store.harness import Clock, wait_until_blocked
from tests.store.signals.rules_harness import AGAIN, GO, HALT, PLAIN, Jobs, is_, ruled
from tests.store.signals.test_sending import new
from tests.store.tasks.test_task_races import Race
from tests.supervisor.tasks_harness import S, Tasks, body
from tests.waiting import WITHIN_S

from headgate.protocol.messages.dags import DagSpec
from headgate.protocol.messages.rules import SignalRule
from headgate.store.db.engine import open_engine
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.signals import subscriptions, waits
from headgate.store.signals.waits import OpenWait
from headgate.store.store import Store
from headgate.store.tables import dag_run, signal_wait


class Meeting(Race):
    """A run with a ruled task, and two stores, each with a connection of its own."""

    def __init__(self, url: str, one: Store, two: Store, clock: Clock) -> None:
        self.url, self.one, self.two, self.clock = url, one, two, clock
        Tasks.__init__(self, one, self._query, tasks=(ruled(), PLAIN))
        self.jobs = Jobs.__new__(Jobs)
        self.jobs.tasks, self.jobs.store, self.jobs.query = self, one, self._query
        self.jobs.settle()

    def _query(self, statement: str, **parameters: Any) -> list[dict[str, Any]]:
        return super()._query(statement.replace(":name", "%(name)s").replace(":run", "%(run)s"), **parameters)

    def evaluate(self, tx: LeasedTx) -> bool:
        body(self.one.scheduling.plan)(tx)
        return True


@pytest.fixture
def meeting(postgres_url: str, secrets: Any) -> Iterator[Meeting]:
    clock = Clock()
    one, two = (Store(open_engine(postgres_url), secrets=secrets, clock=clock) for _ in range(2))
    with one, two:
        yield Meeting(postgres_url, one, two, clock)


def test_a_signal_that_is_sent_while_others_are_held_against_a_rule_meets_it_once(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed after the wait was read, and before its versions are."""
    look: Callable[[Tx, int], list[OpenWait]] = waits.to_look_at

    def meanwhile(tx: Tx, limit: int) -> list[OpenWait]:
        found = look(tx, limit)
        if found:
            monkeypatch.undo()
            meeting.two.signals.send([new("go", 2)])
        return found

    meeting.one.signals.send([new("go", 1)])
    monkeypatch.setattr(waits, "to_look_at", meanwhile)
    assert meeting.one.scheduling.consider_signals(meeting.epoch).rules == 1
    meeting.one.scheduling.plan(meeting.epoch)
    task = meeting.jobs.dispatch()
    assert meeting.jobs.signals()[0] == [("go", 2)]
    meeting.jobs.settle()
    meeting.jobs.end(task)
    assert meeting.jobs.state() is S.SUCCESS, "it has started the task, and does not start it again"


@pytest.mark.parametrize("rules", [(HALT,), (GO, AGAIN, HALT)])
def test_an_evaluation_does_not_wait_for_a_rule_that_signals_are_held_against(
    meeting: Meeting, rules: tuple[SignalRule, ...]
) -> None:
    """Whoever has it locked may wait for the run. The DAG file has the rule no more, or with another overlap."""
    meeting.one.signals.send([new("go")])
    changed = DagSpec("etl", tasks=(ruled(*rules, overlap="each"), PLAIN))
    meeting.one.tasks.save_file(meeting.epoch, "etl.py", [changed])
    planned = meeting.second_passes_over(
        lambda tx: waits.to_look_at(tx, 10), lambda: meeting.two.scheduling.plan(meeting.epoch)
    )
    assert (planned.evaluated, planned.left) == (1, 1)
    meeting.jobs.settle()
    each = meeting._query("SELECT takes_each FROM signal_wait WHERE rule IS NOT NULL")
    assert [row["takes_each"] for row in each] == [True] * len(rules)


def test_a_changed_rule_goes_on_where_it_was_although_signals_are_held_against_it(meeting: Meeting) -> None:
    """Whoever has it locked holds a second signal against it; the first, which has started the task, meets it still."""
    meeting.jobs.send("go", 1)
    meeting.jobs.end(meeting.jobs.dispatch())
    meeting.one.signals.send([new("go", 2)])
    changed = DagSpec("etl", tasks=(ruled(msgspec.structs.replace(GO, predicate=is_(1))), PLAIN))
    meeting.one.tasks.save_file(meeting.epoch, "etl.py", [changed])
    planned = meeting.second_passes_over(
        lambda tx: waits.to_look_at(tx, 10), lambda: meeting.two.scheduling.plan(meeting.epoch)
    )
    assert (planned.evaluated, planned.left) == (1, 1)
    meeting.jobs.settle()
    assert meeting.jobs.state() is S.SUCCESS


@pytest.mark.parametrize("action", ["START", "STOP"])
def test_what_a_user_asks_for_while_a_run_ends_opens_it_again(
    meeting: Meeting, action: Literal["START", "STOP"]
) -> None:
    task = meeting.jobs.dispatch("plain")
    assert ends.succeed(meeting.one.tasks, meeting.epoch, task.id, task.token)
    instance = meeting.jobs.id()
    meeting.second_waits(meeting.evaluate, lambda: meeting.two.signals.ask(instance, action))
    meeting.jobs.settle()
    if action == "START":
        assert (meeting.jobs.state(), meeting.jobs.run_state()) == (S.SCHEDULED, "running")
    else:
        assert (meeting.jobs.state(), meeting.jobs.run_state()) == (S.SKIPPED, "success")
        assert meeting._query("SELECT 1 FROM signal_wait WHERE met_version IS NOT NULL") == []


def test_a_run_that_would_end_while_a_rule_of_it_is_locked_is_evaluated_again(meeting: Meeting) -> None:
    """Whoever holds a signal against the rule flags the run only if it fits."""
    task = meeting.jobs.dispatch("plain")
    assert ends.succeed(meeting.one.tasks, meeting.epoch, task.id, task.token)
    locked = select(signal_wait.c.id).with_for_update()
    planned = meeting.second_passes_over(
        lambda tx: tx.connection.execute(locked).all(), lambda: meeting.two.scheduling.plan(meeting.epoch)
    )
    assert (planned.left, planned.ended) == (1, {})
    assert list(meeting.two.scheduling.plan(meeting.epoch).ended.values()) == ["success"]


def test_a_run_ends_by_a_signal_once_no_other_one_is_held_against_the_rule(meeting: Meeting) -> None:
    """Whoever holds another signal against it waits for the run: an evaluation that waited for the rule would hang."""
    ends_by = DagSpec("etl", tasks=(ruled(), PLAIN), end_on=(SignalRule("enough", action="STOP"),))
    meeting.one.tasks.save_file(meeting.epoch, "etl.py", [ends_by])
    meeting.jobs.settle()
    meeting.one.signals.send([new("enough", 1)])
    while meeting.one.scheduling.consider_signals(meeting.epoch).has_more:
        pass
    (rule,) = meeting._query("SELECT met_version FROM signal_wait WHERE key = 'enough'")
    assert rule["met_version"] == 1
    meeting.one.signals.send([new("enough", 2)])
    planned = meeting.second_passes_over(
        lambda tx: waits.to_look_at(tx, 10), lambda: meeting.two.scheduling.plan(meeting.epoch)
    )
    assert (planned.evaluated, planned.left) == (1, 1)
    assert [row["is_ending"] for row in meeting._query("SELECT is_ending FROM dag_run")] == [False]
    meeting.jobs.settle()
    assert [row["is_ending"] for row in meeting._query("SELECT is_ending FROM dag_run")] == [True]


def test_a_stop_by_hand_and_a_run_that_ends_its_endless_tasks_do_not_wait_for_each_other(meeting: Meeting) -> None:
    instance = meeting.jobs.id()

    def ask() -> bool:
        meeting.two.signals.ask(instance, "STOP")
        return True

    with ThreadPoolExecutor(1) as pool:
        with meeting.one.database.leased(meeting.epoch) as tx:
            tx.connection.execute(select(dag_run.c.id).with_for_update(key_share=True)).all()  # as an evaluation
            asked = pool.submit(ask)
            wait_until_blocked(open_engine(meeting.url))
            subscriptions.ask(tx, meeting.jobs.tasks.run, instance, "STOP")
        assert asked.result(WITHIN_S)


def test_a_run_that_is_created_while_a_key_is_forgotten_counts_its_new_versions(meeting: Meeting) -> None:
    """Its first version is 1 again, which a run that had waited for what comes after the old ones would pass over."""
    meeting.jobs.send("go", 1, 2, 3)
    meeting.one.tasks.cancel_run(meeting.jobs.tasks.run)
    with ThreadPoolExecutor(1) as pool:
        with meeting.one.database.writing() as tx:
            assert body(meeting.one.signals.forget)(tx, "go") == 3
            created = pool.submit(meeting.two.tasks.create_run, "etl", "r2")
            wait_until_blocked(open_engine(meeting.url))
        run = created.result(WITHIN_S)
    assert run is not None
    meeting.jobs.tasks.run = run
    meeting.jobs.send("go", "anew")
    assert meeting.jobs.state() is S.SCHEDULED
