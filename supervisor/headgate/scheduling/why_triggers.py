"""Why a trigger has not fired: the part of the flowchart that begins at its row, or at rules about signals."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.protocol.messages.signals import DEFAULT_NAMESPACE
from headgate.scheduling.why import (
    HEADGATE_UP,
    Answer,
    Finding,
    RuleFacts,
    SignalFacts,
    StreamFacts,
    StruckMessage,
    Supervisor,
    TaskFacts,
    TriggerFacts,
    alive,
    answered,
    gone,
    nobody_serves,
    owner_facts,
)
from headgate.scheduling.words import command, counted, moment, shortened, some, span

AGAIN = "`headgate tasks clear` runs it again"


def explain_trigger(facts: TriggerFacts, supervisors: Sequence[Supervisor]) -> Answer:
    """Explain the state of a trigger. ``supervisors`` are those that neither ended nor were fenced."""
    return answered(findings(facts, supervisors), known(facts), errors(facts))


def findings(facts: TriggerFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    """Return the findings about a trigger, the most important first; at least one."""
    if facts.removed_age_s is not None:
        return [_removed(facts)]
    if facts.finished_age_s is not None:
        return [_finished(facts)]
    found = [] if facts.hold is None else [_held(facts)]
    if facts.watcher is None and facts.task is None:
        found.append(
            Finding(
                "orphan",
                "neither a watcher nor a task has this trigger",
                "remove it with `headgate triggers orphans --remove`; a running scheduler does so by itself",
            )
        )
    found += _unowned(facts, supervisors) if facts.owner is None else _owned(facts, facts.owner, supervisors)
    return found


def _held(facts: TriggerFacts) -> Finding:
    since = "" if facts.held_age_s is None else f", {span(facts.held_age_s)} ago"
    release = command("triggers", "release", facts.watcher or facts.id)
    if facts.hold == "paused":
        text = f"a user has paused it{since}; its shared stream, if it reads one, goes on without it"
        return Finding("paused", text, f"`{command('watchers', 'resume', facts.watcher or facts.id)}` starts it again")
    text = f"it is not started any more ({facts.hold}{since}): {shortened(facts.hold_reason)}"
    more = f"mend it, then `{release}`; its shared stream, if it reads one, waits for it"
    if facts.hold == "brake":
        more += "; what it could not take so far is listed by `headgate dlq list`"
    if facts.watcher is not None:
        more += f" (`{command('watchers', 'pause', facts.watcher)}` lets the stream go on without it)"
    return Finding(facts.hold or "held", text, more)


def _removed(facts: TriggerFacts) -> Finding:
    assert facts.removed_age_s is not None
    text = f"it was removed {span(facts.removed_age_s)} ago"
    if facts.owner is None:
        return Finding("removed", text, "nothing: it was removed, and does not run again")
    return Finding("removing", f"{text}, and {facts.owner} still has it", "it is cancelled, with its on_kill()")


def _finished(facts: TriggerFacts) -> Finding:
    assert facts.finished_age_s is not None
    text = f"it finished {span(facts.finished_age_s)} ago"
    if facts.watcher is None:
        return Finding("finished", text, "nothing: it has ended, and no task waits for it")
    again = f"`{command('watchers', 'restart', facts.watcher)}` has it run once more"
    return Finding("finished", text, f"nothing by itself; {again}")


def _unowned(facts: TriggerFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    nobody = nobody_serves(supervisors, facts.queue)
    if facts.signal is not None and (nobody is None or nobody.reason == "no_supervisor_for_queue"):
        return [_waits_for_signal(facts.signal)]
    if nobody is not None:
        return [nobody, *_failures(facts)]
    serving = [one for one in alive(supervisors) if facts.queue in one.queues]
    if facts.stream is not None:
        found = _unowned_of_stream(facts.stream, serving)
        if found is not None:
            return [found, *_failures(facts)]
    if all(one.open_triggers >= one.capacity for one in serving):
        room = sum(one.capacity for one in serving)
        text = f"every supervisor of the queue {facts.queue!r} is at its capacity, {room:,} triggers in all"
        more = "start another supervisor, or raise `capacity`; it is claimed when one of the others ends"
        return [Finding("at_capacity", text, more), *_failures(facts)]
    text = f"no supervisor has claimed it yet, {span(facts.age_s)} after it was created"
    soon = "a supervisor with room claims it within `poll_interval_s`; if not, look at the supervisors' logs"
    return [Finding("unclaimed", text, soon), *_failures(facts)]


def _waits_for_signal(signal: SignalFacts) -> Finding:
    where = "" if signal.namespace == DEFAULT_NAMESPACE else f" in the namespace {signal.namespace!r}"
    of_value = f", {signal.predicate}" if signal.predicate else ""
    text = f"it waits for a signal under the key {signal.key!r}{where}{of_value}, later than version"
    text = f"{text} {signal.seen_version:,}; the newest is {signal.last_version:,}{replaced_signals(signal.replaced)}"
    if signal.last_version > signal.seen_version:
        return Finding("signal_unseen", text, "a supervisor looks at it within seconds")
    sends = send_command(signal.key, signal.namespace, has_value=bool(signal.predicate))
    return Finding("waits_for_signal", text, f"{sends} sends one")


def _unowned_of_stream(stream: StreamFacts, serving: Sequence[Supervisor]) -> Finding | None:
    owner = stream.owner
    if owner is not None and owner.state == "alive":
        text = f"its stream {stream.name} is run by {owner}, and no other may run one of its triggers"
        return Finding("stream_elsewhere", text, "that one claims it as soon as it has room for one more trigger")
    if all(one.open_triggers and one.open_triggers + stream.triggers > one.capacity for one in serving):
        text = f"its stream {stream.name} has {stream.triggers:,} triggers, and no supervisor has so much room"
        more = "raise `capacity`, or start another supervisor: one that runs nothing else takes a stream of any size"
        return Finding("stream_too_large", text, more)
    return None


def _stream_waits(facts: TriggerFacts) -> list[Finding]:
    """Return for what the stream of a trigger may wait, though the trigger itself is in order."""
    if facts.stream is None:
        return []
    if facts.stream.away_s is not None:
        text = f"the broker of its stream has been away for {span(facts.stream.away_s)}: {facts.stream.away_error}"
        return [
            Finding(
                "broker_away", text, "it connects again and again; after `give_up_s` the trigger fails with this error"
            )
        ]
    mend = "it goes on when that one is mended, paused or removed: `headgate why` of it says more"
    waits = f"its stream {facts.stream.name} waits for"
    return [
        Finding("stream_waits", f"{waits} {name} while that one does not run: {why}", mend)
        for name, why in facts.stream.held_up_by
    ]


def _owned(facts: TriggerFacts, owner: Supervisor, supervisors: Sequence[Supervisor]) -> list[Finding]:
    dead = gone(owner, supervisors, "claim the trigger")
    if dead is not None:
        # That another could take it over is no answer if none serves its queue.
        others = [one for one in supervisors if one.epoch != owner.epoch]
        nobody = nobody_serves(others, facts.queue) if alive(others) else None
        return [*([] if nobody is None else [nobody]), dead, *_failures(facts)]
    if facts.hold is not None:
        return _failures(facts)
    return [*_failures(facts), *_of_owner(owner), *_stream_waits(facts), _waiting(facts, owner)]


def _of_owner(owner: Supervisor) -> list[Finding]:
    """Return what the owner says of itself for which the trigger may not run."""
    found = []
    if owner.is_draining:
        text = f"{owner}, which has it, was asked to stop, and ends its triggers"
        found.append(Finding("owner_drains", text, f"another supervisor claims it; if there is none, {HEADGATE_UP}"))
    if owner.dying is not None:
        more = (
            "each time it is started again with all of its triggers, after a longer wait; the log of that supervisor "
            "has the last output. SIGKILL is sent by users, and by the kernel if memory is short: see its log"
        )
        found.append(Finding("runner_ends", f"the runner of {owner}, which runs it, has {owner.dying}", more))
    return found


def _failures(facts: TriggerFacts) -> list[Finding]:
    if facts.failure_count == 0:
        return []
    times = "once" if facts.failure_count == 1 else f"{facts.failure_count:,} times in a row"
    last = "" if facts.last_failed_age_s is None else f", the last time {span(facts.last_failed_age_s)} ago"
    if facts.struck is not None:
        return [_struck(facts, facts.struck, last)]
    if facts.has_stored_since:
        return []  # it runs; `known` tells of the failures
    text = f"it has failed {times}{last}: {shortened(facts.last_error)}"
    return [Finding("failing", text, "it is started again, each time after a longer delay; mend what its error says")]


def _struck(facts: TriggerFacts, struck: StruckMessage, last: str) -> Finding:
    """Return the finding that it fails on one message, which holds up all that read the same stream."""
    limit = struck.max_deliveries
    counted = f"{struck.strikes:,} of {limit:,} deliveries" if limit else f"{struck.strikes:,} deliveries"
    if struck.kills:
        counted += f", {struck.kills:,} of which ended the runner"
    text = f"it fails on message {struck.key!r} ({counted}){last}: {shortened(facts.last_error)}"
    if limit:
        then = "after the last of these deliveries the message goes to the dead letters, and it goes on without it"
    else:
        then = "mend what its error says: the message comes again and again, because `max_deliveries` is 0"
    others = facts.others_of_stream
    if others:
        then += f"; until then the {others:,} other{'s' if others > 1 else ''} of its shared stream wait"
        then += "" if others > 1 else "s"
    else:
        then += "; until then its shared stream stands still"
    return Finding("poison", text, then)


def _waiting(facts: TriggerFacts, owner: Supervisor) -> Finding:
    if facts.newest_event is None:
        text = f"{owner} runs it, and it has not fired since it was created {span(facts.age_s)} ago"
    else:
        text = f"{owner} runs it; its newest event is {span(facts.newest_event.age_s)} old"
    soon = (
        "it fires when the condition that it waits for is met; its position in a stream, a late confirmation or a "
        f"block is in the log of that supervisor, under trigger_id {facts.id}"
    )
    if facts.task is not None:
        soon += f"; its own log: `{command('tasks', 'logs', *facts.task)}`"
    return Finding("running", text, soon)


def known(facts: TriggerFacts) -> list[tuple[str, str]]:
    """Return the facts about a trigger, independent of the findings."""
    told = [("trigger", f"{facts.id}, {facts.classpath}, queue {facts.queue}, created {span(facts.age_s)} ago")]
    if facts.watcher is not None:
        told.append(("watcher", facts.watcher))
    if facts.stream is not None:
        told.append(("stream", f"{facts.stream.name}, {facts.stream.triggers:,} triggers"))
    if facts.task is not None:
        told.append(("task", " ".join(facts.task)))
    told += owner_facts(facts.owner)
    if facts.hold is not None:
        told.append(("hold", f"{facts.hold}: {shortened(facts.hold_reason)}"))
    if facts.newest_event is None:
        told.append(("newest event", "none"))
    else:
        event = facts.newest_event
        again = f", redelivered {event.redelivered:,} times" if event.redelivered else ""
        told.append(("newest event", f"{event.id}, stored {span(event.age_s)} ago{again}"))
    if facts.failure_count:
        since = ", and it has stored events since" if facts.has_stored_since else ""
        told.append(("failures", f"{facts.failure_count:,}{since}: {shortened(facts.last_error)}"))
    elif facts.last_failed_age_s is not None:
        told.append(("last failure", f"{span(facts.last_failed_age_s)} ago: {shortened(facts.last_error)}"))
    if facts.passed_over:
        messages = f"{facts.passed_over:,} message{'s' if facts.passed_over > 1 else ''}"
        told.append(("passed over", f"{messages}, listed by `headgate dlq list`"))
    return told


def errors(facts: TriggerFacts) -> list[tuple[str, str | None]]:
    """Return the errors about a trigger as they are stored, with their tracebacks."""
    return [("last error of the trigger", facts.last_error), ("why it is held", facts.hold_reason)]


# --- what `why` says of rules, and of the wait for a signal ------------------------------------------


def undecided(facts: TaskFacts) -> Finding | None:
    """Return that signals did nothing, because the task's on_signal could not decide about them."""
    rules = [rule for rule in facts.rules if rule.undecided]
    if not rules:
        return None
    told = [f"{rule.text}: {counted(rule.undecided, 'signal')}, {shortened(rule.error)}" for rule in rules]
    text = f"its on_signal could not decide about signals, which do nothing: {'; '.join(told)}"
    return Finding(
        "undecided", text, f"{_logs(facts)}; once the file is mended: {sent_by(rules)}, or {start_command(facts)}"
    )


