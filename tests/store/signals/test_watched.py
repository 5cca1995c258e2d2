"""Events of watchers become signals: each once, in the order of the log, in the transaction that stores it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import QUEUES, OpenStore, Query, register
from tests.store.signals.rules_harness import Jobs
from tests.store.signals.test_rules_of_runs import why

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.rules import Rules, SignalRule
from headgate.protocol.messages.runner import FinishedTrigger, FiredEvent
from headgate.protocol.messages.signals import AUTOMATIC, SIGNAL_BYTES_MAX, Predicate
from headgate.protocol.values import encode_value
from headgate.store.errors import RowsRefused, SignalKeyInUse, ValueRefused
from headgate.store.signals import feeds as feeds_of_store
from headgate.store.signals import sending
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store


class Watched:
    """A watcher that is claimed, whose events are sent as signals."""

    def __init__(self, store: Store, name: str = "w", **options: Any) -> None:
        self.store = store
        self.epoch = register(store)
        self.trigger_id = store.add_watcher(name, "a.B", {}, **{"signal": "news", **options})
        assert [one.id for one in store.claim_triggers(self.epoch, limit=10, queues=QUEUES)] == [self.trigger_id]

    def fired(self, index: int, value: Any = None, *, run: str = "run", **fields: Any) -> FiredEvent:
        payload = encode_value(index if value is None else value, where="payload")
        return FiredEvent(self.trigger_id, run, index, index + 1, payload, **fields)

    def store_events(self, *events: FiredEvent) -> bool:
        return self.store.store_slice(self.epoch, events=events).has_sent

    def signals(self, key: str = "news", **where: Any) -> list[tuple[int, Any]]:
        return [(one.version, one.value) for one in self.store.signals.page(key, **where).signals]


def test_each_event_is_a_signal_in_the_order_of_the_log(store: Store, query: Query) -> None:
    on = Watched(store)
    assert on.store_events(on.fired(0, "a"), on.fired(1, {"n": 2}))
    assert on.store_events(on.fired(2, "c", key="k"))
    assert on.signals() == [(1, "a"), (2, {"n": 2}), (3, "c")]
    newest = store.signals.page("news").signals[-1]
    event_id = query("SELECT max(id) AS id FROM trigger_event")[0]["id"]
    assert newest.sender == "watcher w"
    assert newest.dedup.startswith(f"{AUTOMATIC}event {event_id} ")


def test_an_event_that_is_stored_already_is_not_sent_again(store: Store) -> None:
    on = Watched(store)
    on.store_events(on.fired(0, "a", key="k0"), on.fired(1, "b", key="k1"))
    # The same slice, of which it was unknown whether its commit arrived; then the message, delivered to another run.
    assert not on.store_events(on.fired(0, "a", key="k0"), on.fired(1, "b", key="k1"))
    assert on.store_events(on.fired(0, "b", run="later", key="k1"), on.fired(1, "c", run="later", key="k2"))
    assert on.signals() == [(1, "a"), (2, "b"), (3, "c")]


@pytest.mark.parametrize("payload", [b"abc", b"[" * 900 + b"]" * 900], ids=["no JSON", "deep"])
def test_an_event_whose_payload_is_malformed_is_sent_as_its_id(store: Store, query: Query, payload: bytes) -> None:
    on = Watched(store)
    on.store_events(FiredEvent(on.trigger_id, "run", 0, 1, payload))
    event_id = query("SELECT max(id) AS id FROM trigger_event")[0]["id"]
    assert on.signals() == [(1, {"event_id": event_id, "bytes": len(payload)})]


def test_events_over_the_limit_are_told_to_the_supervisor_and_to_who_waits(store: Store, query: Query) -> None:
    on = Watched(store)
    predicate = Predicate("equal", b"true", ("is_big",))
    rules = Rules((SignalRule("news", predicate=predicate),), "latest")
    jobs = Jobs(store, query, TaskSpec("job", "Op", signals=rules))
    small, large = {"event_id": 1, "other": 2}, {"is_big": True, "text": "x" * SIGNAL_BYTES_MAX}
    stored = store.store_slice(on.epoch, events=[on.fired(0, small), on.fired(1, large), on.fired(2, large)])
    assert [(one.watcher, one.bytes > SIGNAL_BYTES_MAX) for one in stored.replaced] == [("w", True)]
    jobs.settle()
    (rule,) = [text for name, text in why(jobs).facts if name == "rule"]
    assert rule == (
        "START: 'news', is_big equal true; held against 3 of 3 versions; 2 of the newest have the id of an event "
        "alone, whose payload is too large"
    )
    assert store.store_slice(on.epoch, events=[on.fired(3, small)]).replaced == ()


def test_no_dedup_of_another_sender_is_that_of_an_event(store: Store) -> None:
    on = Watched(store)
    guesses = [f"{prefix}event {number}" for number in range(1, 4) for prefix in ("", AUTOMATIC)]
    store.signals.send([NewSignal("news", b"null", guess, "somebody") for guess in guesses])
    on.store_events(on.fired(0, "a"), on.fired(1, "b"))
    assert on.signals()[len(guesses) :] == [(7, "a"), (8, "b")]


def test_a_watcher_of_signals_alone_makes_nobody_look_for_runs(store: Store) -> None:
    on = Watched(store)
    assert not store.store_slice(on.epoch, events=[on.fired(0, "a")]).moved_tasks
    of_asset = store.add_watcher("of asset", "a.B", {}, asset="orders")
    store.claim_triggers(on.epoch, limit=10, queues=QUEUES)
    event = FiredEvent(of_asset, "of asset", 0, 1, encode_value(0, where="payload"))
    assert store.store_slice(on.epoch, events=[event]).moved_tasks


def test_an_event_that_cannot_be_stored_sends_nothing(store: Store) -> None:
    on = Watched(store)
    with pytest.raises(RowsRefused):
        on.store_events(on.fired(0, "a"), on.fired(1, "b", key="a\0b"))
    assert on.signals() == []


def test_nothing_is_stored_if_its_signal_is_not(store: Store, query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    on = Watched(store)

    def broken(*args: Any, **options: Any) -> Any:
        sending.send(*args, **options)
        raise RuntimeError("a fault after the signals are written")

    with monkeypatch.context() as patch:
        patch.setattr(feeds_of_store, "sending", type("Sending", (), {"send": staticmethod(broken)}))
        with pytest.raises(RuntimeError):
            on.store_events(on.fired(0, "a"))
    assert (on.signals(), query("SELECT id FROM trigger_event")) == ([], [])
    on.store_events(on.fired(0, "a"))
    assert on.signals() == [(1, "a")]


def test_only_the_events_of_the_watcher_that_has_a_key_are_sent(store: Store) -> None:
    on = Watched(store, asset="orders", namespace="other")
    plain = store.add_watcher("plain", "a.B", {})
    store.claim_triggers(on.epoch, limit=10, queues=QUEUES)
    on.store_events(FiredEvent(plain, "plain", 0, 1, encode_value(0, where="payload")), on.fired(1, "a"))
    assert (on.signals(), on.signals(namespace="other")) == ([], [(1, "a")])


def test_the_failure_of_a_trigger_is_no_signal(store: Store) -> None:
    on = Watched(store)
    store.store_slice(
        on.epoch,
        events=[on.fired(0, "a")],
        finished=[FinishedTrigger(on.trigger_id, "run", "failed", 2, error="it broke")],
    )
    assert on.signals() == [(1, "a")]


def test_an_event_by_hand_is_a_signal(store: Store) -> None:
    on = Watched(store)
    store.put_event("w", encode_value("by hand", where="payload"), key="k")
    assert on.signals() == [(1, "by hand")]


def test_another_supervisor_sends_them_as_well(store: Store, open_store: OpenStore) -> None:
    on = Watched(store)
    on.store_events(on.fired(0, "a"))
    store.release_triggerer(on.epoch)
    other = open_store()
    epoch = register(other, hostname="other")
    assert [one.id for one in other.claim_triggers(epoch, limit=10, queues=QUEUES)] == [on.trigger_id]
    assert other.store_slice(epoch, events=[on.fired(0, "b", run="next")]).has_sent
    assert on.signals() == [(1, "a"), (2, "b")]


def test_an_event_larger_than_a_signal_sends_where_it_is(store: Store, query: Query) -> None:
    on = Watched(store)
    large = "x" * SIGNAL_BYTES_MAX
    on.store_events(on.fired(0, large), on.fired(1, "a"))
    first_id = query("SELECT min(id) AS id FROM trigger_event")[0]["id"]
    bytes_ = len(encode_value(large, where="payload"))
    assert on.signals() == [(1, {"event_id": first_id, "bytes": bytes_}), (2, "a")]


def test_a_key_too_many_keeps_no_event_from_being_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "KEYS_MAX", 0)
    on = Watched(store)
    on.store_events(on.fired(0, "a"))
    assert on.signals() == [(1, "a")]


def test_a_key_is_not_forgotten_while_a_watcher_sends_under_it(store: Store) -> None:
    on = Watched(store)
    on.store_events(on.fired(0, "a"))
    with pytest.raises(SignalKeyInUse, match="the key 'news' is in use: the watcher 'w' sends its events under it"):
        store.signals.forget("news")
    store.remove_watcher("w")
    assert store.signals.forget("news") == 1


@pytest.mark.parametrize(("key", "namespace"), [("", "default"), ("a\0", "default"), ("k" * 513, "default"), ("k", "")])
def test_a_key_that_no_signal_can_have_is_refused(store: Store, key: str, namespace: str) -> None:
    with pytest.raises(ValueRefused):
        store.add_watcher("w", "a.B", {}, signal=key, namespace=namespace)
    assert store.inspect.watchers() == []


def test_lists_have_the_key(store: Store) -> None:
    on = Watched(store, namespace="other")
    (row,) = store.inspect.watchers()
    assert (row.signal, row.signal_namespace) == ("news", "other")
    detail = store.inspect.trigger(on.trigger_id)
    assert (detail.signal, detail.signal_namespace) == ("news", "other")
