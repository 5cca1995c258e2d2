"""What is added to a history by signals."""

from __future__ import annotations

from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks.records import SaidSignal


class SignalStored(Record, frozen=True, gc=False):
    """A version is in the log, stored by the verb ``by``, which named the step ``said``, if it was one's.

    ``value`` is the text of its JSON; ``run`` names the run that it is for alone.
    """

    by: str
    said: str
    key: str
    version: int
    value: str
    dedup: str
    sender: str
    run: str


class SignalsDropped(Record, frozen=True, gc=False):
    """Versions are not kept any more."""

    by: str
    key: str
    versions: tuple[int, ...]


class KeyForgotten(Record, frozen=True, gc=False):
    """A key is gone, with all its versions."""

    by: str
    key: str


class WatcherAdded(Record, frozen=True, gc=False):
    """A watcher of the plan has this trigger."""

    watcher: str
    trigger: int


class Sends(Record, frozen=True, gc=False):
    """Somebody asks for signals to be sent at once: a step, by its token, or ``a user``, or ``a trigger``.

    ``run`` is the one that those are for that are for one run alone.
    """

    who: str
    signals: tuple[SaidSignal, ...]
    run: str = ""


class Sent(Record, frozen=True, gc=False):
    """The sender was told of its signal."""

    who: str
    key: str
    dedup: str
    version: int
    is_new: bool


class Answered(Record, frozen=True, gc=False):
    """The supervisor answers a step that listens for versions above ``after`` (None: for those to come)."""

    token: str
    task: str
    key: str
    after: int | None
    versions: tuple[int, ...]
    seen: int


class Listened(Record, frozen=True, gc=False):
    """The code of a step was handed these versions."""

    token: str
    versions: tuple[int, ...]


class ListenedOut(Record, frozen=True, gc=False):
    """The code of a step listens no more; ``timed_out``: because nothing came in time."""

    token: str
    task: str
    timed_out: bool


class Refused(Record, frozen=True, gc=False):
    """The supervisor has refused what a step asked for."""

    token: str
    task: str
    error: str


class RulesMoved(Record, frozen=True, gc=False):
    """With what a task was started last has changed: by the name of its rule, the version; those by hand are 1."""

    by: str
    task: str
    starts: tuple[tuple[str, int], ...]


class RuleMet(Record, frozen=True, gc=False):
    """A version has met a rule, by the name of that, and has not acted yet."""

    by: str
    task: str
    rule: str
    version: int


class Asked(Record, frozen=True, gc=False):
    """A user asks for a task to start, to restart or to stop; ``is_sure``: and was told that it is stored."""

    task: str
    action: str
    is_sure: bool


class RunEnding(Record, frozen=True, gc=False):
    """A user asks for a run to end."""

    run: str


class Tended(Record, frozen=True, gc=False):
    """A user has done something to the log, or was told why it cannot be done."""

    what: str
    result: str


class Questioned(Record, frozen=True, gc=False):
    """A supervisor asks what signals do to a task, named by key and version; ``token`` names the question."""

    supervisor: int
    token: str
    task: str
    signals: tuple[tuple[str, int], ...]


class QuestionOver(Record, frozen=True, gc=False):
    """The worker that has a question is free."""

    token: str


class LeaseOver(Record, frozen=True, gc=False):
    """The database knows that an epoch is fenced, or has ended."""

    epoch: int


class Decided(Record, frozen=True, gc=False):
    """The code of a task has decided what a signal does; without an ``action`` it could not, or has died over it."""

    token: str
    task: str
    key: str
    version: int
    action: str


class Undecided(Record, frozen=True, gc=False):
    """The row of a rule has changed about which the task's operator decides, which has seen versions up to ``seen``.

    ``met`` is the version that is to act, and does what was ``decided``; 0 if there is none. ``given_up`` is the newest
    version that could not be decided, if it was given up.
    """

    by: str
    task: str
    rule: str
    seen: int
    met: int
    decided: str
    given_up: int


class Ticked(Record, frozen=True, gc=False):
    """The row of a rule about the time has changed: how often it was met, and when it is the next time (None: never).

    That is as time of the simulation.
    """

    by: str
    task: str
    rule: str
    version: int
    next_at: float | None


class WorkerGone(Record, frozen=True, gc=False):
    """The worker of an endless task does nothing more for the step with this token."""

    token: str


class RunSignal(Record, frozen=True, gc=False):
    """A signal that has met a rule of a DAG is kept for its runs, in the row ``number``; or that has changed.

    Without a ``run`` it waits; ``is_gone``: the row is not there any more. ``value`` is the text of its JSON.
    """

    by: str
    number: int
    dag: str
    rule: str
    key: str
    version: int
    value: str
    run: str
    is_superseded: bool
    is_gone: bool


class RunToEnd(Record, frozen=True, gc=False):
    """A run is to end, or is not any more."""

    by: str
    run: str
    is_ending: bool


class EndMet(Record, frozen=True, gc=False):
    """A version has met the rule about ``key`` that ends a run, and has not acted yet; 0: it has, or is forgotten."""

    by: str
    run: str
    key: str
    version: int


class RuleMade(Record, frozen=True, gc=False):
    """A run has a rule of a task."""

    by: str
    task: str
    rule: str


class Starting(Record, frozen=True, gc=False):
    """A user sends signals with a run of this DAG unless one is open; without a DAG, nobody does any more."""

    dag: str


class Started(Record, frozen=True, gc=False):
    """The user was told of the run that was started; empty: none."""

    dag: str
    run: str
