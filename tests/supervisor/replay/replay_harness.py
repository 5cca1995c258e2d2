"""Logs of a supervisor that lives through a test, their replay, and edits of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.replay.live import Live
from tests.store.harness import migrated_sqlite

from headgate.protocol.framelog.log import Record, encode_record, read_frames
from headgate.protocol.link.runner_dialect import Message
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.queries import (
    LastEvent,
    Request,
)
from headgate.protocol.messages.runner import (
    FinishedTrigger,
    FiredEvent,
    RefusedEvent,
    TriggerSpec,
)
from headgate.supervisor.replay.run import (
    Replayed,
    open_replay_store,
    replay,
)

FILE_HEADER_BYTES = 16


def fired(spec: TriggerSpec, index: int, *, key: str | None = "", trigger_id: int | None = None) -> FiredEvent:
    key = f"k{index}" if key == "" else key
    id_ = spec.trigger_id if trigger_id is None else trigger_id
    return FiredEvent(id_, spec.trigger_run_id, index, seq=index + 1, payload=b'{"n":%d}' % index, key=key)


def replayed(files: Sequence[Path], *, until: int | None = None) -> Replayed:
    with tempfile.TemporaryDirectory(prefix="headgate-tests-") as folder:
        path = Path(folder) / "replay.db"
        path.write_bytes(migrated_sqlite())
        with open_replay_store(f"sqlite:///{path}") as store:
            return replay(files, store, until=until)


def problem(files: Sequence[Path]) -> str:
    difference = replayed(files).difference
    return "" if difference is None else difference.problem


def assert_clean(files: Sequence[Path]) -> Replayed:
    result = replayed(files)
    assert result.is_clean, result.difference
    return result


def a_bit_of_everything(live: Live) -> None:
    """Handovers, retries, users, refusals, queries, redeliveries, a stuck trigger, a drain."""
    live.store.add_watcher("one", "users.One", {"path": "/data"})
    live.store.add_watcher("two", "users.Two", {})
    live.start_runner()
    one, two = live.specs()["one"], live.specs()["two"]
    live.say(Request(1, LastEvent(one.trigger_id)))
    live.round(fired(one, 0), fired(one, 1), fired(two, 0), fired(two, 1), fired(two, 2, key=None))
    live.say(Request(2, LastEvent(two.trigger_id)))
    live.round(fired(one, 2, key="bad\0key"), fired(one, 3))
    refused = RefusedEvent(two.trigger_id, two.trigger_run_id, 3, 4, "too long", 9, b"head")
    failed = FinishedTrigger(one.trigger_id, one.trigger_run_id, "failed", 4, error="ValueError: no")
    live.round(refused=(refused,), finished=(failed,))
    live.store.add_watcher("three", "users.Three", {"a": 1})
    live.pass_time(3.0)
    live.round(fired(live.specs()["three"], 0))
    live.round(fired(live.specs()["one"], 0))  # it came again, in the next run
    live.start_runner()
    live.round(fired(live.specs()["two"], 7))
    live.store.remove_watcher("two")
    live.pass_time(1.5)
    live.round(stuck=(two.trigger_id,))
    live.start_runner()
    live.say(Request(1, LastEvent(one.trigger_id)))
    three = live.specs()["three"]
    live.round(fired(three, 8), finished=(FinishedTrigger(three.trigger_id, three.trigger_run_id, "returned", 9),))
    live.core.drain(live.now)
    live.settle()
    live.round()
    live.core.runner_ended(live.core.runner.incarnation, "exited", live.now)
    live.settle()
    live.start_supervisor()
    live.start_runner()
    live.round(fired(live.specs()["one"], 0))


def edited(path: Path, folder: Path, edit: Callable[[int, Message], Message | None]) -> Path:
    """Return a copy of a log with its messages edited and every CRC put right; None takes a frame out."""
    data = path.read_bytes()[:FILE_HEADER_BYTES]
    for number, record in enumerate(read_frames(path), 1):
        assert isinstance(record, Record)
        message = edit(number, record.message())
        if message is not None:
            data += encode_record(record.time, record.direction, record.incarnation, encode_message(message))
    copy = folder / "edited.hgframe"
    copy.write_bytes(data)
    return copy


def change_first(kind: type[Any], change: Callable[[Any], Any], *, having: str = "") -> Callable[[int, Message], Any]:
    """Return an edit of the first message of a kind with content in a field."""
    done: list[int] = []

    def edit(number: int, message: Message) -> Message | None:
        if not done and isinstance(message, kind) and (not having or getattr(message, having)):
            done.append(number)
            changed: Message | None = change(message)
            return changed
        return message

    return edit


def with_field(**fields: Any) -> Callable[[Any], Any]:
    return lambda message: msgspec.structs.replace(message, **fields)
