"""Judges what becomes of messages that users redrive. Like the checker, it knows nothing of the code under test.

What it looks for, by name:

- ``redriven without its events``: a message counts as redriven, and not all that derives from it is in the log
- ``redriven though it was rejected``: its filter did not want it
- ``redriven twice``: it was, and is something else now
- ``given up without a cause``: it is open again, and its trigger has not failed on it, nor rejected it
- ``redrive without effect``: a user was told that it is on its way, and it is not
- ``redrive refused without a cause``: a user may not do what the state of the letter allows
- ``redriving for ever``: it is on its way when all is at rest, though its trigger runs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from tests.proof.simulation.records import MessageRedriven, MessageSeen
from tests.proof.simulation.scenario import Plan

_MAY_BECOME = {
    "open": {"open", "redriving"},
    "at_broker": {"at_broker", "open"},
    "redriving": {"redriving", "redriven", "open"},
}
_REFUSED_KINDS = ("refused", "long", "poison")  # whose events are letters again

Place = tuple[str, str]  # trigger, message


class MessageBooks:
    """What is known of the dead letters of messages. ``find`` takes a kind and a text.

    ``is_row`` says whether an event is a row, by trigger, message and position.
    """

    def __init__(
        self,
        find: Callable[[str, str], None],
        plan_of: Callable[[str, str], Plan],
        is_row: Callable[[tuple[str, str, int]], bool],
    ) -> None:
        self._find = find
        self._plan_of = plan_of
        self._is_row = is_row
        self._letters: dict[int, MessageSeen] = {}
        self._causes: Counter[Place] = Counter()  # of a letter that is open again
        self._causes_before: dict[int, int] = {}  # those when the letter was last seen on its way
        self.redrives: Counter[Place] = Counter()  # how often a user has redriven it

    def cause(self, trigger: str, message: str | None) -> None:
        """A trigger has failed on a message, ended its process with it, or rejected it."""
        if message is not None:
            self._causes[trigger, message] += 1

    def take(self, record: MessageSeen | MessageRedriven, there: set[str]) -> None:
        """Judge the next record. ``there``: the triggers that have not returned, and that nobody has removed."""
        if isinstance(record, MessageRedriven):
            self._see_act(record, self._letters[record.letter], there)
            return
        before, self._letters[record.letter] = self._letters.get(record.letter), record
        place = (record.trigger, record.message)
        if record.state == "redriving" and (before is None or before.state != "redriving"):
            self._causes_before[record.letter] = self._causes[place]
            self.redrives[place] += 1
        if before is None or before.state == record.state:
            return
        what = f"letter {record.letter}, {record.message} of {record.trigger}"
        if record.state not in _MAY_BECOME.get(before.state, {before.state}):
            self._find("redriven twice", f"{what}, was {before.state}, and is {record.state}")
        if record.state == "redriven":
            self._see_redriven(record, what)
        elif (before.state, record.state) == ("redriving", "open"):
            is_refused = self._plan_of(*place).kind in _REFUSED_KINDS
            if self._causes[place] == self._causes_before[record.letter] and not is_refused:
                self._find("given up without a cause", what)

    def at_rest(self, running: Iterable[str]) -> None:
        """Judge what is left when nothing happens any more. ``running``: the triggers that could take a message."""
        for letter in self._letters.values():
            if letter.state == "redriving" and letter.trigger in running:
                self._find("redriving for ever", f"letter {letter.letter}, {letter.message} of {letter.trigger}")

    def _see_redriven(self, now: MessageSeen, what: str) -> None:
        plan = self._plan_of(now.trigger, now.message)
        if plan.kind == "reject":
            self._find("redriven though it was rejected", what)
        for position in range(plan.events):
            place = (now.trigger, now.message, position)
            if not self._is_row(place):
                self._find("redriven without its events", f"{what}, without position {position}")

    def _see_act(self, act: MessageRedriven, letter: MessageSeen, there: set[str]) -> None:
        what = f"letter {letter.letter}, which is {letter.state}"
        if act.outcome == "done" and letter.state != "redriving":
            self._find("redrive without effect", what)
        if act.outcome == "refused" and letter.state in ("open", "redriving") and letter.trigger in there:
            self._find("redrive refused without a cause", f"{what}: {act.why}")
