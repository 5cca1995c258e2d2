"""What operators decide about signals is decided in workers of their own, so that no task and no file waits for it.

A decision gets a worker that has no other. If all are busy, and have been for longer than `LONG_S`, another worker is
started, up to `DECIDERS_MAX`: so whoever decides quickly does not wait behind one that hangs. The first worker stays,
warm, once it was needed; the others leave after `IDLE_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from headgate.protocol.messages.rules import Action
from headgate.protocol.messages.runner import ERROR_CHARS_MAX
from headgate.protocol.messages.worker import DecideSignals, FromWorker, SignalsDecided, ToWorker
from headgate.supervisor.executors.single import SingleWorker

DECISION_S_MAX: Final = 30.0  # for one step of decisions, with the loading of its DAG file
DECIDERS_MAX: Final = 8  # processes: so many decisions may hang at once before any other waits for them
LONG_S: Final = 1.0  # that others wait for a decision before they get a worker of their own
IDLE_S: Final = 60.0  # then a worker leaves that has nothing to do, unless it is the first
DECISIONS_MAX: Final = 1000  # of one worker, as of one that runs steps


class Answer(msgspec.Struct, frozen=True):
    """What was decided about the first signals of a question; with an ``error`` the one behind them has failed.

    Nobody was asked about it if the DAG file ``is_unloaded``.
    """

    asked: DecideSignals
    actions: tuple[Action, ...]
    error: str = ""
    traceback: str = ""
    is_unloaded: bool = False


class Decider(SingleWorker[DecideSignals, Answer]):
    """Asks one operator at a time."""

    _actions: list[Action]  # so far
    since: float  # when it has got its question, or has answered

    def decide(self, asked: DecideSignals) -> None:
        """Ask an operator. Its `Answer` comes with `events`."""
        self._actions = []
        self.since = self._clock()
        self._begin(asked)

    # --- of the worker ----------------------------------------------------------------------------

    def _message(self, job: DecideSignals) -> ToWorker:
        return job

    def _take(self, job: DecideSignals, message: FromWorker) -> bool:
        assert isinstance(message, SignalsDecided), "the session refuses all else"
        self._actions += message.actions
        if not message.more:
            self._answer(job, message.error, message.traceback, is_unloaded=message.is_unloaded)
        return not message.more

    def _fail(self, job: DecideSignals, error: str, trace: str) -> None:
        self._answer(job, error, trace)

    def _answer(self, job: DecideSignals, error: str, trace: str, *, is_unloaded: bool = False) -> None:
        self.since = self._clock()
        if len(self._actions) == len(job.signals):
            error = trace = ""  # nothing was left to decide
        # A process that runs users' code has said it, and no database stores this character.
        error, trace = (text[:ERROR_CHARS_MAX].replace("\0", "\\x00") for text in (error, trace))
        self._done.append(Answer(job, tuple(self._actions), error, trace, is_unloaded))

    def _words(self) -> tuple[str, str, str]:
        return "decide", "decided", "the limit of on_signal"

    def _jobs_max(self) -> int:
        return DECISIONS_MAX


class Deciders:
    """A few `Decider`s, made by ``make`` as they are needed. ``clock`` is that of ``now``."""

    def __init__(self, make: Callable[[], Decider], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._members: list[Decider] = []

    def room(self, now: float) -> int:
        """Return how many questions may be asked now: those of the workers that are free, or one more."""
        if free := sum(member.room() for member in self._members):
            return free
        return int(now >= self._next_at())

    def decide(self, asked: DecideSignals) -> None:
        """Ask an operator, if there is room. Its `Answer` comes with `events`."""
        member = next((member for member in self._members if member.room()), None)
        if member is None:
            member = self._make()
            self._members.append(member)
        member.decide(asked)

    def events(self, now: float) -> list[Answer]:
        """Return what was decided since the last call."""
        answers = [answer for member in self._members for answer in member.events(now)]
        for member in self._members[1:]:
            if member.room() and now >= member.since + IDLE_S:
                member.close()
                self._members.remove(member)
        return answers

    def wake_at(self, *, is_asked: bool = False) -> float:
        """Return when there is something to do; if something ``is_asked``, also when there is room for it."""
        times = [member.wake_at() for member in self._members]
        times += [member.since + IDLE_S for member in self._members[1:] if member.room()]
        if is_asked:
            times.append(0.0 if any(member.room() for member in self._members) else self._next_at())
        return min(times, default=float("inf"))

    def close(self) -> None:
        """End all workers."""
        for member in self._members:
            member.close()
        self._members.clear()

    def _next_at(self) -> float:
        """Return when one more worker may be started: all have been busy for long."""
        if len(self._members) >= DECIDERS_MAX:
            return float("inf")
        return max((member.since + LONG_S for member in self._members), default=0.0)
