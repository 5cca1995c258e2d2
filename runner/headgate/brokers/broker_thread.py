"""The thread of a `headgate.brokers.threaded.ThreadedProducer`: the only one that touches the client of its broker.

It repeats three things: tell the broker of outcomes, hand out what is due again, receive while there is room. What goes
wrong is either trouble of the broker, after which it connects anew, or ends the stream. `headgate.brokers.held` has the
books.
"""

from __future__ import annotations

import contextvars
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import trio

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured, BrokerUnreachable
from headgate.brokers.held import Delivery, HeldMessages, PlaceRefuses, Received
from headgate.child.error_text import describe_error
from headgate.child.queries import QueryFailed
from headgate.triggers.named_values import ConnectionMissing

if TYPE_CHECKING:
    from headgate.brokers.threaded import ThreadedProducer
    from headgate.triggers.shared_stream import AdvanceItem

RECEIVE_MAX = 250  # messages of one receive: acknowledgements wait for no more than these
SETTLE_MAX = 1_000  # messages of one acknowledgement
REJECT_MAX = 50  # messages put aside, perhaps one by one, before what is held is extended
# An acknowledgement is made within this time after its advance, or not at all. Far below the part of the lease's
# silence that the supervisor keeps for advances that have begun (`headgate.supervisor.triggers.leases.ADVANCE_SHARE`).
SETTLE_S = 2.0
LAG_INTERVAL_S = 15.0  # between two questions how far the stream is behind

