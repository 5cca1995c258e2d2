"""The ends of steps that are stored in groups: whatever is in one of them, its neighbours lose nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from tests.store.harness import Query
from tests.supervisor.tasks.core_harness import DEFER, Scene
from tests.supervisor.tasks_harness import S, task_states

from headgate.protocol import marks
from headgate.protocol.messages.dags import XCOM_BYTES_MAX
from headgate.protocol.messages.queries import CreateRun, GetXCom, GetXComs
from headgate.protocol.messages.steps import StepFailed, StepOutcome, StepSkipped, StepSucceeded, XCom
from headgate.store.errors import RowsRefused, described
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tasks.outcomes import StepEnd
from headgate.supervisor.executors.base import StepQuery
from headgate.supervisor.tasks import reports
from headgate.supervisor.tasks.faults import WAIT_S

TOO_BIG = StepSucceeded(xcoms=(XCom("big", b"x" * (XCOM_BYTES_MAX + 1)),))
# Neither the worker nor the store can tell: PostgreSQL takes no NUL, and SQLite no id that is not text of UTF-8.
OF_THE_DATABASE = StepSucceeded(skips=("\ud800",))
NAMES = tuple("abcdefgh")


@pytest.fixture
def scene(store: Store, query: Query) -> Scene:
    """A scene in which all of `NAMES` run, and a group may have all of them."""
    scene = Scene(store, query, *NAMES, workers=len(NAMES))
    scene.core._reports._group_size.items = reports.OUTCOMES_MAX
    scene.step()
    assert len(scene.executor.steps) == len(NAMES)
    return scene


@pytest.fixture
def commits(scene: Scene) -> Iterator[Callable[[], int]]:
    """Counts the transactions in which outcomes were stored."""
    counted: list[str] = []
    marks.arm(lambda name: counted.append(name) if name == "outcomes.grouped" else None)
    yield lambda: len(counted)
    marks.disarm()


def finish(scene: Scene, **outcomes: StepOutcome) -> None:
    """Have all steps end, in order of their tasks, well unless another outcome is given."""
    for token, step in sorted(scene.executor.steps.items(), key=lambda item: item[1].task_id):
        scene.executor.finish(outcomes.get(step.task_id, StepSucceeded(xcoms=(XCom("k", b"1"),))), token)


def states(scene: Scene) -> dict[str, S]:
    return task_states(scene.tasks.store, scene.tasks.run)


def test_all_that_has_ended_meanwhile_is_stored_in_one_transaction(scene: Scene, commits: Callable[[], int]) -> None:
    finish(scene, b=StepFailed("boom"), c=StepSkipped("nothing"), d=DEFER)
    scene.step(1.0)
    assert commits() == 1
    expected = dict.fromkeys(NAMES, S.SUCCESS) | {"b": S.FAILED, "c": S.SKIPPED, "d": S.DEFERRED}
    assert states(scene) == expected
    assert scene.tasks.store.tasks.pull_xcom(scene.tasks.run, "h", "k") == b"1"


@pytest.mark.parametrize("bad", [TOO_BIG, OF_THE_DATABASE, msgspec.structs.replace(DEFER, next_method="no name")])
@pytest.mark.parametrize("of", [("a",), ("h",), ("d", "e"), NAMES])
def test_what_cannot_be_stored_fails_alone(scene: Scene, bad: StepOutcome, of: tuple[str, ...]) -> None:
    finish(scene, **dict.fromkeys(of, bad))
    for _ in range(len(NAMES)):
        scene.step(1.0)
    assert states(scene) == dict.fromkeys(NAMES, S.SUCCESS) | dict.fromkeys(of, S.FAILED)
    assert scene.logs.events().count("the outcome cannot be stored") == len(of)
    assert scene.logs.events().count("succeeded") == len(NAMES) - len(of)
    assert not scene.core._reports


def test_the_events_of_a_step_whose_outcome_is_refused_are_left(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler may emit what is refused for one event of many: it is searched for as for any other failure."""
    told: list[StepEnd] = []
    store_ends = scene.tasks.store.tasks.store_ends

    def noted(epoch: Epoch, ends: Sequence[StepEnd], **more: Any) -> Any:
        told.extend(ends)
        return store_ends(epoch, ends, **more)

    monkeypatch.setattr(scene.tasks.store.tasks, "store_ends", noted)
    monkeypatch.setattr("headgate.supervisor.tasks.steps._events_of", lambda task: ("its events",))
    finish(scene, e=TOO_BIG)
    for _ in range(len(NAMES)):
        scene.step(1.0)
    (failed,) = [end for end in told if isinstance(end.outcome, StepFailed)]
    assert list(map(str, failed.events)) == ["its events"]


def test_one_bad_outcome_costs_no_more_transactions_than_halving_takes(
    scene: Scene, commits: Callable[[], int]
) -> None:
    finish(scene, e=TOO_BIG)
    while scene.core._reports or scene.executor.pending:
        scene.step(1.0)
    assert commits() <= 5, "a to d, e as a failure, f to h, and at most two on the way"


def test_a_late_outcome_in_a_group_changes_nothing_and_its_task_begins_again(scene: Scene) -> None:
    scene.tasks.store.tasks.clear_many(scene.tasks.run, ["c"])
    finish(scene)
    scene.step(1.0)
    assert states(scene) == dict.fromkeys(NAMES, S.SUCCESS) | {"c": S.NONE}
    assert scene.tasks.store.tasks.pull_xcom(scene.tasks.run, "c", "k") is None


