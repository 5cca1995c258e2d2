"""Signals, as a program of a user sends and reads them: a part of `Client`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import uuid4

import msgspec

from headgate.client.waiting import check_seconds, wait_for_page
from headgate.protocol.messages.signals import (
    AUTOMATIC,
    DEFAULT_NAMESPACE,
    SIGNAL_BYTES_MAX,
    SIGNALS_PER_PAGE_MAX,
    SentSignal,
    SignalSend,
)
from headgate.protocol.values import encode_value
from headgate.store.db.transaction import Database
from headgate.store.ids import DagRunId
from headgate.store.signal_verbs import SignalVerbs
from headgate.store.signals import reading
from headgate.store.signals.reading import Signal, SignalPage
from headgate.store.signals.sending import NewSignal

SENDER = "a client"


class Send(msgspec.Struct, frozen=True):
    """One signal of `ClientSignals.send_signals`; the fields are the arguments of `ClientSignals.send_signal`."""

    key: str
    value: Any = None
    dedup: str | None = None
    namespace: str = DEFAULT_NAMESPACE
    run: tuple[str, str] | None = None


class ClientSignals:
    """The methods of a client for signals."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._signals = SignalVerbs(database)

    def send_signal(
        self,
        key: str,
        value: Any = None,
        *,
        dedup: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        run: tuple[str, str] | None = None,
    ) -> SentSignal:
        """Send a signal; return its version, which no other signal of the key has or will have.

        If ``dedup`` is given, and a version of the key that is kept was sent with the same one, nothing is sent, and
        the version of that one is returned, with ``is_new=False``: so a program that gives one may simply send again
        after `DatabaseAway`. ``run``, a dag_id and a run_id, sends it to that run alone.

        Raises `ValueRefused` for a malformed key, `NoSuchRow` for an unknown run, and `ValueNotSerializable` and
        `ValueTooLong` of `headgate.protocol.errors` for a value; TypeError for an argument of another type.
        """
        (sent,) = self.send_signals([Send(key, value, dedup, namespace, run)])
        return sent

    def send_and_start(self, dag: str, signals: Iterable[Send]) -> tuple[list[SentSignal], str | None]:
        """Send signals as `send_signals` does, and start a run of a DAG with them unless one is open.

        Both are one transaction. The run_id of the new run is returned, None if one is open that takes signals, or if
        none of the signals is new. Raises `NoSuchRow` for an unknown DAG.
        """
        return self._signals.send_and_start(self._checked(signals), dag)

    def send_signals(self, signals: Iterable[Send]) -> list[SentSignal]:
        """Send signals in one transaction, at most `SENDS_MAX`; return what each has become, in the same order.

        Raises as `send_signal` does; then none of them is sent.
        """
        return self._signals.send(self._checked(signals))

    def _checked(self, signals: Iterable[Send]) -> list[NewSignal]:
        runs: dict[tuple[str, str], DagRunId] = {}
        new = []
        for one in signals:
            if not isinstance(one, Send):
                raise TypeError(f"signals are sent as Send(key, value), not as {one!r:.100}")
            _check_texts(key=one.key, namespace=one.namespace)
            if one.dedup is not None:
                _check_texts(dedup=one.dedup)
            if one.run is not None and _checked_run(one.run) not in runs:
                runs[one.run] = self._signals.run(*one.run)
            data = encode_value(one.value, where=f"signal {one.key!r:.60}", bytes_max=SIGNAL_BYTES_MAX)
            said = SignalSend(one.key, data, automatic_dedup() if one.dedup is None else one.dedup, one.namespace)
            checked = NewSignal.of(said, SENDER, None)
            new.append(checked if one.run is None else msgspec.structs.replace(checked, dag_run=runs[one.run]))
        return new

    def list_signals(
        self,
        key: str,
        version: int | None = None,
        *,
        after: int = 0,
        limit: int = SIGNALS_PER_PAGE_MAX,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> list[Signal]:
        """Return the versions of a key above ``after`` that are kept, the oldest first; or only ``version``.

        There may be more than are returned: go on after the last of them. Raises `ValueRefused`.
        """
        _check_texts(key=key, namespace=namespace)
        if version is not None:
            found = self._signals.version(key, namespace, version)
            return [] if found is None else [found]
        return list(self._signals.page(key, namespace, after=after, limit=limit).signals)

    def listen_signal(
        self,
        key: str,
        *,
        after: int | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        idle_s: float | None = None,
    ) -> Iterator[Signal]:
        """Iterate over the versions of a key above ``after``, and wait for those to come.

        Without ``after`` these are the versions that are sent from now on. It ends after ``idle_s`` seconds without
        one, and never by itself if that is None. It waits as `headgate.client.Client.follow` does. Raises
        `ValueRefused`, and ValueError for an ``idle_s`` that is no time.
        """
        _check_texts(key=key, namespace=namespace)
        check_seconds("idle_s", idle_s)
        reading.check_address(key, namespace)
        reading.check_version("after", after or 0)
        if after is None:
            newest = self._signals.newest(key, namespace)
            after = newest[-1].version if newest else 0
        return self._listen(key, namespace, after, idle_s)

    def _listen(self, key: str, namespace: str, after: int, idle_s: float | None) -> Iterator[Signal]:
        def look() -> SignalPage:
            return self._signals.page(key, namespace, after=after)

        while (page := wait_for_page(self._database, look, idle_s, "signals")).signals:
            for one in page.signals:
                after = one.version
                yield one


def _check_texts(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, not {value!r:.100}")


def _checked_run(run: object) -> tuple[str, str]:
    # A list would do, but for the dict by which each run is looked up once; and a text of two letters is no pair.
    if isinstance(run, tuple) and len(run) == 2 and all(isinstance(name, str) for name in run):
        return run
    raise TypeError(f"run must be a tuple of a dag_id and a run_id, not {run!r:.100}")


def automatic_dedup() -> str:
    """Return a dedup that no other signal has, for a sender that gives none: the verb may be repeated (I25)."""
    return f"{AUTOMATIC}{uuid4().hex}"
