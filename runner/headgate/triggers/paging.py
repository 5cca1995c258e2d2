"""`PagedTrigger`: reads a source page by page, and fires an event for each page."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, ClassVar, NamedTuple

import tenacity
import trio

from headgate.protocol.values import encode_value
from headgate.triggers.base import BaseTrigger, TriggerEvent

__all__ = ["Page", "PagedTrigger"]


class Page(NamedTuple):
    """One page: its rows, and the cursor by which the next page is fetched; None if there is no next one.

    Both are values that can be stored; together they have to fit an event.
    """

    rows: Any
    next: Any = None


class PagedTrigger(BaseTrigger):
    """Fires an event for each page of a source, and ends with the last page. A subclass fetches one page::

        # user_pages.py
        from dataclasses import dataclass

        import httpx2

        from headgate.triggers.paging import Page, PagedTrigger


        @dataclass
        class UserPages(PagedTrigger):
            url: str

            async def fetch(self, cursor):  # None: the first page
                async with httpx2.AsyncClient() as client:
                    response = await client.get(self.url, params={"after": cursor or 0})
                users = response.raise_for_status().json()
                return Page(users["users"], next=users.get("next"))

    The payload of an event is ``{"page": int, "rows": ..., "next": ...}``; pages are counted from 0. If the trigger is
    started anew, it goes on after its newest stored page, and a page that is fired again is recognised by its key
    (I2). An exception of ``fetch`` is logged, and the page is fetched again, ``tries_max`` times at most, with waits
    that double from ``retry_wait_s`` to ``retry_wait_max_s``; then it fails the trigger.
    """

    tries_max: ClassVar[int] = 5  # enough for a service to restart; one that is down is to be reported
    retry_wait_s: ClassVar[float] = 1.0
    retry_wait_max_s: ClassVar[float] = 60.0

    @abc.abstractmethod
    async def fetch(self, cursor: Any) -> Page:
        """Return the page at ``cursor``: None for the first one, else ``next`` of the page before."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class, and the fields of a dataclass; a subclass that is none overrides it."""
        if not dataclasses.is_dataclass(self):
            raise NotImplementedError(f"{type(self).__name__} must be a dataclass, or override serialize")
        return self._classpath(), {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fetch and fire page after page.

        Raises what the last try of `fetch` raises, ValueError for no page, and `ValueNotSerializable` for a cursor that
        cannot be stored.
        """
        number, cursor = _place_after(await self.last_event())
        while number == 0 or cursor is not None:
            page = await self._page(cursor)
            is_last = page.next is None
            payload = {"page": number, "rows": page.rows, "next": page.next}
            yield TriggerEvent(payload, key=f"page {number}", is_last=is_last)
            number, cursor = number + 1, page.next

    async def _page(self, cursor: Any) -> Page:
        retrying = tenacity.AsyncRetrying(
            sleep=trio.sleep,
            stop=tenacity.stop_after_attempt(self.tries_max),
            wait=tenacity.wait_exponential(self.retry_wait_s, self.retry_wait_max_s),
            before_sleep=self._log_failure,
            reraise=True,
        )
        page: object = await retrying(self.fetch, cursor)
        if not isinstance(page, Page):
            raise ValueError(f"{type(self).__name__}.fetch must return a Page, not {page!r:.200}")
        if page.next is not None and page.next == cursor:
            raise ValueError(f"{type(self).__name__}.fetch({cursor!r:.200}) names the same page as the next one")
        # Without it no page after this could be stored either, and each would be fetched and refused at once.
        encode_value(page.next, where=f"next of {type(self).__name__}.fetch({cursor!r:.200})")
        return page

    def _log_failure(self, state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error = state.outcome.exception()
        wait_s = state.next_action.sleep
        self.log.warning("page not fetched, try %d; again in %g s: %r", state.attempt_number, wait_s, error)


def _place_after(last: TriggerEvent | None) -> tuple[int, Any]:
    """Return the number and the cursor of the page after an event. Raises ValueError if the event is no page."""
    if last is None:
        return 0, None
    match last.payload:
        case {"page": int(number), "rows": _, "next": cursor}:
            return number + 1, cursor
        case payload:
            raise ValueError(f"the newest event of the trigger is not a page, after which to go on: {payload!r:.200}")
