"""What has gone wrong in the scheduler as nobody foresaw, and waits, so that all else goes on.

If a verb says which run, task, rule or DAG it was (`ItemFailed`), that one is passed over for a while, and the duty is
run again at once without it. If it does not say so, the duty waits. In either case it is tried again and again, less
and less often: a cause that is gone, a row that was changed by hand, costs no restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import structlog

from headgate.store.errors import ItemFailed, StoreError, described
from headgate.store.scheduling_verbs import SchedulingVerbs
from headgate.supervisor.backoff import Waits

log = structlog.get_logger(__name__)

WAIT_S = 5.0  # after the first failure of one; it doubles with each
WAIT_MAX_S = 300.0
ITEMS_MAX = 1000  # that are passed over at a time; if there are more the duty waits
TOLD_CHARS_MAX = 300  # of an error


@dataclass
class _Fault:
    """A failure: ``name`` is what it was, ``error`` why, ``until`` when it is tried again."""

    name: str
    error: str
    until: float
    failures: int = 1
    is_over: bool = False  # it is tried again, or was, and has not failed since


class Faults:
    """The faults of one scheduler. Times are those of the caller's monotonic clock."""

    def __init__(self, store: SchedulingVerbs) -> None:
        self._store = store
        self._waits = Waits(WAIT_S, WAIT_MAX_S)
        self._found: dict[tuple[str, int | str], _Fault] = {}
        self._look_at = math.inf

    def pass_over(self, failed: ItemFailed, now: float) -> bool:
        """Have the verbs pass over the one that has failed; return whether they do, because there is room."""
        if (failed.kind, failed.id) not in self._found and len(self._found) >= ITEMS_MAX:
            return False
        fault = self._note((failed.kind, failed.id), self._name_of(failed), failed.reason, now)
        self._store.passed_over.add(failed.kind, failed.id)
        log.error(
            "the scheduler passes over one that has failed, for a while; the others go on",
            which=fault.name,
            failures=fault.failures,
            again_in_s=round(fault.until - now, 1),
            exc_info=failed.__cause__,
        )
        return True

    def duty_failed(self, duty: str, error: Exception, now: float) -> float:
        """Note that a duty has failed as a whole; return when it is to be run again."""
        fault = self._note(("duty", duty), f"duty {duty!r}", described(error), now)
        log.error(
            "a duty of the scheduler has failed; the others go on",
            duty=duty,
            failures=fault.failures,
            again_in_s=round(fault.until - now, 1),
            exc_info=None if isinstance(error, StoreError) else error,  # behind that is the driver's, with rows
        )
        return fault.until

    def duty_succeeded(self, duty: str) -> None:
        """Note that a duty has been run."""
        self._found.pop(("duty", duty), None)

    def step(self, now: float) -> None:
        """Have those handled again that have been passed over for long enough."""
        if now < self._look_at:
            return
        for key, fault in list(self._found.items()):
            kind, id_ = key
            if isinstance(id_, str):
                continue  # the duty itself knows when
            if now >= fault.until and not fault.is_over:
                fault.is_over = True
                self._store.passed_over.remove(kind, id_)
            elif now >= fault.until + WAIT_MAX_S:
                del self._found[key]  # it has not failed for so long
        self._look()

    def told(self) -> list[tuple[str, str]]:
        """Return which ones wait, and why."""
        return [(fault.name, fault.error[:TOLD_CHARS_MAX]) for fault in self._found.values() if not fault.is_over]

    def _note(self, key: tuple[str, int | str], name: str, error: str, now: float) -> _Fault:
        before = self._found.pop(key, None)
        failures = 1 if before is None else before.failures + 1
        fault = self._found[key] = _Fault(name, error, now + self._waits.after(failures), failures)
        self._look()
        return fault

    def _look(self) -> None:
        times = [fault.until + WAIT_MAX_S * fault.is_over for fault in self._found.values()]
        self._look_at = min(times, default=math.inf)

    def _name_of(self, failed: ItemFailed) -> str:
        try:
            return self._store.name_of(failed.kind, failed.id)
        except Exception:  # the database is away, or what the name is read from cannot be read either
            return f"{failed.kind} {failed.id}"
