"""The base class of triggers: the parts that need no runner."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headgate.protocol.values import encode_value
from headgate.triggers.base import BaseTrigger, TriggerEvent
from headgate.triggers.encoding import TriggerNotStorable, encode_trigger
from headgate.triggers.temporal import DateTimeTrigger, TimeDeltaTrigger

DATE_TIME = "headgate.triggers.temporal.DateTimeTrigger"


class Waiting(BaseTrigger):
    """Waits for nothing."""

    kwargs: dict[Any, Any] = {}  # noqa: RUF012 - replaced, never changed

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "users.Waiting", self.kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent()


def test_a_trigger_has_the_logger_of_its_class() -> None:
    assert Waiting().log is logging.getLogger(f"{__name__}.Waiting")


def test_a_log_of_the_author_s_own_takes_its_place() -> None:
    trigger = Waiting()
    trigger.log = own = logging.getLogger("own")
    assert trigger.log is own


@pytest.mark.parametrize("key", [1, None, b"path", ("a",)])
def test_a_name_of_an_argument_that_is_no_text_is_refused_where_the_trigger_is_made(key: Any) -> None:
    trigger = Waiting()
    trigger.kwargs = {"path": 1, key: 2}
    with pytest.raises(TriggerNotStorable, match=r"Waiting kwargs\[.*\] is no argument: its name must be a str"):
        encode_trigger(trigger)


class AtNoon(DateTimeTrigger):
    """Says that it is stored as its base, of which it has other arguments."""

    def __init__(self, day: int) -> None:
        super().__init__(datetime(2026, 1, day, 12, tzinfo=UTC))
        self.day = day

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return DATE_TIME, {"day": self.day}


class InFiveMinutes(TimeDeltaTrigger):
    """Is stored as a trigger that waits for the same moment, as its base is."""

    def __init__(self) -> None:
        super().__init__(timedelta(minutes=5))


def test_a_subclass_that_is_stored_as_a_base_with_other_arguments_is_named() -> None:
    problem = rf"AtNoon\.serialize\(\) names its base {DATE_TIME}, which does not take these kwargs: .*'(day|moment)'"
    with pytest.raises(TriggerNotStorable, match=problem):
        encode_trigger(AtNoon(3))
    assert encode_trigger(InFiveMinutes())[0] == DATE_TIME


class Announced(TimeDeltaTrigger):
    """Overrides what it does, and inherits the path of another class."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for event in super().run():
            yield TriggerEvent({"announced": event.payload})


@dataclass
class Every(BaseTrigger):
    seconds: float = 60.0

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.triggers.test_base.Every", {"seconds": self.seconds}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent()


@dataclass
class Hourly(Every):
    seconds: float = 3600.0


def test_another_default_of_a_field_is_an_argument_of_the_base() -> None:
    assert encode_trigger(Hourly()) == ("tests.triggers.test_base.Every", encode_value({"seconds": 3600.0}, where="x"))


def test_a_subclass_that_would_run_as_a_base_without_its_own_methods_is_refused() -> None:
    """Its base ran instead, without a word."""
    problem = rf"\.serialize\(\) names its base {DATE_TIME}, which has another run; return the path of Announced"
    with pytest.raises(TriggerNotStorable, match=problem):
        encode_trigger(Announced(timedelta(minutes=5)))
