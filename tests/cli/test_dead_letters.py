"""Messages that a trigger cannot take, as a user sees them: while it fails on them, and as dead letters."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headgate.protocol.messages.runner import PASSED_OVER_POSITION, FinishedTrigger, RefusedEvent
from headgate.protocol.values import encode_value
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.triggers.watchers import MAX_DELIVERIES, MAX_DELIVERIES_MAX

TRACEBACK = 'Traceback (most recent call last):\n  File "users.py", line 1\nValueError: no amount'
MESSAGE = {"order": 4711, "amount": None}


class Failing:
    """The trigger of the watcher ``orders``, as its supervisor writes about it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.epoch: Epoch = store.register_triggerer(
            hostname="h", pid=1, machine="m", process_started=0.0, capacity=1, queues=("default",)
        )
        (claimed,) = store.claim_triggers(self.epoch, limit=1, queues=("default",))
        self.trigger_id = claimed.id
        self.runs = 0

    def fail(self, times: int, key: str = "berlin:4711") -> None:
        for _ in range(times):
            self.runs += 1
            run_id = f"run {self.runs}"
            error = ("ValueError: no amount", TRACEBACK)
            run = FinishedTrigger(self.trigger_id, run_id, "failed", 0, *error, message_key=key)
            self.store.store_slice(self.epoch, finished=[run])

    def bury(self, payload: bytes, **fields: Any) -> int:
        letter = RefusedEvent(
            **{
                "trigger_id": self.trigger_id,
                "trigger_run_id": "the next run",
                "sequence_index": -1,
                "seq": 1,
                "reason": "it does not get it any more",
                "payload_bytes": len(payload),
                "payload_head": payload,
                "key": "berlin:4711",
                "position": PASSED_OVER_POSITION,
                "is_whole": True,
                "content": "message",
                **fields,
            }
        )
        self.store.store_slice(self.epoch, refused=[letter])
        return self.store.inspect.dead_letters()[0].id


@pytest.fixture
def failing(call_database: Any, users_store: Store) -> Failing:
    assert call_database("watchers", "add", "orders", "my.triggers.Orders").code == 0
    return Failing(users_store)


# --- while it fails ------------------------------------------------------------------------------


def test_the_deliveries_of_a_watcher_are_limited_as_its_user_says(call_database: Any) -> None:
    assert call_database("watchers", "add", "usual", "a.B").code == 0
    assert call_database("watchers", "add", "never", "a.B", "--max-deliveries", "0").code == 0
    assert call_database("watchers", "add", "often", "a.B", "--max-deliveries", str(MAX_DELIVERIES_MAX)).code == 0
    limits = {row["name"]: row["max_deliveries"] for row in call_database("watchers", "list", "--json").rows()}
    assert limits == {"usual": MAX_DELIVERIES, "never": 0, "often": MAX_DELIVERIES_MAX}
    help_text = " ".join(re.sub(r"[^\w:;,]", " ", call_database("watchers", "add", "--help").out).split())
    assert f"{MAX_DELIVERIES} by default, at most {MAX_DELIVERIES_MAX:,}; 0: never" in help_text


@pytest.mark.parametrize("number", ["-1", str(MAX_DELIVERIES_MAX + 1)])
def test_a_limit_out_of_bounds_is_refused(call_database: Any, number: str) -> None:
    called = call_database("watchers", "add", "w", "a.B", "--max-deliveries", number)
    assert called.code != 0
    assert number in called.err
    assert call_database("watchers", "list", "--json").rows() == []