def failed_starts(facts: TaskFacts) -> list[Finding]:
    """Return that starts of the task have failed before its newest one."""
    rules = [rule for rule in facts.rules if rule.failed_starts]
    if not rules:
        return []
    told = [f"{rule.text}: {counted(rule.failed_starts, 'start')}, {shortened(rule.failed_error)}" for rule in rules]
    return [Finding("failed_starts", f"starts before the newest one failed: {'; '.join(told)}", _logs(facts))]


def _logs(facts: TaskFacts) -> str:
    return f"`{command('tasks', 'logs', facts.dag, facts.run_id, facts.task_id)}` has all errors"


def sent_by(rules: Sequence[RuleFacts]) -> str:
    """Return commands that send what rules wait for. A rule about the end of a task, or the time, has none."""
    return some([rule.sent_by for rule in rules if rule.sent_by])


def rule_line(rule: RuleFacts) -> str:
    """Return a rule with what has met it, up to where it was held against its key, and why users' code has failed."""
    as_decided = "" if rule.decided is None else f" ({rule.decided})"
    met = "" if rule.met_version is None else f"; met by version {rule.met_version}{as_decided}, which has not acted"
    if rule.decided == "NONE":
        met = f"; version {rule.met_version} does nothing"
    held = (
        "" if rule.last_version is None else f"; held against {rule.seen_version:,} of {rule.last_version:,} versions"
    )
    if rule.due_in_s is not None:
        held = f"; the next start is due {moment(rule.due_in_s)}"
    action = rule.action if rule.asks == "no" else "on_signal decides"
    asks = "; it is asked about the next" if rule.asks == "now" else ""
    error = "" if rule.error is None else f"; it failed: {rule.error}"
    error += f"; it could not decide about {counted(rule.undecided, 'signal')}" if rule.undecided else ""
    held += replaced_signals(rule.replaced)
    return f"{action}{', necessary' if rule.is_necessary else ''}: {rule.text}{held}{met}{asks}{error}"


