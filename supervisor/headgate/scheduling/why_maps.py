"""Why a mapped task waits, or an instance that has not begun: how far it is expanded, and what fills its window."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.map_states import counts_text
from headgate.scheduling.states import UNFINISHED
from headgate.scheduling.why import Finding, GroupFacts, MapFacts, TaskFacts
from headgate.scheduling.words import command, shortened, some, span

_S = TaskState
_ABOUT = "the scheduler comes to it within a second"
BY_USERS = "a user "  # so begins the error of a task that a user has ended


def held(facts: TaskFacts) -> Finding | None:
    """Return a finding if an action of a user on the task has not ended."""
    if facts.map is None or not facts.map.is_held:
        return None
    text = "an action of a user on its instances has not ended: until then none of them begins"
    what = (
        f"`{command('tasks', 'clear', facts.dag, facts.run_id, facts.task_id)}`, or the command that was given, goes on"
    )
    return Finding("held", text, f"if that command is not running any more, repeat it: {what}")


def source(facts: TaskFacts) -> Finding | None:
    """Return a finding if tasks have not ended over whose output it is expanded."""
    open_ = [name for name, state in facts.upstream if state in UNFINISHED and name in _sources(facts)]
    if not open_:
        return None
    return Finding(
        "source",
        f"it waits for {some(open_)}, over whose output it is expanded",
        f"`{command('why', facts.dag, facts.run_id, open_[0])}` says what that one waits for",
    )


def group_waits(facts: TaskFacts) -> Finding | None:
    """Return a finding if a task of a mapped group waits for tasks outside of the group, at each of its indexes."""
    group = None if facts.map is None else facts.map.group
    if facts.map is None or group is None:
        return None
    waits, text = [name for name, _ in group.upstream if name in _sources(facts)], ""
    if waits:
        text = f"the group {group.name} waits for {some(waits)}, over whose output it is expanded"
    elif not facts.map.made and not group.may_begin:
        waits = [name for name, _ in group.upstream]
        text = f"the group {group.name} waits for {_with_states(group.upstream)}"
    elif facts.map.made and not group.may_begin:
        own = [one for one in group.upstream if one in facts.upstream]
        waits = [name for name, _ in own]
        text = f"at each index it waits for {_with_states(own)}"
    if not waits:
        return None
    why = f"`{command('why', facts.dag, facts.run_id, waits[0])}` says what the first of them waits for"
    return Finding("source" if "expanded" in text else "upstream", text, why)


def is_full(facts: TaskFacts) -> bool:
    """Return whether as many indexes of the group of an instance have begun and not ended as may, without its own."""
    group = None if facts.map is None else facts.map.group
    if facts.map is None or group is None or group.open_count < facts.map.window:
        return False
    return all(state is _S.NONE or state not in UNFINISHED for _, state in group.at)


def expanding(facts: TaskFacts) -> Finding:
    """Return how far a task is expanded whose instances are being made, or for an instance: when its turn is."""
    assert facts.map is not None
    if facts.map.worklist is not None and facts.map.worklist.gate is not None:
        return _iterating(facts, facts.map.worklist.gate)
    if facts.map.group is not None:
        return _expanding_group(facts, facts.map.group)
    begun = sum(count for state, count in facts.map.counts.items() if state in UNFINISHED and state != _S.NONE)
    text = _expanded(facts.map)
    if (waits := _worklist(facts, begun)) is not None:
        return waits
    emitting = [name for name, state in facts.upstream if name in facts.map.emitters and state in UNFINISHED]
    if emitting and facts.map.length is None and facts.map.made >= facts.map.emitted:
        more = f"{text}, all that {some(emitting)} has emitted so far"
        next_ = f"it goes on with the next one; `{command('why', facts.dag, facts.run_id, emitting[0])}` says when"
        return Finding("elements", more, next_)
    if not begun:
        return Finding("expanding", f"{text}: {facts.map.window:,} may begin now", _ABOUT)
    has = "full" if begun >= facts.map.window else f"has {begun:,}"  # another is made within a moment
    full = f"{text}; window {facts.map.window:,} {has}: {_open_text(facts.map)}"
    return Finding("window_full", full, f"the next instance begins when one of these ends; {_look(facts)}")


def _expanding_group(facts: TaskFacts, group: GroupFacts) -> Finding:
    assert facts.map is not None
    text, window = _expanded(facts.map), facts.map.window
    if not group.open_count:
        return Finding("expanding", f"{text}: {window:,} indexes of the group {group.name} may begin now", _ABOUT)
    if (waits := _worklist(facts, group.open_count)) is not None:
        return waits
    if facts.is_map and facts.map.made == facts.map.length:
        next_ = f"it ends when these have ended; {_look(facts)}"
        return Finding("instances", f"{text}: {_open_indexes(group)}", next_)
    has = "full" if group.open_count >= window else f"has {group.open_count:,}"
    full = f"{text}; window {window:,} {has}: {_open_indexes(group)}"
    next_ = f"the next index begins when one of these has ended in all tasks of the group; {_look(facts)}"
    return Finding("window_full", full, next_)


def _worklist(facts: TaskFacts, open_count: int) -> Finding | None:
    """Return how a task over a worklist stands if each of its values so far has an instance."""
    assert facts.map is not None
    worklist = facts.map.worklist
    if worklist is None or worklist.given + worklist.appended > facts.map.made or not open_count:
        return None
    group = facts.map.group
    open_ = _open_text(facts.map) if group is None else _open_indexes(group)
    next_ = f"it ends when none of these is left, which could append more; {_look(facts)}"
    return Finding("worklist", f"{_expanded(facts.map)}: {open_}", next_)


def _iterating(facts: TaskFacts, gate: str) -> Finding:
    assert facts.map is not None
    assert facts.map.group is not None
    assert facts.map.worklist is not None
    group = facts.map.group
    iteration = facts.map.made - 1 if not group.open else group.open[0]
    text = f"iteration {max(iteration, 0):,}, from 0, of at most {facts.map.worklist.length_max:,}"
    open_ = [(name, state) for name, state in group.at if state in UNFINISHED]
    if not open_:
        return Finding("expanding", f"{text} is about to begin", _ABOUT)
    name, state = next((one for one in open_ if one[1] is not _S.NONE), open_[0])
    why = f"`{command('why', facts.dag, facts.run_id, f'{name}[{iteration}]')}` says what it waits for"
    then = f"behind it the gate {gate} decides whether there is another one; {why}"
    return Finding("iteration", f"{text}: {name} is {state.value}", then)


def made(facts: TaskFacts) -> Finding:
    """Return how the instances stand of a task that makes no more of them."""
    assert facts.map is not None
    of = facts.map
    whole = f"{of.made:,}" if of.length in (None, of.made) else f"{of.made:,} of {of.length:,}"
    text = f"{whole} instances are made"
    if of.worklist is not None and of.worklist.gate is not None:
        text = f"{whole} iterations are made, of at most {of.worklist.length_max:,}"
    if of.stopped_by is not None:
        length = "" if of.length is None else f" of {of.length:,}"
        text = f"stopped by {of.stopped_by} after {of.made:,}{length}"
    if any(state in UNFINISHED for state in of.counts):
        next_ = f"it ends with the last of them; {_look(facts)}"
        return Finding("instances", f"{text}: {_open_text(of)}; {_ended_text(of)}".removesuffix("; "), next_)
    again = "`headgate tasks clear` runs it again"
    if of.counts.get(_S.FAILED) or of.counts.get(_S.UPSTREAM_FAILED):
        again = (
            f"`{command('tasks', 'clear', facts.dag, facts.run_id, facts.task_id, '--only-failed')}` runs these again"
        )
    return Finding("ended", f"it waits for nothing: {text}, {counts_text(of.counts, None)}", f"nothing; {again}")


def unexpandable(facts: TaskFacts) -> Finding | None:
    """Return a finding if a task that failed could not be expanded."""
    error = facts.last_error
    if facts.map is None or not error or error.startswith(BY_USERS):
        return None
    ago = "" if facts.since_s is None else f" {span(facts.since_s)} ago"
    sources = sorted(_sources(facts)) or [facts.task_id]
    clear = f"`{command('tasks', 'clear', facts.dag, facts.run_id, *sources, '--downstream')}`"
    return Finding("unexpandable", f"it cannot be expanded{ago}: {shortened(error)}", f"mend the cause, then {clear}")


def known(facts: TaskFacts) -> list[tuple[str, str]]:
    """Return the facts about the instances, or about the place of an instance."""
    of = facts.map
    if of is None:
        return []
    told = [("group", of.group.name)] if of.group is not None else []
    is_loop = of.worklist is not None and of.worklist.gate is not None
    if of.worklist is not None and is_loop:
        index = f"{facts.map_index:,}, from 0, of" if facts.map_index >= 0 else ""
        told.append(("iteration", f"{index} at most {of.worklist.length_max:,}".strip()))
    elif of.worklist is not None:
        limit = of.worklist.length_max
        told.append(("worklist", f"{of.worklist.given:,} given, {of.worklist.appended:,} appended, at most {limit:,}"))
    if not facts.is_map:
        return told
    # Of how many is not known as long as there may be more.
    is_open = of.length is None and any(state in UNFINISHED for state in (facts.state, *of.counts))
    told.append(("instances", counts_text(of.counts, of.length) + (" so far" if is_open and of.counts else "")))
    return told if is_loop else [*told, ("window", f"{of.window:,}")]


# --- words ---------------------------------------------------------------------------------------


def _sources(facts: TaskFacts) -> frozenset[str]:
    return frozenset() if facts.map is None else frozenset(facts.map.sources)


def _expanded(of: MapFacts) -> str:
    if of.length is not None:
        return f"expanded {of.made:,} of {of.length:,}"
    if of.worklist is not None:
        given, appended = of.worklist.given, of.worklist.appended
        return f"expanded {of.made:,} of {given + appended:,} so far, of which {appended:,} are appended"
    return f"expanded {of.made:,}" + (f" of {of.emitted:,} that are emitted so far" if of.made < of.emitted else "")


def _open_indexes(group: GroupFacts) -> str:
    names = [f"{index:,}" for index in group.open]
    told = some([*names, *[""] * (group.open_count - len(names))])
    several = f"es {told}" if group.open_count > 1 else f" {told}"
    return f"the index{several} of the group {group.name} {'are' if group.open_count > 1 else 'is'} open"


def _with_states(tasks: Sequence[tuple[str, TaskState]]) -> str:
    return some([f"{name} ({state.value})" for name, state in tasks])


def _open_text(of: MapFacts) -> str:
    states = (_S.NONE, _S.SCHEDULED, _S.DEFERRED, _S.UP_FOR_RETRY, _S.RESTARTING, _S.RUNNING)
    told = [f"{of.counts[state]:,} {state.value}" for state in states if of.counts.get(state)]
    return ", ".join(told)


def _ended_text(of: MapFacts) -> str:
    ended = {state: count for state, count in of.counts.items() if state not in UNFINISHED}
    return counts_text(ended, None) if ended else ""


def _look(facts: TaskFacts) -> str:
    index = None if facts.map is None else facts.map.first_open
    group = None if facts.map is None else facts.map.group
    if group is not None and group.open:
        index = group.open[0]
        open_ = [name for name, state in group.at if state in UNFINISHED]
        if facts.is_map and open_:
            name = next((name for name in open_ if name == facts.task_id), open_[0])
            return (
                f"`{command('why', facts.dag, facts.run_id, f'{name}[{index}]')}` says what the first of them waits for"
            )
    if index is None:
        return f"`{command('tasks', 'list', facts.dag, facts.run_id, '--each')}` lists them"
    first = command("why", facts.dag, facts.run_id, f"{facts.task_id}[{index}]")
    return f"`{first}` says what the first of them waits for"
