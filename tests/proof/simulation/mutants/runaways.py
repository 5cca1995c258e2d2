"""Deliberate bugs about the end of a runner: what counts after it, whom it is blamed on, what it costs the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headgate.protocol.messages.runner import AbsentSubscriber
from headgate.supervisor.runner_lifecycle import RunnerLifecycle, RunnerState
from headgate.supervisor.triggers.assignments import Assignments
from headgate.supervisor.triggers.blame import Blame
from headgate.supervisor.triggers.intake import Intake, Slice, Tally
from headgate.supervisor.triggers.suspects import Suspects, Verdict

Patch = tuple[Any, str, Any]


def confirmations_kept_across_incarnations() -> Sequence[Patch]:
    def is_listening(self: RunnerLifecycle, incarnation: int) -> bool:
        return self.state in (RunnerState.RUNNING, RunnerState.DRAINING)

    return [(RunnerLifecycle, "is_listening", is_listening)]


def half_a_round_is_kept() -> Sequence[Patch]:
    original = Intake._tally_of

    def tally_of(self: Intake, slice_: Slice) -> Tally:
        left_over = [self._tallies.pop(key) for key in list(self._tallies) if key != (slice_.incarnation, slice_.round)]
        tally = original(self, slice_)
        for other in left_over:
            tally.persisted.extend(other.persisted)
        return tally

    return [(Intake, "_tally_of", tally_of)]


def no_quarantine() -> Sequence[Patch]:
    original = Suspects.harmed

    def harmed(self: Suspects, trigger_id: int, key: str | None, now: float) -> Verdict:
        return original(self, trigger_id, key, now)._replace(is_quarantined=False)

    return [(Suspects, "harmed", harmed)]


def held_back_is_not_awaited() -> Sequence[Patch]:
    original = Assignments.absent

    def absent(self: Assignments, *arguments: Any) -> tuple[AbsentSubscriber, ...]:
        return tuple(one for one in original(self, *arguments) if one.trigger_id in self._held)

    return [(Assignments, "absent", absent)]


def respawn_slows_down_though_a_culprit_is_named() -> Sequence[Patch]:
    original = RunnerLifecycle.ended

    def ended(self: RunnerLifecycle, explanation: str, now: float, *, is_explained: bool = False) -> None:
        original(self, explanation, now)

    return [(RunnerLifecycle, "ended", ended)]


def box_of_an_earlier_incarnation_is_believed() -> Sequence[Patch]:
    def trigger_of_run(self: Assignments, trigger_run_id: str) -> int | None:
        trigger_id = int(trigger_run_id.split(".")[2])
        return trigger_id if trigger_id in self._assigned else None

    return [(Assignments, "trigger_of_run", trigger_of_run)]


def search_waits_for_a_start() -> Sequence[Patch]:
    original = Blame.started
    starts: dict[Blame, int] = {}

    def started(self: Blame, now: float) -> None:
        if starts.get(self) != self._assignments._starts:
            starts[self] = self._assignments._starts
            original(self, now)

    return [(Blame, "started", started)]
