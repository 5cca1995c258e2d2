"""The conversation between a task worker and its supervisor::

               worker: WorkerHello             supervisor: WorkerWelcome
    OPENING --------------------> HELLO_RECEIVED --------------------> IDLE
                                                                       |  ^
                           supervisor: RunStep                         |  |  worker: StepEnded or StepsReturned,
                  +----------------------------------------------------+  +  and it has no other step
                  v                                                       |
               RUNNING --+  worker: StepLoaded, Request                   |
                  |  ^   |  worker: StepEnded or StepsReturned, and it    |
                  |  |   |  has another step                              |
                  |  +---+  supervisor: RunStep, RecallSteps, Response    |
                  +-------------------------------------------------------+

                    supervisor: ParseFile          worker: FileParsed, the last one
               IDLE --------------------> PARSING --------------------> IDLE
                                           |  ^  worker: FileParsed with more
                                           +--+

                supervisor: DecideSignals        worker: SignalsDecided, the last one
               IDLE --------------------> DECIDING --------------------> IDLE
                                           |  ^  worker: SignalsDecided with more
                                           +--+
    any state -- either side: Closed --> CLOSED

In addition to the table, a message must fit the messages before it:

- A worker has at most `BUNDLE_MAX` steps at once, each with a token of its own.
- `StepLoaded`, at most once for a step, and `StepEnded` carry the token of the oldest step that it has, `FileParsed`
  the file of the last `ParseFile`.
- `StepsReturned` answers the oldest `RecallSteps` without an answer, and carries only tokens that this one has, of
  steps that the worker has. At most `RECALLS_OPEN_MAX` are open. All steps may have ended when `RecallSteps` arrives.
- At most `FILE_PIECES_MAX` messages `FileParsed` are sent for one file.
- `SignalsDecided` carries the token of the last `DecideSignals`, and all of them together no more actions than that has
  signals, which are `DECIDED_MAX` at most.
- The `Request` of a worker carries a query that a task may send. The ids increase, so that none is used twice, and at
  most `REQUESTS_OPEN_MAX` requests are open.
- `Response` carries the id of an open request. The end of a step closes its requests; a response that was on its way
  by then is dropped when it arrives. It arrives before `BUNDLE_MAX` more steps are given that are not returned: the
  supervisor sends the last of these only after it has read the `StepEnded`.
"""

from __future__ import annotations

import typing
from collections import deque
from typing import ClassVar, Final

from headgate.protocol.link.session import Dialect, State, Transitions, closing
from headgate.protocol.link.wire import Role, Wire
from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.queries import Query, Request, Response
from headgate.protocol.messages.worker import (
    BUNDLE_MAX,
    DECIDED_MAX,
    DecideSignals,
    FileParsed,
    FromWorker,
    ParseFile,
    RecallSteps,
    RunStep,
    SignalsDecided,
    StepEnded,
    StepLoaded,
    StepsReturned,
    ToWorker,
    WorkerHello,
    WorkerWelcome,
)

FILE_PIECES_MAX = 32  # messages that describe one DAG file: the supervisor holds all of them in memory
REQUESTS_OPEN_MAX = 100  # of all threads of a step: bounds the state that the supervisor keeps for one worker
RECALLS_OPEN_MAX = BUNDLE_MAX  # a step is recalled once

