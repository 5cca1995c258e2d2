"""Which runs are created for events of assets, or for signals, by the contract of the DAG that waits for them.

An event waits from the transaction that stores it until a run takes it. So the events of a run depend on the contract,
and not on the moment at which a scheduler looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, assert_never

import msgspec

from headgate.protocol.messages.schedules import (
    EVENTS_PER_RUN_MAX,
    AssetSchedule,
    CronSchedule,
    EventSchedule,
    Schedule,
    SignalSchedule,
)
from headgate.scheduling.why import Answer, Supervisor, nobody_is_alive, passed_over
from headgate.scheduling.words import counted, moment

PAYLOAD_BYTES_PER_RUN_MAX = 8 * 1024 * 1024  # of all its events together: they go to the worker in one frame of 16 MiB


class Backlog(msgspec.Struct, frozen=True):
    """The events that wait for one DAG: their number, that of their assets or rules, and when the first was stored."""

    events: int
    sources: int
    first_at: datetime


class Waiting(msgspec.Struct, frozen=True):
    """One event of an asset, or signal that has met a rule, which waits; ``bytes`` are those of its payload."""

    event_id: int
    source_id: int
    stored_at: datetime
    bytes: int


class EventRun(msgspec.Struct, frozen=True):
    """A run to be created: its events, those that they supersede, and its run_id, which is made from the events."""

    run_id: str
    events: tuple[Waiting, ...]
    superseded: tuple[Waiting, ...] = ()


def is_ready(schedule: EventSchedule, backlog: Backlog, now: datetime) -> bool:
    """Whether the waiting events are enough to create a run now."""
    match schedule.contract:
        case "all":
            return backlog.sources >= schedule.sources
        case "each" | "latest":
            return backlog.events > 0
        case "batch":
            return backlog.events >= schedule.batch_count or _is_due(schedule, backlog.first_at, now)
        case _:
            assert_never(schedule.contract)


def rows_needed(schedule: EventSchedule, room: int) -> int | None:
    """Return how many of the oldest events are needed to create ``room`` runs; None if all are."""
    match schedule.contract:
        case "all" | "latest":
            return None
        case "each":
            return room
        case "batch":
            return room * schedule.batch_count
        case _:
            assert_never(schedule.contract)


def runs_of(schedule: EventSchedule, waiting: Sequence[Waiting], now: datetime, *, room: int) -> list[EventRun]:
    """Return up to ``room`` runs to create. ``waiting`` is in order of ids; events that no run takes keep waiting."""
    match schedule.contract:
        case "all":
            return _all(schedule, waiting)[:room]
        case "each":
            return [_run(schedule, (event,)) for event in waiting[:room]]
        case "batch":
            return _batches(schedule, waiting, now, room)
        case "latest":
            return [_run(schedule, tuple(waiting[-1:]), tuple(waiting[:-1]))] if waiting and room else []
        case _:
            assert_never(schedule.contract)


def _run(schedule: EventSchedule, events: tuple[Waiting, ...], superseded: tuple[Waiting, ...] = ()) -> EventRun:
    kind = "asset" if isinstance(schedule, AssetSchedule) else "signal"
    return EventRun(f"{kind}__{events[-1].event_id}", events, superseded)


def _all(schedule: EventSchedule, waiting: Sequence[Waiting]) -> list[EventRun]:
    first: dict[int, Waiting] = {}
    for event in waiting:
        first.setdefault(event.source_id, event)
    if len(first) < schedule.sources:
        return []
    # The first event of each source in any case; then as many others as fit into one run, the oldest first.
    needed = set(first.values())
    others = [event for event in waiting if event not in needed]
    taken = _fitting([*first.values(), *others], at_least=len(needed))
    return [_run(schedule, tuple(sorted(taken, key=lambda event: event.event_id)))]


def _batches(schedule: EventSchedule, waiting: Sequence[Waiting], now: datetime, room: int) -> list[EventRun]:
    runs: list[EventRun] = []
    left = list(waiting)
    while left and len(runs) < room:
        if len(left) < schedule.batch_count and not _is_due(schedule, min(event.stored_at for event in left), now):
            break
        taken = _fitting(left[: schedule.batch_count])
        runs.append(_run(schedule, tuple(taken)))
        left = left[len(taken) :]
    return runs


def _is_due(schedule: EventSchedule, first_at: datetime, now: datetime) -> bool:
    return schedule.batch_seconds is not None and first_at + timedelta(seconds=schedule.batch_seconds) <= now


def _fitting(events: Sequence[Waiting], *, at_least: int = 1) -> Sequence[Waiting]:
    """Return as many of the first events as fit into one run, by their number and the bytes of their payloads."""
    total = 0
    for number, event in enumerate(events):
        total += event.bytes
        if number >= at_least and (number >= EVENTS_PER_RUN_MAX or total > PAYLOAD_BYTES_PER_RUN_MAX):
            return events[:number]
    return events


# --- why there is no run -------------------------------------------------------------------------


class RulePlace(msgspec.Struct, frozen=True):
    """A rule about signals of a DAG, or of a run, which they end, as text.

    All up to ``seen_version`` of the ``last_version`` of its key were held against it. ``waiting`` signals that have
    met it have had no run yet.
    """

    rule: str
    seen_version: int
    last_version: int
    waiting: int = 0

    def __str__(self) -> str:
        waiting = f"; {counted(self.waiting, 'signal')} that met it waited for runs" if self.waiting else ""
        return f"{self.rule}; held against {self.seen_version:,} of {self.last_version:,} versions{waiting}"


class DagFacts(msgspec.Struct, frozen=True):
    """What decides when a DAG has its next run. ``schedule`` is its schedule as text, ``waits`` what waits for runs."""

    name: str
    schedule: str
    of: Schedule | None
    is_paused: bool
    active_runs: int
    active_runs_max: int
    next_run_in_s: float | None = None
    waits: int = 0
    first_age_s: float | None = None
    rules: tuple[RulePlace, ...] = ()


def explain_dag(facts: DagFacts, supervisors: Sequence[Supervisor]) -> Answer:
    """Say when a DAG has its next run, and what has to happen before; ``supervisors`` are those that make it."""
    kind = "signal" if isinstance(facts.of, SignalSchedule) else "event"
    waits = f"; {counted(facts.waits, kind)} waited for runs" if facts.waits else ""
    known = [("schedule", facts.schedule), *(("rule", str(place)) for place in facts.rules)]
    known.append(("active runs", f"{facts.active_runs:,} of {facts.active_runs_max:,}"))
    if facts.is_paused:
        found = ("paused", f"it is paused{waits}", f"`headgate dags unpause {facts.name}`")
    elif facts.active_runs >= facts.active_runs_max and facts.of is not None:
        text = f"it has as many active runs as it may have, {facts.active_runs_max:,}{waits}"
        found = ("active_runs", text, "its next run is created when one of them has ended")
    elif facts.of is None:
        found = ("by_hand", "it has no schedule", f"`headgate dags trigger {facts.name}` creates a run")
    elif isinstance(facts.of, CronSchedule):
        when = "it has no next run" if facts.next_run_in_s is None else f"its next run is {moment(facts.next_run_in_s)}"
        found = ("schedule", when, "the scheduler creates it then")
    elif not facts.waits:
        found = ("nothing", f"no {kind} waits for a run", f"{facts.schedule}: then there is one")
    else:
        found = ("contract", f"{counted(facts.waits, kind)} waited for a run of {facts.schedule}", _next_of(facts))
    impeded = passed_over([f"DAG {facts.name}"], supervisors)
    if (nobody := nobody_is_alive(supervisors, with_workers=True)) is not None:
        impeded.insert(0, nobody)
    if impeded and found[0] in ("schedule", "nothing", "contract"):  # it could have a run
        found = (impeded[0].reason, impeded[0].text, impeded[0].next)
    else:
        known += [("also", one.text) for one in impeded]
    return Answer(found[0], f"the DAG {facts.name}: {found[1]}", tuple(known), found[2])


def _next_of(facts: DagFacts) -> str:
    of = facts.of
    if isinstance(of, EVENTS) and of.contract == "batch":
        more = max(0, of.batch_count - facts.waits)
        late = ""
        if of.batch_seconds is not None and facts.first_age_s is not None:
            late = f", or {moment(of.batch_seconds - facts.first_age_s)}"
        return f"a run is created when {more:,} more have come{late}"
    if isinstance(of, SignalSchedule) and of.contract == "all":
        missing = [place.rule for place in facts.rules if not place.waiting]
        return f"a run is created when there is one of {'; and of '.join(missing)}" if missing else SOON
    if isinstance(of, AssetSchedule) and of.contract == "all":
        return "a run is created when each asset has had one"
    return SOON


SOON: Final = "a supervisor creates a run within a second"
EVENTS: Final = (AssetSchedule, SignalSchedule)
