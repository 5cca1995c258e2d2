"""Which trigger is to blame for the end of a runner, and for how long it is held back.

All triggers of a supervisor share one process, so a trigger that ends it interrupts all others. The rules:

- **named with a message**: the black box says which trigger was executed, and on which message. The message is struck,
  and the trigger starts again with the others. One that ends the process with more than `KILLER_KEYS_MAX` messages
  within `HARM_WINDOW_S` is quarantined.
- **named without a message** (also: it blocked the loop for too long, or did not end when it was cancelled): the
  trigger is held back, for longer each time, while all others start at once. `HARM_MAX` times within `HARM_WINDOW_S`
  quarantine it.
- **not named** (a thread of a trigger, for example), and again within `UNNAMED_WITHIN_S`: the triggers that ran are
  searched by halves. The newer half is held back; if the process ends again, the others are to blame, and if it lives
  for longer than it did, those held back are. The one that is left is *accused*: it is started again when the others
  have shown that they live without it, and an end soon after that start counts as named.

Nothing here is stored: the memory of harm ends with the supervisor, a quarantine does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

HARM_MAX = 3  # ends of the process by one trigger, without a message, within the window
KILLER_KEYS_MAX = 3  # messages with which one trigger may end the process within the window
HARM_WINDOW_S = 3600.0
UNNAMED_WITHIN_S = 30.0  # an end for which nobody is named counts together with another one so soon before it
TRIAL_MIN_S = 2.0  # for which a runner has to live without those that are held back


class Harm(NamedTuple):
    """One end of a runner by a trigger, with the key of the message that it was working on, if any."""

    at: float
    key: str | None


class Verdict(NamedTuple):
    """What follows for the trigger that is to blame: a quarantine, or a wait before its next start (may be 0)."""

    trigger_id: int
    is_quarantined: bool = False
    wait_s: float = 0.0


class Suspects:
    """The harm done by the triggers of one supervisor, and the search for one that is not named.

    ``wait_of`` returns the seconds to hold a trigger back after so many harms.
    """

    def __init__(self, wait_of: Callable[[int], float]) -> None:
        self._wait_of = wait_of
        self._harms: dict[int, list[Harm]] = {}
        self._unnamed_at = -math.inf
        # The search: in order, the newest first; those that are held back are some of the first.
        self._candidates: list[int] = []
        self._held_back: list[int] = []
        self._trial_s = 0.0
        self._trial_ends_at = math.inf
        self._accused: tuple[int, float] | None = None  # a trigger, and the time at which it may start again

    # --- ends of the runner -----------------------------------------------------------------------

    def harmed(self, trigger_id: int, key: str | None, now: float) -> Verdict:
        """Count an end of the runner that is the doing of a trigger."""
        since = now - HARM_WINDOW_S
        self._harms = {
            number: recent
            for number, harms in self._harms.items()
            if (recent := [harm for harm in harms if harm.at > since])
        }
        harms = self._harms.setdefault(trigger_id, [])
        # Of each message only the newest is kept: how often it ends the process is counted with its strikes.
        harms[:] = [harm for harm in harms if key is None or harm.key != key]
        harms.append(Harm(now, key))
        without_message = sum(harm.key is None for harm in harms)
        if without_message >= HARM_MAX or len(harms) - without_message > KILLER_KEYS_MAX:
            return Verdict(trigger_id, is_quarantined=True)
        return Verdict(trigger_id, wait_s=self._wait_of(without_message) if key is None else 0.0)

    def ended_unnamed(self, running: Sequence[int], lived_s: float, now: float) -> Verdict | None:
        """Take an end of the runner for which the black box names nobody; return a verdict if one trigger is left.

        ``running`` are the triggers that ran, the newest first. ``lived_s`` is the time since the last of them started.
        """
        accused, self._accused = self._accused, None
        if accused is not None and accused[0] in running and now - accused[1] <= UNNAMED_WITHIN_S:
            return self._accuse(accused[0], lived_s, now)
        was_soon = now - self._unnamed_at <= UNNAMED_WITHIN_S
        self._unnamed_at = now
        if not self._candidates:
            if was_soon:
                self._search(list(running), lived_s)
        else:
            self._search([number for number in self._candidates if number in running], lived_s)
        if len(self._candidates) == 1:
            return self._accuse(self._candidates[0], lived_s, now)
        return None

    def forget(self, trigger_id: int) -> None:
        """Forget the harm of a trigger that a user has released, or that is gone."""
        self._harms.pop(trigger_id, None)

    # --- the search -------------------------------------------------------------------------------

    def held_back(self) -> frozenset[int]:
        """Return the triggers that must not start until the search goes on."""
        return frozenset(self._held_back)

    def wake_at(self) -> float:
        """Return the time at which `released` has something to say."""
        return self._trial_ends_at

    def started(self, now: float) -> None:
        """Note that all triggers have been started that are due: the runner has to live without those held back."""
        if self._held_back and self._trial_ends_at == math.inf:
            self._trial_ends_at = now + self._trial_s

    def restarted(self) -> None:
        """Note that the runner has ended, for whatever reason: the trial begins anew."""
        self._trial_ends_at = math.inf

    def released(self, now: float) -> tuple[int, ...]:
        """Return the triggers to be started now, because the runner has lived long enough without them."""
        if now < self._trial_ends_at:
            return ()
        before = self._held_back
        if len(before) == 1:
            self._end_search()
            self._accused = (before[0], now)
            return tuple(before)
        self._halve(before)
        return tuple(number for number in before if number not in self._held_back)

    def _search(self, candidates: list[int], lived_s: float) -> None:
        self._end_search()
        if len(candidates) > 1:
            self._trial_s = max(TRIAL_MIN_S, self._trial_s, 2 * lived_s)
            self._halve(candidates)
        elif candidates:
            self._candidates = candidates

    def _halve(self, candidates: list[int]) -> None:
        self._candidates = candidates
        self._held_back = candidates[: (len(candidates) + 1) // 2]
        self._trial_ends_at = math.inf  # it begins with the next start

    def _accuse(self, trigger_id: int, lived_s: float, now: float) -> Verdict:
        self._end_search()
        verdict = self.harmed(trigger_id, None, now)
        # The others have to show that they live without it, for longer than they did with it.
        verdict = verdict._replace(wait_s=max(verdict.wait_s, TRIAL_MIN_S, 2 * lived_s))
        if not verdict.is_quarantined:
            self._accused = (trigger_id, now + verdict.wait_s)
        return verdict

    def _end_search(self) -> None:
        self._candidates, self._held_back = [], []
        self._trial_ends_at = math.inf
