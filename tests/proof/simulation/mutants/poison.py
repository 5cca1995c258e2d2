"""Deliberate bugs about messages that a trigger cannot take, and about triggers that failed or are held."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as count_up
from typing import Any

from headgate.protocol.messages.runner import AbsentSubscriber
from headgate.runner.host import Host
from headgate.runner.letters import PassedOver
from headgate.runner.trigger_run import Ending
from headgate.store.triggers import strikes
from headgate.streams.ledger import SeqTable, Share
from headgate.streams.manager import SharedStreamManager
from headgate.supervisor.triggers.assignments import Assignments

Patch = tuple[Any, str, Any]


def strike_not_stored() -> Sequence[Patch]:
    return [(strikes, "count", lambda tx, failures: {})]


def strikes_of_repeated_reports() -> Sequence[Patch]:
    original, numbers = strikes.count, count_up()

    def count(tx: Any, failures: Sequence[strikes.Failure]) -> Any:
        return original(tx, [failure._replace(run_id=f"{failure.run_id} {next(numbers)}") for failure in failures])

    return [(strikes, "count", count)]


def no_brake() -> Sequence[Patch]:
    return [(strikes, "_brake", lambda tx, failure: "")]


def passing_over_resets_nothing() -> Sequence[Patch]:
    original = Assignments.pass_over

    def pass_over(self: Assignments, trigger_id: int, key: str) -> None:
        failures = self._assigned[trigger_id].failures if trigger_id in self._assigned else 0
        original(self, trigger_id, key)
        if trigger_id in self._assigned:
            self._assigned[trigger_id].failures = failures

    return [(Assignments, "pass_over", pass_over)]


def _confirmed_at_once(*, is_reported: bool) -> Sequence[Patch]:
    assign, report = SeqTable.assign, PassedOver.report
    tables: list[SeqTable] = []

    def assign_and_note(self: SeqTable, share: Share) -> int:
        tables[:] = [self]
        return assign(self, share)

    def report_and_confirm(
        self: PassedOver, raw_event: Any, key: str | None, seq: int | None, *, rejection: str | None = None
    ) -> None:
        if is_reported:
            report(self, raw_event, key, seq, rejection=rejection)
        tables[0].confirm([] if seq is None else [seq])

    return [(SeqTable, "assign", assign_and_note), (PassedOver, "report", report_and_confirm)]


def passed_over_without_a_letter() -> Sequence[Patch]:
    return _confirmed_at_once(is_reported=False)


def letter_confirmed_before_it_is_stored() -> Sequence[Patch]:
    return _confirmed_at_once(is_reported=True)


def passed_over_forgotten_at_respawn() -> Sequence[Patch]:
    original = Assignments.hand_over

    def hand_over(self: Assignments, now: float, *arguments: Any) -> None:
        original(self, now, *arguments)
        for assigned in self._assigned.values():
            assigned.passed_over = ()

    return [(Assignments, "hand_over", hand_over)]


def no_absent_subscriber_is_awaited() -> Sequence[Patch]:
    def expect_absent(self: Host, absent: tuple[AbsentSubscriber, ...]) -> None:
        pass

    return [(Host, "expect_absent", expect_absent)]


def no_rejoin_is_awaited() -> Sequence[Patch]:
    def expect_rejoin(self: SharedStreamManager, *, trigger_id: int, key: Any) -> None:
        pass

    return [(SharedStreamManager, "expect_rejoin", expect_rejoin)]


def cut_short_counts_as_done() -> Sequence[Patch]:
    return [(Ending, "is_done", property(lambda self: True))]
