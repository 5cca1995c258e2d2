"""An advance that does not return: its stream ends and says so, and the events are delivered again."""

from __future__ import annotations

import pytest
import trio
from structlog.testing import capture_logs
from tests.streams.flow_rig import Acking, Broker, ask, subscribe
from trio.testing import wait_all_tasks_blocked

from headgate.streams.group_settings import DRAIN_TIMEOUT_S
from headgate.triggers.shared_stream import AdvanceTimeout, PollTerminated, SharedStreamManager


async def test_a_stream_whose_advance_does_not_return_ends_and_names_stream_producer_and_time(
    autojump_clock: object,
) -> None:
    broker = Broker()
    broker.may_advance = trio.Event()
    with capture_logs() as records:
        async with SharedStreamManager(advance_timeout=60) as streams:
            subscription = subscribe(streams, broker)
            broker.send("a")
            assert await anext(subscription) == "a"
            began = trio.current_time()
            with pytest.raises(PollTerminated) as told:
                await anext(subscription)
            assert trio.current_time() - began == pytest.approx(60, abs=1.1)
            cause = told.value.__cause__
            assert isinstance(cause, AdvanceTimeout)
            assert str(cause) == "Broker.advance of shared stream 'k' did not return within 60 s"
            assert streams.advances_cut_off == 1
            # The next stream of the key is a new one, and the broker delivers again.
            again, broker.may_advance = Broker(), trio.Event()
            later = streams.subscribe(trigger_id=1, trigger=Acking(again), key="k")
            again.send("a")
            assert await anext(later) == "a"
            await ask(later)
            await wait_all_tasks_blocked()
            assert again.advanced == ["a"]
    assert broker.advanced == []
    (said,) = [record for record in records if record["event"] == "shared stream terminated"]
    assert said["log_level"] == "error"


async def test_an_advance_that_returns_in_time_ends_nothing(autojump_clock: object) -> None:
    broker = Broker()
    broker.may_advance = trio.Event()
    async with SharedStreamManager(advance_timeout=60) as streams:
        subscription = subscribe(streams, broker)
        broker.send("a", "b")
        await anext(subscription)
        await anext(subscription)
        await trio.sleep(58)
        broker.may_advance.set()
        await wait_all_tasks_blocked()
        broker.may_advance = trio.Event()
        await ask(subscription)
        await trio.sleep(58)
        broker.may_advance.set()
        await wait_all_tasks_blocked()
        assert broker.advanced == ["a", "b"]
        assert streams.advances_cut_off == 0


async def test_an_advance_that_cannot_be_cancelled_ends_its_stream_all_the_same(autojump_clock: object) -> None:
    release = trio.Event()

    class Shielded(Broker):
        async def advance(self, batch: object) -> None:
            with trio.CancelScope(shield=True):
                await release.wait()

    broker = Shielded()
    async with SharedStreamManager(advance_timeout=60) as streams:
        subscription = subscribe(streams, broker)
        broker.send("a")
        await anext(subscription)
        with pytest.raises(PollTerminated):
            await anext(subscription)
        assert streams.statistics().groups == 0
        release.set()


async def test_a_stream_that_is_stopped_during_an_advance_counts_it_as_cut_off(autojump_clock: object) -> None:
    broker = Broker()
    broker.may_advance = trio.Event()
    async with SharedStreamManager(advance_timeout=60) as streams:
        subscription = subscribe(streams, broker)
        broker.send("a")
        await anext(subscription)
        began = trio.current_time()
        await ask(subscription)
        await streams.stop_all()
        assert trio.current_time() - began == pytest.approx(DRAIN_TIMEOUT_S, abs=0.1)
        assert streams.advances_cut_off == 1


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
async def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="advance_timeout must be more than 0 s"):
        SharedStreamManager(advance_timeout=timeout)
