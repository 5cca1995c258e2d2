"""Steps that listen for signals: their queries wait here until something is sent, and in no thread.

A step asks by `ListenSignals`. If there is nothing yet, the query is *parked*: it costs no statement until signals may
have been sent, which whoever sends them says (`Listeners.notify`). Then one statement finds out which of the keys have
new versions, and only the queries for these are looked up again. After `LISTEN_S_MAX` seconds at most a query is
answered without a version, and the step asks again: so a bell that was missed costs no more than that.

There are never more parked queries than requests that the workers may have open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from headgate.protocol.messages.queries import ListenSignals, Response, SignalsHeard
from headgate.protocol.messages.signals import LISTEN_S_MAX
from headgate.store.ids import DagRunId
from headgate.store.task_verbs import TaskVerbs
from headgate.supervisor.executors.base import StepQuery
from headgate.supervisor.queries import QueryHandler, QueryRefused

LOOKS_A_STEP_MAX = 4  # at parked queries, before other duties run; each is a transaction


class _Parked(msgspec.Struct):
    """A query that waits for a version above ``seen``, until the time ``ends_at``."""

    token: str
    id: int
    query: ListenSignals
    dag_run: DagRunId
    seen: int
    ends_at: float

    @property
    def address(self) -> tuple[str, str]:
        """The namespace and the key."""
        return self.query.namespace, self.query.key


class Listeners:
    """The parked queries of one supervisor's steps."""

    def __init__(self, answers: QueryHandler, store: TaskVerbs) -> None:
        self._answers = answers
        self._store = store
        self._parked: list[_Parked] = []  # those that were looked up last are at the end
        self._is_due = False

    def __len__(self) -> int:
        return len(self._parked)

    def hear(self, asked: StepQuery, query: ListenSignals, dag_run: DagRunId, now: float) -> Response | None:
        """Return the answer to a query, None if it is parked. May raise as the store does: then ask again."""
        ends_at = now + min(max(0.0, query.within_s), LISTEN_S_MAX)
        parked = _Parked(asked.token, asked.id, query, dag_run, query.after or 0, ends_at)
        answer = self._look_up(parked, now)
        if answer is None:
            self._parked.append(parked)
        return answer

    def notify(self) -> None:
        """Look soon: signals may have been sent."""
        self._is_due = True

    def forget(self, token: str) -> None:
        """Drop the queries of a step, which has ended."""
        self._parked = [parked for parked in self._parked if parked.token != token]

    def clear(self) -> None:
        """Drop all queries."""
        self._parked.clear()

    def step(self, now: float) -> Iterator[tuple[str, Response]]:
        """Yield the answers that there are now, each with the token of its step. May raise as the store does."""
        if self._is_due and self._parked:
            yield from self._look(now)
        else:
            self._is_due = False
        for parked in [parked for parked in self._parked if now >= parked.ends_at]:
            self._parked.remove(parked)
            yield parked.token, Response(parked.id, SignalsHeard((), parked.seen))

    def wake_at(self) -> float:
        """Return when `step` has something to do, if nothing is sent."""
        if self._is_due and self._parked:
            return 0.0
        return min((parked.ends_at for parked in self._parked), default=math.inf)

    def _look(self, now: float) -> Iterator[tuple[str, Response]]:
        """Look up some of the queries whose keys have new versions, and yield the answers."""
        newest = self._store.signal_versions({parked.address for parked in self._parked})
        moved = [parked for parked in self._parked if newest.get(parked.address, 0) > parked.seen]
        for parked in moved[:LOOKS_A_STEP_MAX]:
            answer = self._look_up(parked, now)
            if answer is not None:
                self._parked.remove(parked)
                yield parked.token, answer
        self._is_due = len(moved) > LOOKS_A_STEP_MAX

    def _look_up(self, parked: _Parked, now: float) -> Response | None:
        """Return the answer to a query; None if there is nothing yet, and time is left."""
        query = parked.query
        if query.after is not None:
            query = msgspec.structs.replace(query, after=parked.seen)
        try:
            heard = self._answers.answer(query, dag_run_id=parked.dag_run)
        except QueryRefused as refused:
            return Response(parked.id, error=str(refused))
        assert isinstance(heard, SignalsHeard), "it answers each query with its own kind of result"
        parked.seen = heard.seen
        is_answer = heard.signals or query.after is None or now >= parked.ends_at
        return Response(parked.id, heard) if is_answer else None