_log = structlog.get_logger("headgate.brokers")


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """A producer at one moment. ``lag``: messages that the broker still has for it; None if that is unknown."""

    is_connected: bool
    connections: int  # made so far
    held: int  # messages handed out, and not yet acknowledged
    held_bytes: int
    received: int
    redelivered: int  # handed out again from memory, because they failed
    acknowledged: int
    rejected: int
    lag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one producer, as its class explains them. Raises ValueError for one that is not more than 0."""

    in_flight_max: int
    in_flight_bytes_max: int
    message_bytes_max: int
    poll_s: float
    extend_s: float | None
    reconnect_s: float
    reconnect_max_s: float
    give_up_s: float
    retry_s: float
    retry_max_s: float
    close_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be more than 0, not {value!r}")


class BrokerThread:
    """The thread, and what it shares with trio's: two queues, one of deliveries and one of outcomes."""

    def __init__(self, producer: ThreadedProducer, limits: Limits) -> None:
        self.limits = limits
        self.failure: BaseException | None = None  # what the thread has ended with, if it was not asked to
        self.news = trio.lowlevel.ParkingLot()  # of trio's thread: woken if something has arrived, or at the end
        self.is_done = trio.Event()
        self._arrived: deque[Delivery] = deque()
        self._arrived_lock = threading.Lock()  # held for moments only
        self._outcomes: deque[tuple[Sequence[AdvanceItem], float]] = deque()
        self._producer = producer
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        # From here on the thread's own.
        self._held = HeldMessages(retry_s=limits.retry_s, retry_max_s=limits.retry_max_s)
        self._is_connected = False
        self.trouble: str | None = None  # why there is no connection
        self._connections = self._received = self._acknowledged = self._rejected = 0
        self._taken = 0  # messages that were not held before
        self._unplaced_since: float | None = None  # since then no rejected message could be put aside, ...
        self._unplaced_at = 0.0  # ... and this is when one could not last
        self._is_stuck = False  # the connection has failed on rejected messages, and not for the first time
        self._lag: int | None = None
        self._lag_at = self._extend_at = float("-inf")

    # --- trio's thread -------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether `start` was called."""
        return self._token is not None

    def start(self) -> None:
        """Begin. The thread is a daemon: a client that hangs for ever does not keep the process alive."""
        self._token = trio.lowlevel.current_trio_token()
        # The context has the way to ask the supervisor for the connection.
        run = contextvars.copy_context().run
        name = f"headgate {self._producer.name}"
        threading.Thread(target=run, args=(self._main,), name=name, daemon=True).start()

    def next_arrived(self) -> Delivery | None:
        """Take what is to be handed out next; None if nothing has arrived."""
        with self._arrived_lock:
            while self._arrived:
                if not (delivery := self._arrived.popleft()).is_stale:
                    return delivery
        return None

    def resolve(self, batch: Sequence[AdvanceItem]) -> None:
        """Take the outcomes of an advance, which is called at this moment. Never blocks."""
        self._outcomes.append((batch, time.monotonic()))
        self._wake.set()

    def stop(self) -> None:
        """Have the thread tell the broker of the outcomes that it has, and end."""
        self._stopping.set()
        self._wake.set()

    def statistics(self) -> BrokerStatistics:
        """Return the state of the producer at this moment."""
        return BrokerStatistics(
            is_connected=self._is_connected,
            connections=self._connections,
            held=len(self._held),
            held_bytes=self._held.bytes,
            received=self._received,
            redelivered=self._held.redelivered,
            acknowledged=self._acknowledged,
            rejected=self._rejected,
            lag=self._lag,
        )

    def _note_end(self) -> None:
        self.is_done.set()
        self.news.unpark_all()

    # --- its own -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Tell the broker of all outcomes that have come."""
        self._take_outcomes()
        while self._settle():
            self._extend()  # what waits for its turn: a place may take its time for each message

    @property
    def known(self) -> int | None:
        """How many messages of the broker are held, or were left to it; None if not all of the latter are known."""
        return self._held.known

    def forget_lanes(self, lanes: Collection[Hashable]) -> None:
        """Forget the messages of these lanes; their outcomes are ignored."""
        self._held.drop(lanes)

    def _main(self) -> None:
        try:
            self._work_until_stopped()
        except BaseException as failure:  # whatever it is, it ends this stream only
            if not self._stopping.is_set():
                self.failure = failure
        finally:
            self._disconnect()
            self._tell_trio(self._note_end)

    def _tell_trio(self, call: Callable[[], object]) -> None:
        assert self._token is not None
        try:
            self._token.run_sync_soon(call, idempotent=True)
        except trio.RunFinishedError:
            self._stopping.set()

    def _work_until_stopped(self) -> None:
        producer, limits = self._producer, self.limits
        trouble: tuple[type[Exception], ...] = (*producer.trouble, QueryFailed)
        attempts, trouble_since = 0, None
        while not self._stopping.is_set():
            connected_at, done_before = float("inf"), self._done
            try:
                self._connect()
                connected_at = time.monotonic()
                while not self._is_over():
                    self._step()
                return
            except trouble as error:
                now = time.monotonic()
                # A connection alone is no success: it may end each time at the same message.
                if self._done > done_before or now - connected_at >= limits.reconnect_max_s:
                    attempts, trouble_since = attempts if self._is_stuck else 0, None
                self._is_stuck = False
                trouble_since = now if trouble_since is None else trouble_since
                if now - trouble_since >= limits.give_up_s:
                    raise BrokerUnreachable(producer.name, limits.give_up_s) from error
                wait_s = min(limits.reconnect_s * 2.0 ** min(attempts, 64), limits.reconnect_max_s)
                wait_s *= random.uniform(0.5, 1)  # so that many streams do not come back at the same moment
                attempts += 1
                text, _ = describe_error(error)
                self.trouble = text
                _log.warning("a broker is in trouble", stream=producer.name, error=text, again_in_s=round(wait_s, 2))
                self._disconnect()
                self._stopping.wait(wait_s)

    @property
    def _done(self) -> int:
        """What grows with each success: of messages that come anew with each connection the taking is none."""
        return self._acknowledged + self._rejected + (self._taken if self._producer.handles_survive else 0)

    def _connect(self) -> None:
        producer = self._producer
        if producer.connection_name is not None:
            try:
                producer.connection = trio.from_thread.run(
                    producer.get_connection, producer.connection_name, trio_token=self._token
                )
            except (ConnectionMissing, ValueError) as error:
                raise BrokerMisconfigured(f"{producer.name}: {error}") from None
        if not producer.handles_survive:
            self._held.clear()
        producer.connect()
        self._is_connected, self.trouble = True, None
        self._connections += 1
        if self._connections > 1:
            _log.info("a broker is connected again", stream=producer.name, connections=self._connections)
        self._extend_at = self._lag_at = float("-inf")

    def _disconnect(self) -> None:
        self._is_connected = False
        try:
            self._producer.disconnect()
        except Exception as error:  # the connection is given up anyway
            text, _ = describe_error(error)
            _log.debug("closing the client of a broker failed", stream=self._producer.name, error=text)

    def _is_over(self) -> bool:
        """Whether the thread is to end. The broker knows all outcomes that came before."""
        if not self._stopping.is_set():
            return False
        self.settle()
        self._producer.give_back(self._held.refs)
        return True

    def _step(self) -> None:
        """Do what is due, and wait for messages or outcomes for ``poll_s`` at most."""
        producer, limits, held = self._producer, self.limits, self._held
        self._wake.clear()
        self.settle()
        now = time.monotonic()
        self._hand_over(held.due(now))
        self._extend()
        if now >= self._lag_at:
            self._lag_at = now + LAG_INTERVAL_S
            self._lag = producer.lag()
        next_due = held.next_due()
        until = now + limits.poll_s if next_due is None else min(now + limits.poll_s, next_due)
        room = min(RECEIVE_MAX, limits.in_flight_max - len(held))
        if room > 0 and held.bytes < limits.in_flight_bytes_max:
            messages = producer.receive(room, 0.0 if self._wake.is_set() else max(0.0, until - now))
            self._received += len(messages)
            held_before = len(held)
            self._hand_over(held.take(messages))
            self._taken += len(held) - held_before
            if messages:
                return
        else:
            producer.idle()
        # After a receive that has waited itself, nothing is left to wait for.
        self._wake.wait(max(0.0, until - time.monotonic()))

    def _extend(self) -> None:
        now, held = time.monotonic(), self._held
        if (extend_s := self._producer.extend_s) is not None and held and now >= self._extend_at:
            self._extend_at = now + extend_s
            self._producer.extend(held.refs)

    def _hand_over(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            with self._arrived_lock:
                if len(self._arrived) > self.limits.in_flight_max:
                    # A stream may not be pulled for long, while its messages come anew with each connection.
                    self._arrived = deque(each for each in self._arrived if not each.is_stale)
                self._arrived.extend(deliveries)
            self._tell_trio(self.news.unpark_all)

    def _take_outcomes(self) -> None:
        while self._outcomes:
            batch, at = self._outcomes.popleft()
            for item in batch:
                self._held.resolve(item.broker_payload, item.outcome, at)

    def _settle(self) -> bool:
        """Tell the broker of outcomes; return whether there may be more."""
        producer = self._producer
        messages, are_rejected = self._held.settled(time.monotonic(), SETTLE_S, SETTLE_MAX)
        if not messages:
            return False
        if not are_rejected:
            producer.acknowledge(messages)
            self._held.forget(messages)
            self._acknowledged += len(messages)
            return True
        if producer.keeps_rejected:
            self._put_aside(messages[:REJECT_MAX])
        else:
            self._leave(messages)
            self._rejected += len(messages)
        return True

    def _put_aside(self, rejected: Sequence[Received]) -> None:
        """Have the broker's place take rejected messages; those that it refuses are handed out again later.

        Raises `BrokerError` if it takes none for ``give_up_s``, however often the connection is made anew meanwhile.
        """
        refused: Sequence[Received] = ()
        try:
            self._producer.reject(rejected)
        except PlaceRefuses as error:
            refused = error.messages or rejected
            self._note_unplaced(error, has_placed=len(refused) < len(rejected))
            _log.warning(
                "the place for rejected messages refuses some",
                stream=self._producer.name,
                error=str(error),
                messages=len(refused),
            )
            self._held.put_back(refused, time.monotonic())
        except self._producer.trouble as error:
            self._note_unplaced(error, has_placed=False)
            self._is_stuck = self._unplaced_since != self._unplaced_at
            raise
        else:
            self._unplaced_since = None
        refs = {message.ref for message in refused}
        placed = [message for message in rejected if message.ref not in refs]
        self._held.forget(placed)
        self._rejected += len(placed)

    def _note_unplaced(self, error: Exception, *, has_placed: bool) -> None:
        limits, now = self.limits, time.monotonic()
        # A message is tried again within this time: what fails later has nothing to do with what failed before.
        again_s = limits.give_up_s + limits.retry_max_s + limits.reconnect_max_s
        if has_placed or self._unplaced_since is None or now - self._unplaced_at > again_s:
            self._unplaced_since = now
        self._unplaced_at = now
        if now - self._unplaced_since >= limits.give_up_s:
            text, _ = describe_error(error)
            raise BrokerError(
                f"{self._producer.name}: no rejected message could be put aside for {limits.give_up_s:g} s: {text}"
            ) from error

    def _leave(self, rejected: Sequence[Received]) -> None:
        """Leave messages that nobody has whole, neither a subscriber nor a dead letter, to the broker (I16)."""
        name, first = self._producer.name, rejected[0]
        if not self._producer.acknowledges_each:
            raise BrokerError(
                f"{name}: message {first.key or first.ref} is rejected, its dead letter is not whole, and it cannot be "
                f"passed without losing it: give the stream a place for rejected messages"
            )
        self._held.leave(rejected)
        self._producer.leave(rejected)
        if self._producer.left_takes_room and self._held.left >= self._producer.room:
            raise BrokerMisconfigured(
                f"{name}: {self._held.left} rejected messages without a whole dead letter stay with the broker, as "
                f"many as it gives out at once: give the stream a place for rejected messages (dead_letter)"
            )
        _log.error("rejected messages stay unacknowledged", stream=name, messages=len(rejected), first=first.key)
