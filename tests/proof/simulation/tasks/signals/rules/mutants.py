"""Deliberate bugs in rules: each breaks one promise of I29, and the simulation has to find it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import false, func, null, select, update
from tests.proof.simulation.mutants import Mutant, Patch
from tests.proof.simulation.tasks.signals.rules.directed import DIRECTED

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.rules import Rules, rule_name
from headgate.scheduling import planning as decisions
from headgate.scheduling import signal_rules
from headgate.scheduling.states import TERMINAL
from headgate.store.db.transaction import Tx
from headgate.store.scheduling import considering, planning, rules
from headgate.store.signals import subscriptions, waits
from headgate.store.tables import signal_key, signal_wait
from headgate.store.tasks import task_rows, user_actions

_W = signal_wait.c

# --- what is taken ---------------------------------------------------------------------------------


def _what_has_met_is_not_taken() -> Sequence[Patch]:
    def start(tx: Tx, rows: Sequence[Any], put_off: Any) -> None:
        met = {"previous_version": _W.start_version, "start_version": _W.met_version, "start_value": _W.met_value}
        tx.connection.execute(update(signal_wait).where(_W.id.in_([row.id for row in rows])).values(**met))

    return [(subscriptions, "start", start)]


def _remembered_is_forgotten_by_a_clear() -> Sequence[Patch]:
    original: Any = user_actions._clear_tasks

    def clear_tasks(tx: Tx, seen: Any, todo: Any, *arguments: Any) -> Any:
        nothing = {"met_version": null(), "met_value": null(), "met_at": null(), "met_id": null()}
        of_tasks = [seen.ids[name] for name in todo.tasks]
        tx.connection.execute(update(signal_wait).where(_W.task_instance_id.in_(of_tasks)).values(**nothing))
        return original(tx, seen, todo, *arguments)

    return [(user_actions, "_clear_tasks", clear_tasks)]


def _a_stop_takes_back_nothing() -> Sequence[Patch]:
    def pass_over(tx: Tx, rows: Sequence[Any], moment: Any) -> None:
        pass

    return [(subscriptions, "pass_over", pass_over)]


def _a_start_takes_what_was_not_looked_at() -> Sequence[Patch]:
    original = subscriptions.start

    def start(tx: Tx, rows: Sequence[Any], put_off: Any) -> None:
        original(tx, rows, put_off)
        tx.connection.execute(update(signal_wait).where(_W.id.in_([row.id for row in rows])).values(is_fresh=false()))

    return [(subscriptions, "start", start)]


def _an_end_counts_when_it_is_noticed() -> Sequence[Patch]:
    return [(rules, "_ended_at", lambda tx, seen, task_id: tx.now)]


# --- what counts -----------------------------------------------------------------------------------


def _since_the_rules_are_made() -> Sequence[Patch]:
    def seen_before(tx: Tx, run: Any, namespace: str, key: str, since: Any, **_options: Any) -> int:
        of_key = (signal_key.c.namespace == namespace, signal_key.c.key == key)
        return int(tx.connection.execute(select(func.max(signal_key.c.last_version)).where(*of_key)).scalar() or 0)

    return [(waits, "seen_before", seen_before)]


def _rules_of_ended_runs_act() -> Sequence[Patch]:
    return [(subscriptions, "close", lambda tx, run: True), (subscriptions, "open_again", lambda tx, run: None)]


def _a_run_ends_over_what_was_not_considered() -> Sequence[Patch]:
    return [(subscriptions, "is_pending", lambda tx, run: False)]


def _the_newest_stands_for_each() -> Sequence[Patch]:
    original: Any = considering._Looks.look_for_rule

    def look_for_rule(self: Any, wait: Any) -> Any:
        return original(self, wait._replace(takes_each=False))

    return [(considering._Looks, "look_for_rule", look_for_rule)]


# --- what they come to -----------------------------------------------------------------------------


def _asked_with(change: Any) -> Sequence[Patch]:
    original = signal_rules.asked

    def asked(rules: Rules | None, met: Mapping[str, Any], by_hand: Any, *, is_ready: bool, decided: Any) -> Any:
        return change(partial(original, decided=decided), rules, met, by_hand, is_ready)

    return [(signal_rules, "asked", asked)]


def _necessary_rules_are_sufficient() -> Sequence[Patch]:
    def change(original: Any, rules: Any, met: Any, by_hand: Any, is_ready: bool) -> Any:
        found = list(original(rules, met, by_hand, is_ready=is_ready))
        alone = {rule_name(rule): rule for rule in rules.rules if rule.condition == "necessary"}
        return found or [signal_rules.Met(alone[name].action, at) for name, at in met.items() if name in alone]

    return _asked_with(change)


def _necessary_rules_whatever_is_upstream() -> Sequence[Patch]:
    return _asked_with(lambda original, rules, met, by_hand, is_ready: original(rules, met, by_hand, is_ready=True))


def _a_stop_goes_before_all_starts() -> Sequence[Patch]:
    def change(original: Any, *arguments: Any) -> Any:
        found = original(*arguments[:-1], is_ready=arguments[-1])
        last = max((one.at for one in found), default=None)
        as_last = [one._replace(at=last) if one.action == "STOP" else one for one in found]
        return sorted(as_last, key=lambda one: one.action == "STOP")

    return _asked_with(change)


def _acts_with(change: Any) -> Sequence[Patch]:
    original: Any = signal_rules.act

    def act(want: Any, state: TaskState, **options: Any) -> Any:
        return change(original, want, state, options)

    return [(signal_rules, "act", act)]


def _a_start_is_forgotten_while_it_runs() -> Sequence[Patch]:
    return _acts_with(lambda original, want, state, options: original(want, state, **{**options, "overlap": "ignore"}))


def _ignored_is_remembered() -> Sequence[Patch]:
    return _acts_with(lambda original, want, state, options: original(want, state, **{**options, "overlap": "latest"}))


def _a_stop_passes_over_a_deferred_task() -> Sequence[Patch]:
    def change(original: Any, want: Any, state: TaskState, options: Any) -> Any:
        is_passed = state is TaskState.DEFERRED and not want.starts
        return "drop" if is_passed else original(want, state, **options)

    return _acts_with(change)


def _a_restart_is_a_start() -> Sequence[Patch]:
    def change(original: Any, want: Any, state: TaskState, options: Any) -> Any:
        return original(want._replace(ends=False) if want.starts else want, state, **options)

    return _acts_with(change)


def _a_start_waits_for_the_retry() -> Sequence[Patch]:
    def change(original: Any, want: Any, state: TaskState, options: Any) -> Any:
        is_left = state is TaskState.UP_FOR_RETRY and want.starts
        return "wait" if is_left else original(want, state, **options)

    return _acts_with(change)


def _the_next_of_each_begins_a_try() -> Sequence[Patch]:
    def change(original: Any, want: Any, state: TaskState, options: Any) -> Any:
        is_before_a_try = state is TaskState.UP_FOR_RETRY and want.starts and options["may_start"]
        return "begin" if is_before_a_try else original(want, state, **options)

    return _acts_with(change)


def _started_while_paused() -> Sequence[Patch]:
    return _acts_with(lambda original, want, state, options: original(want, state, **{**options, "may_start": True}))


def _a_start_behind_it_keeps_a_stop_waiting() -> Sequence[Patch]:
    """Nothing is a stop unless it is the last request."""
    original = signal_rules.to_last_stop

    def to_last_stop(asked_for: Any) -> Any:
        found = original(asked_for)
        return found if len(found) == len(asked_for) else ()

    return [(signal_rules, "to_last_stop", to_last_stop)]


def _a_run_ends_over_a_start_in_its_pause() -> Sequence[Patch]:
    def change(original: Any, want: Any, state: TaskState, options: Any) -> Any:
        found = original(want, state, **options)
        return "drop" if found == "wait" and not options["may_start"] else found

    return _acts_with(change)


def _a_run_ends_with_its_last_ends() -> Sequence[Patch]:
    original: Any = planning._Evaluation._decide

    def decide(self: Any, run: Any, seen: Any, graph: Any, **options: Any) -> Any:
        decided, is_last_look = original(self, run, seen, graph, **options)
        if decided.upstream_failed or decided.upstream_skipped:
            return decisions.decide(graph, seen.for_rules()), True
        return decided, is_last_look

    return [(planning._Evaluation, "_decide", decide)]


MUTANTS = {
    "what-has-met-is-not-taken": Mutant(
        "I29: it acts once", "acted twice", _what_has_met_is_not_taken, directed="started once"
    ),
    "a-start-takes-what-was-not-looked-at": Mutant(
        "I29: held against each version",
        "start lost",
        _a_start_takes_what_was_not_looked_at,
        directed="not looked at",
    ),
    "remembered-is-forgotten-by-a-clear": Mutant(
        "I29: no start is lost", "a run ended too early", _remembered_is_forgotten_by_a_clear, directed="cleared"
    ),
    "a-stop-takes-back-nothing": Mutant(
        "a stop takes back the starts before it", "a start came back", _a_stop_takes_back_nothing, directed="taken back"
    ),
    "an-end-counts-when-it-is-noticed": Mutant(
        "their order is that in which they came",
        "a run ended too early",
        _an_end_counts_when_it_is_noticed,
        directed="end and dead",
    ),
    "since-the-rules-are-made": Mutant(
        "I29: from the creation of its run",
        "a run ended too early",
        _since_the_rules_are_made,
        directed="before the rules",
    ),
    "rules-of-ended-runs-act": Mutant(
        "I29: to the end of its run", "started without cause", _rules_of_ended_runs_act, directed="ended run"
    ),
    "a-run-ends-over-what-was-not-considered": Mutant(
        "I29: a run does not end over signals",
        "a run ended too early",
        _a_run_ends_over_what_was_not_considered,
        directed="over a signal",
    ),
    "the-newest-stands-for-each": Mutant(
        "each starts the task once", "start lost", _the_newest_stands_for_each, directed="each"
    ),
    "necessary-rules-are-sufficient": Mutant(
        "necessary rules act together", "started without cause", _necessary_rules_are_sufficient, directed="newer ones"
    ),
    "necessary-rules-whatever-is-upstream": Mutant(
        "necessary rules wait for what is upstream",
        "started without cause",
        _necessary_rules_whatever_is_upstream,
        directed="necessary",
    ),
    "a-stop-goes-before-all-starts": Mutant(
        "their order is that of their signals", "start lost", _a_stop_goes_before_all_starts, directed="stop and start"
    ),
    "a-start-is-forgotten-while-it-runs": Mutant(
        "a start is remembered", "start lost", _a_start_is_forgotten_while_it_runs, directed="remembered"
    ),
    "ignored-is-remembered": Mutant("ignored is forgotten", "it has begun", _ignored_is_remembered, directed="ignored"),
    "a-stop-passes-over-a-deferred-task": Mutant(
        "a stop ends what is deferred",
        "stopped and running",
        _a_stop_passes_over_a_deferred_task,
        directed="stopped deferred",
    ),
    "a-restart-is-a-start": Mutant(
        "a restart ends what runs", "stopped and running", _a_restart_is_a_start, directed="restarted"
    ),
    "a-start-waits-for-the-retry": Mutant(
        "a start makes the next try at once", "start lost", _a_start_waits_for_the_retry, directed="retry at once"
    ),
    "a-remembered-start-waits-for-the-retry": Mutant(
        "a start makes the next try at once",
        "start lost",
        lambda: [(task_rows, "_SEEN_BY_RUN", TERMINAL | {TaskState.NONE})],
        directed="retry remembered",
    ),
    "a-run-ends-with-its-last-ends": Mutant(
        "I29: a run does not end over a start",
        "a run ended too early",
        _a_run_ends_with_its_last_ends,
        directed="ended below",
    ),
    "the-next-of-each-begins-a-try": Mutant(
        "each waits for the end of the one before",
        "started without cause: a try",
        _the_next_of_each_begins_a_try,
        directed="each and a retry",
    ),
    "started-while-paused": Mutant(
        "nothing begins in a paused DAG", "began while paused", _started_while_paused, directed="paused"
    ),
    "a-start-behind-it-keeps-a-stop-waiting": Mutant(
        "a stop acts whatever start comes behind it",
        "stopped and running",
        _a_start_behind_it_keeps_a_stop_waiting,
        directed="stopped at the end",
    ),
    "forgotten-in-a-pause": Mutant(
        "I29: no start is lost", "a run ended too early", _a_run_ends_over_a_start_in_its_pause, directed="paused"
    ),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())
