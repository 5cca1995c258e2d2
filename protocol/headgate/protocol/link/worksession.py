"""The state of one conversation between a task worker and its supervisor.

Both sides hold a `WorkSession` and move it by what either of them sends::

               worker: WorkerHello      supervisor: WorkerWelcome
    OPENING --------------------> GREETED --------------------> IDLE
                                                                |  ^
                    supervisor: RunStep                         |  |  worker: StepEnded
                  +---------------------------------------------+  +------------------+
                  v                                                                   |
               RUNNING --+  worker: Request                                               |
                  |  ^   |  supervisor: Response                                        |
                  |  +---+                                                            |
                  +-------------------------------------------------------------------+

                    supervisor: ParseFile          worker: FileParsed, the last one
               IDLE --------------------> PARSING --------------------> IDLE
                                           |  ^  worker: FileParsed with more
                                           +--+
    any state -- either side: Closed --> CLOSED

The table says who may send what; beside it, a message must fit what it answers:

- `StepEnded` carries the token of the step that runs, `FileParsed` the file that was asked for.
- At most `FILE_PIECES_MAX` of `FileParsed` are of one file.
- The ids of `Request` grow, so that none comes twice, and at most `ASKS_OPEN_MAX` of them are open.
- `Response` carries the id of a query that is open. A step's queries are closed by its end; an answer that was on
  its way by then arrives in IDLE, and is nobody's. It cannot come later: `RunStep` is sent by who has read `StepEnded`.
"""

from __future__ import annotations

import enum
from typing import Final

from headgate.protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError, WorkerVersionMismatch
from headgate.protocol.link.framing import check_frame_limit
from headgate.protocol.messages.worker import (
    WORK_PROTOCOL_VERSION,
    FileParsed,
    FromWorker,
    ParseFile,
    Request,
    Response,
    RunStep,
    StepEnded,
    ToWorker,
    WorkerHello,
    WorkerWelcome,
)

FILE_PIECES_MAX = 32  # messages that say what one DAG file holds: the supervisor has them all in memory
ASKS_OPEN_MAX = 100  # queries a step's threads may have waiting: what a supervisor must remember of one worker


class WorkRole(enum.Enum):
    """Which side of the link."""

    WORKER = "worker"
    SUPERVISOR = "supervisor"

    @property
    def peer(self) -> WorkRole:
        """The other side."""
        return WorkRole.SUPERVISOR if self is WorkRole.WORKER else WorkRole.WORKER


class WorkState(enum.Enum):
    """Where a conversation stands; see the drawing at the head of the module."""

    OPENING = "OPENING"
    GREETED = "GREETED"
    IDLE = "IDLE"
    RUNNING = "RUNNING"
    PARSING = "PARSING"
    CLOSED = "CLOSED"


class WorkClosed:
    """The event of a side that closes its end; no message, it is not on the wire."""

    __slots__ = ()


WorkEvent = FromWorker | ToWorker | WorkClosed

_CLOSING: Final[dict[tuple[WorkRole, type[WorkEvent]], WorkState]] = {
    (WorkRole.WORKER, WorkClosed): WorkState.CLOSED,
    (WorkRole.SUPERVISOR, WorkClosed): WorkState.CLOSED,
}

TRANSITIONS: Final[dict[WorkState, dict[tuple[WorkRole, type[WorkEvent]], WorkState]]] = {
    WorkState.OPENING: {
        (WorkRole.WORKER, WorkerHello): WorkState.GREETED,
        **_CLOSING,
    },
    WorkState.GREETED: {
        (WorkRole.SUPERVISOR, WorkerWelcome): WorkState.IDLE,
        **_CLOSING,
    },
    WorkState.IDLE: {
        (WorkRole.SUPERVISOR, RunStep): WorkState.RUNNING,
        (WorkRole.SUPERVISOR, ParseFile): WorkState.PARSING,
        (WorkRole.SUPERVISOR, Response): WorkState.IDLE,  # to a query of the step that has just ended
        **_CLOSING,
    },
    WorkState.RUNNING: {
        (WorkRole.WORKER, Request): WorkState.RUNNING,
        (WorkRole.SUPERVISOR, Response): WorkState.RUNNING,
        (WorkRole.WORKER, StepEnded): WorkState.IDLE,
        **_CLOSING,
    },
    WorkState.PARSING: {
        (WorkRole.WORKER, FileParsed): WorkState.IDLE,  # one with `more` stays; see `move`
        **_CLOSING,
    },
    WorkState.CLOSED: {
        **_CLOSING,
    },
}


