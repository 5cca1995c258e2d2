"""Events that come again: counted, compared with what is stored, and never lost without a trace (I2)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import Query
from tests.store.triggers.test_events import Setting, make_setting

from headgate.protocol.messages.runner import FiredEvent
from headgate.store.db.bulk import ROWS_PER_STATEMENT_MAX
from headgate.store.store import Store
from headgate.store.triggers.redeliveries import Difference


@pytest.fixture
def on(store: Store) -> Setting:
    return make_setting(store)


def differing(on: Setting, *events: FiredEvent) -> list[FiredEvent]:
    return [difference.event for difference in on.store.store_slice(on.epoch, events=events).differing]


def letters(query: Query) -> list[tuple[Any, ...]]:
    rows = query("SELECT trigger_run_id, key, position, payload FROM dead_letter ORDER BY id")
    return [tuple(row.values()) for row in rows]


def test_a_message_that_gives_another_event_when_it_is_delivered_again_leaves_a_dead_letter(
    on: Setting, query: Query
) -> None:
    on.put(on.fired(0, key="k", payload=b"alert"), on.fired(1, key="k", position=1, payload=b"order"))
    again = on.fired(0, key="k", payload=b"order", trigger_run_id="later")
    result = on.store.store_slice(on.epoch, events=[again])
    (first, _) = on.store.inspect.events()
    assert (result.stored, result.redelivered) == (0, 1)
    assert result.differing == (Difference(again, first.id),)
    assert first.payload == b"alert", "the stored event counts"
    (letter,) = on.store.inspect.dead_letters()
    assert letters(query) == [("later", "k", 0, b"order")]
    assert f"event {first.id} was stored before with the same names and another payload" in letter.reason


def test_another_kind_is_a_difference_too(on: Setting) -> None:
    on.put(on.fired(0, key="k", payload=b"1"))
    assert differing(
        on, again := on.fired(0, key="k", payload=b"1", trigger_run_id="later", kind="task_succeeded")
    ) == [again]


def test_a_message_that_gives_the_same_again_leaves_none(on: Setting, query: Query) -> None:
    on.put(on.fired(0, key="k"), on.fired(1))
    assert differing(on, on.fired(0, key="k", trigger_run_id="later"), on.fired(1)) == []
    assert letters(query) == []


def test_an_event_without_a_key_that_is_reported_again_with_another_payload_leaves_a_dead_letter(
    on: Setting, query: Query
) -> None:
    on.put(on.fired(0, payload=b"one"))
    assert differing(on, on.fired(0, payload=b"two"))
    assert letters(query) == [("run", None, 0, b"two")]


def test_only_the_first_difference_of_an_event_is_kept_and_each_is_reported(on: Setting, query: Query) -> None:
    on.put(on.fired(0, key="k", payload=b"1"))
    for payload, run in ((b"2", "second"), (b"3", "third"), (b"2", "fourth")):
        assert differing(on, on.fired(0, key="k", payload=payload, trigger_run_id=run))
    assert letters(query) == [("second", "k", 0, b"2")]


def test_those_that_differ_are_found_among_many_that_do_not(on: Setting, query: Query) -> None:
    events = [on.fired(number, key=f"k{number}") for number in range(2 * ROWS_PER_STATEMENT_MAX + 10)]
    on.put(*events)
    odd = {3, ROWS_PER_STATEMENT_MAX - 1, ROWS_PER_STATEMENT_MAX, 2 * ROWS_PER_STATEMENT_MAX + 9}
    again = [
        on.fired(number, key=f"k{number}", trigger_run_id="later", **({"payload": b"odd"} if number in odd else {}))
        for number in range(len(events))
    ]
    assert differing(on, *again) == [again[number] for number in sorted(odd)]
    assert letters(query) == [("later", f"k{number}", 0, b"odd") for number in sorted(odd)]
