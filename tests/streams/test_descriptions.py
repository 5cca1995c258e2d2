"""Questions about a stream: its broker is asked beside its reader, whatever the author's code does."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import trio
from tests.streams import flow_rig
from tests.streams.flow_rig import Fast, subscribe
from trio.testing import MockClock, wait_all_tasks_blocked

from headgate.brokers.progress import Progress
from headgate.child.queries import secrets
from headgate.protocol.link.splitting import split_round
from headgate.protocol.messages.runner import (
    CANNOT_TELL,
    KWARGS_BYTES_MAX,
    LANES_TOLD_MAX,
    DescribedStream,
    LaneProgress,
    StateChanges,
)
from headgate.streams import descriptions
from headgate.streams.checks import progress_of
from headgate.streams.identity import identify
from headgate.triggers.base import BaseEventTrigger
from headgate.triggers.shared_stream import LanePosition, PollTerminated, SharedStreamManager, SourceMissing

KEY = identify(("log", "shop"))


class Text(str):
    """An author's own text, which cannot be sent."""


class Broker(flow_rig.Broker):
    """One that has positions: where its group is, and how far its reader has come."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Progress()
        self.kept.begin("", (0,))
        self.answer: Any = [LanePosition(committed=(3,), end=(9,), lag=6)]
        self.asked = 0
        self.hangs = False
        self.on_asked: Any = lambda: None
        self.closed = 0

    async def describe(self) -> Sequence[LanePosition]:
        self.asked += 1
        self.on_asked()
        if self.hangs:
            await trio.sleep_forever()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]

    def progress(self) -> tuple[LaneProgress, ...]:
        return self.kept.lanes()

    async def aclose(self) -> None:
        self.closed += 1


async def ask(broker: Broker) -> DescribedStream:
    async with SharedStreamManager() as streams:
        streams.subscribe(trigger_id=1, trigger=flow_rig.Acking(broker), key=KEY)
        await wait_all_tasks_blocked()
        return await streams.describe(KEY.digest)


async def test_what_the_reader_knows_is_read_before_and_after_its_broker_is_asked(autojump_clock: MockClock) -> None:
    broker = Broker()
    broker.kept.note("", (3,))
    broker.on_asked = lambda: broker.kept.note("", (5,))  # it goes on meanwhile
    found = await ask(broker)
    (lane,) = found.lanes
    assert (lane.before, lane.after, lane.committed, lane.end, lane.lag) == ((3,), (5,), (3,), (9,), 6)
    assert (found.lanes_in_all, found.error, broker.asked) == (1, "", 1)
    assert [each.advanced for each in found.progress] == [(5,)]


async def test_the_count_of_deliveries_is_told_with_that_of_before_the_broker_was_asked(
    autojump_clock: MockClock,
) -> None:
    broker = Broker()
    broker.kept.begin("", (3,), deliveries=7)
    broker.kept.note("", (4,), 9)
    broker.kept.note("", (3,), 8)
    broker.answer = [LanePosition(committed=(3,), deliveries=11)]
    broker.on_asked = lambda: broker.kept.note("", (5,), 12)
    found = await ask(broker)
    (lane,) = found.lanes
    assert (lane.before, lane.before_deliveries, lane.deliveries) == ((4,), 9, 11)
    assert [(each.began_deliveries, each.deliveries) for each in found.progress] == [(7, 12)]


async def test_a_message_that_is_on_its_way_to_the_reader_is_no_drift(autojump_clock: MockClock) -> None:
    broker = Broker()
    broker.answer = [LanePosition(committed=(7,))]
    async with SharedStreamManager() as streams, trio.open_nursery() as nursery:
        streams.subscribe(trigger_id=1, trigger=flow_rig.Acking(broker), key=KEY)
        await wait_all_tasks_blocked()

        async def arrive() -> None:
            await trio.sleep(descriptions.SECOND_LOOK_S / 2)
            broker.kept.note("", (7,))

        nursery.start_soon(arrive)
        (lane,) = (await streams.describe(KEY.digest)).lanes
        assert lane.after == (7,)


async def test_a_reader_that_begins_anew_meanwhile_is_not_held_against_where_it_was(autojump_clock: MockClock) -> None:
    broker = Broker()
    broker.kept.note("", (8,))
    broker.on_asked = lambda: broker.kept.begin("", (3,))
    (lane,) = (await ask(broker)).lanes
    assert (lane.before, lane.after) == (None, (3,))


async def test_the_oldest_message_that_is_not_advanced_is_told(autojump_clock: MockClock) -> None:
    class Keyed(Broker):
        def event_key(self, broker_payload: str) -> str:
            return f"key {broker_payload}"

    broker = Keyed()
    async with SharedStreamManager() as streams:
        subscription = streams.subscribe(trigger_id=1, trigger=flow_rig.Acking(broker), key=KEY)
        broker.send("a", "b")
        assert await anext(subscription) == "a"
        await wait_all_tasks_blocked()
        (lane,) = (await streams.describe(KEY.digest)).lanes
        assert lane.oldest_key == "key a"
        assert lane.oldest_at is not None


async def test_a_stream_that_has_failed_is_asked_about_all_the_same(autojump_clock: MockClock) -> None:
    class Failing(Broker):
        def open_stream(self) -> Any:
            raise OSError("the topic is gone")

    broker = Failing()
    broker.answer = SourceMissing("there is no topic orders")
    async with SharedStreamManager() as streams:
        subscription = streams.subscribe(trigger_id=1, trigger=flow_rig.Acking(broker), key=KEY)
        with pytest.raises(PollTerminated):
            await anext(subscription)
        await streams.unsubscribe(1, KEY)
        found = await streams.describe(KEY.digest)
    assert (found.error, found.is_missing) == ("SourceMissing: there is no topic orders", True)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (SystemExit("no"), "SystemExit: no"),
        (["nonsense"], "describe must return LanePositions, not a value of type str"),
        ([LanePosition(committed=(-1,))], "a position is a tuple of up to 4 numbers below 2\\*\\*64"),
        ([LanePosition(committed=(1.5,))], "a position is a tuple"),  # type: ignore[arg-type]
        ([LanePosition("x" * 251)], "the name of a lane has at most 250 characters"),
        ([LanePosition(7)], "the name of a lane is a str, not a value of type int"),  # type: ignore[arg-type]
        ([LanePosition(lag="many")], "ValueError: invalid literal"),  # type: ignore[arg-type]
        ([LanePosition(missing=None)], "TypeError: int"),  # type: ignore[arg-type]
        ([], "its broker cannot tell how far it is"),
        (7, "TypeError"),
    ],
)
async def test_what_an_author_does_wrong_is_an_answer(autojump_clock: MockClock, answer: Any, error: str) -> None:
    broker = Broker()
    broker.answer = answer
    found = await ask(broker)
    assert found.lanes == ()
    assert not found.is_missing
    with pytest.raises(ValueError, match=error):
        raise ValueError(found.error)
    assert broker.closed >= 1, "the producer that was made for the question is closed"


async def test_a_broker_that_hangs_is_waited_for_within_a_limit(autojump_clock: MockClock) -> None:
    broker = Broker()
    broker.hangs = True
    began = trio.current_time()
    found = await ask(broker)
    assert found.error == f"its broker has not answered within {descriptions.DESCRIBE_S:g} s"
    assert trio.current_time() - began == pytest.approx(descriptions.DESCRIBE_S, abs=0.1)


async def test_an_error_shows_no_secret(autojump_clock: MockClock) -> None:
    secrets.add("swordfish77")
    broker = Broker()
    broker.answer = OSError("no login for swordfish77")
    assert "swordfish77" not in (await ask(broker)).error


async def test_a_stream_without_a_producer_and_one_that_is_not_known_have_no_answer(autojump_clock: MockClock) -> None:
    broker = Broker()
    async with SharedStreamManager() as streams:
        assert "has not opened" in (await streams.describe("0" * 40)).error
        fast: BaseEventTrigger = Fast(broker)
        streams.subscribe(trigger_id=1, trigger=fast, key=KEY)
        subscribe(streams, broker, trigger_id=2, key="not an identity")
        assert (await streams.describe(KEY.digest)).error == CANNOT_TELL
    assert broker.asked == 0


async def test_what_a_reader_says_of_itself_is_told_with_its_figures_if_it_can_be(autojump_clock: MockClock) -> None:
    broker = Broker()
    broker.kept.note("", (5,))
    async with SharedStreamManager() as streams:
        streams.subscribe(trigger_id=1, trigger=flow_rig.Acking(broker), key=KEY)
        await wait_all_tasks_blocked()
        (stream,) = streams.figures().streams
        assert [lane.advanced for lane in stream.progress] == [(5,)]
        broker.progress = lambda: ["nonsense"]  # type: ignore[method-assign, assignment, return-value]
        (stream,) = streams.figures().streams
        assert stream.progress == ()


@pytest.mark.parametrize(
    "lane",
    [
        LaneProgress("x" * 251),
        LaneProgress("\ud800"),
        LaneProgress("0", cursor="x" * 251),
        LaneProgress("0", (2**64,)),
        LaneProgress("0", asked=(-1,)),
        LaneProgress("0", begun_at=float("nan")),
        LaneProgress("0", committed_at=float("inf")),
        LaneProgress("0", is_ours="yes"),  # type: ignore[arg-type]
        LaneProgress("0", begun_at=Fraction(3, 2)),  # type: ignore[arg-type]
        LaneProgress("0", begun_at=Decimal("1.5")),  # type: ignore[arg-type]
        LaneProgress("0", is_ours=1),  # type: ignore[arg-type]
        LaneProgress(Text("0")),
        LaneProgress("0", dropped=(-1,)),
        LaneProgress("0", missing=2**64),
        LaneProgress("0", missing=1.5),  # type: ignore[arg-type]
        LaneProgress(7),  # type: ignore[arg-type]
    ],
)
async def test_progress_that_cannot_be_sent_is_left_out(lane: LaneProgress) -> None:
    broker = Broker()
    broker.progress = lambda: (lane,)  # type: ignore[method-assign]
    assert progress_of(broker) == ()


async def test_a_cancellation_that_leaks_from_an_author_ends_nothing_else(autojump_clock: MockClock) -> None:
    broker = Broker()
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep(1)
        except trio.Cancelled as error:
            broker.answer = error
    found = await ask(broker)
    assert (found.lanes, found.error) == ((), "RuntimeError: the producer was cancelled by a scope of its own")


async def test_an_answer_can_be_sent_whatever_its_lanes_are_called_and_fits_the_shortest_frame(
    autojump_clock: MockClock,
) -> None:
    broker = Broker()
    broker.answer = [LanePosition("\ud800\0", lag=2**70)]
    (lane,) = (await ask(broker)).lanes
    assert (lane.lane, lane.lag) == ("\\ud800\\x00", 2**63 - 1)
    broker.answer = [LanePosition(f"{number:05}" + "\U00010000" * 245) for number in range(2_000)]
    found = await ask(broker)
    assert found.lanes_in_all == 2_000
    assert len(found.lanes) > 400
    changes = StateChanges(1, streams=(found,))
    assert split_round(changes, KWARGS_BYTES_MAX) == [changes]


async def test_the_figures_of_all_streams_have_a_limit_of_lanes(autojump_clock: MockClock) -> None:
    lanes = tuple(LaneProgress(str(number), begun_at=1.0) for number in range(150))
    async with SharedStreamManager() as streams:
        for number in range(25):
            broker = Broker()
            broker.progress = lambda: lanes  # type: ignore[method-assign]
            key = identify(("log", str(number)))
            streams.subscribe(trigger_id=number, trigger=flow_rig.Acking(broker), key=key)
        await wait_all_tasks_blocked()
        told = streams.figures().streams
    assert [len(stream.progress) for stream in told] == [100] * 20 + [0] * 5


def test_lanes_are_told_up_to_a_limit_and_one_that_has_none_left_says_so() -> None:
    progress = Progress()
    assert progress.lanes() == ()
    for number in range(LANES_TOLD_MAX + 1):
        progress.begin(str(number), (5,))
    assert len(progress.lanes()) == LANES_TOLD_MAX
    progress.give_up([str(number) for number in range(LANES_TOLD_MAX)])
    (left,) = progress.lanes()
    assert left.lane == str(LANES_TOLD_MAX)
    assert left.begun_at > 0
    progress.give_up([left.lane, "of others"])
    (given_up,) = progress.lanes()
    assert (given_up.lane, given_up.begun_at, given_up.advanced) == (left.lane, 0.0, ())
    progress.begin("7", (9,))
    assert [lane.lane for lane in progress.lanes()] == ["7"]
