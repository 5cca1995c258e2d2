"""What a history is made of: one record for each thing that happened, in the order in which it happened.

All times in simulated seconds. A *handout* is one delivery of one message by one reader (one poll of the broker), a
*position* counts the events that one trigger derives from one message. The history says what the surroundings saw:
the broker, the users' filters, the wire and the database; nothing in it comes from inside the pair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Something that happened, and when."""

    at: float


# --- processes and faults --------------------------------------------------------------------------


class Faulted(Record, frozen=True, gc=False):
    """A fault was injected."""

    fault: str


class SupervisorStarted(Record, frozen=True, gc=False):
    """A supervisor began."""

    supervisor: int


class SupervisorEnded(Record, frozen=True, gc=False):
    """A supervisor is gone."""

    supervisor: int
    how: str


class RunnerStarted(Record, frozen=True, gc=False):
    """A runner began."""

    runner: int
    supervisor: int
    incarnation: int


class RunnerEnded(Record, frozen=True, gc=False):
    """A runner is gone."""

    runner: int
    how: str


class Broke(Record, frozen=True, gc=False):
    """Something escaped that should not have, in the named half."""

    where: str
    error: str


# --- users -----------------------------------------------------------------------------------------


class Added(Record, frozen=True, gc=False):
    """A trigger is in the database."""

    trigger: str


class Removed(Record, frozen=True, gc=False):
    """A user removed a trigger."""

    trigger: str


class Began(Record, frozen=True, gc=False):
    """A run of a trigger is joining the stream, now."""

    trigger: str
    runner: int


class Pulled(Record, frozen=True, gc=False):
    """A filter has got a message."""

    trigger: str
    handout: int
    runner: int


class Fired(Record, frozen=True, gc=False):
    """A filter fires an event that derives from this handout."""

    trigger: str
    handout: int
    position: int


class Refused(Record, frozen=True, gc=False):
    """A filter has rejected this handout."""

    trigger: str
    handout: int


class Returned(Record, frozen=True, gc=False):
    """A filter has returned: the trigger wants no more."""

    trigger: str


class Hung(Record, frozen=True, gc=False):
    """A filter that hung on this handout was cancelled."""

    trigger: str
    handout: int


class Killed(Record, frozen=True, gc=False):
    """A trigger ends the process of its runner, now; ``message`` is the one that it has got, if any."""

    trigger: str
    runner: int
    message: str | None


class Held(Record, frozen=True, gc=False):
    """A supervisor has stored that a trigger is held."""

    trigger: str
    hold: str


class Released(Record, frozen=True, gc=False):
    """A user has released a trigger."""

    trigger: str


class Tended(Record, frozen=True, gc=False):
    """A user has tried to redrive, edit or discard a dead letter, and was told that it is done, or refused and ``why``.

    A user who "died" in between was told nothing. ``payload`` is the CRC of what an edit wants stored, else 0.
    """

    letter: int
    what: str
    outcome: Literal["done", "refused", "died"]
    why: str = ""
    payload: int = 0


class Mended(Record, frozen=True, gc=False):
    """The database stores what it refused before."""


# --- the broker ------------------------------------------------------------------------------------


class Published(Record, frozen=True, gc=False):
    """A message is at the broker."""

    lane: int
    offset: int


class Opened(Record, frozen=True, gc=False):
    """A reader has the broker's attention; the one before it has lost it."""

    reader: int
    runner: int


class HandedOut(Record, frozen=True, gc=False):
    """A reader gives a message to its stream."""

    reader: int
    handout: int
    lane: int
    offset: int


class Redelivered(Record, frozen=True, gc=False):
    """A message of a dead letter is given to its trigger once more, and not by a reader."""

    handout: int
    lane: int
    offset: int


class MessageSeen(Record, frozen=True, gc=False):
    """A dead letter of a message that is new, or has changed; only if users redrive messages.

    ``trigger`` is the one that gets the message. ``position``: that of the event for which the letter stands, -1 for
    the whole message.
    """

    letter: int
    trigger: str
    message: str
    position: int
    state: str


class MessageRedriven(Record, frozen=True, gc=False):
    """A user has tried to redrive a dead letter of a message: it is ``done``, or refused and ``why``."""

    letter: int
    outcome: str
    why: str = ""


