"""run_trigger and triggers that do not end: they are given up, and cost no other test anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import trio
from tests.waiting import wait_until

from headgate.testing import Misbehaved, TooFewEvents, run_trigger
from headgate.testing import loop as trial_loop
from headgate.triggers.base import BaseTrigger, TriggerEvent


class _Plain(BaseTrigger):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {}


class OneKey(_Plain):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        for number in range(3):
            yield TriggerEvent(number, key="one")
        await trio.sleep_forever()


class Refused(_Plain):
    may_end, fired = False, 0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while not self.may_end:
            yield TriggerEvent(object())
            type(self).fired += 1


class Deaf(_Plain):
    may_end = False

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent()
        while not self.may_end:
            with suppress(trio.Cancelled):
                await trio.lowlevel.checkpoint()


def test_events_with_the_key_of_another_are_named_if_there_are_too_few() -> None:
    with pytest.raises(TooFewEvents, match=r"fired 1 of 2 events within .* \(2 more had the key of an earlier one"):
        run_trigger(OneKey(), events=2)


def test_one_that_goes_on_without_waiting_when_it_is_cancelled_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop has no moment at which time could be skipped, so real time limits it."""
    monkeypatch.setattr(trial_loop, "REAL_S_MAX", 0.5)
    try:
        with pytest.raises(Misbehaved, match=r"does not end when it is cancelled: not within 0\.5 s of real time"):
            run_trigger(Deaf(), events=1)
    finally:
        Deaf.may_end = True


def test_a_trigger_that_was_given_up_accuses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_loop, "REAL_S_MAX", 0.5)
    try:
        with pytest.raises(
            Misbehaved, match=r"not within 0\.5 s of real time; the last .* an event is refused: .*object"
        ):
            run_trigger(Refused())
        monkeypatch.undo()
        seen = Refused.fired
        assert run_trigger(OneKey(), events=1) == [TriggerEvent(0, key="one")]
        wait_until(lambda: Refused.fired > seen, "it still fires")
        assert run_trigger(OneKey(), events=1) == [TriggerEvent(0, key="one")]
    finally:
        Refused.may_end = True
