"""The books of tasks with rules: what is asked for, in its order, and with what a task has started."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from tests.proof.simulation.tasks.signals.plans import canonical
from tests.proof.simulation.tasks.signals.records import SignalStored
from tests.proof.simulation.tasks.signals.rules.plans import BY_HAND, STARTING, Rule, Ruled

UNDER_WAY = frozenset(("scheduled", "running", "deferred"))
FREE = frozenset(("none", "up_for_retry", "success", "failed", "skipped", "upstream_failed"))


class Ask(msgspec.Struct):
    """A signal, the end of a task or a user asks for something.

    ``number`` orders all that is asked for in a history, ``is_due``: it has to be done, and is not only allowed.
    """

    number: int
    at: float
    rule: str
    action: str
    version: int
    is_due: bool = True

    @property
    def is_by_hand(self) -> bool:
        """Whether a user asks."""
        return self.rule.startswith(BY_HAND)


class RuleBook(msgspec.Struct):
    """One task of a run. What was asked for stays in ``every``; ``left`` is what has not started it yet."""

    task: str
    ruled: Ruled
    every: list[Ask] = []
    left: list[Ask] = []
    started: dict[str, int] = {}  # the newest version with which it has started, by rule
    taken_back: int = 0  # what was asked for before this came to nothing
    tied_at: float | None = None  # but for signals of the moment of that stop, if it was no signal: none is the first
    ready_since: float | None = None  # its necessary rules are met, and its trigger rule holds
    snapshot: tuple[tuple[str, int], ...] | None = None  # by the transaction that is being told

    @property
    def rules(self) -> dict[str, Rule]:
        """Its rules, by name."""
        return {rule.name: rule for rule in self.ruled.rules}

    def takes(self, rule: Rule, stored: SignalStored) -> bool:
        """Whether a version meets a rule."""
        is_for = stored.run in ("", self.task.rpartition("/")[0])
        return is_for and rule.key == stored.key and rule.value in (None, canonical(stored.value))

    def action(self, rule: Rule, value: str) -> str:
        """Return what a signal does that meets a rule, by its value; an operator that decides says it."""
        decides = self.ruled.decides
        return rule.action if decides is None or not rule.key else decides.action(canonical(value))

    def is_start(self, rule: Rule, version: int) -> bool:
        """Whether this version of what a rule is about starts the task."""
        if self.ruled.decides is None or not rule.key:
            return rule.starts
        ask = self.version(rule.name, version)
        return ask is not None and ask.action in STARTING

    def ask(self, ask: Ask) -> None:
        """Add what is asked for."""
        ask.is_due = ask.is_due and all(one.rule != ask.rule or one.version != ask.version for one in self.every)
        self.every.append(ask)
        self.left.append(ask)

    def forgive(self, rule: str, met: Collection[int]) -> None:
        """What a rule has asked for does not have to be done any more, but for versions that have met it."""
        for one in self.left:
            one.is_due = one.is_due and (one.rule != rule or one.version in met)

    def sort(self) -> None:
        """Have what is asked for in the order of its numbers."""
        self.every.sort(key=_number)
        self.left.sort(key=_number)

    def asks(self, *actions: str) -> list[Ask]:
        """Return what is left that asks for one of these actions by itself: what is necessary does not."""
        return [one for one in self.left if one.action in actions and not self.is_necessary(one.rule)]

    def is_necessary(self, rule: str) -> bool:
        """Whether a rule asks only together with others."""
        return rule in self.rules and self.rules[rule].condition == "necessary"

    def is_taken_back(self, ask: Ask) -> bool:
        """Whether a stop was asked for later; one signal may do both, and then it is nobody's promise which counts."""
        return any(one.action == "STOP" and one.number >= ask.number for one in self.every)

    def has_come_back(self, ask: Ask) -> bool:
        """Whether a stop has taken it back for good."""
        return ask.number < self.taken_back and ask.at != self.tied_at

    def is_both(self, stop: Ask) -> bool:
        """Whether what asks for a stop asks for a start as well."""
        return any(one.action in STARTING and one.number == stop.number for one in self.every)

    def is_of_a_restart(self, ask: Ask) -> bool:
        """Whether a restart was asked for later, which stands for the starts before it."""
        return any(one.action == "RESTART" and one.number > ask.number for one in self.every)

    def due(self) -> list[Ask]:
        """Return the starts that are left, and have to be."""
        return [one for one in self.asks(*STARTING) if one.is_due and not self.is_taken_back(one)]

    def version(self, rule: str, version: int) -> Ask | None:
        """Return what a version has asked for by a rule."""
        return next((one for one in reversed(self.every) if (one.rule, one.version) == (rule, version)), None)

    def passed_over(self, rule: str, version: int) -> list[Ask]:
        """Return what is left of a rule below a version, and should have started the task before."""
        return [
            one
            for one in self.left
            if one.rule == rule and one.version < version and one.is_due and one.action in STARTING
            if not self.is_taken_back(one) and not self.is_of_a_restart(one)
        ]

    def met(self) -> list[Ask] | None:
        """Return the newest that is left of each necessary rule; None unless all are met."""
        necessary = [name for name in self.rules if self.is_necessary(name)]
        newest = [max((one for one in self.left if one.rule == name), key=_number, default=None) for name in necessary]
        found = [one for one in newest if one is not None]
        return found if necessary and len(found) == len(newest) else None

    def start(self, rule: str, version: int) -> None:
        """The task has started with a version."""
        self.started[rule] = version
        self.left = [one for one in self.left if one.rule != rule or one.version > version]

    def stop(self) -> None:
        """A stop is done: the first that is left, at least."""
        stops = self.asks("STOP")
        if stops:
            stop, rule = stops[0], self.rules.get(stops[0].rule)
            self.taken_back = max(self.taken_back, stop.number)
            if stop.number == self.taken_back:
                is_signal = not stop.is_by_hand and (rule is None or not rule.ended)
                self.tied_at = None if is_signal else stop.at
            self.left.remove(stop)
        self.left = [one for one in self.left if not (one.is_by_hand and one.action == "STOP")]

    def close(self, places: dict[str, int] | None = None) -> None:
        """Forget all that is asked for: its run has ended; or goes on after it, from these versions on."""
        self.left = [] if places is None else [one for one in self.left if one.is_by_hand]
        if places is not None:
            self.started = places
        self.every, self.ready_since = [*self.left], None


def _number(ask: Ask) -> int:
    return ask.number