class WorkSession:
    """The state of one worker's conversation, as seen by ``role``."""

    __slots__ = ("_file", "_last_ask", "_late", "_open", "_pieces", "_state", "_token", "role")

    def __init__(self, role: WorkRole) -> None:
        self.role = role
        self._state = WorkState.OPENING
        self._token = ""
        self._file = ""
        self._pieces = 0  # of the file, so far
        self._last_ask = 0
        self._open: set[int] = set()
        self._late: set[int] = set()  # of a step that has ended; known to the worker alone

    @property
    def state(self) -> WorkState:
        """Where the conversation stands."""
        return self._state

    def is_open(self, ask: int) -> bool:
        """Whether the query of this id waits for its answer."""
        return ask in self._open

    def move(self, sender: WorkRole, event: WorkEvent) -> None:
        """Move on by one event of ``sender``.

        Raises `LocalProtocolError` if this side is the sender and the event is illegal now, `RemoteProtocolError`
        (`WorkerVersionMismatch` for a peer of another version) if the peer is; the state is then as it was.
        """
        to = TRANSITIONS[self._state].get((sender, type(event)))
        if to is None:
            raise self._fault(sender, f"cannot send {type(event).__name__} in state {self._state.name}")
        if (problem := self._problem(sender, event)) is not None:
            raise self._fault(sender, f"cannot send this {type(event).__name__}: {problem}")
        self._note(event)
        self._state = self._state if isinstance(event, FileParsed) and event.more else to

    def _problem(self, sender: WorkRole, event: WorkEvent) -> str | None:
        """Return why the event does not fit what came before it, None if it does."""
        match event:
            case WorkerHello() | WorkerWelcome():
                return self._handshake_problem(sender, event)
            case StepEnded() if event.token != self._token:
                return f"its token is {event.token!r:.100}, and {self._token!r:.100} is running"
            case FileParsed() if event.file != self._file:
                return f"its file is {event.file!r:.300}, and {self._file!r:.300} was asked for"
            case FileParsed() if event.more and self._pieces >= FILE_PIECES_MAX - 1:
                return f"it is number {self._pieces + 1} for one file, and says that more will come"
            case Request() if event.id <= self._last_ask:
                return f"its id is {event.id}, and the last one was {self._last_ask}"
            case Request() if len(self._open) >= ASKS_OPEN_MAX:
                return f"{ASKS_OPEN_MAX} queries wait for their answers already"
            case Response() if event.id not in self._open and event.id not in self._late:
                return f"no query of id {event.id} is open"
            case _:
                return None

    def _handshake_problem(self, sender: WorkRole, message: WorkerHello | WorkerWelcome) -> str | None:
        if message.protocol_version != WORK_PROTOCOL_VERSION:
            if sender is self.role:
                return f"it must carry protocol version {WORK_PROTOCOL_VERSION}"
            theirs, ours = message.protocol_version, WORK_PROTOCOL_VERSION
            if sender is WorkRole.WORKER:
                raise WorkerVersionMismatch(supervisor=ours, worker=theirs)
            raise WorkerVersionMismatch(supervisor=theirs, worker=ours)
        if isinstance(message, WorkerWelcome):
            try:
                check_frame_limit(message.settings.frame_bytes_max)
            except ValueError as error:
                return str(error)
        return None

    def _note(self, event: WorkEvent) -> None:
        match event:
            case RunStep():
                self._token = event.step.token
                self._late.clear()
            case ParseFile():
                self._file = event.file
                self._pieces = 0
                self._late.clear()
            case FileParsed():
                self._pieces += 1
            case Request():
                self._last_ask = event.id
                self._open.add(event.id)
            case Response():
                self._open.discard(event.id)
                self._late.discard(event.id)
            case StepEnded():
                if self.role is WorkRole.WORKER:
                    self._late |= self._open
                self._open.clear()
            case _:
                pass

    def _fault(self, sender: WorkRole, problem: str) -> ProtocolError:
        kind = LocalProtocolError if sender is self.role else RemoteProtocolError
        return kind(f"the {sender.value} {problem}")
