"""The newest event of an asset: of a busy one from the newest of all, and of a silent one from its watchers."""

from __future__ import annotations

import pytest
from tests.store.harness import QUEUES, register

from headgate.protocol.messages.runner import FiredEvent
from headgate.store.inspect.browsing import assets
from headgate.store.store import Store


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test reaches."""
    monkeypatch.setattr(assets, "EVENTS_LOOKED_MAX", 2)
    monkeypatch.setattr(assets, "WATCHERS_LOOKED_MAX", 3)


@pytest.mark.usefixtures("few")
def test_an_asset_that_cannot_be_looked_up_within_bounds_says_so(store: Store) -> None:
    epoch = register(store)
    ids = {
        name: store.add_watcher(name, "a.B", {}, asset=name.partition("-")[0])
        for name in ("busy-1", "silent-1", "silent-2", "never-1", "wide-1", "wide-2", "wide-3")
    }
    store.claim_triggers(epoch, limit=100, queues=QUEUES)
    fired = ("wide-1", "silent-2", "silent-1", "silent-2", "busy-1", "busy-1")
    events = [FiredEvent(ids[name], "run", number, 0, b"\x01", f"k{number}") for number, name in enumerate(fired)]
    store.store_slice(epoch, events=events)
    newest = [event.id for event in store.inspect.events_before(limit=10)]
    lines = {line.name: line for line in store.inspect.assets()}
    assert (lines["busy"].event_id, lines["busy"].stored_at is not None) == (newest[0], True)
    assert (lines["silent"].event_id, lines["silent"].is_looked_up) == (newest[2], True)
    assert (lines["never"].event_id, lines["never"].is_looked_up) == (None, True)
    # 1 and 2 watchers were looked at, and 3 more would be too many.
    assert (lines["wide"].event_id, lines["wide"].is_looked_up) == (None, False)
    (alone,) = store.inspect.assets(name="wide")
    assert (alone.event_id, alone.is_looked_up) == (newest[5], True)
    store.remove_watcher("busy-1")
    assert {line.name: line.event_id for line in store.inspect.assets()}["busy"] is None
