"""Mapped tasks that are skipped, stopped or cleared midway: what has no value does not begin, and none is forgotten."""

from __future__ import annotations

from tests.store import ends
from tests.store.harness import Query
from tests.store.scheduling.test_elements import Emitting

from headgate.protocol.messages.steps import Emitted, StepSucceeded
from headgate.store.store import Store

# --- skipped -------------------------------------------------------------------------------------


def test_a_skipped_task_beside_the_one_that_emits_does_not_skip_what_a_success_would_let_run(
    store: Store, query: Query
) -> None:
    maps = Emitting(store, query, has_other=True, trigger_rule="none_failed_min_one_success")
    source = maps.begin()
    (other,) = maps.dispatch()
    ends.succeed(store.tasks, maps.epoch, other.id, other.token, end="skipped")
    maps.emit(source, 0, 1)
    assert maps.instances() == ["scheduled"]
    maps.end(source, StepSucceeded(emitted=Emitted(1, ())))
    assert (maps.own()["state"], maps.instances()) == ("success", ["scheduled"])
