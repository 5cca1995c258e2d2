"""`headgate status`: from the facts in the database, all that is wrong, the worst first.

As in `headgate.scheduling.why`, nothing here queries anything. A problem is *broken* if events or tasks stand still
because of it, *attention* if a person should look, and a *notice* if a user has wanted it so. Without any of the first
two everything is well. Problems of one severity come in the order of the questions: supervisors, streams, triggers,
tasks, then what has failed before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import msgspec

from headgate.scheduling.drift import LEVELS, LOSS
from headgate.scheduling.status_facts import (
    COUNTED_MAX,
    BrokerAway,
    Drifted,
    FullBacklog,
    GoneDag,
    Letters,
    MissingPool,
    Overdue,
    Problem,
    ReturnedWatcher,
    Severity,
    StatusFacts,
    TroubledConsumer,
    TroubledTask,
    TroubledTrigger,
)
from headgate.scheduling.why import HEADGATE_UP, Supervisor, alive
from headgate.scheduling.words import command, counted, some, span, times

FAILURES_BROKEN_MIN = 3  # of a subscriber: from then on a stream that waits for it stands still, and not only hesitates
STREAMS_TOLD_MAX = 4  # each with a sentence of its own; the others are counted
LIST_SUPERVISORS = "headgate triggerers list"
DIFFER_S = 120.0  # for so long DAG files of two machines may differ, as in a deployment

SEVERITIES: tuple[Severity, ...] = ("broken", "attention", "notice")


# --- all of them ---------------------------------------------------------------------------------


def problems(facts: StatusFacts) -> list[Problem]:
    """Return all that is wrong, the worst first; nothing if everything is well."""
    found = [
        *_supervisors(facts),
        *_impeded(facts),
        *_runners(facts),
        *_dag_folders(facts),
        *_draining(facts),
        *_queues(facts),
        *_unclaimed(facts),
        *_streams(facts.troubled),
        *_away(facts.away),
        *_triggers(facts.troubled),
        *_returned(facts.returned),
        *_pools(facts.missing_pools),
        *_tasks(facts.overdue),
        *_drift(facts.drifted),
        *_letters(facts.letters),
        *_consumers(facts.consumers),
        *_undecided(facts.undecided),
        *_failed_starts(facts.failed_starts),
        *_files(facts.import_errors),
        *_gone_dags(facts.gone_dags),
        *_full_backlogs(facts.full_backlogs),
        *_runs(facts.failed_runs),
        *_keys(facts.old_keys),
    ]
    return sorted(found, key=lambda problem: SEVERITIES.index(problem.severity))


def exit_code(found: Iterable[Problem]) -> int:
    """Return 2 if anything is broken, 1 if a person should look at something, otherwise 0."""
    severities = {problem.severity for problem in found}
    return 2 if "broken" in severities else 1 if "attention" in severities else 0


def counted_rows(things: Sequence[object], thing: str) -> str:
    """Return the number of things as text; a list that is full may not have all of them."""
    return counted(len(things), thing) + (" or more" if len(things) >= COUNTED_MAX else "")


def _first_told(
    severity: Severity, reason: str, told: Sequence[str], next_: str, *, others: str, prefix: str = "", ending: str = ""
) -> list[Problem]:
    """Return a problem that tells of the first, and of how many ``others`` there are; none if there is nothing to tell.

    ``ending`` stands behind the first, ``prefix`` before the number of the others.
    """
    if not told:
        return []
    more = f"; and so {prefix}{counted_rows(told[1:], others)}" if len(told) > 1 else ""
    return [Problem(severity, reason, f"{told[0]}{ending}{more}", next_, tuple(told))]


# --- supervisors and queues ----------------------------------------------------------------------


def _supervisors(facts: StatusFacts) -> list[Problem]:
    living = alive(facts.supervisors)
    found = []
    if not living:
        stands = [*(["triggers"] if facts.trigger_queues else []), *(["runs"] if facts.has_active_runs else [])]
        text = "no supervisor is alive" + (f": {' and '.join(stands)} stand still" if stands else "")
        found.append(Problem("broken" if stands else "attention", "no_supervisor", text, HEADGATE_UP))
    silent = [one for one in facts.supervisors if one.state != "alive"]
    told = [
        f"the process of {one} is gone" if one.state == "gone" else f"{one} is silent for {span(one.heartbeat_age_s)}"
        for one in silent
    ]
    if told:
        what = "another takes its triggers over" if living else "its triggers wait for another"
        text = f"{told[0]}; {what}"
        if len(told) > 1:
            text = f"{counted_rows(told, 'supervisor')} left without a word, the newest: {told[0]}"
        found.append(Problem("attention", "supervisor_silent", text, LIST_SUPERVISORS, tuple(told)))
    return found


def _dag_folders(facts: StatusFacts) -> list[Problem]:
    """Return that supervisors of one queue have had different files in the same folder for a while.

    What a task does depends on which of them runs it, and a task that is not in the file of one fails there.
    """
    told: list[str] = []
    digests: dict[int, str] = {}
    living = [(one, one.dag_folder) for one in alive(facts.supervisors) if one.dag_folder_age_s >= DIFFER_S]
    tell = [(one, folder) for one, folder in living if folder is not None]
    for pair in combinations(tell, 2):
        (one, folder), (other, others) = pair
        is_shared = not set(one.queues).isdisjoint(other.queues) and folder.where == others.where
        if is_shared and folder.files != others.files:
            told.append(f"{one} and {other} have different DAG files")
            for each, its in pair:
                digests[each.epoch] = f"{each} has {its.files_shown}, for {span(each.dag_folder_age_s)}"
    found = _first_told("attention", "dag_files_differ", told, f"{LIST_SUPERVISORS} --wide", others="other pair")
    return [msgspec.structs.replace(one, details=(*one.details, *digests.values())) for one in found]


def _impeded(facts: StatusFacts) -> list[Problem]:
    """Return what supervisors that are alive say of themselves: that they cannot do a duty, or something of it."""
    living = {one.epoch: one for one in alive(facts.supervisors)}
    found: list[Problem] = []
    of_each: tuple[tuple[Severity, str, str, Sequence[tuple[int, str]]], ...] = (
        ("broken", "supervisor_impeded", "cannot use the database for", facts.impeded),
        ("broken", "scheduling_fails", "does not schedule", facts.passing_over),
        ("attention", "logs_unwritten", "cannot write logs of tasks:", facts.unlogged),
    )
    for severity, reason, verb, said in of_each:
        told = [f"{living[epoch]} {verb} {what}" for epoch, what in said if epoch in living]
        found += _first_told(severity, reason, told, LIST_SUPERVISORS, others="other supervisor")
    return found


def _runners(facts: StatusFacts) -> list[Problem]:
    """Return that runners end again and again, with all triggers of their supervisors."""
    ends = [(one, one.dying) for one in alive(facts.supervisors)]
    told = [f"the runner of {one} has {dying}" for one, dying in ends if dying is not None]
    return _first_told(
        "attention", "runner_ends", told, LIST_SUPERVISORS, others="other supervisor", prefix="those of "
    )


def _draining(facts: StatusFacts) -> list[Problem]:
    """Return who was asked to stop; a person should look if nobody else takes what they leave."""
    living = alive(facts.supervisors)
    told = [str(one) for one in living if one.is_draining]
    if not told:
        return []
    is_last = len(told) == len(living) and bool(facts.trigger_queues or facts.has_active_runs)
    text = f"{some(told)} {'drain and claim' if len(told) > 1 else 'drains and claims'} nothing"
    text += ", and there is no other" if is_last else ""
    next_ = HEADGATE_UP if is_last else LIST_SUPERVISORS
    return [Problem("attention" if is_last else "notice", "draining", text, next_, tuple(told))]


def _queues(facts: StatusFacts) -> list[Problem]:
    living = alive(facts.supervisors)
    if all(one.is_draining for one in living):
        return []  # `_supervisors` or `_draining` says so
    found = []
    for queue in sorted(facts.trigger_queues):
        for severity, who in _lack(queue, living, "serves", "serve"):
            text = f"{who} the queue {queue!r}, in which triggers wait"
            found.append(Problem(severity, "queue_unserved", text, command("triggers", "list", "--queue", queue)))
    with_workers = [one for one in living if one.workers]
    for queue in sorted(facts.task_queues):
        for severity, who in _lack(queue, with_workers, "runs", "run"):
            text = f"{who} tasks of the queue {queue!r}, in which some wait"
            found.append(Problem(severity, "tasks_unserved", text, "headgate tasks list --state scheduled"))
    if facts.has_active_runs and not with_workers:
        text = "runs are active, and the supervisors that are alive run triggers alone"
        found.append(Problem("broken", "no_workers", text, HEADGATE_UP))
    return found


def _lack(queue: str, living: Sequence[Supervisor], serves: str, serve: str) -> list[tuple[Severity, str]]:
    """Return who alone serves a queue, and how bad that is; nothing if somebody takes new work from it."""
    serving = [one for one in living if queue in one.queues]
    if not serving:
        return [("broken", f"no living supervisor {serves}")]
    return [("attention", f"only supervisors that drain {serve}")] if all(one.is_draining for one in serving) else []


def _unclaimed(facts: StatusFacts) -> list[Problem]:
    """Return a problem for each queue with triggers that nobody has, though a supervisor serves it."""
    found = []
    for queue in sorted({one.queue for one in facts.unclaimed}):
        serving = [one for one in alive(facts.supervisors) if queue in one.queues and not one.is_draining]
        if not serving:
            continue  # `_supervisors`, `_draining` or `_queues` says so
        waiting = [one for one in facts.unclaimed if one.queue == queue]
        oldest = max(waiting, key=lambda one: one.age_s)
        streams = sorted({one.stream for one in waiting if one.stream is not None})
        text = f"no supervisor has claimed {counted_rows(waiting, 'trigger')} of the queue {queue!r}"
        if streams:
            text += f", and nobody owns {counted_rows(streams, 'stream')}: {some(streams)}"
        is_full = all(one.open_triggers >= one.capacity for one in serving)
        text += "; all that serve it are at their capacity" if is_full else ""
        text += f"; the oldest, {oldest.name}, was added {span(oldest.age_s)} ago"
        names = tuple(one.name + (f" of {one.stream}" if one.stream else "") for one in waiting)
        severity: Severity = "broken" if is_full else "attention"
        found.append(Problem(severity, "unclaimed", text, command("why", oldest.name), names))
    return found


# --- streams and triggers ------------------------------------------------------------------------


def _streams(troubled: Sequence[TroubledTrigger]) -> list[Problem]:
    """Return a problem for each stream that waits for subscribers that are absent."""
    absent: dict[str, list[TroubledTrigger]] = {}
    for one in troubled:
        if one.stream is not None and not one.is_back and one.hold != "paused":
            absent.setdefault(one.stream, []).append(one)
    found: list[Problem] = []
    for stream, subscribers in absent.items():
        names = [one.name for one in subscribers]
        stands = any(one.hold is not None or one.failures >= FAILURES_BROKEN_MIN for one in subscribers)
        text = f"the stream {stream} stands still until {some(names)} {'are' if len(names) > 1 else 'is'} back"
        text += f"; {names[0]}: {subscribers[0].absence}"
        lines = tuple(f"{one.name}: {one.absence}" for one in subscribers)
        severity: Severity = "broken" if stands else "attention"
        found.append(Problem(severity, "stream_waits", text, command("why", names[0]), lines))
    found.sort(key=lambda problem: SEVERITIES.index(problem.severity))
    more = found[STREAMS_TOLD_MAX:]
    if more:
        text = f"{counted_rows(more, 'other stream')} with subscribers that are absent"
        lines = tuple(problem.text for problem in more)
        found[STREAMS_TOLD_MAX:] = [Problem(more[0].severity, "stream_waits", text, "headgate streams list", lines)]
    return found


def _away(away: Sequence[BrokerAway]) -> list[Problem]:
    if not away:
        return []
    worst = max(away, key=lambda one: one.for_s)
    text = f"the broker of {worst.name} has been away for {span(worst.for_s)}: {worst.error}"
    text += f"; and those of {counted_rows(away[1:], 'other stream')}" if len(away) > 1 else ""
    lines = tuple(f"{one.name}: {span(one.for_s)}: {one.error}" for one in away)
    return [Problem("broken", "broker_away", text, command("streams", "show", worst.stream), lines)]


def _triggers(troubled: Sequence[TroubledTrigger]) -> list[Problem]:
    held = [one for one in troubled if one.hold is not None]
    failing = [one for one in troubled if one.hold is None and not one.is_back]
    unreadable = [one for one in failing if one.is_unreadable]
    others = [one for one in failing if one.stream is None and not one.is_unreadable]  # `_streams` has the rest
    kinds: list[tuple[Severity, str, str, list[TroubledTrigger]]] = [
        ("attention", "quarantine", "quarantined, because of harm to others", _of_hold(held, "quarantine")),
        ("attention", "brake", "held, because of too many messages in a row", _of_hold(held, "brake")),
        ("attention", "unreadable", "unreadable with the keys of its supervisor", unreadable),
        ("attention", "failing", "failing, and started again and again", others),
        ("notice", "paused", "paused by a user", _of_hold(held, "paused")),
    ]
    found = []
    for severity, reason, what, triggers in kinds:
        if not triggers:
            continue
        worst = max(triggers, key=lambda one: one.failures)
        text = f"{counted_rows(triggers, 'trigger')} {'is' if len(triggers) == 1 else 'are'} {what}: "
        text += f"{worst.name}, {worst.absence}" if len(triggers) == 1 else some([one.name for one in triggers])
        lines = tuple(f"{one.name}: {one.absence}" for one in triggers)
        found.append(Problem(severity, reason, text, command("why", worst.name), lines))
    return found


def _returned(returned: Sequence[ReturnedWatcher]) -> list[Problem]:
    """Return that watchers have left their streams, which go on for others: a `return` where a `continue` was meant."""
    told = [
        f"the watcher {one.name} left the stream {one.stream} {span(one.for_s)} ago, because its trigger returned"
        for one in returned
    ]
    next_ = command("why", returned[0].name) if returned else ""
    return _first_told("attention", "watcher_returned", told, next_, others="other watcher", prefix="did ")


def _of_hold(held: Iterable[TroubledTrigger], hold: str) -> list[TroubledTrigger]:
    return [one for one in held if one.hold == hold]


# --- tasks, and what has failed ------------------------------------------------------------------


def _pools(missing: Sequence[MissingPool]) -> list[Problem]:
    """Return a problem for each pool that there is not: its tasks wait until somebody makes it."""
    found = []
    for pool in missing:
        waiting = counted_rows(range(pool.tasks), "task")
        text = f"there is no pool named {pool.name!r}, for which {waiting} wait{'s' if pool.tasks == 1 else ''}"
        text += f": {' '.join(pool.first)}"
        found.append(Problem("broken", "no_such_pool", text, command("pools", "set", pool.name, "SLOTS")))
    return found


def _tasks(overdue: Sequence[Overdue]) -> list[Problem]:
    words: list[tuple[Severity, str, str]] = [
        ("broken", "owner_gone", "of supervisors that are gone, not taken over by another"),
        ("broken", "wait_timed_out", "in waits for triggers that have timed out"),
        ("broken", "deadline_over", "at work beyond an execution_timeout"),
        ("broken", "retry_due", "due for another try that does not begin"),
        ("attention", "scheduled", "without a free worker or pool"),
    ]
    found = []
    for severity, reason, what in words:
        tasks = [one for one in overdue if one.what == reason]
        if not tasks:
            continue
        worst = max(tasks, key=lambda one: one.late_s)
        text = f"{counted_rows(tasks, 'task')} {what}; the longest for {span(worst.late_s)}: {_named(worst)}"
        lines = tuple(f"{_named(one)}: {span(one.late_s)}" for one in tasks)
        found.append(
            Problem(severity, f"tasks_{reason}", text, command("why", worst.dag, worst.run_id, worst.task_id), lines)
        )
    return found


def _named(task: Overdue | TroubledTask) -> str:
    return f"{task.dag} {task.run_id} {task.task_id}"


def _drift(drifted: Sequence[Drifted]) -> list[Problem]:
    if not drifted:
        return []
    in_order = sorted(drifted, key=lambda one: -LEVELS[one.verdict])
    worst, each = in_order[0], tuple(f"{one.name}: {one.verdict}" for one in in_order)
    level = LEVELS[worst.verdict]
    what = "messages were passed over, or may be" if level == LOSS else "messages come again" if level else "or may be"
    text = (
        f"the brokers of {counted_rows(drifted, 'stream')} are not where headgate has left them, {what}: {some(each)}"
    )
    return [Problem("attention", "drift", text, command("streams", "drift", worst.stream), each)]


def _letters(letters: Sequence[Letters]) -> list[Problem]:
    if not letters:
        return []
    total = sum(one.count for one in letters)
    several = "s" if total > 1 else ""
    more = " or more" if total >= COUNTED_MAX else ""
    each = [f"{one.name} ({one.count:,})" for one in letters]
    newest_s = min(one.newest_age_s for one in letters)
    text = f"{total:,} open dead letter{several}{more}, the newest stored {span(newest_s)} ago: {some(each)}"
    return [Problem("attention", "dead_letters", text, "headgate dlq list", tuple(each))]


def _consumers(troubled: Sequence[TroubledConsumer]) -> list[Problem]:
    found: list[Problem] = []
    failing = [one for one in troubled if one.failures]
    if failing:
        worst = max(failing, key=lambda one: one.failures)
        text = f"{counted_rows(failing, 'consumer')} cannot take the next event: "
        text += f"{worst.name}, {times(worst.failures)}: {worst.error}"
        lines = tuple(f"{one.name}: {one.failures:,}: {one.error}" for one in failing)
        severity: Severity = "broken" if worst.failures >= FAILURES_BROKEN_MIN else "attention"
        found.append(Problem(severity, "consumer_fails", text, "headgate consumers list --wide", lines))
    with_letters = [one for one in troubled if one.letters]
    if with_letters:
        total = sum(one.letters for one in with_letters)
        newest = min(with_letters, key=lambda one: one.newest_age_s)
        each = tuple(f"{one.name} ({one.letters:,})" for one in with_letters)
        by = counted_rows(with_letters, "consumer")
        text = f"{counted(total, 'event')} set aside by {by}, the newest {span(newest.newest_age_s)} ago: {some(each)}"
        found.append(Problem("attention", "set_aside", text, command("consumers", "letters", newest.name), each))
    late = sorted((one for one in troubled if one.waits_s and not one.failures), key=lambda one: -one.waits_s)
    if late:
        each = tuple(f"{one.name}, for {span(one.waits_s)}" for one in late)
        text = f"nobody takes the events of {counted_rows(late, 'consumer')}, for which they are kept: {some(each)}"
        found.append(Problem("notice", "not_taken", text, "headgate consumers list", each))
    return found


def _undecided(tasks: Sequence[TroubledTask]) -> list[Problem]:
    """Return that signals did nothing, because users' code could not decide about them."""
    signals = counted(sum(one.times for one in tasks), "signal")
    text = f"on_signal of {counted_rows(tasks, 'task')} could not decide about {signals}, which did nothing"
    return _of_tasks(tasks, "undecided_signals", f"{text}; the newest", "signal", ("why",))


