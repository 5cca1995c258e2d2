"""What a reader of the file log commits: nothing that was not accepted or recorded as rejected."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.brokers.filelog.filelog_harness import CLEAN, FAILED, NOBODY, REJECTED, offsets, reading, rejected
from trio.testing import wait_all_tasks_blocked

from headgate.brokers.filelog import (
    FileLogPosition,
    FileLogWriter,
)
from headgate.brokers.filelogs import reading as filelog_reading
from headgate.triggers.shared_stream import AdvanceOutcome, Undecodable

# --- committing ----------------------------------------------------------------------------------


async def test_a_restart_goes_on_at_the_committed_offset(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append_many("p", [0, 1, 2])
    writer.append("q", "q0")
    async with reading(tmp_path) as reader:
        taken = [item for item in await reader.take(4) if item[1].partition == "p"]
        await reader.advance(taken[:2], CLEAN, CLEAN)
    assert offsets(tmp_path) == {"p": 4}
    async with reading(tmp_path) as reader:
        assert {str(value) for value in await reader.values(2)} == {"2", "q0"}
    async with reading(tmp_path, "another") as reader:
        assert len(await reader.values(4)) == 4


async def test_the_lag_is_the_bytes_that_are_not_committed(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append_many("p", [0, 1, 2])
    writer.append("q", "q0")
    async with reading(tmp_path) as reader:
        taken = await reader.take(4)
        assert reader.producer.known_lag() == (3 * len("0\n") + len('"q0"\n'), "bytes")
        await reader.advance([item for item in taken if item[1].partition == "p"][:2], CLEAN, CLEAN)
        assert reader.producer.known_lag() == (len("2\n") + len('"q0"\n'), "bytes")


async def test_lanes_are_partitions_and_keys_name_log_file_and_offset(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append_many("orders", [0, 1])
    async with reading(tmp_path) as reader:
        (_, position) = (await reader.take(2))[1]
        crc = zlib.crc32(b"1\n")
        assert reader.producer.get_advance_lane(position) == position.file
        assert reader.producer.event_key(position) == f"{writer.log_id}/orders.jsonl@{position.file}:2:{crc:x}"


@pytest.mark.parametrize("failure", [FAILED, NOBODY, AdvanceOutcome(acked=1, failed=1, rejected=1)])
async def test_a_failed_line_is_delivered_again_and_no_commit_passes_it(
    tmp_path: Path, writer: FileLogWriter, failure: AdvanceOutcome
) -> None:
    writer.append_many("p", [0, 1, 2, 3])
    async with reading(tmp_path) as reader:
        first = await reader.take(4)
        await reader.advance(first[:3], CLEAN, failure, CLEAN)
        assert offsets(tmp_path) == {"p": 2}
        await reader.advance(first[3:], CLEAN)  # of the older generation: later, and clean, and not to be committed
        assert offsets(tmp_path) == {"p": 2}
        again = await reader.take(3)
        assert [value for value, _ in again] == [1, 2, 3]
        keys = [reader.producer.event_key(position) for _, position in again]
        assert keys == [reader.producer.event_key(position) for _, position in first[1:]]
        await reader.advance(again, CLEAN, CLEAN, CLEAN)
    assert offsets(tmp_path) == {"p": 8}
    assert rejected(tmp_path) == []


async def test_a_rewind_wakes_a_reader_that_waits_and_drops_the_rest_of_what_it_has_read(
    tmp_path: Path, writer: FileLogWriter
) -> None:
    writer.append_many("p", [0, 1, 2])
    async with reading(tmp_path) as reader:
        taken = await reader.take(2)  # line 2 has been read too, and stands behind them
        await reader.advance(taken[:1], FAILED)
        again = await reader.take(3)
        assert [value for value, _ in again] == [0, 1, 2]
        async with trio.open_nursery() as nursery:
            waiting: list[Any] = []

            async def take() -> None:
                waiting.extend(await reader.values(1))

            nursery.start_soon(take)
            await wait_all_tasks_blocked(0.02)
            await reader.advance(again, CLEAN, CLEAN, FAILED)
        assert waiting == [2]


async def test_a_line_that_keeps_failing_waits_while_other_partitions_go_on(
    tmp_path: Path, writer: FileLogWriter
) -> None:
    writer.append("bad", "bad")
    async with reading(tmp_path, rewind_delay_s=3600.0, rewind_delay_max_s=3600.0) as reader:
        await reader.advance(await reader.take(1), FAILED)
        writer.append_many("good", [1, 2])
        assert await reader.values(2) == [1, 2]
        writer.append("bad", "more")  # what is appended to it does not end the wait
        writer.append("good", 3)
        assert await reader.values(1) == [3]


async def test_a_line_that_fails_while_another_partition_is_read_waits_all_the_same(
    tmp_path: Path, writer: FileLogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filelog_reading, "READ_LINES_MAX", 1)
    writer.append_many("a", ["a0", "a1", "a2"])
    writer.append_many("b", ["b0", "b1", "b2"])
    async with reading(tmp_path, rewind_delay_s=3600.0, rewind_delay_max_s=3600.0) as reader:
        taken = await reader.take(3)
        assert [value for value, _ in taken] == ["a0", "b0", "a1"]
        await reader.advance(taken[1:2], FAILED)
        assert await reader.values(1) == ["a2"]


async def test_a_rejected_line_is_recorded_and_then_passed(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append_many("p", [0, {"id": "x"}, 2])
    async with reading(tmp_path) as reader:
        taken = await reader.take(3)
        await reader.advance(taken, CLEAN, AdvanceOutcome(acked=2, rejected=1), CLEAN)
    assert offsets(tmp_path) == {"p": 15}
    assert rejected(tmp_path) == [
        {
            "key": reader.producer.event_key(taken[1][1]),
            "partition": "p",
            "offset": 2,
            "end_offset": 13,
            "reason": "rejected by 1 of 3 subscribers",
            "text": '{"id":"x"}',
        }
    ]


async def test_a_rejected_line_is_not_passed_while_its_record_is_not_durable(
    tmp_path: Path, writer: FileLogWriter
) -> None:
    writer.append_many("p", [0, 1])
    async with reading(tmp_path) as reader:
        taken = await reader.take(2)
        (tmp_path / ".groups" / "g.rejected.jsonl").mkdir()  # the record cannot be written
        with pytest.raises(OSError, match="directory"):
            await reader.advance(taken, CLEAN, REJECTED)
    assert offsets(tmp_path) == {}


async def test_a_line_that_is_not_json_is_handed_out_as_undecodable_and_never_stops_the_log(
    tmp_path: Path, writer: FileLogWriter
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"0\nnot json\n\xff\n\n3\n")
    async with reading(tmp_path) as reader:
        taken = await reader.take(5)
        first, text, binary, blank, last = (value for value, _ in taken)
        assert (first, last) == (0, 3)
        assert text.reason.startswith("not a JSON value")
        assert text == Undecodable(text.reason, "not json")
        assert (binary.content, blank.content) == (b"\xff", "")
        assert all(bad.is_whole for bad in (text, binary, blank))
        await reader.advance(taken[:4], CLEAN, CLEAN, CLEAN, FAILED)
        assert offsets(tmp_path) == {"p": 13}, "not before its letters are stored, like any other line (I1)"
        taken = await reader.take(2)
        await reader.advance(taken, CLEAN, CLEAN)
        assert offsets(tmp_path) == {"p": 16}
    assert rejected(tmp_path) == []


async def test_a_line_is_recorded_once_however_often_the_reader_starts_again(
    tmp_path: Path, writer: FileLogWriter
) -> None:
    (tmp_path / "p.jsonl").write_bytes(b"0\n1\n2\n")
    (tmp_path / ".groups").mkdir(exist_ok=True)
    for _ in range(3):
        async with reading(tmp_path) as reader:
            taken = await reader.take(3)
            await reader.advance(taken, FAILED, REJECTED, CLEAN)
    async with reading(tmp_path) as reader:
        taken = await reader.take(3)
        before = (tmp_path / ".groups" / "g.json").read_bytes()
        await reader.advance(taken, CLEAN, REJECTED, FAILED)
        torn = tmp_path / ".groups" / "g.rejected.jsonl"
        with torn.open("ab") as file:
            file.write(b'{"key": "torn')
        assert offsets(tmp_path) == {"p": 4}
        (tmp_path / ".groups" / "g.json").write_bytes(before)  # as if it had been killed before the commit
    async with reading(tmp_path) as reader:
        await reader.advance(await reader.take(3), CLEAN, REJECTED, CLEAN)
        assert offsets(tmp_path) == {"p": 6}
    assert json.loads(torn.read_text().splitlines()[0])["offset"] == 2
    assert len(torn.read_text().splitlines()) == 2, "and the torn one"


async def test_of_a_line_over_the_limit_there_is_only_the_beginning(tmp_path: Path, writer: FileLogWriter) -> None:
    writer.append_many("p", ["x" * 300_000, 1])
    async with reading(tmp_path, line_bytes_max=1000) as reader:
        taken = await reader.take(2)
        (huge, _), (last, _) = taken
        assert last == 1
        assert isinstance(huge, Undecodable)
        assert (huge.reason, huge.is_whole) == ("300,002 bytes long; the limit is 1,000", False)
        assert (len(huge.content), huge.whole_bytes) == (4096, 300_002)
        await reader.advance(taken, REJECTED, CLEAN)
    (record,) = rejected(tmp_path)
    assert record["end_offset"] == 300_003
    assert record["text"] == huge.content
    assert offsets(tmp_path) == {"p": 300_005}


@pytest.mark.parametrize("seed", range(5))
async def test_with_random_outcomes_and_restarts_every_line_is_accepted_before_it_is_committed(
    tmp_path: Path, writer: FileLogWriter, seed: int
) -> None:
    chance = random.Random(seed)
    ends: dict[str, list[int]] = {}
    for partition in ("a", "b"):
        starts = writer.append_many(partition, [f"{partition}{n}" for n in range(40)])
        ends[partition] = [*starts[1:], (tmp_path / f"{partition}.jsonl").stat().st_size]
    handled: set[str] = set()

    def check() -> None:
        for partition, committed in offsets(tmp_path).items():
            assert committed == 0 or committed in ends[partition]
            passed = {f"{partition}{n}" for n, end in enumerate(ends[partition]) if end <= committed}
            assert passed <= handled

    whole = {partition: partition_ends[-1] for partition, partition_ends in ends.items()}

    for _ in range(200):
        if offsets(tmp_path) == whole:
            break
        async with reading(tmp_path) as reader:
            lanes: dict[str, list[tuple[Any, FileLogPosition]]] = {"a": [], "b": []}
            takes = chance.randint(1, 12)
            files = reader.producer._files
            while takes and {file.name: file.position for file in files.values()} != whole:
                ((value, position),) = await reader.take(1)
                lanes[position.partition].append((value, position))
                takes -= 1
            for lane in lanes.values():
                while lane:
                    count = chance.randint(1, len(lane))
                    batch, lane[:count] = lane[:count], []
                    outcomes = chance.choices([CLEAN, FAILED, REJECTED, NOBODY], [20, 1, 1, 1], k=count)
                    handled |= {v for (v, _), o in zip(batch, outcomes, strict=True) if o in (CLEAN, REJECTED)}
                    await reader.advance(batch, *outcomes)
                    check()
    assert offsets(tmp_path) == whole


async def test_an_empty_partition_may_go_and_come(tmp_path: Path, writer: FileLogWriter) -> None:
    (tmp_path / "p.jsonl").touch()
    writer.append("q", 0)
    async with reading(tmp_path) as reader:
        assert await reader.values(1) == [0]
        (tmp_path / "p.jsonl").unlink()
        writer.append("q", 1)
        assert await reader.values(1) == [1]
    writer.append("p", 2)
    async with reading(tmp_path, "another") as reader:
        assert sorted(await reader.values(3)) == [0, 1, 2]
