"""Messages that users have redriven, on their way to the triggers of this supervisor.

A poll finds the triggers that have some. While a run of such a trigger goes on, its messages are given to it, a few at
a time, until none is left. What was given belongs to that run: if it ends, the next one gets what is still unsettled.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import structlog

from headgate.protocol import marks
from headgate.protocol.messages.runner import Redelivery, RedeliveryEnd, StateSync
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.triggers.redrives import REDELIVERIES_BYTES_MAX, REDELIVERIES_MAX, RedrivingLetter
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.triggers.assignments import Assignments

log = structlog.get_logger(__name__)

REFILL_MESSAGES = REDELIVERIES_MAX // 2  # a run that has no more than these left gets the next ones
TRIGGERS_A_STEP = 16  # whose messages are read in one step, up to REDELIVERIES_BYTES_MAX: the other duties wait for it
REDELIVERY_ROOM_BYTES = 4096  # of a frame, for what is in it beside the message


class _Redriven(msgspec.Struct):
    """What the current run of one trigger was given: the key of each message by its letter.

    ``has_more``: more may wait in the database.
    """

    trigger_run_id: str = ""
    given: dict[int, str] = msgspec.field(default_factory=dict)
    has_more: bool = True


class Redrives:
    """The redriven messages of one supervisor's triggers. It costs nothing while there are none."""

    def __init__(self, store: Store, assignments: Assignments, *, frame_bytes_max: int, retry: DatabaseRetry) -> None:
        self._store = store
        self._assignments = assignments
        self._message_bytes_max = frame_bytes_max - REDELIVERY_ROOM_BYTES
        self._retry = retry
        self._of: dict[int, _Redriven] = {}

    def __len__(self) -> int:
        """The number of triggers of which something is kept."""
        return len(self._of)

    def wake_at(self) -> float | None:
        """Return the time at which `step` has to be called; None if it has nothing to do."""
        return self._retry.at if any(self._is_due(trigger_id) for trigger_id in self._of) else None

    def found(self, trigger_ids: Iterable[int]) -> None:
        """Take the triggers for which a poll has found messages."""
        for trigger_id in trigger_ids:
            self._of.setdefault(trigger_id, _Redriven()).has_more = True

    def ended(self, ends: Iterable[RedeliveryEnd]) -> None:
        """Take the ends of messages that are stored now."""
        for end in ends:
            redriven = self._of.get(end.trigger_id)
            if redriven is not None and redriven.trigger_run_id == end.trigger_run_id:
                key = redriven.given.pop(end.letter_id, None)
                if key is not None and end.outcome == "handled":
                    self._assignments.give_again(end.trigger_id, key)
                if not redriven.given and not redriven.has_more:
                    del self._of[end.trigger_id]

    def step(self, epoch: Epoch, now: float) -> StateSync | None:
        """Read the next messages of the triggers that may get some; return the message for the runner, if any.

        Raises `LeaseLost`.
        """
        if not self._of or not self._retry.ready(now):
            return None
        for trigger_id in [trigger_id for trigger_id in self._of if trigger_id not in self._assignments]:
            del self._of[trigger_id]  # its next owner gives it the rest
        out: list[Redelivery] = []
        room = REDELIVERIES_BYTES_MAX
        due = [trigger_id for trigger_id in self._of if self._is_due(trigger_id)]
        for trigger_id in due[:TRIGGERS_A_STEP]:
            if room <= 0 or not self._retry.ready(now):
                break
            with self._retry.attempt(now):
                given = self._next(epoch, trigger_id)
                room -= sum(len(one.message) for one in given)
                out += given
        if out:
            marks.reach("redelivery.read")
        return StateSync(redeliveries=tuple(out)) if out else None

    def _is_due(self, trigger_id: int) -> bool:
        """Whether a trigger runs, and may get messages that it was not given in this run."""
        if not self._assignments.is_running(trigger_id):
            return False
        redriven = self._of[trigger_id]
        is_new = self._assignments.run_of(trigger_id) != redriven.trigger_run_id
        return is_new or (redriven.has_more and len(redriven.given) <= REFILL_MESSAGES)

    def _next(self, epoch: Epoch, trigger_id: int) -> list[Redelivery]:
        run_id = self._assignments.run_of(trigger_id)
        assert run_id is not None, "it runs"
        redriven = self._of[trigger_id]
        if redriven.trigger_run_id != run_id:
            redriven = self._of[trigger_id] = _Redriven(run_id)
        letters = self._store.redriving_letters(trigger_id, given=redriven.given)
        long = [letter for letter in letters if len(letter.message) > self._message_bytes_max]
        if long:  # before any is given: if the database is away, all are read again
            self._store.end_redeliveries(epoch, [self._too_long(letter, trigger_id, run_id) for letter in long])
        del self._of[trigger_id]
        redriven.has_more = bool(letters)
        if letters or redriven.given:
            self._of[trigger_id] = redriven  # behind the others, which have their turn now
        out = []
        for letter in letters:
            if len(letter.message) > self._message_bytes_max:
                continue
            log.info("a message is given to its trigger once more", trigger_id=trigger_id, letter_id=letter.id)
            redriven.given[letter.id] = letter.key
            out.append(Redelivery(letter.id, trigger_id, run_id, letter.key, letter.message))
        return out

    def _too_long(self, letter: RedrivingLetter, trigger_id: int, run_id: str) -> RedeliveryEnd:
        limit = f"the message has {len(letter.message):,} bytes, and a frame takes {self._message_bytes_max:,}"
        log.warning("a message cannot be given to its trigger", trigger_id=trigger_id, letter_id=letter.id, error=limit)
        return RedeliveryEnd(letter.id, trigger_id, run_id, "failed", limit)
