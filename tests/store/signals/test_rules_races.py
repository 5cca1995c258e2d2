"""Rules of tasks about signals, and transactions that meet on PostgreSQL: with real connections (I29)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from tests.store import ends
from tests.store.harness import Clock
from tests.store.signals.rules_harness import AGAIN, GO, HALT, PLAIN, Jobs, ruled
from tests.store.signals.test_sending import new
from tests.store.tasks.test_task_races import Race
from tests.supervisor.tasks_harness import S, Tasks, body

from headgate.protocol.messages.dags import DagSpec
from headgate.protocol.messages.rules import SignalRule
from headgate.store.db.engine import open_engine
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.signals import waits
from headgate.store.signals.waits import OpenWait
from headgate.store.store import Store


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