def test_a_group_whose_commit_nobody_heard_of_is_stored_once(scene: Scene) -> None:
    finish(scene, b=StepFailed("boom"), d=DEFER)
    scene.store.fails, scene.store.is_done_first = "store_ends", True
    scene.step(1.0)
    before = states(scene)
    scene.step(scene.core.wake_at())
    assert states(scene) == before == dict.fromkeys(NAMES, S.SUCCESS) | {"b": S.FAILED, "d": S.DEFERRED}
    assert len(list(scene.tasks.store.inspect.triggers())) == 1


def test_a_query_is_answered_after_what_came_before_it_is_stored(scene: Scene) -> None:
    (first, last) = [next(t for t, step in scene.executor.steps.items() if step.task_id == name) for name in "ah"]
    scene.executor.finish(StepSucceeded(), first)
    scene.executor.pending.append(StepQuery(last, 1, GetXCom("a", "k")))
    finish(scene)
    scene.step(1.0)
    assert [token for token, _ in scene.executor.answers] == [last]
    assert states(scene) == dict.fromkeys(NAMES, S.SUCCESS)


def test_queries_for_values_do_not_part_what_is_stored_together(scene: Scene, commits: Callable[[], int]) -> None:
    tokens = [token for token, _ in sorted(scene.executor.steps.items(), key=lambda item: item[1].task_id)]
    *ending, asking = tokens
    for number, token in enumerate(ending):
        scene.executor.finish(StepSucceeded(), token)
        scene.executor.pending.append(StepQuery(asking, number, GetXComs("a", "k")))
    scene.step(1.0)
    assert commits() == 1
    assert [answer.id for _, answer in scene.executor.answers] == list(range(len(ending)))
    assert states(scene) == dict.fromkeys(NAMES, S.SUCCESS) | {"h": S.RUNNING}
    assert not scene.core._reports


def test_a_query_that_writes_keeps_its_place_among_outcomes(scene: Scene, commits: Callable[[], int]) -> None:
    first, last = [next(t for t, step in scene.executor.steps.items() if step.task_id == name) for name in "ah"]
    scene.executor.finish(StepSucceeded(), first)
    scene.executor.pending.append(StepQuery(last, 1, CreateRun("etl", "other")))
    finish(scene)
    scene.step(1.0)
    assert commits() == 2
    assert [token for token, _ in scene.executor.answers] == [last]


def test_a_slow_database_gets_smaller_groups(store: Store, query: Query) -> None:
    moments = iter(range(1000))
    scene = Scene(store, query, *NAMES, workers=len(NAMES))
    scene.core._reports._clock = lambda: float(next(moments))
    scene.core._reports._group_size.items = len(NAMES)
    scene.step()
    finish(scene)
    scene.step(1.0)
    assert scene.core._reports._group_size.items == reports.OUTCOMES_FIRST


@pytest.mark.parametrize("error", [RowsRefused("the row is broken"), KeyError("nobody foresaw it")])
def test_an_end_that_cannot_be_stored_even_as_a_failure_holds_nobody_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (bad,) = [token for token, step in scene.executor.steps.items() if step.task_id == "c"]
    store_ends = scene.tasks.store.tasks.store_ends

    def refusing(epoch: Epoch, ends: Sequence[StepEnd], **more: Any) -> Any:
        if any(end.token == bad for end in ends):
            raise error
        return store_ends(epoch, ends, **more)

    finish(scene)
    with monkeypatch.context() as patch:
        patch.setattr(scene.tasks.store.tasks, "store_ends", refusing)
        for _ in range(len(NAMES)):
            scene.step(1.0)
        assert states(scene) == dict.fromkeys(NAMES, S.SUCCESS) | {"c": S.RUNNING}
        assert scene.core._reports.troubles() == [("task etl r1 c", described(error))]
        assert not scene.core._reports, "a drain waits for no such end"
        scene.core._dispatch_in_doubt = True
        scene.step(2.0)
        assert scene.executor.steps == {}, "it is no task that no worker has got"
        again_at = scene.core.wake_at()
        assert WAIT_S <= again_at - 1.0 <= 2 * WAIT_S
        scene.step(again_at)
        assert states(scene)["c"] is S.RUNNING
        assert scene.core.wake_at() - again_at >= 2 * WAIT_S, "less and less often"
    scene.step(scene.core.wake_at())
    assert states(scene)["c"] is S.SUCCESS
    assert scene.core._reports.troubles() == []


@pytest.mark.parametrize("error", [RowsRefused("all are"), KeyError("nobody foresaw it")])
def test_if_all_ends_are_refused_they_wait_in_the_queue(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(reports, "ASIDE_MAX", 2)
    finish(scene)
    with monkeypatch.context() as patch:
        patch.setattr(scene.tasks.store.tasks, "store_ends", refuse)
        for number in range(20):
            scene.step(1.0 + number)
        assert len(scene.core._reports.troubles()) == 2
        assert len(scene.core._reports.tokens()) == len(NAMES)
    for _ in range(20):
        scene.step(100.0)
    assert states(scene) == dict.fromkeys(NAMES, S.SUCCESS)


def test_a_drain_tries_once_more_to_store_what_is_put_aside(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RowsRefused("for a moment")

    (token,) = [token for token, step in scene.executor.steps.items() if step.task_id == "c"]
    with monkeypatch.context() as patch:
        patch.setattr(scene.tasks.store.tasks, "store_ends", refuse)
        scene.executor.finish(StepSucceeded(), token)
        scene.step(1.0)
        assert len(scene.core._reports.troubles()) == 1
    scene.core.drain(1.0)
    assert scene.core._reports, "the drain waits for it"
    scene.step(1.0)
    assert states(scene)["c"] is S.SUCCESS
    assert scene.core._reports.troubles() == []
