"""Judges what becomes of dead letters. Like the checker, it knows nothing of the code under test.

What it looks for, by name:

- ``resolved twice``: a letter that was redriven or discarded is something else now, or has a second such act
- ``redriven without its event``: a letter counts as redriven, and no event stands for it
- ``redriven otherwise``: the event has another name, kind, end flag or payload than its letter
- ``redriven behind the readers``: the event belongs to a trigger that was removed
- ``overwritten``: the event that was there before is not what it was
- ``letter changed``: its names, its kind or its original payload
- ``second letter``: of an event that was redriven, and is the same
- ``act without effect``, ``act without a record``: done, as the user was told, and yet not to be seen
- ``refused without a cause``: a user may not do what the state of the letter allows
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.proof.simulation.records import LetterSeen, Mended, Stored, Tended, Told

RESOLVED = ("redriven", "stored_meanwhile", "discarded")
ENDS_OF: dict[str, tuple[str, ...]] = {
    "redrive": ("redriven", "stored_meanwhile"),
    "discard": ("discarded",),
}
_MAY_BECOME = {"open": {"open", *RESOLVED}, "at_broker": {"at_broker", "open", "discarded"}}
_MAY_DO = {"open": {"redrive", "edit", "discard"}, "at_broker": {"discard"}}

Place = tuple[str, str | None, int]  # trigger, key, position


def _place(event: Told) -> Place:
    return event.trigger, event.key, event.position


class LetterBooks:
    """What is known of the letters, and of the rows that stand for them. ``find`` takes a kind and a text."""

    def __init__(self, find: Callable[[str, str], None]) -> None:
        self._find = find
        self._letters: dict[int, LetterSeen] = {}
        self._rows: dict[int, tuple[str, int, int]] = {}  # run, index and handout, as the row was seen first
        self._edits: Counter[tuple[int, str]] = Counter()  # by letter, and by what became of them
        self._is_mended = False

    def is_redriven(self, run_id: str, index: int) -> bool:
        """Whether the event of this run and index is stored because a letter of it was redriven."""
        return any(
            letter.state == "redriven" and (letter.event.run_id, letter.event.index) == (run_id, index)
            for letter in self._letters.values()
        )

    def take(self, record: LetterSeen | Tended | Mended | Stored, there: set[str]) -> None:
        """Judge the next record. ``there``: the triggers that users have not removed."""
        match record:
            case Stored():
                self._rows[record.row] = record.run_id, record.index, record.handout
            case Mended():
                self._is_mended = True
            case LetterSeen():
                before = self._letters.get(record.letter)
                if before is None:
                    self._see_new(record)
                else:
                    self._see_change(before, record)
                self._see_state(before or record, record)
                self._letters[record.letter] = record
            case Tended():
                self._see_act(record, self._letters[record.letter], there)

    def _see_new(self, new: LetterSeen) -> None:
        if new.event.key is None:
            return
        for other in self._letters.values():
            same = _place(other.event) == _place(new.event) and other.original == new.original
            if same and other.event.kind == new.event.kind and other.state in ENDS_OF["redrive"]:
                self._find("second letter", f"letter {new.letter} of what letter {other.letter} has stored")

    def _see_change(self, before: LetterSeen, now: LetterSeen) -> None:
        if now.state not in _MAY_BECOME.get(before.state, {before.state}):
            self._find("resolved twice", f"letter {now.letter} was {before.state}, and is {now.state}")
        gets_its_payload = (before.state, now.state) == ("at_broker", "open")
        names = [(seen.event.run_id, seen.event.index, *_place(seen.event), seen.event.kind) for seen in (before, now)]
        if names[0] != names[1] or (before.original != now.original and not gets_its_payload):
            self._find("letter changed", f"letter {now.letter} was {before.event}, and is {now.event}")

    def _see_state(self, before: LetterSeen, now: LetterSeen) -> None:
        acts = [action for action in now.actions if action in RESOLVED]
        if len(acts) > 1:
            self._find("resolved twice", f"letter {now.letter}: {', '.join(acts)}")
        elif acts != [state for state in RESOLVED if state == now.state]:
            self._find("act without a record", f"letter {now.letter} is {now.state}, and its record says {acts}")
        if now.state not in ENDS_OF["redrive"]:
            return
        if now.stored is None:
            self._find("redriven without its event", f"letter {now.letter} is {now.state}")
        elif now.state == "stored_meanwhile":
            names = now.stored.run_id, now.stored.index, now.stored.handout
            if self._rows.get(now.row) != names or (before.row == now.row and before.stored != now.stored):
                self._find("overwritten", f"letter {now.letter}: row {now.row} is {now.stored}")
        elif now.stored != before.event:
            self._find("redriven otherwise", f"letter {now.letter}: {before.event} is stored as {now.stored}")
        if now.is_behind and before.state != now.state:
            self._find("redriven behind the readers", f"letter {now.letter}, row {now.row}")

    def _see_act(self, act: Tended, letter: LetterSeen, there: set[str]) -> None:
        what = f"{act.what} of letter {act.letter}, which is {letter.state}"
        if act.what == "edit":
            self._edits[act.letter, act.outcome] += 1
            done, died = self._edits[act.letter, "done"], self._edits[act.letter, "died"]
            if not done <= letter.actions.count("edited") <= done + died:
                self._find("act without a record", what)
        if act.outcome == "done":
            is_edited = act.what == "edit" and letter.event.payload == act.payload
            if not is_edited and letter.state not in ENDS_OF.get(act.what, ()):
                self._find("act without effect", what)
        elif act.outcome == "refused" and act.what in _MAY_DO.get(letter.state, ()):
            is_gone = act.what == "redrive" and letter.event.trigger not in there
            if not is_gone and not (act.why == "RowsRefused" and not self._is_mended):
                self._find("refused without a cause", f"{what}: {act.why}")
