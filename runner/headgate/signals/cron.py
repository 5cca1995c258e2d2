"""Cron expressions, as the schedules of DAGs and the rules of periodic tasks have them.

They are parsed by cronsim, which does as Debian's cron does when the clocks of a time zone change.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim

CRON_FIELDS: Final = 5  # minute, hour, day of month, month, day of week
PRESETS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}


def read_cron(expression: str, timezone: str) -> str:
    """Return a cron expression of five fields, also for a preset. Raises ValueError if it never is in ``timezone``."""
    cron = PRESETS.get(expression, " ".join(expression.split()))
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
    return cron


def read_zone(name: str) -> ZoneInfo:
    """Return the IANA time zone of this name. Raises ValueError if this machine does not have it."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError, TypeError):
        raise ValueError(f"{name!r:.100} is not a time zone that this machine has") from None
