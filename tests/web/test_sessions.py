"""Links and sessions: each can be used once, for a while, and the tokens themselves are not kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient
from tests.web.conftest import PORT

from headgate.store.access.users import SESSION_IDLE_S_MAX, SESSION_S_MAX
from headgate.store.errors import DatabaseAway
from headgate.web.guard import cookie_name
from headgate.web.sessions import (
    LINK_PAUSE_S,
    LINK_S_MAX,
    LINKS_MAX,
    SESSIONS_MAX,
    Links,
    MemorySessions,
    form_token,
    is_form_token,
)
from headgate.web.views import Site


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def links(clock: Clock) -> Links:
    return Links(clock)


@pytest.fixture
def sessions(clock: Clock) -> MemorySessions:
    return MemorySessions(clock=clock)


def log_in(sessions: MemorySessions) -> str:
    return sessions.begin_local("127.0.0.1")


def test_a_cookie_of_another_program_hides_no_session(client: TestClient, browser: Callable[[], TestClient]) -> None:
    name = cookie_name(PORT)
    session = client.cookies[name]
    for others in ('prefs={"theme": "dark"}; {}', 'a="b; {}', "=; {}; x", "{}; @=["):
        answer = browser().get("/runs", headers={"cookie": others.replace("{}", f"{name}={session}")})
        assert answer.status_code == 200, others


def test_a_page_whose_name_ends_like_json_is_a_page_for_a_browser(
    client: TestClient, browser: Callable[[], TestClient]
) -> None:
    of_browser, of_program = {"accept": "text/html,*/*;q=0.8"}, {"accept": "*/*"}
    stranger = browser()
    assert stranger.get("/dags/a.json", headers=of_program).json() == {"error": "log in first"}
    assert stranger.get("/dags/a.json", headers=of_browser, follow_redirects=False).status_code == 303
    answer = client.get("/dags/a.json", headers=of_browser)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    answer = client.get("/nothing.json", headers=of_program)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json")
    assert "error" in client.get("/runs.json?beyond=x", headers=of_browser).json()


def test_a_slash_at_the_end_is_another_address_and_no_redirection(client: TestClient) -> None:
    assert client.get("/runs/", follow_redirects=False).status_code == 404


def test_a_stranger_is_not_told_which_database_it_is(
    client: TestClient, browser: Callable[[], TestClient], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = browser()
    assert "the tests&#39; own" in client.get("/runs").text
    for path in ("/login", "/login?token=none", "/nothing"):
        answer = stranger.get(path)
        assert answer.status_code in (200, 403, 404)
        assert "</footer>" in answer.text
        assert "the tests&#39; own" not in answer.text

    def away(*_: object, **__: object) -> None:
        raise DatabaseAway("sqlite:////where/it/is.db", "unable to open database file")

    monkeypatch.setattr(site.stores, "one", away)
    stranger.cookies.set(cookie_name(PORT), "x")
    answer = stranger.get("/runs")
    assert answer.status_code == 503
    assert "/where/it/is" not in answer.text
    monkeypatch.undo()
    monkeypatch.setattr("headgate.store.inspect.runs.RunInspection.runs", away)
    assert "/where/it/is" in client.get("/runs").text, "who has logged in is told"


def test_a_link_is_used_once(links: Links) -> None:
    token = links.new()
    assert links.use(token)
    assert not links.use(token)
    assert not links.use("")


def test_a_link_ends_after_a_minute(links: Links, clock: Clock) -> None:
    token = links.new()
    clock.now += LINK_S_MAX + 1
    assert not links.use(token)


def test_nothing_else_is_a_session(sessions: MemorySessions) -> None:
    session = log_in(sessions)
    assert sessions.log_in("local", session, "127.0.0.1", "") is None
    assert sessions.named("local") is None
    assert sessions.find("") is None
    assert sessions.find(session[:-1]) is None


def test_a_form_is_of_one_session(sessions: MemorySessions) -> None:
    first, second = log_in(sessions), log_in(sessions)
    assert is_form_token(first, form_token(first))
    assert not is_form_token(first, form_token(second))
    assert not is_form_token(first, "")
    assert first not in form_token(first)


def test_a_session_that_is_used_goes_on_for_a_week(sessions: MemorySessions, clock: Clock) -> None:
    session, began = log_in(sessions), clock.now
    while clock.now + SESSION_IDLE_S_MAX - 1 <= began + SESSION_S_MAX:
        clock.now += SESSION_IDLE_S_MAX - 1
        assert sessions.find(session)
    clock.now += SESSION_IDLE_S_MAX - 1
    assert not sessions.find(session)


def test_a_session_that_is_not_used_ends(sessions: MemorySessions, clock: Clock) -> None:
    session = log_in(sessions)
    clock.now += SESSION_IDLE_S_MAX + 1
    assert not sessions.find(session)
    clock.now -= SESSION_IDLE_S_MAX
    assert not sessions.find(session)


def test_logging_out_ends_one_session(sessions: MemorySessions) -> None:
    first, second = log_in(sessions), log_in(sessions)
    sessions.end(first)
    assert not sessions.find(first)
    assert sessions.find(second)


def test_the_oldest_link_goes_first(links: Links) -> None:
    tokens = [links.new() for _ in range(LINKS_MAX + 1)]
    assert not links.use(tokens[0])
    assert all(links.use(token) for token in tokens[1:])


def test_the_session_that_is_idle_for_longest_goes_first(sessions: MemorySessions, clock: Clock) -> None:
    opened = []
    for _ in range(SESSIONS_MAX):
        clock.now += 1
        opened.append(log_in(sessions))
    clock.now += 1
    assert sessions.find(opened[0])
    clock.now += 1
    newest = log_in(sessions)
    assert sessions.find(newest)
    assert sessions.find(opened[0])
    assert not sessions.find(opened[1])


def test_a_browser_gets_no_link_a_moment_after_another(links: Links, clock: Clock) -> None:
    assert links.asked() is not None
    assert links.asked() is None
    clock.now += LINK_PAUSE_S
    assert links.asked() is not None


def test_tokens_are_kept_as_hashes_only(sessions: MemorySessions, links: Links) -> None:
    token, session = links.new(), log_in(sessions)
    kept = repr(vars(sessions)) + repr(vars(links))
    assert token not in kept
    assert session not in kept
