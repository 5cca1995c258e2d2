"""What is added to a history by tasks. A task is named ``dag/run/task``; tokens name steps."""

from __future__ import annotations

import msgspec
from tests.proof.simulation.records import Record


class Moved(Record, frozen=True, gc=False):
    """A task's row has changed in a transaction of the verb ``by``, which named the task ``about`` and a token.

    ``old`` is the state before, empty for a new row.
    """

    by: str
    about: str
    said: str
    task: str
    old: str
    state: str
    try_number: int
    tries_max: int
    token: str
    trigger: int
    method: str
    event: int
    owner: int


class RunMoved(Record, frozen=True, gc=False):
    """A run's row has changed."""

    by: str
    run: str
    state: str
    is_started: bool
    is_ended: bool


class TriggerMoved(Record, frozen=True, gc=False):
    """A trigger's row has changed. ``end``: empty while it is open, or ``finished``, or ``removed``."""

    by: str
    trigger: int
    end: str


class EventStored(Record, frozen=True, gc=False):
    """An event is in the log. ``serial`` is what its payload says, 0 for nothing; ``number`` the same for a stream.

    ``number`` is -1 for an event of no stream; ``run`` is the run of the trigger that has fired it.
    """

    row: int
    trigger: int
    kind: str
    serial: int
    number: int
    run: str


class StreamMoved(Record, frozen=True, gc=False):
    """The row of a stream has changed; by what is as in `Moved`. ``trigger`` 0: it is gone.

    ``place`` is the row of the last event handled, ``handled`` their number, ``left`` the state: empty before the
    first.
    """

    by: str
    said: str
    task: str
    trigger: int
    place: int
    handled: int
    left: str
    ended_as: str
    reopens: bool


class LetterStored(Record, frozen=True, gc=False):
    """An event was dead-lettered. ``number`` is that of `EventStored`."""

    row: int
    trigger: int
    number: int


class XComsMoved(Record, frozen=True, gc=False):
    """What a task has left for others has changed: all of it, by key."""

    by: str
    task: str
    values: tuple[tuple[str, str], ...]


class ElementsMoved(Record, frozen=True, gc=False):
    """What a task has emitted, or what was appended to it, has changed: all values, in their order."""

    by: str
    task: str
    values: tuple[str, ...]


class DagMoved(Record, frozen=True, gc=False):
    """A DAG was paused, or goes on."""

    dag: str
    is_paused: bool


class LookDone(Record, frozen=True, gc=False):
    """All that a transaction has changed is told."""

    by: str


class StepBegan(Record, frozen=True, gc=False):
    """A worker has begun with a step. ``leg`` -1: it is resumed to fail. ``event`` as ``serial`` above, 0 for none."""

    supervisor: int
    token: str
    task: str
    try_number: int
    leg: int
    event: int


class StepGot(Record, frozen=True, gc=False):
    """The step of a stream has begun with this part of it: ``place`` events were handled before, with this state."""

    token: str
    task: str
    place: int
    rows: tuple[int, ...]
    numbers: tuple[int, ...]
    left: str
    is_over: bool


class StepAnswered(Record, frozen=True, gc=False):
    """A worker was told what another task has left under ``value``; None: nothing."""

    token: str
    task: str
    value: str | None


class SaidSignal(msgspec.Struct, frozen=True, gc=False):
    """A signal as its sender names it. ``value`` is the text of its JSON."""

    key: str
    dedup: str
    value: str
    is_of_run: bool = False


class StepRan(Record, frozen=True, gc=False):
    """The author's code has ended, and this is what it came to.

    Of a stream it has handled ``handled`` events, up to the row ``handled_to``, and ``left`` this state; ``has_ended``:
    `stream_ended` was called. Its handler has ``reported`` so many, and ``takes_no_more`` if it has ended its stream.
    ``appended`` and ``signals`` go with the outcome.
    """

    token: str
    task: str
    leg: int
    outcome: str
    may_retry: bool
    xcoms: tuple[tuple[str, str], ...]
    skips: tuple[str, ...]
    handled_to: int = 0
    handled: int = 0
    left: str = ""
    has_ended: bool = False
    reported: int = 0
    takes_no_more: bool = False
    appended: tuple[str, ...] = ()
    signals: tuple[SaidSignal, ...] = ()


class StepTold(Record, frozen=True, gc=False):
    """The supervisor was told what became of a step: ``ended`` or ``lost``."""

    supervisor: int
    token: str
    how: str


class StepStopped(Record, frozen=True, gc=False):
    """The supervisor wants a step to end."""

    token: str
    why: str


class Waited(Record, frozen=True, gc=False):
    """A run of a trigger has begun to wait; ``run`` is its number, which no other run has."""

    task: str
    leg: int
    runner: int
    run: int


class EventFired(Record, frozen=True, gc=False):
    """A trigger fires an event, in this very step; ``run`` as in `Waited`."""

    task: str
    leg: int
    kind: str
    serial: int
    run: int


class SourceBegan(Record, frozen=True, gc=False):
    """A run of the trigger of a stream begins; ``run`` is its number, which no other run has."""

    trigger: int
    runner: int
    run: int


class SourceFired(Record, frozen=True, gc=False):
    """The trigger of a stream fires a number, in this very step."""

    trigger: int
    run: int
    number: int


class SourceEnded(Record, frozen=True, gc=False):
    """A run of the trigger of a stream has come to its end, and this is how: it returns, raises or ends the task."""

    trigger: int
    run: int
    how: str


class KillHookCalled(Record, frozen=True, gc=False):
    """The on_kill() of a trigger was called."""

    task: str
    leg: int


class Acted(Record, frozen=True, gc=False):
    """A user has done something to a task."""

    task: str
    what: str
    result: str


class DagSaved(Record, frozen=True, gc=False):
    """A DAG's file says something new: its tasks, each with what is upstream of it."""

    dag: str
    upstream: tuple[tuple[str, tuple[str, ...]], ...]


class AllRested(Record, frozen=True, gc=False):
    """The end: all runs have ended (``in_time``), or the time to come to rest is over."""

    in_time: bool
