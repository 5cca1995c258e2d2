"""Which runs are created for events of assets, by the contract of the DAG that waits for them.

An event waits from the transaction that stores it until a run takes it. So the events of a run depend on the contract,
and not on the moment at which a scheduler looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import assert_never

import msgspec

from headgate.protocol.messages.dags import EVENTS_PER_RUN_MAX, AssetSchedule

PAYLOAD_BYTES_PER_RUN_MAX = 8 * 1024 * 1024  # of all its events together: they go to the worker in one frame of 16 MiB


class Backlog(msgspec.Struct, frozen=True):
    """The events that wait for one DAG: their number, the number of their assets, and when the first was stored."""

    events: int
    assets: int
    first_at: datetime


class Waiting(msgspec.Struct, frozen=True):
    """One event that waits; ``bytes`` are those of its payload."""

    event_id: int
    asset_id: int
    stored_at: datetime
    bytes: int


class AssetRun(msgspec.Struct, frozen=True):
    """A run to be created: its events, those that they supersede, and its run_id, which is made from the events."""

    run_id: str
    events: tuple[Waiting, ...]
    superseded: tuple[Waiting, ...] = ()


def is_ready(schedule: AssetSchedule, backlog: Backlog, now: datetime) -> bool:
    """Whether the waiting events are enough to create a run now."""
    match schedule.contract:
        case "all":
            return backlog.assets >= len(schedule.assets)
        case "each" | "latest":
            return backlog.events > 0
        case "batch":
            return backlog.events >= schedule.batch_count or _is_due(schedule, backlog.first_at, now)
        case _:
            assert_never(schedule.contract)


def rows_needed(schedule: AssetSchedule, room: int) -> int | None:
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


def runs_of(schedule: AssetSchedule, waiting: Sequence[Waiting], now: datetime, *, room: int) -> list[AssetRun]:
    """Return up to ``room`` runs to create. ``waiting`` is in order of ids; events that no run takes keep waiting."""
    match schedule.contract:
        case "all":
            return _all(len(schedule.assets), waiting)[:room]
        case "each":
            return [_run((event,)) for event in waiting[:room]]
        case "batch":
            return _batches(schedule, waiting, now, room)
        case "latest":
            return [_run(tuple(waiting[-1:]), tuple(waiting[:-1]))] if waiting and room else []
        case _:
            assert_never(schedule.contract)


def _run(events: tuple[Waiting, ...], superseded: tuple[Waiting, ...] = ()) -> AssetRun:
    return AssetRun(f"asset__{events[-1].event_id}", events, superseded)


def _all(assets: int, waiting: Sequence[Waiting]) -> list[AssetRun]:
    first: dict[int, Waiting] = {}
    for event in waiting:
        first.setdefault(event.asset_id, event)
    if len(first) < assets:
        return []
    # The first event of each asset in any case; then as many others as fit into one run, the oldest first.
    needed = set(first.values())
    others = [event for event in waiting if event not in needed]
    taken = _fitting([*first.values(), *others], at_least=len(needed))
    return [_run(tuple(sorted(taken, key=lambda event: event.event_id)))]


def _batches(schedule: AssetSchedule, waiting: Sequence[Waiting], now: datetime, room: int) -> list[AssetRun]:
    runs: list[AssetRun] = []
    left = list(waiting)
    while left and len(runs) < room:
        if len(left) < schedule.batch_count and not _is_due(schedule, min(event.stored_at for event in left), now):
            break
        taken = _fitting(left[: schedule.batch_count])
        runs.append(_run(tuple(taken)))
        left = left[len(taken) :]
    return runs


def _is_due(schedule: AssetSchedule, first_at: datetime, now: datetime) -> bool:
    return schedule.batch_seconds is not None and first_at + timedelta(seconds=schedule.batch_seconds) <= now


def _fitting(events: Sequence[Waiting], *, at_least: int = 1) -> Sequence[Waiting]:
    """Return as many of the first events as fit into one run, by their number and the bytes of their payloads."""
    total = 0
    for number, event in enumerate(events):
        total += event.bytes
        if number >= at_least and (number >= EVENTS_PER_RUN_MAX or total > PAYLOAD_BYTES_PER_RUN_MAX):
            return events[:number]
    return events
