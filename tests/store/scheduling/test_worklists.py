"""Worklists in the store: what instances append gets an instance, once; the map ends when none is left to append."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.store.harness import Clock, Query
from tests.store.scheduling.test_expansion import Maps
from tests.store.scheduling.test_groups import group
from tests.store.tasks.test_task_races import Race
from tests.supervisor.tasks_harness import Tasks, body, clear, task_states

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import XCOM_BYTES_MAX, DagSpec, TaskSpec, TaskState, check_dag
from headgate.protocol.messages.maps import INSTANCES_MAX, Concat, MapSpec, Values, Worklist
from headgate.protocol.messages.steps import Appended, StepFailed, StepOutcome, StepSkipped, StepSucceeded
from headgate.store.db.engine import open_engine
from headgate.store.db.transaction import Tx
from headgate.store.errors import ValueRefused
from headgate.store.ids import TaskInstanceId
from headgate.store.store import Store
from headgate.store.tasks import elements, user_actions
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import StepEnd

S = TaskState


class Crawl(Maps):
    """A run in which ``each`` is expanded over a worklist of one value, and ``total`` is below it."""

    def __init__(self, store: Store, query: Query, *, length_max: int = 100, **each: Any) -> None:
        spec = MapSpec(Worklist("each", 1, length_max), **each.pop("spec", {}))
        tasks = (
            TaskSpec("each", "Op", map=spec, retry_delay_s=0.0, **each),
            TaskSpec("total", "Op", upstream=("each",), trigger_rule="all_done"),
        )
        Tasks.__init__(self, store, query, tasks=tasks)
        self.length_max = length_max
        self.plan()

    def take(self) -> TaskToRun:
        """Have a worker take the next instance."""
        (task,) = self.dispatch(limit=1)
        return task

    def append(self, *values: str | tuple[str, str]) -> Appended:
        """What a step appends: values, or pairs of value and key."""
        pairs = [(value, None) if isinstance(value, str) else value for value in values]
        encoded = tuple(f'"{value}"'.encode() for value, _ in pairs)
        keys = tuple(None if key is None else key.encode().ljust(32) for _, key in pairs)
        return Appended("each", encoded, keys, self.length_max - 1)

    def end(self, task: TaskToRun, outcome: StepOutcome) -> TaskState | None:
        (state,) = self.store.tasks.store_ends(self.epoch, [StepEnd(task.id, task.token, outcome)])
        self.plan()
        return state

    def values(self) -> list[bytes | None]:
        page = self.store.tasks.pull_elements(self.run, "each", after=-1, offset=0, limit=1000, bytes_max=10**6)
        assert [position for position, _ in page.values] == list(range(page.count))
        return [value for _, value in page.values]


@pytest.fixture
def crawl(store: Store, query: Query) -> Crawl:
    return Crawl(store, query)


def test_what_an_instance_appends_gets_an_instance_and_the_last_one_ends_it(crawl: Crawl) -> None:
    assert crawl.instances() == ["scheduled"]
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append("b", "c")))
    assert (crawl.instances(), crawl.own()["state"]) == (["success", "scheduled", "scheduled"], "none")
    assert crawl.values() == [b'"b"', b'"c"']
    crawl.end(crawl.take(), StepSkipped(appended=crawl.append("d")))
    crawl.end(crawl.take(), StepSucceeded())
    assert (crawl.own()["state"], task_states(crawl.store, crawl.run)["total"]) == ("none", S.NONE)
    crawl.end(crawl.take(), StepSucceeded())
    assert (crawl.own()["state"], crawl.own()["map_length"]) == ("success", 4)
    assert task_states(crawl.store, crawl.run)["total"] is S.SCHEDULED


def test_a_key_is_appended_once(crawl: Crawl) -> None:
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append(("b", "B"), ("b again", "B"), ("c", "C"), "x")))
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append(("c again", "C"), ("d", "D"), "x")))
    assert crawl.values() == [b'"b"', b'"c"', b'"x"', b'"d"', b'"x"']


def test_a_try_that_fails_appends_nothing_and_the_next_one_does(store: Store, query: Query) -> None:
    crawl = Crawl(store, query, retries=1)
    crawl.end(crawl.take(), StepFailed("boom"))
    assert crawl.values() == []
    assert crawl.own()["state"] == "none", "the retry may append"


def test_an_outcome_that_comes_too_late_appends_nothing(crawl: Crawl) -> None:
    task = crawl.take()
    clear(crawl.store, crawl.run)
    assert crawl.end(task, StepSucceeded(appended=crawl.append("b"))) is None
    assert crawl.values() == []


def test_too_many_are_refused_and_nothing_of_the_outcome_is_stored(store: Store, query: Query) -> None:
    crawl = Crawl(store, query, length_max=3)
    task = crawl.take()
    with pytest.raises(ValueRefused, match=r"it appends 3 values to the 0 that are appended to 'each'; the limit is 2"):
        crawl.end(task, StepSucceeded(appended=crawl.append("b", "c", "d")))
    assert (crawl.values(), crawl.instances()) == ([], ["running"])
    crawl.end(task, StepSucceeded(appended=crawl.append("b", "c")))
    assert len(crawl.instances()) == 3


def test_a_value_that_is_too_long_is_refused(crawl: Crawl) -> None:
    with pytest.raises(ValueRefused, match="it appends 49,154 bytes"):
        crawl.end(crawl.take(), StepSucceeded(appended=crawl.append("x" * XCOM_BYTES_MAX)))


def test_a_clear_of_the_task_begins_with_the_first_value(crawl: Crawl) -> None:
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append("b")))
    crawl.end(crawl.take(), StepSucceeded())
    clear(crawl.store, crawl.run)
    crawl.plan()
    assert crawl.values() == []
    assert crawl.instances() == ["scheduled", "none"]
    crawl.end(crawl.take(), StepSucceeded())
    assert crawl.instances() == ["success", "removed"]
    assert crawl.own()["state"] == "success"


@pytest.mark.parametrize("first", [StepSucceeded, StepSkipped])
@pytest.mark.parametrize("ends", ["the run", "the task"])
def test_a_clear_of_what_failed_leaves_what_others_have_appended(
    crawl: Crawl, ends: str, first: type[StepSucceeded | StepSkipped]
) -> None:
    """A user has ended all of the task, so that its own row is cleared with its instances."""
    crawl.end(crawl.take(), first(appended=crawl.append("b", "c")))
    if ends == "the run":
        crawl.store.tasks.cancel_run(crawl.run)
    else:
        crawl.store.tasks.mark_map(crawl.run, user_actions.every_instance("each"), "failed")
        crawl.plan()
    ended = "success" if first is StepSucceeded else "skipped"
    assert (crawl.instances(), crawl.own()["state"]) == ([ended, "failed", "failed"], "failed")
    crawl.store.tasks.clear_many(crawl.run, ["each"], only_failed=True)
    crawl.plan()
    assert (crawl.instances(), crawl.values()) == ([ended, "scheduled", "scheduled"], [b'"b"', b'"c"'])
    task = next(task for task in crawl.dispatch(limit=3) if task.task_id == "each")
    crawl.end(task, StepSucceeded(appended=crawl.append("d")))
    assert crawl.instances() == [ended, "success", "running", "scheduled"]


def test_an_instance_that_is_cleared_alone_appends_to_what_there_is(crawl: Crawl) -> None:
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append(("b", "B"))))
    crawl.end(crawl.take(), StepSucceeded())
    crawl.end(crawl.take(), StepSucceeded())  # total
    assert crawl.ended() == "success"
    clear(crawl.store, crawl.run, "each[0]")
    crawl.plan()
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append(("b", "B"), ("c", "C"))))
    assert crawl.instances() == ["success", "success", "scheduled"]
    assert (crawl.own()["state"], crawl.ended()) == ("none", "running")
    crawl.end(crawl.take(), StepSucceeded())
    assert (crawl.own()["state"], crawl.ended()) == ("success", "success")


def test_a_value_that_is_appended_later_has_the_instance_back_that_was_removed(crawl: Crawl) -> None:
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append("b", "c")))
    crawl.run_all()
    clear(crawl.store, crawl.run, "each", "total")
    crawl.plan()
    crawl.run_all()
    assert crawl.instances() == ["success", "removed", "removed"]
    assert crawl.store.tasks.clear_many(crawl.run, ["each[0]"]).left is None
    crawl.plan()
    assert crawl.instances() == ["scheduled", "none", "none"]
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append("d")))
    crawl.run_all()
    assert (crawl.instances(), crawl.own()["map_length"]) == (["success", "success", "removed"], 2)
    assert crawl.ended() == "success"


def test_a_clear_holds_a_worklist_of_which_very_many_instances_were_removed(
    crawl: Crawl, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl.end(crawl.take(), StepSucceeded(appended=crawl.append(*"bcdef")))
    crawl.run_all()
    clear(crawl.store, crawl.run, "each", "total")
    crawl.plan()
    crawl.run_all()
    monkeypatch.setattr(user_actions, "ROWS_MAX", 2)
    cleared = crawl.store.tasks.clear_many(crawl.run, ["each[0]"])
    while cleared.left is not None:
        crawl.plan()
        assert "scheduled" not in crawl.instances(), "it is held"
        cleared = crawl.store.tasks.clear_on(cleared.left)
    crawl.plan()
    assert crawl.instances() == ["scheduled", *["none"] * 5]
    crawl.run_all()
    assert (crawl.instances(), crawl.ended()) == (["success", *["removed"] * 5], "success")


class CrawlRace(Race, Crawl):
    """The same on PostgreSQL, with two stores."""

    def __init__(self, url: str, one: Store, two: Store, clock: Clock) -> None:
        self.url, self.one, self.two, self.clock = url, one, two, clock
        Crawl.__init__(self, one, self._query)

    def _query(self, statement: str, **parameters: Any) -> list[dict[str, Any]]:
        return super()._query(statement.replace(":name", "%(name)s"), **parameters)


@pytest.fixture
def race(postgres_url: str, secrets: Any) -> Iterator[CrawlRace]:
    clock = Clock()
    one, two = (Store(open_engine(postgres_url), secrets=secrets, clock=clock) for _ in range(2))
    with one, two:
        yield CrawlRace(postgres_url, one, two, clock)


def test_of_two_that_append_at_once_the_second_appends_behind_the_first(race: CrawlRace) -> None:
    race.end(race.take(), StepSucceeded(appended=race.append("a", "b")))
    one, two = race.dispatch(limit=2)
    first = StepEnd(one.id, one.token, StepSucceeded(appended=race.append(("same", "S"), "c")))
    second = StepEnd(two.id, two.token, StepSucceeded(appended=race.append("d", ("the same", "S"))))
    race.second_waits(
        lambda tx: body(race.one.tasks._store_ends)(tx, [first]),
        lambda: race.two.tasks.store_ends(race.epoch, [second]),
    )
    assert race.values() == [b'"a"', b'"b"', b'"same"', b'"c"', b'"d"']
    race.plan()
    assert len(race.instances()) == 6


def test_a_look_during_an_append_ends_nothing(race: CrawlRace) -> None:
    task = race.take()
    race.one.tasks.set_paused("etl", is_paused=False)  # have the run looked at
    ended = StepEnd(task.id, task.token, StepSucceeded(appended=race.append("a")))
    looked = race.second_passes_over(
        lambda tx: body(race.one.tasks._store_ends)(tx, [ended]), lambda: race.two.scheduling.plan(race.epoch)
    )
    assert (looked.instances, race.own()["state"]) == (0, "none")
    race.plan()
    assert race.instances() == ["success", "scheduled"]


class Looped(Crawl):
    """A run in which a group of ``body`` and ``gate`` is repeated, with ``after`` below it."""

    def __init__(self, store: Store, query: Query) -> None:
        body = TaskSpec("body", "Op")
        gate = TaskSpec("gate", "Op", upstream=("body",))
        loop = group("loop", Worklist("gate", 1, 9, is_loop=True), body, gate, window=1)
        Tasks.__init__(self, store, query, tasks=(*loop, TaskSpec("after", "Op", upstream=("gate",))))
        self.plan()

    def iterate(self, index: int, *, is_last: bool = False) -> None:
        """Run one iteration, which has begun."""
        body = self.take()
        assert (body.task_id, body.map_index) == ("body", index)
        self.end(body, StepSucceeded())
        self.gate(is_last=is_last)

    def gate(self, *, is_last: bool) -> None:
        """Run a gate."""
        gate = self.take()
        again = Appended("gate", (b"null",), (str(gate.map_index + 1).encode().ljust(32),), 8)
        self.end(gate, StepSucceeded(appended=None if is_last else again))


def test_in_a_loop_an_iteration_begins_when_the_one_before_has_ended(store: Store, query: Query) -> None:
    loop = Looped(store, query)
    loop.iterate(0)
    assert loop.instances("body") == ["success", "scheduled"]
    loop.iterate(1, is_last=True)
    assert (loop.instances("body"), loop.instances("gate")) == (["success"] * 2, ["success"] * 2)
    assert loop.take().task_id == "after"


def test_a_clear_with_what_is_downstream_clears_later_iterations_of_which_none_may_follow(
    store: Store, query: Query
) -> None:
    loop = Looped(store, query)
    for index in range(4):
        loop.iterate(index, is_last=index == 3)
    loop.end(loop.take(), StepSucceeded())
    assert loop.ended() == "success"
    answer = store.tasks.clear_many(loop.run, ["body[1]"], downstream=True)
    assert (answer.cleared, answer.instances) == ({"after": S.NONE}, {"body": 3, "gate": 3})
    loop.plan()
    assert loop.instances("body") == ["success", "scheduled", "none", "none"]
    loop.iterate(1)
    loop.iterate(2, is_last=True)
    assert loop.instances("body") == loop.instances("gate") == ["success"] * 3 + ["removed"]
    assert loop.take().task_id == "after"


def test_a_loop_whose_run_was_cancelled_goes_on_where_it_was(store: Store, query: Query) -> None:
    loop = Looped(store, query)
    loop.iterate(0)
    loop.iterate(1)
    store.tasks.cancel_run(loop.run)
    store.tasks.clear_many(loop.run, only_failed=True)
    loop.plan()
    assert loop.instances("body") == ["success", "success", "scheduled"]
    loop.iterate(2)
    loop.iterate(3, is_last=True)
    assert loop.take().task_id == "after"


def test_an_iteration_that_is_cleared_alone_leaves_the_later_ones(store: Store, query: Query) -> None:
    loop = Looped(store, query)
    for index in range(3):
        loop.iterate(index, is_last=index == 2)
    loop.end(loop.take(), StepSucceeded())
    answer = store.tasks.clear_many(loop.run, ["gate[0]"])
    assert (answer.cleared, answer.instances) == ({}, {"gate": 1})
    loop.plan()
    loop.gate(is_last=False)
    assert loop.instances("gate") == ["success"] * 3
    assert loop.own("gate")["state"] == "success"


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (Worklist("other", 1, 9), "is expanded over what is appended to 'other', which is another task"),
        (Worklist("each", 3, 2), "0..max_length values"),
        (Worklist("each", 1, INSTANCES_MAX + 1), "max_length at most 1,000,000"),
        (Concat((Values(1), Worklist("each", 1, 9))), "a worklist cannot be combined with other values"),
    ],
)
def test_a_worklist_that_cannot_be(source: Any, problem: str) -> None:
    with pytest.raises(DagMalformed, match=problem):
        check_dag(DagSpec("d", tasks=(TaskSpec("each", "Op", map=MapSpec(source)),)))


def test_a_group_appends_to_one_of_its_own_tasks() -> None:
    tasks = group("g", Worklist("x", 1, 9), TaskSpec("a", "Op"))
    with pytest.raises(DagMalformed, match="what is appended to 'x', which is none of its tasks"):
        check_dag(DagSpec("d", tasks=tasks))


def test_appends_to_several_tasks_lock_these_in_one_order(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two supervisors that store ends of two worklists at a time would wait for each other."""
    tasks = tuple(TaskSpec(name, "Op", map=MapSpec(Worklist(name, 2, 100))) for name in ("x", "y"))
    maps = Maps.__new__(Maps)
    Tasks.__init__(maps, store, query, tasks=tasks)
    maps.plan()
    taken = {(task.task_id, task.map_index): task for task in maps.dispatch()}

    def end(task: TaskToRun) -> StepEnd:
        appended = Appended(task.task_id, (b"1",), (None,), 99)
        return StepEnd(task.id, task.token, StepSucceeded(appended=appended))

    store.tasks.store_ends(maps.epoch, [end(taken["x", 0])])
    maps.plan()
    (newest,) = maps.dispatch()
    assert (newest.task_id, newest.map_index) == ("x", 2)
    locked: list[int] = []
    append = elements.append

    def noting(tx: Tx, instance: TaskInstanceId, appended: Appended) -> None:
        locked.append(instance)
        append(tx, instance, appended)

    monkeypatch.setattr(elements, "append", noting)
    store.tasks.store_ends(maps.epoch, [end(taken["y", 0]), end(newest)])
    own = query("SELECT id FROM task_instance WHERE map_index = -1 ORDER BY task_id")
    assert locked == [row["id"] for row in own]
