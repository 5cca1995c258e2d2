"""Queries that users' code sends to the supervisor: variables, connections, XComs, the states of other runs.

A worker runs one step at a time, so its query handler belongs to the process, and threads that the step starts can
send queries as well. A runner has many triggers, so its handler is a context variable, which the tasks of triggers
inherit. Operators, `Variable` and the like call `send_query`, triggers `send_query_from_trigger`; the session of the
process provides the handler. A secret in a result is masked in everything this process writes afterwards (`secrets`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from headgate.protocol.errors import ProtocolError
from headgate.protocol.masking import SecretMask
from headgate.protocol.messages.queries import Query, QueryResult, Response, TriggerQuery
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX

QueryHandler: TypeAlias = Callable[[Query], QueryResult]
TriggerQueryHandler: TypeAlias = Callable[[TriggerQuery], Awaitable[QueryResult]]
Kind = TypeVar("Kind")
Waiter = TypeVar("Waiter")

QUERY_BYTES_MAX: Final = KWARGS_BYTES_MAX + 64 * 1024  # the conf of a run, and names: far less than a frame

secrets: Final = SecretMask()  # secrets in results so far; see `headgate.child.logs.render`


class NoQueryHandler(RuntimeError):
    """A query was sent while no step of a task is running."""

    def __init__(self, query: Query) -> None:
        super().__init__(
            f"{type(query).__name__} cannot be sent here: only while a step of a task runs, not when a DAG file "
            f"is parsed, nor after the step has ended; a trigger uses its own async methods"
        )
        self.query = query


class QueryFailed(Exception):
    """The supervisor could not answer a query; the text is its reason."""


class InvalidQuery(ValueError):
    """A query cannot be sent: a name in it is not text, or it is too long."""


_handler: QueryHandler | None = None
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Query]] = msgspec.msgpack.Decoder(Query)


def send_query(query: Query) -> QueryResult:
    """Send a query to the supervisor and return its result. May be called in any thread of a step.

    Raises `NoQueryHandler` outside of a step, `QueryFailed` with the supervisor's reason, `InvalidQuery`.
    """
    handler = _handler
    if handler is None:
        raise NoQueryHandler(query)
    _check(query)
    result = handler(query)
    secrets.note(query, result)
    return result


@contextmanager
def queries_handled_by(handler: QueryHandler) -> Generator[None]:
    """Pass the queries of all threads to ``handler`` inside the block."""
    global _handler
    before, _handler = _handler, handler
    try:
        yield
    finally:
        _handler = before


def _check(query: Query) -> None:
    """Refuse a query that the supervisor could not read, so that the error reaches its author and no one else (I9)."""
    try:
        data = _encoder.encode(query)
        _decoder.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidQuery(f"{type(query).__name__} cannot be sent: {error}") from None
    if len(data) > QUERY_BYTES_MAX:
        raise InvalidQuery(f"{type(query).__name__} has {len(data):,} bytes; the limit is {QUERY_BYTES_MAX:,}")


def result_of(query: Query, response: Response) -> QueryResult:
    """Return the result in the response to a query. Raises `QueryFailed` if there is none."""
    if response.error or response.result is None:
        raise QueryFailed(response.error or f"the supervisor has no result for {type(query).__name__}")
    return response.result


def of_kind(kind: type[Kind], query: Query, result: QueryResult) -> Kind:
    """Return the result of a query. Raises `ProtocolError` if it is of another kind than that query has."""
    if not isinstance(result, kind):
        raise ProtocolError(f"the supervisor answers {type(query).__name__} with {type(result).__name__}")
    return result


class OpenRequests(Generic[Waiter]):
    """The requests of one link that have no response yet, by id. Ids grow and are not used twice."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}
        self._last_id = 0

    @property
    def next_id(self) -> int:
        """The id that the next request gets."""
        return self._last_id + 1

    def open(self, waiter: Waiter) -> int:
        """Return the id of a new request, for which ``waiter`` waits."""
        self._last_id += 1
        self._waiters[self._last_id] = waiter
        return self._last_id

    def close(self, request_id: int) -> Waiter | None:
        """Return the waiter of a request that is over; None if it is not open, for example because it was cancelled."""
        return self._waiters.pop(request_id, None)

    def close_all(self) -> dict[int, Waiter]:
        """Close all requests; return their waiters by id."""
        waiters, self._waiters = self._waiters, {}
        return waiters


# --- triggers ------------------------------------------------------------------------------------

_trigger_handler: ContextVar[TriggerQueryHandler | None] = ContextVar("headgate trigger query handler", default=None)


async def send_query_from_trigger(query: TriggerQuery) -> QueryResult:
    """Send a query to the supervisor from a trigger. Raises the same as `send_query`."""
    handler = _trigger_handler.get()
    if handler is None:
        raise NoQueryHandler(query)
    _check(query)
    result = await handler(query)
    secrets.note(query, result)
    return result


@contextmanager
def trigger_queries_handled_by(handler: TriggerQueryHandler) -> Generator[None]:
    """Pass the queries of all tasks that are started inside the block to ``handler``."""
    token = _trigger_handler.set(handler)
    try:
        yield
    finally:
        _trigger_handler.reset(token)
