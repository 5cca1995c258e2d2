"""The schedules of DAGs, as authors write them, and their form for the scheduler.

The stream of a task has the same words for the events of its trigger (`headgate.tasks.streaming`), without assets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from headgate.protocol.messages.schedules import AssetSchedule, CronSchedule, RunContract, SignalSchedule, asset_problem
from headgate.protocol.messages.schedules import Schedule as ScheduleSpec
from headgate.signals.cron import read_cron
from headgate.signals.rules import OnSignal


@dataclass(frozen=True, slots=True)
class Asset:
    """Something outside headgate whose events can start a DAG. Raises ValueError for a bad ``uri``."""

    uri: str

    def __post_init__(self) -> None:
        if not isinstance(self.uri, str):
            raise TypeError(f"the uri of an asset must be a str, not {type(self.uri).__name__}")
        if (problem := asset_problem(self.uri)) is not None:
            raise ValueError(f"the uri {problem}")

    def __or__(self, other: object) -> NoReturn:
        raise TypeError("assets are not joined with |: Each([a, b]) is a run for each event of either")

    def __and__(self, other: object) -> NoReturn:
        raise TypeError("assets are not joined with &: [a, b] is a run when each of them has had an event")


Assets: TypeAlias = Asset | Sequence[Asset] | OnSignal | Sequence[OnSignal]


@dataclass(frozen=True, slots=True)
class Each:
    """A run for each event of these assets, or signal of these `OnSignal`; in a stream, a step for each event."""

    assets: Assets | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A run for every ``count`` events of these assets, or for fewer if ``seconds`` have passed since the first.

    Or signals, of these `OnSignal`. In a stream, a step for as many.
    """

    assets: Assets | None = None
    count: int | None = None  # always to be given; None only because ``assets`` may be left out
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Latest:
    """A run for the newest event of these assets; older events that wait are superseded, and recorded with the run.

    Or for the newest signal of these `OnSignal`. In a stream, a step for the newest event.
    """

    assets: Assets | None = None


Schedule: TypeAlias = str | Assets | Each | Batch | Latest | None


def read_schedule(schedule: Schedule, timezone: str) -> ScheduleSpec | None:
    """Return the schedule in its form for the scheduler. Raises TypeError and ValueError, which name the value."""
    if schedule is None:
        return None
    if isinstance(schedule, str):
        return CronSchedule(read_cron(schedule, timezone), timezone)
    match schedule:
        case Each(assets):
            return _of_events(assets, "Each", "each")
        case Latest(assets):
            return _of_events(assets, "Latest", "latest")
        case Batch(assets):
            return _of_events(assets, "Batch", "batch", *batch_limits(schedule))
        case OnSignal():
            return _of_events(schedule, "schedule", "each")
        case _:
            return _of_events(schedule, "schedule", "all")


def _of_events(
    given: object, what: str, contract: RunContract, count: int = 0, seconds: float | None = None
) -> AssetSchedule | SignalSchedule:
    sources = [given] if isinstance(given, Asset | OnSignal) else given
    if isinstance(sources, Sequence) and not isinstance(sources, str):
        signals = [one for one in sources if isinstance(one, OnSignal)]
        assets = [one for one in sources if isinstance(one, Asset)]
        if signals and assets:
            raise ValueError(f"{what} has assets and signals: have a watcher send its events as signals (--signal)")
        if len(signals) == len(sources) > 0:
            return SignalSchedule(tuple(one.to_rule() for one in signals), contract, count, seconds)
        if len(assets) == len(sources):
            return AssetSchedule(tuple(asset.uri for asset in assets), contract, count, seconds)
    expected = "None, a cron expression, assets or OnSignal" if what == "schedule" else "assets"
    raise ValueError(f"{what} must be {expected}, not {given!r:.100}")


def batch_limits(batch: Batch) -> tuple[int, float | None]:
    """Return the count and the seconds of a batch. Raises ValueError for anything but numbers."""
    count, seconds = batch.count, batch.seconds
    if not isinstance(count, int) or isinstance(count, bool):
        raise ValueError(f"the count of a Batch must be an int, not {count!r:.100}")
    if seconds is not None and (not isinstance(seconds, int | float) or isinstance(seconds, bool)):
        raise ValueError(f"the seconds of a Batch must be a number or None, not {seconds!r:.100}")
    return count, None if seconds is None else float(seconds)
