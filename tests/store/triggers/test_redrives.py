"""Messages that are redriven: given to their trigger again, and settled in the transaction that stores the cause."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.store.harness import QUEUES, OpenStore, Query, register
from tests.store.triggers.test_strikes import Struck, make_struck, set_max_deliveries, strikes

from headgate.protocol.messages.runner import (
    LETTER_BYTES_MAX,
    PASSED_OVER_POSITION,
    FiredEvent,
    RedeliveryEnd,
    RedeliveryOutcome,
    RefusedEvent,
)
from headgate.protocol.values import encode_value
from headgate.store.errors import LetterRefused
from headgate.store.inspect.letters import DeadLetterRow
from headgate.store.store import Store
from headgate.store.triggers.redrives import REDELIVERIES_BYTES_MAX, REDELIVERIES_MAX, RedrivingLetter

BY = "mara@ops"
MESSAGE = encode_value({"order": 4711}, where="message")


@pytest.fixture
def on(store: Store) -> Struck:
    return make_struck(store)


def bury(on: Struck, key: str = "k", message: bytes = MESSAGE, **fields: Any) -> int:
    """Have a message passed over; return the id of its letter."""
    on.runs += 1
    letter = {
        "trigger_id": on.trigger_id,
        "trigger_run_id": f"run {on.runs}",
        "sequence_index": -1,
        "seq": 1,
        "reason": "too often",
        "payload_bytes": len(message),
        "payload_head": message,
        "key": key,
        "position": PASSED_OVER_POSITION,
        "is_whole": True,
        "content": "message",
        **fields,
    }
    on.store.store_slice(on.epoch, refused=[RefusedEvent(**letter)])
    return on.store.inspect.dead_letters()[0].id


def redriving(on: Struck, key: str = "k", **fields: Any) -> int:
    number = bury(on, key, **fields)
    assert on.store.letters.redrive(number, by=BY, note="mended").state == "redriving"
    return number


def end(on: Struck, letter_id: int, outcome: RedeliveryOutcome = "handled", error: str = "") -> None:
    on.store.store_slice(on.epoch, redriven=[RedeliveryEnd(letter_id, on.trigger_id, "run", outcome, error)])


def row(on: Struck, letter_id: int) -> DeadLetterRow:
    return on.store.inspect.dead_letter(letter_id).row


def actions(on: Struck, letter_id: int) -> list[tuple[str, str, str]]:
    return [(one.action, one.done_by, one.note) for one in on.store.inspect.dead_letter(letter_id).actions]


def fired(on: Struck, key: str = "k", position: int = 0, payload: bytes = b"{}") -> FiredEvent:
    return FiredEvent(on.trigger_id, f"later {key}", position, 1, payload, key, position)


# --- to the trigger ------------------------------------------------------------------------------


def test_the_owner_of_the_trigger_finds_the_message_until_it_is_settled(on: Struck) -> None:
    assert on.store.poll(on.epoch, QUEUES).redriving == []
    number = redriving(on)
    assert on.store.poll(on.epoch, QUEUES).redriving == [on.trigger_id]
    assert on.store.poll(register(on.store), QUEUES).redriving == [], "another supervisor's"
    assert on.store.redriving_letters(on.trigger_id, given=()) == [RedrivingLetter(number, "k", MESSAGE)]
    assert on.store.redriving_letters(on.trigger_id, given=[number]) == []
    end(on, number)
    assert on.store.poll(on.epoch, QUEUES).redriving == []
    assert on.store.redriving_letters(on.trigger_id, given=()) == []


def test_a_poll_with_messages_on_their_way_says_nothing_else_about_their_trigger(on: Struck) -> None:
    redriving(on, "a"), redriving(on, "b")
    poll = on.store.poll(on.epoch, QUEUES)
    assert (poll.redriving, poll.held, poll.changed, poll.removed, poll.ended) == ([on.trigger_id], {}, [], [], [])
    on.store.pause_watcher("w")
    poll = on.store.poll(on.epoch, QUEUES)
    assert (poll.redriving, poll.held) == ([on.trigger_id], {on.trigger_id: "paused"})


def test_an_edited_message_is_given_as_it_was_edited(on: Struck) -> None:
    number = bury(on)
    edited = encode_value({"order": 12}, where="payload")
    on.store.letters.edit(number, edited, by=BY)
    on.store.letters.redrive(number, by=BY)
    assert on.store.redriving_letters(on.trigger_id, given=()) == [RedrivingLetter(number, "k", edited)]


def test_messages_are_read_oldest_first_up_to_a_number_and_a_size(on: Struck) -> None:
    numbers = [redriving(on, f"k{n}") for n in range(REDELIVERIES_MAX + 2)]
    first = on.store.redriving_letters(on.trigger_id, given=())
    assert [letter.id for letter in first] == numbers[:REDELIVERIES_MAX]
    rest = on.store.redriving_letters(on.trigger_id, given=[letter.id for letter in first])
    assert [letter.id for letter in rest] == numbers[REDELIVERIES_MAX:]


def test_messages_that_are_large_together_are_read_one_after_the_other(on: Struck) -> None:
    large = b'"' + b"x" * (REDELIVERIES_BYTES_MAX // 2) + b'"'
    numbers = [redriving(on, f"k{n}", message=large) for n in range(2)]
    (first,) = on.store.redriving_letters(on.trigger_id, given=())
    assert first.id == numbers[0]
    assert [letter.id for letter in on.store.redriving_letters(on.trigger_id, given=[first.id])] == numbers[1:]


# --- settled -------------------------------------------------------------------------------------


def test_a_handled_message_is_redriven_and_its_trigger_is_not_passed_over_it_any_more(on: Struck, query: Query) -> None:
    set_max_deliveries(query, 1)
    assert on.fail("k") == [(on.trigger_id, "k")]
    number = redriving(on)
    assert row(on, number).resolved_at is None
    on.store.store_slice(on.epoch, events=[fired(on, position=1), fired(on)])
    end(on, number)
    end(on, number)  # it was unknown whether the commit arrived

    found = row(on, number)
    (event,) = [event for event in on.store.inspect.events() if event.position == 0]
    assert (found.state, found.event_id, found.resolved_by, found.note) == ("redriven", event.id, BY, "mended")
    assert found.resolved_at is not None
    assert strikes(query) == []
    assert on.claimed() == ()
    assert actions(on, number) == [("redriving", BY, "mended"), ("redriven", f"supervisor {on.epoch - 1}", "")]


def test_a_message_of_which_the_filter_makes_nothing_is_redriven_without_an_event(on: Struck) -> None:
    number = redriving(on)
    end(on, number)
    assert (row(on, number).state, row(on, number).event_id) == ("redriven", None)
    assert actions(on, number)[-1][2] == "its filter made no event of the message"


@pytest.mark.parametrize(
    ("outcome", "error", "note"),
    [
        ("rejected", "", "its filter rejected the message, or an event of it was refused"),
        ("failed", "w reads no shared stream", "w reads no shared stream"),
    ],
)
def test_a_message_that_its_trigger_does_not_take_is_open_again(
    on: Struck, outcome: RedeliveryOutcome, error: str, note: str
) -> None:
    number = redriving(on)
    end(on, number, outcome, error)
    end(on, number, outcome, error)
    found = row(on, number)
    assert (found.state, found.deliveries, found.resolved_by, found.note) == ("open", 2, None, None)
    assert [(action, why) for action, _, why in actions(on, number)][1:] == [(outcome, note)]
    assert on.store.poll(on.epoch, QUEUES).redriving == []
    assert on.store.letters.redrive(number, by=BY).state == "redriving", "it may be redriven again"


@pytest.mark.parametrize("dies", [False, True])
def test_a_trigger_that_fails_on_a_redriven_message_opens_its_letter_with_the_new_error(
    on: Struck, query: Query, dies: bool
) -> None:
    other = redriving(on, "other")
    number = redriving(on)
    if dies:
        on.kill("k")
    else:
        on.fail("k", error="KeyError: amount", traceback="Traceback of the second time")
    found = on.store.inspect.dead_letter(number)
    assert (found.row.state, found.row.deliveries) == ("open", 2)
    reason = "it died" if dies else "KeyError: amount"
    assert (found.row.reason, found.traceback) == (reason, "" if dies else "Traceback of the second time")
    assert actions(on, number)[-1] == ("failed", f"supervisor {on.epoch}", reason)
    assert row(on, other).state == "redriving", "the failure says nothing about it"


def test_ends_count_only_from_the_supervisor_that_owns_the_trigger(on: Struck) -> None:
    number = redriving(on)
    owner, on.epoch = on.epoch, register(on.store)
    end(on, number)
    on.fail("k")
    assert row(on, number).state == "redriving"
    on.epoch = owner
    end(on, number)
    assert row(on, number).state == "redriven"


def test_an_event_that_is_refused_again_while_its_message_is_redriven_is_counted(on: Struck) -> None:
    """The letter holds the message, because its event could not be kept; the end of the message opens it."""
    event: dict[str, Any] = {"position": 2, "sequence_index": 7}
    number = redriving(on, "k", **event)
    assert bury(on, "k", **event) == number
    assert (row(on, number).state, row(on, number).deliveries) == ("redriving", 2)
    end(on, number, "rejected")
    assert row(on, number).state == "open"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_run_that_returns_after_the_event_of_a_message_has_handled_it(on: Struck, at_once: bool) -> None:
    """Its stream has ended with it, or it tells the end of the message when the trigger is owned no more."""
    number, other = redriving(on), redriving(on, "other")
    on.store.redriving_letters(on.trigger_id, given=())
    run = on.failure(None, outcome="returned", error="", trigger_run_id="later k")
    if at_once:
        on.store.store_slice(on.epoch, events=[fired(on)], finished=[run])
    else:
        on.store.store_slice(on.epoch, events=[fired(on)])
        on.report(run)
    end(on, number)
    (event,) = on.store.inspect.events()
    assert (row(on, number).state, row(on, number).event_id) == ("redriven", event.id)
    assert actions(on, number)[1:] == [("redriven", f"supervisor {on.epoch}", "")]
    assert row(on, other).state == "redriving", "the run has made nothing of it"
    assert on.store.redriven_to == set()


def test_a_run_that_returns_has_not_handled_a_message_whose_event_is_not_stored(on: Struck) -> None:
    refused, partly = redriving(on, "a", position=1, sequence_index=7), redriving(on, "b")
    bury(on, "b", position=1, sequence_index=8)
    on.store.redriving_letters(on.trigger_id, given=())
    events = [fired(on, "a"), msgspec.structs.replace(fired(on, "b"), trigger_run_id="later a", sequence_index=1)]
    on.store.store_slice(on.epoch, events=events)
    on.report(on.failure(None, outcome="returned", error="", trigger_run_id="later a"))
    assert [row(on, number).state for number in (refused, partly)] == ["redriving", "redriving"]


# --- beside the broker ---------------------------------------------------------------------------


def test_a_message_that_the_broker_delivers_meanwhile_makes_no_second_letter(on: Struck) -> None:
    number = redriving(on)
    assert bury(on) == number
    assert (row(on, number).state, row(on, number).deliveries) == ("redriving", 2)
    on.store.store_slice(on.epoch, events=[fired(on)])
    end(on, number)
    assert bury(on) == number, "to a run that is still passed over it"
    assert (row(on, number).state, row(on, number).deliveries) == ("redriven", 3)
    assert bury(on, message=b'{"another": "message of this name"}') != number


def test_a_redriven_message_and_the_broker_give_each_event_once(on: Struck) -> None:
    number = redriving(on)
    on.store.store_slice(on.epoch, events=[fired(on)])
    end(on, number)
    result = on.store.store_slice(on.epoch, events=[FiredEvent(on.trigger_id, "another run", 0, 1, b"{}", "k")])
    assert (result.stored, result.redelivered) == (0, 1)


# --- what a user may do --------------------------------------------------------------------------


def test_a_message_on_its_way_may_be_redriven_again_or_discarded(on: Struck) -> None:
    number = redriving(on)
    assert on.store.letters.redrive(number, by="another").state == "redriving"
    with pytest.raises(LetterRefused, match="cannot be edited: its message is on its way to its trigger"):
        on.store.letters.edit(number, b"1", by=BY)
    on.store.letters.discard(number, by=BY)
    end(on, number)
    assert row(on, number).state == "discarded"
    assert [action for action, _, _ in actions(on, number)] == ["redriving", "discarded"]


def test_a_message_goes_to_the_watcher_that_has_the_name_now(on: Struck, open_store: OpenStore) -> None:
    number = redriving(on)
    on.store.remove_watcher("w")
    assert on.store.poll(on.epoch, QUEUES).redriving == []
    with pytest.raises(LetterRefused, match="was removed, and there is no watcher of the same name now"):
        on.store.letters.redrive(number, by=BY)
    new = open_store().add_watcher("w", "a.B", {})
    on.store.claim_triggers(on.epoch, limit=1, queues=QUEUES)
    assert on.store.letters.redrive(number, by=BY).state == "redriving"
    assert on.store.poll(on.epoch, QUEUES).redriving == [new]
    on.trigger_id = new
    on.store.store_slice(on.epoch, events=[fired(on)])
    end(on, number)
    assert [event.id for event in on.store.inspect.events()] == [row(on, number).event_id]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"key": None},
            "its producer gives its messages no keys, so events that are stored already would not be known",
        ),
        ({"content": "undecoded"}, "its producer could not decode the message: edit it, so that it is a message"),
        ({"is_whole": False, "payload_bytes": 9_000_000}, "of 9,000,000 bytes of it are kept: its broker has the"),
    ],
)
def test_what_cannot_be_given_again_is_refused_with_the_reason(on: Struck, fields: dict[str, Any], why: str) -> None:
    number = bury(on, **fields)
    with pytest.raises(LetterRefused, match=f"dead letter {number} cannot be redriven: .*{why}"):
        on.store.letters.redrive(number, by=BY)
    assert row(on, number).state in ("open", "at_broker")


def test_what_could_not_be_decoded_is_given_as_it_was_edited(on: Struck) -> None:
    number = bury(on, content="undecoded")
    on.store.letters.edit(number, MESSAGE, by=BY)
    assert on.store.letters.redrive(number, by=BY).state == "redriving"
    with pytest.raises(LetterRefused, match="the limit is 8,388,608"):
        on.store.letters.edit(bury(on, "other"), b"1" * (LETTER_BYTES_MAX + 1), by=BY)


def test_a_trigger_that_has_returned_gets_no_message(on: Struck) -> None:
    number = bury(on)
    on.report(on.failure(None, outcome="returned", error=""))
    with pytest.raises(LetterRefused, match="has returned, and gets no messages: restart its watcher first"):
        on.store.letters.redrive(number, by=BY)
