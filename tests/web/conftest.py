"""The pages as a client in this process gets them, on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.messages.dags import TaskSpec
from headgate.store.inspect.why_facts import BY_SILENCE
from headgate.store.store import Store
from headgate.web.app import make_app
from headgate.web.sessions import Sessions
from headgate.web.stores import Stores
from headgate.web.views import Site

PORT = 8780
BASE = f"http://127.0.0.1:{PORT}"
CHAIN = (TaskSpec("a", "Op"), TaskSpec("b", "Op", upstream=("a",)), TaskSpec("c", "Op", upstream=("b",)))


@pytest.fixture
def site(database_url: str, tmp_path: Path) -> Iterator[Site]:
    """What all requests of a test share."""
    stores = Stores(database_url)
    yield Site(
        stores=stores,
        liveness=BY_SILENCE,
        sessions=Sessions(),
        database="the tests' own",
        log_folder=tmp_path / "logs",
        port=PORT,
    )
    stores.close()


@pytest.fixture
def stranger(site: Site) -> TestClient:
    """A client that has not logged in."""
    return TestClient(make_app(site), base_url=BASE, follow_redirects=False)


@pytest.fixture
def client(site: Site, stranger: TestClient) -> TestClient:
    """A client that has logged in."""
    answer = stranger.get("/login", params={"token": site.sessions.new_link()})
    assert answer.status_code == 303
    return stranger


@pytest.fixture
def page(client: TestClient) -> Callable[..., str]:
    """Returns the text of a page, which must be there."""

    def get(path: str, **query: str) -> str:
        answer = client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.text

    return get


@pytest.fixture
def etl(store: Store, query: Query) -> Tasks:
    """A DAG ``etl`` with the tasks ``a``, ``b``, ``c`` in a row, and a run ``r1`` of it that has begun."""
    tasks = Tasks(store, query, tasks=CHAIN)
    store.scheduling.plan(tasks.epoch)
    return tasks
