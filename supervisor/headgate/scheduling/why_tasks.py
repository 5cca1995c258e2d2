"""Why a task is in its state: for each state the possible causes, the nearest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import why_maps, why_triggers
from headgate.scheduling.map_states import state_with
from headgate.scheduling.planning import RULES_OF_SUCCESS
from headgate.scheduling.states import FAIL_METHOD, FAILED, TERMINAL
from headgate.scheduling.trigger_rules import ready
from headgate.scheduling.why import (
    Answer,
    Finding,
    Supervisor,
    TaskFacts,
    TaskStreamFacts,
    alive,
    answered,
    gone,
    nobody_serves,
    owner_facts,
    passed_over,
)
from headgate.scheduling.words import command, moment, shortened, some, span, tries

_S = TaskState
TRIED_AGAIN_WITHIN_S = 15.0  # behind the moment from which on a task may begin: supervisors look now and then
# The answers by which the scheduler comes next, unless it has failed with the task; all others are nearer than that.
_OF_THE_SCHEDULER = frozenset(
    {
        *("about_to", "overdue", "retry_due", "run_queued", "timed_out", "waits_for_signal"),
        *("owner_ended", "owner_fenced", "owner_gone", "owner_silent"),
    }
)


def explain_task(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> Answer:
    """Explain why a task is in its state. ``supervisors`` are those that neither ended nor were fenced."""
    found, failed = _findings(facts, supervisors), _passed_over(facts, supervisors)
    is_its_turn = found[0].reason in _OF_THE_SCHEDULER
    found = [*failed, *found] if is_its_turn else [*found, *failed]
    return answered([*found, *why_triggers.failed_starts(facts)], _known(facts), _errors(facts))


def _findings(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    match facts.state:
        case _S.NONE:
            return _none(facts, supervisors)
        case _S.SCHEDULED:
            return _scheduled(facts, supervisors)
        case _S.RUNNING | _S.RESTARTING:
            return _with_a_worker(facts, supervisors)
        case _S.DEFERRED:
            return _deferred(facts, supervisors)
        case _S.UP_FOR_RETRY:
            return _up_for_retry(facts, supervisors)
        case _S.SUCCESS if facts.is_map and facts.map is not None and facts.map.made:
            made = why_maps.made(facts)
            return [made] if made.reason == "ended" else [*_paused(facts), *_nobody(facts, supervisors), made]
        case _S.FAILED if facts.is_map and (found := why_maps.unexpandable(facts)) is not None:
            return [found]
        case _S.SUCCESS | _S.FAILED | _S.SKIPPED | _S.UPSTREAM_FAILED | _S.REMOVED:
            return [*_starts_after_the_pause(facts), *_after_its_end(facts)]
        case _:
            assert_never(facts.state)


# --- causes in several states --------------------------------------------------------------------


def _passed_over(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    """Return which supervisors' schedulers have failed with this task, its run, or a rule of it."""
    if facts.state in TERMINAL:
        return []
    run = f"{facts.dag} {facts.run_id}"
    return passed_over((f"run {run}", f"task {run} {facts.name}"), supervisors)


def _paused(facts: TaskFacts) -> list[Finding]:
    if not facts.is_paused:
        return []
    text = f"the DAG {facts.dag} is paused: none of its tasks is given to a worker"
    return [Finding("dag_paused", text, f"`{command('dags', 'unpause', facts.dag)}`")]


def _about_to(decision: str) -> Finding:
    becomes = {"run": "scheduled", "skipped": "skipped", "upstream_failed": "upstream_failed"}[decision]
    text = f"nothing holds it up: it is about to be {becomes}"
    return Finding("about_to", text, "the scheduler comes to it within a second")


def _may_start_anyway(facts: TaskFacts) -> bool:
    return any(rule.starts and not rule.is_necessary for rule in facts.rules)


