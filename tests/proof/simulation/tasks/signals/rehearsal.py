"""Code of an author that asks its supervisor, and waits for the answers, in one process with everything else.

Such code is synchronous, so it cannot wait here. It is run again and again from its beginning, each time with one more
answer, until it comes to its end: what it has asked before is answered at once, with what was answered then, and at
the times that it was then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from headgate.child import queries
from headgate.protocol.messages.queries import Query, QueryResult, Response

Result = TypeVar("Result")


class _Unanswered(BaseException):
    """The code asks for something that is not answered yet."""

    def __init__(self, query: Query) -> None:
        super().__init__(query)
        self.query = query


class Clock:
    """Stands for the module ``time`` of code that is rehearsed."""

    @staticmethod
    def monotonic() -> float:
        """Return the time, the same at each rehearsal."""
        assert _current is not None, "the code is not rehearsed"
        return _current.now()


class Rehearsal:
    """The code ``program``, which must do the same each time; it says what it does by ``note``."""

    def __init__(self, program: Callable[[Rehearsal], None], say: Callable[[str, object], None]) -> None:
        self._program = program
        self._say = say
        self._answers: list[tuple[Query, Response]] = []
        self._times: list[float] = []
        self._said = self._asked = self._read = self._saying = 0

    def run(self) -> Query | None:
        """Run it as far as it comes; return what it asks for, None at its end. Raises what it raises."""
        global _current
        self._asked = self._read = self._saying = 0
        _current = self
        try:
            with queries.queries_handled_by(self._ask):
                self._program(self)
        except _Unanswered as unanswered:
            return unanswered.query
        finally:
            _current = None
        return None

    def answer(self, query: Query, response: Response) -> None:
        """Answer what it has asked for last."""
        self._answers.append((query, response))

    def note(self, what: str, value: object) -> None:
        """Say something; it is heard once."""
        self._saying += 1
        if self._saying > self._said:
            self._said = self._saying
            self._say(what, value)

    def now(self) -> float:
        """Return the time."""
        self._read += 1
        if self._read > len(self._times):
            self._times.append(trio.current_time())
        return self._times[self._read - 1]

    def _ask(self, query: Query) -> QueryResult:
        if self._asked == len(self._answers):
            raise _Unanswered(query)
        asked, response = self._answers[self._asked]
        assert type(asked) is type(query), "it does the same each time"
        self._asked += 1
        return queries.result_of(asked, response)


_current: Rehearsal | None = None
