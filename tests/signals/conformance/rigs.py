"""The implementations of `BaseSignalService` that the suite is run with, each on a database of its own."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tests.client.harness import client_of
from tests.store.harness import OpenStore, Query
from tests.supervisor.tasks_harness import Tasks

from headgate.child import queries
from headgate.client import Client, Send
from headgate.client import Signal as StoredByClient
from headgate.protocol.messages.queries import ListenSignals, QueryResult, Response, SendSignals, SignalsSent
from headgate.protocol.messages.queries import Query as StepQueryBody
from headgate.protocol.messages.signals import DEFAULT_NAMESPACE
from headgate.signal_server.server import SignalServer
from headgate.signals import BaseSignalService, Heard, Signal, SignalService, SignalVersion
from headgate.signals.remote import GrpcSignalService
from headgate.signals.versions import value_of
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Database
from headgate.store.errors import ValueRefused
from headgate.store.signals import sending
from headgate.store.store import Store
from headgate.supervisor.executors.base import StepQuery
from headgate.supervisor.queries import QueryRefused, StoreQueries
from headgate.supervisor.tasks.listeners import Listeners


class Rig(ABC):
    """One implementation. Each thread opens a service of its own."""

    sees_all_runs = True  # and not only what is for everybody, or for its own run

    def __init__(self, open_store: OpenStore, query: Query) -> None:
        self.open_store = open_store
        self.store = open_store()
        self.query = query

    def make_run(self) -> Tasks:
        """Make a run of the DAG ``etl``."""
        return Tasks(self.store, self.query)

    @abstractmethod
    @contextmanager
    def open(self, namespace: str = DEFAULT_NAMESPACE) -> Generator[BaseSignalService]:
        """Open a service, for one thread."""
        yield NotImplemented

    @contextmanager
    def running(self) -> Generator[None]:
        """Have it in the block what it needs besides the database."""
        yield


class DatabaseSignals(BaseSignalService):
    """Signals by the client of the database, as a program may put the one into the other's form."""

    def __init__(self, client: Client, namespace: str) -> None:
        super().__init__(namespace)
        self._client = client

    def send_signals(self, signals: Sequence[Signal]) -> list[SignalVersion]:
        sends = [Send(one.key, one.value, one.dedup, self.namespace) for one in signals]
        return [
            SignalVersion(one.key, one.value, one.dedup, sent.version, sent.is_new)
            for one, sent in zip(signals, self._client.send_signals(sends), strict=True)
        ]

    def list_stored(self, key: str, version: int | None, after: int, limit: int) -> list[SignalVersion]:
        found = self._client.list_signals(key, version, after=after, limit=limit, namespace=self.namespace)
        return [_listed(one) for one in found]

    def hear(self, key: str, after: int | None, within_s: float) -> Heard:
        if after is None:
            seen = 0
            while page := self.list_stored(key, None, seen, 1000):
                seen = page[-1].version
            return Heard((), seen)
        idle_s = None if math.isinf(within_s) else within_s
        for _ in self._client.listen_signal(key, after=after, namespace=self.namespace, idle_s=idle_s):
            page = self.list_stored(key, None, after, 1000)
            return Heard(page, page[-1].version)
        return Heard((), after)


def _listed(one: StoredByClient) -> SignalVersion:
    return SignalVersion(one.key, value_of(one.data), None, one.version, sender=one.sender, sent_at=one.sent_at)


class DatabaseRig(Rig):
    """The client of the database."""

    @contextmanager
    def open(self, namespace: str = DEFAULT_NAMESPACE) -> Generator[BaseSignalService]:
        with client_of(self.store) as client:
            yield DatabaseSignals(client, namespace)


class TaskRig(Rig):
    """The service of a task, whose queries a supervisor's parts answer: one set of them for each thread."""

    sees_all_runs = False

    def __init__(self, open_store: OpenStore, query: Query) -> None:
        super().__init__(open_store, query)
        self._lock = threading.Lock()
        self._parts: dict[int, SupervisorsParts] = {}

    def make_run(self) -> Tasks:
        return self._tasks

    @contextmanager
    def running(self) -> Generator[None]:
        self._tasks = Tasks(self.store, self.query)
        self._token = self._tasks.run_it()
        with queries.queries_handled_by(lambda query: self._of_thread().answer(query)):
            yield

    @contextmanager
    def open(self, namespace: str = DEFAULT_NAMESPACE) -> Generator[BaseSignalService]:
        yield SignalService(namespace)

    def _of_thread(self) -> SupervisorsParts:
        name = threading.get_ident()
        with self._lock:
            if name not in self._parts:
                self._parts[name] = SupervisorsParts(self.open_store(), self._tasks, self._token)
            return self._parts[name]


class SupervisorsParts:
    """What answers the queries of a step in a supervisor, but for its loop and its link."""

    def __init__(self, store: Store, tasks: Tasks, token: str) -> None:
        self._store = store
        self._tasks = tasks
        self._token = token
        self._answers = StoreQueries(store, {})
        self._listeners = Listeners(self._answers, store.tasks)

    def answer(self, query: StepQueryBody) -> QueryResult:
        if isinstance(query, ListenSignals):
            return queries.result_of(query, self._hear(query))
        try:
            if isinstance(query, SendSignals):
                news = sending.news_of(query.signals, "task", self._tasks.run)
                sent = self._store.tasks.send_signals(self._tasks.epoch, self._tasks.a, self._token, news)
                assert sent is not None
                return SignalsSent(tuple(sent))
            return self._answers.answer(query, dag_run_id=self._tasks.run)
        except (QueryRefused, ValueRefused) as refused:
            raise queries.QueryFailed(str(refused)) from refused

    def _hear(self, query: ListenSignals) -> Response:
        database = self._store.database
        database.listen_for("signals")
        asked = StepQuery(self._token, 1, query)
        answer = self._listeners.hear(asked, query, self._tasks.run, time.monotonic())
        while answer is None:
            database.wait_for("signals", max(0.0, self._listeners.wake_at() - time.monotonic()), lambda key: True)
            self._listeners.notify()
            _, answer = next(self._listeners.step(time.monotonic()), (None, None))
        return answer


class GrpcRig(Rig):
    """A server on a port of its own, and clients with its token."""

    TOKEN = "the token of the suite"

    @contextmanager
    def running(self) -> Generator[None]:
        database = Database(self.store.database.engine, Secrets.none(), None)
        with SignalServer(database, "127.0.0.1:0", token=self.TOKEN) as server:
            self.address = server.address
            yield

    @contextmanager
    def open(self, namespace: str = DEFAULT_NAMESPACE) -> Generator[BaseSignalService]:
        with GrpcSignalService(self.address, self.TOKEN, namespace) as service:
            yield service


RIGS: dict[str, type[Rig]] = {"database": DatabaseRig, "task": TaskRig, "grpc": GrpcRig}
