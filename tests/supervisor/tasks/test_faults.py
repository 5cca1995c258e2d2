"""What nobody foresaw costs what it is about a while: other runs, other duties and the supervisor go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.store import ends
from tests.store.harness import QUEUES, Clock, OpenStore, Query
from tests.store.scheduling.test_planning import Planned
from tests.supervisor.tasks.core_harness import Scene
from tests.supervisor.tasks.test_dag_files import Scene as Files
from tests.supervisor.tasks.test_scheduler import Driven
from tests.supervisor.tasks_harness import WAIT, S, Tasks, import_errors, task_states

from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.queries import GetTaskStates
from headgate.protocol.messages.runner import FiredEvent, StateChanges
from headgate.protocol.messages.steps import StepSucceeded, XCom
from headgate.protocol.values import decode_value
from headgate.store.errors import DatabaseAway, ItemFailed, LeaseLost, RowsRefused
from headgate.store.ids import DagRunId
from headgate.store.scheduling import planning
from headgate.store.store import Store
from headgate.store.tasks import deferral, values
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.queries import QueryRefused, StoreQueries
from headgate.supervisor.tasks import faults
from headgate.supervisor.tasks.faults import WAIT_MAX_S, WAIT_S, Faults
from headgate.supervisor.triggers.intake import Intake


def failing(
    patch: pytest.MonkeyPatch, owner: Any, name: str, is_bad: Callable[..., bool], error: Exception | None = None
) -> list[object]:
    """Have a function fail for some of its arguments; return a list that grows with each failure."""
    inner = getattr(owner, name)
    failures: list[object] = []

    def call(*arguments: Any, **options: Any) -> Any:
        if is_bad(*arguments):
            failures.append(arguments)
            raise error or KeyError("nobody foresaw it")
        return inner(*arguments, **options)

    patch.setattr(owner, name, call)
    return failures


@pytest.fixture
def driven(open_store: OpenStore, query: Query) -> Driven:
    clock = Clock()
    made = Driven(Planned(open_store(clock=clock), query), clock)
    store = made.run.store
    store.tasks.save_file(made.run.epoch, "etl.py", [DagSpec("etl", tasks=made.run.spec.tasks, max_active_runs=9)])
    assert store.tasks.create_run("etl", "r2")
    return made


def states(driven: Driven) -> list[S]:
    store = driven.run.store
    return [task_states(store, run)["a"] for run in sorted({driven.run.run, driven.run.run + 1})]


def test_a_run_that_cannot_be_evaluated_is_passed_over_and_tried_again_less_and_less_often(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = driven.run.run
    with monkeypatch.context() as patch, capture_logs() as logs:
        failures = failing(patch, planning._Evaluation, "evaluate", lambda _, run: run.id == bad)
        driven.settle()
        assert states(driven) == [S.NONE, S.SCHEDULED], "the other run goes on"
        assert driven.scheduler.troubles() == [("run etl r1", "KeyError: 'nobody foresaw it'")]
        (said,) = (line for line in logs if line["log_level"] == "error")
        assert said["which"] == "run etl r1"
        assert isinstance(said["exc_info"], KeyError)
        for _ in range(20):  # whatever happens meanwhile
            driven.scheduler.notify()
            driven.settle()
        assert len(failures) == 1
        driven.advance(2 * WAIT_S)
        driven.scheduler.notify()
        driven.settle()
        assert len(failures) == 2
        driven.advance(1.5 * WAIT_S)
        driven.scheduler.notify()
        driven.settle()
        assert len(failures) == 2, "it waits for longer than the first time"
    driven.advance(2 * WAIT_S)
    driven.settle()  # the query finds it, which is due every few seconds
    assert states(driven) == [S.SCHEDULED, S.SCHEDULED]
    assert driven.scheduler.troubles() == []


def test_one_that_has_failed_long_ago_waits_no_longer_than_one_that_fails_first(store: Store) -> None:
    found = Faults(store.scheduling)
    failed = ItemFailed("run", 1, "KeyError: 'x'")
    waits = []
    now = 0.0
    for after in (0.0, WAIT_S * 2, WAIT_MAX_S * 3):
        now += after
        found.step(now)
        found.step(now)  # once to try it again, once to forget it
        with capture_logs() as logs:
            assert found.pass_over(failed, now)
        waits.append(logs[0]["failures"])
    assert waits == [1, 2, 1]


def test_more_than_may_be_passed_over_have_the_duty_wait(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "ITEMS_MAX", 1)
    failures = failing(monkeypatch, planning._Evaluation, "evaluate", lambda _, run: True)
    driven.settle()
    assert len(failures) == 2
    passed_over, (duty, error) = driven.scheduler.troubles()
    assert passed_over == ("run etl r1", "KeyError: 'nobody foresaw it'")
    assert duty == "duty 'evaluate runs'"
    assert error.endswith("has failed: KeyError: 'nobody foresaw it'")
    for _ in range(5):
        driven.scheduler.notify()
        driven.settle()
    assert len(failures) == 2


@pytest.mark.parametrize("error", [ValueError("no row is named"), RowsRefused("by the end of the transaction")])
def test_a_duty_that_fails_as_a_whole_waits_alone(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with monkeypatch.context() as patch:
        failures = failing(patch, type(driven.run.store.tasks), "retry_due", lambda *_: True, error)
        driven.scheduler._retries.due_at = 0.0
        driven.settle()
        assert len(failures) == 1
        assert states(driven) == [S.SCHEDULED, S.SCHEDULED], "the others are run"
        ((name, told),) = driven.scheduler.troubles()
        assert name == "duty 'retry tasks'"
        assert str(error) in told
        driven.scheduler._retries.due_at = 0.0  # whatever makes it due
        driven.settle()
        assert len(failures) == 1
        assert driven.scheduler.wake_at() > driven.now, "and nobody waits for it busily"
    driven.advance(2 * WAIT_S)
    driven.settle()
    assert driven.scheduler.troubles() == []


@pytest.mark.parametrize("error", [LeaseLost(7), DatabaseAway("db", "gone")])
def test_what_no_run_is_to_blame_for_is_as_it_was(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing(monkeypatch, planning._Evaluation, "evaluate", lambda *_: True, error)
    if isinstance(error, LeaseLost):
        with pytest.raises(LeaseLost):
            driven.settle()
    else:
        driven.settle()
    assert driven.scheduler.troubles() == []


# --- outcomes, files, queries, events ------------------------------------------------------------


def test_an_outcome_that_cannot_be_stored_as_nobody_foresaw_fails_its_task_alone(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(store, query, "a", "b")
    scene.begin()
    a = scene.tasks.a
    failing(monkeypatch, values, "xcom_rows", lambda _, id_, xcoms: id_ == a and bool(xcoms))
    for token, step in scene.executor.steps.copy().items():
        scene.executor.finish(StepSucceeded((XCom("x", b"1"),) if step.task_id == "a" else ()), token)
    for _ in range(5):
        scene.step(2.0)
    assert task_states(store, scene.tasks.run) == {"a": S.FAILED, "b": S.SUCCESS}


def test_a_file_whose_dags_cannot_be_stored_as_nobody_foresaw_has_an_import_error(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing(monkeypatch, type(store.tasks), "save_file", lambda _, epoch, file, specs: "bad" in file)
    for name in ("bad", "good"):
        (tmp_path / f"{name}.py").write_text(name)
    files = Files(tmp_path, store)
    for _ in range(6):
        files.run()
    assert files.dags() == {"good": "good.py"}
    ((file, error),) = import_errors(store).items()
    assert file == f"{tmp_path}/bad.py"
    assert error.startswith("headgate cannot store the DAGs of the file: KeyError: 'nobody foresaw it'")


def test_a_query_that_cannot_be_answered_as_nobody_foresaw_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, type(store.tasks), "run_standing", lambda *_: True)
    with pytest.raises(QueryRefused, match="headgate cannot answer this: KeyError: 'nobody foresaw it'"):
        StoreQueries(store, {}).answer(GetTaskStates("etl", "r1"), dag_run_id=DagRunId(1))


def test_an_event_that_its_task_cannot_take_is_a_dead_letter_and_its_neighbours_are_stored(
    store: Store, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = Tasks(store, query, tasks=(TaskSpec("a", "Op"), TaskSpec("b", "Op")))
    tasks.plan()
    for task in tasks.dispatch():
        ends.defer(store.tasks, tasks.epoch, task.id, task.token, WAIT)
    bad, good = (one.id for one in store.claim_triggers(tasks.epoch, limit=10, queues=QUEUES))
    failing(monkeypatch, deferral, "take_event", lambda _, event: event.trigger_id == bad)
    retry = DatabaseRetry("events", 0.1, 1.0)
    intake = Intake(store, Figures(), slice_events_max=100, retry=retry, clock=lambda: 0.0)
    events = [FiredEvent(id_, f"run-{id_}", 0, seq, b"{}") for seq, id_ in ((1, bad), (2, good))]
    intake.add_frame(1, StateChanges(1, tuple(events)))
    answers = []
    while intake.wake_at() is not None:
        stored = intake.step(tasks.epoch, 0.0)
        answers += [stored.answer] if stored is not None and stored.answer is not None else []
    (answer,) = answers
    assert answer.persisted == (2,)
    assert [(one.seq, one.payload_kept) for one in answer.refused] == [(1, True)]
    assert [row["reason"] for row in query("SELECT reason FROM dead_letter")] == [
        f"the trigger of row {bad} has failed: KeyError: 'nobody foresaw it'"
    ]
    resumed = {task.task_id: decode_value(task.next_kwargs or b"{}") for task in tasks.dispatch()}
    assert "error" in resumed["a"], "it is resumed to fail"
    assert "error" not in resumed["b"]
