"""`SignalService`: signals as a task sends, lists and hears them. The names are those of Airflow's proposal."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, overload

from headgate.child import queries
from headgate.protocol.messages.queries import ListSignals, QueryResult, SendSignals, SignalPage, SignalsSent
from headgate.protocol.messages.signals import (
    DEFAULT_NAMESPACE,
    SIGNALS_PER_PAGE_MAX,
    SignalSend,
    StoredSignal,
    address_problem,
)
from headgate.protocol.values import decode_value
from headgate.signals import outgoing
from headgate.signals.listening import SignalWatcher, StopListening, heard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Signal:
    """A value under a key. ``dedup``: if the key has a version with this one, it is not sent again."""

    key: str
    value: Any = None
    dedup: str | None = None


@dataclass(frozen=True)
class SignalVersion(Signal):
    """A signal that was sent: the ``version`` of its key, which no other signal has.

    ``is_new`` is False if an earlier one with the same ``dedup`` has this version. ``sender`` and ``sent_at`` are
    known of signals that were listed.
    """

    version: int = 0
    is_new: bool = True
    sender: str = ""
    sent_at: datetime | None = None


class SignalService:
    """Sends, lists and hears signals of one namespace, while a step of a task runs::

        # train.py
        from headgate.signals import SignalService
        from headgate.tasks import task


        @task
        def train():
            auc = 0.93
            return SignalService().send_signal("model", {"auc": auc}, dedup="first").version

    A trigger uses its own `headgate.triggers.base.BaseTrigger.send_signal`; a program, `headgate.client`.
    """

    def __init__(self, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.namespace = namespace

    def send_signal(
        self, key: str, value: Any = None, *, dedup: str | None = None, of_run: bool = False, with_outcome: bool = False
    ) -> SignalVersion | None:
        """Send a signal; return its version.

        It is sent at once, also if the step fails later; a later try that sends it again with the same ``dedup`` gets
        the version of the first. With ``of_run`` it is for the run of this task alone. With ``with_outcome`` it is
        stored in the transaction that stores the outcome of the step, exactly once with it, and not at all if the step
        fails; its version is not known before, so None is returned.

        Raises ValueError for a malformed key or dedup, `ValueNotSerializable` and `ValueTooLong` for a value, and from
        `headgate.child.queries` `NoQueryHandler` outside of a step and `QueryFailed` with the supervisor's reason.
        """
        sent = self.send_signals([Signal(key, value, dedup)], of_run=of_run, with_outcome=with_outcome)
        return sent[0] if sent else None

    def send_signals(
        self, signals: Sequence[Signal], *, of_run: bool = False, with_outcome: bool = False
    ) -> list[SignalVersion]:
        """Send signals, all or none, as `send_signal` does one; return their versions, none if ``with_outcome``.

        At most 1,000, whose values take 1 MiB: raises `TooManySignals` for more.
        """
        sends = [
            outgoing.encoded(one.key, one.value, dedup=one.dedup, namespace=self.namespace, is_of_run=of_run)
            for one in signals
        ]
        if with_outcome:
            outgoing.send_with_outcome(sends)
            return []
        outgoing.check_size(sends, "at once")
        return versions_of(signals, queries.send_query(SendSignals(tuple(sends)))) if sends else []

    def list_signals(
        self, key: str, version: int | None = None, *, after: int = 0, limit: int = SIGNALS_PER_PAGE_MAX
    ) -> list[SignalVersion]:
        """Return the versions of a key above ``after`` that are kept, the oldest first; or only ``version``.

        There may be more than are returned, at most 1,000 or about 1 MiB: go on after the last of them. Signals for
        other runs alone are left out. Raises ValueError for a malformed key, and as a query does.
        """
        if (problem := address_problem(key, self.namespace)) is not None:
            raise ValueError(problem)
        answer = queries.send_query(ListSignals(key, self.namespace, after, limit, version))
        if not isinstance(answer, SignalPage):
            raise queries.QueryFailed(f"the supervisor answered with {type(answer).__name__}, not with signals")
        return [_listed(key, one) for one in answer.signals]

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
        """Iterate over the versions of a key above ``after``, and wait for those to come, without a statement.

        Without ``after`` these are the versions that are sent after this call; with ``version`` it is that one alone,
        and the end follows it. Versions that are not kept any more are passed over, and so are those for other runs
        alone. It ends after the time ``timeout`` without a new one, in seconds if it is a number, and never by itself
        if that is None. ``listener_name`` stands in the log of the task.

        With a ``watcher`` nothing is returned before the end: each time its `SignalWatcher.process` gets all signals
        that there are, until it raises `StopListening`.

        The task keeps its worker meanwhile: `headgate.tasks.SignalSensor` waits without one.

        Raises ValueError for a malformed key, version or timeout, and as a query does.
        """
        if (problem := address_problem(key, self.namespace)) is not None:
            raise ValueError(problem)
        if watcher is not None and not isinstance(watcher, SignalWatcher):
            raise TypeError(f"the watcher must be a SignalWatcher, not {type(watcher).__name__}")
        if version is not None:
            if after is not None or version < 1:
                raise ValueError(f"version is {version} and after is {after}: give one of them, the version from 1 on")
            after = version - 1
        if after is not None and after < 0:
            raise ValueError(f"after must be the number of a version, or 0, not {after}")
        pages = heard(key, self.namespace, after, until=version, timeout=timeout)
        log.info("%s listens for signals under %r", listener_name, key)
        batches = ([_listed(key, one) for one in page if version in (None, one.version)] for page in pages)
        if watcher is None:
            return (one for batch in batches for one in batch)
        for batch in filter(None, batches):
            try:
                watcher.process(batch)
            except StopListening:
                break
        return None


def _listed(key: str, one: StoredSignal) -> SignalVersion:
    sent_at = datetime.fromtimestamp(one.sent_at_s, UTC)
    return SignalVersion(key, decode_value(one.value), None, one.version, sender=one.sender, sent_at=sent_at)


def versions_of(signals: Sequence[Signal], answer: QueryResult) -> list[SignalVersion]:
    """Return what signals have become, as the answer to `SendSignals` says."""
    if not isinstance(answer, SignalsSent) or len(answer.sent) != len(signals):
        raise queries.QueryFailed(f"the supervisor answered with {type(answer).__name__}, not with versions")
    return [
        SignalVersion(one.key, one.value, one.dedup, sent.version, sent.is_new)
        for one, sent in zip(signals, answer.sent, strict=True)
    ]


def query_of(signal: Signal, namespace: str, sender: str) -> SendSignals:
    """Return the query by which a trigger sends a signal. Raises as `headgate.signals.outgoing.encoded`."""
    sends: tuple[SignalSend, ...] = (
        outgoing.encoded(signal.key, signal.value, dedup=signal.dedup, namespace=namespace),
    )
    return SendSignals(sends, sender)