def _failed_starts(tasks: Sequence[TroubledTask]) -> list[Problem]:
    """Return that starts had failed of tasks that signals, or the time, have started again: these look well now."""
    starts = counted(sum(one.times for one in tasks), "start")
    text = f"{starts} of {counted_rows(tasks, 'task')} that signals or the time start failed before the newest one"
    return _of_tasks(tasks, "failed_starts", f"{text}; the last", "start", ("tasks", "logs"))


def _of_tasks(tasks: Sequence[TroubledTask], reason: str, text: str, what: str, look: tuple[str, ...]) -> list[Problem]:
    """Return a problem of several tasks, with its newest error; ``what`` is counted of each of them."""
    if not tasks:
        return []
    newest = min(tasks, key=lambda one: one.age_s)
    text = f"{text} {span(newest.age_s)} ago: {_named(newest)}: {newest.error}"
    lines = tuple(f"{_named(one)}: {counted(one.times, what)}, {span(one.age_s)} ago: {one.error}" for one in tasks)
    return [Problem("attention", reason, text, command(*look, newest.dag, newest.run_id, newest.task_id), lines)]


def _files(errors: Sequence[tuple[str, str]]) -> list[Problem]:
    if not errors:
        return []
    file, error = errors[0]
    text = f"{counted_rows(errors, 'DAG file')} cannot be parsed: {file}: {error}"
    if len(errors) > 1:
        text = f"{counted_rows(errors, 'DAG file')} cannot be parsed: {some([name for name, _ in errors])}"
    lines = tuple(f"{name}: {text_}" for name, text_ in errors)
    return [Problem("attention", "import_errors", text, "headgate dags list", lines)]


