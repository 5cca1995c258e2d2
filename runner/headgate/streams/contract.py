"""The contract of producers: the methods they implement, the values they get, and the errors that subscribers see.

Everything here is public through `headgate.triggers.shared_stream`.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headgate.child import queries
from headgate.protocol.messages.queries import GetConnection
from headgate.protocol.messages.runner import LagUnit, LaneProgress, Position
from headgate.triggers.named_values import Connection, connection_of


@dataclass(frozen=True, slots=True)
class AdvanceOutcome:
    """How the subscribers that were online when an event was broadcast resolved it; each counts once.

    ``acked``: moved past it, with every event derived from it confirmed persisted. ``failed``: the subscriber was
    failed (ack timeout, overflow) or cut short (I13); the broker should redeliver. ``rejected``: the subscriber
    rejected the event for good; the broker should dead-letter it.
    """

    acked: int = 0
    failed: int = 0
    rejected: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether at least one subscriber accepted the event, and none failed or rejected it.

        All zeros is not clean: nothing was accepted. What nobody gets counts as failed once.
        """
        return self.acked > 0 and self.failed == 0 and self.rejected == 0


class Undecodable(NamedTuple):
    """A message that the producer cannot decode, which ``open_stream`` yields in place of a raw event.

    No filter gets it. It becomes a dead letter of each subscriber, with ``reason`` and ``content`` (of types with a
    stored form, as text and bytes), and counts as acked once the letters are stored. If ``is_whole`` is false,
    ``content`` is the beginning of the message only; then it counts as rejected once they are stored, and the broker
    has to keep it. ``whole_bytes`` is then the size of the message, if that is known.
    """

    reason: str
    content: Any
    is_whole: bool = True
    whole_bytes: int | None = None


class Lag(NamedTuple):
    """How much the broker of a stream has that is not advanced yet, with what is handed out; see `known_lag`."""

    amount: int
    unit: LagUnit = "messages"


class LanePosition(NamedTuple):
    """One lane as its broker has it; see `SharedStreamProducer.describe`. None: the broker cannot tell.

    Positions are tuples of numbers, a later place is greater: ``(42,)`` for an offset. ``end`` is behind the newest
    message, ``first`` at the oldest. ``committed``: what is before it is handled by this reader, () if nothing is.
    ``lag``: how many messages the broker still has for it; ``missing``: how many it has dropped before they were read.
    ``is_shared``: others may read the lane under the same name, and commit. ``deliveries``: how many the broker has
    counted, 0 if it does not count (`LaneProgress`).
    """

    lane: str = ""
    end: Position | None = None
    first: Position | None = None
    committed: Position | None = None
    lag: int | None = None
    missing: int = 0
    is_shared: bool = False
    deliveries: int = 0


class AdvanceItem(NamedTuple):
    """One resolved event of a batch handed to `SharedStreamProducer.advance`."""

    broker_payload: Any
    outcome: AdvanceOutcome


