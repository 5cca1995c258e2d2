"""The books of letters on histories written by hand: a good one, and for each finding the same with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.proof.simulation.records import LetterSeen, Mended, Record, Stored, Tended, Told
from tests.proof.simulation.users.letter_books import LetterBooks

REFUSED = Told("t1", "1.1.1.1", 0, "0:0", 0, "event", False, payload=11, handout=1)
EDITED = msgspec.structs.replace(REFUSED, payload=12)
STORED = msgspec.structs.replace(REFUSED, run_id="1.1.1.2", payload=13, handout=2)  # by the next delivery

History = list[Record]
Spoiler = Callable[[History], History]


def seen(at: float, state: str, event: Told, *actions: str, row: int = 0, stored: Told | None = None) -> LetterSeen:
    """Return the letter as it is seen: it was that of `REFUSED` before any edit."""
    return LetterSeen(at, 1, state, event, REFUSED.payload, row, stored, False, actions)


def redriven() -> History:
    """Return how a letter is edited and redriven; the redrive is tried too early, and once too often."""
    return [
        seen(1.0, "open", REFUSED),
        Tended(2.0, 1, "redrive", "refused", "RowsRefused"),
        seen(3.0, "open", EDITED, "edited"),
        Tended(3.0, 1, "edit", "done", payload=EDITED.payload),
        Mended(3.5),
        seen(4.0, "redriven", EDITED, "edited", "redriven", row=7, stored=EDITED),
        Stored(4.0, 7, "t1", "1.1.1.1", 0, "0:0", 0, "0:0", 1),
        Tended(4.0, 1, "redrive", "done"),
        Tended(5.0, 1, "redrive", "refused", "LetterResolved"),
    ]


def stored_meanwhile() -> History:
    """Return how the broker delivers a message again before its letter is redriven."""
    return [
        seen(1.0, "open", REFUSED),
        Mended(1.5),
        Stored(2.0, 7, "t1", "1.1.1.2", 0, "0:0", 0, "0:0", 2),
        seen(3.0, "stored_meanwhile", REFUSED, "stored_meanwhile", row=7, stored=STORED),
        Tended(3.0, 1, "redrive", "done"),
    ]


def kinds(history: Sequence[Any], there: frozenset[str] = frozenset({"t1"})) -> set[str]:
    """Return what is found."""
    found: set[str] = set()
    books = LetterBooks(lambda kind, what: found.add(kind))
    for record in history:
        books.take(record, set(there))
    return found


def change(kind: type[Record], nth: int, **changes: object) -> Spoiler:
    """Return a spoiler that changes the nth record of a kind."""

    def spoil(history: History) -> History:
        number = [place for place, record in enumerate(history) if isinstance(record, kind)][nth]
        history[number] = msgspec.structs.replace(history[number], **changes)
        return history

    return spoil


def add(*records: Record) -> Spoiler:
    """Return a spoiler that adds records at the end."""
    return lambda history: [*history, *records]


def drop(kind: type[Record], nth: int) -> Spoiler:
    """Return a spoiler that takes the nth record of a kind away."""

    def spoil(history: History) -> History:
        del history[[place for place, record in enumerate(history) if isinstance(record, kind)][nth]]
        return history

    return spoil


@pytest.mark.parametrize("history", [redriven(), stored_meanwhile()])
def test_good_histories_have_no_findings(history: History) -> None:
    assert kinds(history) == set()


SECOND = LetterSeen(6.0, 2, "open", REFUSED, REFUSED.payload, 0, None, False, ())
DISCARDED = seen(6.0, "discarded", EDITED, "edited", "redriven", "discarded")


@pytest.mark.parametrize(
    ("finding", "spoil"),
    [
        ("resolved twice", add(DISCARDED)),
        (
            "resolved twice",
            add(seen(6.0, "redriven", EDITED, "edited", "redriven", "redriven", row=7, stored=EDITED)),
        ),
        ("redriven without its event", change(LetterSeen, 2, row=0, stored=None)),
        ("redriven otherwise", change(LetterSeen, 2, stored=REFUSED)),
        ("redriven otherwise", change(LetterSeen, 2, stored=msgspec.structs.replace(EDITED, kind="success"))),
        ("redriven otherwise", change(LetterSeen, 2, stored=msgspec.structs.replace(EDITED, is_last=True))),
        ("redriven behind the readers", change(LetterSeen, 2, is_behind=True)),
        ("letter changed", change(LetterSeen, 1, original=99)),
        ("letter changed", change(LetterSeen, 1, event=msgspec.structs.replace(EDITED, key="0:1"))),
        ("second letter", add(SECOND)),
        ("act without effect", drop(LetterSeen, 2)),
        ("act without effect", change(Tended, 1, payload=99)),
        ("act without a record", change(LetterSeen, 2, actions=("edited",))),
        ("act without a record", change(LetterSeen, 1, actions=())),
        ("refused without a cause", change(Tended, 0, why="LetterRefused")),
        ("refused without a cause", add(SECOND, Tended(7.0, 2, "redrive", "refused", "RowsRefused"))),
    ],
)
def test_one_thing_that_is_wrong_is_found(finding: str, spoil: Spoiler) -> None:
    assert finding in kinds(spoil(redriven()))


@pytest.mark.parametrize(
    "spoil",
    [
        change(LetterSeen, 1, stored=msgspec.structs.replace(STORED, handout=1)),
        add(seen(4.0, "stored_meanwhile", REFUSED, "stored_meanwhile", row=7, stored=REFUSED)),
    ],
)
def test_an_event_that_was_there_before_may_not_change(spoil: Spoiler) -> None:
    assert "overwritten" in kinds(spoil(stored_meanwhile()))


def test_a_letter_of_a_trigger_that_is_gone_may_be_refused() -> None:
    history = [seen(1.0, "open", REFUSED), Mended(1.5), Tended(2.0, 1, "redrive", "refused", "LetterRefused")]
    assert kinds(history, frozenset()) == set()
    assert kinds(history) == {"refused without a cause"}


def test_a_user_who_died_in_an_edit_may_or_may_not_have_edited() -> None:
    died = Tended(2.0, 1, "edit", "died", "a mark", payload=EDITED.payload)
    assert kinds([seen(1.0, "open", REFUSED), died]) == set()
    assert kinds([seen(1.0, "open", REFUSED), seen(2.0, "open", EDITED, "edited"), died]) == set()
