"""What users may not do is in the audit, and a loop of refusals does not fill it."""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.testclient import TestClient
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks
from tests.web.conftest import BASE
from tests.web.test_acting import act, log_in

from headgate.store.access.audit import Actor
from headgate.store.store import Store
from headgate.web.app import make_app
from headgate.web.refusals import PAUSE_S, ROW_S, ROWS_MAX, Refusals
from headgate.web.views import Site
from headgate.web.writing import WRITERS_MAX

ADA = Actor("ada", "viewer", "web", "10.0.0.1")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(query: Query) -> list[tuple[str, str, str, int]]:
    rows = query("SELECT * FROM audit WHERE outcome = 'refused' ORDER BY id")
    return [(row["actor"], row["action"], row["object"], json.loads(row["after"])["times"]) for row in rows]


def test_a_viewer_who_acts_is_in_the_audit_once(
    browser: Callable[[], TestClient], store: Store, etl: Tasks, query: Query
) -> None:
    client = log_in(browser(), "ada", store.access.add_user("ada", "viewer"))
    for _ in range(30):
        assert act(client, "dags pause", dag="etl").status_code == 403
    assert act(client, "dlq discard", letter="1").status_code == 403
    assert client.get("/audit").status_code == 403, "to look is no act"
    assert refused(query) == [
        ("ada", "dags pause", "/act/dags-pause", 1),
        ("ada", "dlq discard", "/act/dlq-discard", 1),
    ]
    (row,) = query("SELECT * FROM audit WHERE action = 'dags pause'")
    assert (row["role"], row["via"], row["address"]) == ("viewer", "web", "testclient")
    assert not query("SELECT is_paused FROM dag WHERE name = 'etl'")[0]["is_paused"]


def test_refusals_are_counted_in_one_row_an_hour(site: Site, query: Query) -> None:
    assert site.writer is not None
    clock = Clock()
    refusals = Refusals(site.writer, clock)
    for _ in range(500):
        refusals.note(ADA, "dags pause", "/act/dags-pause")
    assert refused(query) == [("ada", "dags pause", "/act/dags-pause", 1)]
    clock.now += PAUSE_S
    refusals.note(ADA, "dags pause", "/act/dags-pause")
    assert refused(query) == [("ada", "dags pause", "/act/dags-pause", 501)]
    clock.now += ROW_S
    refusals.note(ADA, "dags pause", "/act/dags-pause")
    assert [times for *_, times in refused(query)] == [501, 1]


def test_those_that_wait_are_written_though_nothing_more_is_refused(site: Site, query: Query) -> None:
    assert site.writer is not None
    clock = Clock()
    refusals = Refusals(site.writer, clock)
    for _ in range(500):
        refusals.note(ADA, "dags pause", "/act/dags-pause")
    refusals.write_waiting()
    assert [times for *_, times in refused(query)] == [1], "it is too early"
    clock.now += PAUSE_S
    refusals.write_waiting()
    assert [times for *_, times in refused(query)] == [500]


def test_a_process_that_ends_writes_those_that_wait(site: Site, store: Store, etl: Tasks, query: Query) -> None:
    password = store.access.add_user("ada", "viewer")
    with TestClient(make_app(site), base_url=BASE, follow_redirects=False) as client:
        log_in(client, "ada", password)
        for _ in range(30):
            assert act(client, "dags pause", dag="etl").status_code == 403
        assert [times for *_, times in refused(query)] == [1]
    assert [times for *_, times in refused(query)] == [30]


def test_what_cannot_be_written_now_is_counted_later(site: Site, query: Query) -> None:
    assert site.writer is not None
    clock = Clock()
    refusals = Refusals(site.writer, clock)
    held = [site.writer.store(None) for _ in range(WRITERS_MAX)]
    for one in held:
        one.__enter__()
    refusals.note(ADA, "dags pause", "/act/dags-pause")
    for one in held:
        one.__exit__(None, None, None)
    assert refused(query) == []
    clock.now += PAUSE_S
    refusals.note(ADA, "dags pause", "/act/dags-pause")
    assert refused(query) == [("ada", "dags pause", "/act/dags-pause", 2)]


def test_no_more_are_remembered_than_there_is_room_for(site: Site) -> None:
    assert site.writer is not None
    refusals = Refusals(site.writer, Clock())
    held = [site.writer.store(None) for _ in range(WRITERS_MAX)]
    for one in held:
        one.__enter__()
    for number in range(ROWS_MAX + 10):
        refusals.note(Actor(f"ada{number}", "viewer", "web"), "dags pause", "/act/dags-pause")
    for one in held:
        one.__exit__(None, None, None)
    assert len(refusals._rows) == ROWS_MAX
