"""The pages as a client in this process gets them, on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.messages.dags import TaskSpec
from headgate.store.access import users
from headgate.store.inspect.why_facts import BY_SILENCE
from headgate.store.store import Store
from headgate.web.app import make_app
from headgate.web.guard import cookie_name
from headgate.web.sessions import StoredSessions, form_token
from headgate.web.stores import Stores
from headgate.web.views import Site
from headgate.web.writing import Writer

PORT = 8780
BASE = f"http://127.0.0.1:{PORT}"
CHAIN = (TaskSpec("a", "Op"), TaskSpec("b", "Op", upstream=("a",)), TaskSpec("c", "Op", upstream=("b",)))

SCRYPT_OF_PRODUCT = dict(users.SCRYPT)
OURS = {"sec-fetch-site": "same-origin"}  # what a browser says of a form of our own


def token_of(client: TestClient) -> str:
    """Return what the forms of a client that has logged in send back."""
    session = client.cookies.get(cookie_name(PORT))
    assert session is not None
    return form_token(session)


@pytest.fixture(scope="package", autouse=True)
def quick_hashes() -> Iterator[None]:
    """Passwords whose hash takes no time; one of the product takes 0.3 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(users.SCRYPT, "n", 2)
        patch.setattr(users, "OF_NOBODY", users.hashed(""))
        yield


@pytest.fixture
def site(database_url: str, tmp_path: Path) -> Iterator[Site]:
    """What all requests of a test share."""
    stores, writer = Stores(database_url), Writer(database_url)
    yield Site(
        stores=stores,
        liveness=BY_SILENCE,
        sessions=StoredSessions(stores, writer),
        writer=writer,
        database="the tests' own",
        log_folder=tmp_path / "logs",
        port=PORT,
    )
    stores.close()


@pytest.fixture
def browser(site: Site) -> Iterator[Callable[[], TestClient]]:
    """Returns a new client that has not logged in. All of a test share one application and one loop each."""
    app = make_app(site)
    with ExitStack() as opened:

        def new() -> TestClient:
            return opened.enter_context(TestClient(app, base_url=BASE, follow_redirects=False))

        yield new


@pytest.fixture
def stranger(browser: Callable[[], TestClient]) -> TestClient:
    """A client that has not logged in."""
    return browser()


@pytest.fixture
def client(site: Site, stranger: TestClient) -> TestClient:
    """A client that has logged in."""
    answer = stranger.get("/login", params={"token": site.links.new()})
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
