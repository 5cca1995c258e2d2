"""Subscribers of one file log that share its reader."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.waiting import WITHIN_S

from headgate.brokers.filelog import FileLogRewritten, FileLogTrigger, FileLogWriter
from headgate.triggers.base import TriggerEvent
from headgate.triggers.shared_stream import PollTerminated, SharedStreamManager


class EvenOnly(FileLogTrigger):
    """A subclass as a user writes it: it overrides the filter only."""

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncGenerator[TriggerEvent, None]:
        async for raw_event in shared_stream:
            if raw_event["id"] % 2 == 0:
                yield TriggerEvent(raw_event["id"])


class Subscriber:
    """Drives one trigger's filter the way the host does, and lets the test confirm what it fired."""

    def __init__(self, streams: SharedStreamManager, trigger_id: int, trigger: FileLogTrigger) -> None:
        self.streams = streams
        self.trigger_id = trigger_id
        self.key = trigger.shared_stream_key()
        self.subscription = streams.subscribe(trigger_id=trigger_id, trigger=trigger, key=self.key)
        self.events = trigger.filter_shared_stream(self.subscription)
        self.seqs: list[int] = []
        self.event_keys: list[str | None] = []

    async def fire(self) -> Any:
        with trio.fail_after(WITHIN_S):
            event = await anext(self.events)
        binding = self.subscription.bind()
        assert binding.seq is not None
        self.seqs.append(binding.seq)
        self.event_keys.append(binding.key)
        return event.payload

    async def leave(self, *, cut_short: bool = False) -> None:
        assert isinstance(self.events, AsyncGenerator)
        await self.events.aclose()
        await self.streams.unsubscribe(self.trigger_id, self.key, cut_short=cut_short)


def committed(folder: Path) -> int:
    path = folder / ".groups" / "g.json"
    return json.loads(path.read_text())["offsets"]["p"] if path.exists() else 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with FileLogWriter(tmp_path) as writer:
        writer.append_many("p", [{"id": n} for n in range(5)])  # lines of 9 bytes
    return tmp_path


async def test_the_committed_offset_follows_what_every_subscriber_has_confirmed(folder: Path) -> None:
    async with SharedStreamManager() as streams:
        every, even = (Subscriber(streams, n, cls(folder, "g")) for n, cls in enumerate((FileLogTrigger, EvenOnly)))
        assert [(await every.fire())["id"] for _ in range(4)] == [0, 1, 2, 3]
        assert [await even.fire() for _ in range(2)] == [0, 2]
        assert even.event_keys[1] == every.event_keys[2]
        streams.confirm_persisted([*every.seqs[:2], every.seqs[3], *even.seqs])
        await every.leave()
        await even.leave()
    # Line 2 was never confirmed for one of the two, so nothing from there on is committed, whatever the others say.
    assert committed(folder) == 18


async def test_an_event_that_was_cut_short_comes_again_under_the_same_key(folder: Path) -> None:
    async with SharedStreamManager() as streams:
        staying, leaving = (Subscriber(streams, n, FileLogTrigger(folder, "g")) for n in range(2))
        assert [(await staying.fire())["id"] for _ in range(5)] == [0, 1, 2, 3, 4]
        assert [(await leaving.fire())["id"] for _ in range(2)] == [0, 1]
        streams.confirm_persisted([*staying.seqs, *leaving.seqs])
        await leaving.leave(cut_short=True)
        assert [(await staying.fire())["id"] for _ in range(4)] == [1, 2, 3, 4]
        assert staying.event_keys[5:] == staying.event_keys[1:5]
        assert committed(folder) == 9
        streams.confirm_persisted(staying.seqs)
        await staying.leave()
    assert committed(folder) == 45


async def test_a_stream_opened_while_the_one_before_it_closes_waits_for_the_lock_of_the_group(folder: Path) -> None:
    async with SharedStreamManager() as streams:
        first = Subscriber(streams, 1, FileLogTrigger(folder, "g"))
        await first.fire()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.leave)
            while streams.statistics().groups:
                await trio.lowlevel.checkpoint()
            second = Subscriber(streams, 2, FileLogTrigger(folder, "g"))
            assert await second.fire() == {"id": 0}
        await second.leave()


async def test_a_rewritten_log_is_told_to_every_subscriber(folder: Path) -> None:
    async with SharedStreamManager() as streams:
        subscribers = [Subscriber(streams, n, FileLogTrigger(folder, "g")) for n in range(2)]
        for subscriber in subscribers:
            for _ in range(5):
                await subscriber.fire()
        (folder / "p.jsonl").write_bytes(b"")
        for subscriber in subscribers:
            with pytest.raises(PollTerminated) as caught:
                await subscriber.fire()
            assert isinstance(caught.value.__cause__, FileLogRewritten)


async def test_a_line_that_is_not_json_is_given_to_no_filter_even_without_a_place_for_letters(folder: Path) -> None:
    with (folder / "p.jsonl").open("ab") as file:
        file.write(b"not json\n")
    async with SharedStreamManager() as streams:
        subscriber = Subscriber(streams, 1, FileLogTrigger(folder, "g"))
        for _ in range(5):
            await subscriber.fire()
        with FileLogWriter(folder) as writer:
            writer.append("p", {"id": 5})
        assert await subscriber.fire() == {"id": 5}
        streams.confirm_persisted(subscriber.seqs)
        await subscriber.leave()
    assert committed(folder) == 63
    (record,) = (folder / ".groups" / "g.rejected.jsonl").read_text().splitlines()
    assert json.loads(record)["text"] == "not json"
