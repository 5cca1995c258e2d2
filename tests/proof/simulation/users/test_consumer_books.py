"""The books of consumers on a history written by hand, and for each finding the same with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.proof.simulation.records import AskedFor, Caught, Logged, NotTaken, SetAside, Stored, Taken
from tests.proof.simulation.scenario import Consuming
from tests.proof.simulation.users.consumer_books import ConsumerBooks

History = list[Stored | Logged | Taken | NotTaken | SetAside | AskedFor | Caught]

OLD, NEW = 3, 8  # the triggers of one watcher, which was removed and added again


def stored(row: int, trigger: int, name: str = "t1") -> History:
    """Return how an event is stored, and seen to be."""
    return [Logged(1.0, row, trigger), Stored(1.0, row, name, f"1.1.{trigger}.1", row, f"0:{row}", 0, f"0:{row}", row)]


def taken(row: int, trigger: int, worker: int = 0) -> Taken:
    """Return how a consumer is handed an event over."""
    return Taken(2.0, "c1", worker, row, trigger, f"0:{row}", row)


def good() -> History:
    """Return a history in which two workers share the events of one watcher, and another watcher's are left alone.

    An event of the old trigger is stored after the first of the new one; the reader has waited for it.
    """
    return [
        *stored(1, OLD),
        taken(1, OLD),
        *stored(2, NEW),
        *stored(3, 5, "t2"),
        *stored(4, OLD),
        taken(4, OLD, 1),
        taken(2, NEW),
        Caught(3.0, "c1", "t1"),
    ]


def kinds(history: History) -> set[str]:
    """Return what is found."""
    found: set[str] = set()
    books = ConsumerBooks(lambda kind, what: found.add(kind), {"c1": Consuming("t1", max_deliveries=2)})
    for record in history:
        books.take(record)
    return found


def aside() -> History:
    """Return a history in which one event is set aside after two refusals, asked for too early, and then taken.

    A worker that died was about to take it for the third time.
    """
    refused = NotTaken(2.0, "c1", (2,), has_died=False)
    return [
        *stored(1, OLD),
        *stored(2, OLD),
        *stored(3, OLD),
        NotTaken(1.5, "c1", (1, 2, 3), has_died=False),
        taken(1, OLD),
        refused,
        refused,
        SetAside(2.0, "c1", 2, OLD, "open"),
        taken(3, OLD),
        AskedFor(3.0, "c1"),
        refused,
        AskedFor(4.0, "c1"),
        taken(2, OLD),
        SetAside(4.0, "c1", 2, OLD, "handed_over"),
        Caught(5.0, "c1", "t1"),
    ]


def test_an_event_that_was_set_aside_may_come_out_of_order() -> None:
    assert kinds(aside()) == set()


@pytest.mark.parametrize(
    ("finding", "place"),
    [("set aside too early", 8), ("skipped", 10), ("tried again and again", 12), ("skipped", 15)],
)
def test_one_thing_that_is_left_out_around_an_event_that_was_set_aside_is_found(finding: str, place: int) -> None:
    history = aside()
    del history[place]
    assert finding in kinds(history)


def test_a_death_may_count_as_a_refusal() -> None:
    history = aside()
    history[8] = NotTaken(2.0, "c1", (), has_died=True)
    assert kinds(history) == set()


def test_a_refusal_may_not_be_counted_if_its_process_dies() -> None:
    refused = NotTaken(2.0, "c1", (2,), has_died=False)
    assert kinds([refused] * 3) == {"tried again and again"}
    assert kinds([refused, NotTaken(2.0, "c1", (2,), has_died=True), refused, refused]) == set()


def test_an_event_that_was_set_aside_is_handed_over_once() -> None:
    assert kinds([*aside(), taken(2, OLD)]) == {"handed over twice"}


def test_a_good_history_has_no_findings() -> None:
    assert kinds(good()) == set()


def swapped(history: History) -> History:
    """Have the new trigger read before the old one is at its end."""
    history[9], history[10] = history[10], history[9]
    return history


def other(**changes: object) -> Callable[[History], History]:
    """Return a spoiler that changes the first event that is handed over."""

    def spoil(history: History) -> History:
        history[2] = msgspec.structs.replace(history[2], **changes)
        return history

    return spoil


@pytest.mark.parametrize(
    ("finding", "spoil"),
    [
        ("handed over twice", lambda history: [*history, taken(1, OLD, 1)]),
        ("handed over out of order", swapped),
        ("skipped", swapped),
        ("skipped", lambda history: [record for record in history if record != taken(1, OLD)]),
        ("skipped", lambda history: [record for record in history if record != taken(2, NEW)]),
        ("handed over otherwise", other(handout=9)),
        ("handed over otherwise", other(key="0:9")),
        ("handed over otherwise", lambda history: [*history, taken(3, 5)]),
        ("handed over otherwise", lambda history: [*history, taken(7, NEW)]),
    ],
)
def test_one_thing_that_is_wrong_is_found(finding: str, spoil: Callable[[History], History]) -> None:
    assert finding in kinds(spoil(good()))
