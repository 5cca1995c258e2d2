"""Waiting for new events without asking the database again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from headgate.store.consuming.reading import Page
from headgate.store.db.transaction import Database

# A reader is woken by new events. It looks by itself, too, because a notification may be missing: supervisors notice a
# new reader with a delay, a slice may be in flight meanwhile, and a connection pool passes on none. Then ever more
# rarely, so that a hundred idle readers do not make one statement in a second.
CHECKS_S = (2.0, 10.0, 60.0, 600.0)
HELD_UP_CHECK_S = 1.0  # while a removed trigger still has an owner: nobody reports that it has none any more


def wait_for_page(database: Database, look: Callable[[], Page], timeout_s: float | None) -> Page:
    """Return the page that ``look`` reads, as soon as it has events, or after ``timeout_s`` seconds without any."""
    ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
    checks = 0
    while True:
        if database.listen_for_events():  # before it is looked, so that nothing falls in between
            checks = 0
        page = look()
        left = ends_at - time.monotonic()
        if page.events or left <= 0:
            return page
        check_s = min(CHECKS_S[checks], HELD_UP_CHECK_S if page.is_held_up else math.inf)
        if not database.wait_for_events(min(left, check_s), page.concerns):
            checks = min(checks + 1, len(CHECKS_S) - 1)
