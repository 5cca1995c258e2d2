"""Elements, as a step emits them: one by one, for those that are expanded over the task while it still runs.

They are sent with the outcome of the step. A generator's are sent before that as well, as soon as they come, or in
groups if they come faster than they can be stored: a thread sends the rest of such a group, if the generator works on
its next value for long. Those that a handler of a stream emits go with the place up to which it has come, so that none
is emitted twice.

An element may have a key: then it is one with that of the same key, whenever it was emitted, and whatever its value.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Final

from headgate.child.queries import of_kind, send_query
from headgate.protocol.messages.dags import XCOM_BYTES_MAX
from headgate.protocol.messages.queries import ElementRoom, EmitElements
from headgate.protocol.messages.steps import Emitted
from headgate.protocol.values import encode_value

SENT_BYTES_MAX: Final = 512 * 1024  # of elements in one message before the outcome
SENT_MAX: Final = 1000
KEY_CHARS_MAX: Final = 8192  # of which a hash is stored
OUTCOME_BYTES_MAX: Final = 8 * 1024 * 1024  # of elements in one outcome: it fits a frame
ROOM_WAIT_S: Final = 10.0  # how long a task waits for those that are expanded over it, before it goes on regardless
ROOM_LOOK_S: Final = 0.25
REST_S: Final = 0.1  # after which the rest of a group is sent if nothing more comes
REGARDLESS: Final = 1000  # elements that it emits without waiting again


class EmittedAgain(Exception):
    """A step emits what an earlier try has emitted, and its elements are not compared."""


class KeysMixed(Exception):
    """A step emits elements with keys, and others without."""


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
        self._keys: list[bytes] = []  # as many as there are values, or none
        self._has_keys: bool | None = None  # once something is emitted
        self._bytes = 0
        self._kept = 0  # of the values: those that belong to events that are handled
        self._room = 0
        self._regardless = 0  # elements that are emitted without waiting for room
        self._sent_at = self._sending_s = 0.0
        self._lock = threading.Lock()  # of all that a generator emits, for the thread that sends the rest of a group
        self._late: threading.Timer | None = None
        self._late_error: Exception | None = None  # of that thread
        self.is_handling = False

    def add(self, value: Any, key: str | None = None) -> None:
        """Emit a value.

        Raises `ValueNotSerializable`, `ValueTooLong`, TypeError and ValueError for the key, `KeysMixed`,
        `TooManyElements`, `EmittedAgain`, and what a query raises.
        """
        hashed = None if key is None else hash_of_key(key, "an element")
        if self._has_keys is not None and self._has_keys != (key is not None):
            raise KeysMixed("elements are emitted with keys and without: give a key to all of a task, or to none")
        if self._is_again and key is None:
            raise EmittedAgain(
                "execute has emitted in an earlier try, whose stream goes on: emit in the handler, with keys, or only "
                'if context["stream"] is None or has handled no event'
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
        self._keys += [] if hashed is None else [hashed]
        self._has_keys = hashed is not None
        self._bytes += len(encoded)

    def keep(self) -> None:
        """Count what was emitted up to here as belonging to events that are handled."""
        self._kept = len(self._values)

    def take(self, *, only_kept: bool = False) -> Emitted | None:
        """Return what goes with the outcome. A step that fails leaves no more than what it has kept."""
        count = self._kept if only_kept else len(self._values)
        return Emitted(self._first, tuple(self._values[:count]), tuple(self._keys[:count]))

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
        """Emit what a generator yields, also if it fails later; return what it returns. Raises what it raises."""
        try:
            returned = self._emit_all(generator)
        except Exception:
            with self._lock, suppress(Exception):  # the try fails in any case, with the first error
                self._store_rest()
            raise
        finally:
            if (late := self._late) is not None:
                late.cancel()
                late.join()
        self._check_late()
        return returned

    def _emit_all(self, generator: Generator[Any, Any, Any]) -> Any:
        while True:
            try:
                value = next(generator)
            except StopIteration as end:
                return end.value
            with self._lock:
                self._check_late()
                self.add(value)
                # Half of the time at most goes into sending: what comes faster is sent together.
                if time.monotonic() - self._sent_at >= self._sending_s:
                    self.send()
                elif self._late is None:
                    self._late = threading.Timer(REST_S, self._send_late)
                    self._late.daemon = True
                    self._late.start()

    def _send_late(self) -> None:
        with self._lock:
            try:
                self._store_rest()
            except Exception as error:
                self._late_error = error
            self._late = None

    def _store_rest(self) -> None:
        if self._values and self._late_error is None:
            self._store()

    def _check_late(self) -> None:
        if self._late_error is not None:
            raise self._late_error

    def _store(self) -> None:
        query = EmitElements(self._first, tuple(self._values), tuple(self._keys))
        answer = of_kind(ElementRoom, query, send_query(query))
        self._first += len(self._values)
        self._regardless -= len(self._values)
        self._room = answer.room
        self._values, self._keys, self._bytes = [], [], 0


def hash_of_key(key: str, of: str) -> bytes:
    """Return what is stored of the key of ``of``. Raises TypeError and ValueError."""
    if not isinstance(key, str):
        raise TypeError(f"the key of {of} must be a str, not {key!r:.100}")
    if not 1 <= len(key) <= KEY_CHARS_MAX:
        raise ValueError(f"the key of {of} must have 1..{KEY_CHARS_MAX} characters, not {len(key)}")
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
