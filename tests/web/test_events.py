"""The pages about streams, watchers, triggers, events and dead letters."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient
from tests.store.harness import add, register

from headgate.protocol.messages.runner import DescribedTrigger, FinishedTrigger, FiredEvent
from headgate.scheduling.why import DagFolder, RunnerEnds
from headgate.store.consuming import places, reading, set_aside
from headgate.store.consuming.reading import Cursor
from headgate.store.facts.supervisor_status import SupervisorStatus, encode_status
from headgate.store.ids import Epoch
from headgate.store.inspect.letters import LetterFilter
from headgate.store.signals import waits
from headgate.store.store import Store
from headgate.store.tables import consumer, dead_letter, trigger

Get = Callable[..., str]
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def epoch(store: Store) -> Epoch:
    return register(store)


def fire(store: Store, epoch: Epoch, trigger_id: int, count: int = 1) -> None:
    store.claim_triggers(epoch, limit=10, queues=("default",))
    fired = [
        FiredEvent(trigger_id, "run", number, 0, b'{"text":"<script>alert(1)</script>"}', f"k{number}")
        for number in range(count)
    ]
    store.store_slice(epoch, events=fired)


def test_a_trigger_says_why_and_shows_its_error(page: Get, store: Store, epoch: Epoch) -> None:
    (trigger_id,) = add(store, "orders")
    store.claim_triggers(epoch, limit=10, queues=("default",))
    error = (f"KeyError: {HOSTILE} at redis://u:s3cret@h", "Traceback (most recent call last):\n  File x\nKeyError")
    store.store_slice(epoch, finished=[FinishedTrigger(trigger_id, "run", "failed", 0, *error)])
    for text in (page(f"/triggers/{trigger_id}"), page("/triggers"), page("/watchers", failing="yes")):
        assert "orders" in text
        assert "&lt;script&gt;" in text
        assert HOSTILE not in text
        assert "s3cret" not in text
    assert "Next: " in page(f"/triggers/{trigger_id}")
    assert "There are no such triggers" in page("/triggers", queue="gpu")


def test_an_event_is_shown_with_its_payload(page: Get, client: TestClient, store: Store, epoch: Epoch) -> None:
    (trigger_id,) = add(store, "orders")
    fire(store, epoch, trigger_id)
    (row,) = client.get("/events.json", params={"watcher": "orders"}).json()["rows"]
    text = page(f"/events/{row['id']}")
    assert "&lt;script&gt;" in text
    assert HOSTILE not in text
    assert client.get("/events/9999999").status_code == 404
    assert client.get("/events/x").status_code == 400
    assert client.get("/events", params={"watcher": "none"}).status_code == 404


def test_events_are_read_page_by_page_the_newest_first(client: TestClient, store: Store, epoch: Epoch) -> None:
    (trigger_id,) = add(store, "orders")
    fire(store, epoch, trigger_id, 60)
    first = client.get("/events.json").json()
    second = client.get("/events.json", params={"beyond": first["next_beyond"]}).json()
    ids = [row["id"] for row in first["rows"] + second["rows"]]
    assert len(ids) == 60
    assert ids == sorted(ids, reverse=True)
    assert second["next_beyond"] is None


def test_dead_letters(page: Get, client: TestClient, store: Store, epoch: Epoch) -> None:
    (trigger_id,) = add(store, "orders")
    store.claim_triggers(epoch, limit=10, queues=("default",))
    for number in range(60):
        event = FiredEvent(trigger_id, "run", number, 0, b'{"n":1}', f"k{number}")
        store.dead_letter_event(epoch, event, f"refused: {HOSTILE}")
    first = client.get("/dead-letters.json").json()
    second = client.get("/dead-letters.json", params={"beyond": first["next_beyond"]}).json()
    assert (len(first["rows"]), len(second["rows"]), second["next_beyond"]) == (50, 10, None)
    text = page(f"/dead-letters/{first['rows'][0]['id']}")
    assert "refused: &lt;script&gt;" in text
    assert HOSTILE not in text
    assert "There are no such dead letters" in page("/dead-letters", state="discarded")
    assert "orders" in page("/dead-letters", state="any", reason="REFUSED", watcher="orders")


def test_a_filter_of_letters_has_each_choice_once(page: Get) -> None:
    (select,) = re.findall(r'<select name="state">(.*?)</select>', page("/dead-letters"), re.DOTALL)
    choices = re.findall(r">([^<]+)</option>", select)
    assert sorted(choices) == sorted(set(choices))
    (select,) = re.findall(r'<select name="state">(.*?)</select>', page("/runs"), re.DOTALL)
    assert re.findall(r">([^<]+)</option>", select)[0] == "any"


def test_a_trigger_that_no_supervisor_is_to_claim_says_so(page: Get, store: Store) -> None:
    trigger_id, waiting_id = add(store, "gone", "waiting")
    assert "not claimed" in page(f"/triggers/{trigger_id}")
    store.remove_watcher("gone")
    text = page(f"/triggers/{trigger_id}")
    assert "not claimed" not in text
    assert "<span>removed</span>" in text
    with store.database.writing() as tx:
        tx.connection.execute(update(trigger).where(trigger.c.id == waiting_id).values(queue=waits.QUEUE))
    for text in (page(f"/triggers/{waiting_id}"), page("/triggers")):
        assert "not claimed" not in text
        assert "<span>waits for a signal</span>" in text


@pytest.mark.parametrize(("payload", "is_edited"), [(b'"x@h"', True), (b'"redis://u:s3cret@h"', False)])
def test_a_payload_with_a_masked_password_is_not_edited_in_a_form(
    page: Get, client: TestClient, store: Store, epoch: Epoch, payload: bytes, is_edited: bool
) -> None:
    (trigger_id,) = add(store, "orders")
    store.claim_triggers(epoch, limit=10, queues=("default",))
    store.dead_letter_event(epoch, FiredEvent(trigger_id, "run", 1, 0, payload, "k"), "refused")
    (row,) = client.get("/dead-letters.json").json()["rows"]
    text = page(f"/dead-letters/{row['id']}")
    assert "s3cret" not in text
    assert ("<textarea" in text) == is_edited, "its form would store the mask in place of the password"


@pytest.mark.parametrize(
    ("content", "key", "unfit", "edited_redrives"),
    [
        ("undecoded", "k", "could not decode the message", True),
        ("undecoded", None, "could not decode the message", False),
        ("message", "k", "", True),
        ("message", None, "gives its messages no keys", False),
        ("event", None, "", True),
    ],
)
def test_what_cannot_be_redriven_as_it_is_has_no_button_for_it(
    page: Get,
    client: TestClient,
    store: Store,
    epoch: Epoch,
    content: str,
    key: str | None,
    unfit: str,
    edited_redrives: bool,
) -> None:
    (trigger_id,) = add(store, "orders")
    store.claim_triggers(epoch, limit=10, queues=("default",))
    store.dead_letter_event(epoch, FiredEvent(trigger_id, "run", 1, 0, b'"x"', key), "refused")
    with store.database.writing() as tx:
        tx.connection.execute(update(dead_letter).values(content=content))
    (row,) = client.get("/dead-letters.json").json()["rows"]

    def is_fit() -> bool:
        return bool(store.inspect.letter_ids(LetterFilter(is_fit=True), after_id=0, up_to_id=row["id"], limit=1))

    text = page(f"/dead-letters/{row['id']}")
    assert (">Redrive<" in text) == is_fit() == (not unfit)
    assert unfit in text
    store.letters.edit(row["id"], b'"y"', by="ada", note="")
    assert (">Redrive<" in page(f"/dead-letters/{row['id']}")) == is_fit() == edited_redrives


def test_the_list_of_supervisors_says_how_their_runners_end(client: TestClient, store: Store, epoch: Epoch) -> None:
    ends = RunnerEnds(3, 600.0, "killed by SIGKILL")
    store.heartbeat(epoch, encode_status(SupervisorStatus(runner="running", runner_ends=ends, is_draining=True)))
    (row,) = client.get("/supervisors.json").json()["rows"]
    assert row["runner_ends"] == {"times": 3, "within_s": 600.0, "last": ends.last, "wait_s": 0.0}
    assert row["dag_folder"] is None
    text = client.get("/supervisors").text
    assert f"running; {ends}" in text
    assert "draining" in text
    folder = DagFolder("where", "0123456789", 0.0)
    store.heartbeat(epoch, encode_status(SupervisorStatus(runner="running", dag_folder=folder)))
    assert "01234567, for " in client.get("/supervisors").text


def test_supervisors_and_pools(page: Get, client: TestClient, epoch: Epoch) -> None:
    (row,) = client.get("/supervisors.json").json()["rows"]
    assert (row["epoch"], row["capacity"]) == (epoch, 10)
    assert "0 of 10" in page("/supervisors")
    assert "default" in page("/pools") or client.get("/pools.json").json()["rows"] == []


def test_streams_that_wait_are_found_among_many(page: Get, client: TestClient, store: Store, epoch: Epoch) -> None:
    triggers = add(store, "well", "failing")
    store.claim_triggers(epoch, limit=10, queues=("default",))
    said = [DescribedTrigger(id_, f"d{id_}", f"digest{id_}", f"log:{id_}") for id_ in triggers]
    store.store_slice(epoch, described=said)
    assert "No stream waits" in page("/streams", waits="yes")
    store.claim_triggers(epoch, limit=10, queues=("default",))
    store.store_slice(epoch, finished=[FinishedTrigger(triggers[1], "run", "failed", 0, "KeyError", "")])
    names = [row["name"] for row in client.get("/streams.json", params={"waits": "yes"}).json()["rows"]]
    assert names == [f"log:{triggers[1]}"]
    assert len(client.get("/streams.json").json()["rows"]) == 2


def test_consumers_say_how_far_behind_they_are(
    page: Get, client: TestClient, store: Store, epoch: Epoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "There are no consumers." in page("/consumers")
    trigger_id, _ = add(store, "orders", "other")
    for name in [f"c{number:02}" for number in range(60)]:
        store.consumers.add(name, "orders")
    store.consumers.add("idle", "other")
    fire(store, epoch, trigger_id, 5)
    second = client.get("/events.json").json()["rows"][3]["id"]
    store.consumers.add("half", "orders", Cursor(trigger_id, second))
    first = client.get("/consumers.json").json()
    rest = client.get("/consumers.json", params={"beyond": first["next_beyond"]}).json()
    behind = {row["name"]: row["behind"] for row in first["rows"] + rest["rows"]}
    assert behind == {row.name: row.behind for row in store.consumers.all()}, "as the command says"
    assert (len(first["rows"]), behind["c00"], behind["half"], behind["idle"]) == (50, 5, 3, 0)
    assert {row["name"] for row in first["rows"] + rest["rows"] if row["oldest_at"] is None} == {"idle"}
    with store.database.writing() as tx:
        tx.connection.execute(update(consumer).values(failures=2, last_error="KeyError: price at redis://u:s3cret@h"))
    text = page("/consumers")
    assert "KeyError: price" in text
    assert "s3cret" not in text
    with store.database.writing() as tx:
        tx.connection.execute(update(consumer).values(failures=0))
    assert "KeyError: price" not in page("/consumers"), "it is long past"


def test_the_events_that_a_consumer_has_set_aside_have_a_page(
    page: Get, client: TestClient, store: Store, epoch: Epoch
) -> None:
    (trigger_id,) = add(store, "orders")
    fire(store, epoch, trigger_id, 60)
    store.consumers.add("billing", "orders")
    assert "billing has set nothing aside." in page("/consumers/billing")
    assert client.get("/consumers/nobody").status_code == 404
    ids = sorted(row["id"] for row in client.get("/events.json").json()["rows"])
    ids += [first - 1 for first in ids[:1]]
    with store.database.writing() as tx:
        place = places.lock(tx, "billing")
        for id_ in ids:
            event = reading.read_event(tx, "orders", trigger_id, id_)
            set_aside.add(tx, place, event, 5, f"KeyError: price of {id_} at redis://u:s3cret@h", "")
    store.consumers.redeliver("billing", ids[0])
    store.consumers.discard("billing", ids[1])
    told = client.get("/consumers/billing.json").json()
    assert [row["event_id"] for row in told["rows"]] == sorted({*ids} - {ids[1]}, reverse=True)
    assert told["next_beyond"] is None
    text = page("/consumers/billing")
    assert f"price of {ids[5]}" in text
    assert f"/events/{ids[5]}" in text
    assert "asked for again" in text
    assert "headgate consumers redeliver billing --all" in text
    assert "s3cret" not in text
    assert "/consumers/billing" in page("/consumers")


def test_variables_and_connections_are_listed_without_their_values(page: Get, client: TestClient, store: Store) -> None:
    for number in range(60):
        store.tasks.variables.put(f"v{number:02}", b"s3cret", description="the price")
    store.tasks.connections.put("shop", b"redis://u:s3cret@h")
    first = client.get("/variables.json").json()
    rest = client.get("/variables.json", params={"beyond": first["next_beyond"]}).json()
    names = [row["name"] for row in first["rows"] + rest["rows"]]
    assert names == [f"v{number:02}" for number in range(60)]
    assert set(first["rows"][0]) == {"name", "description", "updated_at"}
    assert "the price" in page("/variables")
    assert "shop" in page("/connections")
    for path in ("/variables", "/connections"):
        assert "s3cret" not in page(path)
