"""Steps of tasks with streams: which of them have the supervisor look for triggers that begin or end."""

from __future__ import annotations

import msgspec
import pytest
from tests.store.harness import QUEUES, Query
from tests.supervisor.tasks.core_harness import DEFER, Scene
from tests.supervisor.tasks_harness import S, event_of

from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.messages.steps import StepFailed, StepHandled, StepOutcome, StepSucceeded
from headgate.protocol.messages.task_streams import HANDLER_METHOD, Handled, StreamOptions
from headgate.store.ids import TriggerId
from headgate.store.store import Store

STREAM = msgspec.structs.replace(DEFER, next_method=HANDLER_METHOD, stream=StreamOptions("each", count=1))


class Streaming(Scene):
    """A scene whose task has taken the stream of ``trigger_id``, and has a step with one event."""

    def __init__(self, store: Store, query: Query) -> None:
        super().__init__(store, query)
        self.begin()
        self.executor.finish(STREAM)
        assert self.step(1.0), "its trigger is there from now on"
        tasks = self.tasks
        (trigger,) = tasks.store.claim_triggers(tasks.epoch, limit=1, queues=QUEUES)
        self.trigger_id = trigger.id
        tasks.store.store_slice(tasks.epoch, events=[event_of(trigger.id, number, index=number) for number in (0, 1)])
        self.core.notify()
        assert not self.step(2.0)

    def handled(self, state: bytes = b"{}") -> Handled:
        (step,) = self.executor.steps.values()
        assert step.stream is not None
        return Handled(step.stream.events[-1].id, 1, state)


@pytest.fixture
def scene(store: Store, query: Query) -> Streaming:
    return Streaming(store, query)


def test_a_step_that_has_handled_events_costs_no_look_for_triggers(scene: Streaming) -> None:
    for _ in range(2):
        scene.executor.finish(StepHandled(scene.handled()))
        assert not scene.step(3.0)
        assert scene.core.take_handled() == {TriggerId(scene.trigger_id): 1}
    assert scene.tasks.state() is S.DEFERRED


@pytest.mark.parametrize("outcome", [StepSucceeded(), StepFailed("boom"), STREAM])
def test_any_other_end_of_a_step_has_its_trigger_looked_for(scene: Streaming, outcome: StepOutcome) -> None:
    scene.executor.finish(outcome)
    assert scene.step(3.0)


def test_so_has_an_outcome_that_cannot_be_stored(scene: Streaming) -> None:
    scene.executor.finish(StepHandled(scene.handled(b"x" * (KWARGS_BYTES_MAX + 1))))
    assert scene.step(3.0)
    assert scene.tasks.state() is S.FAILED
