"""Old versions go with ``db clean``; the newest of each key stays, and no version is given again (I25)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import Clock, OpenStore, register
from tests.store.signals.rules_harness import GO, ruled
from tests.store.signals.test_sending import new, versions

from headgate.protocol.messages.dags import DagSpec, StartTrigger, TaskSpec
from headgate.protocol.messages.signals import SIGNAL_TRIGGER, SentSignal, SignalWait
from headgate.store.store import Store


def clean(store: Store, days: float, **options: Any) -> int:
    rows = [cleaned.rows for _, cleaned in store.cleaning.clean(days * 86_400.0, kinds=("signals",), **options)]
    return sum(one.get("signal", 0) for one in rows)


def test_a_clean_deletes_old_versions_but_never_the_newest_nor_the_key(open_store: OpenStore) -> None:
    clock = Clock()
    store = open_store(clock=clock)
    store.signals.send([new("a", 1), new("a", 2), new("b", 1)])
    clock.pass_days(40)
    store.signals.send([new("a", 3, "d")])
    assert clean(store, 30, is_tried_only=True) == 2
    assert clean(store, 30, rows_max=1) == 2
    assert versions(store, "a") == [(3, 3)]
    assert versions(store, "b") == [(1, 1)]
    clock.pass_days(40)
    assert clean(store, 30) == 0
    assert store.signals.send([new("a", 4), new("b", 2)]) == [SentSignal(4, True), SentSignal(2, True)]
    assert clean(store, 30) == 2
    assert (versions(store, "a"), versions(store, "b")) == ([(4, 4)], [(2, 2)])


LONG = TaskSpec("long", "Op")
WAIT = StartTrigger(SIGNAL_TRIGGER, b"{}", "execute", b"{}", signal=SignalWait("go"))


@pytest.mark.parametrize(
    ("below", "kept"),
    [(TaskSpec("wait", "SignalSensor", upstream=("long",), start_trigger=WAIT), [2, 3]), (ruled(GO), [3])],
    ids=["sensor", "rule"],
)
def test_a_clean_leaves_what_a_sensor_will_wait_for_that_has_not_begun(
    open_store: OpenStore, below: TaskSpec, kept: list[int]
) -> None:
    """Signals count for it since its run was created. A rule has been held against them, and needs them no more."""
    clock = Clock()
    store = open_store(clock=clock)
    epoch = register(store)
    store.signals.send([new("go", "before")])
    store.tasks.save_file(epoch, "d.py", [DagSpec("d", tasks=(LONG, below))])
    run = store.tasks.create_run("d", "r1")
    assert run is not None
    store.signals.send([new("go", 1), new("go", 2)])
    while store.scheduling.plan(epoch).evaluated or store.scheduling.consider_signals(epoch).has_more:
        pass
    clock.pass_days(40)
    clean(store, 30)
    assert [version for version, _ in versions(store, "go")] == kept
    assert store.tasks.cancel_run(run).is_ended
    clean(store, 30)
    assert [version for version, _ in versions(store, "go")] == [3]