def _signals(facts: TaskFacts) -> list[Finding]:
    """Return for which signals a task waits that they start."""
    if facts.is_ending:
        text = "its run is to end, and signals start nothing of it any more"
        return [
            Finding("run_ending", text, "the scheduler skips it within a second, or once what is upstream has ended")
        ]
    enough = [rule for rule in facts.rules if rule.starts and not rule.is_necessary]
    needed = [rule for rule in facts.rules if rule.is_necessary]
    missing = [rule for rule in needed if rule.met_version is None]
    if any(rule.is_met for rule in enough):
        return [_about_to("run")]
    asked = [rule for rule in enough if rule.asks == "now"]
    if asked:
        why = "".join(f"; it failed: {rule.error}" for rule in asked if rule.error is not None)
        text = f"its on_signal is asked what signals do: {'; '.join(rule.text for rule in asked)}{why}"
        next_ = f"the log has its errors: `{command('tasks', 'logs', facts.dag, facts.run_id, facts.task_id)}`"
        return [Finding("asks_on_signal", text, next_)]
    waits = [rule.text for rule in enough]
    if missing:
        waits.append(" and ".join(rule.text for rule in missing))
    elif needed:
        return [_upstream(facts)] if ready(facts.trigger_rule, _above(facts)) == "wait" else [_about_to("run")]
    if (undecided := why_triggers.undecided(facts)) is not None:
        return [undecided]
    text = f"it is started by a signal, and none has met its rules: {'; or '.join(waits)}"
    sends = why_triggers.sent_by([*enough, *missing])
    by_hand = f"{why_triggers.start_command(facts)} starts it without a signal"
    return [Finding("waits_for_signal", text, f"{sends} sends one; {by_hand}" if sends else by_hand)]


def _file(facts: TaskFacts) -> list[Finding]:
    """Return a finding if the DAG's file is gone or broken. Its runs continue with the stored version."""
    if facts.is_dag_removed:
        text = f"no DAG file has the DAG {facts.dag} any more"
        return [Finding("dag_removed", text, "put the DAG back, or end the run with `headgate runs cancel`")]
    if facts.import_error is None:
        return []
    text = f"the file of {facts.dag} cannot be parsed: {shortened(facts.import_error)}"
    return [Finding("import_error", text, "mend the file; `headgate dags list` shows the traceback")]


