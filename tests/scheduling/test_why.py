"""Why something waits: for each fact that can hold a task or a trigger up, the answer that names it."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.why import (
    Pool,
    RuleFacts,
    RunnerEnds,
    SignalFacts,
    StoredEvent,
    StreamFacts,
    StruckMessage,
    Supervisor,
    TaskFacts,
    TriggerFacts,
)
from headgate.scheduling.why_tasks import explain_task
from headgate.scheduling.why_triggers import explain_trigger
from headgate.scheduling.words import command, shortened, span

S = TaskState


def sup(**changes: Any) -> Supervisor:
    told: dict[str, Any] = {
        "epoch": 1,
        "hostname": "h",
        "pid": 7,
        "state": "alive",
        "heartbeat_age_s": 1.0,
        "capacity": 10,
        "queues": ("default",),
    }
    return Supervisor(**(told | changes))


def trig(**changes: Any) -> TriggerFacts:
    told: dict[str, Any] = {"id": 17, "classpath": "a.B", "queue": "default", "age_s": 60.0, "task": ("etl", "r1", "a")}
    return TriggerFacts(**(told | changes))


def task(state: TaskState, **changes: Any) -> TaskFacts:
    told: dict[str, Any] = {
        "dag": "etl",
        "run_id": "r1",
        "task_id": "a",
        "state": state,
        "pool": Pool("default_pool", 8),
    }
    return TaskFacts(**(told | changes))


ALIVE = sup()
FULL = Pool("p", 2, 2, (("etl", "r0", "x", 2),))

FAILED = "KeyError: 'x'"
TASKS: list[tuple[str, TaskFacts, list[Supervisor], str, str]] = [
    # reason, facts, supervisors, in the headline, in what comes next
    ("passed_over", task(S.NONE), [ALIVE, sup(passed_over=(("run etl r1", FAILED),))], "failed with the run", "log"),
    ("retry_due", task(S.UP_FOR_RETRY), [sup(passed_over=(("DAG etl", FAILED),))], "due", "scheduler"),
    ("upstream", task(S.NONE, upstream=(("x", S.DEFERRED),)), [sup(passed_over=(("run etl r1", FAILED),))], "x (", ""),
    ("running", task(S.RUNNING, owner=ALIVE), [sup(passed_over=(("run etl r1", FAILED),))], "runs on a worker", ""),
    (
        "passed_over",
        task(S.UP_FOR_RETRY, map_index=3),
        [sup(passed_over=(("run etl r2", "X"), ("task etl r1 a[3]", FAILED)))],
        "task etl r1 a[3]",
        "tried again",
    ),
    (
        "passed_over",
        task(S.NONE),
        [sup(passed_over=(("rule about the signals 'k' of the run etl r1", FAILED),))],
        "rule about the signals 'k'",
        "tried again",
    ),
    ("about_to", task(S.NONE), [sup(passed_over=(("run etl r10", FAILED), ("run x r1", FAILED)))], "about to", ""),
    ("about_to", task(S.NONE), [ALIVE, sup(state="silent", passed_over=(("run etl r1", FAILED),))], "about to", ""),
    ("ended", task(S.SUCCESS), [sup(passed_over=(("run etl r1", FAILED),))], "", ""),
    ("about_to", task(S.NONE), [ALIVE], "about to be scheduled", "scheduler"),
    (
        "upstream",
        task(S.NONE, upstream=(("x", S.DEFERRED),)),
        [ALIVE],
        "1 of 1 upstream tasks: x (deferred)",
        "why etl",
    ),
    ("about_to", task(S.NONE, upstream=(("x", S.FAILED),)), [ALIVE], "be upstream_failed", "scheduler"),
    ("dag_paused", task(S.NONE, is_paused=True), [ALIVE], "etl is paused", "dags unpause etl"),
    (
        "run_queued",
        task(S.NONE, run_state="queued", max_active_runs=1, other_runs=("r0",)),
        [ALIVE],
        "1 of 1 runs",
        "one of these ends: r0",
    ),
    ("run_queued", task(S.NONE, run_state="queued"), [ALIVE], "has not begun", "the scheduler begins it"),
    ("dag_paused", task(S.NONE, run_state="queued", is_paused=True), [ALIVE], "etl is paused", "dags unpause etl"),
    ("dag_removed", task(S.SCHEDULED, is_dag_removed=True), [ALIVE], "no DAG file has the DAG etl", "put the DAG back"),
    (
        "dag_paused",
        task(S.UP_FOR_RETRY, retry_in_s=-3.0, is_paused=True, last_error="boom"),
        [ALIVE],
        "etl is paused",
        "dags unpause etl",
    ),
    (
        "no_supervisor_for_queue",
        task(S.DEFERRED, trigger=trig(owner=sup(state="fenced"))),
        [sup(epoch=2, queues=("other",))],
        "no living supervisor serves the queue 'default'",
        "--queues default",
    ),
    # Whatever else it waits for: nothing goes on without a supervisor, or while its DAG is paused.
    ("no_supervisor", task(S.NONE, run_state="queued"), [], "no supervisor is alive", "headgate up"),
    ("no_workers", task(S.NONE, run_state="queued"), [sup(workers=0)], "run triggers alone", "headgate up"),
    ("no_supervisor", task(S.NONE, upstream=(("x", S.SCHEDULED),)), [], "no supervisor is alive", "headgate up"),
    ("no_supervisor", task(S.UP_FOR_RETRY, retry_in_s=30.0), [sup(state="gone")], "no supervisor", "headgate up"),
    ("no_supervisor", task(S.DEFERRED, trigger=trig(), timeout_in_s=-5.0), [], "no supervisor is alive", "headgate up"),
    ("dag_paused", task(S.UP_FOR_RETRY, retry_in_s=30.0, is_paused=True), [ALIVE], "is paused", "dags unpause etl"),
    (
        "upstream",
        task(S.NONE, queue="gpu", upstream=(("x", S.RUNNING),)),
        [ALIVE],
        "1 of 1 upstream tasks: x (running)",
        "why etl",
    ),
    ("run_ended", task(S.NONE, run_state="failed"), [ALIVE], "its run has ended", "tasks clear"),
    ("not_in_dag", task(S.NONE, is_in_dag=False), [ALIVE], "no longer has it", "removes"),
    ("dag_unreadable", task(S.NONE, is_in_dag=False, unreadable="of a newer one"), [ALIVE], "newer", "stores it anew"),
    ("dag_removed", task(S.NONE, is_dag_removed=True), [ALIVE], "no DAG file has", "runs cancel"),
    ("no_supervisor", task(S.NONE), [], "no supervisor is alive", "headgate up"),
    ("dag_paused", task(S.SCHEDULED, is_paused=True), [ALIVE], "etl is paused", "dags unpause etl"),
    ("no_supervisor", task(S.SCHEDULED), [sup(state="silent", heartbeat_age_s=90.0)], "no supervisor", "headgate up"),
    (
        "no_supervisor_for_queue",
        task(S.SCHEDULED, queue="gpu"),
        [ALIVE],
        "'gpu'; what is served: default",
        "--queues gpu",
    ),
    ("no_workers", task(S.SCHEDULED), [sup(workers=0)], "run triggers alone", "headgate up"),
    ("no_such_pool", task(S.SCHEDULED, pool=Pool("p", None)), [ALIVE], "no pool named 'p'", "pools set p"),
    ("larger_than_pool", task(S.SCHEDULED, pool_slots=9), [ALIVE], "the task needs 9", "pools set default_pool 9"),
    ("pool_full", task(S.SCHEDULED, pool=FULL, ahead=3), [ALIVE], "'p' is full: 2 of 2", "3 tasks are more urgent"),
    ("no_free_worker", task(S.SCHEDULED, since_s=5.0), [sup(tasks=4)], "5.0 s for a free worker", "more workers"),
    (
        "no_endless_worker",
        task(S.SCHEDULED, is_endless=True),
        [sup(endless_workers=2, endless_tasks=2)],
        "all 2 workers for endless tasks of the queue 'default' are taken",
        "endless_workers_max",
    ),
    (
        "moved",
        task(S.SCHEDULED, is_endless=True, moves=3, begins_in_s=4.0, last_error="killed by SIGKILL"),
        [sup(endless_workers=2)],
        "lost its worker 3 times in a row: killed by SIGKILL",
        "begins again in 4.0 s, in the same try",
    ),
    (
        "cannot_begin",
        task(S.SCHEDULED, begins_in_s=4.0, last_error="the DAG file a.py is not there"),
        [ALIVE],
        "it cannot begin: the DAG file a.py is not there",
        "a worker tries again in 4.0 s, in the same try",
    ),
    (
        "cannot_begin",
        task(S.SCHEDULED, begins_in_s=-4.0, last_error="the DAG file a.py is not there"),
        [ALIVE],
        "it cannot begin: the DAG file a.py is not there",
        "a worker tries again now, in the same try",
    ),
    ("no_free_worker", task(S.SCHEDULED, begins_in_s=-20.0, last_error="no"), [sup(tasks=4)], "waits", "more workers"),
    (
        "old_worker",
        task(S.SCHEDULED, old_owner=ALIVE),
        [ALIVE],
        "it was ended while a worker had it, which has not ended yet",
        "it begins when that worker is gone",
    ),
    ("running", task(S.RUNNING, owner=ALIVE, is_endless=True), [ALIVE], "runs on", "headgate tasks stop"),
    (
        "owner_fenced",
        task(S.RUNNING, owner=sup(state="fenced"), is_endless=True),
        [sup(epoch=2)],
        "was fenced",
        "begin it again, in the same try",
    ),
    ("running", task(S.RUNNING, owner=ALIVE, since_s=3.0), [ALIVE], "runs on a worker of supervisor 1", "no execution"),
    ("running", task(S.RUNNING, owner=ALIVE, deadline_in_s=90.0), [ALIVE], "runs on", "ended in 1 min 30 s"),
    ("overdue", task(S.RUNNING, owner=ALIVE, deadline_in_s=-2.0), [ALIVE], "over 2.0 s ago", "ends the worker"),
    ("owner_fenced", task(S.RUNNING, owner=sup(state="fenced")), [sup(epoch=2)], "was fenced", "fail this try"),
    ("draining", task(S.SCHEDULED), [sup(is_draining=True)], "takes nothing new: supervisor 1 (pid", "headgate up"),
    ("owner_ended", task(S.RUNNING, owner=sup(state="ended")), [], "no other is alive", "headgate up"),
    (
        "owner_silent",
        task(S.RUNNING, owner=sup(state="silent", heartbeat_age_s=40.0)),
        [sup(state="silent"), sup(epoch=2)],
        "silent for 40 s",
        "fences it",
    ),
    ("restarting", task(S.RESTARTING, owner=ALIVE), [ALIVE], "was cleared while it ran", "begins anew"),
    ("retry_delay", task(S.UP_FOR_RETRY, retry_in_s=30.0, last_error="x\ny"), [ALIVE], "failed: x y", "begins in 30 s"),
    ("retry_due", task(S.UP_FOR_RETRY, retry_in_s=-3.0), [ALIVE], "due for 3.0 s", "scheduler"),
    ("no_supervisor", task(S.UP_FOR_RETRY, retry_in_s=-3.0), [], "no supervisor is alive", "headgate up"),
    ("no_trigger", task(S.DEFERRED), [ALIVE], "trigger that is not there", "report"),
    ("running", task(S.DEFERRED, trigger=trig(owner=ALIVE)), [ALIVE], "has not fired", "trigger_id 17"),
    (
        "timed_out",
        task(S.DEFERRED, trigger=trig(owner=ALIVE), timeout_in_s=-5.0),
        [ALIVE],
        "timed out 5.0 s ago",
        "fail",
    ),
    (
        "waits_for_signal",
        task(S.DEFERRED, trigger=trig(signal=SignalFacts("a key", "ns", 3, 3, "loss below 0.1"))),
        [ALIVE],
        "under the key 'a key' in the namespace 'ns', loss below 0.1, later than version 3",
        "`headgate signals send 'a key' VALUE --namespace ns` sends one",
    ),
    (
        "waits_for_signal",
        task(S.NONE, rules=(RuleFacts("the end of b", "START"),)),
        [ALIVE],
        "none has met its rules: the end of b",
        "`headgate tasks start etl r1 a` starts it without a signal",
    ),
    ("unclaimed", task(S.DEFERRED, trigger=trig()), [ALIVE], "no supervisor has claimed", "within"),
    ("ended", task(S.SUCCESS, since_s=10.0), [], "succeeded 10 s ago", "tasks clear"),
    ("ended", task(S.FAILED, last_error="boom"), [], "boom", "tasks clear"),
    ("ended", task(S.SKIPPED), [], "skipped", "tasks clear"),
    *(
        ("ended", task(state, last_error="a signal stopped it: 'halt', version 3"), [], f"{how}: a signal stopped", "")
        for state, how in ((S.SKIPPED, "was skipped"), (S.SUCCESS, "it succeeded"))
    ),
    ("ended", task(S.REMOVED), [], "no longer has it", "nothing"),
    ("ended", task(S.UPSTREAM_FAILED, upstream=(("x", S.FAILED),)), [], "x failed", "clear etl r1 x --downstream"),
]

TRIGGERS: list[tuple[str, TriggerFacts, list[Supervisor], str, str]] = [
    # The causes of docs/deferral.md, "Why does it wait?", in its order.
    ("removed", trig(removed_age_s=5.0), [ALIVE], "removed 5.0 s ago", "does not run again"),
    ("removing", trig(removed_age_s=5.0, owner=ALIVE), [ALIVE], "still has it", "on_kill"),
    (
        "finished",
        trig(finished_age_s=5.0, task=None, watcher="w"),
        [ALIVE],
        "finished",
        "`headgate watchers restart w` has",
    ),
    ("orphan", trig(task=None), [ALIVE], "neither a watcher nor a task", "orphans --remove"),
    ("no_supervisor", trig(), [], "no supervisor is alive", "headgate up"),
    ("no_supervisor", trig(), [sup(state="silent")], "no supervisor is alive", "headgate up"),
    ("no_supervisor_for_queue", trig(queue="q"), [ALIVE], "'q'", "--queues q"),
    (
        "stream_elsewhere",
        trig(stream=StreamFacts("('inbox',)", 4, owner=sup(epoch=3))),
        [ALIVE],
        "its stream ('inbox',) is run by supervisor 3",
        "as soon as it has room",
    ),
    (
        "stream_too_large",
        trig(stream=StreamFacts("('inbox',)", 10)),
        [sup(open_triggers=1)],
        "has 10 triggers, and no supervisor",
        "takes a stream of any size",
    ),
    ("unclaimed", trig(stream=StreamFacts("('inbox',)", 9)), [sup(open_triggers=1)], "no supervisor has", "claims it"),
    (
        "stream_waits",
        trig(owner=ALIVE, stream=StreamFacts("s", 2, held_up_by=(("big", "it has failed: KeyError"),))),
        [ALIVE],
        "its stream s waits for big while that one does not run: it has failed: KeyError",
        "mended, paused or removed",
    ),
    (
        "broker_away",
        trig(owner=ALIVE, stream=StreamFacts("s", 1, away_s=75.0, away_error="ConnectionError: refused")),
        [ALIVE],
        "the broker of its stream has been away for 1 min 15 s: ConnectionError: refused",
        "the trigger fails with this error",
    ),
    ("at_capacity", trig(), [sup(open_triggers=10)], "at its capacity, 10", "capacity"),
    ("unclaimed", trig(), [sup(open_triggers=10), sup(epoch=2, open_triggers=9)], "claimed it yet", "poll_interval_s"),
    ("owner_fenced", trig(owner=sup(state="fenced")), [sup(epoch=2)], "fenced", "claim the trigger"),
    (
        "no_supervisor_for_queue",
        trig(owner=sup(state="silent")),
        [sup(state="silent"), sup(epoch=2, queues=("other",))],
        "what is served: other",
        "--queues default",
    ),
    ("owner_ended", trig(owner=sup(state="ended")), [], "no other is alive", "headgate up"),
    ("owner_silent", trig(owner=sup(state="silent")), [sup(state="silent")], "silent", "headgate up"),
    ("failing", trig(owner=ALIVE, failure_count=3, last_error="bad"), [ALIVE], "3 times in a row", "longer delay"),
    ("running", trig(owner=ALIVE), [ALIVE], "has not fired since", "trigger_id 17"),
    (
        "runner_ends",
        trig(owner=sup(runner_ends=RunnerEnds(3, 600.0, "killed by SIGKILL", 12.0))),
        [ALIVE],
        "ended 3 times within 10 min, the last time so: killed by SIGKILL; the next one starts after 12 s",
        "if memory is short",
    ),
    ("running", trig(owner=sup(runner_ends=RunnerEnds(2, 600.0, "x"))), [ALIVE], "has not fired", "trigger_id"),
    ("owner_drains", trig(owner=sup(is_draining=True)), [ALIVE], "was asked to stop, and ends", "another supervisor"),
    ("draining", trig(), [sup(is_draining=True)], "every supervisor of the queue 'default' was", "headgate up"),
    ("unclaimed", trig(), [sup(is_draining=True), sup(epoch=2)], "no supervisor has claimed it", "poll_interval_s"),
    ("running", trig(owner=ALIVE, newest_event=StoredEvent(5, 9.0)), [ALIVE], "newest event is 9.0 s old", "log"),
]


@pytest.mark.parametrize(("reason", "facts", "supervisors", "headline", "next_"), TASKS, ids=lambda value: None)
def test_a_task_is_explained(
    reason: str, facts: TaskFacts, supervisors: list[Supervisor], headline: str, next_: str
) -> None:
    answer = explain_task(facts, supervisors)

    assert answer.reason == reason
    assert headline in answer.headline
    assert next_ in answer.next
    assert ("try", "0 of 1") in answer.facts


@pytest.mark.parametrize(("reason", "facts", "supervisors", "headline", "next_"), TRIGGERS, ids=lambda value: None)
def test_a_trigger_is_explained(
    reason: str, facts: TriggerFacts, supervisors: list[Supervisor], headline: str, next_: str
) -> None:
    answer = explain_trigger(facts, supervisors)

    assert answer.reason == reason
    assert headline in answer.headline
    assert next_ in answer.next


def test_every_state_of_a_task_has_an_answer() -> None:
    assert {facts.state for _, facts, *_ in TASKS} == set(TaskState)


def test_all_that_is_in_the_way_is_said_and_the_nearest_cause_first() -> None:
    answer = explain_task(task(S.SCHEDULED, is_paused=True, pool=FULL, import_error="SyntaxError"), [])

    assert answer.reason == "dag_paused"
    also = [text for name, text in answer.facts if name == "also"]
    assert [text.split(":")[0] for text in also] == [
        "no supervisor is alive",
        "the pool 'p' is full",
        "the file of etl cannot be parsed",
    ]


def test_who_holds_a_pool_is_among_the_facts() -> None:
    assert ("holders", "etl r0 x (2)") in explain_task(task(S.SCHEDULED, pool=FULL), [ALIVE]).facts


def test_a_task_that_waits_behind_failures_of_its_trigger_says_so_first() -> None:
    facts = task(S.DEFERRED, trigger=trig(owner=ALIVE, failure_count=1, last_error="no such host"))

    answer = explain_task(facts, [ALIVE])

    assert (answer.reason, answer.headline) == ("failing", "it has failed once: no such host")


POISONED = {"owner": ALIVE, "task": None, "watcher": "w", "failure_count": 3, "last_error": "ValueError: no"}


def test_a_trigger_that_fails_on_a_message_says_which_and_when_it_goes_on_without_it() -> None:
    struck = StruckMessage("berlin:4711", 3, 0, 5)
    answer = explain_trigger(trig(**POISONED, struck=struck, last_failed_age_s=2.0), [ALIVE])
    assert answer.reason == "poison"
    assert answer.headline == (
        "it fails on message 'berlin:4711' (3 of 5 deliveries), the last time 2.0 s ago: ValueError: no"
    )
    assert answer.next == (
        "after the last of these deliveries the message goes to the dead letters, and it goes on without it; "
        "until then its shared stream stands still"
    )


@pytest.mark.parametrize(
    ("others", "text"), [(1, "the 1 other of its shared stream waits"), (3, "the 3 others of its shared stream wait")]
)
def test_a_trigger_that_fails_on_a_message_says_who_waits_for_it(others: int, text: str) -> None:
    facts = trig(**POISONED, struck=StruckMessage("k", 3, 0, 5), others_of_stream=others)
    assert explain_trigger(facts, [ALIVE]).next.endswith(f"until then {text}")


def test_a_message_that_is_never_passed_over_says_so_and_one_that_kills_says_how_often() -> None:
    answer = explain_trigger(trig(**POISONED, struck=StruckMessage("k", 7, 2, 0)), [ALIVE])
    assert "(7 deliveries, 2 of which ended the runner)" in answer.headline
    assert "because `max_deliveries` is 0" in answer.next


def test_a_trigger_that_has_recovered_tells_its_last_failure_and_what_it_was_passed_over_as_facts() -> None:
    facts = trig(
        owner=ALIVE,
        last_error="ValueError: no\n\nTraceback (most recent call last):\n  x",
        last_failed_age_s=90.0,
        passed_over=2,
    )
    answer = explain_trigger(facts, [ALIVE])
    assert answer.reason == "running"
    assert ("last failure", "1 min 30 s ago: ValueError: no") in answer.facts
    assert ("passed over", "2 messages, listed by `headgate dlq list`") in answer.facts


def test_a_trigger_stopped_by_the_brake_says_why_and_where_its_messages_are() -> None:
    facts = trig(owner=ALIVE, task=None, watcher="w", hold="brake", hold_reason="it failed too often on 21 messages")
    answer = explain_trigger(facts, [ALIVE])
    assert answer.reason == "brake"
    assert "it failed too often on 21 messages" in answer.headline
    assert "headgate triggers release w" in answer.next
    assert "headgate dlq list" in answer.next


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("ValueError: a\nb\n\nTraceback (most recent call last):\n  x\nValueError: a", "ValueError: a b"),
        ("two errors\n\n  + Exception Group Traceback (most recent call last):\n  |  x", "two errors"),
        ("Traceback (most recent call last):\n  x\nValueError: a\n", "ValueError: a"),
        (None, ""),
        (
            "the queue " + "x" * 400 + ": set it to 1000",
            "the queue " + "x" * 239 + "…" + "x" * 134 + ": set it to 1000",
        ),
    ],
)
def test_the_headline_of_an_error_is_one_line_without_a_traceback(error: str | None, text: str) -> None:
    assert shortened(error) == text


def test_an_error_is_shown_without_its_traceback() -> None:
    error = "OSError: no such host\n\nTraceback (most recent call last):\n  File x"

    assert explain_trigger(trig(owner=ALIVE, failure_count=1, last_error=error), [ALIVE]).headline.endswith(
        "it has failed once: OSError: no such host"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (-2.5, "2.5 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (90_000, "1 d 1 h"),
        (119.6, "2 min"),
    ],
)
def test_a_span_is_written_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_commands_are_written_as_a_shell_takes_them_whatever_the_names_are() -> None:
    facts = task(S.SCHEDULED, dag="my dag", run_id="it's $HOME", pool=Pool("big; rm", None))
    assert "`headgate pools set 'big; rm' SLOTS`" in explain_task(facts, [ALIVE]).next
    paused = task(S.NONE, dag="my dag", run_id="it's $HOME", is_paused=True)
    assert explain_task(paused, [ALIVE]).next == "`headgate dags unpause 'my dag'`"
    assert command("why", "etl", "it's $HOME", "a[3]") == """headgate why etl 'it'"'"'s $HOME' 'a[3]'"""
