"""`BaseSignalService`: what every implementation of signals promises to authors.

An implementation says how signals are sent, read and heard: in a task by queries to the supervisor, elsewhere over
gRPC. What users see of it, and what is refused before anything is sent, is the same for all, and is written here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, overload

from headgate.protocol.messages.signals import (
    DEFAULT_NAMESPACE,
    SIGNALS_PER_PAGE_MAX,
    address_problem,
    version_problem,
)
from headgate.signals.listening import Hear, Heard, SignalWatcher, StopListening, pages_of, seconds_of
from headgate.signals.versions import Signal, SignalVersion

log = logging.getLogger(__name__)


class BaseSignalService(ABC):
    """Sends, lists and hears signals of one namespace. `tests.signals.conformance` has what users may rely on.

    A subclass implements `send_signals`, `list_stored` and `hear`, and may override `listening`.
    """

    def __init__(self, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.namespace = namespace

    def send_signal(self, key: str, value: Any = None, *, dedup: str | None = None) -> SignalVersion | None:
        """Send a signal; return its version, or None if that is not known yet.

        Sent again with the same ``dedup``, it keeps the version of the first. Raises ValueError for a malformed key or
        dedup, `ValueNotSerializable` and `ValueTooLong` for a value, and as the implementation does.
        """
        (sent,) = self.send_signals([Signal(key, value, dedup)])
        return sent

    @abstractmethod
    def send_signals(self, signals: Sequence[Signal]) -> list[SignalVersion]:
        """Send signals, all or none, in this order; return their versions."""

    @abstractmethod
    def list_stored(self, key: str, version: int | None, after: int, limit: int) -> list[SignalVersion]:
        """Return what `list_signals` does, for a key that is well-formed."""

    @abstractmethod
    def hear(self, key: str, after: int | None, within_s: float) -> Heard:
        """Return the versions of a well-formed key above ``after`` as soon as there are some, the oldest first.

        It may return with none at any time, and does so after ``within_s`` seconds. Without ``after`` it returns at
        once, with none: the place is the newest version that there is.
        """

    @contextmanager
    def listening(self, key: str) -> Generator[Hear]:
        """Hear one key again and again in the block: for an implementation that keeps something open meanwhile."""
        yield partial(self.hear, key)

    def list_signals(
        self, key: str, version: int | None = None, *, after: int = 0, limit: int = SIGNALS_PER_PAGE_MAX
    ) -> list[SignalVersion]:
        """Return the versions of a key above ``after`` that are kept, the oldest first; or only ``version``.

        There may be more than are returned, at most ``limit`` (1,000) or about 1 MiB: go on after the last of them, or
        let ``listen_signal("me", key, after=0, timeout=0)`` do that. Raises ValueError for a malformed key, version or
        place, and as the implementation does.
        """
        if (problem := address_problem(key, self.namespace)) is not None:
            raise ValueError(problem)
        for name, number in (("version", version), ("after", after)):
            if number is not None and (problem := version_problem(name, number)) is not None:
                raise ValueError(problem)
        return self.list_stored(key, version, after, limit)

    @overload
    def listen_signal(
        self,
        listener_name: str,
        key: str,
        watcher: None = None,
        version: int | None = None,
        *,
        after: int | None = None,
        timeout: timedelta | float | None = None,
    ) -> Iterator[SignalVersion]: ...

    @overload
    def listen_signal(
        self,
        listener_name: str,
        key: str,
        watcher: SignalWatcher,
        version: int | None = None,
        *,
        after: int | None = None,
        timeout: timedelta | float | None = None,
    ) -> None: ...

    def listen_signal(
        self,
        listener_name: str,
        key: str,
        watcher: SignalWatcher | None = None,
        version: int | None = None,
        *,
        after: int | None = None,
        timeout: timedelta | float | None = None,
    ) -> Iterator[SignalVersion] | None:
        """Iterate over the versions of a key above ``after``, and wait for those to come.

        Without ``after`` these are the versions that are sent after this call; with ``version`` it is that one alone,
        and the end follows it. Versions that are not kept any more are passed over. It ends after the time ``timeout``
        without a new one, in seconds if it is a number, and never by itself if that is None. ``listener_name`` stands
        in the log.

        With a ``watcher`` nothing is returned before the end: each time its `SignalWatcher.process` gets all signals
        that there are, until it raises `StopListening`.

        Raises ValueError for a malformed key, version or timeout, and as the implementation does.
        """
        if (problem := address_problem(key, self.namespace)) is not None:
            raise ValueError(problem)
        if watcher is not None and not isinstance(watcher, SignalWatcher):
            raise TypeError(f"the watcher must be a SignalWatcher, not {type(watcher).__name__}")
        if version is not None:
            if (problem := version_problem("version", version)) is not None:
                raise ValueError(problem)
            if after is not None or version < 1:
                raise ValueError(f"version is {version} and after is {after}: give one of them, the version from 1 on")
            after = version - 1
        if after is not None and (problem := version_problem("after", after)) is not None:
            raise ValueError(problem)
        seconds = seconds_of(timeout)
        if after is None:
            after = self.hear(key, None, 0.0).seen
        log.info("%s listens for signals under %r", listener_name, key)
        batches = self._batches(key, after, version, seconds)
        if watcher is None:
            return (one for batch in batches for one in batch)
        with closing(batches):
            for batch in filter(None, batches):
                try:
                    watcher.process(batch)
                except StopListening:
                    break
        return None

    def _batches(self, key: str, after: int, version: int | None, timeout_s: float) -> Generator[list[SignalVersion]]:
        with self.listening(key) as hear:
            for page in pages_of(hear, after, version, timeout_s):
                yield [one for one in page if version in (None, one.version)]
