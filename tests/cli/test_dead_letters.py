"""Messages that a trigger cannot take, as a user sees them: while it fails on them, and as dead letters."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks, event_of

from headgate.cli.commands.dead_letters import FAILURES_IN_A_ROW_MAX, MESSAGES_ON_THEIR_WAY_MAX
from headgate.protocol.messages.runner import (
    PASSED_OVER_POSITION,
    FinishedTrigger,
    FiredEvent,
    RedeliveryEnd,
    RedeliveryOutcome,
    RefusedEvent,
)
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
    assert call_database("watchers", "add", "--no-check", "orders", "my.triggers.Orders").code == 0
    return Failing(users_store)


# --- while it fails ------------------------------------------------------------------------------


def test_the_deliveries_of_a_watcher_are_limited_as_its_user_says(call_database: Any) -> None:
    assert call_database("watchers", "add", "--no-check", "usual", "a.B").code == 0
    assert call_database("watchers", "add", "--no-check", "never", "a.B", "--max-deliveries", "0").code == 0
    assert (
        call_database("watchers", "add", "--no-check", "often", "a.B", "--max-deliveries", str(MAX_DELIVERIES_MAX)).code
        == 0
    )
    limits = {row["name"]: row["max_deliveries"] for row in call_database("watchers", "list", "--json").rows()}
    assert limits == {"usual": MAX_DELIVERIES, "never": 0, "often": MAX_DELIVERIES_MAX}
    help_text = " ".join(re.sub(r"[^\w:;,]", " ", call_database("watchers", "add", "--help").out).split())
    assert f"{MAX_DELIVERIES} by default, at most {MAX_DELIVERIES_MAX:,}; 0: never" in help_text


@pytest.mark.parametrize("number", ["-1", str(MAX_DELIVERIES_MAX + 1)])
def test_a_limit_out_of_bounds_is_refused(call_database: Any, number: str) -> None:
    called = call_database("watchers", "add", "--no-check", "w", "a.B", "--max-deliveries", number)
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
    assert [(run["outcome"], run["error"]) for run in row["runs"]] == [("failed", "ValueError: no amount")] * 5
    assert re.search(r"its runs that have ended.*\n.*\n.*failed +\d+ +ValueError: no amount\n", shown)

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


@pytest.mark.parametrize("command", [("show",), ("redrive",), ("discard",), ("edit", "--payload", "1")])
def test_a_dead_letter_that_does_not_exist_is_named(call_database: Any, command: tuple[str, ...]) -> None:
    called = call_database("dlq", *command, "4711")
    assert called.code == 1
    assert "there is no dead letter named '4711'" in called.err


# --- redriven, edited, discarded -----------------------------------------------------------------


def bury_events(failing: Failing, number: int, **fields: Any) -> list[int]:
    """Have events refused that are too large; return the ids of their letters, the oldest first."""
    for index in range(number):
        key = {"key": f"k{index}", "position": 0, "sequence_index": index, "content": "event", **fields}
        failing.bury(encode_value({"order": index}, where="payload"), reason="too big", **key)
    return sorted(row.id for row in failing.store.inspect.dead_letters(number))


def test_letters_are_redriven_with_one_command_after_a_dry_run(call_database: Any, failing: Failing) -> None:
    bury_events(failing, 3)
    (tried,) = call_database("dlq", "redrive", "--all", "--dry-run", "--json").rows()
    assert (tried["watcher"], tried["content"], tried["letters"]) == ("orders", "event", 3)
    assert call_database("events", "list", "--json").rows() == []

    done = call_database("dlq", "redrive", "--all", "--note", "the limit is raised")
    assert (done.code, done.out, done.err) == (0, "redriven: 3\n", "")
    rows = call_database("events", "list", "--json").rows()
    assert [(row["key"], row["payload"]) for row in rows] == [(f"k{n}", {"order": n}) for n in range(3)]
    assert call_database("dlq", "list", "--json").rows() == []
    listed = call_database("dlq", "list", "--state", "redriven", "--json").rows()
    assert [(row["event_id"], row["note"]) for row in listed] == [
        (row["id"], "the limit is raised") for row in reversed(rows)
    ]
    assert call_database("dlq", "redrive", "--all").out == "there is no such dead letter\n"


def test_a_redrive_says_if_no_task_gets_the_event(call_database: Any, users_store: Store, query: Query) -> None:
    tasks = Tasks(users_store, query)
    trigger = tasks.defer_it()[1]
    users_store.store_slice(tasks.epoch, events=[event_of(trigger, 1, index=1)])
    users_store.dead_letter_event(tasks.epoch, event_of(trigger), "too big")

    done = call_database("dlq", "redrive", "--all", "--json")

    reason = "the task that its trigger was for does not wait for it any more"
    (row,) = done.rows()
    assert (row["state"], row["unhandled"]) == ("redriven", reason)
    assert done.err == f"headgate: dead letter {row['id']}: its event is stored, but {reason}\n"


def test_a_filter_chooses_the_letters(call_database: Any, failing: Failing) -> None:
    first, second = bury_events(failing, 2)
    bury_events(failing, 1, trigger_run_id="another", key="other", trigger_id=4711)
    rows = call_database("dlq", "redrive", "--watcher", "orders", "--reason", "TOO", "--json").rows()
    assert [(row["id"], row["state"]) for row in rows] == [(first, "redriven"), (second, "redriven")]
    assert "there is no watcher named 'nobody'" in call_database("dlq", "redrive", "--watcher", "nobody").err


def test_what_is_meant_has_to_be_said(call_database: Any, failing: Failing) -> None:
    (number,) = bury_events(failing, 1)
    for command in ("redrive", "discard"):
        for wrong in ((), (str(number), "--all"), ("--all", "--watcher", "orders"), (str(number), "--dry-run")):
            called = call_database("dlq", command, *wrong)
            assert (called.code, called.out) == (2, ""), wrong
            assert "ids" in called.err
        called = call_database("dlq", command, "--reason", " ")
        assert (called.code, "--reason must not be empty" in called.err) == (2, True)
        assert call_database("dlq", command, str(10**30)).code == 2
    assert len(call_database("dlq", "list", "--json").rows()) == 1


def test_a_redrive_of_many_leaves_out_what_it_cannot_take(
    call_database: Any, failing: Failing, settling: Callable[..., None]
) -> None:
    unread = [
        failing.bury(b'"?"', key=f"u{n}", trigger_run_id=f"run {n}", content="undecoded")
        for n in range(FAILURES_IN_A_ROW_MAX + 1)
    ]
    failing.bury(b'"?"', key=None)
    (fit,) = bury_messages(failing, "a")
    settling(a="handled", u0="handled")
    tried = call_database("dlq", "redrive", "--all", "--dry-run", "--json")
    assert [row["letters"] for row in tried.rows()] == [1]
    left = f"headgate: {len(unread) + 1} letters left out, of messages that could not be decoded or have no key"
    assert tried.err.startswith(left)
    done = call_database("dlq", "redrive", "--watcher", "orders", "--json")
    assert (done.code, [row["id"] for row in done.rows()]) == (0, [fit])
    failing.store.letters.edit(unread[0], b'{"of": "u0"}', by="mara")
    assert call_database("dlq", "redrive", "--all").out == "redriven: 1\n", "it was edited"


def test_letters_of_a_watcher_that_was_removed_do_not_stop_the_redrive_of_others(
    call_database: Any, failing: Failing
) -> None:
    bury_events(failing, FAILURES_IN_A_ROW_MAX + 1, trigger_run_id="another", trigger_id=4711)
    (fit,) = bury_events(failing, 1)[-1:]
    done = call_database("dlq", "redrive", "--all", "--json")
    assert done.code == 1
    assert [row["id"] for row in done.rows() if row.get("state") == "redriven"] == [fit], done


def test_a_redrive_stops_after_ten_failures_in_a_row_and_goes_on_when_it_is_called_again(
    call_database: Any, failing: Failing
) -> None:
    ids = bury_events(failing, FAILURES_IN_A_ROW_MAX + 2)
    stuck, others = ids[:FAILURES_IN_A_ROW_MAX], ids[FAILURES_IN_A_ROW_MAX:]
    for number in stuck:
        failing.store.letters.edit(number, encode_value("x" * 2000, where="p"), by="mara")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADGATE_EVENT_BYTES_MAX", "1024")
        stopped = call_database("dlq", "redrive", "--all", "--json")
        assert stopped.code == 1
        assert [row["id"] for row in stopped.rows()] == stuck
        assert "its payload has 2,002 bytes, and event_bytes_max is 1,024: raise the setting, or edit" in stopped.err
        assert "stopped after 10 failures in a row; the other letters are as before" in stopped.err
        assert call_database("dlq", "redrive", *map(str, others)).out == "redriven: 2\n"
    done = call_database("dlq", "redrive", "--all")
    assert (done.code, done.out) == (0, f"redriven: {FAILURES_IN_A_ROW_MAX}\n")


def test_an_edited_letter_is_shown_with_both_payloads_and_who_did_it(call_database: Any, failing: Failing) -> None:
    (number,) = bury_events(failing, 1)
    edited = call_database("dlq", "edit", str(number), "--payload", '{"order": 12}', "--note", "a typing error")
    assert edited.out == f"edited dead letter {number}; `headgate dlq redrive {number}` goes on with its new payload\n"
    shown = call_database("dlq", "show", str(number)).out
    assert '\nedited payload:\n  {"order":12}\n\npayload:\n  {"order":0}\n' in shown
    assert re.search(r"what was done:\n.*\nedited .* a typing error\n", shown)
    assert call_database("dlq", "redrive", str(number)).code == 0
    (row,) = call_database("dlq", "show", str(number), "--json").rows()
    assert (row["payload"], row["edited_payload"], row["state"]) == ({"order": 0}, {"order": 12}, "redriven")
    assert [one["action"] for one in row["actions"]] == ["edited", "redriven"]
    assert call_database("events", "list", "--json").rows()[0]["payload"] == {"order": 12}


def test_an_edit_that_is_no_json_changes_nothing(call_database: Any, failing: Failing, tmp_path: Path) -> None:
    (number,) = bury_events(failing, 1)
    (tmp_path / "new.json").write_text('{"order": ')
    for wrong in (("--payload", "{order}"), ("--payload-file", "new.json")):
        called = call_database("dlq", "edit", str(number), *wrong)
        assert (called.code, called.out) == (2, "")
        assert f"{wrong[0]}: Expecting" in called.err
    assert call_database("dlq", "edit", str(number)).code == 2
    assert call_database("dlq", "edit", str(number), "--payload-file", "missing.json").code == 1
    assert call_database("dlq", "show", str(number), "--json").rows()[0]["edited_payload"] is None


def test_status_counts_the_letters_that_nobody_has_resolved(call_database: Any, failing: Failing) -> None:
    def letters() -> list[str]:
        rows = call_database("status", "--json").rows()
        return [row["text"] for row in rows if row.get("reason") == "dead_letters"]

    bury_events(failing, 2)
    assert len(letters()) == 1
    assert letters()[0].startswith("2 open dead letters")
    call_database("dlq", "redrive", "--all")
    assert letters() == []


def test_a_letter_is_discarded_once(call_database: Any, failing: Failing) -> None:
    failing.fail(5)
    number = str(failing.bury(encode_value(MESSAGE, where="message")))
    assert call_database("dlq", "discard", number, "--note", "a test order").out == "discarded: 1\n"
    again = call_database("dlq", "discard", number)
    assert (again.code, again.out) == (1, "")
    assert f"dead letter {number} cannot be discarded: it is discarded already, by " in again.err
    assert call_database("dlq", "list").out == "none\n"


# --- messages ------------------------------------------------------------------------------------


class Settling:
    """The supervisor of the trigger, as far as it settles messages that are on their way: at each look of the command.

    ``outcomes`` are those of the next messages, by key; a message that has none stays on its way.
    """

    def __init__(self, failing: Failing, outcomes: dict[str, RedeliveryOutcome]) -> None:
        self._failing = failing
        self._outcomes = outcomes

    def __call__(self, seconds: float) -> None:
        failing = self._failing
        for letter in failing.store.redriving_letters(failing.trigger_id, given=()):
            if letter.key in self._outcomes:
                event = FiredEvent(failing.trigger_id, f"again {letter.key}", 0, 0, letter.message, letter.key)
                outcome = self._outcomes[letter.key]
                end = RedeliveryEnd(letter.id, failing.trigger_id, "again", outcome)
                events = [event] if outcome == "handled" else []
                failing.store.store_slice(failing.epoch, events=events, redriven=[end])


def bury_messages(failing: Failing, *keys: str) -> list[int]:
    return [
        failing.bury(encode_value({"of": key}, where="message"), key=key, trigger_run_id=f"run of {key}")
        for key in keys
    ]


@pytest.fixture
def settling(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def settle(**outcomes: RedeliveryOutcome) -> None:
        monkeypatch.setattr("headgate.cli.commands.dead_letters.time.sleep", Settling(failing, outcomes))

    return settle


def test_events_and_messages_come_back_with_one_command(
    call_database: Any, failing: Failing, settling: Callable[..., None]
) -> None:
    bury_events(failing, 1)
    bury_messages(failing, "a", "b")
    settling(a="handled", b="handled")
    counted = call_database("dlq", "redrive", "--all", "--dry-run", "--json").rows()
    assert {row["content"]: row["letters"] for row in counted} == {"event": 1, "message": 2}
    done = call_database("dlq", "redrive", "--all")
    assert (done.code, done.out, done.err) == (0, "redriven: 3\n", "")
    rows = call_database("events", "list", "--json").rows()
    assert [row["payload"] for row in rows] == [{"order": 0}, {"of": "a"}, {"of": "b"}]
    assert call_database("dlq", "list").out == "none\n"


def test_a_message_that_its_trigger_still_cannot_take_is_a_failure(
    call_database: Any, failing: Failing, settling: Callable[..., None]
) -> None:
    good, bad = bury_messages(failing, "good", "bad")
    settling(good="handled", bad="rejected")
    done = call_database("dlq", "redrive", str(bad), str(good), "--json")
    assert done.code == 1
    assert {row["id"]: row.get("state") for row in done.rows()} == {bad: None, good: "redriven"}
    assert f"dead letter {bad} is open again" in done.err
    assert "1 dead letter could not be redriven; nothing was changed there" in done.err


def test_messages_that_no_trigger_takes_stay_on_their_way(call_database: Any, failing: Failing) -> None:
    numbers = bury_messages(failing, "a", "b")
    done = call_database("dlq", "redrive", "--content", "message", "--wait", "0")
    assert (done.code, done.out) == (1, "on their way: 2\n")
    assert "2 messages on the way to their triggers, which get them as soon as they run" in done.err
    listed = call_database("dlq", "list", "--state", "redriving", "--json").rows()
    assert sorted(row["id"] for row in listed) == numbers
    assert "redriving" in call_database("dlq", "list").out


def test_more_messages_than_may_be_on_their_way_are_given_one_after_the_other(
    call_database: Any, failing: Failing, settling: Callable[..., None]
) -> None:
    keys = [f"k{number}" for number in range(MESSAGES_ON_THEIR_WAY_MAX + 5)]
    bury_messages(failing, *keys)
    settling(**dict.fromkeys(keys, "handled"))
    assert call_database("dlq", "redrive", "--all").out == f"redriven: {len(keys)}\n"


def test_a_redrive_stops_when_trigger_after_trigger_refuses(
    call_database: Any, failing: Failing, settling: Callable[..., None]
) -> None:
    keys = [f"k{number}" for number in range(FAILURES_IN_A_ROW_MAX)]
    bury_messages(failing, *keys, "last")
    settling(**dict.fromkeys(keys, "rejected"))
    done = call_database("dlq", "redrive", "--all")
    assert done.code == 1
    assert "stopped after 10 failures in a row" in done.err
