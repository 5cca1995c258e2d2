"""Queries of triggers. Their own newest events are read from the store; others are answered like those of tasks."""

from __future__ import annotations

from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.queries import LastEvent, Request, Response
from headgate.store.errors import DATABASE_UNUSABLE
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.queries import QueryHandler, QueryRefused


class TriggerQueries:
    """Answers the requests of runners. Without ``answers``, triggers can only ask for their own last events.

    If the database does not respond, each query blocks the loop until its timeout, so it is not asked again at once.
    """

    def __init__(
        self, store: Store, answers: QueryHandler | None, *, frame_bytes_max: int, retry: DatabaseRetry
    ) -> None:
        self._store = store
        self._answers = answers
        self._frame_bytes_max = frame_bytes_max
        self._retry = retry

    def answer(self, request: Request, now: float) -> Response:
        """Return the answer, or an error for the trigger. An answer that does not fit a frame is an error."""
        if not self._retry.ready(now):
            return Response(request.id, error="the database did not answer a moment ago; try again later")
        try:
            answer = self._look_up(request)
        except DATABASE_UNUSABLE as exc:
            self._retry.failed(exc, now)
            return Response(request.id, error=str(exc))
        except QueryRefused as exc:
            answer = Response(request.id, error=str(exc))
        self._retry.succeeded(now)
        needed, limit = len(encode_message(answer)), self._frame_bytes_max
        if needed > limit:
            error = f"the answer takes a frame of {needed:,} bytes; the limit is {limit:,} (frame_bytes_max)"
            return Response(request.id, error=error)
        return answer

    def _look_up(self, request: Request) -> Response:
        if isinstance(request.query, LastEvent):
            return Response(request.id, self._store.last_event(request.query.trigger_id))
        if self._answers is None:
            raise QueryRefused("this supervisor answers no such queries")
        return Response(request.id, self._answers.answer(request.query, dag_run_id=None))
