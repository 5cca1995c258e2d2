"""Deliberate bugs in the redrive of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headgate.protocol.messages.runner import Redelivery
from headgate.runner.host import Host
from headgate.store.triggers import redrives as verbs
from headgate.store.triggers.redrives import RedriveVerbs
from headgate.streams.contract import AdvanceOutcome
from headgate.supervisor.triggers.redrives import Redrives

Patch = tuple[Any, str, Any]


def handled_when_it_is_given() -> Sequence[Patch]:
    original = Host.redeliver

    def redeliver(self: Host, redelivery: Redelivery) -> None:
        original(self, redelivery)
        self._end_redelivery(redelivery, "handled")

    return [(Host, "redeliver", redeliver), (Host, "_settle", lambda self, redelivery, outcome: None)]


def rejected_counts_as_handled() -> Sequence[Patch]:
    def settle(self: Host, redelivery: Redelivery, outcome: AdvanceOutcome) -> None:
        if not outcome.failed:
            self._end_redelivery(redelivery, "handled")

    return [(Host, "_settle", settle)]


def failed_counts_as_handled() -> Sequence[Patch]:
    def settle(self: Host, redelivery: Redelivery, outcome: AdvanceOutcome) -> None:
        self._end_redelivery(redelivery, "rejected" if outcome.rejected else "handled")

    def keep_redriving(*arguments: Any) -> None:
        """The letter stays on its way, until its end is reported."""

    return [(Host, "_settle", settle), (verbs, "failed", keep_redriving)]


def failure_opens_no_letter() -> Sequence[Patch]:
    return [(verbs, "failed", lambda *arguments: None)]


def given_to_one_run_only() -> Sequence[Patch]:
    original = Redrives._is_due

    def is_due(self: Redrives, trigger_id: int) -> bool:
        redriven = self._of[trigger_id]
        run_id = self._assignments.run_of(trigger_id)
        is_another = redriven.trigger_run_id not in ("", run_id)
        return original(self, trigger_id) and not is_another

    return [(Redrives, "_is_due", is_due)]


def key_is_lost() -> Sequence[Patch]:
    original = RedriveVerbs.redriving_letters

    def redriving_letters(self: RedriveVerbs, *arguments: Any, **which: Any) -> Any:
        found = original(self, *arguments, **which)
        return [msgspec.structs.replace(letter, key=f"again {letter.key}") for letter in found]

    return [(RedriveVerbs, "redriving_letters", redriving_letters)]
