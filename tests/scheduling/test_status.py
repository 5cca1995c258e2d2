"""What is wrong, and what first: for each fact the problem that names it, its severity and its next step."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.scheduling.status import DIFFER_S, STREAMS_TOLD_MAX, counted_rows, exit_code, problems
from headgate.scheduling.status_facts import (
    COUNTED_MAX,
    BrokerAway,
    Drifted,
    FullBacklog,
    GoneDag,
    Letters,
    Overdue,
    ReturnedWatcher,
    StatusFacts,
    TroubledTrigger,
    Unclaimed,
)
from headgate.scheduling.why import DagFolder, RunnerEnds, Supervisor

QUEUE = ("default",)


def sup(**changes: Any) -> Supervisor:
    told: dict[str, Any] = {"epoch": 1, "hostname": "h", "pid": 7, "state": "alive", "heartbeat_age_s": 1.0}
    told |= {"capacity": 10, "queues": QUEUE, **changes}
    return Supervisor(**told)


def with_files(epoch: int, files: str, *, where: str = "w", age_s: float = DIFFER_S, **changes: Any) -> Supervisor:
    return sup(epoch=epoch, dag_folder=DagFolder(where, files, 0.0), dag_folder_age_s=age_s, **changes)


UP = (sup(),)


def late(what: Any) -> StatusFacts:
    return StatusFacts(UP, overdue=(Overdue(what, "etl", "r1", "a", 90.0), Overdue(what, "etl", "r1", "b", 120.0)))


def troubled(*triggers: TroubledTrigger) -> StatusFacts:
    return StatusFacts(UP, trigger_queues=QUEUE, troubled=triggers)


FAILED = "it has failed 4 times, the last time 3.0 s ago: TypeError"

PROBLEMS: list[tuple[str, str, StatusFacts, str, str]] = [
    # severity, reason, facts, in the sentence, in the command
    ("attention", "no_supervisor", StatusFacts(), "no supervisor is alive", "headgate up"),
    ("broken", "no_supervisor", StatusFacts(trigger_queues=QUEUE), "alive: triggers stand still", "headgate up"),
    ("broken", "no_supervisor", StatusFacts(has_active_runs=True), "alive: runs stand still", "headgate up"),
    (
        "attention",
        "dag_files_differ",
        StatusFacts((with_files(1, "f"), with_files(2, "g"), with_files(3, "f"))),
        "supervisor 1 (pid 7 on h) and supervisor 2 (pid 7 on h) have different DAG files; and so 1 other pair",
        "triggerers list",
    ),
    (
        "attention",
        "supervisor_silent",
        StatusFacts((*UP, sup(epoch=2, state="silent", heartbeat_age_s=45.0))),
        "supervisor 2 (pid 7 on h) is silent for 45 s; another takes its triggers over",
        "triggerers list",
    ),
    (
        "attention",
        "supervisor_silent",
        StatusFacts((*UP, sup(epoch=3, state="gone"), sup(epoch=2, state="gone"))),
        "2 supervisors left without a word, the newest: the process of supervisor 3 (pid 7 on h) is gone",
        "triggerers list",
    ),
    ("broken", "queue_unserved", StatusFacts(UP, trigger_queues=("gpu",)), "serves the queue 'gpu'", "--queue gpu"),
    ("broken", "tasks_unserved", StatusFacts(UP, task_queues=("gpu",)), "runs tasks of the queue 'gpu'", "tasks list"),
    ("broken", "no_workers", StatusFacts((sup(workers=0),), has_active_runs=True), "triggers alone", "headgate up"),
    (
        "attention",
        "unclaimed",
        StatusFacts(UP, unclaimed=(Unclaimed("a", "default", 70.0, "the log"), Unclaimed("b", "default", 90.0))),
        "claimed 2 triggers of the queue 'default', and nobody owns 1 stream: the log; the oldest, b, was added",
        "why b",
    ),
    (
        "broken",
        "unclaimed",
        StatusFacts((sup(open_triggers=10),), unclaimed=(Unclaimed("a", "default", 70.0),)),
        "claimed 1 trigger of the queue 'default'; all that serve it are at their capacity",
        "why a",
    ),
    (
        "broken",
        "stream_waits",
        troubled(TroubledTrigger("big", FAILED, 4, stream="the log")),
        f"the stream the log stands still until big is back; big: {FAILED}",
        "why big",
    ),
    (
        "attention",
        "stream_waits",
        troubled(TroubledTrigger("big", FAILED, 1, stream="the log"), TroubledTrigger("b", "x", 2, stream="the log")),
        "stands still until big, b are back",
        "why big",
    ),
    (
        "attention",
        "failing",
        troubled(TroubledTrigger("a", "x", 1), TroubledTrigger("b", "y", 9)),
        "2 triggers are failing, and started again and again: a, b",
        "why b",
    ),
    ("attention", "unreadable", troubled(TroubledTrigger("a", "it", 1, is_unreadable=True)), "a, it", "why a"),
    ("attention", "brake", troubled(TroubledTrigger("a", "it", hold="brake")), "too many messages", "why a"),
    ("attention", "quarantine", troubled(TroubledTrigger("a", "it", hold="quarantine")), "harm to others", "why a"),
    ("notice", "paused", troubled(TroubledTrigger("a", "it", hold="paused", stream="s")), "paused by a user", "why a"),
    ("broken", "tasks_wait_timed_out", late("wait_timed_out"), "the longest for 2 min: etl r1 b", "why etl r1 b"),
    (
        "broken",
        "tasks_deadline_over",
        late("deadline_over"),
        "2 tasks at work beyond an execution_timeout",
        "why etl r1 b",
    ),
    ("broken", "tasks_retry_due", late("retry_due"), "another try", "why etl r1 b"),
    ("broken", "tasks_owner_gone", late("owner_gone"), "supervisors that are gone", "why etl r1 b"),
    ("attention", "tasks_scheduled", late("scheduled"), "free worker or pool", "why etl r1 b"),
    (
        "attention",
        "dead_letters",
        StatusFacts(UP, letters=(Letters("a", 3, 90.0), Letters("b", 1, 5.0))),
        "4 open dead letters, the newest stored 5.0 s ago: a (3), b (1)",
        "dlq list",
    ),
    (
        "broken",
        "supervisor_impeded",
        StatusFacts(UP, impeded=((UP[0].epoch, "tasks: no key"), (9_999, "of one that is gone"))),
        "cannot use the database for tasks: no key",
        "triggerers list",
    ),
    (
        "attention",
        "logs_unwritten",
        StatusFacts(UP, unlogged=((UP[0].epoch, "[Errno 28] No space left on device"), (9_999, "of one that is gone"))),
        "cannot write logs of tasks: [Errno 28] No space left on device",
        "triggerers list",
    ),
    (
        "attention",
        "runner_ends",
        StatusFacts(
            (
                sup(runner_ends=RunnerEnds(4, 600.0, "killed by SIGKILL", 12.0)),
                sup(epoch=2, runner_ends=RunnerEnds(3, 600.0, "x")),
                sup(epoch=4, runner_ends=RunnerEnds(2, 600.0, "x")),
            )
        ),
        "the runner of supervisor 1 (pid 7 on h) has ended 4 times within 10 min, the last time so: killed by SIGKILL; "
        "the next one starts after 12 s; and so those of 1 other supervisor",
        "triggerers list",
    ),
    (
        "notice",
        "draining",
        StatusFacts((*UP, sup(epoch=2, is_draining=True)), trigger_queues=QUEUE),
        "supervisor 2 (pid 7 on h) drains and claims nothing",
        "triggerers list",
    ),
    (
        "attention",
        "draining",
        StatusFacts((sup(is_draining=True), sup(epoch=2, is_draining=True)), trigger_queues=QUEUE),
        "supervisor 1 (pid 7 on h), supervisor 2 (pid 7 on h) drain and claim nothing, and there is no other",
        "headgate up",
    ),
    ("notice", "draining", StatusFacts((sup(is_draining=True),)), "drains and claims nothing", "triggerers list"),
    (
        "broken",
        "scheduling_fails",
        StatusFacts(UP, passing_over=((UP[0].epoch, "the run etl r1: KeyError: 'x'"), (9_999, "of one that is gone"))),
        "does not schedule the run etl r1: KeyError: 'x'",
        "triggerers list",
    ),
    (
        "broken",
        "broker_away",
        StatusFacts(UP, away=(BrokerAway(1, "a", 20.0, "refused"), BrokerAway(2, "b", 90.0, "OSError: refused"))),
        "the broker of b has been away for 1 min 30 s: OSError: refused; and those of 1 other stream",
        "streams show 2",
    ),
    (
        "attention",
        "drift",
        StatusFacts(UP, drifted=(Drifted(1, "a", "went back"),)),
        "the brokers of 1 stream are not where headgate has left them, messages come again: a: went back",
        "streams drift 1",
    ),
    (
        "attention",
        "drift",
        StatusFacts(UP, drifted=(Drifted(1, "a", "went back"), Drifted(2, "b", "moved by others"))),
        "streams are not where headgate has left them, messages were passed over, or may be: b: moved by others, a: w",
        "streams drift 2",
    ),
    ("attention", "import_errors", StatusFacts(UP, import_errors=(("a.py", "no"),)), "parsed: a.py: no", "dags list"),
    (
        "attention",
        "import_errors",
        StatusFacts(UP, import_errors=(("a.py", "no"), ("b.py", "no"))),
        "2 DAG files cannot be parsed: a.py, b.py",
        "dags list",
    ),
    (
        "attention",
        "watcher_returned",
        StatusFacts(UP, returned=(ReturnedWatcher("w", "the log", 240.0), ReturnedWatcher("x", "the log", 130.0))),
        "the watcher w left the stream the log 4 min ago, because its trigger returned; and so did 1 other watcher",
        "headgate why w",
    ),
    (
        "attention",
        "dag_gone",
        StatusFacts(UP, gone_dags=(GoneDag("etl", "/dags/etl.py", 3, 240.0), GoneDag("b", "/dags/b.py", 1, 130.0))),
        "3 runs of the DAG 'etl', which /dags/etl.py has not had for 4 min, cannot go on; and so those of 1 other DAG",
        "headgate runs list etl",
    ),
    (
        "attention",
        "events_dropped",
        StatusFacts(UP, full_backlogs=(FullBacklog("etl", 60), FullBacklog("b", 1))),
        "60 events of assets made no run of the DAG 'etl', for which as many wait as may; the oldest are dropped",
        "headgate why etl",
    ),
    ("attention", "failed_runs", StatusFacts(UP, failed_runs=(("etl", "r1"),)), "1 run failed", "--since 1d"),
    ("attention", "keys", StatusFacts(UP, old_keys=1), "1 older key is still needed", "keys rotate"),
]


@pytest.mark.parametrize(("severity", "reason", "facts", "text", "next_"), PROBLEMS, ids=lambda value: None)
def test_a_problem_is_named_with_its_severity_and_what_to_look_at(
    severity: str, reason: str, facts: StatusFacts, text: str, next_: str
) -> None:
    (problem,) = problems(facts)
    assert (problem.severity, problem.reason) == (severity, reason)
    assert text in problem.text
    assert next_ in problem.next
    assert exit_code([problem]) == {"broken": 2, "attention": 1, "notice": 0}[severity]


@pytest.mark.parametrize(
    ("waiting", "reason", "words"),
    [
        ("trigger_queues", "queue_unserved", "serve the queue"),
        ("task_queues", "tasks_unserved", "run tasks of the queue"),
    ],
)
def test_a_queue_that_only_a_supervisor_that_drains_serves_is_told(waiting: str, reason: str, words: str) -> None:
    supervisors = (*UP, sup(epoch=2, queues=("gpu",), is_draining=True))
    told, draining = problems(StatusFacts(supervisors, **{waiting: ("gpu",)}))  # type: ignore[arg-type]
    assert (told.severity, told.reason, draining.reason) == ("attention", reason, "draining")
    assert f"only supervisors that drain {words} 'gpu', in which " in told.text


def test_everything_is_well() -> None:
    facts = StatusFacts(UP, trigger_queues=QUEUE, task_queues=QUEUE, has_active_runs=True)
    assert problems(facts) == []
    assert exit_code([]) == 0


def test_the_worst_comes_first() -> None:
    facts = StatusFacts(
        UP,
        letters=(Letters("a", 1, 1.0),),
        trigger_queues=("gpu",),
        troubled=(TroubledTrigger("p", "x", hold="paused"),),
    )
    assert [problem.severity for problem in problems(facts)] == ["broken", "attention", "notice"]


def test_triggers_that_run_again_or_are_told_with_their_stream_are_not_told_as_failing() -> None:
    assert problems(troubled(TroubledTrigger("a", FAILED, 4, stream="s", is_back=True))) == []
    found = problems(troubled(TroubledTrigger("a", FAILED, 4, stream="s")))
    assert [problem.reason for problem in found] == ["stream_waits"]


def test_what_nobody_serves_is_not_told_again_as_unclaimed() -> None:
    waiting = (Unclaimed("a", "gpu", 70.0),)
    found = problems(StatusFacts(UP, trigger_queues=("gpu",), unclaimed=waiting))
    assert [problem.reason for problem in found] == ["queue_unserved"]
    drains = (*UP, sup(epoch=2, queues=("gpu",), is_draining=True))
    found = problems(StatusFacts(drains, trigger_queues=("gpu",), unclaimed=waiting))
    assert [problem.reason for problem in found] == ["queue_unserved", "draining"]


def test_only_some_streams_have_a_sentence_of_their_own() -> None:
    each = [TroubledTrigger(f"w{number}", "x", 9, stream=f"s{number}") for number in range(STREAMS_TOLD_MAX + 3)]
    *_, last = found = problems(troubled(*each))
    assert len(found) == STREAMS_TOLD_MAX + 1
    assert last.text == "3 other streams with subscribers that are absent"
    assert len(last.details) == 3


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1 run"), (2, "2 runs"), (COUNTED_MAX, f"{COUNTED_MAX:,} runs or more")]
)
def test_a_list_that_is_full_says_that_there_may_be_more(number: int, text: str) -> None:
    assert counted_rows(range(number), "run") == text


def test_the_digests_of_files_that_differ_are_told_each_once() -> None:
    (found,) = problems(StatusFacts(tuple(with_files(number, f"{number:032x}"[::-1]) for number in (1, 2, 3))))
    assert found.next == "headgate triggerers list --wide"
    assert len(found.details) == 6
    assert [line.rpartition(" has ")[2] for line in found.details[3:]] == [f"{n}0000000, for 2 min" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "other",
    [
        with_files(2, "f"),
        with_files(2, "g", age_s=DIFFER_S - 1.0),
        with_files(2, "g", where="another folder"),
        with_files(2, "g", queues=("reports",)),
        with_files(2, "g", state="silent"),
        sup(epoch=2),
    ],
)
def test_files_are_told_to_differ_only_if_they_have_to_be_the_same(other: Supervisor) -> None:
    found = problems(StatusFacts((with_files(1, "f"), other)))
    assert "dag_files_differ" not in [problem.reason for problem in found]
