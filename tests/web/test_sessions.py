"""Links and sessions: each can be used once, for a while, and the tokens themselves are not kept."""

from __future__ import annotations

import pytest

from headgate.web.sessions import (
    LINK_PAUSE_S,
    LINK_S_MAX,
    LINKS_MAX,
    SESSION_IDLE_S_MAX,
    SESSION_S_MAX,
    SESSIONS_MAX,
    Sessions,
)


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
def sessions(clock: Clock) -> Sessions:
    return Sessions(clock)


def log_in(sessions: Sessions) -> str:
    session = sessions.log_in(sessions.new_link())
    assert session is not None
    return session


def test_a_link_logs_in_once(sessions: Sessions) -> None:
    token = sessions.new_link()
    session = sessions.log_in(token)
    assert session is not None
    assert sessions.is_open(session)
    assert sessions.log_in(token) is None


def test_a_link_ends_after_a_minute(sessions: Sessions, clock: Clock) -> None:
    token = sessions.new_link()
    clock.now += LINK_S_MAX + 1
    assert sessions.log_in(token) is None


def test_nothing_else_logs_in(sessions: Sessions) -> None:
    session = log_in(sessions)
    assert sessions.log_in("") is None
    assert sessions.log_in(session) is None
    assert not sessions.is_open("")
    assert not sessions.is_open(session[:-1])


def test_a_session_that_is_used_goes_on_for_a_week(sessions: Sessions, clock: Clock) -> None:
    session, began = log_in(sessions), clock.now
    while clock.now + SESSION_IDLE_S_MAX - 1 <= began + SESSION_S_MAX:
        clock.now += SESSION_IDLE_S_MAX - 1
        assert sessions.is_open(session)
    clock.now += SESSION_IDLE_S_MAX - 1
    assert not sessions.is_open(session)


def test_a_session_that_is_not_used_ends(sessions: Sessions, clock: Clock) -> None:
    session = log_in(sessions)
    clock.now += SESSION_IDLE_S_MAX + 1
    assert not sessions.is_open(session)
    clock.now -= SESSION_IDLE_S_MAX
    assert not sessions.is_open(session)


def test_logging_out_ends_one_session(sessions: Sessions) -> None:
    first, second = log_in(sessions), log_in(sessions)
    sessions.end(first)
    assert not sessions.is_open(first)
    assert sessions.is_open(second)


def test_the_oldest_link_goes_first(sessions: Sessions) -> None:
    tokens = [sessions.new_link() for _ in range(LINKS_MAX + 1)]
    assert sessions.log_in(tokens[0]) is None
    assert all(sessions.log_in(token) for token in tokens[1:])


def test_the_session_that_is_idle_for_longest_goes_first(sessions: Sessions, clock: Clock) -> None:
    opened = []
    for _ in range(SESSIONS_MAX):
        clock.now += 1
        opened.append(log_in(sessions))
    clock.now += 1
    assert sessions.is_open(opened[0])
    clock.now += 1
    newest = log_in(sessions)
    assert sessions.is_open(newest)
    assert sessions.is_open(opened[0])
    assert not sessions.is_open(opened[1])


def test_a_browser_gets_no_link_a_moment_after_another(sessions: Sessions, clock: Clock) -> None:
    assert sessions.asked_link() is not None
    assert sessions.asked_link() is None
    clock.now += LINK_PAUSE_S
    assert sessions.asked_link() is not None


def test_tokens_are_kept_as_hashes_only(sessions: Sessions) -> None:
    token, session = sessions.new_link(), log_in(sessions)
    kept = repr(vars(sessions))
    assert token not in kept
    assert session not in kept
