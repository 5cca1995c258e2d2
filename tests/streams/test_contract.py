"""Ack mode: what a subscriber gets, how it resolves an event, and what the producer is handed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.brokers.fake_broker import ACKED, FAILED, REJECTED, Broker, ask, bind, subscribe
from trio.testing import wait_all_tasks_blocked

from headgate.streams import Binding, Subscription
from headgate.streams.group_settings import ADVANCE_BATCH_EVENTS_MAX
from headgate.triggers.shared_stream import (
    AdvanceItem,
    AdvanceOutcome,
    SharedStreamManager,
    reject_shared_stream_event,
)

# --- windows and the persist gate ----------------------------------------------------------------


async def test_every_subscriber_gets_every_raw_event() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        first, second = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        broker.send("a1", "a2")
        assert [await anext(first), await anext(first)] == ["A1", "A2"]
        assert [await anext(second), await anext(second)] == ["A1", "A2"]


async def test_an_event_is_never_advanced_before_it_is_stored() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1")
        await anext(subscription)
        seq = bind(subscription)
        await ask(subscription)
        await wait_all_tasks_blocked()
        assert broker.advanced == {}
        streams.confirm_persisted([seq])
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": ACKED}


async def test_an_event_that_is_stored_is_not_advanced_before_the_filter_moves_past_it() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1")
        await anext(subscription)
        streams.confirm_persisted([bind(subscription)])
        await wait_all_tasks_blocked()
        assert broker.advanced == {}
        await ask(subscription)
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": ACKED}


async def test_an_event_the_filter_skips_resolves_on_the_next_pull() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1", "a2")
        await anext(subscription)
        await wait_all_tasks_blocked()
        assert broker.advanced == {}
        assert await anext(subscription) == "A2"
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": ACKED}


async def test_every_subscriber_online_at_broadcast_must_resolve_and_counts_once() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        first, second = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        broker.send("a1")
        await anext(first)
        await anext(second)
        await ask(first)
        await wait_all_tasks_blocked()
        assert broker.advanced == {}
        reject_shared_stream_event()
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": AdvanceOutcome(acked=1, rejected=1)}


async def test_a_late_joiner_is_not_added_to_an_event_broadcast_before() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        first = subscribe(streams, broker, 1)
        broker.send("a1")
        await wait_all_tasks_blocked()
        late = subscribe(streams, broker, 2)
        broker.send("a2")
        assert await anext(late) == "A2"
        assert await anext(first) == "A1"
        await ask(first)
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": ACKED}


async def test_bindings_name_the_raw_event_and_count_what_derives_from_it() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        assert subscription.bind() == Binding(None, None, 0)
        broker.send("a1", "a2")
        await anext(subscription)
        assert [subscription.bind() for _ in range(3)] == [Binding(n + 1, "key of a1", n) for n in range(3)]
        await anext(subscription)
        assert subscription.bind() == Binding(4, "key of a2", 0)
        await ask(subscription)
        assert subscription.bind() == Binding(None, None, 0)


async def test_bind_pending_event_gives_the_seq_of_the_open_window_and_none_elsewhere() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        assert streams.bind_pending_event(trigger_id=1, key="k") is None
        broker.send("a1")
        await anext(subscription)
        assert streams.bind_pending_event(trigger_id=1, key="k") == 1
        assert streams.bind_pending_event(trigger_id=2, key="k") is None
        assert streams.bind_pending_event(trigger_id=1, key="other") is None
        assert subscription.bind().position == 1


async def test_a_refused_derived_event_resolves_its_raw_event_as_rejected() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1")
        await anext(subscription)
        refused, stored = bind(subscription), bind(subscription)
        streams.confirm_refused([refused])
        await ask(subscription)
        await wait_all_tasks_blocked()
        assert broker.advanced == {}
        streams.confirm_persisted([stored])
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": REJECTED}


def test_only_an_outcome_that_somebody_accepted_and_nobody_refused_is_clean() -> None:
    assert AdvanceOutcome(acked=2).is_clean
    assert not AdvanceOutcome().is_clean
    assert not AdvanceOutcome(acked=1, failed=1).is_clean
    assert not AdvanceOutcome(acked=1, rejected=1).is_clean


# --- reject --------------------------------------------------------------------------------------


async def test_a_reject_resolves_at_once_whatever_was_fired_before() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1")
        await anext(subscription)
        bind(subscription)
        with capture_logs() as logs:
            reject_shared_stream_event()
        assert logs == []
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": REJECTED}
        assert subscription.bind() == Binding(None, "key of a1", 1)


class Reports:
    """Takes the reports of messages that are rejected."""

    keys: frozenset[str] = frozenset()
    is_full = False

    async def wait_room(self) -> None: ...

    def report(self, raw_event: Any, key: str | None, seq: int | None, *, rejection: str | None = None) -> None: ...


@pytest.mark.parametrize("keeps", [True, False])
async def test_an_event_of_a_message_that_was_rejected_is_warned_of_once(keeps: bool) -> None:
    broker = Broker()
    broker.keeps_rejected = keeps
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        if not keeps:
            subscription.pass_over = Reports()
        broker.send("a1", "a2", "a3")
        with capture_logs() as logs:
            await anext(subscription)
            reject_shared_stream_event()
            await anext(subscription)
            subscription.bind()
            assert logs == [], "it is of another message"
            reject_shared_stream_event()
            for _ in range(2):
                assert subscription.bind().seq is None
            await anext(subscription)
            reject_shared_stream_event()
            subscription.bind()
        (told,) = logs
        assert (told["log_level"], told["trigger_id"], told["key"]) == ("warning", 1, "key of a2")
        assert "reject_shared_stream_event(), which does not raise" in told["event"]


async def test_a_reject_outside_a_window_warns_and_does_nothing() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1")
        await anext(subscription)
        await ask(subscription)
        with capture_logs() as logs:
            reject_shared_stream_event()
        assert [entry["log_level"] for entry in logs] == ["warning"]
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": ACKED}


async def test_a_reject_from_another_task_or_thread_warns_and_does_nothing() -> None:
    broker = Broker()

    async def reject() -> None:
        reject_shared_stream_event()

    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1")
        await anext(subscription)
        with capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reject)
            await trio.to_thread.run_sync(reject_shared_stream_event)
        assert [entry["log_level"] for entry in logs] == ["warning", "warning"]
        await wait_all_tasks_blocked()
        assert broker.advanced == {}


async def test_a_window_closed_by_another_task_leaves_no_reject_behind() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscribe(streams, broker, 2)
        subscription = subscribe(streams, broker)
        broker.send("a1")
        await anext(subscription)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(streams.unsubscribe, 1, "k")
        with capture_logs() as logs:
            reject_shared_stream_event()
        assert [entry["log_level"] for entry in logs] == ["warning"]


# --- lanes and advancing -------------------------------------------------------------------------


async def test_a_lane_is_advanced_in_fan_out_order_without_a_gap_and_lanes_do_not_wait() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1", "a2", "b3", "a4")
        seqs = {}
        for name in ("a1", "a2", "b3", "a4"):
            assert await anext(subscription) == name.upper()
            seqs[name] = bind(subscription)
        await ask(subscription)
        streams.confirm_persisted([seqs["a2"], seqs["b3"]])
        await wait_all_tasks_blocked()
        assert broker.batches == [[AdvanceItem("b3", ACKED)]]
        streams.confirm_persisted([seqs["a1"]])
        await wait_all_tasks_blocked()
        streams.confirm_persisted([seqs["a4"]])
        await wait_all_tasks_blocked()
        assert broker.batches[1:] == [[AdvanceItem("a1", ACKED), AdvanceItem("a2", ACKED)], [AdvanceItem("a4", ACKED)]]


async def test_one_advance_is_awaited_at_a_time_over_all_lanes() -> None:
    broker, go_on = Broker(), trio.Event()
    broker.advance_gate = go_on.wait
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1", "b2", "a3")
        await anext(subscription)
        await ask(subscription)
        await wait_all_tasks_blocked()
        for _ in range(2):
            await anext(subscription)
        await ask(subscription)
        await wait_all_tasks_blocked()
        assert broker.batches == [[AdvanceItem("a1", ACKED)]]
        go_on.set()
        await wait_all_tasks_blocked()
        assert [item.broker_payload for batch in broker.batches for item in batch] == ["a1", "b2", "a3"]


async def test_a_batch_is_never_longer_than_its_limit() -> None:
    broker, go_on = Broker(), trio.Event()
    broker.advance_gate = go_on.wait
    events = ADVANCE_BATCH_EVENTS_MAX * 2
    async with SharedStreamManager(max_subscriber_queue=events) as streams:
        subscription = subscribe(streams, broker)
        broker.send(*(f"a{number}" for number in range(events)))
        for _ in range(events):
            await anext(subscription)
        go_on.set()
        await ask(subscription)
        await wait_all_tasks_blocked()
    advanced = [item.broker_payload for batch in broker.batches for item in batch]
    assert advanced == [f"a{number}" for number in range(events)]
    assert max(map(len, broker.batches)) == ADVANCE_BATCH_EVENTS_MAX


# --- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut_short", "outcome"), [(False, ACKED), (True, FAILED)])
async def test_leaving_resolves_the_event_it_sits_on_as_moved_past_unless_it_is_cut_short(
    cut_short: bool, outcome: AdvanceOutcome
) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1")
        await anext(subscription)
        streams.confirm_persisted([bind(subscription)])
        await streams.unsubscribe(1, "k", cut_short=cut_short)
        assert broker.advanced == {"a1": outcome}


async def test_leaving_fails_what_was_never_pulled() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        broker.send("a1", "a2")
        await anext(subscription)
        await streams.unsubscribe(1, "k")
        assert broker.advanced == {"a1": ACKED, "a2": FAILED}


@pytest.mark.parametrize("cut_short", [False, True])
async def test_a_departed_subscriber_s_unconfirmed_event_holds_the_advance_until_confirmed(cut_short: bool) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        stayer, leaver = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        broker.send("a1")
        await anext(stayer)
        await ask(stayer)
        await anext(leaver)
        seq = bind(leaver)
        await ask(leaver)
        await streams.unsubscribe(2, "k", cut_short=cut_short)
        await wait_all_tasks_blocked()
        assert broker.advanced == {}
        streams.confirm_persisted([seq])
        await wait_all_tasks_blocked()
        assert broker.advanced == {"a1": AdvanceOutcome(acked=2)}


async def test_a_departed_subscriber_s_unconfirmed_event_fails_at_the_ack_timeout(autojump_clock: object) -> None:
    broker = Broker()
    async with SharedStreamManager(ack_timeout=10) as streams:
        stayer, leaver = subscribe(streams, broker, 1), subscribe(streams, broker, 2)
        broker.send("a1")
        await anext(stayer)
        await ask(stayer)
        await anext(leaver)
        bind(leaver)
        await streams.unsubscribe(2, "k")
        await trio.sleep(10.1)
        assert broker.advanced == {"a1": AdvanceOutcome(acked=1, failed=1)}
        assert stayer.bind() == Binding(None, None, 0)
        broker.send("a2")
        assert await anext(stayer) == "A2"


async def test_unsubscribing_the_unknown_does_nothing() -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        subscription = subscribe(streams, broker)
        await streams.unsubscribe(2, "k")
        await streams.unsubscribe(1, "other")
        broker.send("a1")
        assert await anext(subscription) == "A1"


async def test_a_subscriber_that_was_unsubscribed_while_it_waits_comes_to_its_end() -> None:
    broker, seen = Broker(), []

    async def consume(subscription: Subscription) -> None:
        seen.extend([raw_event async for raw_event in subscription])
        seen.append("end")

    async with SharedStreamManager(ack_timeout=math.inf) as streams, trio.open_nursery() as nursery:
        nursery.start_soon(consume, subscribe(streams, broker))
        broker.send("a1")
        await wait_all_tasks_blocked()
        await streams.unsubscribe(1, "k")
    assert seen == ["A1", "end"]
