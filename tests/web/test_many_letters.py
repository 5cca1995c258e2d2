"""Acts on all dead letters of a filter."""

from __future__ import annotations

import json
import re
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks
from tests.web.test_acting import act
from tests.web.test_acting import users as users

from headgate.protocol.messages.runner import FiredEvent
from headgate.store.access.audit import Actor, Written
from headgate.store.db.secrets import Secrets
from headgate.store.letters import LETTERS
from headgate.store.store import Store
from headgate.store.tables import dead_letter
from headgate.web.pages import acting
from headgate.web.pages.acting import FAILURES_MAX, LETTERS_S_MAX


def put_aside(etl: Tasks, watcher: str, wanted: int) -> list[int]:
    """Make so many dead letters of a new watcher; return their ids."""
    trigger_id = etl.store.add_watcher(watcher, "a.B", {})
    etl.store.claim_triggers(etl.epoch, limit=1, queues=("default",))
    for number in range(wanted):
        etl.store.dead_letter_event(etl.epoch, FiredEvent(trigger_id, watcher, number, 0, b"1", f"k{number}"), "no")
    return sorted(letter.id for letter in etl.store.inspect.dead_letters(wanted))


@pytest.fixture
def letters(etl: Tasks) -> list[int]:
    """Four open letters of the watcher ``w``."""
    return put_aside(etl, "w", 4)


@pytest.fixture
def stuck(etl: Tasks) -> int:
    """More open letters than an act tries in a row, of a watcher that was removed: none can be redriven."""
    put_aside(etl, "gone", FAILURES_MAX + 2)
    etl.store.remove_watcher("gone")
    return FAILURES_MAX + 2


def form_of(text: str, action: str) -> dict[str, str]:
    """Return the hidden fields of the only form for an act on a page, without its token."""
    (form,) = re.findall(rf'<form class="act" action="/act/{action}".*?</form>', text, re.DOTALL)
    pairs = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', form)
    return {name: value for name, value in pairs if name != "token"}


def states_of(query: Query) -> list[Any]:
    return [row["state"] for row in query("SELECT state FROM dead_letter ORDER BY id")]


def rows_of(query: Query) -> list[tuple[Any, ...]]:
    rows = query("SELECT * FROM audit WHERE action LIKE 'dlq %' ORDER BY id")
    return [(row["action"], row["object"], row["outcome"], json.loads(row["after"])) for row in rows]


@pytest.mark.parametrize("state", ["redriven", "stored_meanwhile", "discarded", "any"])
def test_a_list_of_letters_that_are_resolved_has_no_form_for_all_of_them(
    users: dict[str, TestClient], letters: list[int], state: str
) -> None:
    client = users["admin"]
    assert act(client, "dlq discard", letter=str(letters[0])).status_code == 303
    for filters in ({"state": state}, {"state": state, "watcher": "w"}):
        text = client.get("/dead-letters", params=filters).text
        assert "/act/dlq-" not in text
    assert act(client, "dlq discard", watcher="w", state=state).status_code == 400
    assert act(client, "dlq redrive", watcher="w", state="at_broker").status_code == 400


def test_an_act_on_all_letters_of_a_list_is_on_those_that_the_list_shows(
    users: dict[str, TestClient], etl: Tasks, letters: list[int], query: Query
) -> None:
    client, store = users["admin"], etl.store
    with store.database.writing() as tx:
        tx.connection.execute(update(dead_letter).where(dead_letter.c.id == letters[0]).values(state="at_broker"))
    text = client.get("/dead-letters").text
    assert "Redrive the open ones of these" in text
    asked = act(client, "dlq redrive", **form_of(text, "dlq-redrive"))
    assert re.findall("<li>(.*?)</li>", asked.text)[-1:] == ["3 event letters of w: open"]
    asked = act(client, "dlq discard", **form_of(text, "dlq-discard"))
    assert "<li>1 event letters of w: at broker</li>" in asked.text
    assert "<li>3 event letters of w: open</li>" in asked.text

    text = client.get("/dead-letters", params={"state": "at_broker", "watcher": "w"}).text
    assert "/act/dlq-redrive" not in text, "its broker has it"
    asked = act(client, "dlq discard", **form_of(text, "dlq-discard"))
    assert re.findall("<li>(.*? letters .*?)</li>", asked.text) == ["1 event letters of w: at broker"]
    assert act(client, "dlq discard", **form_of(asked.text, "dlq-discard")).status_code == 303
    assert states_of(query) == ["discarded", "open", "open", "open"]