def test_a_trigger_shows_the_messages_that_it_has_failed_on(call_database: Any, failing: Failing) -> None:
    failing.fail(2, "other")
    failing.fail(3)
    (row,) = call_database("triggers", "show", "orders", "--json").rows()
    assert (row["max_deliveries"], row["passed_over"]) == (5, 0)
    found = [(one["key"], one["strikes"], one["is_passed_over"]) for one in row["strikes"]]
    assert found == [("berlin:4711", 3, False), ("other", 2, False)]
    shown = call_database("triggers", "show", "orders").out
    assert "messages that it has failed on:" in shown
    assert re.search(r"berlin:4711 +3 .* ValueError: no amount\n", shown)

    failing.fail(5)
    (row,) = call_database("triggers", "show", "orders", "--json").rows()
    assert row["passed_over"] == 1


def test_why_names_the_message_and_the_tries_that_are_left(call_database: Any, failing: Failing) -> None:
    failing.fail(3)
    (answer,) = call_database("why", "orders", "--json").rows()
    assert answer["reason"] == "poison"
    assert answer["headline"].startswith("it fails on message 'berlin:4711' (3 of 5 deliveries), the last time")
    assert answer["headline"].endswith("ago: ValueError: no amount")

    failing.fail(5)
    (answer,) = call_database("why", "orders", "--json").rows()
    assert answer["reason"] == "running"
    assert ["passed over", "1 message, listed by `headgate dlq list`"] in answer["facts"]


# --- dead letters --------------------------------------------------------------------------------


def test_a_list_of_dead_letters_fits_a_hundred_columns(call_database: Any, failing: Failing) -> None:
    failing.fail(5)
    failing.bury(encode_value(MESSAGE, where="message"))
    failing.bury(
        b"x",
        key="k",
        position=0,
        sequence_index=0,
        content="event",
        kind="failed",
        is_whole=False,
        payload_bytes=5_000_000,
    )

    (event, message) = call_database("dlq", "list", "--json").rows()
    assert (message["content"], message["deliveries"], message["reason"]) == ("message", 5, "ValueError: no amount")
    assert (event["content"], event["kind"], event["deliveries"]) == ("event", "failed", 1)
    lines = call_database("dlq", "list").out.splitlines()
    assert all(len(line) <= 100 for line in lines), lines
    assert "berlin:4711" in lines[-1]
    assert "ValueError: no amount" in lines[-1]
    assert "the next run" in call_database("dlq", "list", "--wide").out


def test_a_dead_letter_is_shown_with_its_payload_and_traceback(call_database: Any, failing: Failing) -> None:
    failing.fail(5)
    number = str(failing.bury(encode_value(MESSAGE, where="message")))

    (row,) = call_database("dlq", "show", number, "--json").rows()
    assert (row["payload"], row["traceback"], row["key"]) == (MESSAGE, TRACEBACK, "berlin:4711")
    shown = call_database("dlq", "show", number).out
    assert re.search(r"error +ValueError: no amount\n", shown)
    assert "\ntraceback:\n  Traceback (most recent call last):\n" in shown
    assert shown.endswith('\npayload:\n  {"order":4711,"amount":null}\n')


def test_the_payload_of_a_dead_letter_is_printed_as_it_was_stored(call_database: Any, failing: Failing) -> None:
    number = failing.bury(b'\x00 {"not": "JSON"\n')
    assert call_database("dlq", "show", str(number), "--raw").out == '\x00 {"not": "JSON"\n'


def test_of_a_payload_that_was_not_kept_whole_the_head_is_shown(call_database: Any, failing: Failing) -> None:
    number = str(failing.bury(b'{"a":', is_whole=False, payload_bytes=9_000_000))
    assert 'the first 5 bytes of its payload:\n  {"a":\n' in call_database("dlq", "show", number).out
    raw = call_database("dlq", "show", number, "--raw")
    assert (raw.code, raw.out) == (1, "")
    assert f"dead letter {number} has only the first 5 of 9,000,000 bytes of its payload" in raw.err


def test_a_dead_letter_that_does_not_exist_is_named(call_database: Any) -> None:
    called = call_database("dlq", "show", "4711")
    assert (called.code, called.out) == (1, "")
    assert "there is no dead letter named '4711'" in called.err
