"""A journal of the events that a producer hands out and of those that it advances, written in the runner.

`JournaledTrigger` wraps an author's trigger: it runs that trigger's own filter on that trigger's own producer, and
records the events that pass between the producer and its stream. Each record is one ``write``, made before anything
else is done with the event, so the journal survives the death of its process. Each producer writes its own file. The
wrapper also makes messages fail once each: in the filter of one subscriber, as `Failing` says, or by changing the
outcome that the producer gets. The producer has to deliver these again.
"""

from __future__ import annotations

import os
import pkgutil
import re
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from headgate.runner.loading import import_class
from headgate.streams import checks
from headgate.testing.crash import history
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from headgate.triggers.shared_stream import AdvanceItem, AdvanceOutcome, SharedStreamProducer

SUFFIX = ".jsonl"
# The name of a message of a crash test. It is searched for in raw events of any form, in payloads, and at the broker.
MESSAGE = re.compile(r"message-\d{6}")


def message_in(value: object) -> str | None:
    """Return the name of the message that a value contains anywhere; None if it contains none."""
    found = MESSAGE.search(value if isinstance(value, str) else repr(value))
    return None if found is None else found.group()


class FilterFailed(Exception):
    """The filter of a subscriber fails, because the crash test has it fail on this message."""


class Failing(NamedTuple):
    """Messages that fail once each, by name.

    ``before``: the filter of the first subscriber to get the message raises at once, ``after``: when it pulls the next
    one, so after its events are fired. ``outcome``: the producer is given a failed outcome, whatever the filters did;
    that also shows a fault of a producer with one subscriber, whose stream ends with its filter and is opened anew.
    """

    before: Sequence[str] = ()
    after: Sequence[str] = ()
    outcome: Sequence[str] = ()


