"""The table of task states: it is whole, without contradictions, and has the transitions of Airflow's deferral."""

from __future__ import annotations

from collections import Counter

import pytest
from tests import documents

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import states
from headgate.scheduling.states import FAIL_METHOD, TERMINAL, TRANSITIONS, IllegalTransition

S = TaskState

# Airflow's transitions of a deferrable task: (event, from, to, trigger_id, next_method).
OF_AIRFLOW = [
    ("deferred", S.RUNNING, S.DEFERRED, "set", "set"),
    ("event", S.DEFERRED, S.SCHEDULED, "clear", "set"),
    ("timed_out", S.DEFERRED, S.SCHEDULED, "clear", FAIL_METHOD),
    ("trigger_failed", S.DEFERRED, S.SCHEDULED, "clear", FAIL_METHOD),
    ("cleared", S.DEFERRED, S.NONE, "clear", "clear"),
    ("picked_up", S.SCHEDULED, S.RUNNING, "-", "-"),
    ("succeeded", S.RUNNING, S.SUCCESS, "-", "-"),
    ("failed", S.RUNNING, S.FAILED, "-", "-"),
]
# Transitions that it has besides, whatever they do to the columns.
OTHERS_OF_AIRFLOW = {
    (S.NONE, S.SCHEDULED),
    (S.DEFERRED, S.REMOVED),
    (S.RUNNING, S.UP_FOR_RETRY),
    (S.UP_FOR_RETRY, S.SCHEDULED),
    (S.DEFERRED, S.FAILED),
}


def arrows() -> set[tuple[TaskState, TaskState]]:
    return {(source, row.to) for row in TRANSITIONS for source in row.from_}


@pytest.mark.parametrize(("event", "source", "to", "trigger_id", "next_method"), OF_AIRFLOW)
def test_every_transition_of_airflows_deferral_is_there(
    event: str, source: TaskState, to: TaskState, trigger_id: str, next_method: str
) -> None:
    row = states.move(event, source)
    assert (row.to, row.trigger_id, row.next_method) == (to, trigger_id, next_method)


def test_every_other_transition_of_airflow_is_there() -> None:
    assert OTHERS_OF_AIRFLOW - arrows() == set()


def test_no_event_means_two_things_in_one_state() -> None:
    pairs = Counter((row.event, source) for row in TRANSITIONS for source in row.from_)
    assert [pair for pair, times in pairs.items() if times > 1] == []
    assert all(row.from_ for row in TRANSITIONS)


def test_every_state_can_be_reached_and_all_but_the_terminal_ones_left_without_a_user() -> None:
    reached = {S.NONE}
    while more := {to for source, to in arrows() if source in reached} - reached:
        reached |= more
    assert reached == set(TaskState)
    left = {source for row in TRANSITIONS if row.by != "user" for source in row.from_}
    assert left == states.UNFINISHED


def test_a_terminal_state_is_left_by_clearing_or_if_a_user_has_a_failure_count_as_success() -> None:
    left = {(row.event, row.to): row.from_ & TERMINAL for row in TRANSITIONS if row.from_ & TERMINAL}
    assert left == {("cleared", S.NONE): TERMINAL, ("overruled", S.SUCCESS): {S.FAILED, S.UPSTREAM_FAILED}}


def test_a_task_has_a_trigger_exactly_while_it_is_deferred() -> None:
    for row in TRANSITIONS:
        assert (row.trigger_id == "set") == (row.to is S.DEFERRED), row
        assert (row.trigger_id == "clear") == (row.from_ == {S.DEFERRED}), row
        assert S.DEFERRED not in row.from_ or row.from_ == {S.DEFERRED}, row


def test_a_try_begins_without_the_callback_method_of_an_earlier_one() -> None:
    for row in TRANSITIONS:
        if row.to in (S.UP_FOR_RETRY, S.RESTARTING):
            assert row.next_method == "clear", row
        if row.to is S.NONE and S.RESTARTING not in row.from_:  # it was cleared on the way there
            assert row.next_method == "clear", row


def test_a_transition_that_the_table_does_not_have_is_refused() -> None:
    with pytest.raises(IllegalTransition, match="a task that is success cannot have 'deferred' happen to it") as told:
        states.move("deferred", S.SUCCESS)
    assert (told.value.event, told.value.state) == ("deferred", S.SUCCESS)
    with pytest.raises(KeyError):
        states.move("no such event", S.NONE)
    with pytest.raises(KeyError):
        states.of("no such event")


def test_the_table_is_shown_whole_as_markdown() -> None:
    lines = documents.transitions().splitlines()
    assert lines[0] == "| From | Event | To | trigger_id | next_method | By | Action |"
    assert len(lines) == len(TRANSITIONS) + 2
    assert {line.count("|") for line in lines} == {8}
    assert "| deferred | `timed_out` | scheduled | clear | `__fail__` |" in documents.transitions()
    assert "| none, scheduled, up_for_retry | `removed` | removed | - | clear |" in documents.transitions()