def start_command(facts: TaskFacts) -> str:
    """Return the command that starts a task by hand."""
    return f"`{command('tasks', 'start', facts.dag, facts.run_id, facts.task_id)}`"


def again(facts: TaskFacts) -> str:
    """Return how a task that has ended begins again."""
    if not facts.is_started_by_signals:
        return AGAIN
    # A clear alone begins nothing that waits for a signal, and signals count until the run ends.
    start = start_command(facts)
    return f"a signal may start it again, or {start}" if facts.run_state == "running" else f"{start} starts it again"


def after_a_failure(facts: TaskFacts) -> str:
    """Return how a failed task begins again, or its run goes on without it."""
    if facts.is_started_by_signals:
        return again(facts)
    task = (facts.dag, facts.run_id, facts.name)
    text = f"`{command('tasks', 'clear', *task, '--downstream')}` runs it again, with what is below it"
    if facts.is_map or facts.map_index >= 0:
        return text
    return f"{text}; after `{command('tasks', 'mark-success', *task)}` the run goes on without it"


def send_command(key: str, namespace: str, *, has_value: bool) -> str:
    """Return the command that sends a signal; if only some values count, the user writes one in place of VALUE."""
    value = ("VALUE",) if has_value else ()
    where = () if namespace == DEFAULT_NAMESPACE else ("--namespace", namespace)
    return f"`{command('signals', 'send', key, *value, *where)}`"


def replaced_signals(count: int) -> str:
    """Return that so many of the newest signals do not have the payload of their event, after a semicolon."""
    return f"; {count:,} of the newest have the id of an event alone, whose payload is too large" if count else ""
