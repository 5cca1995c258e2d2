"""`ThreadedProducer`: the base of producers whose broker has a blocking client, in a thread of its own for each stream.

The problem. `open_stream` is a coroutine that may not be pulled for minutes, because a queue is full or a subscriber is
absent. Meanwhile heartbeats are due, leases of messages end, and connections break. And a blocking client must never
run in trio's thread, where it would hold up all other triggers.

The idea. One thread for each stream has the client and calls nothing but the methods of the adapter, one at a time. It
takes messages as long as fewer than ``in_flight_max`` are unresolved, hands them over to `open_stream`, and
acknowledges what `advance` has put into its queue. So `advance` never waits for a network, and a client that hangs
hangs its own stream only.

That `advance` returns before the broker knows is safe: a message whose acknowledgement is lost is delivered again, and
its events are recognised by its key (I2). Two rules are added to it. The right to acknowledge may pass to another
supervisor (I10), so an acknowledgement that could not be made within `SETTLE_S`, because the connection was lost or the
process was stopped, is not made at all: the message is handed out again from memory. And an outcome counts only for the
newest delivery of its message (`headgate.brokers.held`).
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Callable, Collection, Hashable, Sequence
from typing import Any, ClassVar

import structlog
import trio

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured, BrokerUnreachable
from headgate.brokers.broker_thread import BrokerStatistics, BrokerThread, Limits
from headgate.brokers.checked import CheckedProducer
from headgate.brokers.held import Delivery, PlaceRefuses, Received
from headgate.brokers.progress import Progress
from headgate.child.own_threads import OwnThreads
from headgate.protocol.messages.runner import LaneProgress
from headgate.triggers.shared_stream import AdvanceItem, Lag, LanePosition, Undecodable

__all__ = [
    "BrokerError",
    "BrokerMisconfigured",
    "BrokerStatistics",
    "BrokerUnreachable",
    "PlaceRefuses",
    "Received",
    "ThreadedProducer",
    "oversized",
]

IN_FLIGHT_MAX = 1_000  # messages handed out and unresolved: what is delivered again after a crash
IN_FLIGHT_BYTES_MAX = 64 * 1024 * 1024  # of these; one receive may exceed it by its own messages
MESSAGE_BYTES_MAX = 1024 * 1024  # a longer message is not handed out, and becomes a dead letter
POLL_S = 0.1  # the longest that one receive may wait: acknowledgements wait as long
RECONNECT_S = 0.2  # before the second attempt to connect, then twice as long, ...
RECONNECT_MAX_S = 30.0  # ... up to this
GIVE_UP_S = 300.0  # trouble for longer than this ends the stream, and its triggers show why; also that of its place
RETRY_S = 0.1  # before a message that failed is handed out again, then twice as long, ...
RETRY_MAX_S = 30.0  # ... up to this
CLOSE_S = 4.0  # below `headgate.streams.group.PRODUCER_CLOSE_TIMEOUT_S`
HEAD_BYTES_MAX = 4096  # kept of a message that is too long
ASKING_THREADS_MAX = 8  # a question to a broker that hangs keeps its thread until the client gives up

_log = structlog.get_logger("headgate.brokers")
_asking = OwnThreads("headgate questions to brokers", ASKING_THREADS_MAX)


class ThreadedProducer(CheckedProducer):
    """A producer with a blocking client. An adapter is a subclass that has `name`, `connect`, `receive`,
    `acknowledge` and `disconnect`; ``docs/brokers.md`` shows a whole one.

    ``connection`` names a stored connection, which `connect` finds as ``self.connection``, read anew for each attempt;
    None if the adapter needs none. The limits: ``in_flight_max`` messages handed out and unresolved, of
    ``in_flight_bytes_max`` bytes; ``message_bytes_max`` bytes of one message, which the adapter checks by `oversized`;
    ``poll_s`` seconds of one `receive`; ``extend_s`` seconds between two calls of `extend`, a third of the time for
    which the broker lends a message; ``reconnect_s`` to ``reconnect_max_s`` seconds between two attempts to connect;
    ``give_up_s`` seconds of trouble, or without a place for rejected messages, until the stream ends; ``retry_s`` to
    ``retry_max_s`` seconds before a message that failed, or that its place has refused, is handed out again;
    ``close_s`` seconds for the thread to end. Raises ValueError for a limit that is not more than 0.
    """

    # Exceptions of the client that end a connection and not the stream: it connects anew.
    trouble: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    # Whether a ref can be acknowledged on a later connection. If not, all messages held are forgotten with their
    # connection, and the broker delivers them again.
    handles_survive: ClassVar[bool] = True
    # Whether messages are acknowledged one by one. If not (offsets), none can be left to the broker unacknowledged.
    acknowledges_each: ClassVar[bool] = True
    # Whether a message that is left to the broker unacknowledged takes the room of another one there (a prefetch).
    left_takes_room: ClassVar[bool] = False
    keeps_rejected = False
    _accepts_drop = False

    def __init__(
        self,
        connection: str | None = None,
        *,
        in_flight_max: int = IN_FLIGHT_MAX,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        poll_s: float = POLL_S,
        extend_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        reconnect_max_s: float = RECONNECT_MAX_S,
        give_up_s: float = GIVE_UP_S,
        retry_s: float = RETRY_S,
        retry_max_s: float = RETRY_MAX_S,
        close_s: float = CLOSE_S,
    ) -> None:
        super().__init__(connection)
        self.limits = Limits(
            in_flight_max=in_flight_max,
            in_flight_bytes_max=in_flight_bytes_max,
            message_bytes_max=message_bytes_max,
            poll_s=poll_s,
            extend_s=extend_s,
            reconnect_s=reconnect_s,
            reconnect_max_s=reconnect_max_s,
            give_up_s=give_up_s,
            retry_s=retry_s,
            retry_max_s=retry_max_s,
            close_s=close_s,
        )
        self._broker_thread = BrokerThread(self, self.limits)
        self.lane_progress = Progress()  # kept by the adapter, if its broker knows positions

    # --- what an adapter writes; all are called in the producer's thread, one at a time, and may block ------------

    @abc.abstractmethod
    def connect(self) -> None:
        """Connect, and look whether the broker is fit; `receive` then begins with what is unacknowledged.

        Raises `BrokerMisconfigured` if trying again would not help, and else what ``trouble`` names.
        """

    @abc.abstractmethod
    def receive(self, count_max: int, wait_s: float) -> Sequence[Received]:
        """Return up to ``count_max`` messages; wait for the first for ``wait_s`` seconds at most.

        Messages that are delivered again may be returned, also while they are held: they are recognised by their ref.
        """

    @abc.abstractmethod
    def acknowledge(self, messages: Sequence[Received]) -> None:
        """Tell the broker that these are handled: all derived from them is stored (I1). Lanes are in order (I3).

        If it raises, it is called again with the same messages, after a new connection, for two seconds at most.
        """

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close the client. Called after each failure and at the end, also if `connect` has raised."""

    def reject(self, messages: Sequence[Received]) -> None:
        """Put these into the broker's place for rejected messages, then acknowledge them; if `keeps_rejected`.

        Raises `PlaceRefuses` if the place does not take all of them for now and the connection is sound: the rest is
        handed out again later. Most adapters call `put_aside`.
        """
        raise NotImplementedError(f"{type(self).__name__} sets keeps_rejected and has no reject()")

    def put_aside(self, messages: Sequence[Received], put: Callable[[Received], None]) -> None:
        """Call ``put`` for each message, then acknowledge those for which it has not raised `PlaceRefuses`.

        Raises that for the others, among which are all that are behind one in its lane (I3).
        """
        placed, refused, lanes = list[Received](), list[Received](), set[Hashable]()
        why: PlaceRefuses | None = None
        for message in messages:
            try:
                if message.lane not in lanes:
                    put(message)
            except PlaceRefuses as error:
                why = error
                lanes.add(message.lane)
            (refused if message.lane in lanes else placed).append(message)
        if placed:
            self.acknowledge(placed)
        if why is not None:
            raise PlaceRefuses(str(why), refused)

    def _drop(self, problem: str) -> None:
        """Refuse a source that loses messages, unless the user has said that it is to be read all the same."""
        if not self._accepts_drop:
            raise BrokerMisconfigured(f"{self.name}: {problem}; accept_drop=true reads it all the same")
        self.warn(problem)

    def leave(self, messages: Sequence[Received]) -> None:
        """Note that these stay unacknowledged on this connection; for a broker that wants acknowledgements in order."""

    def look(self) -> None:
        """Connect, and look; to be overridden where that would disturb a running reader."""
        self.connect()

    @property
    def room(self) -> int:
        """How many messages the broker gives out before one is acknowledged; see ``left_takes_room``."""
        return self.limits.in_flight_max

    @property
    def extend_s(self) -> float | None:
        """The seconds between two calls of `extend`; to be overridden where the broker says for how long it lends."""
        return self.limits.extend_s

    def extend(self, refs: Sequence[Any]) -> None:
        """Have the broker lend these messages for longer; called every ``extend_s`` seconds while any is held."""

    def give_back(self, refs: Sequence[Any]) -> None:
        """Have the broker deliver these at once to whom reads next; called as the thread ends in order.

        For a broker that lends a message for some time.
        """

    def positions(self) -> Sequence[LanePosition]:
        """Connect, and return how far the broker has got, for `describe`; `disconnect` follows.

        By default this is what `lag` says, after `look`: to be overridden where the broker knows positions, or where
        `look` may make what is not there.
        """
        self.look()
        lag = self.lag()
        return () if lag is None else (LanePosition(lag=lag),)

    @property
    def known(self) -> int | None:
        """How many messages that the broker has given to us are held, or were left to it; None if that is not known.

        For a broker that can say how many it should be; to be asked outside of `receive`.
        """
        return self._broker_thread.known

    def idle(self) -> None:
        """Keep the connection alive while nothing may be received; called at least every ``poll_s`` seconds."""

    # --- for a broker that gives lanes to one reader and takes them away: called within `receive` or `idle` ---------

    def settle(self) -> None:
        """Have what is resolved by now acknowledged or rejected, before lanes are given away."""
        self._broker_thread.settle()

    def forget_lanes(self, lanes: Collection[Hashable]) -> None:
        """Forget all that is held of lanes that another reader has now: no outcome of it reaches `acknowledge`."""
        self._broker_thread.forget_lanes(lanes)

    # --- the stream's side, in trio's thread ----------------------------------------------------------------------

    async def open_stream(self) -> AsyncGenerator[tuple[Any, Delivery], None]:
        """Yield the messages that the thread has received, for ever. Raises what the thread has ended with."""
        thread = self._broker_thread
        thread.start()
        while True:
            while (delivery := thread.next_arrived()) is not None:
                yield delivery.message.raw_event, delivery
            self._raise_failure()
            await thread.news.park()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Give the outcomes to the thread. Raises what it has ended with."""
        self._raise_failure()
        self._broker_thread.resolve(batch)

    def get_advance_lane(self, broker_payload: Delivery) -> Hashable:
        """Return the lane that the adapter gave the message."""
        return broker_payload.message.lane

    def event_key(self, broker_payload: Delivery) -> str | None:
        """Return the key that the adapter gave the message."""
        return broker_payload.message.key

    def known_lag(self) -> Lag | None:
        """Return what the adapter's `lag` said last."""
        lag = self._broker_thread.statistics().lag
        return None if lag is None else Lag(lag)

    def known_trouble(self) -> str | None:
        """Return the error with which the thread has lost its connection, or did not get one."""
        return self._broker_thread.trouble

    async def describe(self) -> Sequence[LanePosition]:
        """Ask the adapter's `positions` in a thread, with a connection of its own."""
        if self.connection_name is not None:
            self.connection = await self.get_connection(self.connection_name)
        return await _asking.run(self._ask_positions)

    def _ask_positions(self) -> Sequence[LanePosition]:
        try:
            return self.positions()
        finally:
            self.disconnect()

    def progress(self) -> tuple[LaneProgress, ...]:
        """Return what the adapter has kept."""
        return self.lane_progress.lanes()

    async def aclose(self) -> None:
        """Have the thread acknowledge what it may, and end; a client that hangs is left to itself after ``close_s``."""
        thread = self._broker_thread
        thread.stop()
        if not thread.has_begun:
            return
        with trio.move_on_after(self.limits.close_s) as scope:
            await thread.is_done.wait()
        if scope.cancelled_caught:
            _log.warning("the client of a broker hangs and is abandoned", stream=self.name, after_s=self.limits.close_s)

    def statistics(self) -> BrokerStatistics:
        """Return the state of the producer at this moment; may be called in any thread."""
        return self._broker_thread.statistics()

    def _raise_failure(self) -> None:
        if self._broker_thread.failure is not None:
            raise self._broker_thread.failure


def oversized(size_bytes: int, head: bytes, bytes_max: int) -> Undecodable | None:
    """Return what to hand out for a message of so many bytes, of which ``head`` is the beginning; None if it may pass.

    The dead letter has only the beginning, so the message stays with the broker, or goes to its place for rejected
    ones.
    """
    if size_bytes <= bytes_max:
        return None
    reason = f"the message has {size_bytes:,} bytes, and message_bytes_max is {bytes_max:,}"
    return Undecodable(reason, head[:HEAD_BYTES_MAX], is_whole=False, whole_bytes=size_bytes)