def _gone_dags(gone: Sequence[GoneDag]) -> list[Problem]:
    """Return that runs stand still because their DAG is in no file any more."""
    told = [
        f"{counted(one.runs, 'run')} of the DAG {one.name!r}, which {one.file} has not had for {span(one.for_s)}"
        for one in gone
    ]
    next_ = command("runs", "list", gone[0].name) if gone else ""
    return _first_told(
        "attention", "dag_gone", told, next_, others="other DAG", prefix="those of ", ending=", cannot go on"
    )


def _full_backlogs(full: Sequence[FullBacklog]) -> list[Problem]:
    """Return that events of assets make no runs, because as many wait for those of a DAG as may."""
    told = [
        f"{counted(one.dropped, 'event')} of assets made no run of the DAG {one.name!r}, for which as many wait as may"
        for one in full
    ]
    next_ = command("why", full[0].name) if full else ""
    ending = "; the oldest are dropped"
    return _first_told("attention", "events_dropped", told, next_, others="other DAG", prefix="of ", ending=ending)


def _runs(failed: Sequence[tuple[str, str]]) -> list[Problem]:
    if not failed:
        return []
    names = [f"{dag} {run_id}" for dag, run_id in failed]
    text = f"{counted_rows(names, 'run')} failed within the last day: {some(names)}"
    return [Problem("attention", "failed_runs", text, "headgate runs list --state failed --since 1d", tuple(names))]


def _keys(old_keys: int) -> list[Problem]:
    if not old_keys:
        return []
    text = f"a rotation of keys has not ended: {old_keys:,} older key{'s are' if old_keys > 1 else ' is'} still needed"
    return [Problem("attention", "keys", text, "headgate keys rotate")]