def test_letters_that_cannot_be_redriven_do_not_keep_those_behind_them_from_it(
    users: dict[str, TestClient], etl: Tasks, stuck: int, letters: list[int], query: Query
) -> None:
    client = users["operator"]
    asked = act(client, "dlq redrive", everything="1")
    answer = act(client, "dlq redrive", **form_of(asked.text, "dlq-redrive"))
    assert states_of(query) == ["open"] * (stuck + len(letters)), "the first ones stop it"
    assert f"Stopped after {FAILURES_MAX} in a row" in answer.text
    assert 'id="goes-on"' not in answer.text, "it waits for somebody who reads why"
    answer = act(client, "dlq redrive", **form_of(answer.text, "dlq-redrive"))
    assert states_of(query) == ["open"] * stuck + ["redriven"] * len(letters)
    assert "/act/dlq-redrive" not in answer.text
    assert f"<li>{len(letters)} are done.</li>" in answer.text
    assert f"<li>{stuck} could not be done, and are as before.</li>" in answer.text


def test_an_act_in_parts_says_in_the_end_how_many_are_done_in_all(
    users: dict[str, TestClient], letters: list[int], query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, steps = users["admin"], count(step=LETTERS_S_MAX / 3)  # each reading of the clock
    monkeypatch.setattr(acting, "time", SimpleNamespace(monotonic=lambda: next(steps)))
    asked = act(client, "dlq discard", everything="1")
    answer = act(client, "dlq discard", **form_of(asked.text, "dlq-discard"))
    assert states_of(query) == ["discarded"] * 2 + ["open"] * 2
    assert 'id="goes-on"' in answer.text
    while "/act/dlq-discard" in answer.text:
        answer = act(client, "dlq discard", **form_of(answer.text, "dlq-discard"))
    assert states_of(query) == ["discarded"] * len(letters)
    assert answer.status_code == 200
    assert f"<li>{len(letters)} are done.</li>" in answer.text
    assert rows_of(query) == [("dlq discard", "dead letters", "done", {"discarded": len(letters)})], "it is one act"
    assert len({row["audit_id"] for row in query("SELECT audit_id FROM letter_action")}) == 1


def test_what_a_form_says_is_counted_in_no_row_of_another_act(
    users: dict[str, TestClient], letters: list[int], query: Query
) -> None:
    assert act(users["operator"], "dlq redrive", letter=str(letters[0])).status_code == 303
    assert act(users["admin"], "dlq redrive", letter=str(letters[1])).status_code == 303
    before = rows_of(query)
    others = [row["id"] for row in query("SELECT id FROM audit WHERE action = 'dlq redrive' ORDER BY id")]
    begun = form_of(act(users["admin"], "dlq redrive", everything="1").text, "dlq-redrive")
    of_another = begun | {"row": str(others[0]), "up_to": str(letters[2])}
    assert act(users["admin"], "dlq redrive", **of_another).status_code == 303
    begun = form_of(act(users["admin"], "dlq discard", everything="1").text, "dlq-discard")
    assert act(users["admin"], "dlq discard", **begun | {"row": str(others[1])}).status_code == 303
    redriven, discarded = ("dlq redrive", {"redriven": 1}), ("dlq discard", {"discarded": 1})
    assert rows_of(query)[:2] == before
    assert [(told[0], told[3]) for told in rows_of(query)[2:]] == [redriven, discarded]


def test_parts_that_are_under_way_at_once_are_counted_together(etl: Tasks, letters: list[int], query: Query) -> None:
    ada = Actor("ada", "admin", "web")
    stores = [Store(etl.store.database.engine, secrets=Secrets.none(), actor=ada) for _ in range(2)]
    with stores[0] as one, stores[1] as two:
        one.letters.discard(letters[0], by="ada")
        begun = one.database.last_act
        assert begun is not None
        two.database.go_on_with(Written(begun, "dlq discard", LETTERS, {"discarded": 1}))
        one.letters.discard(letters[1], by="ada")
        two.letters.discard(letters[2], by="ada")
        one.letters.discard(letters[3], by="ada")
    assert [told[3] for told in rows_of(query)] == [{"discarded": 4}]
