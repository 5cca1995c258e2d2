"""The worker's end of its link. A separate thread receives, so that the threads of a step can wait for responses.

The thread also returns steps that the supervisor recalls while another one runs, and handles signals (`Stops.notice`),
because the main thread may be busy in C code.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from typing import Final

from headgate.child.parent_death import SupervisorGone
from headgate.child.queries import OpenRequests, QueryFailed, result_of
from headgate.protocol import marks
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.wire import Role
from headgate.protocol.link.worker_dialect import WorkerDialect
from headgate.protocol.messages.queries import Query, QueryResult, Request, Response
from headgate.protocol.messages.worker import FromWorker, RecallSteps, RunStep, StepEnded, StepsReturned, ToWorker
from headgate.worker.stops import Stops

READ_BYTES_MAX: Final = 256 * 1024  # of one read


class BlockingLink:
    """Messages to and from the supervisor. `send` and `send_query` may be called in any thread, `receive` in one."""

    def __init__(self, sock: socket.socket, stops: Stops) -> None:
        self._socket = sock
        self._stops = stops
        self._pid = os.getpid()
        self._connection = Connection(WorkerDialect(), Role.WORKER)
        self._state = threading.Lock()  # held briefly around any use of the connection or the requests
        self._sending = threading.Lock()  # held while a frame is written
        self._inbox: queue.SimpleQueue[ToWorker | Exception] = queue.SimpleQueue()
        self._waiting: dict[str, object] = {}  # tokens of the steps in the inbox that are not recalled
        self._requests: OpenRequests[queue.SimpleQueue[Response]] = OpenRequests()
        self._wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        stops.listen(wakeup_write)
        threading.Thread(target=self._read, name="headgate link", daemon=True).start()

    @property
    def frame_bytes_max(self) -> int:
        """The longest body of a frame that may be sent, in bytes."""
        return self._connection.frame_bytes_max

    @property
    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        return not self._inbox.empty()

    @property
    def has_step(self) -> bool:
        """Whether another step waits."""
        return bool(self._waiting)

    def receive(self) -> ToWorker:
        """Wait for the next message except responses, recalls, and steps that were recalled.

        A step that is returned here has begun. Raises `SupervisorGone`, and `RemoteProtocolError`.
        """
        while True:
            received = self._inbox.get()
            if isinstance(received, Exception):
                raise received
            if not isinstance(received, RunStep) or self._take_step(received.step.token):
                return received

    def _take_step(self, token: str) -> bool:
        with self._state:
            return self._waiting.pop(token, self) is not self

    def send(self, message: FromWorker) -> None:
        """Send one message; any thread may. Raises `LocalProtocolError`, `SupervisorGone`."""
        with self._stops.held(), self._sending:
            with self._state:
                frame = self._connection.send(message)
                if isinstance(message, StepEnded):
                    self._refuse_all("the step has ended")
            self._write(frame, is_outcome=isinstance(message, StepEnded))

    def send_query(self, query: Query) -> QueryResult:
        """Send a query and return its result. Raises `QueryFailed`, `LocalProtocolError`, `SupervisorGone`."""
        if os.getpid() != self._pid:  # there is no thread here that would receive the response
            raise QueryFailed("a fork of the step cannot send queries: send them before the fork")
        waiter: queue.SimpleQueue[Response] = queue.SimpleQueue()
        with self._stops.held(), self._sending:
            with self._state:
                frame = self._connection.send(Request(self._requests.next_id, query))
                self._requests.open(waiter)
            self._write(frame, is_outcome=False)
        return result_of(query, waiter.get())

    def _write(self, frame: bytes, *, is_outcome: bool) -> None:
        try:
            for part in marks.in_halves("worker.outcome_half_sent", frame) if is_outcome else (frame,):
                self._socket.sendall(part)
        except OSError as error:
            raise SupervisorGone from error

    # --- the thread -------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.register(self._wakeup_read, select.POLLIN)
            while True:
                for descriptor, _ in poll.poll():
                    if descriptor == self._wakeup_read:
                        for number in os.read(self._wakeup_read, 4096):
                            self._stops.notice(number)
                    else:
                        self._take(self._receive_bytes())
        except Exception as error:
            with self._state:
                self._refuse_all("the supervisor has left")
            self._inbox.put(error)

    def _receive_bytes(self) -> bytes:
        try:
            data = self._socket.recv(READ_BYTES_MAX)
        except ConnectionResetError:
            data = b""
        if not data:
            raise SupervisorGone
        return data

    def _take(self, data: bytes) -> None:
        with self._state:
            self._connection.receive_data(data)
        while True:
            with self._state:
                message = self._connection.next_message()
                waiter = self._requests.close(message.id) if isinstance(message, Response) else None
                if isinstance(message, RunStep):
                    self._waiting[message.step.token] = None
            if message is None:
                return
            if isinstance(message, RecallSteps):
                self._return_steps(message)
            elif not isinstance(message, Response):
                self._inbox.put(message)
            elif waiter is not None:  # None if the step has ended
                waiter.put(message)

    def _return_steps(self, recall: RecallSteps) -> None:
        """Answer a recall. What is returned can no longer be taken, and what was taken is not returned."""
        with self._state:
            returned = [token for token in recall.tokens if self._waiting.pop(token, self) is not self]
        self.send(StepsReturned(tuple(returned)))

    def _refuse_all(self, reason: str) -> None:
        for request_id, waiter in self._requests.close_all().items():
            waiter.put(Response(request_id, error=reason))