class JournaledTrigger(BaseEventTrigger):
    """Does what the trigger of ``classpath`` and ``kwargs`` does, with a journal of its producer in ``journal``.

    Messages fail as ``failing``, a `Failing`, says.
    """

    def __init__(
        self, classpath: str, kwargs: dict[str, Any], journal: str, failing: Sequence[Sequence[str]] = Failing()
    ) -> None:
        self.journal = journal
        self.failing = [list(names) for names in failing]
        inner = import_class(classpath)(**kwargs)
        assert isinstance(inner, BaseEventTrigger), "only a trigger with a producer is journaled"
        self._inner = inner

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class, with the classpath and the kwargs of the journaled trigger."""
        classpath, kwargs = self._inner.serialize()
        arguments = {"classpath": classpath, "kwargs": kwargs, "journal": self.journal, "failing": self.failing}
        return self._classpath(), arguments

    def shared_stream_key(self) -> Hashable | None:
        """Return the key of the journaled trigger."""
        return self._inner.shared_stream_key()

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Return the producer of the journaled trigger, with a journal."""
        inner = import_class(kwargs["classpath"])
        assert issubclass(inner, BaseEventTrigger)
        producer = inner.create_shared_stream_producer(kwargs["kwargs"])
        return JournaledProducer(producer, Path(kwargs["journal"]), Failing(*kwargs["failing"]).outcome)

    def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Return the filter of the journaled trigger itself."""
        self._inner._ask_last_event = self._ask_last_event
        stream = _FailingStream(shared_stream, Failing(*self.failing), Path(self.journal))
        return self._inner.filter_shared_stream(stream)

    async def cleanup(self) -> None:
        """Call the hook of the journaled trigger."""
        await self._inner.cleanup()

    async def on_kill(self) -> None:
        """Call the hook of the journaled trigger."""
        await self._inner.on_kill()


class _FailingStream:
    """A shared stream that raises in the filter that pulls from it, once for each of some messages."""

    def __init__(self, inner: AsyncIterator[Any], failing: Failing, folder: Path) -> None:
        self._inner = inner
        self._failing = failing
        self._folder = folder
        self._last: str | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._last in self._failing.after and _is_first(self._folder, self._last):
            raise FilterFailed(f"{self._last}, after its events")
        raw_event = await anext(self._inner)
        self._last = message_in(raw_event)
        if self._last in self._failing.before and _is_first(self._folder, self._last):
            raise FilterFailed(f"{self._last}, before its events")
        return raw_event


class _Marked(NamedTuple):
    broker_payload: Any
    message: str | None


class JournaledProducer(SharedStreamProducer):
    """A producer that wraps an author's producer, and records its events and its advances."""

    def __init__(self, inner: SharedStreamProducer, folder: Path, failing: Sequence[str]) -> None:
        self._inner = inner
        self.keeps_rejected = inner.keeps_rejected
        self._folder = folder
        self._failing = frozenset(failing)
        self._reader = f"{time.time_ns()}-{os.getpid()}"
        self._file = os.open(folder / f"{self._reader}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        """Yield the events of the author's producer, recorded first."""
        stream = checks.iterator(self._inner.open_stream(), f"{type(self._inner).__name__}.open_stream")
        async with aclosing(stream) as pairs:  # type: ignore[type-var]
            async for raw_event, broker_payload in pairs:
                message = message_in(raw_event)
                if message is not None:
                    lane = repr(self._inner.get_advance_lane(broker_payload))
                    self._write(history.HandedOut(message, lane, self._reader))
                yield raw_event, _Marked(broker_payload, message)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Record the batch, then have the author's producer advance it."""
        batch = [self._failed_once(item) for item in batch]
        items = tuple(
            history.AdvancedItem(item.broker_payload.message, *_counts(item))
            for item in batch
            if item.broker_payload.message is not None
        )
        if items:
            lane = repr(self._inner.get_advance_lane(batch[0].broker_payload.broker_payload))
            self._write(history.Advanced(lane, self._reader, items))
        await self._inner.advance([AdvanceItem(item.broker_payload.broker_payload, item.outcome) for item in batch])

    def get_advance_lane(self, broker_payload: _Marked) -> Hashable:
        """Return the lane the author's producer gives."""
        return self._inner.get_advance_lane(broker_payload.broker_payload)

    def event_key(self, broker_payload: _Marked) -> str | None:
        """Return the key the author's producer gives."""
        return self._inner.event_key(broker_payload.broker_payload)

    async def aclose(self) -> None:
        """Close the author's producer, then the journal."""
        try:
            await self._inner.aclose()
        finally:
            os.close(self._file)

    def _failed_once(self, item: AdvanceItem) -> AdvanceItem:
        message = item.broker_payload.message
        if message not in self._failing or not _is_first(self._folder, message):
            return item
        return AdvanceItem(item.broker_payload, AdvanceOutcome(failed=1))

    def _write(self, record: history.Record) -> None:
        os.write(self._file, history.encode(record))


def _is_first(folder: Path, message: str | None) -> bool:
    """Return whether a message is to fail now: only once, whatever is killed."""
    try:
        (folder / f"{message}.failed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _counts(item: AdvanceItem) -> tuple[int, int, int]:
    return item.outcome.acked, item.outcome.failed, item.outcome.rejected


class ProducerTrigger(BaseEventTrigger):
    """A trigger that fires every raw event of a producer, for a producer without a trigger of its own."""

    def __init__(self, classpath: str, kwargs: dict[str, Any]) -> None:
        self.classpath = classpath
        self.kwargs = kwargs

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class and the producer's."""
        return self._classpath(), {"classpath": self.classpath, "kwargs": self.kwargs}

    def shared_stream_key(self) -> tuple[str, str, str]:
        """Return one key for all triggers of one producer with the same arguments."""
        return "producer", self.classpath, repr(self.kwargs)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Return the producer."""
        make: Callable[..., SharedStreamProducer] = pkgutil.resolve_name(kwargs["classpath"])
        return make(**kwargs["kwargs"])


def subject_of(trigger: BaseTrigger) -> str:
    """Return the classpath of the author's class that a crash test is about."""
    return trigger.classpath if isinstance(trigger, ProducerTrigger) else trigger.serialize()[0]


RecordT = TypeVar("RecordT")


class JournalReader(Generic[RecordT]):
    """Reads, in the test's process, the records that were appended to the journals in a folder since the last read.

    ``decode`` is `history.decode_lines`, or a similar function for another kind of records.
    """

    def __init__(self, folder: Path, decode: Callable[..., Iterable[RecordT]]) -> None:
        self._folder = folder
        self._decode = decode
        self._read_to: dict[Path, int] = {}

    def read(self) -> list[RecordT]:
        """Return the new records, file by file, in the order of their names: those of readers begin with their time."""
        records: list[RecordT] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            read_to = self._read_to.get(path, 0)
            with path.open("rb") as file:
                file.seek(read_to)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read_to[path] = read_to + len(data)
            records += self._decode(data, where=path.name)
        return records


def is_journaled(trigger: BaseTrigger) -> bool:
    """Whether a trigger has a producer, whose events and advances can be recorded."""
    return (
        isinstance(trigger, BaseEventTrigger)
        and trigger.shared_stream_key() is not None
        and checks.has_producer(type(trigger))
    )
