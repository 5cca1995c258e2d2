"""The schedules of DAGs, as authors write them, and their form for the scheduler.

The stream of a task has the same words for the events of its trigger (`headgate.tasks.streaming`), without assets.

Cron expressions are parsed by cronsim, which does as Debian's cron does when the clocks of a time zone change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NoReturn, TypeAlias
from zoneinfo import ZoneInfo

from cronsim import CronSim

from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, asset_problem

CRON_FIELDS: Final = 5  # minute, hour, day of month, month, day of week
PRESETS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}


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


Assets: TypeAlias = Asset | Sequence[Asset]


@dataclass(frozen=True, slots=True)
class Each:
    """A run for each event of these assets; in a stream, a step for each event."""

    assets: Assets | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A run for every ``count`` events of these assets, or for fewer if ``seconds`` have passed since the first.

    In a stream, a step for as many.
    """

    assets: Assets | None = None
    count: int | None = None  # always to be given; None only because ``assets`` may be left out
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Latest:
    """A run for the newest event of these assets; older events that wait are superseded, and recorded with the run.

    In a stream, a step for the newest event.
    """

    assets: Assets | None = None


Schedule: TypeAlias = str | Asset | Sequence[Asset] | Each | Batch | Latest | None


def read_schedule(schedule: Schedule, timezone: str) -> CronSchedule | AssetSchedule | None:
    """Return the schedule in its form for the scheduler. Raises ValueError, which names the value."""
    if schedule is None:
        return None
    if isinstance(schedule, str):
        cron = PRESETS.get(schedule, " ".join(schedule.split()))
        check_cron(cron, timezone)
        return CronSchedule(cron, timezone)
    match schedule:
        case Each(assets):
            return AssetSchedule(_uris(assets, "Each"), "each")
        case Latest(assets):
            return AssetSchedule(_uris(assets, "Latest"), "latest")
        case Batch(assets):
            return AssetSchedule(_uris(assets, "Batch"), "batch", *batch_limits(schedule))
        case _:
            return AssetSchedule(_uris(schedule, "schedule"))


def batch_limits(batch: Batch) -> tuple[int, float | None]:
    """Return the count and the seconds of a batch. Raises ValueError for anything but numbers."""
    count, seconds = batch.count, batch.seconds
    if not isinstance(count, int) or isinstance(count, bool):
        raise ValueError(f"the count of a Batch must be an int, not {count!r:.100}")
    if seconds is not None and (not isinstance(seconds, int | float) or isinstance(seconds, bool)):
        raise ValueError(f"the seconds of a Batch must be a number or None, not {seconds!r:.100}")
    return count, None if seconds is None else float(seconds)


def _uris(given: object, what: str) -> tuple[str, ...]:
    assets = [given] if isinstance(given, Asset) else given
    if not isinstance(assets, Sequence) or not all(isinstance(asset, Asset) for asset in assets):
        expected = "None, a cron expression or assets" if what == "schedule" else "assets"
        raise ValueError(f"{what} must be {expected}, not {given!r:.100}")
    return tuple(asset.uri for asset in assets)


def check_cron(cron: str, timezone: str) -> None:
    """Raise ValueError unless ``cron`` is an expression of five fields that matches a time in ``timezone``."""
    fields = len(cron.split())
    if fields != CRON_FIELDS:
        presets = "" if not cron.startswith("@") else f"; the presets are {', '.join(PRESETS)}"
        raise ValueError(f"the cron expression {cron!r:.100} must have {CRON_FIELDS} fields, not {fields}{presets}")
    begin = datetime(2000, 1, 1, tzinfo=read_zone(timezone))
    try:
        next(CronSim(cron, begin))
    except StopIteration:
        raise ValueError(f"the cron expression {cron!r} never matches") from None
    except Exception as error:
        # The library has assertions for some errors.
        raise ValueError(f"{cron!r:.100} is not a cron expression: {str(error) or type(error).__name__}") from None


def read_zone(name: str) -> ZoneInfo:
    """Return the IANA time zone of this name. Raises ValueError if this machine does not have it."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError, TypeError):
        raise ValueError(f"{name!r:.100} is not a time zone that this machine has") from None
