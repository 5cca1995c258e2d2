"""Deliberate bugs in decisions, endless tasks and starts by the time: each breaks one promise of I29 or I30."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Integer, bindparam, func, null, select, update
from tests.proof.simulation.mutants import Mutant, Patch
from tests.proof.simulation.tasks.signals.jobs.directed import DIRECTED

from headgate.scheduling import signal_rules
from headgate.store.db.prepared import Prepared
from headgate.store.db.transaction import Tx
from headgate.store.scheduling import deciding
from headgate.store.scheduling.deciding import DecidingVerbs
from headgate.store.scheduling.planning import PlanningVerbs
from headgate.store.signals import subscriptions, ticks
from headgate.store.tables import dag, dag_run, signal_wait, task_instance, triggerer
from headgate.store.tasks import outcomes, task_rows
from headgate.store.tasks.outcomes import OutcomeVerbs
from headgate.supervisor.executors.base import StepLost
from headgate.supervisor.tasks.core import TaskCore

_W = signal_wait.c

# --- decisions -------------------------------------------------------------------------------------


def _a_decision_is_stored_without_its_place() -> Sequence[Patch]:
    original: Any = deciding._settle

    def settle(tx: Tx, row: Any, *arguments: Any) -> Any:
        settled = original(tx, row, *arguments)
        tx.connection.execute(update(signal_wait).where(_W.id == row.id).values(seen_version=row.seen_version))
        return settled

    return [(deciding, "_settle", settle)]


def _an_answer_always_counts() -> Sequence[Patch]:
    settle: Any = DecidingVerbs.settle_decisions
    locked: Any = deciding._locked
    current: list[Any] = []

    def settle_decisions(self: Any, epoch: Any, question: Any, *arguments: Any, **options: Any) -> Any:
        current[:] = [epoch, question.places]
        return settle(self, epoch, question, *arguments, **options)

    def as_it_was(tx: Tx, which: Any) -> Any:
        epoch, places = current
        return [row._replace(asked_by=epoch, seen_version=places[row.id]) for row in locked(tx, which)]

    return [(DecidingVerbs, "settle_decisions", settle_decisions), (deciding, "_locked", as_it_was)]


def _the_rule_says_what_was_decided() -> Sequence[Patch]:
    original: Any = signal_rules.asked

    def asked(*arguments: Any, decided: Any, **options: Any) -> Any:
        return original(*arguments, **options)

    return [(signal_rules, "asked", asked)]


def _a_start_takes_the_place_of_a_stop() -> Sequence[Patch]:
    original = signal_rules.together

    def together(decisions: Any) -> Any:
        found = original(decisions)
        return None if found is None else found._replace(stopped_at=None)

    return [(signal_rules, "together", together)]


def _a_start_behind_a_stop_is_a_restart() -> Sequence[Patch]:
    original = signal_rules.together

    def together(decisions: Any) -> Any:
        found = original(decisions)
        if found is None or found.stopped_at is None:
            return found
        return found._replace(action="RESTART", stopped_at=None)

    return [(signal_rules, "together", together)]


def _asked_in_any_order() -> Sequence[Patch]:
    original: Any = deciding._some

    def some(signals: Any, limit: int) -> Any:
        return original(signals, limit)[::-1]

    return [(deciding, "_some", some)]


def _each_is_decided_with_others() -> Sequence[Patch]:
    return [(deciding, "_takes_each", lambda rows: False)]


def _any_supervisor_asks() -> Sequence[Patch]:
    every = select(_W.task_instance_id, func.max(_W.ask_at).label("at")).where(_W.ask_at.is_not(None))
    free = every.group_by(_W.task_instance_id).subquery()
    due = Prepared(
        select(free.c.task_instance_id)
        .where(free.c.at <= bindparam("now"), bindparam("epoch") == bindparam("epoch"))
        .limit(bindparam("limit", type_=Integer()))
    )
    rows = select(*(_W[name] for name in deciding._ROW_FIELDS), null().label("owner")).order_by(_W.id)
    return [(deciding, "_DUE", due), (deciding, "_ROWS", rows)]


def _given_up_at_once() -> Sequence[Patch]:
    return [(deciding, "TRIES_MAX", 1)]


def _tries_of_another_signal_count() -> Sequence[Patch]:
    return [(deciding, "_is_error_about", lambda row, version: True)]


def _a_run_ends_over_what_is_decided() -> Sequence[Patch]:
    return [(subscriptions, "is_asked", lambda tx, run: False)]


def _what_was_passed_over_is_forgotten() -> Sequence[Patch]:
    original: Any = deciding._ask_no_more

    def ask_no_more(tx: Tx, row: Any) -> None:
        original(tx, row)
        tx.unmark_run_dirty(row.dag_run_id)

    return [(deciding, "_ask_no_more", ask_no_more)]


# --- endless tasks ---------------------------------------------------------------------------------


def _a_lost_worker_costs_a_try() -> Sequence[Patch]:
    original: Any = outcomes._lose

    def lose(tx: Tx, task: Any, *arguments: Any) -> Any:
        return original(tx, msgspec.structs.replace(task, is_endless=False), *arguments)

    return [(outcomes, "_lose", lose)]


def _moved_before_its_worker_is_gone() -> Sequence[Patch]:
    original: Any = TaskCore.drain

    def drain(self: Any, now: float) -> bool:
        of_endless = [token for token, run in self._running.items() if run.task.is_endless and run.ending is None]
        is_drained = bool(original(self, now))
        for token in of_endless:
            self._receive(StepLost(token, "its supervisor was asked to stop"))
        return is_drained and not self._reports

    return [(TaskCore, "drain", drain)]


def _a_stopped_one_has_no_worker() -> Sequence[Patch]:
    """Of what a user or a signal ends nothing is kept of its worker."""

    def let_go_at_once(tx: Tx, row: Any, *arguments: Any, **options: Any) -> Any:
        done = apply(tx, row, *arguments, **options)
        tx.connection.execute(update(task_instance).values(old_token=null(), old_owner_id=null()))
        return done

    apply: Any = task_rows.apply
    return [(task_rows, "apply", let_go_at_once)]


def _the_end_of_an_old_worker_is_not_noted() -> Sequence[Patch]:
    return [(task_rows, "let_go", lambda tx, instance, token: None)]


def _taken_from_the_living() -> Sequence[Patch]:
    every = (
        select(task_instance.c.id, task_instance.c.triggerer_id, dag.c.name, dag_run.c.run_id, task_instance.c.task_id)
        .add_columns(task_instance.c.map_index, *task_rows.LOCKED)
        .select_from(
            task_instance.join(dag_run).join(dag).join(triggerer, triggerer.c.id == task_instance.c.triggerer_id)
        )
        .limit(bindparam("limit", type_=Integer()))
    )
    return [(outcomes, "_ORPHANS", Prepared(every))]


def _own_exceptions_are_moves() -> Sequence[Patch]:
    original: Any = outcomes._fail

    def fail(tx: Any, end: Any, failure: Any, healthy_s: float) -> Any:
        task = task_rows.locked(tx, end.id, token=end.token)
        if task is None or not task.is_endless:
            return original(tx, end, failure, healthy_s)
        return outcomes._lose(tx, task, "worker_lost", outcomes.WorkerLost(failure.error), healthy_s)

    return [(outcomes, "_fail", fail)]


def _tries_come_back_at_once() -> Sequence[Patch]:
    return [(outcomes, "is_healthy", lambda tx, started_at, healthy_s: True)]


def _nothing_is_taken() -> Sequence[Patch]:
    original: Any = PlanningVerbs.plan

    def plan(self: Any, epoch: Any, **options: Any) -> Any:
        return msgspec.structs.replace(original(self, epoch, **options), taken=0)

    return [(PlanningVerbs, "plan", plan)]


# --- the time --------------------------------------------------------------------------------------


def _ticks_go_on(next_at: Any) -> Sequence[Patch]:
    """Have the next time be another one: ``next_at`` of the moment, the last time, and the seconds between two."""
    original: Any = ticks.tick

    def tick(tx: Any, limit: int) -> int:
        due = select(_W.id, _W.due_at, _W.every_s).where(_W.due_at <= tx.now, _W.every_s.is_not(None))
        rows = tx.connection.execute(due).all()
        count = int(original(tx, limit))
        for id_, due_at, every_s in rows:
            values = {"due_at": next_at(tx.now, due_at, timedelta(seconds=every_s))}
            tx.connection.execute(update(signal_wait).where(_W.id == id_).values(values))
        return count

    return [(ticks, "tick", tick)]


def _cron_goes_on_from_before() -> Sequence[Patch]:
    original: Any = ticks._after

    last: list[Any] = []

    def after(cron: str, timezone: str, moment: Any) -> Any:
        last[:] = [original(cron, timezone, min([moment, *last]))]
        return last[0]

    return [(ticks, "_after", after)]


def _ended_runs_go_on_in_time() -> Sequence[Patch]:
    original: Any = subscriptions.close

    def close(tx: Any, run: Any) -> bool:
        is_closed = bool(original(tx, run))
        of_clock = (_W.dag_run_id == run, _W.every_s.is_not(None))
        tx.connection.execute(update(signal_wait).where(*of_clock).values(due_at=tx.now + timedelta(seconds=1)))
        return is_closed

    return [(subscriptions, "close", close)]


MUTANTS = {
    "a-decision-is-stored-without-its-place": Mutant(
        "I29: decision and place are one transaction",
        "acted twice",
        _a_decision_is_stored_without_its_place,
        directed="given up",
    ),
    "an-answer-counts-twice": Mutant(
        "I29: an answer counts once", "acted twice", _an_answer_always_counts, directed="decision in doubt"
    ),
    "an-answer-counts-over-a-stop": Mutant(
        "an answer counts only where its rules stand as they stood",
        "a start came back",
        _an_answer_always_counts,
        directed="stopped while deciding",
    ),
    "the-rule-says-what-was-decided": Mutant(
        "what was decided is done", "started without cause", _the_rule_says_what_was_decided, directed="decided"
    ),
    "a-start-takes-the-place-of-a-stop": Mutant(
        "I29: a stop that was decided before a start acts as well",
        "stopped and running",
        _a_start_takes_the_place_of_a_stop,
        directed="stopped before a start",
    ),
    "a-start-behind-a-stop-is-a-restart": Mutant(
        "I29: a stop acts although nothing may start",
        "stopped and running",
        _a_start_behind_a_stop_is_a_restart,
        directed="stopped before a start",
    ),
    "asked-in-any-order": Mutant(
        "signals are decided in their order", "decided out of order", _asked_in_any_order, directed="decided in order"
    ),
    "each-is-decided-with-others": Mutant(
        "with each a decision is one start", "start lost", _each_is_decided_with_others, directed="decided each"
    ),
    "any-supervisor-asks": Mutant("one supervisor asks", "asked twice", _any_supervisor_asks, directed="one asks"),
    "given-up-at-once": Mutant(
        "a signal is given up after three tries", "not decided", _given_up_at_once, directed="decided again"
    ),
    "tries-of-another-signal-count": Mutant(
        "each signal has three tries", "given up too early", _tries_of_another_signal_count, directed="tries of one"
    ),
    "a-run-ends-over-what-is-decided": Mutant(
        "I29: a run does not end over signals",
        "a run ended too early",
        _a_run_ends_over_what_is_decided,
        directed="over a decision",
    ),
    "what-was-passed-over-is-forgotten": Mutant(
        "a run that waits for an answer ends with it",
        "stuck",
        _what_was_passed_over_is_forgotten,
        directed="over what was passed over",
    ),
    "a-lost-worker-costs-a-try": Mutant(
        "I30: a lost worker costs no try", "a move cost a try", _a_lost_worker_costs_a_try, 60
    ),
    "moved-before-its-worker-is-gone": Mutant(
        "I30: after the worker before is gone",
        "on two workers",
        _moved_before_its_worker_is_gone,
        directed="drained",
    ),
    "begun-before-what-was-stopped-is-gone": Mutant(
        "I30: after the worker before is gone",
        "on two workers",
        _a_stopped_one_has_no_worker,
        directed="stopped and started",
    ),
    "the-end-of-an-old-worker-is-not-noted": Mutant(
        "what was stopped begins again when its worker is gone",
        "they have begun",
        _the_end_of_an_old_worker_is_not_noted,
        directed="stopped and started",
    ),
    "workers-of-what-it-stops-itself-are-forgotten": Mutant(
        "a worker is ended with its task", "ended too late", _nothing_is_taken, directed="ended together"
    ),
    "who-was-ended-before-it-began-has-a-worker": Mutant(
        "a lost answer of a dispatch loses no task",
        "stuck",
        lambda: [(OutcomeVerbs, "left", lambda self, epoch: [])],
        directed="ended in doubt",
    ),
    "taken-from-the-living": Mutant(
        "I30: after the lease before is over", "taken from the living", _taken_from_the_living, directed="taken over"
    ),
    "own-exceptions-are-moves": Mutant(
        "I30: its own exceptions cost tries", "no such transition", _own_exceptions_are_moves, directed="own exceptions"
    ),
    "tries-come-back-at-once": Mutant(
        "I30: only who has run well has all tries again",
        "too many tries",
        _tries_come_back_at_once,
        directed="own exceptions",
    ),
    "missed-starts-are-made-up": Mutant(
        "starts that were missed are one",
        "a missed start was made up",
        partial(_ticks_go_on, lambda now, last, every: last + every),
        directed="missed",
    ),
    "a-late-start-moves-all-others": Mutant(
        "the next start keeps its time",
        "out of step",
        partial(_ticks_go_on, lambda now, last, every: now + every),
        directed="missed",
    ),
    "missed-times-of-cron-are-made-up": Mutant(
        "starts that were missed are one", "a missed start was made up", _cron_goes_on_from_before, directed="cron"
    ),
    "the-time-goes-on-in-ended-runs": Mutant(
        "I29: to the end of its run", "started without cause", _ended_runs_go_on_in_time, directed="missed"
    ),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())
