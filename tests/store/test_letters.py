"""Dead letters that come back: redriven, edited or discarded, each once, and what happens if one is refused again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.harness import QUEUES, Clock, OpenStore, Query, register
from tests.store.test_cleaning import claim_watcher, clean
from tests.store.triggers.test_events import Setting, make_setting
from tests.supervisor.tasks_harness import S, Tasks

from headgate.protocol.messages.dags import AssetSchedule, DagSpec, TaskSpec
from headgate.protocol.messages.runner import PASSED_OVER_POSITION, RefusedEvent
from headgate.protocol.values import encode_value
from headgate.store.cleaning import UNASKED
from headgate.store.errors import LetterRefused, NoSuchRow, NoSuchWatcher
from headgate.store.inspect.letters import UNRESOLVED, DeadLetterRow, LetterFilter
from headgate.store.store import Store

BY = "mara@ops"
BIG = encode_value({"order": 4711}, where="payload")


@pytest.fixture
def on(store: Store) -> Setting:
    return make_setting(store)


def refuse(on: Setting, index: int = 0, **fields: Any) -> int:
    """Have an event refused, with its whole payload; return the id of its letter."""
    whole = {"payload_head": BIG, "payload_bytes": len(BIG), "is_whole": True, **fields}
    on.store.store_slice(on.epoch, refused=[on.refused(index, **whole)])
    return on.store.inspect.dead_letters()[0].id


def letter(on: Setting, letter_id: int) -> DeadLetterRow:
    return on.store.inspect.dead_letter(letter_id).row


def events(on: Setting) -> list[tuple[Any, ...]]:
    rows = on.store.inspect.events()
    return [
        (row.trigger_run_id, row.sequence_index, row.key, row.position, row.kind, row.is_last, row.payload)
        for row in rows
    ]


# --- redriven ------------------------------------------------------------------------------------


def test_a_redriven_letter_is_an_event_with_the_names_the_kind_and_the_end_that_it_had(on: Setting) -> None:
    number = refuse(on, 3, key="k", position=2, kind="task_succeeded", is_last=True)

    done = on.store.letters.redrive(number, by=BY, note="the limit is raised")

    (stored,) = on.store.inspect.events()
    assert (done.state, done.event_id, done.is_same) == ("redriven", stored.id, True)
    assert events(on) == [("run", 3, "k", 2, "task_succeeded", True, BIG)]
    row = letter(on, number)
    assert (row.state, row.event_id, row.resolved_by, row.note) == ("redriven", stored.id, BY, "the limit is raised")
    assert row.resolved_at is not None
    (action,) = on.store.inspect.dead_letter(number).actions
    assert (action.action, action.done_by, action.note) == ("redriven", BY, "the limit is raised")


def test_a_letter_whose_message_was_stored_meanwhile_is_linked_to_that_event(on: Setting) -> None:
    number = refuse(on, key="k")
    on.put(on.fired(0, key="k", trigger_run_id="later", payload=b"mended"))

    done = on.store.letters.redrive(number, by=BY)

    (stored,) = on.store.inspect.events()
    assert (done.state, done.event_id, done.is_same) == ("stored_meanwhile", stored.id, False)
    assert (stored.payload, stored.redelivered) == (b"mended", 0)
    assert (letter(on, number).state, letter(on, number).event_id) == ("stored_meanwhile", stored.id)


def test_a_message_delivered_again_after_its_redrive_is_a_redelivery(on: Setting) -> None:
    number = refuse(on, key="k")
    done = on.store.letters.redrive(number, by=BY)
    assert on.put(on.fired(0, key="k", trigger_run_id="later", payload=BIG)) == (0, 1)
    assert [row.id for row in on.store.inspect.events()] == [done.event_id]
    assert [row.id for row in on.store.inspect.dead_letters()] == [number]


def test_a_letter_is_redriven_once(on: Setting, query: Query) -> None:
    number = refuse(on, key="k")
    on.store.letters.redrive(number, by=BY)
    with pytest.raises(
        LetterRefused, match=rf"dead letter {number} cannot be redriven: it is redriven already, by {BY}"
    ):
        on.store.letters.redrive(number, by="another")
    assert len(events(on)) == 1
    assert len(query("SELECT * FROM letter_action")) == 1


def test_an_edited_letter_is_stored_as_it_was_edited_and_keeps_its_original(on: Setting) -> None:
    number = refuse(on, key="k")
    edited = encode_value({"order": 12}, where="payload")
    on.store.letters.edit(number, edited, by=BY)
    found = on.store.inspect.dead_letter(number)
    assert (found.payload, found.edited_payload, found.row.state) == (BIG, edited, "open")

    on.store.letters.redrive(number, by=BY)

    assert [row.payload for row in on.store.inspect.events()] == [edited]
    assert on.store.inspect.dead_letter(number).payload == BIG
    assert [one.action for one in on.store.inspect.dead_letter(number).actions] == ["edited", "redriven"]


def test_a_payload_over_the_limit_needs_a_higher_limit_or_an_edit(on: Setting) -> None:
    number = refuse(on)
    with pytest.raises(LetterRefused, match=rf"its payload has {len(BIG)} bytes, and event_bytes_max is 5:"):
        on.store.letters.redrive(number, by=BY, payload_bytes_max=5)
    assert letter(on, number).state == "open"
    assert events(on) == []
    on.store.letters.edit(number, b"12", by=BY)
    on.store.letters.redrive(number, by=BY, payload_bytes_max=5)
    assert [row.payload for row in on.store.inspect.events()] == [b"12"]


def test_a_letter_of_a_removed_watcher_goes_to_the_one_that_has_its_name_now(on: Setting) -> None:
    number = refuse(on, key="k")
    on.store.remove_watcher("w")
    with pytest.raises(LetterRefused, match="was removed, and there is no watcher of the same name now"):
        on.store.letters.redrive(number, by=BY)
    successor = on.store.add_watcher("w", "a.B", {})
    on.store.letters.redrive(number, by=BY)
    assert [(row.trigger_id, row.key) for row in on.store.inspect.events()] == [(successor, "k")]


def test_a_letter_of_a_trigger_that_never_was_stays(on: Setting) -> None:
    number = refuse(on, trigger_id=4711)
    with pytest.raises(LetterRefused, match="there is no trigger 4711"):
        on.store.letters.redrive(number, by=BY)
    assert letter(on, number).state == "open"


def test_a_head_cannot_be_redriven_and_the_error_says_what_to_do(on: Setting) -> None:
    head = refuse(on, 1, key="h", is_whole=False, payload_bytes=9_000_000)
    problem = rf"the first {len(BIG)} of 9,000,000 bytes of it are kept: its broker has the message; raise the limit"
    with pytest.raises(LetterRefused, match=problem):
        on.store.letters.redrive(head, by=BY)
    assert letter(on, head).state == "at_broker"


def test_a_redriven_event_waits_for_a_run_of_the_dag_on_its_asset(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    react = DagSpec("react", AssetSchedule(("orders",), "each"), tasks=(TaskSpec("x", "Op"),))
    store.tasks.save_file(tasks.epoch, "react.py", [react])
    trigger_id = store.add_watcher("w", "a.B", {}, asset="orders")
    store.claim_triggers(tasks.epoch, limit=10, queues=QUEUES)
    refused = RefusedEvent(trigger_id, "run", 0, 1, "too big", len(BIG), BIG, key="k", is_whole=True)
    store.store_slice(tasks.epoch, refused=[refused])

    done = store.letters.redrive(store.inspect.dead_letters()[0].id, by=BY)

    assert [row["trigger_event_id"] for row in query("SELECT * FROM waiting_event")] == [done.event_id]


def test_a_redriven_event_resumes_the_task_that_waits_for_its_trigger(store: Store, query: Query) -> None:
    tasks = Tasks(store, query)
    _, trigger_id = tasks.defer_it()
    # The task goes on waiting: its supervisor did not know of it when the event was refused.
    refused = RefusedEvent(trigger_id, "run", 0, 1, "too big", len(BIG), BIG, is_whole=True)
    Store(store.database.engine, secrets=store.database.secrets).store_slice(tasks.epoch, refused=[refused])
    assert tasks.state() is S.DEFERRED
    store.letters.redrive(store.inspect.dead_letters()[0].id, by=BY)
    assert tasks.state() is S.SCHEDULED


# --- discarded -----------------------------------------------------------------------------------


def test_a_letter_is_discarded_once_in_whatever_form_it_is(on: Setting) -> None:
    numbers = [
        refuse(on),
        refuse(on, 1, is_whole=False, payload_bytes=9_000_000),
        refuse(on, -1, key="m", position=PASSED_OVER_POSITION, content="message"),
    ]
    for number in numbers:
        on.store.letters.discard(number, by=BY, note="a test order")
        assert (letter(on, number).state, letter(on, number).note) == ("discarded", "a test order")
        for act in (on.store.letters.discard, on.store.letters.redrive):
            with pytest.raises(LetterRefused, match=r"it is discarded already, by mara@ops at 20|holds a message"):
                act(number, by=BY)
    assert events(on) == []


def test_an_unknown_letter_is_named(on: Setting) -> None:
    for act in (on.store.letters.discard, on.store.letters.redrive):
        with pytest.raises(NoSuchRow, match="there is no dead letter named '4711'"):
            act(4711, by=BY)
    with pytest.raises(NoSuchRow, match="there is no dead letter named '4711'"):
        on.store.letters.edit(4711, b"1", by=BY)


# --- refused again -------------------------------------------------------------------------------


def states(on: Setting) -> list[tuple[str, int]]:
    return [(row.state, row.deliveries) for row in reversed(on.store.inspect.dead_letters())]


def test_refused_again_while_it_is_open_a_message_has_one_letter(on: Setting) -> None:
    for run in ("run", "second", "third"):
        refuse(on, key="k", trigger_run_id=run)
    assert states(on) == [("open", 3)]


@pytest.mark.parametrize("content", ["event", "message"])
def test_refused_again_after_it_was_discarded_a_message_has_another_letter(on: Setting, content: str) -> None:
    first = refuse(on, key="k", content=content)
    on.store.letters.discard(first, by=BY)
    refuse(on, key="k", content=content, trigger_run_id="later")
    assert states(on) == [("discarded", 1), ("open", 1)]
    refuse(on, key="k", content=content, trigger_run_id="third")
    assert states(on) == [("discarded", 1), ("open", 2)]


@pytest.mark.parametrize("is_stored_before", [False, True])
def test_refused_again_after_its_redrive_the_same_event_is_a_redelivery(on: Setting, is_stored_before: bool) -> None:
    number = refuse(on, key="k")
    if is_stored_before:
        on.put(on.fired(0, key="k", trigger_run_id="later", payload=BIG))
    on.store.letters.redrive(number, by=BY)
    refuse(on, 7, key="k")  # in the same run: its stream went back for another subscriber
    refuse(on, key="k", trigger_run_id="another")
    assert states(on) == [("stored_meanwhile" if is_stored_before else "redriven", 3)]
    refuse(on, key="k", trigger_run_id="fourth", payload_head=b"12", payload_bytes=2)
    assert states(on)[1] == ("open", 1), "it is another event"


def test_the_same_report_makes_no_second_letter_whatever_became_of_the_first(on: Setting) -> None:
    on.store.letters.redrive(refuse(on, 0, key="k0"), by=BY)
    refuse(on, 0, key="k0")
    on.store.letters.discard(refuse(on, 1, key="k1"), by=BY)
    refuse(on, 1, key="k1")
    assert states(on) == [("redriven", 1), ("discarded", 1)]


def test_a_letter_that_was_at_the_broker_is_open_once_it_is_whole(on: Setting) -> None:
    number = refuse(on, key="k", is_whole=False, payload_bytes=9_000_000)
    assert states(on) == [("at_broker", 1)]
    refuse(on, key="k", trigger_run_id="later")
    assert states(on) == [("open", 2)]
    on.store.letters.redrive(number, by=BY)
    assert [row.payload for row in on.store.inspect.events()] == [BIG]


# --- lists ---------------------------------------------------------------------------------------


def test_letters_are_listed_and_counted_by_watcher_content_reason_and_state(on: Setting) -> None:
    other = make_setting(on.store, "other")
    mine = refuse(on, reason="Too BIG: 100%")
    message = refuse(on, -1, key="m", position=PASSED_OVER_POSITION, content="message", reason="no amount")
    others = refuse(other, trigger_run_id="other", reason="100 of them")
    on.store.letters.discard(others, by=BY)

    def found(**fields: Any) -> list[int]:
        return [row.id for row in on.store.inspect.dead_letters(which=LetterFilter(**fields))]

    assert found() == [others, message, mine]
    assert found(watcher="other") == [others]
    assert found(content="message") == [message]
    assert found(reason="too big") == [mine]
    assert found(reason="100%") == [mine]
    assert found(states=UNRESOLVED) == [message, mine]
    assert found(states=("discarded",), watcher="w") == []
    with pytest.raises(NoSuchWatcher, match="'nobody'"):
        found(watcher="nobody")
    counts = on.store.inspect.count_letters(LetterFilter(watcher="w"))
    assert [(one.content, one.letters, one.newest_id) for one in counts] == [
        ("event", 1, mine),
        ("message", 1, message),
    ]
    assert sum(one.payload_bytes for one in counts) == 2 * len(BIG)
    everything = LetterFilter()
    ids = on.store.inspect.letter_ids(everything, after_id=mine, up_to_id=others - 1, limit=10)
    assert ids == [message]


# --- deleted ---------------------------------------------------------------------------------------


def test_dead_letters_go_only_when_they_are_named_and_open_ones_by_a_name_of_their_own(
    open_store: OpenStore,
) -> None:
    clock = Clock()
    old = open_store(clock=clock)
    epoch = register(old)
    trigger = claim_watcher(old, epoch)
    for index in range(3):
        letter = RefusedEvent(trigger, "run", index, 1, "too long", 1, b"1", key=f"k{index}", is_whole=True)
        old.store_slice(epoch, refused=[letter])
    redriven, discarded, left = sorted(row.id for row in old.inspect.dead_letters())
    clock.pass_days(40)
    old.letters.discard(discarded, by="mara")
    clock.pass_days(20)
    old.letters.redrive(redriven, by="mara")
    clock.pass_days(20)

    assert clean(old, 30, kinds=UNASKED) == {}
    # Its age is that of what was done to it.
    assert clean(old, 30, kinds=("dead_letters",)) == {"letter_action": 1, "dead_letter": 1}
    clock.pass_days(20)
    assert clean(old, 30, kinds=("dead_letters",)) == {"letter_action": 1, "dead_letter": 1}
    assert [row.id for row in old.inspect.dead_letters()] == [left]
    assert clean(old, 30, kinds=("open_dead_letters",)) == {"dead_letter": 1}


def test_a_message_that_is_on_its_way_to_its_trigger_is_not_deleted(open_store: OpenStore) -> None:
    clock = Clock()
    old = open_store(clock=clock)
    epoch = register(old)
    names = (claim_watcher(old, epoch), "run", -1, 1, "too often")
    message = RefusedEvent(*names, 1, b"1", "k", PASSED_OVER_POSITION, is_whole=True, content="message")
    old.store_slice(epoch, refused=[message])
    (letter,) = old.inspect.dead_letters()
    old.letters.redrive(letter.id, by="mara")
    clock.pass_days(40)
    assert clean(old, 30, kinds=("open_dead_letters",)) == {}
    old.letters.discard(letter.id, by="mara")
    clock.pass_days(40)
    assert clean(old, 30, kinds=("dead_letters",)) == {"letter_action": 2, "dead_letter": 1}
