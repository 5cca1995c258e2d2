"""The base class of triggers: the parts that need no runner."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate.triggers.base import BaseTrigger, TriggerEvent
from headgate.triggers.encoding import TriggerNotStorable, encode_trigger


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