class SharedStreamProducer(abc.ABC):
    """The broker's side of a shared stream in ack mode: owns the connection for the lifetime of one poll.

    Whatever any method raises, `SystemExit` included, ends this stream only. `advance` may still be called
    after `open_stream` has ended or was cancelled, and `aclose` comes last: a connection that `advance` needs
    is kept on ``self`` and released in `aclose`. `open_stream` and `aclose` run in one task, so a context
    manager, or a `contextlib.AsyncExitStack`, may be entered in the one and left in the other::

        # inbox.py
        import json

        import trio

        from headgate.triggers.shared_stream import SharedStreamProducer


        class Inbox(SharedStreamProducer):
            def __init__(self, folder):
                self.folder = trio.Path(folder)
                self.handed_out = set()

            async def open_stream(self):
                while True:
                    for path in sorted(await self.folder.glob("*.json")):
                        if path not in self.handed_out:
                            self.handed_out.add(path)
                            yield json.loads(await path.read_text()), path
                    await trio.sleep(0.1)

            async def advance(self, batch):
                for path, outcome in batch:
                    if outcome.failed:
                        self.handed_out.discard(path)  # so it is handed out again
                    else:
                        await path.unlink(missing_ok=True)

            def event_key(self, path):
                return path.name
    """

    # Whether the broker has a place for messages that subscribers reject. If not, a rejected message becomes a dead
    # letter of the subscriber that rejected it, and counts as acked once the letter is stored; the outcome is
    # *rejected* only if the letter could not hold the message whole. Read when the stream is opened.
    keeps_rejected: bool = True

    @abc.abstractmethod
    def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        """Connect and yield ``(raw_event, broker_payload)`` for ever; written as ``async def`` with ``yield``.

        Called once. ``broker_payload`` is what `advance` needs later (an offset, a receipt handle). A message that
        cannot be decoded is yielded as an `Undecodable`, so that it is neither lost nor ends the stream.
        Returning is an error, like raising: either ends the stream for every subscriber.
        """

    @abc.abstractmethod
    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Commit, acknowledge or send back one lane's resolved events on the broker.

        ``batch`` is never empty; its items are in fan-out order and follow the lane's previous batch
        without a gap. One call is awaited at a time, whatever the number of lanes (I4). A batch may hold
        failed events: a cumulative commit must not pass them (I3). Raising ends the stream, and so does a call
        that takes longer than ``advance_timeout_s``; the broker then redelivers what was never committed.
        """

    def get_advance_lane(self, broker_payload: Any) -> Hashable:
        """Return the lane of one event: events of one lane are advanced in fan-out order, lanes do not wait.

        Called once per event before it is broadcast; it must be cheap and must not block. By default all
        events share one lane. Raising, or a value without a hash, ends the stream.
        """
        return None

    def event_key(self, broker_payload: Any) -> str | None:
        """Return the broker's own name for the message, the same at every redelivery; None if it has none.

        It makes redelivered events recognisable, so that none is stored twice (I2). Called once per event
        before it is broadcast, like `get_advance_lane`; at most `headgate.protocol.messages.runner.KEY_CHARS_MAX`
        characters, and not an empty text. Raising, or anything else, ends the stream.
        """
        return None

    def known_lag(self) -> Lag | None:
        """Return how far the stream is behind, as far as the producer knows without asking; None if it does not.

        For people and alerts (``headgate streams list``). Called about once a second between two messages: it must be
        cheap, and neither block nor ask the broker. What it raises counts as None. A
        `headgate.brokers.threaded.ThreadedProducer` has it: its thread asks the adapter's `lag` every 15 s.
        """
        return None

    def known_trouble(self) -> str | None:
        """Return why the producer has no connection to its broker at this moment; None if it has one, or cannot tell.

        For people (``headgate status``), and called as `known_lag` is. What it raises counts as None. A
        `headgate.brokers.threaded.ThreadedProducer` has it.
        """
        return None

    async def describe(self) -> Sequence[LanePosition]:
        """Ask the broker how far it has got, and return that for each lane; empty: it cannot tell.

        For people alone (``headgate streams drift``). It is called on a producer that was made for this question:
        `open_stream` is not called, and another producer may read the stream meanwhile, which it must not disturb. It
        may change nothing at the broker. Cancelled if it takes too long. Raise `SourceMissing` if the broker does not
        have what is read.
        """
        return ()

    def progress(self) -> Sequence[LaneProgress]:
        """Return how far this producer has come in its lanes, as `describe` names them; empty if that is not kept.

        Called about once a second: it must be cheap, and neither block nor ask the broker. What it raises counts as
        empty. `headgate.brokers.progress.Progress` keeps it.
        """
        return ()

    async def get_connection(self, name: str) -> Connection:
        """Return the connection that a user has stored under ``name``; see `headgate.tasks.Connection`.

        So a trigger's kwargs name a connection, and hold no secret (I12). Call it in `open_stream`, for each attempt
        to connect, because a password may have changed. Raises as `BaseTrigger.get_connection`.
        """
        return connection_of(name, await queries.send_query_from_trigger(GetConnection(name)))

    async def aclose(self) -> None:  # noqa: B027 - a hook: doing nothing is the default
        """Release what the producer holds. Called exactly once, last of all, within a time limit; best-effort."""


class SourceMissing(Exception):
    """The broker does not have what a producer is to read, or not any more; its text says what."""


class AckTimeout(Exception):
    """The subscriber did not finish an event within the ack timeout: still working on it, or not confirmed persisted.

    With ``after_end``: its stream failed, and it did not leave within that time.
    """

    def __init__(self, key: Hashable, ack_timeout_s: float, *, after_end: bool = False) -> None:
        problem = f"an event of shared stream {key!r} was not finished and confirmed persisted"
        if after_end:
            problem = f"the poll of shared stream {key!r} ended, and its subscriber did not"
        super().__init__(f"{problem} within {ack_timeout_s:g} s")
        self.key = key
        self.ack_timeout_s = ack_timeout_s


class AdvanceTimeout(Exception):
    """An `SharedStreamProducer.advance` did not return in time: its stream ends, and the broker redelivers."""

    def __init__(self, key: Hashable, producer: str, timeout_s: float) -> None:
        super().__init__(f"{producer}.advance of shared stream {key!r} did not return within {timeout_s:g} s")
        self.key = key
        self.producer = producer
        self.timeout_s = timeout_s


class SubscriberOverflow(Exception):
    """The subscriber did not keep up: its queue of raw events was full at the next broadcast.

    If a full queue pauses the stream instead (``overflow="pause"``): the queue was full for ``held_s`` seconds, and
    nothing was pulled from it in that time.
    """

    def __init__(self, key: Hashable, queue_events_max: int, *, held_s: float | None = None) -> None:
        if held_s is None:
            text = f"more than {queue_events_max:,} raw events of shared stream {key!r} were waiting"
        else:
            text = f"nothing was pulled for {held_s:g} s from a full queue, for which shared stream {key!r} waited"
        super().__init__(text)
        self.key = key
        self.queue_events_max = queue_events_max
        self.held_s = held_s


class PollTerminated(Exception):
    """The stream's poll ended; ``__cause__`` is the reason, and None if the stream was stopped."""

    def __init__(self, key: Hashable) -> None:
        super().__init__(f"the poll of shared stream {key!r} ended")
        self.key = key
