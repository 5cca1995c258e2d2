"""What follows from the end of a runner: its cause is named, recorded, and held back from the next runner.

`headgate.supervisor.triggers.suspects` decides who is to blame. Here that takes effect: in the triggers that are owned,
in the log, and in the database, at once or as soon as it can be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import structlog

from headgate.protocol.black_box import Record
from headgate.protocol.messages.runner import FinishedTrigger, StateChanges
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.triggers.strikes import KILLS_MAX
from headgate.supervisor.backoff import DatabaseRetry, Waits
from headgate.supervisor.children.process import without_output
from headgate.supervisor.triggers.assignments import Assignments
from headgate.supervisor.triggers.holds import Holds
from headgate.supervisor.triggers.intake import Intake
from headgate.supervisor.triggers.suspects import HARM_MAX, HARM_WINDOW_S, Suspects, Verdict

log = structlog.get_logger(__name__)


class Strike(msgspec.Struct, frozen=True):
    """A message with which a runner has ended, to be struck in the database."""

    trigger_id: int
    key: str
    trigger_run_id: str
    error: str


class Blame:
    """Who ended the runners of one supervisor."""

    def __init__(
        self,
        store: Store,
        assignments: Assignments,
        intake: Intake,
        holds: Holds,
        *,
        waits: Waits,
        retry: DatabaseRetry,
    ) -> None:
        self._store = store
        self._assignments = assignments
        self._intake = intake
        self._holds = holds
        self._retry = retry
        self._suspects = Suspects(waits.after)
        self._strikes: list[Strike] = []
        self._stuck: dict[int, float] = {}  # triggers that did not end when cancelled: how long to hold each back

    @property
    def is_stored(self) -> bool:
        """Whether all strikes are stored: until then a trigger could be given a message that is to be passed over."""
        return not self._strikes

    def wake_at(self) -> float:
        """Return the time at which `store` is due."""
        return self._retry.at if self._strikes else math.inf

    def release_at(self) -> float:
        """Return the time at which `release` is due, if triggers may be started then."""
        return self._suspects.wake_at()

    # --- ends of the runner -----------------------------------------------------------------------

    def stuck(self, trigger_ids: Sequence[int], now: float) -> None:
        """Count triggers as harmful that do not end when they are cancelled: their runner has to be replaced."""
        for trigger_id in trigger_ids:
            run_id = self._assignments.run_of(trigger_id)
            if run_id is not None and trigger_id not in self._stuck:
                verdict = self._suspects.harmed(trigger_id, None, now)
                self._stuck[trigger_id] = verdict.wait_s
                self._record(verdict, run_id, "it does not end when it is cancelled, so its runner was replaced")

    def drained(self, now: float) -> None:
        """Hand all triggers over to the next runner after an end that was asked for."""
        self._hand_over({}, now)

    def runner_ended(self, record: Record | None, how: str, now: float, *, ended_itself: bool) -> bool:
        """Hand all triggers over to the next runner after an end that was not asked for; return whether it has a cause.

        ``record`` is that of the black box, ``how`` explains the end. Unless the process ``ended_itself``, nobody is
        to blame. A search that goes on counts as a cause, because it ends after a few more ends.
        """
        how = without_output(how)
        verdict: Verdict | None = None
        if ended_itself:
            verdict = self._judge(record, how, now)
        waits = {} if verdict is None else {verdict.trigger_id: verdict.wait_s}
        self._hand_over(waits, now)
        return verdict is not None or bool(self._suspects.held_back())

    def _judge(self, record: Record | None, how: str, now: float) -> Verdict | None:
        trigger_id = None if record is None else self._assignments.trigger_of_run(record.trigger_run_id)
        if record is not None and trigger_id is not None:
            verdict = self._suspects.harmed(trigger_id, record.key, now)
            name = self._assignments.name_of(trigger_id)
            if record.key is None:
                error = f"the runner ended while it executed this trigger: {how}"
                log.error(f"the runner ended while it executed {name}", how=how, trigger_id=trigger_id)
            else:
                error = f"the runner ended while this trigger held the message {record.key}: {how}"
                log.error(
                    f"the runner ended while {name} held the message {record.key}", how=how, trigger_id=trigger_id
                )
                self._strikes.append(Strike(trigger_id, record.key, record.trigger_run_id, error))
            self._record(verdict, record.trigger_run_id, error)
            return verdict
        return self._judge_unnamed(how, now)

    def _judge_unnamed(self, how: str, now: float) -> Verdict | None:
        running, lived_s = self._assignments.running_newest_first(now)
        verdict = self._suspects.ended_unnamed(running, lived_s, now)
        if verdict is not None:
            name = self._assignments.name_of(verdict.trigger_id)
            error = f"the runner ends whenever this trigger runs, and not without it: {how}"
            log.error(f"the runner ends whenever {name} runs", how=how, trigger_id=verdict.trigger_id)
            self._record(verdict, self._assignments.run_of(verdict.trigger_id) or "", error)
        elif self._suspects.held_back():
            held_back = len(self._suspects.held_back())
            log.warning("searching for the trigger that ends the runner", how=how, held_back=held_back)
        return verdict

    def _record(self, verdict: Verdict, trigger_run_id: str, error: str) -> None:
        """Store the harm as a failure of the trigger, and quarantine it if that is the verdict."""
        trigger_id = verdict.trigger_id
        # The task of a trigger need not fail before the quarantine, and one that is removed has failed nobody.
        if self._assignments.task_of(trigger_id) is None and self._assignments.is_running(trigger_id):
            failure = FinishedTrigger(trigger_id, trigger_run_id, "failed", 0, error=error)
            self._intake.add_frame(0, StateChanges(round=0, finished=(failure,)))
        if verdict.is_quarantined:
            hours = HARM_WINDOW_S / 3600
            self._quarantine(
                trigger_id,
                f"it harmed all others {HARM_MAX} times or more within {hours:g} h, the last time so: {error}",
            )

    def _quarantine(self, trigger_id: int, reason: str) -> None:
        name = self._assignments.name_of(trigger_id)
        log.error("a trigger is quarantined", trigger_id=trigger_id, trigger_name=name, reason=reason)
        self._holds.begin(trigger_id, "quarantine", reason)

    def _hand_over(self, waits: dict[int, float], now: float) -> None:
        waits = {**dict.fromkeys(self._suspects.held_back(), math.inf), **self._stuck, **waits}
        self._stuck.clear()
        self._suspects.restarted()
        self._assignments.hand_over(now, {trigger_id: now + wait_s for trigger_id, wait_s in waits.items()})

    # --- afterwards -------------------------------------------------------------------------------

    def started(self, now: float) -> None:
        """Note that all triggers that are due have been started."""
        self._suspects.started(now)

    def release(self, now: float) -> None:
        """Let triggers start that were held back, if the runner has lived long enough without them."""
        self._assignments.start_at(self._suspects.released(now), now)

    def forget(self, trigger_ids: Sequence[int]) -> None:
        """Forget the harm of triggers that a user has released."""
        for trigger_id in trigger_ids:
            self._suspects.forget(trigger_id)

    def store(self, epoch: Epoch, now: float) -> None:
        """Store the strikes that are not stored yet. Raises `LeaseLost`."""
        if not self._strikes or not self._retry.ready(now):
            return
        with self._retry.attempt(now):
            while self._strikes:
                strike = self._strikes[0]
                strikes = self._store.strike_message(
                    epoch, strike.trigger_id, strike.key, strike.trigger_run_id, strike.error
                )
                if strikes.is_passed_over:
                    self._assignments.pass_over(strike.trigger_id, strike.key)
                    log.error("a message ends the runner", trigger_id=strike.trigger_id, key=strike.key)
                elif strikes.kills >= KILLS_MAX:
                    self._quarantine(
                        strike.trigger_id,
                        f"its message {strike.key} has ended the runner {strikes.kills} times, and is not passed over "
                        f"because max_deliveries is 0; the last time so: {strike.error}",
                    )
                del self._strikes[0]