def _nobody(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    nobody = nobody_serves(supervisors, facts.queue, with_workers=True)
    return [] if nobody is None else [nobody]


def _now(facts: TaskFacts) -> str:
    return "" if facts.since_s is None else f" for {span(facts.since_s)}"


# --- before a worker -----------------------------------------------------------------------------


def _none(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    if facts.run_state in ("success", "failed"):
        text = f"its run has ended ({facts.run_state}); the task is not going to run"
        return [Finding("run_ended", text, f"nothing; {why_triggers.again(facts)}")]
    if facts.unreadable is not None:
        next_ = "`headgate up` of this version stores it anew when it parses its file"
        return [Finding("dag_unreadable", facts.unreadable, next_), *_file(facts)]
    found = _file(facts)[:1] if facts.is_dag_removed else []
    if not facts.is_in_dag and not facts.is_dag_removed:
        found.append(Finding("not_in_dag", f"the DAG {facts.dag} no longer has it", "the scheduler removes it"))
    if (held := why_maps.held(facts)) is not None:
        found.append(held)  # no supervisor ends it
    found += _paused(facts)
    nobody = nobody_serves(supervisors, facts.queue, with_workers=True)
    nothing_moves = nobody is not None and nobody.reason not in ("no_supervisor_for_queue", "draining")
    if nobody is not None and nothing_moves:
        found.append(nobody)  # neither its run begins, nor does an upstream task go on
    if facts.run_state == "queued":
        found.append(_run_queued(facts))
    decision = ready(facts.trigger_rule, _above(facts))
    if facts.is_started_by_signals:
        return [*found, *(_signals(facts) if decision in ("wait", "run") or _may_start_anyway(facts) else [])] or [
            _about_to(decision)
        ]
    is_of_group = facts.is_map and facts.map is not None and facts.map.group is not None
    if is_of_group:
        # Its instances have rules of their own, at each index.
        decision = "run"
        of_source = why_maps.group_waits(facts)
    else:
        of_source = why_maps.source(facts) if decision in ("wait", "run") else None
    if of_source is not None:
        found.append(of_source)
    elif decision == "wait":
        found.append(_upstream(facts))
    if nobody is not None and not nothing_moves:
        found.append(nobody)
    if not found and decision == "run" and facts.map is not None:
        if facts.map.group is not None and not facts.is_map:
            found += [why_maps.expanding(facts)] if why_maps.is_full(facts) else []
        elif facts.map_state is _S.NONE:
            found.append(why_maps.expanding(facts))
    if not found:
        found.append(_about_to(decision))
    return found + ([] if facts.is_dag_removed else _file(facts))


def _above(facts: TaskFacts) -> frozenset[TaskState]:
    """Return the states that the trigger rule is about now, as `headgate.scheduling.planning.decide` takes them."""
    emitters = facts.map.emitters if facts.map is not None and facts.trigger_rule in RULES_OF_SUCCESS else ()
    above = [_seen(facts, *one) for one in facts.upstream if one[0] not in emitters or one[1] in TERMINAL]
    return frozenset[TaskState]().union(*above)


def _seen(facts: TaskFacts, name: str, state: TaskState) -> frozenset[TaskState]:
    """Return the states of all rows of an upstream task."""
    return facts.seen.get(name, frozenset({state}))


def _run_queued(facts: TaskFacts) -> Finding:
    active = len(facts.other_runs)
    text = f"the run has not begun: {active:,} of {facts.max_active_runs:,} runs of its DAG are active"
    if active >= facts.max_active_runs:
        others = some(facts.other_runs)
        return Finding("run_queued", text, f"it begins when one of these ends: {others}; or raise max_active_runs")
    return Finding("run_queued", text, "the scheduler begins it within a second, the oldest logical date first")


def _upstream(facts: TaskFacts) -> Finding:
    emitters = () if facts.map is None else facts.map.emitters
    unfinished = [(name, state) for name, state in facts.upstream if state not in TERMINAL]
    open_ = [one for one in unfinished if one[0] not in emitters] or unfinished
    waits = some([f"{name} ({state.value})" for name, state in open_])
    first = open_[0][0]
    return Finding(
        "upstream",
        f"it waits for {len(open_):,} of {len(facts.upstream):,} upstream tasks: {waits}",
        f"it goes on by its rule {facts.trigger_rule} when these have ended; "
        f"`{command('why', facts.dag, facts.run_id, first)}` says what the first of them waits for",
    )


def _scheduled(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    found = [*(_file(facts) if facts.is_dag_removed else []), *_paused(facts)]
    nobody = nobody_serves(supervisors, facts.queue, with_workers=True)
    if nobody is not None:
        found.append(nobody)
    found += [*_pool(facts), *_old_worker(facts)]
    if facts.begins_in_s is not None and facts.begins_in_s > -TRIED_AGAIN_WITHIN_S:
        found.append(_waits_to_begin(facts, facts.begins_in_s))
    elif facts.is_endless:
        found += _endless(facts, supervisors)
    if not found:
        busy = sum(one.tasks for one in supervisors if facts.queue in one.queues)
        text = f"it waits{_now(facts)} for a free worker of the queue {facts.queue!r}; {busy:,} tasks have one"
        soon = "it gets the next one that is free; `headgate up` with more workers, or another supervisor, adds some"
        found.append(Finding("no_free_worker", text, soon))
    return found + ([] if facts.is_dag_removed else _file(facts))


def _old_worker(facts: TaskFacts) -> list[Finding]:
    """Return that a worker still has a task which a user, or a signal, has ended, and which is to begin again."""
    owner = facts.old_owner
    if owner is None or owner.state in ("ended", "fenced"):
        return []
    text = f"it was ended while a worker had it, which has not ended yet (of epoch {owner.epoch} on {owner.hostname})"
    soon = "it begins when that worker is gone, or its supervisor has lost its lease"
    return [Finding("old_worker", text, soon)]


def _waits_to_begin(facts: TaskFacts, in_s: float) -> Finding:
    """Return that a task was moved, or could not begin, and waits."""
    soon = moment(in_s) if in_s > 0 else "now"
    if not facts.moves:
        text = f"it cannot begin: {shortened(facts.last_error)}"
        return Finding("cannot_begin", text, f"a worker tries again {soon}, in the same try")
    in_a_row = "once" if facts.moves == 1 else f"{facts.moves:,} times in a row"
    text = f"it has lost its worker {in_a_row}: {shortened(facts.last_error)}"
    return Finding("moved", text, f"it begins again {soon}, in the same try")


def _endless(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    """Return why an endless task has no worker, as it may begin: all that are for such tasks are taken."""
    serving = [one for one in alive(supervisors) if facts.queue in one.queues and one.workers]
    places = sum(one.endless_workers for one in serving)
    taken = sum(one.endless_tasks for one in serving)
    if not serving or taken < places:
        return [_about_to("run")] if serving else []
    text = f"it is endless, and all {places:,} workers for endless tasks of the queue {facts.queue!r} are taken"
    next_ = "it begins when one of these tasks ends; a larger `endless_workers_max`, or another supervisor, adds some"
    return [Finding("no_endless_worker", text, next_)]


def _pool(facts: TaskFacts) -> list[Finding]:
    pool = facts.pool
    if pool.slots is None:
        text = f"there is no pool named {pool.name!r}"
        return [Finding("no_such_pool", text, f"`{command('pools', 'set', pool.name, 'SLOTS')}` makes it")]
    if facts.pool_slots > pool.slots:
        text = f"the pool {pool.name!r} has {pool.slots:,} slots in all, and the task needs {facts.pool_slots:,}"
        more = f"`{command('pools', 'set', pool.name, facts.pool_slots)}`, or let the task need fewer"
        return [Finding("larger_than_pool", text, more)]
    if pool.used + facts.pool_slots <= pool.slots:
        return []
    text = f"the pool {pool.name!r} is full: {pool.used:,} of {pool.slots:,} slots are in use"
    if facts.pool_slots > 1:
        text += f", and it needs {facts.pool_slots:,}"
    ahead = f"; {facts.ahead:,} tasks are more urgent than this one" if facts.ahead else ""
    return [Finding("pool_full", text, f"it has its turn when slots are free{ahead}; `headgate pools set` adds some")]


def _up_for_retry(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    due_s = facts.retry_in_s or 0.0
    nobody = nobody_serves(supervisors, facts.queue, with_workers=True)
    nearer = [*_paused(facts), *([] if nobody is None else [nobody])]
    failed = f"try {facts.try_number} of {facts.tries_max} failed: {shortened(facts.last_error)}"
    if due_s > 0:
        at_once = "`headgate tasks clear` begins anew at once"
        if facts.is_started_by_signals:  # a clear would have it wait for another signal
            at_once = f"{why_triggers.start_command(facts)} begins it at once"
        soon = f"try {facts.try_number + 1} begins {moment(due_s)}; {at_once}"
        return [*nearer, Finding("retry_delay", failed, soon)]
    text = f"{failed}; the next try has been due for {span(due_s)}"
    return [*nearer, Finding("retry_due", text, "the scheduler begins it within a second")]


# --- with a worker, or a trigger -----------------------------------------------------------------


def _with_a_worker(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    owner = facts.owner
    assert owner is not None, "the database holds that such a task has an owner"
    adopted = {
        _S.RUNNING: "fail this try, and retry it where tries are left",
        _S.RESTARTING: "begin it anew",
    }
    if facts.is_endless:
        adopted[_S.RUNNING] = "begin it again, in the same try"
    dead = gone(owner, supervisors, adopted[facts.state])
    if dead is not None:
        return [dead]
    match facts.state:
        case _S.RESTARTING:
            text = f"it was cleared while it ran; {owner} is ending its worker, with its on_kill()"
            return [Finding("restarting", text, "it begins anew when that worker is gone; nothing is to be done")]
        case _:
            return [_running(facts, owner)]


def _running(facts: TaskFacts, owner: Supervisor) -> Finding:
    text = f"it runs on a worker of {owner}, try {facts.try_number}{_now(facts)}"
    if facts.is_endless:
        stop = f"`{command('tasks', 'stop', facts.dag, facts.run_id, facts.task_id)}`"
        return Finding("running", text, f"it is endless: it runs until it returns, or a signal or {stop} ends it")
    if facts.deadline_in_s is None:
        return Finding("running", text, "it has no execution_timeout: it runs until it ends or a user ends it")
    if facts.deadline_in_s >= 0:
        return Finding("running", text, f"it is ended {moment(facts.deadline_in_s)} if it has not ended by then")
    late = f"{text}; its execution_timeout was over {moment(facts.deadline_in_s)}"
    return Finding("overdue", late, "its supervisor ends the worker; the try fails then")


def _deferred(facts: TaskFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    if facts.trigger is None:
        text = "it waits for a trigger that is not there"
        return [Finding("no_trigger", text, f"report this, since headgate promises otherwise; {why_triggers.AGAIN}")]
    found: list[Finding] = []
    if facts.timeout_in_s is not None and facts.timeout_in_s < 0:
        nobody = nobody_serves(supervisors, facts.queue, with_workers=True)
        if nobody is not None:
            found.append(nobody)
        soon = "a supervisor resumes it to fail, within seconds"
        found.append(Finding("timed_out", f"its wait timed out {moment(facts.timeout_in_s)}", soon))
    if facts.stream is not None and facts.stream.reopens:
        text = "its stream goes on with the trigger of the try before, whose last run has not ended yet"
        return [*found, Finding("trigger_ending", text, "it is started again as soon as that run has ended")]
    found += why_triggers.findings(facts.trigger, supervisors)
    return found


# --- ended ---------------------------------------------------------------------------------------


def _starts_after_the_pause(facts: TaskFacts) -> list[Finding]:
    """Return a finding if an ended task is to start again as soon as its DAG is not paused any more."""
    needed = [rule.is_met for rule in facts.rules if rule.is_necessary]
    is_met = any(rule.is_met and not rule.is_necessary for rule in facts.rules) or (bool(needed) and all(needed))
    return _paused(facts) if is_met else []


def _after_its_end(facts: TaskFacts) -> list[Finding]:
    undecided = why_triggers.undecided(facts)
    if undecided is None:
        return [_ended(facts)]
    return [undecided, _ended(facts)] if facts.state is _S.SKIPPED else [_ended(facts), undecided]


def _ended(facts: TaskFacts) -> Finding:
    ago = "" if facts.since_s is None else f" {span(facts.since_s)} ago"
    match facts.state:
        case _S.SUCCESS:
            text = f"it waits for nothing: it succeeded{ago}{_stopped_by(facts)}"
            return Finding("ended", text, f"nothing; {why_triggers.again(facts)}")
        case _S.FAILED:
            error = shortened(facts.last_error) or "no error was recorded"
            text = f"it failed{ago} in try {facts.try_number}: {error}"
            return Finding("ended", text, f"nothing by itself; {why_triggers.after_a_failure(facts)}")
        case _S.SKIPPED:
            return Finding("ended", f"it was skipped{ago}{_stopped_by(facts)}", f"nothing; {why_triggers.again(facts)}")
        case _S.REMOVED:
            text = f"it was removed from its run{ago}: the DAG {facts.dag} no longer has it"
            return Finding("ended", text, "nothing")
        case _:
            broken = [one[0] for one in facts.upstream if not FAILED.isdisjoint(_seen(facts, *one))]
            because = f": {some(broken)} failed" if broken else ""
            text = f"it could not run{because}, and its rule is {facts.trigger_rule}"
            text += f"; that was decided{ago}" if ago else ""
            what = f"`{command('tasks', 'clear', facts.dag, facts.run_id, *broken[:1], '--downstream')}`"
            return Finding(
                "ended",
                text,
                f"nothing by itself; once the cause is mended: {what if broken else why_triggers.again(facts)}",
            )


def _is_well(facts: TaskFacts) -> bool:
    """Whether a task has ended without an error: what is in the place of the last one is what has stopped it."""
    return facts.state in (_S.SUCCESS, _S.SKIPPED) and not facts.is_map


def _stopped_by(facts: TaskFacts) -> str:
    return f": {shortened(facts.last_error)}" if facts.last_error and _is_well(facts) else ""


# --- facts ---------------------------------------------------------------------------------------


def _errors(facts: TaskFacts) -> list[tuple[str, str | None]]:
    of_trigger = [] if facts.trigger is None else why_triggers.errors(facts.trigger)
    last = None if _is_well(facts) else facts.last_error
    return [("last error", last), *of_trigger, ("error of the DAG file", facts.import_error)]


def _known(facts: TaskFacts) -> list[tuple[str, str]]:
    since = "" if facts.since_s is None else f", for {span(facts.since_s)}"
    state = facts.state if facts.map is None or not facts.is_map else state_with(facts.state, map(_S, facts.map.counts))
    told = [
        ("state", f"{state.value}{since if state is facts.state else ''}"),
        *([] if facts.is_map else [("try", tries(facts.try_number, facts.tries_max, facts.retries))]),
        ("run", f"{facts.run_id}, {facts.run_state}"),
        ("DAG", f"{facts.dag}{', paused' if facts.is_paused else ''}"),
    ]
    if facts.state is _S.NONE or facts.state is _S.UPSTREAM_FAILED:
        states = some([f"{name} ({state.value})" for name, state in facts.upstream])
        told.append(("upstream", f"{states or 'none'}, rule {facts.trigger_rule}"))
    if facts.state is _S.SCHEDULED:
        told += _pool_facts(facts)
        if facts.next_method is not None:
            how = "to fail, with its error" if facts.next_method == FAIL_METHOD else f"in {facts.next_method}()"
            told.append(("resumes", how))
    told += why_maps.known(facts)
    told += [("rule", why_triggers.rule_line(rule)) for rule in facts.rules]
    if facts.stream is not None:
        told.append(("stream", _stream(facts.stream, has_ended=facts.state in TERMINAL)))
    if facts.owner is not None:
        told += owner_facts(facts.owner)
    if facts.trigger is not None:
        told += why_triggers.known(facts.trigger)
        told.append(("wait times out", moment(facts.timeout_in_s)))
    if facts.is_endless:
        told.append(("endless", f"yes; workers lost in a row: {facts.moves:,}" if facts.moves else "yes"))
    if facts.deadline_in_s is not None:
        told.append(("execution_timeout ends", moment(facts.deadline_in_s)))
    if facts.last_error and facts.state not in (_S.FAILED, _S.UP_FOR_RETRY) and not _is_well(facts):
        told.append(("last error", shortened(facts.last_error)))
    return told


def _stream(stream: TaskStreamFacts, *, has_ended: bool) -> str:
    if has_ended:
        left = f"; {stream.waiting:,} that are stored are handled by nobody" if stream.waiting else ""
        return f"{stream.handled:,} events handled{left}"
    waits = f"{stream.waiting:,} wait" if stream.waiting != 1 else "1 waits"
    whole = f" for a batch of {stream.wanted:,}" if stream.contract == "batch" and stream.ended_as is None else ""
    over = "" if stream.ended_as is None else "; no more will come"
    return f"{stream.handled:,} events handled, {waits}{whole}{over}"


def _pool_facts(facts: TaskFacts) -> list[tuple[str, str]]:
    pool = facts.pool
    slots = "no such pool" if pool.slots is None else f"{pool.used:,} of {pool.slots:,} slots in use"
    told = [("pool", f"{pool.name}: {slots}; the task needs {facts.pool_slots:,}")]
    if pool.holders:
        held = [f"{' '.join(names)} ({slots_held:,})" for *names, slots_held in pool.holders]
        told.append(("holders", some(held)))
    told.append(("queue", f"{facts.queue}, {facts.ahead:,} more urgent tasks in the pool"))
    return told
