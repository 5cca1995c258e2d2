"""Scenarios that are not drawn, about users: what they do to dead letters while the pair works and processes die."""

from __future__ import annotations

from collections.abc import Callable

from tests.proof.simulation import records, world
from tests.proof.simulation.checker import Checker
from tests.proof.simulation.scenario import (
    AddWatcher,
    AdvanceHangs,
    Consuming,
    Fault,
    FreezeSupervisor,
    KillAtMark,
    KillRunner,
    MendDatabase,
    Message,
    Plan,
    Redeliver,
    RemoveWatcher,
    Scenario,
    TendLetters,
    Topology,
)

from headgate.protocol.marks import CONSUMER_MARKS, LETTER_MARKS

LAST = Message(16.0)  # when users have done their work
REFUSED = Plan("poison", steady=True)  # an event that the database refuses, the same at each delivery


def _run(plan: Scenario) -> tuple[list[records.Record], list[str]]:
    history = world.run(plan)
    return history, [str(finding) for finding in Checker(plan).check(history)]


def _states(history: list[records.Record]) -> dict[int, str]:
    """Return the last state of each letter."""
    return {record.letter: record.state for record in history if isinstance(record, records.LetterSeen)}


def _resolved(history: list[records.Record], *expected: str) -> list[str]:
    states = list(_states(history).values())
    return [] if states == list(expected) else [f"the letters are {states}, and not {list(expected)}"]


def a_user_who_dies_in_a_redrive_has_redriven_the_letter_or_has_not() -> list[str]:
    """A user dies at each point of a redrive and begins anew: the event is stored once, under its names."""
    found = []
    for mark in LETTER_MARKS:
        faults = (MendDatabase(2.0), KillAtMark(mark), *(TendLetters(at, "redrive") for at in (3.0, 4.0, 5.0)))
        history, findings = _run(Scenario(0, Topology(), ((Message(1.0, {"t1": REFUSED}), LAST),), faults))
        found += [*findings, *_resolved(history, "redriven")]
        if not any(isinstance(r, records.Tended) and r.outcome == "died" and r.why == mark for r in history):
            found.append(f"nobody died at {mark}")
    return found


def _delivered_again(refused: Plan, *acts: Fault) -> tuple[list[records.Record], list[str]]:
    """Have an event refused, and its message delivered again at 9 s, because its runner dies before it is advanced."""
    faults = (AdvanceHangs(0.5, 20.0), *acts, KillRunner(8.0))
    plan = Scenario(0, Topology(), ((Message(1.0, {"t1": refused}), Message(32.0)),), faults)
    history, found = _run(plan)
    if sum(isinstance(record, records.HandedOut) and record.offset == 0 for record in history) != 2:
        found.append("the message was not delivered again")
    return history, found


def an_event_that_was_redriven_and_is_refused_again_gets_no_other_letter() -> list[str]:
    """A user mends an event and redrives it; the broker delivers its message again, and it is refused as before."""
    history, found = _delivered_again(REFUSED, TendLetters(3.0, "edit"), TendLetters(4.0, "redrive", times=2))
    return [*found, *_resolved(history, "redriven")]


def an_event_that_the_broker_delivers_again_is_stored_once_whoever_is_first() -> list[str]:
    """The database is mended between two deliveries of a message; the letter is redriven before, or after the second.

    The second delivery gives another payload than the first, and whichever is stored counts: an edit of the letter that
    comes later does not, and what differs is a letter again.
    """
    differing = Plan("poison")
    history, found = _delivered_again(differing, MendDatabase(3.0), TendLetters(4.0, "redrive"))
    found += _resolved(history, "redriven", "open")
    late_acts = (TendLetters(12.0, "edit"), TendLetters(13.0, "redrive"))
    history, others = _delivered_again(differing, MendDatabase(3.0), *late_acts)
    return [*found, *others, *_resolved(history, "stored_meanwhile")]


def a_redriven_event_keeps_its_kind_and_its_end() -> list[str]:
    """The last event of one of two triggers is of a kind that ends a task, and refused."""
    plans = {"t1": Plan("poison", ends=True)}
    faults = (MendDatabase(2.0), TendLetters(3.0, "redrive"))
    history, found = _run(Scenario(0, Topology(triggers=2), ((Message(1.0, plans), LAST),), faults))
    stored = [record.stored for record in history if isinstance(record, records.LetterSeen) and record.stored]
    if [(told.kind, told.is_last) for told in stored] != [("success", True)]:
        found.append(f"stored as {stored}")
    return [*found, *_resolved(history, "redriven")]


def a_letter_of_a_watcher_that_was_removed_goes_to_that_of_its_name() -> list[str]:
    """One of two watchers is removed: its letter is refused until there is a watcher of this name again."""
    faults = (
        MendDatabase(2.0),
        RemoveWatcher(3.0, "t1"),
        TendLetters(4.0, "redrive"),
        AddWatcher(5.0, "t1"),
        TendLetters(8.0, "redrive"),
    )
    history, found = _run(Scenario(0, Topology(triggers=2), ((Message(1.0, {"t1": REFUSED}), LAST),), faults))
    outcomes = [record.outcome for record in history if isinstance(record, records.Tended)]
    if outcomes != ["refused", "done"]:
        found.append(f"the redrives were {outcomes}")
    return [*found, *_resolved(history, "redriven")]


