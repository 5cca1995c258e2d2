"""`FileLogTrigger`: its kwargs, its producer and its filter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.waiting import WITHIN_S

from headgate.brokers.filelog import FileLogTrigger, FileLogWriter
from headgate.streams.group_settings import Source
from headgate.triggers.base import TriggerEvent
from headgate.triggers.shared_stream import Undecodable


class Orders(FileLogTrigger):
    """What a user writes."""


def test_a_trigger_and_a_subclass_are_restored_as_what_they_are() -> None:
    for cls in (FileLogTrigger, Orders):
        classpath, kwargs = cls("log", "g", line_bytes_max=99).serialize()
        assert classpath == f"{cls.__module__}.{cls.__qualname__}"
        assert cls(**kwargs).serialize() == (classpath, kwargs)


def test_triggers_of_one_folder_and_group_share_a_stream_whatever_they_call_it(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "link").symlink_to("log")
    key = FileLogTrigger(tmp_path / "log", "g").shared_stream_key()
    assert Orders(str(tmp_path / "link"), "g").shared_stream_key() == key
    assert FileLogTrigger(tmp_path / "log", "h").shared_stream_key() != key


def test_the_limits_open_the_stream_of_a_group() -> None:
    one, other = (Source(FileLogTrigger, FileLogTrigger("x", "g", line_bytes_max=n).serialize()[1]) for n in (10, 20))
    assert one.differences(other) == {"line_bytes_max": "10, not 20"}
    assert one.differences(one) == {}


def test_a_bad_name_of_a_group_is_refused_by_the_constructor() -> None:
    with pytest.raises(ValueError, match="group"):
        FileLogTrigger("log", "../g")


async def test_the_producer_of_a_trigger_takes_its_limits_and_ignores_what_only_a_subclass_knows(
    tmp_path: Path,
) -> None:
    with FileLogWriter(tmp_path) as writer:
        writer.append_many("p", ["x" * 100, 1])
    kwargs = {**FileLogTrigger(tmp_path, "g", line_bytes_max=50).serialize()[1], "threshold": 3}
    producer = Orders.create_shared_stream_producer(kwargs)
    async with aclosing(producer.open_stream()) as stream:
        with trio.fail_after(WITHIN_S):
            value, _ = await anext(stream)
            assert isinstance(value, Undecodable)
            assert value.reason == "102 bytes long; the limit is 50"
            assert (await anext(stream))[0] == 1
    await producer.aclose()


async def test_the_filter_fires_every_line() -> None:
    async def stream() -> AsyncIterator[Any]:
        yield 1
        yield {"a": None}

    events = [event async for event in FileLogTrigger("log", "g").filter_shared_stream(stream())]
    assert events == [TriggerEvent(1), TriggerEvent({"a": None})]


async def test_running_it_alone_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="filter_shared_stream, not a run"):
        await anext(aiter(FileLogTrigger("log", "g").run()))
