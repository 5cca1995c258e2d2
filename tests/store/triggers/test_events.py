"""The event log: stored whole or not at all, stored once (I2), and nothing bad is lost (I9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.harness import QUEUES, Query, open_migrated_in_memory, register

from headgate.protocol.messages.queries import StoredEvent
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    KEY_CHARS_MAX,
    REFUSED_HEAD_BYTES_MAX,
    FinishedTrigger,
    FiredEvent,
    RefusedEvent,
)
from headgate.store.db import bulk
from headgate.store.db.secrets import Secrets
from headgate.store.errors import RowsRefused
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.triggers.dead_letters import INT_MAX, coordinates, storable_text
from headgate.store.triggers.events import StoredSlice


class Setting(msgspec.Struct):
    """A store with an epoch that owns one trigger."""

    store: Store
    epoch: Epoch
    trigger_id: int

    def fired(self, index: int, **fields: Any) -> FiredEvent:
        return FiredEvent(
            **{
                "trigger_id": self.trigger_id,
                "trigger_run_id": "run",
                "sequence_index": index,
                "seq": index + 1,
                "payload": b"payload %d" % index,
                **fields,
            }
        )

    def refused(self, index: int, **fields: Any) -> RefusedEvent:
        return RefusedEvent(
            **{
                "trigger_id": self.trigger_id,
                "trigger_run_id": "run",
                "sequence_index": index,
                "seq": index + 1,
                "reason": "too big",
                "payload_bytes": 5_000_000,
                "payload_head": b"head",
                **fields,
            }
        )

    def put(self, *events: FiredEvent) -> tuple[int, int]:
        """Store the events; return how many were stored and how many came again."""
        result = self.store.store_slice(self.epoch, events=events)
        return result.stored, result.redelivered

    def end(self, outcome: Any, **fields: Any) -> dict[int, int]:
        """Report the end of the run; return the failures so far."""
        run = {"trigger_id": self.trigger_id, "trigger_run_id": "run", "outcome": outcome, "events": 0, **fields}
        return self.store.store_slice(self.epoch, finished=[FinishedTrigger(**run)]).failure_counts


def make_setting(store: Store, name: str = "w") -> Setting:
    epoch = register(store)
    trigger_id = store.add_watcher(name, "a.B", {})
    assert [claimed.id for claimed in store.claim_triggers(epoch, limit=1, queues=QUEUES)] == [trigger_id]
    return Setting(store, epoch, trigger_id)


@pytest.fixture
def on(store: Store) -> Setting:
    return make_setting(store)


def stored(on: Setting) -> list[tuple[str, int]]:
    return [(row.trigger_run_id, row.sequence_index) for row in on.store.inspect.events()]


# --- once ----------------------------------------------------------------------------------------


def test_a_slice_reported_again_is_stored_once_and_not_counted(on: Setting, query: Query) -> None:
    events = [on.fired(0, key="k0"), on.fired(1), on.fired(2, key="k0", position=1)]
    assert on.put(*events) == (3, 0)
    assert on.put(*events) == (0, 0)
    assert on.put(*events, on.fired(3)) == (1, 0)
    assert stored(on) == [("run", index) for index in range(4)]
    assert query("SELECT * FROM redelivery") == []


def test_a_message_delivered_again_is_counted_and_not_stored(on: Setting) -> None:
    assert on.put(on.fired(0, key="k", payload=b"first"), on.fired(1, key="k", position=1)) == (2, 0)
    assert on.put(on.fired(0, key="k", payload=b"again", trigger_run_id="later")) == (0, 1)
    assert on.put(on.fired(0, key="k", trigger_run_id="third"), on.fired(1, key="new", trigger_run_id="third")) == (
        1,
        1,
    )
    rows = list(on.store.inspect.events())
    assert [(row.payload, row.redelivered) for row in rows] == [(b"first", 2), (b"payload 1", 0), (b"payload 1", 0)]


def test_the_same_key_is_another_message_for_another_trigger_and_position(on: Setting) -> None:
    other = make_setting(on.store, "other")
    assert on.put(on.fired(0, key="k"), on.fired(1, key="k", position=1)) == (2, 0)
    assert other.put(other.fired(0, key="k", trigger_run_id="other")) == (1, 0)


def test_events_without_a_key_are_each_new(on: Setting) -> None:
    assert on.put(*(on.fired(index, payload=b"same") for index in range(3))) == (3, 0)


def test_repetitions_within_one_slice_are_stored_once(on: Setting) -> None:
    events = [
        on.fired(0, key="k", payload=b"first"),
        on.fired(0, key="k", payload=b"first"),
        on.fired(1, key="k"),
        on.fired(2, key="k"),
        on.fired(2, key="k"),
    ]
    assert on.put(*events) == (1, 2)
    assert [(row.payload, row.redelivered) for row in on.store.inspect.events()] == [(b"first", 2)]


def test_a_redelivery_keeps_its_count_over_many(on: Setting, query: Query) -> None:
    on.put(*(on.fired(index, key=f"k{index}") for index in range(10)))
    for run in range(3):
        again = [on.fired(index, key=f"k{index}", trigger_run_id=f"again {run}") for index in range(run, 10)]
        assert on.put(*again) == (0, 10 - run)
    assert [row.redelivered for row in on.store.inspect.events()] == [1, 2] + [3] * 8


def test_more_events_than_one_statement_takes_are_stored_in_order(on: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [on.fired(index, key=f"k{index}") for index in range(bulk.ROWS_PER_STATEMENT_MAX * 2 + 7)]
    assert on.put(*events) == (len(events), 0)
    assert stored(on) == [("run", index) for index in range(len(events))]
    again = [msgspec.structs.replace(event, trigger_run_id="again") for event in events]
    assert on.put(*again) == (0, len(events))
    assert on.put(*events) == (0, 0)


run_ids = st.sampled_from(["a", "b", "c"])
identities = st.tuples(run_ids, st.integers(0, 3))
messages = st.tuples(st.sampled_from([None, "k", "l"]), st.integers(0, 1))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(identities, messages),
    st.lists(st.lists(identities, max_size=8), max_size=5),
)
def test_any_history_of_slices_gives_what_storing_one_by_one_would(
    said: dict[tuple[str, int], tuple[str | None, int]], history: list[list[tuple[str, int]]]
) -> None:
    """What an event derives from is the same each time it is reported; everything else is up to the history."""
    opened = open_migrated_in_memory()
    with Store(opened, secrets=Secrets(["A" * 43 + "="], source="the test")) as store:
        on = make_setting(store)
        kept: list[tuple[str, int]] = []
        known: set[tuple[str, int]] = set()
        for names in history:
            new, again = 0, set()
            for name in names:
                key, position = said.get(name, (None, 0))
                if name in kept:
                    continue
                if key is not None and (key, position) in known:
                    again.add(name)
                    continue
                kept.append(name)
                known |= set() if key is None else {(key, position)}
                new += 1
            events = []
            for run_id, index in names:
                key, position = said.get((run_id, index), (None, 0))
                events.append(on.fired(index, trigger_run_id=run_id, key=key, position=position))
            assert on.put(*events) == (new, len(again))
            assert stored(on) == kept
    opened.dispose()


# --- rows that cannot be stored ------------------------------------------------------------------

BAD = {
    "NUL in the key": {"key": "a\0b"},
    "NUL in the run id": {"trigger_run_id": "a\0b"},
    "lone surrogate in the key": {"key": "a\ud800"},
    "lone surrogate in the run id": {"trigger_run_id": "\udfff"},
    "key too long": {"key": "é" * (KEY_CHARS_MAX + 1)},
    "index beyond 64 bits": {"sequence_index": INT_MAX + 1},
    "position beyond 64 bits": {"position": 2**64 - 1, "key": "k"},
    "trigger id beyond 64 bits": {"trigger_id": 2**64 - 1},
    "no such trigger": {"trigger_id": 4711},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD.keys())
def test_a_bad_row_is_refused_with_its_whole_slice_and_can_be_dead_lettered(
    on: Setting, fields: dict[str, Any]
) -> None:
    bad = on.fired(1, **fields)
    before = FinishedTrigger(on.trigger_id, "run", "failed", 1, error="x")
    with pytest.raises(RowsRefused) as told:
        on.store.store_slice(
            on.epoch, events=[on.fired(0), bad, on.fired(2)], refused=[on.refused(3)], finished=[before]
        )
    assert told.value.reason
    assert stored(on) == []
    assert on.store.inspect.dead_letters() == []
    assert on.store.inspect.triggers()[0].failure_count == 0

    for _ in range(2):
        on.store.dead_letter_event(on.epoch, bad, told.value.reason)
    assert on.put(on.fired(0), on.fired(2)) == (2, 0)
    (letter,) = on.store.inspect.dead_letters()
    assert (letter.payload_kept, letter.payload_bytes, letter.payload_head) == (True, 9, b"payload 1")
    assert letter.reason == told.value.reason


def test_a_key_of_the_full_length_is_stored_whatever_its_characters_take(on: Setting) -> None:
    keys = ["\U0001f9ff" * KEY_CHARS_MAX, "é" * KEY_CHARS_MAX, "", " ", "'; --", "%s %(x)s :x {}"]
    assert on.put(*(on.fired(index, key=key) for index, key in enumerate(keys))) == (len(keys), 0)
    assert [row.key for row in on.store.inspect.events()] == keys


def test_any_payload_is_stored(on: Setting) -> None:
    payloads = [b"", b"\0", bytes(range(256)), b"\\x00", b'{"a,b"}', b"x" * 1024 * 1024]
    on.put(*(on.fired(index, payload=payload) for index, payload in enumerate(payloads)))
    assert [row.payload for row in on.store.inspect.events()] == payloads


# --- dead letters --------------------------------------------------------------------------------


def test_an_event_is_dead_lettered_whole_with_the_reason(on: Setting, query: Query) -> None:
    payload = b"x" * (REFUSED_HEAD_BYTES_MAX + 1)
    on.store.dead_letter_event(on.epoch, on.fired(5, key="k", position=1, payload=payload), "why")
    (letter,) = on.store.inspect.dead_letters()
    assert (letter.watcher, letter.trigger_id, letter.trigger_run_id) == ("w", on.trigger_id, "run")
    assert (letter.sequence_index, letter.key, letter.position) == (5, "k", 1)
    assert (letter.reason, letter.payload_bytes, letter.payload_kept) == ("why", len(payload), True)
    assert letter.payload_head == payload[:REFUSED_HEAD_BYTES_MAX]
    assert [bytes(row["payload"]) for row in query("SELECT payload FROM dead_letter")] == [payload]


def test_a_message_dead_lettered_again_by_a_later_run_is_one_dead_letter(on: Setting) -> None:
    on.store.dead_letter_event(on.epoch, on.fired(0, key="k"), "why")
    on.store.dead_letter_event(on.epoch, on.fired(0, key="k", trigger_run_id="later"), "why")
    on.store.dead_letter_event(on.epoch, on.fired(0, key="l", trigger_run_id="later"), "why")
    assert [letter.key for letter in on.store.inspect.dead_letters()] == ["l", "k"]
    assert [letter.key for letter in on.store.inspect.dead_letters(limit=1)] == ["l"]


def test_a_message_that_was_dead_lettered_is_stored_when_it_can_be(on: Setting) -> None:
    on.store.dead_letter_event(on.epoch, on.fired(0, key="k"), "a fault that is mended now")
    assert on.put(on.fired(0, key="k", trigger_run_id="later")) == (1, 0)
    assert len(on.store.inspect.dead_letters()) == 1


def test_bad_events_that_look_alike_stay_apart(on: Setting) -> None:
    alike: list[dict[str, Any]] = [
        {"key": "x" * KEY_CHARS_MAX + "a"},
        {"key": "x" * KEY_CHARS_MAX + "b"},
        {"key": "a\0"},
        {"key": r"a\x00"},
        {"key": "k", "position": INT_MAX + 1},
        {"key": "k", "position": INT_MAX + 2},
        {"key": "k", "position": INT_MAX},
        {"trigger_run_id": "\ud800"},
        {"trigger_run_id": r"\ud800"},
        {"index": INT_MAX + 1},
        {"index": INT_MAX + 2},
    ]
    events = [on.fired(**{"index": index, **fields}) for index, fields in enumerate(alike)]
    for event in events:
        on.store.dead_letter_event(on.epoch, event, "why")
        on.store.dead_letter_event(on.epoch, event, "why")
    assert len(on.store.inspect.dead_letters()) == len(alike)


big_text = st.text(alphabet=st.characters(codec=None), max_size=600)
big_int = st.integers(-(2**64), 2**64)


@given(big_int, big_text, big_int, st.none() | big_text, big_int)
def test_the_coordinates_of_any_event_can_be_stored(
    trigger_id: int, run_id: str, index: int, key: str | None, position: int
) -> None:
    named = coordinates(FiredEvent(trigger_id, run_id, index, 0, b"", key, position))
    for text in (named.trigger_run_id, named.key or ""):
        assert len(text) <= KEY_CHARS_MAX
        assert "\0" not in text
        text.encode()
    for number in (named.trigger_id, named.sequence_index, named.position):
        assert -(2**63) <= number < 2**63
    assert (named.key is None) == (key is None)


def test_a_reason_of_any_kind_is_kept_within_its_limit(on: Setting) -> None:
    on.store.dead_letter_event(on.epoch, on.fired(0), "\0\ud800" + "x" * ERROR_CHARS_MAX)
    (letter,) = on.store.inspect.dead_letters()
    assert letter.reason == storable_text("\0\ud800" + "x" * ERROR_CHARS_MAX, ERROR_CHARS_MAX)
    assert len(letter.reason) == ERROR_CHARS_MAX
    assert letter.reason.startswith(r"\x00\ud800x")


def test_what_the_runner_refused_is_recorded_once_with_its_head(on: Setting, query: Query) -> None:
    refused = [on.refused(0, key="k"), on.refused(1, payload_head=b"y" * 10_000, reason="\0" * 100_000)]
    for _ in range(2):
        result = on.store.store_slice(on.epoch, refused=[*refused, refused[0]])
        assert result == StoredSlice(stored=0, redelivered=0, failure_counts={})
    second, first = on.store.inspect.dead_letters()
    assert (first.key, first.payload_kept, first.payload_head, first.payload_bytes) == ("k", False, b"head", 5_000_000)
    assert (len(second.payload_head), len(second.reason)) == (REFUSED_HEAD_BYTES_MAX, ERROR_CHARS_MAX)
    assert [row["payload"] for row in query("SELECT payload FROM dead_letter")] == [None, None]


def test_a_letter_that_is_whole_is_kept_whole_with_all_that_its_event_was(on: Setting, query: Query) -> None:
    whole = {
        "payload_head": b"y" * 3_000_000,
        "payload_bytes": 3_000_000,
        "is_whole": True,
        "kind": "success",
        "is_last": True,
        "traceback": "Traceback\0",
    }
    message = on.refused(
        -1, key="m", position=-1, payload_head=b"{}", payload_bytes=2, is_whole=True, content="message"
    )
    on.store.store_slice(on.epoch, refused=[on.refused(0, key="k", **whole), message])
    first, second = query("SELECT * FROM dead_letter ORDER BY id")
    assert (bytes(first["payload"]), bytes(first["payload_head"])) == (b"y" * 3_000_000, b"y" * REFUSED_HEAD_BYTES_MAX)
    assert (first["content"], first["kind"], bool(first["is_last"])) == ("event", "success", True)
    assert (first["payload_bytes"], bool(first["payload_kept"])) == (3_000_000, True)
    assert first["traceback"] == r"Traceback\x00"
    assert (bytes(second["payload"]), second["content"], second["position"]) == (b"{}", "message", -1)


def test_an_event_that_the_database_refuses_keeps_its_kind(on: Setting, query: Query) -> None:
    on.store.dead_letter_event(on.epoch, on.fired(0, kind="failed", is_last=True), "why")
    (letter,) = query("SELECT kind, is_last FROM dead_letter")
    assert (letter["kind"], bool(letter["is_last"])) == ("failed", True)


def test_a_letter_that_comes_whole_after_its_head_was_recorded_is_kept_whole(on: Setting, query: Query) -> None:
    """Its message is confirmed to the broker, so the payload has to be there (I1)."""
    on.store.store_slice(on.epoch, refused=[on.refused(0, key="k"), on.refused(1, key="other")])
    whole = on.refused(4, key="k", trigger_run_id="later", payload_head=b"{}", payload_bytes=2, is_whole=True)
    for _ in range(2):
        on.store.store_slice(on.epoch, refused=[whole, on.refused(5, key="new")])
    rows = query("SELECT key, payload, payload_kept FROM dead_letter ORDER BY id")
    assert [(row["key"], row["payload"] and bytes(row["payload"]), bool(row["payload_kept"])) for row in rows] == [
        ("k", b"{}", True),
        ("other", None, False),
        ("new", None, False),
    ]
    changed = msgspec.structs.replace(whole, payload_head=b"changed", payload_bytes=7)
    on.store.store_slice(on.epoch, refused=[changed])
    assert bytes(query("SELECT payload FROM dead_letter ORDER BY id")[0]["payload"]) == b"{}"


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD.keys())
def test_a_refused_event_is_recorded_however_bad_it_is(on: Setting, fields: dict[str, Any]) -> None:
    on.store.store_slice(on.epoch, refused=[on.refused(0, **fields), on.refused(9, payload_bytes=2**64 - 1)])
    assert len(on.store.inspect.dead_letters()) == 2


@pytest.mark.parametrize("again", [{"trigger_run_id": "run"}, {"trigger_run_id": "later"}])
def test_a_payload_that_comes_after_its_head_was_recorded_is_kept(
    on: Setting, query: Query, again: dict[str, Any]
) -> None:
    on.store.store_slice(on.epoch, refused=[on.refused(0, key="k"), on.refused(1, key="other")])
    on.store.dead_letter_event(on.epoch, on.fired(0, key="k", **again), "why")
    other, letter = on.store.inspect.dead_letters()
    assert (letter.payload_kept, letter.payload_bytes, letter.reason) == (True, 9, "why")
    assert other.payload_kept is False
    on.store.dead_letter_event(on.epoch, on.fired(0, key="k", payload=b"changed", **again), "another")
    assert [
        row["payload"] and bytes(row["payload"]) for row in query("SELECT payload FROM dead_letter ORDER BY id")
    ] == [
        b"payload 0",
        None,
    ]


# --- runs that end -------------------------------------------------------------------------------


def test_a_run_that_returned_finishes_its_trigger_and_marks_its_last_event(on: Setting, query: Query) -> None:
    on.put(on.fired(0), on.fired(1, trigger_run_id="another"))
    finished = FinishedTrigger(on.trigger_id, "run", "returned", 2)
    for _ in range(2):
        result = on.store.store_slice(on.epoch, events=[on.fired(1)], finished=[finished])
        assert result.failure_counts == {}
    assert [(row.trigger_run_id, row.sequence_index, row.is_last) for row in on.store.inspect.events()] == [
        ("run", 0, False),
        ("another", 1, False),
        ("run", 1, True),
    ]
    (row,) = on.store.inspect.triggers()
    assert row.finished_at is not None
    assert row.failure_count == 0
    assert on.store.claimed_triggers(on.epoch) == []
    assert not on.store.poll(on.epoch, QUEUES).claimable
    assert on.store.claim_triggers(on.epoch, limit=1, queues=QUEUES) == []


def test_a_failure_is_counted_once_however_often_it_is_reported(on: Setting) -> None:
    assert on.end("failed", error="ValueError: x", traceback="Traceback\nValueError: x") == {on.trigger_id: 1}
    assert on.end("failed", error="ValueError: x") == {on.trigger_id: 1}
    (row,) = on.store.inspect.triggers()
    assert (row.failure_count, row.last_error) == (1, "ValueError: x\n\nTraceback\nValueError: x")
    assert row.last_failed_at is not None
    assert row.finished_at is None
    assert on.end("failed", trigger_run_id="next", error="KeyError: y") == {on.trigger_id: 2}
    assert on.store.inspect.watchers()[0].last_error == "KeyError: y"
    (claimed,) = on.store.claimed_triggers(on.epoch)
    assert claimed.failure_count == 2


def test_an_error_of_any_kind_is_kept_within_its_limit(on: Setting) -> None:
    assert on.end("failed", error="\0\ud800", traceback="x" * ERROR_CHARS_MAX) == {on.trigger_id: 1}
    last_error = on.store.inspect.triggers()[0].last_error
    assert last_error is not None
    assert last_error.startswith("\\x00\\ud800\n\nxxx")
    assert len(last_error) == ERROR_CHARS_MAX
    assert [run.error for run in on.store.inspect.trigger_runs(on.trigger_id)] == ["\\x00\\ud800"]


def test_a_cancelled_run_changes_nothing(on: Setting) -> None:
    before = on.store.inspect.triggers()
    assert on.end("cancelled", reason="user") == {}
    assert on.store.inspect.triggers() == before


@pytest.mark.parametrize("outcome", ["returned", "failed"])
def test_the_end_of_a_run_does_not_touch_a_trigger_of_another(on: Setting, outcome: str) -> None:
    other = make_setting(on.store, "other")
    before = on.store.inspect.triggers()
    assert other.end(outcome, trigger_id=on.trigger_id, error="x") == {}
    assert on.store.inspect.triggers() == before
    on.store.release_triggers(on.epoch, [on.trigger_id])
    before = on.store.inspect.triggers()
    assert on.end(outcome, error="x") == {}
    assert on.store.inspect.triggers() == before


def test_many_runs_may_end_in_one_slice(on: Setting) -> None:
    others = [make_setting(on.store, name) for name in "abc"]
    everyone = [on, *others]
    for other in others:
        other.store.release_triggers(other.epoch, [other.trigger_id])
    on.store.claim_triggers(on.epoch, limit=10, queues=QUEUES)
    finished: Sequence[FinishedTrigger] = [
        FinishedTrigger(setting.trigger_id, f"run {number}", "failed" if number % 2 else "returned", 1, error="x")
        for number, setting in enumerate(everyone)
    ]
    result = on.store.store_slice(on.epoch, finished=[*finished, *finished])
    assert result.failure_counts == {everyone[1].trigger_id: 1, everyone[3].trigger_id: 1}
    assert [row.finished_at is None for row in on.store.inspect.triggers()] == [False, True, False, True]


# --- the last event ------------------------------------------------------------------------------


def test_the_last_event_is_the_one_stored_last(on: Setting) -> None:
    other = make_setting(on.store, "other")
    assert on.store.last_event(on.trigger_id) is None
    on.put(on.fired(0, key="a"), on.fired(1, key="b", payload=b"newest"))
    other.put(other.fired(0, trigger_run_id="other"))
    on.put(on.fired(5, key="a", trigger_run_id="later", payload=b"came again"))
    assert on.store.last_event(on.trigger_id) == StoredEvent("run", 1, b"newest", "b")
    assert on.store.last_event(other.trigger_id) == StoredEvent("other", 0, b"payload 0", None)
    assert on.store.last_event(4711) is None


def test_an_empty_slice_is_fine(on: Setting) -> None:
    assert on.store.store_slice(on.epoch, events=[], refused=[], finished=[]) == StoredSlice(0, 0, {})
