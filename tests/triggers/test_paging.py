"""Triggers that read a source page by page: in order, each page once over restarts, and with retries."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from tests.triggers.test_http import serving, status

from headgate.testing import RoundTripFailed, TriggerFailed, run_trigger
from headgate.triggers.base import TriggerEvent
from headgate.triggers.http import PAGE_BYTES_MAX, HttpPagesTrigger, HttpTriggerError
from headgate.triggers.paging import Page, PagedTrigger

ROWS = {None: Page([1, 2], next="b"), "b": Page([], next={"c": 3}), "last": Page([4])}


@dataclass
class Pages(PagedTrigger):
    """Three pages, whose cursors are values of any kind."""

    failures: int = 0
    fetched: ClassVar[list[Any]] = []
    kept: int = field(default=0, init=False)

    async def fetch(self, cursor: Any) -> Page:
        self.fetched.append(cursor)
        if self.kept < self.failures:
            self.kept += 1
            raise ConnectionError("down")
        return ROWS["last"] if cursor == {"c": 3} else ROWS[cursor]


@pytest.fixture(autouse=True)
def nothing_fetched() -> None:
    Pages.fetched.clear()


def event(page: int, rows: Any, following: Any = None) -> TriggerEvent:
    payload = {"page": page, "rows": rows, "next": following}
    return TriggerEvent(payload, key=f"page {page}", is_last=following is None)


ALL = [event(0, [1, 2], "b"), event(1, [], {"c": 3}), event(2, [4])]


def test_each_page_is_an_event_and_that_of_the_last_page_is_the_last() -> None:
    assert run_trigger(Pages()) == ALL
    assert Pages.fetched == [None, "b", {"c": 3}]


@pytest.mark.parametrize(("stored", "fetched"), [(0, ["b", {"c": 3}]), (1, [{"c": 3}]), (2, [])])
def test_a_restarted_one_goes_on_after_its_newest_page(stored: int, fetched: list[Any]) -> None:
    assert run_trigger(Pages(), last_event=ALL[stored]) == ALL[stored + 1 :]
    assert Pages.fetched == fetched


def test_a_page_that_cannot_be_fetched_is_tried_again_after_a_wait_that_doubles() -> None:
    assert run_trigger(Pages(failures=4), within=timedelta(seconds=16)) == ALL
    assert Pages.fetched == [None] * 5 + ["b", {"c": 3}]


def test_the_last_failed_try_fails_the_trigger_with_its_own_error() -> None:
    with pytest.raises(TriggerFailed, match="ConnectionError: down") as failed:
        run_trigger(Pages(failures=5))
    assert isinstance(failed.value.__cause__, ConnectionError)


@dataclass
class Odd(PagedTrigger):
    kind: str

    async def fetch(self, cursor: Any) -> Any:
        return {"no page": [1], "loop": Page([], next=7), "cursor": Page([1], next=object())}[self.kind]


class NoDataclass(PagedTrigger):
    async def fetch(self, cursor: Any) -> Page:
        return Page([])


def test_what_is_no_page_fails_the_trigger() -> None:
    with pytest.raises(TriggerFailed, match=r"ValueError: Odd.fetch must return a Page, not \[1\]"):
        run_trigger(Odd("no page"))
    with pytest.raises(
        TriggerFailed, match=r"ValueError: Odd.fetch\(7\) names the same page as the next one"
    ) as failed:
        run_trigger(Odd("loop"))
    assert len(failed.value.events) == 1
    with pytest.raises(TriggerFailed, match=r"next of Odd\.fetch\(None\) .*object"):
        run_trigger(Odd("cursor"))
    with pytest.raises(TriggerFailed, match="the newest event of the trigger is not a page, after which to go on: 5"):
        run_trigger(Pages(), last_event=TriggerEvent(5))


def test_one_that_is_no_dataclass_says_how_it_is_stored() -> None:
    with pytest.raises((RoundTripFailed, NotImplementedError), match="NoDataclass must be a dataclass, or override"):
        run_trigger(NoDataclass())


# --- over HTTP -----------------------------------------------------------------------------------


def test_pages_are_read_by_the_field_that_names_the_next() -> None:
    with serving(
        status(200, b'{"users": ["a"], "next": "/status?after=1"}'),
        status(503),
        status(200, b'{"users": ["b"], "next": "?after=2"}'),
        status(200, b'{"users": ["c"]}'),
    ) as server:
        trigger = HttpPagesTrigger(server.url, rows="users", next="next", headers={"Accept": "application/json"})
        events = run_trigger(trigger)
    assert [(e.payload["rows"], e.is_last) for e in events] == [(["a"], False), (["b"], False), (["c"], True)]
    assert events[0].payload["next"] == f"{server.url}?after=1"
    assert [path for _, path, _ in server.requests] == ["/status", *["/status?after=1"] * 2, "/status?after=2"]
    assert {headers["Accept"] for _, _, headers in server.requests} == {"application/json"}


def test_pages_are_read_by_the_link_header() -> None:
    with serving(status(200, b"[1]", Link='</status?page=2>; rel="next"'), status(200, b"[2]")) as server:
        events = run_trigger(HttpPagesTrigger(server.url))
    assert [e.payload["rows"] for e in events] == [[1], [2]]


def test_a_page_may_be_as_long_as_an_event() -> None:
    with serving(status(200, b'["' + b"x" * 1_000_000 + b'"]')) as server:
        (event,) = run_trigger(HttpPagesTrigger(server.url))
    assert len(event.payload["rows"][0]) == 1_000_000


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{}", "not a page: KeyError: 'users'"),
        (b"[]", "not a page: TypeError: "),
        (b"no json", "not a page: DecodeError: "),
        (b'{"users": [], "next": 5}', "not a page: TypeError: the next page is 5, not a URL"),
        (b'{"users": [], "next": "http://127.0.0.2/"}', "not a page: ValueError: the next page is at another scheme"),
        (b" " * (PAGE_BYTES_MAX + 1), "the body is longer than 8,388,608 bytes"),
    ],
)
def test_a_response_that_is_no_page_is_an_error_that_names_the_url(body: bytes, problem: str) -> None:
    with serving(status(200, body)) as server:
        with pytest.raises(TriggerFailed, match=f"HttpTriggerError: {server.url}: {problem}") as failed:
            run_trigger(HttpPagesTrigger(f"{server.url}?token=secret", rows="users", next="next"))
        assert isinstance(failed.value.__cause__, HttpTriggerError)
        assert "secret" not in str(failed.value)
        assert len(server.requests) == HttpPagesTrigger.tries_max


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"url": "ftp://a"}, "url must start with http"),
        ({"url": "http://a", "headers": {"X": "a\r\nb"}}, "header 'X' is not ASCII text on one line"),
        ({"url": "http://a", "timeout_s": 0}, "timeout_s must be a positive number of seconds, not 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        HttpPagesTrigger(**arguments)
