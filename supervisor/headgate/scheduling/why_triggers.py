"""Why a trigger has not fired: the part of the flowchart that begins at the trigger's row."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.scheduling.why import (
    Answer,
    Finding,
    Supervisor,
    TriggerFacts,
    alive,
    answered,
    gone,
    nobody_serves,
    owner_facts,
    shortened,
    span,
)


def explain_trigger(facts: TriggerFacts, supervisors: Sequence[Supervisor]) -> Answer:
    """Explain the state of a trigger. ``supervisors`` are those that neither ended nor were fenced."""
    return answered(findings(facts, supervisors), known(facts))


def findings(facts: TriggerFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    """Return the findings about a trigger, the most important first; at least one."""
    if facts.removed_age_s is not None:
        return [_removed(facts)]
    if facts.finished_age_s is not None:
        return [_finished(facts)]
    found: list[Finding] = []
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
    again = f"remove the watcher {facts.watcher} and add it again to have it run once more"
    return Finding("finished", text, f"nothing by itself; {again}")


def _unowned(facts: TriggerFacts, supervisors: Sequence[Supervisor]) -> list[Finding]:
    nobody = nobody_serves(supervisors, facts.queue)
    if nobody is not None:
        return [nobody, *_failures(facts)]
    serving = [one for one in alive(supervisors) if facts.queue in one.queues]
    if all(one.open_triggers >= one.capacity for one in serving):
        room = sum(one.capacity for one in serving)
        text = f"every supervisor of the queue {facts.queue!r} is at its capacity, {room:,} triggers in all"
        more = "start another supervisor, or raise `capacity`; it is claimed when one of the others ends"
        return [Finding("at_capacity", text, more), *_failures(facts)]
    text = f"no supervisor has claimed it yet, {span(facts.age_s)} after it was created"
    soon = "a supervisor with room claims it within `poll_interval_s`; if not, look at the supervisors' logs"
    return [Finding("unclaimed", text, soon), *_failures(facts)]


def _owned(facts: TriggerFacts, owner: Supervisor, supervisors: Sequence[Supervisor]) -> list[Finding]:
    dead = gone(owner, supervisors, "claim the trigger")
    if dead is not None:
        return [dead, *_failures(facts)]
    return [*_failures(facts), _waiting(facts, owner)]


def _failures(facts: TriggerFacts) -> list[Finding]:
    if facts.failure_count == 0:
        return []
    times = "once" if facts.failure_count == 1 else f"{facts.failure_count:,} times in a row"
    last = "" if facts.last_failed_age_s is None else f", the last time {span(facts.last_failed_age_s)} ago"
    text = f"it has failed {times}{last}: {shortened(facts.last_error)}"
    return [Finding("failing", text, "it is started again, each time after a longer delay; mend what its error says")]


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
        soon += f"; its own log: `headgate tasks logs {' '.join(facts.task)}`"
    return Finding("running", text, soon)


def known(facts: TriggerFacts) -> list[tuple[str, str]]:
    """Return the facts about a trigger, independent of the findings."""
    told = [("trigger", f"{facts.id}, {facts.classpath}, queue {facts.queue}, created {span(facts.age_s)} ago")]
    if facts.watcher is not None:
        told.append(("watcher", facts.watcher))
    if facts.task is not None:
        told.append(("task", " ".join(facts.task)))
    told += owner_facts(facts.owner)
    if facts.newest_event is None:
        told.append(("newest event", "none"))
    else:
        event = facts.newest_event
        again = f", redelivered {event.redelivered:,} times" if event.redelivered else ""
        told.append(("newest event", f"{event.id}, stored {span(event.age_s)} ago{again}"))
    if facts.failure_count:
        told.append(("failures", f"{facts.failure_count:,}: {shortened(facts.last_error)}"))
    return told
