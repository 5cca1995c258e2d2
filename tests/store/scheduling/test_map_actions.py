"""What users do to mapped tasks: clear, mark and cancel them and their instances, in pieces if they are many."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine
from tests.store import ends
from tests.store.harness import OpenStore, Query
from tests.store.scheduling.test_expansion import Maps
from tests.store.tasks.plans import insert_rows
from tests.supervisor.tasks_harness import instance_of, task_states

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import Values
from headgate.store.db.engine import open_engine
from headgate.store.errors import NoSuchRow, ValueRefused
from headgate.store.ids import Instances
from headgate.store.store import Store
from headgate.store.tasks import task_rows
from headgate.store.tasks.run_states import HELD
from headgate.store.tasks.user_actions import ROWS_MAX, Cleared, every_instance

S = TaskState
MANY = 2 * ROWS_MAX + 7


@pytest.fixture
def maps(store: Store, query: Query) -> Maps:
    """A run that has ended: ``each`` has five instances, of which those at 1 and 3 have failed."""
    maps = Maps(store, query, Values(5))
    maps.source_leaves(None)
    maps.run_some(5, fails=(1, 3), value=str)
    assert maps.ended() == "failed"
    return maps


class Many(Maps):
    """A run that has ended, in which ``each`` has `MANY` instances; those at the end have failed."""

    def __init__(self, store: Store, query: Query, engine: Engine, **spec: Any) -> None:
        super().__init__(store, query, Values(MANY), spec=spec)
        self.query("UPDATE task_instance SET state = 'success' WHERE task_id <> 'total'")
        own = "task_id = 'each' AND map_index = -1"
        self.query(f"UPDATE task_instance SET map_length = :n, map_made = :n WHERE {own}", n=MANY)
        for first, rows, state in ((0, ROWS_MAX, "success"), (ROWS_MAX, MANY - ROWS_MAX, "failed")):
            values = "dag_run_id, 'each', :first + i - 1, :state, NULL, 1"
            insert_rows(engine, rows, values, state=state, first=first)
        self.plan()
        assert self.ended() == "failed"

    def clear_in_pieces(self, **how: Any) -> list[Cleared]:
        """Clear, and have a scheduler look and a worker take what there is between any two transactions."""
        pieces = [self.store.tasks.clear_many(self.run, ["each"], **how)]
        while (left := pieces[-1].left) is not None:
            self.nothing_goes_on()
            pieces.append(self.store.tasks.clear_on(left))
        return pieces

    def nothing_goes_on(self) -> None:
        """Look, as a scheduler does: a map that is only partly cleared neither begins nor lets others begin or end."""
        assert self.plan().ended == {}
        assert self.dispatch() == []
        assert self.ended() == "running"
        assert (self.own()["state"], self.own()["map_length"]) == ("none", HELD)
        assert task_states(self.store, self.run)["total"] is S.UPSTREAM_FAILED


@pytest.fixture
def many(store: Store, query: Query, database_url: str) -> Many:
    return Many(store, query, open_engine(database_url))


# --- clear ---------------------------------------------------------------------------------------


def test_a_mapped_task_is_cleared_with_all_its_instances_and_begins_again(maps: Maps) -> None:
    answer = maps.store.tasks.clear_many(maps.run, ["each"], downstream=True)
    assert (answer.cleared, answer.instances) == ({"each": S.NONE, "total": S.NONE}, {"each": 5})
    assert answer.left is None
    assert (maps.own()["state"], maps.own()["map_length"], maps.instances()) == ("none", None, ["none"] * 5)
    assert maps.query("SELECT count(*) AS n FROM xcom WHERE key = 'return_value'") == [{"n": 0}]
    (row,) = maps.query("SELECT * FROM task_instance WHERE map_index = 1")
    assert (row["tries_max"], row["ended_at"], row["last_error"]) == (2, None, None)
    maps.plan()
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 5, "success")


@pytest.mark.parametrize(
    ("name", "cleared"), [("each[3]", [3]), ("each[1-3]", [1, 2, 3]), ("each[0-4]", [0, 1, 2, 3, 4])]
)
def test_instances_that_are_named_are_cleared_alone(maps: Maps, name: str, cleared: list[int]) -> None:
    before = maps.instances()
    answer = maps.store.tasks.clear_many(maps.run, [name])
    assert (answer.cleared, answer.instances, answer.left) == ({}, {"each": len(cleared)}, None)
    assert maps.own()["state"] == "success"
    assert maps.instances() == ["none" if index in cleared else state for index, state in enumerate(before)]
    assert maps.ended() == "running"
    maps.plan()
    assert sorted(maps.run_some(5)) == cleared


def test_what_is_downstream_of_an_instance_is_cleared_with_it_and_not_the_others(maps: Maps) -> None:
    answer = maps.store.tasks.clear_many(maps.run, ["each[3]"], downstream=True)
    assert (answer.cleared, answer.instances) == ({"total": S.NONE}, {"each": 1})
    assert maps.instances() == ["success", "failed", "success", "none", "success"]


def test_of_those_that_failed_the_others_are_left_alone(maps: Maps) -> None:
    answer = maps.store.tasks.clear_many(maps.run, ["each"], downstream=True, only_failed=True)
    assert (answer.cleared, answer.instances) == ({"total": S.NONE}, {"each": 2})
    assert maps.own()["state"] == "success"
    maps.plan()
    assert sorted(maps.run_some(5)) == [1, 3]
    maps.run_all()
    assert maps.ended() == "success"


def test_a_map_that_stopped_early_goes_on_when_what_failed_is_cleared(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(9), spec={"window": 2, "failures_max": 1})
    maps.source_leaves(None)
    maps.run_some(2, fails=(0,))
    assert (maps.own()["state"], len(maps.instances())) == ("success", 2)
    answer = store.tasks.clear_many(maps.run, ["each"], only_failed=True)
    assert (answer.cleared, answer.instances) == ({"each": S.NONE}, {"each": 1})
    maps.plan()
    maps.run_all()
    assert maps.instances() == ["success"] * 9


def test_a_map_that_a_branch_passes_over_after_the_clear_is_skipped_with_its_instances(maps: Maps) -> None:
    store = maps.store
    store.tasks.clear_many(maps.run)
    maps.plan()
    (source,) = maps.dispatch(limit=1)
    assert ends.succeed(store.tasks, maps.epoch, source.id, source.token, skips=("each",))
    maps.plan()
    assert (maps.own()["state"], maps.instances()) == ("skipped", ["skipped"] * 5)
    assert (task_states(store, maps.run)["total"], maps.ended()) == (S.SKIPPED, "success")


@pytest.mark.parametrize("name", ["z", "z[1]", "z[]"])
def test_a_name_that_the_run_lacks_clears_nothing(maps: Maps, name: str) -> None:
    with pytest.raises(NoSuchRow, match="no task named 'z"):
        maps.store.tasks.clear_many(maps.run, ["each[1]", name])
    assert maps.instances()[1] == "failed"


def test_many_instances_are_cleared_in_pieces_and_nothing_begins_before_the_last(many: Many) -> None:
    pieces = many.clear_in_pieces()
    assert [piece.instances["each"] for piece in pieces] == [ROWS_MAX, ROWS_MAX, 7]
    assert [piece.cleared for piece in pieces] == [{}, {}, {"each": S.NONE}]
    assert Counter(many.instances()) == {"none": MANY}
    many.plan()
    assert Counter(many.instances()) == {"none": MANY - 256, "scheduled": 256}, "its window"
    assert many.own()["map_length"] == MANY


def test_with_fail_fast_none_is_skipped_before_those_that_failed_are_cleared(
    store: Store, query: Query, database_url: str
) -> None:
    many = Many(store, query, open_engine(database_url), fail_fast=True)
    many.clear_in_pieces()
    assert Counter(many.instances()) == {"none": MANY}


def test_many_that_failed_are_cleared_in_pieces_too_and_begin_a_window_at_a_time(many: Many) -> None:
    pieces = many.clear_in_pieces(only_failed=True)
    assert [piece.instances.get("each", 0) for piece in pieces] == [ROWS_MAX, MANY - 2 * ROWS_MAX]
    many.plan()
    assert Counter(many.instances()) == {"success": ROWS_MAX, "none": MANY - ROWS_MAX - 256, "scheduled": 256}
    assert many.own()["state"] == "none"


def test_a_clear_that_died_midway_is_done_by_another_one(many: Many) -> None:
    assert many.store.tasks.clear_many(many.run, ["each"]).left is not None
    many.nothing_goes_on()
    again = many.clear_in_pieces()
    assert sum(piece.instances["each"] for piece in again) == MANY
    many.plan()
    assert Counter(many.instances())["scheduled"] == 256


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_instance_that_another_is_changing_is_waited_for_by_the_caller(maps: Maps, open_store: OpenStore) -> None:
    (row,) = maps.query("SELECT id FROM task_instance WHERE map_index = 2")
    other = open_store()
    with other.database.writing() as tx:
        assert task_rows.locked(tx, row["id"]) is not None
        first = maps.store.tasks.clear_many(maps.run, ["each"])
        assert (first.is_busy, first.instances, first.cleared) == (True, {"each": 2}, {})
        assert first.left is not None
        again = maps.store.tasks.clear_on(first.left)
        assert (again.is_busy, again.instances) == (True, {})
        marked = maps.store.tasks.mark_map(maps.run, every_instance("each"), "failed")
        assert (marked.tasks, marked.is_ended, marked.is_busy) == (2, True, False), "it has ended, and is not looked at"
    assert again.left is not None
    last = maps.store.tasks.clear_on(again.left)
    assert (last.left, last.instances, last.cleared) == (None, {"each": 3}, {"each": S.NONE})


# --- mark, cancel --------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["success", "failed"])
def test_a_mapped_task_is_marked_with_all_that_is_unfinished(store: Store, query: Query, mark: Any) -> None:
    maps = Maps(store, query, Values(9), spec={"window": 4})
    maps.source_leaves(None)
    maps.run_some(1, fails=(0,))
    ended = store.tasks.mark_map(maps.run, every_instance("each"), mark)
    assert (ended.tasks, ended.is_ended) == (5, True)
    assert maps.instances() == ["failed", *[mark] * 4]
    assert maps.own()["state"] == mark, "no more are made"
    maps.plan()
    assert maps.ended() == "failed"
    assert store.tasks.mark_map(maps.run, every_instance("each"), mark).tasks == 0


def test_instances_that_are_named_are_marked_alone(store: Store, query: Query) -> None:
    maps = Maps(store, query, Values(4))
    maps.source_leaves(None)
    assert store.tasks.mark_map(maps.run, Instances("each", 1, 2), "success").tasks == 2
    assert maps.instances() == ["scheduled", "success", "success", "scheduled"]


def test_what_has_failed_in_a_map_is_only_cleared_and_what_is_below_may_count_as_succeeded(maps: Maps) -> None:
    failed = maps.query("SELECT id FROM task_instance WHERE task_id = 'each' AND map_index = 1")[0]["id"]
    assert not maps.store.tasks.mark(failed, "success")
    assert maps.ended() == "failed"
    assert maps.store.tasks.mark(instance_of(maps.store, maps.run, "total"), "success")
    assert task_states(maps.store, maps.run)["total"] is S.SUCCESS


def test_a_mapped_task_is_not_marked_without_its_unfinished_instances(store: Store, query: Query) -> None:
    """Or those that were cleared would begin, all at once, beside its window."""
    maps = Maps(store, query, Values(9), spec={"window": 2})
    maps.source_leaves(None)
    maps.run_all()
    store.tasks.clear_many(maps.run, ["each"])
    with pytest.raises(ValueRefused, match="the task each has instances that have not ended: mark it with all of them"):
        store.tasks.mark(maps.own()["id"], "success")
    maps.plan()
    assert maps.instances() == ["scheduled"] * 2 + ["none"] * 7
    maps.run_all()
    assert not store.tasks.mark(maps.own()["id"], "success"), "it has ended"


@pytest.mark.parametrize("name", ["each[0]", "each[2]"])
def test_with_fail_fast_an_instance_that_a_user_clears_begins_though_another_has_failed(
    store: Store, query: Query, name: str
) -> None:
    maps = Maps(store, query, Values(4), spec={"window": 3, "fail_fast": True})
    maps.source_leaves(None)
    maps.run_some(2, fails=(0, 1))
    assert (maps.instances(), maps.ended()) == (["failed", "failed", "upstream_failed"], "failed")
    index = int(name[-2])
    assert store.tasks.clear_many(maps.run, [name]).instances == {"each": 1}
    maps.plan()
    assert maps.instances()[index] == "scheduled"
    assert maps.run_some(9) == [index]
    assert maps.instances()[index] == "success"
    assert maps.ended() == "failed", "the other one"


@pytest.mark.parametrize("action", ["cancel", "mark"])
def test_many_instances_end_in_pieces_and_no_more_are_made_meanwhile(store: Store, query: Query, action: str) -> None:
    maps = Maps(store, query, Values(5000), spec={"window": MANY})
    maps.source_leaves(None)
    assert maps.instances() == ["scheduled"] * MANY
    counts = []
    is_ended = False
    while not is_ended:
        ended = (
            store.tasks.cancel_run(maps.run)
            if action == "cancel"
            else store.tasks.mark_map(maps.run, every_instance("each"), "failed")
        )
        is_ended = ended.is_ended
        counts.append(ended.tasks)
        assert not ended.is_busy
        maps.plan()
    assert len(maps.instances()) == MANY
    assert counts[:2] == [ROWS_MAX, ROWS_MAX]
    assert set(maps.instances()) == {"failed"}
    assert (maps.own()["state"], maps.own()["map_length"]) == ("failed", None)
    assert maps.ended() == "failed"
