"""Deliberate bugs in runs for signals: each breaks one promise of I32 or of `end_on`, and the simulation finds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import delete
from tests.proof.simulation.mutants import Mutant, Patch
from tests.proof.simulation.tasks.signals.runs.directed import DIRECTED

from headgate.scheduling import contracts
from headgate.store.db.transaction import Tx
from headgate.store.scheduling import considering, rules
from headgate.store.signals import dag_signals, subscriptions, waits
from headgate.store.tables import dag_signal
from headgate.store.tasks import dags
from headgate.store.triggers import assets

# --- what waits ------------------------------------------------------------------------------------


def _kept_before_the_place_moves() -> Sequence[Patch]:
    """The first time the supervisor dies, as it were, between the two."""
    original: Any = considering._Looks.look_for_dag
    known: set[int] = set()

    def look_for_dag(self: Any, wait: Any, dag_id: Any) -> Any:
        found = original(self, wait, dag_id)
        if found and wait.id not in known:
            known.add(wait.id)
            waits.move(self._tx, wait, wait.seen_version)
        return found

    return [(considering._Looks, "look_for_dag", look_for_dag)]


def _the_newest_is_kept() -> Sequence[Patch]:
    original = dag_signals.keep
    return [(dag_signals, "keep", lambda tx, dag_id, wait_id, rows: original(tx, dag_id, wait_id, rows[-1:]))]


def _a_page_is_all_for_a_dag() -> Sequence[Patch]:
    original: Any = considering._Looks._end_of_page

    def end_of_page(self: Any, wait: Any) -> int:
        return original(self, wait) if wait.dag_id is None else int(wait.last_version)

    return [(considering._Looks, "_end_of_page", end_of_page)]


def _signals_for_one_run_start_others() -> Sequence[Patch]:
    original: Any = considering._Looks._page

    def page(self: Any, wait: Any) -> Any:
        found = original(self, wait)
        return found if wait.dag_id is None else [version._replace(dag_run_id=None) for version in found]

    return [(considering._Looks, "_page", page)]


def _forgotten_when_parsed_again() -> Sequence[Patch]:
    original = dag_signals.subscribe

    def subscribe(tx: Tx, dag_id: Any, schedule: Any) -> None:
        original(tx, dag_id, schedule)
        tx.connection.execute(delete(dag_signal).where(dag_signal.c.dag_id == dag_id, dag_signals.IS_WAITING))

    return [(dag_signals, "subscribe", subscribe)]


# --- runs ------------------------------------------------------------------------------------------


def _made_without_its_signals() -> Sequence[Patch]:
    """The first time the supervisor dies, as it were, between the run and what it takes."""
    original = dag_signals.take
    known: list[Any] = []

    def take(tx: Tx, dag_id: Any, dag_run_id: Any, run: Any) -> None:
        known.append(dag_run_id)
        if len(known) > 1:
            original(tx, dag_id, dag_run_id, run)

    return [(dag_signals, "take", take)]


def _with_backlogs(**change: Any) -> Sequence[Patch]:
    original = dag_signals.backlogs
    return [(dag_signals, "backlogs", lambda tx: [msgspec.structs.replace(one, **change) for one in original(tx)])]


def _runs_while_paused() -> Sequence[Patch]:
    lock: Any = assets.lock_dag

    def lock_dag(tx: Tx, dag_id: Any) -> Any:
        locked = lock(tx, dag_id)
        return None if locked is None else locked._replace(is_held=False)

    return [*_with_backlogs(is_held=False), (assets, "lock_dag", lock_dag)]


def _more_runs_than_may_be() -> Sequence[Patch]:
    return [*_with_backlogs(room=9), (dags, "count_active_runs", lambda tx, dag_row: 0)]


def _batches_are_always_due() -> Sequence[Patch]:
    return [(contracts, "_is_due", lambda schedule, first_at, now: True)]


def _with_one_of_any() -> Sequence[Patch]:
    original: Any = contracts.is_ready

    def is_ready(schedule: Any, backlog: Any, now: Any) -> bool:
        return bool(backlog.events) if schedule.contract == "all" else original(schedule, backlog, now)

    def of_all(schedule: Any, waiting: Any) -> Any:
        return [contracts._run(schedule, tuple(waiting))] if waiting else []

    return [(contracts, "is_ready", is_ready), (contracts, "_all", of_all)]


def _the_oldest_is_the_latest() -> Sequence[Patch]:
    original: Any = contracts.runs_of

    def runs_of(schedule: Any, waiting: Any, now: Any, *, room: int) -> Any:
        in_order = waiting[::-1] if schedule.contract == "latest" else waiting
        return original(schedule, in_order, now, room=room)

    return [(contracts, "runs_of", runs_of)]


def _beside_an_open_run() -> Sequence[Patch]:
    return [(dags, "has_open_run", lambda tx, dag_row: False)]


def _sent_before_its_run() -> Sequence[Patch]:
    return [(waits, "begin_before", lambda tx, run, versions: None)]


def _with_places(change: Any) -> Sequence[Patch]:
    original: Any = waits.seen_before

    def seen_before(tx: Tx, run: Any, namespace: str, key: str, since: Any, **options: Any) -> int:
        return int(change(original, (tx, run, namespace, key), since, options))

    return [(waits, "seen_before", seen_before)]


def _the_run_before_is_forgotten() -> Sequence[Patch]:
    return _with_places(
        lambda original, of, since, options: original(*of, "run" if since == "last_run" else since, **options)
    )


def _of_the_run_before_everything() -> Sequence[Patch]:
    return _with_places(
        lambda original, of, since, options: 0 if since == "last_run" else original(*of, since, **options)
    )


# --- what ends runs --------------------------------------------------------------------------------


def _what_was_before_ends_a_run() -> Sequence[Patch]:
    return _with_places(
        lambda original, of, since, options: (
            0 if options and options["task_id"] is None else original(*of, since, **options)
        )
    )


def _an_end_is_taken_and_not_written() -> Sequence[Patch]:
    """The supervisor dies, as it were, between the two."""

    def ends_run(tx: Tx, run: Any, rows: Sequence[Any], *, is_ending: bool) -> bool:
        subscriptions.drop(tx, [row for row in rows if row.instance is None and row.met_version is not None])
        return False

    return [(rules, "ends_run", ends_run)]


def _an_end_acts_again() -> Sequence[Patch]:
    """What has ended a run stays in its row, and would end it again if it went on."""

    def ends_run(tx: Tx, run: Any, rows: Sequence[Any], *, is_ending: bool) -> bool:
        is_met = any(row.instance is None and row.met_version is not None for row in rows)
        return is_met and not is_ending and dags.begin_end(tx, run)

    return [(rules, "ends_run", ends_run)]


MUTANTS = {
    "kept-before-the-place-moves": Mutant(
        "I32: kept in the transaction that moves the place",
        "kept twice",
        _kept_before_the_place_moves,
        directed="a run for each",
    ),
    "the-newest-is-kept": Mutant(
        "I32: each is in a run", "a signal passed over", _the_newest_is_kept, directed="a run for each"
    ),
    "a-page-is-all-for-a-dag": Mutant(
        "I32: none is passed over", "a signal passed over", _a_page_is_all_for_a_dag, directed="page by page"
    ),
    "signals-for-one-run-start-others": Mutant(
        "a signal for one run starts none",
        "kept without cause",
        _signals_for_one_run_start_others,
        directed="a run for each",
    ),
    "forgotten-when-parsed-again": Mutant(
        "a file that is parsed again changes nothing",
        "a run lost",
        _forgotten_when_parsed_again,
        directed="waits and edited",
    ),
    "made-without-its-signals": Mutant(
        "I32: taken in the transaction that creates the run",
        "a run without cause",
        _made_without_its_signals,
        directed="a run for each",
    ),
    "runs-while-paused": Mutant(
        "signals wait while their DAG is paused", "a run while paused", _runs_while_paused, directed="waits in a pause"
    ),
    "more-runs-than-may-be": Mutant(
        "signals wait for room", "too many runs", _more_runs_than_may_be, directed="one at a time"
    ),
    "batches-are-always-due": Mutant(
        "a batch is whole, or due", "a run without cause", _batches_are_always_due, directed="runs of batches"
    ),
    "with-one-of-any": Mutant(
        "a run when each has had one", "a run without cause", _with_one_of_any, directed="one of each"
    ),
    "the-oldest-is-the-latest": Mutant(
        "the newest supersedes those before", "a run without cause", _the_oldest_is_the_latest, directed="latest run"
    ),
    "beside-an-open-run": Mutant(
        "a run unless one is open", "started beside an open run", _beside_an_open_run, directed="with a run"
    ),
    "sent-before-its-run": Mutant(
        "what a run is started with counts for it",
        "start lost",
        _sent_before_its_run,
        directed="with a run",
    ),
    "the-run-before-is-forgotten": Mutant(
        "since the run before", "start lost", _the_run_before_is_forgotten, directed="last run"
    ),
    "of-the-run-before-everything": Mutant(
        "where the run before stood", "started without cause", _of_the_run_before_everything, directed="last run"
    ),
    "what-was-before-ends-a-run": Mutant(
        "what was sent before a run does not end it",
        "ended without cause",
        _what_was_before_ends_a_run,
        directed="ended by a signal",
    ),
    "an-end-is-taken-and-not-written": Mutant(
        "taken in the transaction in which it ends the run",
        "an end lost",
        _an_end_is_taken_and_not_written,
        directed="started and ended",
    ),
    "an-end-acts-again": Mutant(
        "a signal ends a run once", "ended without cause", _an_end_acts_again, directed="ended once"
    ),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())
