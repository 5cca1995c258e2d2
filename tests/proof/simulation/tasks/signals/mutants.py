"""Deliberate bugs in signals: each breaks one promise, and the simulation has to find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import bindparam, false, func, literal, select, true, update
from tests.proof.simulation.mutants import Mutant, Patch
from tests.proof.simulation.tasks.signals.directed import DIRECTED

from headgate.protocol import marks
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.messages.signals import SentSignal
from headgate.store import signal_verbs
from headgate.store.db.bulk import insert_new
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import LeasedTx, Tx
from headgate.store.ids import Epoch
from headgate.store.scheduling import considering
from headgate.store.scheduling.considering import Considered, SignalDutyVerbs
from headgate.store.signals import conditions, reading, sending, waits
from headgate.store.signals.sending import NewSignal
from headgate.store.tables import signal, signal_key, signal_wait
from headgate.store.tasks import deferral, outcomes
from headgate.store.tasks.outcomes import OutcomeVerbs
from headgate.store.triggers import events as event_log
from headgate.supervisor.tasks.listeners import Listeners

# --- versions --------------------------------------------------------------------------------------


def _version_without_a_lock() -> Sequence[Patch]:
    """Two who send have read the same newest version: the later one finds the place taken, and says nothing."""
    before: dict[int, int] = {}
    original = sending._versions

    def versions(key: Any, had: Any, signals: Any) -> dict[int, SentSignal]:
        stale = before.get(key.id, 0) if key.last_version else 0
        before[key.id] = key.last_version
        return original(msgspec.structs.replace(key, last_version=min(stale, key.last_version)), had, signals)

    def insert_some(connection: Any, kind: Any, rows: Any, *, returning: tuple[str, ...]) -> list[Any]:
        insert_new(connection, kind, rows, returning=returning)
        return list(rows)

    return [(sending, "_versions", versions), (sending, "insert_new", insert_some)]


def _versions_of_a_sequence() -> Sequence[Patch]:
    """A version is taken that is not given back if the transaction is not committed."""
    taken: dict[int, int] = {}
    original: Any = sending._locked

    def locked(tx: Tx, address: Any, **options: Any) -> Any:
        key = original(tx, address, **options)
        last = max(key.last_version, taken.get(key.id, 0)) if key.last_version else 0
        taken[key.id] = last + 1
        key.last_version = last
        return key

    return [(sending, "_locked", locked)]


def _dedup_dropped() -> Sequence[Patch]:
    original, sent = sending.send, [0]

    def send(tx: Tx, signals: Sequence[NewSignal], **options: Any) -> Any:
        sent[0] += 1
        others = [msgspec.structs.replace(one, dedup=f"{one.dedup} {sent[0]}") for one in signals]
        return original(tx, others, **options)

    return [(sending, "send", send)]


def _needed_versions_are_trimmed() -> Sequence[Patch]:
    def trim(tx: Tx, key: Any, to: int) -> None:
        sending._TRIM.run(tx.connection, of_id=key.id, to=to)

    return [(sending, "_trim", trim)]


def _needed_versions_are_cleaned() -> Sequence[Patch]:
    return [(conditions, name, false) for name in ("is_waited_for", "may_be_waited_for")]


def _keys_are_forgotten_though_needed() -> Sequence[Patch]:
    return [(signal_verbs, "has_listener", lambda namespace, key: literal(value=False))]


# --- senders ---------------------------------------------------------------------------------------


def _sent_before_its_outcome() -> Sequence[Patch]:
    original = OutcomeVerbs.store_ends

    def store_ends(self: OutcomeVerbs, epoch: Epoch, ends: Sequence[Any], **more: Any) -> Any:
        if signals := [one for end in ends for one in end.signals]:
            with self.database.leased(epoch) as tx:
                sending.send(tx, signals)
            sending.note_committed()
        return original(self, epoch, [msgspec.structs.replace(end, signals=()) for end in ends], **more)

    return [(OutcomeVerbs, "store_ends", store_ends)]


def _late_outcomes_send() -> Sequence[Patch]:
    original = outcomes._lose_worker

    def lose_worker(tx: LeasedTx, end: Any, *args: Any) -> Any:
        if end.signals:
            sending.send(tx, end.signals)
        return original(tx, end, *args)

    return [(outcomes, "_lose_worker", lose_worker)]


def _outcomes_forget_their_signals() -> Sequence[Patch]:
    """An outcome that was refused together with others is stored again, without its signals."""
    original = OutcomeVerbs.store_ends

    def store_ends(self: OutcomeVerbs, epoch: Epoch, ends: Sequence[Any], **more: Any) -> Any:
        if len(ends) > 1:
            ends = [ends[0], *(msgspec.structs.replace(end, signals=()) for end in ends[1:])]
        return original(self, epoch, ends, **more)

    return [(OutcomeVerbs, "store_ends", store_ends)]


def _an_old_step_sends() -> Sequence[Patch]:
    def send_signals(self: OutcomeVerbs, epoch: Epoch, instance: Any, token: str, signals: Any) -> Any:
        with self.database.leased(epoch) as tx:
            sent = sending.send(tx, signals)
        sending.note_committed()
        return sent

    return [(OutcomeVerbs, "send_signals", send_signals)]


def _redelivered_events_are_sent() -> Sequence[Patch]:
    original = event_log.insert_events

    def insert_events(tx: Tx, events: Sequence[Any], feeds: Any = ()) -> event_log.Inserted:
        inserted = original(tx, events, feeds)
        again = {
            id_: event
            for event in events
            if event.trigger_id in feeds and event.key is not None
            if (id_ := event_log.with_key(tx, event.trigger_id, event.key)) is not None
        }
        return inserted._replace(fed={**again, **inserted.fed})

    return [(event_log, "insert_events", insert_events)]


# --- sensors ---------------------------------------------------------------------------------------


def _wait_is_not_fresh() -> Sequence[Patch]:
    original = waits.begin

    def begin(tx: Tx, run: Any, trigger_id: Any, wait: Any) -> None:
        original(tx, run, trigger_id, wait)
        seen = update(signal_wait).where(signal_wait.c.trigger_id == trigger_id).values(is_fresh=false())
        tx.connection.execute(seen)

    return [(waits, "begin", begin)]


def _unmarked_without_looking_again() -> Sequence[Patch]:
    original: Any = SignalDutyVerbs._consider

    def consider(self: SignalDutyVerbs, epoch: Epoch, limit: int) -> Considered:
        considered: Considered = original(self, epoch, limit)
        with self.database.leased(epoch) as tx:
            tx.connection.execute(update(signal_key).values(is_unseen=false()))
        return considered

    return [(SignalDutyVerbs, "_consider", consider)]


def _since_the_wait_begins() -> Sequence[Patch]:
    def note_none(*_arguments: Any) -> None:
        pass

    newest = Prepared(select(func.max(signal.c.version)).select_from(waits._OF_KEY).where(*waits._IS_NAMED))
    return [(waits, "note_starts", note_none), (waits, "_SENT_BEFORE", _Of(newest))]


class _Of:
    """A statement that takes no run."""

    def __init__(self, statement: Prepared) -> None:
        self._statement = statement

    def run(self, connection: Any, of_run: int, **named: Any) -> Any:
        return self._statement.run(connection, **named)


def _page_from(offset: int) -> Sequence[Patch]:
    original: Any = considering._Looks._page

    def page(self: Any, wait: Any) -> Any:
        return original(self, wait._replace(seen_version=wait.seen_version + offset))

    return [(considering._Looks, "_page", page)]


def _considered_from_one_before() -> Sequence[Patch]:
    return _page_from(-1)


def _considered_from_one_behind() -> Sequence[Patch]:
    return _page_from(1)


def _ended_in_another_transaction() -> Sequence[Patch]:
    def consider(self: SignalDutyVerbs, epoch: Epoch, limit: int) -> Considered:
        with self.database.leased(epoch) as tx:
            found = waits.to_look_at(tx, limit)
            if not found:
                return Considered(has_more=waits.unmark_keys(tx, limit))
            looks = considering._Looks(tx)
            events: list[FiredEvent] = []
            ended = []
            for wait in found:
                if wait.trigger_id is not None and (met := looks.look(wait, wait.trigger_id)) is not None:
                    ended.append(wait)
                    events.append(considering._event(wait.trigger_id, met))
            for wait in ended:
                waits.end(tx, wait)
        marks.reach("signals.considered")
        with self.database.leased(epoch) as tx:
            event_log.insert_events(tx, events)
            deferral.take_events(tx, events, {event.trigger_id for event in events})
        return Considered(len(ended), has_more=True)

    return [(SignalDutyVerbs, "_consider", consider)]


def _considered_by_every_run() -> Sequence[Patch]:
    original: Any = considering._Looks._page

    def page(self: Any, wait: Any) -> Any:
        return [version._replace(dag_run_id=None) for version in original(self, wait)]

    return [(considering._Looks, "_page", page)]


def _values_are_compared_as_text() -> Sequence[Patch]:
    return [(considering, "is_met", lambda predicate, value: predicate is None or value == predicate.operand)]


def _latest_is_the_newest_of_all() -> Sequence[Patch]:
    newest = Prepared(
        select(func.max(signal.c.version))
        .select_from(waits._OF_KEY)
        .where(*waits._IS_NAMED, signal.c.version <= bindparam("version"), true())
    )
    return [(waits, "_NEWEST_UP_TO", _Of(newest))]


def _a_page_is_all() -> Sequence[Patch]:
    original = waits.move

    def move(tx: Tx, wait: Any, version: int, **options: Any) -> None:
        original(tx, wait, wait.last_version if version < wait.last_version else version, **options)

    return [(waits, "move", move)]


# --- listeners -------------------------------------------------------------------------------------


def _answered_with_a_gap() -> Sequence[Patch]:
    original = reading.hear

    def hear(tx: Tx, key: str, namespace: str, **options: Any) -> reading.Heard:
        heard = original(tx, key, namespace, **options)
        newest = reading.newest_versions(tx, {(namespace, key)}).get((namespace, key), heard.seen)
        return msgspec.structs.replace(heard, seen=newest) if heard.signals else heard

    return [(reading, "hear", hear)]


def _heard_by_every_run() -> Sequence[Patch]:
    original: Any = reading._read
    return [(reading, "_read", lambda tx, statement, run: original(tx, statement, None))]


def _listeners_are_not_woken() -> Sequence[Patch]:
    def notify_none(self: Listeners) -> None:
        pass

    return [(Listeners, "notify", notify_none)]


MUTANTS = {
    "version-without-a-lock": Mutant("I25: one version for each signal", "version", _version_without_a_lock, 20),
    "versions-of-a-sequence": Mutant("I25: without a gap", "version missing", _versions_of_a_sequence, 60),
    "dedup-dropped-of-signals": Mutant("I25: one dedup, one version", "version twice", _dedup_dropped, 20),
    "needed-versions-are-trimmed": Mutant(
        "a version is kept until it was considered", "gone too early", _needed_versions_are_trimmed, directed="trimmed"
    ),
    "needed-versions-are-cleaned": Mutant(
        "a version is kept until it was considered", "gone too early", _needed_versions_are_cleaned, directed="cleaned"
    ),
    "keys-are-forgotten-though-needed": Mutant(
        "a key that a run waits for is kept", "gone too early", _keys_are_forgotten_though_needed, 40
    ),
    "sent-before-its-outcome": Mutant(
        "exactly once with the outcome", "sent without its outcome", _sent_before_its_outcome, 40
    ),
    "late-outcomes-send": Mutant(
        "nothing of an outcome that is not stored",
        "sent without its outcome",
        _late_outcomes_send,
        directed="late outcome",
    ),
    "outcomes-forget-their-signals": Mutant(
        "exactly once with the outcome", "version missing", _outcomes_forget_their_signals, 60
    ),
    "an-old-step-sends": Mutant(
        "a step whose task was cleared sends nothing", "sent by an old step", _an_old_step_sends, directed="old step"
    ),
    "redelivered-events-are-sent": Mutant(
        "an event is a signal exactly once", "an event sent twice", _redelivered_events_are_sent, directed="redelivered"
    ),
    "wait-is-not-fresh": Mutant(
        "I28: nothing between run and signal", "overlooked", _wait_is_not_fresh, directed="between"
    ),
    "unmarked-without-looking-again": Mutant(
        "I28: no version is overlooked", "overlooked", _unmarked_without_looking_again, directed="many waits"
    ),
    "since-the-wait-begins": Mutant(
        "I28: since the run was created", "overlooked", _since_the_wait_begins, directed="between"
    ),
    "considered-from-one-before": Mutant(
        "I28: what was sent before does not count",
        "considered before its time",
        _considered_from_one_before,
        40,
    ),
    "considered-from-one-behind": Mutant("I28: the first that fits", "not considered", _considered_from_one_behind, 40),
    "ended-in-another-transaction": Mutant(
        "I28: place and end are one transaction", "overlooked", _ended_in_another_transaction, directed="considered"
    ),
    "considered-by-every-run": Mutant(
        "a signal for one run ends no other", "considered before its time", _considered_by_every_run, 60
    ),
    "values-are-compared-as-text": Mutant(
        "values are compared in their JSON form", "overlooked", _values_are_compared_as_text, directed="equal"
    ),
    "latest-is-the-newest-of-all": Mutant(
        "latest is the newest that the run may consider",
        "overlooked",
        _latest_is_the_newest_of_all,
        directed="latest of its own",
    ),
    "a-page-is-all": Mutant("I28: held against each version", "overlooked", _a_page_is_all, directed="many waits"),
    "answered-with-a-gap": Mutant("a listener misses no version", "not heard", _answered_with_a_gap, 40),
    "heard-by-every-run": Mutant("a signal for one run is heard by no other", "not heard", _heard_by_every_run, 60),
    "listeners-are-not-woken": Mutant(
        "whoever sends wakes listeners", "not heard", _listeners_are_not_woken, directed="listeners"
    ),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())
