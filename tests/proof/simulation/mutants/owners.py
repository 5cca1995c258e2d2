"""Deliberate bugs about the owners of triggers and of streams."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import null, true, update

from headgate.protocol.messages.runner import FinishedTrigger
from headgate.store.db.transaction import LeasedTx
from headgate.store.ids import Epoch
from headgate.store.tables import stream, trigger
from headgate.store.triggers import leases, streams
from headgate.store.triggers.leases import LeaseVerbs
from headgate.supervisor.triggers.assignment import AssignmentState
from headgate.supervisor.triggers.assignments import Assignments

Patch = tuple[Any, str, Any]


def drained_triggers_are_forgotten() -> Sequence[Patch]:
    original = Assignments.end_run

    def end_run(self: Assignments, finished: FinishedTrigger, now: float, strikes: int | None = None) -> float | None:
        assigned = self._assigned.get(finished.trigger_id)
        if assigned is not None and finished.outcome == "cancelled":
            assigned.state = AssignmentState.ENDING
        return original(self, finished, now, strikes)

    return [(Assignments, "end_run", end_run)]


def signing_off_ends_the_triggers() -> Sequence[Patch]:
    original = LeaseVerbs.release_triggerer

    def release_triggerer(self: LeaseVerbs, epoch: Epoch) -> None:
        with self.database.writing() as tx:
            mine = trigger.c.triggerer_id == epoch
            tx.connection.execute(update(trigger).where(mine).values(finished_at=tx.now))
        original(self, epoch)

    return [(LeaseVerbs, "release_triggerer", release_triggerer)]


def claims_a_trigger_without_its_stream() -> Sequence[Patch]:
    # The statements are kept from their first use on, so that those of the bug are made anew.
    return [
        (streams, "is_claimable_alone", true),
        (streams, "is_claimable", true),
        (leases, "_claim", cache(leases._claim.__wrapped__)),
        (leases, "_poll", cache(leases._poll.__wrapped__)),
    ]


def owner_is_not_checked_at_a_description() -> Sequence[Patch]:
    original = streams._locked_streams

    def locked_streams(*arguments: Any) -> Any:
        found = original(*arguments)
        for row in found.values():
            row.is_mine = True
        return found

    return [(streams, "_locked_streams", locked_streams)]


def takes_over_half_a_stream() -> Sequence[Patch]:
    original = streams._take

    def take(tx: LeasedTx, chosen: Sequence[int]) -> list[int]:
        claimed = sorted(original(tx, chosen))
        kept, left = claimed[: len(claimed) // 2], claimed[len(claimed) // 2 :]
        tx.connection.execute(update(stream).where(stream.c.id.in_(chosen)).values(triggerer_id=null()))
        tx.connection.execute(update(trigger).where(trigger.c.id.in_(left)).values(triggerer_id=null()))
        return kept

    return [(streams, "_take", take)]


def change_is_not_awaited() -> Sequence[Patch]:
    original = Assignments.change

    def change(self: Assignments, *arguments: Any) -> Any:
        parts = original(self, *arguments)
        return None if parts is None else (parts[0], None)

    return [(Assignments, "change", change)]


def change_is_read_and_forgotten() -> Sequence[Patch]:
    return [(Assignments, "change", lambda self, changed, now: None)]
