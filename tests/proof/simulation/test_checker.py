"""The checker on histories written by hand: a good one, and for each finding the same with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from tests.proof.simulation import records
from tests.proof.simulation.checker import Checker
from tests.proof.simulation.records import AdvancedItem, Record
from tests.proof.simulation.scenario import (
    HARM_MAX,
    KILLER_KEYS_MAX,
    KILLS_MAX,
    MAX_DELIVERIES,
    Message,
    Scenario,
    Topology,
)

SCENARIO = Scenario(0, Topology(ack_timeout_s=4.0), ((Message(1.0), Message(2.0)),))

History = list[Record]


def delivery(handout: int, offset: int, *, reader: int = 1) -> History:
    """Return how one message is handed out, stored, advanced and committed, as it should be."""
    name, at, run_id = f"0:{offset}", float(handout), "1.1.1.1"
    return [
        records.HandedOut(at, reader, handout, 0, offset),
        records.Pulled(at, "t1", handout, 1),
        records.Fired(at, "t1", handout, 0),
        records.Reported(at, 1, handout, "t1", run_id, handout - 1, name, 0, handout),
        records.Wrote(at, 1, "store_slice"),
        records.Stored(at, handout, "t1", run_id, handout - 1, name, 0, name, handout),
        records.Confirmed(at, 1, (handout,), ()),
        records.AdvanceBegan(at, reader, (AdvancedItem(handout, 1, 0, 0),)),
        records.Committed(at, reader, 0, offset + 1),
        records.AdvanceEnded(at, reader, False),
    ]


def good() -> History:
    """Return a history in which nothing is wrong."""
    return [
        records.Added(0.0, "t1"),
        records.RunnerStarted(0.0, 1, 1, 1),
        records.Began(0.0, "t1", 1),
        records.Opened(0.0, 1, 1),
        *delivery(1, 0),
        *delivery(2, 1),
        records.Closed(3.0, 1),
        records.Rested(3.0, True),
    ]


def kinds(history: Sequence[Record]) -> set[str]:
    """Return what is found."""
    return {finding.kind for finding in Checker(SCENARIO).check(history)}


def place(history: History, kind: type[Record], nth: int = 0) -> int:
    """Return where the nth record of a kind stands."""
    return [number for number, record in enumerate(history) if isinstance(record, kind)][nth]


def change(kind: type[Record], **changes: object) -> Callable[[History], History]:
    """Return a spoiler that changes the first record of a kind."""

    def spoil(history: History) -> History:
        number = place(history, kind)
        history[number] = msgspec.structs.replace(history[number], **changes)
        return history

    return spoil


def drop(kind: type[Record]) -> Callable[[History], History]:
    """Return a spoiler that takes the first record of a kind away."""

    def spoil(history: History) -> History:
        del history[place(history, kind)]
        return history

    return spoil


def add(record: Record, *, before: type[Record], nth: int = 0) -> Callable[[History], History]:
    """Return a spoiler that puts a record in front of one of a kind."""

    def spoil(history: History) -> History:
        history.insert(place(history, before, nth), record)
        return history

    return spoil


def late(kind: type[Record], *, behind: type[Record]) -> Callable[[History], History]:
    """Return a spoiler that moves the first record of a kind behind the first of another."""

    def spoil(history: History) -> History:
        record = history.pop(place(history, kind))
        history.insert(place(history, behind) + 1, record)
        return history

    return spoil


def handed_out_at_once(history: History) -> History:
    """Spoil: both messages are handed out first, and the second one is advanced in the place of the first."""
    second = history.pop(place(history, records.HandedOut, 1))
    history.insert(place(history, records.HandedOut) + 1, second)
    return change(records.AdvanceBegan, items=(AdvancedItem(2, 1, 0, 0),))(history)


def taken_by_halves(history: History) -> History:
    """Spoil: the next owner of a stream takes one trigger first, and the other one later."""
    owners: History = [records.Owned(1.0, "d", {"t1": one, "t2": two}) for one, two in ((1, 1), (2, 0), (2, 2))]
    return [*history[:-1], *owners, history[-1]]


LETTER = records.DeadLettered(1.0, 1, "t1", "1.1.1.2", -1, "0:0", -1, is_whole=True)
AGAIN = records.Stored(1.0, 9, "t1", "2.1.1.1", 7, "0:0", 0, "0:0", 1)


def kill_with(message: str | None) -> Record:
    """Return how a trigger ends its process."""
    return records.Killed(0.0, "t1", 1, message)


KILLED, KILLED_WITH_MESSAGE = kill_with(None), kill_with("0:0")

SPOILED: dict[str, tuple[str, Callable[[History], History]]] = {
    "fired nothing": ("lost", lambda history: [r for r in history if not _is_about_the_event(r)]),
    "another row": ("stored twice", add(AGAIN, before=records.Confirmed)),
    "stored late": ("advanced before stored", late(records.Stored, behind=records.AdvanceBegan)),
    "confirmed early": ("confirmed before stored", late(records.Stored, behind=records.Confirmed)),
    "wrong seq": ("confirmed to a stranger", change(records.Confirmed, seqs=(7,))),
    "wrong runner": ("confirmed to a stranger", change(records.Confirmed, runner=2)),
    "another payload": ("difference forgotten", change(records.Reported, said_handout=2)),
    "wrong key": ("bound to another message", change(records.Stored, key="0:1")),
    "skipped": ("out of lane order", handed_out_at_once),
    "failed": ("commit past a failed message", change(records.AdvanceBegan, items=(AdvancedItem(1, 0, 1, 0),))),
    "nobody there": ("commit past a failed message", change(records.AdvanceBegan, items=(AdvancedItem(1, 0, 0, 0),))),
    "never advanced": ("commit past a failed message", drop(records.AdvanceBegan)),
    "too far": ("commit past a failed message", change(records.Committed, before=2)),
    "two calls": ("two advances at once", drop(records.AdvanceEnded)),
    "closed early": ("advanced after close", add(records.Closed(1.0, 1), before=records.AdvanceBegan)),
    "closed in a call": ("advanced after close", add(records.Closed(1.0, 1), before=records.AdvanceEnded, nth=1)),
    "closed again": ("closed twice", add(records.Closed(3.0, 1), before=records.Rested)),
    "fenced": ("written without a lease", add(records.Fenced(0.0, 1), before=records.Opened)),
    "fenced, and goes on": (
        "advanced without a lease",
        add(records.Fenced(1.0, 2, supervisor=1), before=records.AdvanceBegan),
    ),
    "odd end": (
        "failed without a cause",
        add(records.Finished(1.0, 1, "t1", "failed", "AssertionError: "), before=records.Closed),
    ),
    "late timeout": ("timed out late", add(records.Hung(5.01, "t1", 1), before=records.Closed)),
    "never timed out": ("timed out late", add(records.Hung(9.0, "t1", 2), before=records.Rested)),
    "reject unheard": ("reject without effect", add(records.Refused(1.0, "t1", 1), before=records.AdvanceBegan)),
    "passed over": ("passed over too early", add(LETTER, before=records.AdvanceBegan)),
    "passed over and cut": (
        "passed over without a trace",
        add(msgspec.structs.replace(LETTER, is_whole=False), before=records.AdvanceBegan),
    ),
    "two owners": ("split stream", add(records.Owned(1.0, "d", {"t1": 1, "t2": 2}), before=records.Closed)),
    "half an owner": ("taken in part", taken_by_halves),
    "killed again": (
        "ends its runner again and again",
        lambda history: [KILLED] * (HARM_MAX + 1) + history,
    ),
    "killed again with a message": (
        "ends its runner again and again",
        lambda history: [KILLED_WITH_MESSAGE] * (KILLS_MAX + 1) + history,
    ),
    "killed with many messages": (
        "ends its runner again and again",
        lambda history: [*(kill_with(f"0:{n}") for n in range(KILLER_KEYS_MAX + 2)), *history],
    ),
    "held": ("started though it is held", add(records.Held(0.0, "t1", "quarantine"), before=records.Began)),
    "one is missing": ("broadcast without a trigger", add(records.Began(0.0, "t2", 7), before=records.Opened)),
    "escaped": ("broke", add(records.Broke(1.0, "the runner", "KeyError()"), before=records.Closed)),
    "no rest": ("stuck", change(records.Rested, in_time=False)),
    "nobody left": ("stuck", lambda history: [r for r in history if not _is_about_the_second_message(r)]),
}


def _is_about_the_second_message(record: Record) -> bool:
    return record.at == 2.0


def _is_about_the_event(record: Record) -> bool:
    about = records.Fired | records.Reported | records.Wrote | records.Stored | records.Confirmed
    return isinstance(record, about) and record.at == 1.0


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert kinds(good()) == set()


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_wrong_is_found(name: str) -> None:
    kind, spoil = SPOILED[name]
    assert kind in kinds(spoil(good()))


def test_a_redelivery_needs_no_second_row() -> None:
    history = good()
    again = delivery(3, 1)
    again[3] = msgspec.structs.replace(again[3], run_id="1.1.1.2", index=0, said_handout=2)
    again = [record for record in again if not isinstance(record, records.Stored | records.Committed)]
    number = place(history, records.Closed)
    failed = place(history, records.AdvanceBegan, 1)
    history[failed] = records.AdvanceBegan(2.0, 1, (AdvancedItem(2, 0, 1, 0),))
    committed = history.pop(place(history, records.Committed, 1))
    history[number - 1 : number - 1] = [*again, committed]
    assert kinds(history) == set()


def test_a_stream_that_moves_whole_and_is_joined_later_is_not_split() -> None:
    steps = ({"t1": 1}, {"t1": 1, "t2": 0}, {"t1": 1, "t2": 1}, {"t1": 0, "t2": 0}, {"t1": 2, "t2": 2}, {"t2": 2})
    history = good()
    history[-1:-1] = [records.Owned(3.0, "d", owners) for owners in steps]
    assert kinds(history) == set()


def test_a_difference_that_is_a_dead_letter_is_not_forgotten() -> None:
    history = change(records.Reported, said_handout=2)(good())
    letter = records.DeadLettered(1.0, 1, "t1", "1.1.1.1", 0, "0:0", 0)
    assert "difference forgotten" not in kinds(add(letter, before=records.Confirmed)(history))


def test_a_message_that_was_failed_on_often_enough_may_be_a_letter_instead() -> None:
    _, spoil = SPOILED["fired nothing"]
    history = add(LETTER, before=records.AdvanceBegan)(spoil(good()))
    failure = records.Finished(1.0, 1, "t1", "failed", "PlannedFailure: ", "0:0")
    history[place(history, records.DeadLettered) : place(history, records.DeadLettered)] = [failure] * MAX_DELIVERIES
    assert kinds(history) == set()


def test_a_message_that_ends_the_process_often_enough_may_be_a_letter_instead() -> None:
    _, spoil = SPOILED["fired nothing"]
    history = add(LETTER, before=records.AdvanceBegan)(spoil(good()))
    number = place(history, records.DeadLettered)
    history[number:number] = [KILLED_WITH_MESSAGE] * KILLS_MAX
    assert kinds(history) == set()


@pytest.mark.parametrize("forgotten", [records.Released(0.0, "t1"), records.SupervisorEnded(0.0, 1, "killed")])
def test_the_harm_of_a_trigger_is_counted_anew_after_a_release_and_in_another_supervisor(forgotten: Record) -> None:
    history = good()
    number = place(history, records.Opened)
    history[number:number] = [*[KILLED] * HARM_MAX, forgotten, *[KILLED] * HARM_MAX]
    assert kinds(history) == set()


@pytest.mark.parametrize("gone", [records.Fenced(0.0, 2, supervisor=2), records.SupervisorEnded(0.0, 2, "killed")])
def test_a_supervisor_that_is_fenced_or_ends_may_take_a_strike_with_it(gone: Record) -> None:
    assert "ends its runner again and again" in kinds([*[KILLED_WITH_MESSAGE] * (KILLS_MAX + 1), *good()])
    assert kinds([gone, *[KILLED_WITH_MESSAGE] * (KILLS_MAX + 1), *good()]) == set()


def test_nothing_is_lost_by_a_trigger_that_a_user_removed_or_that_returned() -> None:
    gone: list[Record] = [records.Removed(0.5, "t1"), records.Returned(0.5, "t1")]
    for record in gone:
        for spoiled in ("fired nothing", "nobody left"):
            _, spoil = SPOILED[spoiled]
            history = spoil(good())
            history.insert(place(history, records.HandedOut), record)
            assert kinds(history) == set()
