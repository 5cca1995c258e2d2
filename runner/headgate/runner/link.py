"""The runner's end of its link: rounds, one in flight at a time; queries; and all messages of the supervisor."""

from __future__ import annotations

import math

import msgspec
import trio

from headgate.child.parent_death import SupervisorGone
from headgate.child.queries import OpenRequests, result_of
from headgate.protocol import marks
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.splitting import split_round
from headgate.protocol.messages.queries import LastEvent, QueryResult, Request, Response, StoredEvent, TriggerQuery
from headgate.protocol.messages.runner import FromRunner, FromSupervisor, RunnerSettings, StateChanges, StateSync
from headgate.runner.figures import FiguresReport
from headgate.runner.outbox import Outbox
from headgate.streams.lease import Lease
from headgate.triggers.base import LastEventUnknown

READ_BYTES_MAX = 256 * 1024  # read in one go
REQUESTS_MAX = 100  # requests without a response; further ones wait here


class AsyncLink:
    """Frames over the stream the runner was started with.

    Only `send`, `send_rounds` and `send_requests` write, in tasks that last as long as the link: a writer that
    is cancelled halfway through a frame leaves a stream that cannot be used any more.
    """

    def __init__(self, stream: trio.abc.Stream, connection: Connection[FromRunner, FromSupervisor]) -> None:
        self._stream = stream
        self._connection = connection
        self._sending = trio.Lock()
        self._round = 0
        self._answered_round = 0
        self._is_heartbeat = False  # the newest round has nothing to be stored
        self.round_sent_at = -math.inf  # when the last round began to be sent, by trio's clock
        self._answers = trio.lowlevel.ParkingLot()
        self._requests: OpenRequests[_Waiter] = OpenRequests()
        self._unsent: dict[int, LastEvent | TriggerQuery] = {}
        self._has_unsent = trio.Event()
        self._requests_limit = trio.CapacityLimiter(REQUESTS_MAX)

    async def send(self, message: FromRunner) -> None:
        """Send one message. Several tasks may send: frames are not mixed."""
        try:
            self._sending.acquire_nowait()  # an `await`, even of a free lock, costs each frame a turn of the scheduler
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            frame = self._connection.send(message)
            marks.reach("runner.frame_encoded")
            for part in marks.in_halves("runner.frame_half_sent", frame):
                await self._stream.send_all(part)
            marks.reach("runner.frame_sent")
        finally:
            self._sending.release()

    async def receive(self) -> FromSupervisor:
        """Wait for the next message. Raises `SupervisorGone` at the end of the stream, and `RemoteProtocolError`."""
        while (message := self._connection.next_message()) is None:
            try:
                data = await self._stream.receive_some(READ_BYTES_MAX)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                raise SupervisorGone
            self._connection.receive_data(data)
        if isinstance(message, StateSync) and message.round and message.round != self._round_in_flight:
            raise RemoteProtocolError(
                f"the supervisor answers round {message.round}; in flight is {self._round_in_flight or 'none'}"
            )
        return message

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    # --- rounds -----------------------------------------------------------------------------------

    @property
    def _round_in_flight(self) -> int:
        """The round that waits for its answer; 0 if none does."""
        return self._round if self._answered_round < self._round else 0

    async def send_rounds(self, outbox: Outbox, settings: RunnerSettings, lease: Lease, figures: FiguresReport) -> None:
        """Send the outbox round by round, as soon as it has content, and a heartbeat when it stays empty.

        If an advance waits for the lease, a heartbeat goes first: it holds nothing to store, so its answer comes
        soonest. Two of them are never sent in a row.
        """
        is_heartbeat = False
        while True:
            with trio.move_on_after(settings.heartbeat_s):
                await outbox.wait_not_empty()
            self._round += 1
            self.round_sent_at = trio.current_time()
            is_heartbeat = lease.is_wanted and not is_heartbeat
            changes = outbox.take_round(self._round, is_heartbeat=is_heartbeat)
            self._is_heartbeat = changes == StateChanges(self._round)
            if (told := figures.take()) is not None:
                changes = msgspec.structs.replace(changes, figures=told)
            for piece in split_round(changes, settings.frame_bytes_max):
                await self.send(piece)
            while self._round_in_flight:
                await self._answers.park()

    def note_answer(self, sync: StateSync) -> None:
        """Note that a round has been answered, when the answer is complete: its events are stored."""
        if sync.round and not sync.more:
            self._answered_round = sync.round
            self._answers.unpark_all()

    async def wait_told(self, outbox: Outbox) -> None:
        """Wait until the outbox is empty and everything that was in it is stored."""
        while not self.is_told(outbox):
            # Whatever is in the outbox leaves it with a round, so an answer is still to come.
            await self._answers.park()

    def is_told(self, outbox: Outbox) -> bool:
        """Whether the outbox is empty and everything that was in it is stored. A heartbeat on its way is nothing."""
        return not len(outbox) and (self._is_heartbeat or not self._round_in_flight)

    # --- requests ---------------------------------------------------------------------------------

    async def send_requests(self) -> None:
        """Send the queries of triggers."""
        while True:
            await self._has_unsent.wait()
            while self._unsent:
                number = next(iter(self._unsent))
                await self.send(Request(number, self._unsent.pop(number)))
            self._has_unsent = trio.Event()

    async def ask_last_event(self, trigger_id: int) -> StoredEvent | None:
        """Return the newest stored event of a trigger. Raises `LastEventUnknown`."""
        response = await self._request(LastEvent(trigger_id))
        if response.error or not isinstance(response.result, StoredEvent | None):
            raise LastEventUnknown(response.error or f"the supervisor sent a {type(response.result).__name__} instead")
        return response.result

    async def send_query(self, query: TriggerQuery) -> QueryResult:
        """Send a query of a trigger and return its result. Raises `QueryFailed`."""
        return result_of(query, await self._request(query))

    async def _request(self, query: LastEvent | TriggerQuery) -> Response:
        async with self._requests_limit:
            waiter = _Waiter()
            request_id = self._requests.open(waiter)
            self._unsent[request_id] = query
            self._has_unsent.set()
            try:
                await waiter.is_answered.wait()
            finally:
                self._requests.close(request_id)
                self._unsent.pop(request_id, None)
        assert waiter.response is not None
        return waiter.response

    def note_response(self, response: Response) -> None:
        """Hand a response to its waiter; it is dropped if that was cancelled meanwhile."""
        waiter = self._requests.close(response.id)
        if waiter is not None:
            waiter.response = response
            waiter.is_answered.set()


class _Waiter:
    def __init__(self) -> None:
        self.is_answered = trio.Event()
        self.response: Response | None = None
