"""The conversation between a task worker and its supervisor::

               worker: WorkerHello             supervisor: WorkerWelcome
    OPENING --------------------> HELLO_RECEIVED --------------------> IDLE
                                                                       |  ^
                           supervisor: RunStep                         |  |  worker: StepEnded
                  +----------------------------------------------------+  +---------------+
                  v                                                                       |
               RUNNING --+  worker: StepLoaded, Request                                   |
                  |  ^   |  supervisor: Response                                          |
                  |  +---+                                                                |
                  +-----------------------------------------------------------------------+

                    supervisor: ParseFile          worker: FileParsed, the last one
               IDLE --------------------> PARSING --------------------> IDLE
                                           |  ^  worker: FileParsed with more
                                           +--+
    any state -- either side: Closed --> CLOSED

In addition to the table, a message must fit the messages before it:

- `StepLoaded`, at most once for a step, and `StepEnded` carry the token of the step that runs, `FileParsed` the file of
  the last `ParseFile`.
- At most `FILE_PIECES_MAX` messages `FileParsed` are sent for one file.
- The `Request` of a worker carries a query that a task may send. The ids increase, so that none is used twice, and at
  most `REQUESTS_OPEN_MAX` requests are open.
- `Response` carries the id of an open request. The end of a step closes its requests; a response that was on its way
  by then arrives in IDLE and is dropped. It cannot arrive later: the supervisor sends `RunStep` only after it has read
  `StepEnded`.
"""

from __future__ import annotations

import typing
from typing import ClassVar, Final

from headgate.protocol.link.session import Dialect, State, Transitions, closing
from headgate.protocol.link.wire import Role, Wire
from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.queries import Query, Request, Response
from headgate.protocol.messages.worker import (
    FileParsed,
    FromWorker,
    ParseFile,
    RunStep,
    StepEnded,
    StepLoaded,
    ToWorker,
    WorkerHello,
    WorkerWelcome,
)

FILE_PIECES_MAX = 32  # messages that describe one DAG file: the supervisor holds all of them in memory
REQUESTS_OPEN_MAX = 100  # of all threads of a step: bounds the state that the supervisor keeps for one worker

WORKER_WIRE: Final = Wire(
    {
        Role.WORKER: (WorkerHello, StepLoaded, StepEnded, FileParsed, Request),
        Role.SUPERVISOR: (WorkerWelcome, RunStep, ParseFile, Response),
    }
)

_QUERIES: Final = typing.get_args(Query)
_CLOSING: Final = closing(Role.WORKER)

TRANSITIONS: Final[Transitions] = {
    State.OPENING: {
        (Role.WORKER, WorkerHello): State.HELLO_RECEIVED,
        **_CLOSING,
    },
    State.HELLO_RECEIVED: {
        (Role.SUPERVISOR, WorkerWelcome): State.IDLE,
        **_CLOSING,
    },
    State.IDLE: {
        (Role.SUPERVISOR, RunStep): State.RUNNING,
        (Role.SUPERVISOR, ParseFile): State.PARSING,
        (Role.SUPERVISOR, Response): State.IDLE,  # to a request of the step that has just ended
        **_CLOSING,
    },
    State.RUNNING: {
        (Role.WORKER, StepLoaded): State.RUNNING,
        (Role.WORKER, Request): State.RUNNING,
        (Role.SUPERVISOR, Response): State.RUNNING,
        (Role.WORKER, StepEnded): State.IDLE,
        **_CLOSING,
    },
    State.PARSING: {
        (Role.WORKER, FileParsed): State.IDLE,
        **_CLOSING,
    },
    State.CLOSED: {
        **_CLOSING,
    },
}


class WorkerDialect(Dialect[FromWorker, ToWorker]):
    """The dialect of the link of one worker."""

    child: ClassVar = Role.WORKER
    wire: ClassVar = WORKER_WIRE
    transitions: ClassVar = TRANSITIONS

    def __init__(self) -> None:
        self._token = ""
        self._is_loaded = False  # the file of the step
        self._file = ""
        self._pieces = 0  # of the file, so far
        self._last_id = 0
        self._open: set[int] = set()
        self._late: set[int] = set()  # of a step that has ended; known to the worker alone

    def is_open(self, request_id: int) -> bool:
        """Whether the request of this id waits for its response."""
        return request_id in self._open

    def check(self, here: Role, sender: Role, message: WireStruct) -> str | None:
        """See `Dialect.check`."""
        match message:
            case WorkerHello() | WorkerWelcome():
                return self.check_handshake(here, sender, message)
            case StepLoaded() if self._is_loaded:
                return "the step has said so before"
            case StepLoaded() | StepEnded() if message.token != self._token:
                return f"its token is {message.token!r:.100}, and {self._token!r:.100} is running"
            case FileParsed() if message.file != self._file:
                return f"its file is {message.file!r:.300}, and {self._file!r:.300} is being parsed"
            case FileParsed() if message.more and self._pieces >= FILE_PIECES_MAX - 1:
                return f"it is number {self._pieces + 1} for one file and has more; the limit is {FILE_PIECES_MAX}"
            case Request():
                return self._request_problem(message)
            case Response() if message.id not in self._open and message.id not in self._late:
                return f"no request of id {message.id} is open"
            case _:
                return None

    def _request_problem(self, request: Request) -> str | None:
        if not isinstance(request.query, _QUERIES):
            return f"{type(request.query).__name__} is not a query of tasks"
        if request.id <= self._last_id:
            return f"its id is {request.id}, and the last one was {self._last_id}"
        if len(self._open) >= REQUESTS_OPEN_MAX:
            return f"{REQUESTS_OPEN_MAX} requests are open already"
        return None

    def note(self, here: Role, message: WireStruct) -> None:
        """See `Dialect.note`."""
        match message:
            case RunStep():
                self._token = message.step.token
                self._is_loaded = False
                self._late.clear()
            case StepLoaded():
                self._is_loaded = True
            case ParseFile():
                self._file = message.file
                self._pieces = 0
                self._late.clear()
            case FileParsed():
                self._pieces += 1
            case Request():
                self._last_id = message.id
                self._open.add(message.id)
            case Response():
                self._open.discard(message.id)
                self._late.discard(message.id)
            case StepEnded():
                if here is Role.WORKER:
                    self._late |= self._open
                self._open.clear()
            case _:
                pass
