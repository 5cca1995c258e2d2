"""Old versions go with ``db clean``; the newest of each key stays, and no version is given again (I25)."""

from __future__ import annotations

from typing import Any

from tests.store.harness import Clock, OpenStore
from tests.store.signals.test_sending import new, versions

from headgate.protocol.messages.signals import SentSignal
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
