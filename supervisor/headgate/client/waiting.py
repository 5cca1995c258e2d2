"""Waiting for new events without asking the database again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from headgate.store.db.changes import News
from headgate.store.db.transaction import Database

# A reader is woken by new events. It looks by itself, too, because a notification may be missing: supervisors notice a
# new reader with a delay, a slice may be in flight meanwhile, and a connection pool passes on none. Then ever more
# rarely, so that a hundred idle readers do not make one statement in a second.
CHECKS_S = (2.0, 10.0, 60.0, 600.0)
HELD_UP_CHECK_S = 1.0  # while a removed trigger still has an owner: nobody reports that it has none any more


class Page(Protocol):
    """What was found by one look: events or signals, perhaps none."""

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing new."""
        ...

    @property
    def is_held_up(self) -> bool:
        """Whether nobody reports when there is something new."""
        ...

    def concerns(self, of: int, /) -> bool:
        """Whether news of this trigger, or key, may belong to the next page."""
        ...


Found = TypeVar("Found", bound=Page)


def check_seconds(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless a value is a number of seconds, or None: without end."""
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds, not {value!r:.100}")
    if not value >= 0:  # NaN is not
        raise ValueError(f"{name} must be 0 or more seconds, not {value!r:.100}")


def wait_for_page(
    database: Database, look: Callable[[], Found], timeout_s: float | None, news: News = "events"
) -> Found:
    """Return the page that ``look`` reads, as soon as it is not empty, or after ``timeout_s`` seconds."""
    ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
    checks = 0
    while True:
        if database.listen_for(news):  # before it is looked, so that nothing falls in between
            checks = 0
        page = look()
        left = ends_at - time.monotonic()
        if not page.is_empty or left <= 0:
            return page
        check_s = min(CHECKS_S[checks], HELD_UP_CHECK_S if page.is_held_up else math.inf)
        if not database.wait_for(news, min(left, check_s), page.concerns):
            checks = min(checks + 1, len(CHECKS_S) - 1)
