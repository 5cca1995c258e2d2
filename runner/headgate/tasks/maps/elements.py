"""Elements, as a step emits them: one by one, for those that are expanded over the task while it still runs.

They are sent with the outcome of the step. A generator's are sent before that as well, as soon as they come, or in
groups if they come faster than they can be stored. Those that a handler of a stream emits go with the place up to which
it has come, so that none is emitted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, Final

from headgate.child.queries import send_query
from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.dags import XCOM_BYTES_MAX
from headgate.protocol.messages.queries import ElementRoom, EmitElements
from headgate.protocol.messages.steps import Emitted
from headgate.protocol.values import encode_value

SENT_BYTES_MAX: Final = 512 * 1024  # of elements in one message before the outcome
SENT_MAX: Final = 1000
OUTCOME_BYTES_MAX: Final = 8 * 1024 * 1024  # of elements in one outcome: it fits a frame
ROOM_WAIT_S: Final = 10.0  # how long a task waits for those that are expanded over it, before it goes on regardless
ROOM_LOOK_S: Final = 0.25
REGARDLESS: Final = 1000  # elements that it emits without waiting again


class EmittedAgain(Exception):
    """A step emits what an earlier try has emitted, and its elements are not compared."""


class TooManyElements(Exception):
    """A handler of a stream emits more than fits into the outcome of one step."""


class Emissions:
    """What one step has emitted. ``first`` is the position of its first element.

    A step ``is_again`` if it begins with ``execute``, and the events of its stream are handled in part: what belongs to
    these is emitted already, and nobody knows where in between ``execute`` would emit.
    """

    def __init__(self, first: int, sleep: Callable[[float], None] = time.sleep, *, is_again: bool = False) -> None:
        self._first = first
        self._is_again = is_again
        self._sleep = sleep
        self._values: list[bytes] = []
        self._bytes = 0
        self._kept = 0  # of the values: those that belong to events that are handled
        self._room = 0
        self._regardless = 0  # elements that are emitted without waiting for room
        self._sent_at = self._sending_s = 0.0
        self.is_handling = False

    def add(self, value: Any) -> None:
        """Emit a value.

        Raises `ValueNotSerializable`, `ValueTooLong`, `TooManyElements`, `EmittedAgain`, and what a query raises.
        """
        if self._is_again:
            raise EmittedAgain(
                "execute has emitted in an earlier try, whose stream goes on: emit in the handler, or only if "
                'context["stream"] is None or has handled no event'
            )
        position = self._first + len(self._values)
        encoded = encode_value(value, where=f"element {position}", bytes_max=XCOM_BYTES_MAX)
        limit = OUTCOME_BYTES_MAX if self.is_handling else SENT_BYTES_MAX
        if self._bytes + len(encoded) > limit or (not self.is_handling and len(self._values) >= SENT_MAX):
            if self.is_handling:
                raise TooManyElements(
                    f"the handler has emitted {len(self._values):,} elements for the events of one step; the limit is "
                    f"{limit:,} bytes: handle fewer events at a time, with stream=Batch(count=...)"
                )
            self.send()
        self._values.append(encoded)
        self._bytes += len(encoded)

    def keep(self) -> None:
        """Count what was emitted up to here as belonging to events that are handled."""
        self._kept = len(self._values)

    def take(self, *, only_kept: bool = False) -> Emitted | None:
        """Return what goes with the outcome. A step that fails leaves no more than what it has kept."""
        return Emitted(self._first, tuple(self._values[: self._kept] if only_kept else self._values))

    def send(self) -> None:
        """Have what was emitted stored now; wait if those that are expanded over the task are far behind."""
        begun_at = time.monotonic()
        self._store()
        self._sent_at = time.monotonic()
        self._sending_s = self._sent_at - begun_at
        if self._room <= 0 and self._regardless <= 0:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait until those that are expanded over the task have caught up; but not for ever.

        They may need the worker that this one has.
        """
        waited_s = 0.0
        while self._room <= 0:
            if waited_s >= ROOM_WAIT_S:
                self._regardless = REGARDLESS
                return
            self._sleep(ROOM_LOOK_S)
            waited_s += ROOM_LOOK_S
            self._store()

    def run(self, generator: Generator[Any, Any, Any]) -> Any:
        """Emit what a generator yields; return what it returns. Raises what it raises."""
        while True:
            try:
                value = next(generator)
            except StopIteration as end:
                return end.value
            self.add(value)
            # Half of the time at most goes into sending: what comes faster is sent together.
            if time.monotonic() - self._sent_at >= self._sending_s:
                self.send()

    def _store(self) -> None:
        answer = send_query(EmitElements(self._first, tuple(self._values)))
        if not isinstance(answer, ElementRoom):
            raise ProtocolError(f"the supervisor answers EmitElements with {type(answer).__name__}")
        self._first += len(self._values)
        self._regardless -= len(self._values)
        self._room = answer.room
        self._values, self._bytes = [], 0
