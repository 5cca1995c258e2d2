"""Elements in the store: emitted once each, in order, over tries; and what is expanded over them as they come."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.scheduling.test_expansion import Maps
from tests.store.tasks.streams_harness import Streams, handled
from tests.supervisor.tasks_harness import Tasks, clear, task_states

from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState, check_dag
from headgate.protocol.messages.maps import Available, Concat, Elements, MapSpec, Product, Source, Values, Zip
from headgate.protocol.messages.maps import available as available_of
from headgate.protocol.messages.queries import XComPage
from headgate.protocol.messages.steps import Emitted, StepFailed, StepOutcome, StepSkipped, StepSucceeded
from headgate.store.errors import ValueRefused
from headgate.store.scheduling.element_verbs import AHEAD_MAX
from headgate.store.scheduling.planning import TASKS_PER_RUN_MAX
from headgate.store.store import Store
from headgate.store.tasks import elements
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import StepEnd

OF_SOURCE = Elements("source")


def values(*numbers: int) -> tuple[bytes, ...]:
    return tuple(str(number).encode() for number in numbers)


class Emitting(Maps):
    """A run in which ``each`` is expanded over what ``source`` emits, and ``total`` is below it."""

    def __init__(self, store: Store, query: Query, over: Source = OF_SOURCE, **each: Any) -> None:
        spec = MapSpec(over, **each.pop("spec", {}))
        upstream = ("other", "source") if each.pop("has_other", False) else ("source",)
        tasks = (
            TaskSpec("source", "Op", emits=True, retries=1, retry_delay_s=0.0, priority_weight=9),
            *([TaskSpec("other", "Op")] if "other" in upstream else []),
            TaskSpec("each", "Op", upstream=upstream, map=spec, **each),
            TaskSpec("total", "Op", upstream=("each",)),
        )
        Tasks.__init__(self, store, query, tasks=tasks)

    def begin(self) -> TaskToRun:
        """Have a worker take the source."""
        self.plan()
        (task,) = self.dispatch(limit=1)
        assert task.task_id == "source"
        return task

    def emit(self, task: TaskToRun, first: int, *numbers: int) -> int | None:
        """Emit before the end of the step; return the room. The run is evaluated then."""
        room = self.store.tasks.emit(self.epoch, task.id, task.token, Emitted(first, values(*numbers)))
        self.plan()
        return None if room is None else room.room

    def end(self, task: TaskToRun, outcome: StepOutcome) -> TaskState | None:
        (state,) = self.store.tasks.store_ends(self.epoch, [StepEnd(task.id, task.token, outcome)])
        self.plan()
        return state

    def elements(self) -> list[bytes | None]:
        page = self.store.tasks.pull_elements(self.run, "source", after=-1, offset=0, limit=1000, bytes_max=10**6)
        assert [position for position, _ in page.values] == list(range(page.count))
        return [value for _, value in page.values]


# --- expanded as they come -----------------------------------------------------------------------


def test_instances_begin_with_the_first_element_and_end_with_the_last(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    assert maps.instances() == []
    maps.emit(source, 0, 10)
    assert maps.instances() == ["scheduled"]
    assert maps.run_some(9) == [0]
    maps.emit(source, 1, 11, 12)
    assert maps.instances() == ["success", "scheduled", "scheduled"]
    assert maps.own()["state"] == "none", "there may be more"
    assert maps.run_some(9) == [1, 2]
    assert maps.ended() == "running"
    assert maps.end(source, StepSucceeded(emitted=Emitted(3, values(13)))) is TaskState.SUCCESS
    assert (maps.own()["state"], maps.own()["map_length"]) == ("success", 4)
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 4, "success")
    assert maps.elements() == list(values(10, 11, 12, 13))


def test_a_source_that_emits_nothing_has_them_skipped(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    maps.end(maps.begin(), StepSucceeded(emitted=Emitted(0, ())))
    assert (maps.own()["state"], maps.instances(), maps.ended()) == ("skipped", [], "success")


def test_a_source_that_fails_begins_no_more_and_what_has_begun_goes_on(store: Store, query: Query) -> None:
    maps = Emitting(store, query, spec={"window": 2})
    source = maps.begin()
    maps.emit(source, 0, 1, 2, 3)
    assert maps.instances() == ["scheduled"] * 2
    assert maps.end(source, StepFailed("boom", may_retry=False)) is TaskState.FAILED
    assert maps.own()["state"] == "upstream_failed"
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 2, "failed")


def test_a_rule_that_a_success_of_the_source_could_break_waits_for_it(store: Store, query: Query) -> None:
    maps = Emitting(store, query, trigger_rule="all_failed")
    source = maps.begin()
    maps.emit(source, 0, 1)
    assert maps.instances() == []
    maps.end(source, StepSucceeded(emitted=Emitted(1, ())))
    assert maps.own()["state"] == "skipped"


def test_the_window_holds_for_elements_too(store: Store, query: Query) -> None:
    maps = Emitting(store, query, spec={"window": 2})
    source = maps.begin()
    maps.emit(source, 0, 1, 2, 3, 4)
    assert maps.instances() == ["scheduled"] * 2
    assert maps.run_some(1) == [0]
    assert maps.instances() == ["success"] + ["scheduled"] * 2


# --- emitted once, over tries --------------------------------------------------------------------


def test_what_is_emitted_again_is_stored_once(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    assert maps.emit(source, 0, 1, 2) == AHEAD_MAX - 2
    assert maps.emit(source, 0, 1, 2) == AHEAD_MAX, "it is not known whether the first was committed"
    maps.emit(source, 2, 3)
    assert maps.end(source, StepFailed("boom")) is TaskState.UP_FOR_RETRY
    maps.store.tasks.retry_due(maps.epoch)
    again = maps.begin()
    assert again.emitted == 0, "a new try emits from the first on"
    maps.emit(again, 0, 1)
    maps.emit(again, 1, 2, 3, 4)
    assert maps.end(again, StepSucceeded(emitted=Emitted(4, values(5)))) is TaskState.SUCCESS
    assert maps.elements() == list(values(1, 2, 3, 4, 5))
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 5, "success")


def test_another_value_than_in_an_earlier_try_is_refused(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.emit(source, 0, 1, 2)
    maps.end(source, StepFailed("boom"))
    maps.store.tasks.retry_due(maps.epoch)
    again = maps.begin()
    with pytest.raises(ValueRefused, match=r"element 1 was 2 in an earlier try and is 7 now"):
        maps.emit(again, 0, 1, 7)
    with pytest.raises(ValueRefused, match=r"it has emitted 1 elements, and an earlier try 2"):
        maps.end(again, StepSucceeded(emitted=Emitted(0, values(1))))
    with pytest.raises(ValueRefused, match=r"elements from 5 on, and the next one is 0"):
        maps.emit(again, 5, 1)
    with pytest.raises(ValueRefused, match=r"elements from -1 on, and the next one is 0"):
        maps.emit(again, -1, 7)
    with pytest.raises(ValueRefused, match=r"element 2 needs 49,153 bytes; the limit is 49,152"):
        store.tasks.emit(maps.epoch, again.id, again.token, Emitted(0, (*values(1, 2), b"x" * 49_153)))
    assert maps.elements() == list(values(1, 2)), "nothing of them is stored"


def keyed(first: int, *pairs: tuple[int, str]) -> Emitted:
    return Emitted(first, values(*(value for value, _ in pairs)), tuple(key.encode() for _, key in pairs))


def test_with_keys_an_element_is_the_one_of_its_key_in_any_order_and_try(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    for _ in range(2):  # it is not known whether the first was committed
        room = store.tasks.emit(maps.epoch, source.id, source.token, keyed(0, (1, "a"), (2, "b"), (3, "a")))
        assert room is not None
    maps.plan()
    assert (maps.elements(), maps.instances()) == (list(values(1, 2)), ["scheduled"] * 2)
    assert maps.end(source, StepFailed("boom")) is TaskState.UP_FOR_RETRY
    maps.store.tasks.retry_due(maps.epoch)
    again = maps.begin()
    with pytest.raises(ValueRefused, match="elements with keys and without"):
        maps.emit(again, 0, 1)
    # In another order, with another value, and without one of them.
    store.tasks.emit(maps.epoch, again.id, again.token, keyed(0, (7, "b")))
    assert maps.end(again, StepSucceeded(emitted=keyed(1, (3, "c")))) is TaskState.SUCCESS
    assert maps.elements() == list(values(1, 2, 3))
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 3, "success")


def test_a_step_that_emits_a_key_twice_before_its_end_ends_well(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.store.tasks.emit(maps.epoch, source.id, source.token, keyed(0, (1, "a"), (2, "b"), (3, "a")))
    # Its worker counts what it has sent: three.
    assert maps.end(source, StepSucceeded(emitted=Emitted(3, ()))) is TaskState.SUCCESS
    assert maps.elements() == list(values(1, 2))


def test_elements_of_which_some_have_no_key_in_a_message_are_refused(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    with pytest.raises(ValueRefused, match="2 values and 1 keys"):
        store.tasks.emit(maps.epoch, source.id, source.token, Emitted(0, values(1, 2), (b"a",)))
    assert maps.elements() == []


@pytest.mark.parametrize("have_keys", [False, True])
def test_more_elements_than_there_may_be_are_refused_and_none_of_them_is_stored(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch, have_keys: bool
) -> None:
    monkeypatch.setattr(elements, "INSTANCES_MAX", 3)

    def some(first: int, *numbers: int) -> Emitted:
        pairs = [(number, str(number)) for number in numbers]
        return keyed(first, *pairs) if have_keys else Emitted(first, values(*numbers))

    maps = Emitting(store, query)
    source = maps.begin()
    assert store.tasks.emit(maps.epoch, source.id, source.token, some(0, 1, 2)) is not None
    with pytest.raises(ValueRefused, match="it emits more than 3 elements"):
        store.tasks.emit(maps.epoch, source.id, source.token, some(2, 3, 4))
    assert maps.elements() == list(values(1, 2))
    assert maps.end(source, StepSucceeded(emitted=some(2, 3))) is TaskState.SUCCESS


def test_elements_without_keys_are_followed_by_none_with_a_key(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.emit(source, 0, 1)
    with pytest.raises(ValueRefused, match="elements with keys and without"):
        maps.end(source, StepSucceeded(emitted=keyed(1, (2, "a"))))
    assert maps.elements() == list(values(1))


def test_a_retry_that_is_skipped_must_have_emitted_as_much_as_the_try_before(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.emit(source, 0, 1, 2, 3)
    maps.end(source, StepFailed("boom"))
    maps.store.tasks.retry_due(maps.epoch)
    again = maps.begin()
    with pytest.raises(ValueRefused, match="it has emitted 1 elements, and an earlier try 3"):
        maps.end(again, StepSkipped(emitted=Emitted(0, values(1))))
    assert maps.end(again, StepSkipped(emitted=Emitted(0, values(1, 2, 3)))) is TaskState.SKIPPED


def test_a_source_that_is_cleared_beside_results_over_its_elements_must_emit_the_same(
    store: Store, query: Query
) -> None:
    """Instance 0 has succeeded with the first element, and nobody clears it."""
    maps = Emitting(store, query, spec={"window": 1})
    source = maps.begin()
    maps.emit(source, 0, 1, 2)
    assert maps.run_some(1) == [0]
    maps.end(source, StepFailed("boom", may_retry=False))
    store.tasks.clear_many(maps.run, ["source"], downstream=True, only_failed=True, streams="from_start")
    again = maps.begin()
    assert maps.elements() == list(values(1, 2))
    with pytest.raises(ValueRefused, match="element 0 was 1 in an earlier try and is 7 now"):
        maps.emit(again, 0, 7)
    maps.emit(again, 0, 1, 2, 3)
    maps.end(again, StepSucceeded(emitted=Emitted(3, ())))
    maps.run_all()
    assert (maps.instances(), maps.ended()) == (["success"] * 3, "success")


def test_a_source_that_is_cleared_with_all_results_forgets_its_elements(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.emit(source, 0, 1, 2)
    maps.run_some(9)
    maps.end(source, StepFailed("boom", may_retry=False))
    store.tasks.clear_many(maps.run, ["source"], downstream=True)
    maps.emit(maps.begin(), 0, 7)
    assert maps.elements() == list(values(7))


def test_a_step_that_has_lost_its_task_emits_nothing(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    clear(store, maps.run, "source")
    assert maps.emit(source, 0, 1) is None
    assert maps.end(source, StepSucceeded(emitted=Emitted(0, values(1)))) is None
    assert maps.elements() == []


def test_a_source_that_is_cleared_forgets_its_elements(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.end(source, StepSucceeded(emitted=Emitted(0, values(1, 2, 3))))
    maps.run_all()
    clear(store, maps.run, "source", "each", "total")
    query("UPDATE task_instance SET state = 'none', ended_at = NULL WHERE map_index >= 0")
    assert maps.elements() == []
    again = maps.begin()
    maps.emit(again, 0, 7)
    assert maps.instances() == ["scheduled", "none", "none"]
    maps.end(again, StepSucceeded(emitted=Emitted(1, values(8))))
    assert maps.instances() == ["scheduled", "scheduled", "removed"]
    maps.run_all()
    assert (maps.ended(), maps.elements()) == ("success", list(values(7, 8)))


@pytest.mark.parametrize("kept", [1, 0])
def test_what_a_step_emits_for_its_events_is_stored_with_its_place(store: Store, query: Query, kept: int) -> None:
    streams = Streams(store, query, emits=True)
    streams.stream_it()
    streams.fire(1, 2)
    task, part = streams.take()
    so_far = handled(part, number=1) if kept else None
    emitted = Emitted(0, values(10, 11)[: kept * 2])
    assert streams.end(task.token, StepFailed("boom", handled=so_far, emitted=emitted), part) is TaskState.UP_FOR_RETRY
    streams.retry()
    (again,) = streams.dispatch()
    assert again.emitted == kept * 2, "it goes on behind the events that it has handled"
    page = store.tasks.pull_elements(streams.run, "a", after=-1, offset=0, limit=9, bytes_max=99)
    assert page.count == kept * 2


# --- room ----------------------------------------------------------------------------------------


def test_a_task_that_is_far_ahead_of_those_that_are_expanded_over_it_is_told_so(store: Store, query: Query) -> None:
    maps = Emitting(store, query, spec={"window": 10})
    source = maps.begin()
    assert maps.emit(source, 0, *range(500)) == AHEAD_MAX - 500, "of these none is made yet"
    assert maps.emit(source, 500) == AHEAD_MAX - 490
    assert maps.emit(source, 500, *range(500, 1000)) == AHEAD_MAX - 990
    maps.run_some(5)
    assert maps.emit(source, 1000) == AHEAD_MAX - 985


def test_who_is_expanded_over_something_else_as_well_holds_up_nobody(store: Store, query: Query) -> None:
    maps = Emitting(store, query, Product((Values(2), OF_SOURCE)))
    assert maps.emit(maps.begin(), 0, *range(500)) == AHEAD_MAX
    assert maps.instances() == [], "how far apart its values are is known at its end only"


def test_who_waits_for_the_end_of_the_task_holds_it_up_as_little(store: Store, query: Query) -> None:
    tasks = (
        TaskSpec("source", "Op", emits=True),
        TaskSpec("after", "Op", upstream=("source",)),
        TaskSpec("each", "Op", upstream=("after", "source"), map=MapSpec(OF_SOURCE)),
    )
    maps = Emitting.__new__(Emitting)
    Tasks.__init__(maps, store, query, tasks=tasks)
    assert maps.emit(maps.begin(), 0, *range(500)) == AHEAD_MAX
    assert task_states(store, maps.run)["each"] is TaskState.NONE


def test_elements_are_read_by_pages(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.emit(source, 0, 1, 2, 3)

    def page(**where: int) -> XComPage:
        how = {"after": -1, "offset": 0, "limit": 9, "bytes_max": 100} | where
        return store.tasks.pull_elements(maps.run, "source", **how)

    assert page() == XComPage(((0, b"1"), (1, b"2"), (2, b"3")), 3, 0)
    assert page(after=0, limit=1).values == ((1, b"2"),)
    assert page(after=0, offset=1).values == ((2, b"3"),)
    assert page(bytes_max=1).values == ((0, b"1"),)
    assert store.tasks.pull_elements(maps.run, "each", after=-1, offset=0, limit=9, bytes_max=9) == XComPage((), 0, 0)


# --- how many there are --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "so_far", "at_the_end"),
    [
        (OF_SOURCE, (3, False), (3, True)),
        (Zip((OF_SOURCE, Values(5))), (3, False), (3, True)),
        (Zip((OF_SOURCE, Values(2))), (2, True), (2, True)),
        (Zip((OF_SOURCE, Values(3))), (3, True), (3, True)),
        (Zip((OF_SOURCE, Values(5)), is_longest=True), (3, False), (5, True)),
        (Zip((OF_SOURCE, Values(2)), is_longest=True), (3, False), (3, True)),
        (Concat((Values(2), OF_SOURCE)), (5, False), (5, True)),
        (Concat((OF_SOURCE, Values(2))), (3, False), (5, True)),
        (Product((OF_SOURCE, Values(2))), (6, False), (6, True)),
        (Product((Values(2), OF_SOURCE)), (0, False), (6, True)),
        (Product((OF_SOURCE, Concat((Values(1), Values(1))))), (6, False), (6, True)),
    ],
)
def test_a_value_that_there_is_keeps_its_index(
    source: Source, so_far: tuple[int, bool], at_the_end: tuple[int, bool]
) -> None:
    assert available_of(source, lambda _: Available(3, is_complete=False)) == so_far
    assert available_of(source, lambda _: Available(3, is_complete=True)) == at_the_end


def test_only_the_elements_of_a_task_that_emits_can_be_expanded_over() -> None:
    def check(**source: Any) -> None:
        over = MapSpec(OF_SOURCE)
        check_dag(DagSpec("d", tasks=(TaskSpec("source", "Op", **source), TaskSpec("e", "Op", ("source",), map=over))))

    check(emits=True)
    with pytest.raises(ValueError, match="is expanded over the elements of 'source', which emits none"):
        check()
    with pytest.raises(ValueError, match="is mapped, and cannot emit elements"):
        check(emits=True, map=MapSpec(Values(1)))


def test_a_source_that_ends_after_all_instances_lets_go_on_what_is_below(store: Store, query: Query) -> None:
    maps = Emitting(store, query)
    source = maps.begin()
    maps.emit(source, 0, 10)
    assert maps.run_some(9) == [0]
    maps.end(source, StepSucceeded(emitted=Emitted(1, ())))
    assert (maps.own()["state"], task_states(store, maps.run)["total"]) == ("success", TaskState.SCHEDULED)


def test_a_cleared_map_that_waits_for_its_values_is_not_looked_at_again(store: Store, query: Query) -> None:
    """However many instances it has: its run is looked at when something happens, and holds up nobody meanwhile."""
    maps = Emitting(store, query, spec={"window": 64})
    source = maps.begin()
    for first in range(0, TASKS_PER_RUN_MAX + 100, 200):
        store.tasks.emit(maps.epoch, source.id, source.token, Emitted(first, values(*range(first, first + 200))))
    maps.end(source, StepSucceeded())
    maps.run_all()
    done = store.tasks.clear_many(maps.run)
    while done.left is not None:
        done = store.tasks.clear_on(done.left)
    for _ in range(20):
        if not store.scheduling.plan(maps.epoch).evaluated:
            break
    else:
        raise AssertionError("it is looked at again and again")
    source = maps.begin()
    store.tasks.emit(maps.epoch, source.id, source.token, Emitted(0, values(*range(3))))
    maps.end(source, StepSucceeded())
    maps.run_all()
    assert set(maps.instances()[3:]) == {"removed"}, "those that have no value any more are removed"
    assert maps.ended() == "success"
