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


class Tended(Record, frozen=True, gc=False):
    """A user has done something to the log, or was told why it cannot be done."""

    what: str
    result: str
