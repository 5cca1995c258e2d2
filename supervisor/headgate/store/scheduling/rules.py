"""Rules of tasks about signals act: tasks start, restart and stop, while their run is evaluated (I29).

What has met a rule stands in its row (`headgate.store.signals.subscriptions`), and is taken from it in the transaction
in which it acts: so it acts once, and is not lost if the supervisor dies before. What is to be remembered stays there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import and_, func, literal_column, or_, select

from headgate.protocol import marks
from headgate.protocol.messages.dags import TaskSpec, TaskState
from headgate.protocol.messages.rules import Overlap, SignalRule, StoppedAs, TaskRule, rule_name, stopped_as_default
from headgate.scheduling import planning, signal_rules
from headgate.scheduling.planning import Graph
from headgate.scheduling.signal_rules import BY_HAND_PLACE, Decided, Met, Moment
from headgate.scheduling.states import TERMINAL
from headgate.store.db.transaction import Tx
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.signals import subscriptions
from headgate.store.signals.subscriptions import BY_HAND, Followed, RuleRow
from headgate.store.tables import task_instance
from headgate.store.tasks import dags, deferral, outcomes, task_rows, user_actions
from headgate.store.tasks.run_states import RunStates
from headgate.store.tasks.task_rows import LockedTask

_C = task_instance.c


class Acted(NamedTuple):
    """How many tasks have started, of these in their trigger; whether any has another state; and whether that is all.

    It is not if another transaction has locked a row: then the run is to be evaluated again. If it ``holds``, a task is
    to start as soon as its DAG is not paused any more. ``taken`` tasks may have a worker or a trigger.
    """

    started: int = 0
    in_triggers: int = 0
    taken: int = 0
    has_changed: bool = False
    has_freed: bool = False  # rules that may be held against more signals now
    holds: bool = False
    acts: int = 0  # tasks of which something was taken
    is_done: bool = True


def follow(tx: Tx, seen: RunStates, graph: Graph, rows: Sequence[RuleRow]) -> Followed:
    """Have a run the rules that its DAG has."""
    tasks = {seen.ids[name]: graph.tasks[name] for name in graph.ruled if name in seen.ids}
    return subscriptions.follow(tx, seen.run, rows, tasks, graph.spec.end_on)


def ends_run(tx: Tx, run: DagRunId, rows: Sequence[RuleRow], *, is_ending: bool) -> bool:
    """Have a run end if a rule says so that was met; return whether it is to be evaluated again.

    It is if it ends by that from now on, and if another signal is being held against the rule just now.
    """
    met = [row for row in rows if row.instance is None and row.met_version is not None]
    if not met:
        return False
    if len(subscriptions.unless_busy(tx, [row.id for row in met])) < len(met):
        return True
    subscriptions.drop(tx, met)
    marks.reach("signals.run_ending")
    return not is_ending and dags.begin_end(tx, run)


def note_ends(tx: Tx, seen: RunStates, graph: Graph, rows: Sequence[RuleRow]) -> bool:
    """Hold the ends of tasks against the rules about them, each once; return whether any was.

    The number of an end is that of its try and one, so that it has one before the first try, too. A task that was
    cleared may end again without a try: once it was seen not to have ended, the same number is another end.
    """
    if not graph.watched:
        return False
    now = seen.of_tasks()
    about = {
        (seen.ids[name], rule_name(rule)): rule
        for name, task in graph.ruled.items()
        for rule in (() if task.signals is None else task.signals.rules)
        if isinstance(rule, TaskRule) and name in seen.ids and rule.task_id in now
    }
    tries = _tries(tx, [seen.ids[rule.task_id] for rule in about.values()])
    has_noted = False
    for row in rows:
        rule = None if row.instance is None else about.get((row.instance, row.rule))
        if rule is None:
            continue
        state, number = now[rule.task_id], tries[seen.ids[rule.task_id]] + 1
        if state not in TERMINAL:
            if row.seen_version >= number:
                subscriptions.see_end(tx, row, number - 1)
        elif number > row.seen_version:
            fits = state is not TaskState.REMOVED and rule.state in (None, state.value)
            if fits:
                subscriptions.meet_by_end(tx, row, number, state, _ended_at(tx, seen, rule.task_id))
            else:
                subscriptions.see_end(tx, row, number)
            has_noted = True
    return has_noted


def act(tx: Tx, seen: RunStates, graph: Graph, rows: Sequence[RuleRow], *, may_start: bool, limit: int) -> Acted:
    """Have what has met rules act on up to ``limit`` tasks of a run."""
    names = {instance: name for name, instance in seen.ids.items()}
    met = sorted(
        {row.instance for row in rows if row.met_version is not None and row.instance is not None} & set(names)
    )
    now = seen.for_rules() if met else {}
    acted = Acted()
    for instance in met:
        if acted.acts == limit:
            return acted._replace(is_done=False)
        acted = _add(acted, _act_on(tx, now, graph, names[instance], instance, may_start=may_start))
    return acted


def _add(one: Acted, other: Acted) -> Acted:
    return Acted(
        one.started + other.started,
        one.in_triggers + other.in_triggers,
        one.taken + other.taken,
        one.has_changed or other.has_changed,
        one.has_freed or other.has_freed,
        one.holds or other.holds,
        one.acts + other.acts,
        one.is_done and other.is_done,
    )


_BUSY = Acted(is_done=False)


def _act_on(
    tx: Tx,
    now: Mapping[str, frozenset[TaskState]],
    graph: Graph,
    name: str,
    instance: TaskInstanceId,
    *,
    may_start: bool,
) -> Acted:
    spec = graph.tasks.get(name)
    may_start = may_start and spec is not None
    if (rows := subscriptions.lock(tx, instance)) is None:
        return _BUSY
    places = (
        {}
        if spec is None or spec.signals is None
        else {rule_name(one): at for at, one in enumerate(spec.signals.rules)}
    )
    moments: dict[str, Moment] = {
        row.rule: (row.met_at, row.met_id or 0, places.get(row.rule, BY_HAND_PLACE))
        for row in rows
        if row.met_at and row.met_version is not None
    }
    requests = signal_rules.asked(
        None if spec is None else spec.signals,
        moments,
        [Met(BY_HAND[rule], at, frozenset({rule})) for rule, at in moments.items() if rule in BY_HAND],
        is_ready=spec is not None and planning.is_ready(graph, spec, now),
        decided={row.rule: _decided(row, places) for row in rows if row.decided is not None},
    )
    to_stop = signal_rules.to_last_stop(requests)
    asked = requests if may_start or not to_stop else to_stop
    want = signal_rules.wanted(asked)
    if want is None:
        return Acted()
    if (task := task_rows.locked_unless_busy(tx, instance)) is None:
        return _BUSY
    overlap: Overlap = "latest" if spec is None or spec.signals is None else spec.signals.overlap
    act = signal_rules.act(
        want,
        task.state,
        is_resumed=_is_resumed(tx, task),
        may_start=may_start,
        overlap=overlap,
    )
    if act == "wait":
        return Acted(holds=want.starts and spec is not None)
    if to_stop:
        _take_back(tx, rows, moments, to_stop[-1].at, requests[len(to_stop) :])
    if want.starts and act == "drop":
        # A start that is ignored. What is necessary, and not all there yet, has asked for none: it is not forgotten.
        subscriptions.drop(tx, [row for row in rows if any(row.rule in one.rules for one in asked)])
    match act:
        case "drop":
            acted = Acted()
        case "join":
            subscriptions.join(tx, task.id)
            acted = Acted()
        case "stop":
            acted = _stop(tx, task, _stopped_as(spec), _reason(spec, rows, asked[-1]))
        case _:
            acted = _begin(tx, graph, name, task, rows, signal_rules.put_off(asked, overlap))
    marks.reach("signals.action_written")
    # The trigger of a stream runs also while its task is scheduled.
    is_taken = acted.has_changed and task.state in signal_rules.ALIVE
    holds = spec is not None and len(asked) < len(requests)
    return acted._replace(taken=int(is_taken), has_freed=any(row.is_held for row in rows), holds=holds, acts=1)


def _decided(row: RuleRow, places: Mapping[str, int]) -> Decided:
    assert row.decided is not None
    if row.stop_at is None:
        return Decided(row.decided)
    return Decided(row.decided, (row.stop_at, row.stop_id or 0, places.get(row.rule, BY_HAND_PLACE)))


def _take_back(
    tx: Tx, rows: Sequence[RuleRow], moments: Mapping[str, Moment], stopped_at: Moment, later: Sequence[Met]
) -> None:
    """Drop what a stop takes back, which is all that was sent before it, also if that was not held against its rule.

    What was sent after it stays: a necessary signal still counts for the next start.
    """
    kept = frozenset[str]().union(*(one.rules for one in later))
    before = {rule for rule, at in moments.items() if at <= stopped_at} - kept
    subscriptions.drop(tx, [row for row in rows if row.rule in before])
    subscriptions.pass_over(tx, rows, stopped_at[:2])


def _stop(tx: Tx, task: LockedTask, stopped_as: StoppedAs, reason: str) -> Acted:
    # Also of one that counts as skipped, or as succeeded: nothing else says why it has ended.
    user_actions.mark_one(tx, task, stopped_as, reason)
    tx.notify()  # whoever has its worker, or its trigger, ends it
    return Acted(has_changed=True)


def _reason(spec: TaskSpec | None, rows: Sequence[RuleRow], stop: Met) -> str:
    """Return what has stopped a task, as its last error has it; see `headgate.scheduling.why_tasks`."""
    (name,) = stop.rules  # necessary rules, which ask together, ask for no stop
    if name in BY_HAND:
        return "a user stopped it"
    rules = () if spec is None or spec.signals is None else spec.signals.rules
    rule = next((one for one in rules if rule_name(one) == name), None)
    if not isinstance(rule, SignalRule):
        return "a rule stopped it" + ("" if rule is None else f": {signal_rules.rule_text(rule)}")
    (row,) = (row for row in rows if row.rule == name)
    # Of a stop behind which users' code has decided a start only the moment is known.
    is_before = row.stop_at is not None and (row.stop_at, row.stop_id or 0) == stop.at[:2]
    version = "" if is_before else f", version {row.met_version}"
    return f"a signal stopped it: {signal_rules.key_text(rule)}{version}"


def _begin(
    tx: Tx, graph: Graph, name: str, task: LockedTask, rows: Sequence[RuleRow], put_off: frozenset[str]
) -> Acted:
    if task.state is TaskState.UP_FOR_RETRY:
        outcomes.begin_next_try(tx, task.id)
    else:
        if task.state is TaskState.FAILED:
            subscriptions.note_failed_start(tx, rows, task.id)
        if task.state is not TaskState.NONE and user_actions.clear_one(tx, task, None) is not TaskState.NONE:
            tx.notify()  # whoever has its worker ends it; it begins when that is gone
            return Acted(has_changed=True)
        cleared = task_rows.locked(tx, task.id)
        assert cleared is not None, "its row is locked"
        task_rows.apply(tx, cleared, "scheduled")
    subscriptions.start(tx, rows, put_off)
    start = graph.start_triggers.get(name)
    state = None if start is None else deferral.start_in_trigger(tx, task.id, start)
    tx.notify()
    is_started = state is not TaskState.DEFERRED
    return Acted(started=int(is_started), in_triggers=int(state is not None), has_changed=True)


def _stopped_as(spec: TaskSpec | None) -> StoppedAs:
    if spec is None:
        return "skipped"
    if spec.signals is None:
        return stopped_as_default(is_endless=spec.endless)
    return spec.signals.stopped_as


def _is_resumed(tx: Tx, task: LockedTask) -> bool:
    if task.state is not TaskState.SCHEDULED:
        return False
    return tx.connection.execute(select(_C.next_method).where(_C.id == task.id)).scalar_one() is not None


def _ended_at(tx: Tx, seen: RunStates, task_id: str) -> datetime:
    """Return when a task has ended; a mapped one ends with the last of its instances.

    Its end may be noticed much later, if its supervisor has died, and counts among the signals as of this moment.
    """
    of_task = _C.id == seen.ids[task_id]
    if task_id in seen.mapped:
        instances = and_(_C.dag_run_id == seen.run, _C.task_id == task_id, _C.map_index >= literal_column("0"))
        of_task = or_(of_task, instances)
    ended_at = tx.connection.execute(select(func.max(_C.ended_at)).where(of_task)).scalar_one()
    return tx.now if ended_at is None else ended_at


def _tries(tx: Tx, instances: Collection[TaskInstanceId]) -> dict[TaskInstanceId, int]:
    rows = tx.connection.execute(select(_C.id, _C.try_number).where(_C.id.in_(set(instances))))
    return {row.id: row.try_number for row in rows}