WORKER_WIRE: Final = Wire(
    {
        Role.WORKER: (WorkerHello, StepLoaded, StepEnded, StepsReturned, FileParsed, SignalsDecided, Request),
        Role.SUPERVISOR: (WorkerWelcome, RunStep, RecallSteps, ParseFile, DecideSignals, Response),
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
        (Role.SUPERVISOR, DecideSignals): State.DECIDING,
        (Role.SUPERVISOR, Response): State.IDLE,  # to a request of a step that has just ended
        (Role.SUPERVISOR, RecallSteps): State.IDLE,  # of steps that have just ended
        (Role.WORKER, StepsReturned): State.IDLE,
        **_CLOSING,
    },
    State.RUNNING: {
        (Role.WORKER, StepLoaded): State.RUNNING,
        (Role.WORKER, Request): State.RUNNING,
        (Role.SUPERVISOR, Response): State.RUNNING,
        (Role.SUPERVISOR, RunStep): State.RUNNING,
        (Role.SUPERVISOR, RecallSteps): State.RUNNING,
        (Role.WORKER, StepsReturned): State.RUNNING,  # see `WorkerDialect.settled`
        (Role.WORKER, StepEnded): State.IDLE,
        **_CLOSING,
    },
    State.PARSING: {
        (Role.WORKER, FileParsed): State.IDLE,
        **_CLOSING,
    },
    State.DECIDING: {
        (Role.WORKER, SignalsDecided): State.IDLE,
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
        self._tokens: deque[str] = deque()  # of the steps that the worker has; the first one runs
        self._steps = 0  # that it was given, without those that it has returned
        self._is_loaded = False  # the file of the first step
        self._recalls: deque[frozenset[str]] = deque()  # that are open
        self._file = ""
        self._pieces = 0  # of the file, so far
        self._asked = ""  # the token of the last `DecideSignals`
        self._undecided = 0  # of its signals
        self._last_id = 0
        self._open: set[int] = set()
        # Requests of steps that have ended, with the number of steps given by then; known to the worker alone.
        self._late: dict[int, int] = {}

    def is_open(self, request_id: int) -> bool:
        """Whether the request of this id waits for its response."""
        return request_id in self._open

    def check(self, here: Role, sender: Role, message: WireStruct) -> str | None:
        """See `Dialect.check`."""
        match message:
            case WorkerHello() | WorkerWelcome():
                return self.check_handshake(here, sender, message)
            case RunStep():
                return self._step_problem(message)
            case RecallSteps() if len(self._recalls) >= RECALLS_OPEN_MAX:
                return f"{RECALLS_OPEN_MAX} recalls are open already"
            case StepLoaded() if self._is_loaded:
                return "the step has said so before"
            case StepLoaded() | StepEnded() if not self._tokens or message.token != self._tokens[0]:
                running = self._tokens[0] if self._tokens else ""
                return f"its token is {message.token!r:.100}, and {running!r:.100} is running"
            case StepsReturned():
                return self._return_problem(message)
            case FileParsed() if message.file != self._file:
                return f"its file is {message.file!r:.300}, and {self._file!r:.300} is being parsed"
            case FileParsed() if message.more and self._pieces >= FILE_PIECES_MAX - 1:
                return f"it is number {self._pieces + 1} for one file and has more; the limit is {FILE_PIECES_MAX}"
            case DecideSignals() if not 0 < len(message.signals) <= DECIDED_MAX:
                return f"it has {len(message.signals)} signals, not 1..{DECIDED_MAX}"
            case SignalsDecided() if message.token != self._asked:
                return f"its token is {message.token!r:.100}, and {self._asked!r:.100} is to be decided"
            case SignalsDecided() if len(message.actions) > self._undecided:
                return f"it has {len(message.actions)} decisions, and {self._undecided} signals are undecided"
            case Request():
                return self._request_problem(message)
            case Response() if message.id not in self._open and message.id not in self._late:
                return f"no request of id {message.id} is open"
            case _:
                return None

    def _step_problem(self, message: RunStep) -> str | None:
        if len(self._tokens) >= BUNDLE_MAX:
            return f"the worker has {BUNDLE_MAX} steps already"
        if message.step.token in self._tokens:
            return f"the worker has a step with the token {message.step.token!r:.100} already"
        return None

    def _return_problem(self, message: StepsReturned) -> str | None:
        if not self._recalls:
            return "no steps are recalled"
        if len(set(message.tokens)) != len(message.tokens):
            return "it has a token twice"
        if others := sorted(set(message.tokens) - self._recalls[0]):
            return f"the step {others[0]!r:.100} is not recalled"
        if others := sorted(set(message.tokens).difference(self._tokens)):
            return f"the worker does not have the step {others[0]!r:.100}"
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
                self._tokens.append(message.step.token)
                self._steps += 1
                self._forget_late()
            case RecallSteps():
                self._recalls.append(frozenset(message.tokens))
            case StepsReturned():
                self._recalls.popleft()
                self._steps -= len(message.tokens)
                for token in message.tokens:
                    self._tokens.remove(token)
            case StepLoaded():
                self._is_loaded = True
            case ParseFile():
                self._file = message.file
                self._pieces = 0
                self._late.clear()
            case FileParsed():
                self._pieces += 1
            case DecideSignals():
                self._asked = message.token
                self._undecided = len(message.signals)
                self._late.clear()
            case SignalsDecided():
                self._undecided -= len(message.actions)
            case Request():
                self._last_id = message.id
                self._open.add(message.id)
            case Response():
                self._open.discard(message.id)
                self._late.pop(message.id, None)
            case StepEnded():
                self._tokens.popleft()
                self._is_loaded = False
                if here is Role.WORKER:
                    self._late |= dict.fromkeys(self._open, self._steps)
                self._open.clear()
            case _:
                pass

    def settled(self, to: State) -> State:
        """See `Dialect.settled`: the worker is running as long as it has a step."""
        if to not in (State.IDLE, State.RUNNING):
            return to
        return State.RUNNING if self._tokens else State.IDLE

    def _forget_late(self) -> None:
        """Forget the requests whose answers cannot arrive any more."""
        while self._late:
            first = next(iter(self._late))
            if self._steps - self._late[first] < BUNDLE_MAX:
                return
            del self._late[first]
