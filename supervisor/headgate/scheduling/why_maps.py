"""Why a mapped task waits, or an instance that has not begun: how far it is expanded, and what fills its window."""

from __future__ import annotations

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.map_states import counts_text
from headgate.scheduling.states import UNFINISHED
from headgate.scheduling.why import Finding, MapFacts, TaskFacts, shortened, some, span

_S = TaskState
_ABOUT = "the scheduler comes to it within a second"
BY_USERS = "a user "  # so begins the error of a task that a user has ended


def held(facts: TaskFacts) -> Finding | None:
    """Return a finding if an action of a user on the task has not ended."""
    if facts.map is None or not facts.map.is_held:
        return None
    text = "an action of a user on its instances has not ended: until then none of them begins"
    what = f"`headgate tasks clear {facts.dag} {facts.run_id} {facts.task_id}`, or the command that was given, goes on"
    return Finding("held", text, f"if that command is not running any more, repeat it: {what}")


def source(facts: TaskFacts) -> Finding | None:
    """Return a finding if tasks have not ended over whose output it is expanded."""
    open_ = [name for name, state in facts.upstream if state in UNFINISHED and name in _sources(facts)]
    if not open_:
        return None
    return Finding(
        "source",
        f"it waits for {some(open_)}, over whose output it is expanded",
        f"`headgate why {facts.dag} {facts.run_id} {open_[0]}` says what that one waits for",
    )


def expanding(facts: TaskFacts) -> Finding:
    """Return how far a task is expanded whose instances are being made, or for an instance: when its turn is."""
    assert facts.map is not None
    begun = sum(count for state, count in facts.map.counts.items() if state in UNFINISHED and state != _S.NONE)
    text = _expanded(facts.map)
    emitting = [name for name, state in facts.upstream if name in facts.map.emitters and state in UNFINISHED]
    if emitting and facts.map.length is None and facts.map.made >= facts.map.emitted:
        more = f"{text}, all that {some(emitting)} has emitted so far"
        next_ = f"it goes on with the next one; `headgate why {facts.dag} {facts.run_id} {emitting[0]}` says when"
        return Finding("elements", more, next_)
    if not begun:
        return Finding("expanding", f"{text}: {facts.map.window:,} may begin now", _ABOUT)
    has = "full" if begun >= facts.map.window else f"has {begun:,}"  # another is made within a moment
    full = f"{text}; window {facts.map.window:,} {has}: {_open_text(facts.map)}"
    return Finding("window_full", full, f"the next instance begins when one of these ends; {_look(facts)}")


def made(facts: TaskFacts) -> Finding:
    """Return how the instances stand of a task that makes no more of them."""
    assert facts.map is not None
    of = facts.map
    whole = "all" if of.length in (None, of.made) else f"{of.made:,} of {of.length:,}"
    text = f"{of.made:,} instances are made" if whole == "all" else f"{whole} instances are made"
    if of.stopped_by is not None:
        length = "" if of.length is None else f" of {of.length:,}"
        text = f"stopped by {of.stopped_by} after {of.made:,}{length}"
    if any(state in UNFINISHED for state in of.counts):
        next_ = f"it ends with the last of them; {_look(facts)}"
        return Finding("instances", f"{text}: {_open_text(of)}; {_ended_text(of)}".removesuffix("; "), next_)
    again = "`headgate tasks clear` runs it again"
    if of.counts.get(_S.FAILED) or of.counts.get(_S.UPSTREAM_FAILED):
        again = f"`headgate tasks clear {facts.dag} {facts.run_id} {facts.task_id} --only-failed` runs these again"
    return Finding("ended", f"it waits for nothing: {text}, {counts_text(of.counts, None)}", f"nothing; {again}")


def unexpandable(facts: TaskFacts) -> Finding | None:
    """Return a finding if a task that failed could not be expanded."""
    error = facts.last_error
    if facts.map is None or not error or error.startswith(BY_USERS):
        return None
    ago = "" if facts.since_s is None else f" {span(facts.since_s)} ago"
    sources = " ".join(sorted(_sources(facts)))
    clear = f"`headgate tasks clear {facts.dag} {facts.run_id} {sources or facts.task_id} --downstream`"
    return Finding("unexpandable", f"it cannot be expanded{ago}: {shortened(error)}", f"mend the cause, then {clear}")


def known(facts: MapFacts) -> list[tuple[str, str]]:
    """Return the facts about the instances."""
    return [("instances", counts_text(facts.counts, facts.length)), ("window", f"{facts.window:,}")]


# --- words ---------------------------------------------------------------------------------------


def _sources(facts: TaskFacts) -> frozenset[str]:
    return frozenset() if facts.map is None else frozenset(facts.map.sources)


def _expanded(of: MapFacts) -> str:
    if of.length is not None:
        return f"expanded {of.made:,} of {of.length:,}"
    return f"expanded {of.made:,}" + (f" of {of.emitted:,} that are emitted so far" if of.made < of.emitted else "")


def _open_text(of: MapFacts) -> str:
    states = (_S.NONE, _S.SCHEDULED, _S.DEFERRED, _S.UP_FOR_RETRY, _S.RESTARTING, _S.RUNNING)
    told = [f"{of.counts[state]:,} {state.value}" for state in states if of.counts.get(state)]
    return ", ".join(told)


def _ended_text(of: MapFacts) -> str:
    ended = {state: count for state, count in of.counts.items() if state not in UNFINISHED}
    return counts_text(ended, None) if ended else ""


def _look(facts: TaskFacts) -> str:
    index = None if facts.map is None else facts.map.first_open
    if index is None:
        return f"`headgate tasks list {facts.dag} {facts.run_id} --each` lists them"
    return f"`headgate why {facts.dag} {facts.run_id} '{facts.task_id}[{index}]'` says what the first of them waits for"