class AdvancedItem(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One message of an advance, and how its audience resolved it."""

    handout: int
    acked: int
    failed: int
    rejected: int


class AdvanceBegan(Record, frozen=True, gc=False):
    """The pump calls advance."""

    reader: int
    items: tuple[AdvancedItem, ...]


class AdvanceEnded(Record, frozen=True, gc=False):
    """A call of advance is over."""

    reader: int
    failed: bool


class Committed(Record, frozen=True, gc=False):
    """The broker has forgotten every message of the lane before this offset."""

    reader: int
    lane: int
    before: int


class Closed(Record, frozen=True, gc=False):
    """A reader's aclose was called."""

    reader: int


# --- the wire --------------------------------------------------------------------------------------


class Framed(Record, frozen=True, gc=False):
    """A frame was sent or received by the supervisor: the CRC of its body, so that histories differ where bytes do."""

    runner: int
    is_up: bool
    crc: int


class Reported(Record, frozen=True, gc=False):
    """The supervisor has got an event of a runner: its persist seq, and the names it is stored by.

    ``said_handout`` is the handout that its payload names, 0 for an event that the runner refused.
    """

    runner: int
    seq: int
    trigger: str
    run_id: str
    index: int
    key: str | None
    position: int
    said_handout: int = 0


class Finished(Record, frozen=True, gc=False):
    """The supervisor has got the report that a run ended."""

    runner: int
    trigger: str
    outcome: str
    error: str
    message_key: str | None = None  # of the message that it failed on


class Confirmed(Record, frozen=True, gc=False):
    """The supervisor sends a confirmation of these seqs to a runner."""

    runner: int
    seqs: tuple[int, ...]
    refused: tuple[int, ...]


# --- the database ----------------------------------------------------------------------------------


class Fenced(Record, frozen=True, gc=False):
    """An epoch was fenced, or has signed off; ``supervisor`` 0 where nobody knows whose it is."""

    epoch: int
    supervisor: int = 0


class Wrote(Record, frozen=True, gc=False):
    """A verb that writes for an epoch has committed."""

    epoch: int
    verb: str


class Owned(Record, frozen=True, gc=False):
    """The owners of the open triggers of a stream have changed: by trigger, an epoch, 0 if none that may write."""

    stream: str
    owners: dict[str, int]


class Stored(Record, frozen=True, gc=False):
    """A row of the event log, seen for the first time. ``said`` and ``handout`` are what its payload says."""

    row: int
    trigger: str
    run_id: str
    index: int
    key: str | None
    position: int
    said: str
    handout: int


class DeadLettered(Record, frozen=True, gc=False):
    """A dead letter, seen for the first time."""

    row: int
    trigger: str
    run_id: str
    index: int
    key: str | None
    position: int
    is_whole: bool = False


class Told(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An event as a dead letter or a row of the log has it: its names, its kind, and the CRC of its payload.

    ``handout`` is what the payload says, 0 for the head of one.
    """

    trigger: str
    run_id: str
    index: int
    key: str | None
    position: int
    kind: str
    is_last: bool
    payload: int
    handout: int = 0


class LetterSeen(Record, frozen=True, gc=False):
    """A dead letter of an event that is new, or has changed; only if users care for letters.

    ``event`` is what a redrive is to store, ``original`` the CRC of the payload before any edit. ``row`` is that of the
    event that stands for the letter (0: none), ``stored`` what the row holds now; ``is_behind``: its trigger is one
    that was removed. ``actions`` are those of the letter's record, the oldest first.
    """

    letter: int
    state: str
    event: Told
    original: int
    row: int
    stored: Told | None
    is_behind: bool
    actions: tuple[str, ...]


class Logged(Record, frozen=True, gc=False):
    """The trigger that a row of the event log belongs to, by its id; only if there are consumers."""

    row: int
    trigger_id: int


class Taken(Record, frozen=True, gc=False):
    """A row of a user's table, in which a consumer has been handed over an event; in the order of the table."""

    consumer: str
    worker: int
    row: int
    trigger_id: int
    key: str | None
    handout: int


class NotTaken(Record, frozen=True, gc=False):
    """The code of a user has not taken a batch: it raised, or its process died; ``rows`` are those that it has seen.

    ``has_died``: nobody is told that it was not taken.
    """

    consumer: str
    rows: tuple[int, ...]
    has_died: bool


class SetAside(Record, frozen=True, gc=False):
    """The letter of an event that a consumer has set aside is new, or has changed its state."""

    consumer: str
    row: int
    trigger_id: int
    state: str


class AskedFor(Record, frozen=True, gc=False):
    """A user has asked for the events that a consumer has set aside."""

    consumer: str


class Caught(Record, frozen=True, gc=False):
    """A consumer has been told that there is nothing more, when everything had come to rest."""

    consumer: str
    watcher: str


class Rested(Record, frozen=True, gc=False):
    """The end: everything is committed or nobody is left in the database (``in_time``), or the time for it is over."""

    in_time: bool


_encoder = msgspec.json.Encoder()


def encode_lines(history: Iterable[Record]) -> bytes:
    """Return the history as JSON lines."""
    return _encoder.encode_lines(list(history))


def digest(history: Iterable[Record]) -> str:
    """Return what two histories have in common only when they are the same, byte for byte."""
    return hashlib.sha256(encode_lines(history)).hexdigest()
