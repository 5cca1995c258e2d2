"""What the rules of a task about signals do to it, from what has met them and the state in which it is (I29).

As one table; what is remembered acts when the task has ended:

============================  =========================  =========================  =====================
state                         START                      RESTART                    STOP
============================  =========================  =========================  =====================
none                          begins                     begins                     ends as stopped
scheduled, not resumed        is starting: joins it      is starting: joins it      ends as stopped
scheduled, resumed; running   remembered                 ended, begins anew         ended, as stopped
deferred                      remembered                 trigger ended, begins anew trigger ended, as stopped
up_for_retry                  begins its next try        begins its next try        ends as stopped
restarting                    remembered                 remembered                 remembered
ended                         begins anew                begins anew                nothing
============================  =========================  =========================  =====================

Of several the order is that in which their signals were sent, and of one signal that of the rules: a stop takes back
what was sent before it, necessary signals as well, whether the rest of them comes before or after it. With the overlap
``ignore`` a start is forgotten where it would be remembered; with ``each`` none joins another, and none begins the next
try of one before it. While the DAG is paused nothing begins, and what would begin is remembered; in a run that is to
end nothing begins at all. A stop acts there as well, whatever start comes behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.rules import (
    STARTING,
    Action,
    ClockRule,
    CronRule,
    Overlap,
    Rule,
    Rules,
    SignalRule,
    TaskRule,
    rule_name,
)
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE, Predicate
from headgate.scheduling.states import TERMINAL

# When a signal was sent, and its id, 0 for what is no signal; and the place of its rule among those of the task.
Moment: TypeAlias = tuple[datetime, int, int]
BY_HAND_PLACE = -1
# ``begin``: it starts, from whatever state it is in that is not under way. ``end_and_begin``: its worker, or its
# trigger, is ended, and it starts as soon as that is gone. ``join``: it is starting anyway. ``stop``: it ends as
# stopped. ``drop``: nothing is to be done. ``wait``: nothing yet.
Act: TypeAlias = Literal["begin", "end_and_begin", "join", "stop", "drop", "wait"]

ALIVE = frozenset({TaskState.SCHEDULED, TaskState.RUNNING, TaskState.DEFERRED})


class Met(NamedTuple):
    """What is asked for: an action, when, and by which rules."""

    action: Action
    at: Moment
    rules: frozenset[str] = frozenset()


class Decided(NamedTuple):
    """What users' code has decided about a rule: an action; and when, if that is a start, it has decided a stop before.

    That stop has not acted either.
    """

    action: Action
    stopped_at: Moment | None = None


class Wanted(NamedTuple):
    """What all of that comes to: whether the task is to start, and whether what runs of it is to end before."""

    starts: bool
    ends: bool


def asked(
    rules: Rules | None,
    met: Mapping[str, Moment],
    by_hand: Iterable[Met],
    *,
    is_ready: bool,
    decided: Mapping[str, Decided] | None = None,
) -> list[Met]:
    """Return what the rules of a task ask for that were met, by their names, and what users do, in order.

    Necessary ones ask together, once all are met, if the trigger rule ``is_ready``. In place of the action of a rule is
    what users' code has ``decided``, if it has, behind the stop that it has decided before.
    """
    found = list(by_hand)
    if rules is not None:
        named = {rule_name(rule): rule for rule in rules.rules}
        enough = {name: rule for name, rule in named.items() if name in met and rule.condition == "sufficient"}
        does: Mapping[str, Decided] = {} if decided is None else decided
        for name, rule in enough.items():
            of = does.get(name, Decided(rule.action))
            if of.stopped_at is not None:
                found.append(Met("STOP", of.stopped_at, frozenset({name})))
            found.append(Met(of.action, met[name], frozenset({name})))
        necessary = {name: rule for name, rule in named.items() if rule.condition == "necessary"}
        if necessary and is_ready and necessary.keys() <= met.keys():
            is_restart = any(rule.action == "RESTART" for rule in necessary.values())
            moments = [met[name] for name in necessary]
            if not any(min(moments) < one.at < max(moments) for one in found if one.action == "STOP"):
                found.append(Met("RESTART" if is_restart else "START", max(moments), frozenset(necessary)))
    return sorted((one for one in found if one.action != "NONE"), key=lambda one: one.at)


def wanted(asked_for: Iterable[Met]) -> Wanted | None:
    """Return what several requests come to, in their order; None without any."""
    result: Wanted | None = None
    for one in asked_for:
        if one.action in STARTING:
            ends = one.action == "RESTART" or (result is not None and result.ends)
            result = Wanted(starts=True, ends=ends)
        else:
            result = Wanted(starts=False, ends=True)
    return result


def to_last_stop(asked_for: Sequence[Met]) -> Sequence[Met]:
    """Return the requests up to the last stop, which takes back those before it; none if there is no stop."""
    stops = [at for at, one in enumerate(asked_for) if one.action not in STARTING]
    return asked_for[: stops[-1] + 1] if stops else ()


def put_off(asked_for: Sequence[Met], overlap: Overlap) -> frozenset[str]:
    """Return the rules that are for a later start than the next one of a task: with ``each`` all but the first.

    A restart is one start with all that was asked for before it, and of what comes after a stop the first is the next.
    """
    if overlap != "each":
        return frozenset()
    ends = max((at for at, one in enumerate(asked_for) if one.action != "START"), default=-1)
    first = ends if ends >= 0 and asked_for[ends].action == "RESTART" else ends + 1
    return frozenset[str]().union(*(one.rules for one in asked_for[first + 1 :]))


def act(want: Wanted, state: TaskState, *, is_resumed: bool, may_start: bool, overlap: Overlap) -> Act:
    """Return what becomes of a task, by the table of this module."""
    if state is TaskState.REMOVED:
        return "drop"
    if state is TaskState.RESTARTING:
        return "wait"
    if not want.starts:
        return "drop" if state in TERMINAL else "stop"
    if not may_start:
        return "wait"
    is_starting = state is TaskState.SCHEDULED and not is_resumed
    if is_starting and overlap != "each":
        return "join"
    if state is TaskState.UP_FOR_RETRY and overlap == "each" and not want.ends:
        return "wait"  # its next try is of the start before
    if state not in ALIVE:
        return "begin"
    if want.ends:
        return "end_and_begin"
    return "drop" if overlap == "ignore" else "wait"


class Decision(NamedTuple):
    """What a version does that has met a rule; ``at``: when it was sent, and its id.

    ``stopped_at`` is the same of the last version before it that is a stop, and acts with it.
    """

    action: Action
    at: tuple[datetime, int]
    version: int
    value: bytes
    stopped_at: tuple[datetime, int] | None = None


def together(decisions: Sequence[Decision]) -> Decision | None:
    """Return what the decisions about the versions of one key come to, in order: one, with the version that says so.

    It does what all of them did one after the other (`wanted`): a stop takes back the starts before it, and a start
    behind a restart is a restart. One behind a stop remembers that: it may have to wait, and a stop never does. A
    version that does nothing stands for those before that do nothing.
    """
    result: Decision | None = None
    for one in decisions:
        if result is None or result.action == "NONE" or one.action == "STOP":
            result = one
        elif one.action != "NONE":
            action = "RESTART" if result.action == "RESTART" else one.action
            stopped_at = result.at if result.action == "STOP" else result.stopped_at
            result = one._replace(action=action, stopped_at=stopped_at)
    return result


# --- words ---------------------------------------------------------------------------------------

_OPERAND_CHARS_SHOWN = 60


def key_text(rule: SignalRule) -> str:
    """Return the key of a rule, and its namespace if that is not the usual one."""
    return repr(rule.key) + ("" if rule.namespace == DEFAULT_NAMESPACE else f" of {rule.namespace!r}")


def rule_text(rule: Rule) -> str:
    """Return a rule as text: ``'epoch', at_least 2``, or ``the end of ingest as failed``."""
    if isinstance(rule, ClockRule):
        return f"every {rule.every_s:g} s"
    if isinstance(rule, CronRule):
        return f"the times of {rule.cron!r} in {rule.timezone}"
    if isinstance(rule, TaskRule):
        return f"the end of {rule.task_id}" + ("" if rule.state is None else f" as {rule.state}")
    return key_text(rule) if rule.predicate is None else f"{key_text(rule)}, {predicate_text(rule.predicate)}"


def predicate_text(predicate: Predicate) -> str:
    """Return a predicate as text: ``loss below 0.1``, or ``at_least 2`` if it is about the whole value."""
    of = f"{'.'.join(predicate.path)} " if predicate.path else ""
    operand = predicate.operand.decode(errors="replace")
    shown = operand if len(operand) <= _OPERAND_CHARS_SHOWN else f"{operand[:_OPERAND_CHARS_SHOWN]}..."
    return f"{of}{predicate.test} {shown}"
