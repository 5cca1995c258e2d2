"""`SignalService`: signals as a task sends, lists and hears them. The names are those of Airflow's proposal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from headgate.child import queries
from headgate.protocol.messages.queries import (
    ListenSignals,
    ListSignals,
    QueryResult,
    SendSignals,
    SignalPage,
    SignalsHeard,
    SignalsSent,
)
from headgate.protocol.messages.signals import LISTEN_S_MAX, SignalSend, StoredSignal
from headgate.signals import outgoing
from headgate.signals.base import BaseSignalService
from headgate.signals.listening import Heard
from headgate.signals.versions import Signal, SignalVersion, signals_in, value_of


class SignalService(BaseSignalService):
    """Sends, lists and hears signals of one namespace, while a step of a task runs::

        # train.py
        from headgate.signals import SignalService
        from headgate.tasks import task


        @task
        def train():
            auc = 0.93
            return SignalService().send_signal("model", {"auc": auc}, dedup="first").version

    A trigger uses its own `headgate.triggers.base.BaseTrigger.send_signal`; a program, `headgate.client`, or
    `headgate.signals.remote` from afar. `list_signals` and `listen_signal` leave out what is for other runs alone. A
    task that listens keeps its worker, and asks nobody meanwhile: the supervisor keeps the query until something is
    sent, for some seconds at most. `headgate.tasks.SignalSensor` waits without a worker.
    """

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
        self, signals: Iterable[Signal], *, of_run: bool = False, with_outcome: bool = False
    ) -> list[SignalVersion]:
        """Send signals, all or none, as `send_signal` does one; return their versions, none if ``with_outcome``.

        At most 1,000, whose values take 1 MiB: raises `TooManySignals` for more.
        """
        signals = signals_in(signals)
        sends = [
            outgoing.encoded(one.key, one.value, dedup=one.dedup, namespace=self.namespace, is_of_run=of_run)
            for one in signals
        ]
        if with_outcome:
            outgoing.send_with_outcome(sends)
            return []
        outgoing.check_size(sends, "at once")
        return versions_of(signals, queries.send_query(SendSignals(tuple(sends))), self.namespace) if sends else []

    def list_stored(self, key: str, version: int | None, after: int, limit: int) -> list[SignalVersion]:
        """See `BaseSignalService.list_stored`. Raises as a query does."""
        answer = queries.send_query(ListSignals(key, self.namespace, after, limit, version))
        if not isinstance(answer, SignalPage):
            raise queries.QueryFailed(f"the supervisor answered with {type(answer).__name__}, not with signals")
        return [_listed(key, self.namespace, one) for one in answer.signals]

    def hear(self, key: str, after: int | None, within_s: float) -> Heard:
        """See `BaseSignalService.hear`. Raises as a query does."""
        place = ListenSignals(key, self.namespace)
        query = place if after is None else ListenSignals(key, self.namespace, after, min(within_s, LISTEN_S_MAX))
        answer = queries.send_query(query)
        if not isinstance(answer, SignalsHeard):
            raise queries.QueryFailed(f"the supervisor answered with {type(answer).__name__}, not with signals")
        return Heard([_listed(key, self.namespace, one) for one in answer.signals], answer.seen)


def _listed(key: str, namespace: str, one: StoredSignal) -> SignalVersion:
    return SignalVersion(
        key,
        value_of(one.value),
        None,
        one.version,
        sender=one.sender,
        sent_at=datetime.fromtimestamp(one.sent_at_s, UTC),
        namespace=namespace,
    )


def versions_of(signals: Sequence[Signal], answer: QueryResult, namespace: str) -> list[SignalVersion]:
    """Return what signals have become, as the answer to `SendSignals` says."""
    if not isinstance(answer, SignalsSent) or len(answer.sent) != len(signals):
        raise queries.QueryFailed(f"the supervisor answered with {type(answer).__name__}, not with versions")
    return [
        SignalVersion(one.key, one.value, one.dedup, sent.version, sent.is_new, namespace=namespace)
        for one, sent in zip(signals, answer.sent, strict=True)
    ]


def query_of(signal: Signal, namespace: str, sender: str) -> SendSignals:
    """Return the query by which a trigger sends a signal. Raises as `headgate.signals.outgoing.encoded`."""
    sends: tuple[SignalSend, ...] = (
        outgoing.encoded(signal.key, signal.value, dedup=signal.dedup, namespace=namespace),
    )
    return SendSignals(sends, sender)