def a_letter_is_resolved_once() -> list[str]:
    """Letters are redriven, edited and discarded again and again: the first resolving act counts."""
    messages = (Message(1.0, {"t1": REFUSED}), Message(1.0, {"t1": REFUSED}), LAST)
    found = []
    for first, second, state in (("redrive", "discard", "redriven"), ("discard", "redrive", "discarded")):
        faults = (
            MendDatabase(2.0),
            TendLetters(3.0, first, times=2),  # type: ignore[arg-type]
            TendLetters(4.0, "edit"),
            TendLetters(5.0, second, times=2),  # type: ignore[arg-type]
        )
        history, findings = _run(Scenario(0, Topology(), (messages,), faults))
        found += [*findings, *_resolved(history, state, state)]
    return found


def _consumed(history: list[records.Record]) -> list[tuple[int, str | None]]:
    """Return the events that the consumer was handed over: trigger and key."""
    return [(record.trigger_id, record.key) for record in history if isinstance(record, records.Taken)]


def a_consumer_that_dies_is_handed_over_each_event_once() -> list[str]:
    """A program dies at each point of a batch, and another goes on: each event is in its table once, in order."""
    found = []
    for mark in CONSUMER_MARKS:
        messages = tuple(Message(1.0 + number / 4) for number in range(8))
        consumer = Consuming("t1", limit=2, pause_s=0.25, fails=(6, 8), dies=(10,))
        # Not every batch is recorded, and few fail.
        nth = 1 if mark in ("consumer.batch_recorded", "consumer.rolled_back", "consumer.failure_counted") else 6
        plan = Scenario(0, Topology(), ((*messages, LAST),), (KillAtMark(mark, nth),), (consumer,))
        history, findings = _run(plan)
        found += findings
        if not any(isinstance(record, records.Faulted) and mark in record.fault for record in history):
            found.append(f"nobody died at {mark}")
        if _consumed(history) != [(1, f"0:{number}") for number in range(9)]:
            found.append(f"{mark}: handed over were {_consumed(history)}")
    return found


def workers_of_one_consumer_take_turns() -> list[str]:
    """Three workers of one name share the events, and none gets what another has had."""
    messages = tuple(Message(1.0 + number / 16) for number in range(32))
    consumer = Consuming("t1", workers=3, limit=2, pause_s=0.125)
    history, found = _run(Scenario(0, Topology(), ((*messages, LAST),), (), (consumer,)))
    workers = {record.worker for record in history if isinstance(record, records.Taken)}
    if not {0, 1, 2} <= workers:
        found.append(f"only {workers} had a batch")
    return found


def a_removed_trigger_is_read_to_its_end_before_that_of_its_name() -> list[str]:
    """A watcher is removed and added again while an event of the old trigger waits for its supervisor.

    A letter of the old one, redriven meanwhile, is stored for the new one: the reader waits for the old one with it.
    """
    messages = (Message(1.0, {"t1": REFUSED}), Message(2.5), LAST)
    faults = (
        FreezeSupervisor(2.25, 4.0),
        RemoveWatcher(3.0, "t1"),
        AddWatcher(3.25, "t1"),
        MendDatabase(3.5),
        TendLetters(4.0, "redrive"),
    )
    history, found = _run(Scenario(0, Topology(triggers=2), (messages,), faults, (Consuming("t1", pause_s=0.25),)))
    if _consumed(history)[:2] != [(1, "0:1"), (3, "0:0")]:
        found.append(f"handed over were {_consumed(history)}")
    return found


def an_event_that_the_users_code_cannot_take_is_set_aside_and_comes_when_it_is_asked_for() -> list[str]:
    """One of eight events is refused until the code is mended: the others are taken, and it follows out of order.

    It is asked for too early, and again when the code is mended.
    """
    messages = tuple(Message(1.0 + number / 4) for number in range(8))
    consumer = Consuming("t1", limit=3, pause_s=0.125, unfit=("0:2",), mended_at=8.0, max_deliveries=2)
    faults = (Redeliver(6.0, 0), Redeliver(9.0, 0))
    history, found = _run(Scenario(0, Topology(), ((*messages, LAST),), faults, (consumer,)))
    if _consumed(history) != [(1, f"0:{number}") for number in (0, 1, 3, 4, 5, 6, 7, 2, 8)]:
        found.append(f"handed over were {_consumed(history)}")
    return found


OF_USERS: dict[str, Callable[[], list[str]]] = {
    "death in a redrive": a_user_who_dies_in_a_redrive_has_redriven_the_letter_or_has_not,
    "refused again": an_event_that_was_redriven_and_is_refused_again_gets_no_other_letter,
    "stored meanwhile": an_event_that_the_broker_delivers_again_is_stored_once_whoever_is_first,
    "end redriven": a_redriven_event_keeps_its_kind_and_its_end,
    "name again": a_letter_of_a_watcher_that_was_removed_goes_to_that_of_its_name,
    "resolved once": a_letter_is_resolved_once,
    "consumer dies": a_consumer_that_dies_is_handed_over_each_event_once,
    "workers": workers_of_one_consumer_take_turns,
    "set aside": an_event_that_the_users_code_cannot_take_is_set_aside_and_comes_when_it_is_asked_for,
    "consumed again": a_removed_trigger_is_read_to_its_end_before_that_of_its_name,
}
