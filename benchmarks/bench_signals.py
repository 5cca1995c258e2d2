"""Signals: how many are sent in a second, and how soon a task begins that they start or hold back, or hears them.

What is sent comes from another process than the supervisor's, as from a command. The times are those of the database's
clock: from the transaction that sends the signal to the end of the sensor, and to the one that gives the task below it
to a worker. A task that listens notes the time at which it has the signal, by the clock of the machine, which the
databases here use as well.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from sqlalchemy import func, select

from benchmarks import nothing, stations
from benchmarks.bench_latency import ms_at
from benchmarks.databases import KEYS, add_triggers, fresh
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from headgate.client import Send, open_client
from headgate.protocol.messages.dags import DagSpec, TaskSpec
from headgate.protocol.messages.rules import Rules, SignalRule
from headgate.protocol.messages.signals import Predicate
from headgate.protocol.values import decode_value, encode_value
from headgate.signals import Signal as RemoteSignal
from headgate.signals.remote import GrpcSignalService
from headgate.store.db.secrets import Secrets
from headgate.store.ids import DagRunId
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store
from headgate.store.tables import signal, signal_wait, task_instance

DAG = """
from benchmarks.users.tasks import Deciding, Empty, Listening, Sending
from headgate.signals import On
from headgate.tasks import SignalSensor
from headgate.tasks.graph import DAG

with DAG("warm"):
    Empty(task_id="t")

with DAG("waits"):
    SignalSensor(task_id="sensor", key="bench") >> Empty(task_id="t")

with DAG("listens"):
    Listening(task_id="listener")

with DAG("starts"):
    Empty(task_id="started", signals=[On("bench")])

with DAG("decides"):
    Deciding(task_id="started", signals=[On("bench")])

with DAG("sends"):
    Sending(task_id="t")
"""
CLI = (sys.executable, "-m", "headgate.cli")
VALUE = encode_value({"order": 1, "amount": 1800}, where="value")
AT_ONCE = 100
PERCENTILES = (50, 99)
RUN_S_MAX = 60.0
QUIET_S = (0.1, 1.1)  # before a signal, drawn anew: as in `benchmarks.bench_wake`
RATES = (
    Figure("one a call", "/s", Target(value_min=500.0)),
    Figure(f"{AT_ONCE} a call", "/s", Target(value_min=5000.0)),
)
SENDERS = 8
RULED_TASKS = 100  # of each run
FIRST = Figure("sent to begun, the first", "ms")  # with the start of the process that decides
CONSIDERED = Figure("sent to held against all", "s", Target(value_max=3.0))
BY_MANY = Figure(f"one a call, {SENDERS} at once", "/s")
SENT_BY = ("a task", "a command", "gRPC")
MakeSignal = Callable[[str, object, str], object]


def send_many(kind: str, sends: int) -> Figures:
    """Send signals to one key, one and a hundred a call; return how many a second."""
    with fresh(kind) as database, Store(database.engine(), secrets=Secrets([KEYS], source="the benchmarks")) as store:
        rates = {}
        for at_once in (1, AT_ONCE):
            some = [
                [_signal(at_once, first + number) for number in range(at_once)] for first in range(0, sends, at_once)
            ]
            begun = time.monotonic()
            for signals in some:
                store.signals.send(signals)
            name = "one a call" if at_once == 1 else f"{at_once} a call"
            rates[name] = sends / (time.monotonic() - begun)
        return rates


def consider_many(kind: str, rules: int) -> Figures:
    """Send one signal under a key that so many rules of open runs are about; return until all were held against it.

    Its value meets none of them.
    """
    runs = max(1, rules // RULED_TASKS)
    ruled = Rules((SignalRule("bench", predicate=Predicate("equal", encode_value("never", where="value"))),))
    tasks = tuple(TaskSpec(f"t{number}", "Op", signals=ruled) for number in range(RULED_TASKS))
    spec = DagSpec("ruled", max_active_runs=runs, tasks=tasks)
    with fresh(kind) as database, Store(database.engine(), secrets=Secrets([KEYS], source="the benchmarks")) as store:
        epoch = store.register_triggerer(
            hostname="h", pid=1, machine="m", process_started=0.0, capacity=1, queues=("default",), workers=1
        )
        store.tasks.save_file(epoch, "ruled.py", [spec])
        for number in range(runs):
            store.tasks.create_run("ruled", f"run-{number}")
        while store.scheduling.plan(epoch).evaluated:
            pass
        while store.scheduling.consider_signals(epoch).has_more:
            pass
        store.signals.send([_signal(0, 0)])
        begun = time.monotonic()
        while store.scheduling.consider_signals(epoch).has_more:
            pass
        took_s = time.monotonic() - begun
        with store.database.reading() as tx:
            held = tx.connection.execute(select(func.count()).where(signal_wait.c.seen_version == 1)).scalar_one()
        if held != runs * RULED_TASKS:
            raise BenchFailed(f"{held:,} of {runs * RULED_TASKS:,} rules were held against the signal")
        return {CONSIDERED.name: took_s}


def commit_many(kind: str, sends: int) -> Figures:
    """Store as many rows by the bare driver, one a commit, which is what sending one a call costs at least."""
    with fresh(kind) as database:
        add_triggers(database, "nobody.Loads", [{}])
        rate = sends / sum(nothing.commit_moments_s(database, sends))
        return dict.fromkeys([rate_of.name for rate_of in RATES], rate)


def send_over_grpc(kind: str, sends: int) -> Figures:
    """Send as many by a server in another process, as a program elsewhere does."""
    with fresh(kind) as database, grpc_service(database.url) as service:
        at_once = _rate_at_once(sends, lambda: nullcontext(service), RemoteSignal)
        return {**_rates(sends, service.send_signals, RemoteSignal), **at_once}


@contextmanager
def grpc_service(url: str) -> Generator[GrpcSignalService]:
    """Give a client of a server in a process of its own."""
    command = [*CLI, "signals", "serve", "--grpc", "127.0.0.1:0", "--no-token"]
    with subprocess.Popen(command, env=_environment(url), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[-1]
            with GrpcSignalService(address) as service:
                yield service
        finally:
            server.terminate()


def _environment(url: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    return environment | {"HEADGATE_DATABASE_URL": url, "HEADGATE_FERNET_KEYS": KEYS}


def send_by_client(kind: str, sends: int) -> Figures:
    """Send as many by the client of the database in this process."""
    with fresh(kind) as database:
        at_once = _rate_at_once(sends, lambda: open_client(database.url), Send)
        with open_client(database.url) as client:
            return {**_rates(sends, client.send_signals, Send), **at_once}


def _rate_at_once(sends: int, opened: Callable[[], AbstractContextManager[Any]], of: MakeSignal) -> Figures:
    """Send from several threads, each with what it opens; return how many signals they send in a second."""
    each = max(1, sends // SENDERS)

    def send(sender: int) -> None:
        with opened() as service:
            for number in range(each):
                service.send_signals([of("at once", number, f"{sender} {number}")])

    begun = time.monotonic()
    with ThreadPoolExecutor(SENDERS) as threads:
        list(threads.map(send, range(SENDERS)))
    return {BY_MANY.name: each * SENDERS / (time.monotonic() - begun)}


def _rates(sends: int, send: Callable[[list[Any]], object], of: MakeSignal) -> Figures:
    rates = {}
    for rate, at_once in zip(RATES, (1, AT_ONCE), strict=True):
        calls = [
            [of("bench", {"order": 1, "amount": 1800}, f"{at_once} {first + number}") for number in range(at_once)]
            for first in range(0, sends, at_once)
        ]
        begun = time.monotonic()
        for call in calls:
            send(call)
        rates[rate.name] = sends / (time.monotonic() - begun)
    return rates


def _signal(of: int, number: int) -> NewSignal:
    return NewSignal("bench", VALUE, f"{of} {number}", "the benchmarks")


def run_station(kind: str, runs: int) -> Figures:
    """Have sensors wait one after the other, each for a signal; return the percentiles of what it took."""
    to_end_s, to_begin_s = [], []
    with stations.running(kind, DAG) as station:
        station.warm_up("warm")
        for number in range(runs):
            run = station.create_run("waits", f"run-{number}")
            station.wait_states("deferred", 1, RUN_S_MAX)
            time.sleep(random.uniform(*QUIET_S))
            (sent,) = station.store.signals.send([_signal(0, number)])
            station.wait_ended(RUN_S_MAX)
            with station.store.database.reading() as tx:
                of_version = select(signal.c.sent_at).where(signal.c.version == sent.version)
                sent_at = tx.connection.execute(of_version).scalar_one()
                of_run = select(*(task_instance.c[name] for name in ("task_id", "started_at", "ended_at")))
                rows = tx.connection.execute(of_run.where(task_instance.c.dag_run_id == run))
                tasks = {row.task_id: row for row in rows}
            ended_at, begun_at = tasks["sensor"].ended_at, tasks["t"].started_at
            to_end_s.append((ended_at - sent_at).total_seconds())
            to_begin_s.append((begun_at - sent_at).total_seconds())
    figures = {}
    for percentile in PERCENTILES:
        figures[f"sent to end of sensor, p{percentile}"] = ms_at(percentile, to_end_s)
        figures[f"sent to begin below, p{percentile}"] = ms_at(percentile, to_begin_s)
    return figures


def run_starts(kind: str, sends: int, sender: str, dag: str = "starts") -> Figures:
    """Start a task by signals that are sent one after the other; return the percentiles of what it took."""
    times_s: list[float] = []
    with stations.running(kind, DAG) as station:
        station.warm_up("warm")
        run = station.create_run(dag, "run")
        url = station.pair.database.url
        with grpc_service(url) if sender == "gRPC" else nullcontext() as service:
            for number in range(sends):
                time.sleep(random.uniform(*QUIET_S))
                if service is not None:
                    service.send_signal("bench", number)
                elif sender == "a command":
                    subprocess.run(
                        [*CLI, "signals", "send", "bench", str(number)],
                        env=_environment(url),
                        check=True,
                        stdout=subprocess.DEVNULL,
                    )
                else:
                    station.create_run("sends", f"run-{number}")
                times_s.append(_started_s(station, run, number + 1))
    first = {FIRST.name: times_s.pop(0) * 1000} if dag == "decides" else {}
    return first | {f"sent to begun, p{percentile}": ms_at(percentile, times_s) for percentile in PERCENTILES}


def _started_s(station: stations.Station, run: int, version: int) -> float:
    """Wait until the task has ended its start by a version; return how long after the signal it began."""
    of_start = (task_instance.c.try_number == version) & (signal.c.version == version)
    both = signal.join(task_instance, of_start)
    times = select(signal.c.sent_at, task_instance.c.started_at).select_from(both)
    times = times.where(task_instance.c.dag_run_id == run)
    deadline = time.monotonic() + RUN_S_MAX
    while time.monotonic() < deadline:
        with station.store.database.reading() as tx:
            row = tx.connection.execute(times.where(task_instance.c.state == "success")).first()
        if row is not None:
            return float((row.started_at - row.sent_at).total_seconds())
        time.sleep(stations.LOOK_INTERVAL_S)
    raise BenchFailed(f"version {version} has not started the task within {RUN_S_MAX:g} s")


def run_listener(kind: str, sends: int) -> Figures:
    """Have a task listen to signals that are sent one after the other; return the percentiles of what it took."""
    with stations.running(kind, DAG) as station:
        station.warm_up("warm")
        run = station.create_run("listens", "run", {"sends": sends})
        station.wait_states("running", 1, RUN_S_MAX)
        for number in range(sends):
            time.sleep(random.uniform(*QUIET_S))
            station.store.signals.send([_signal(0, number)])
        station.wait_ended(RUN_S_MAX)
        heard = station.store.tasks.pull_xcom(DagRunId(run), "listener", "return_value")
        if heard is None:
            raise BenchFailed("the task that listens has left nothing")
        times_s = [
            heard_s - one.sent_at.timestamp()
            for heard_s, one in zip(decode_value(heard), station.store.signals.page("bench").signals, strict=True)
        ]
    return {f"sent to heard, p{percentile}": ms_at(percentile, times_s) for percentile in PERCENTILES}


def cases(options: Options) -> list[Case]:
    """Return the cases of each database."""
    waits = [
        Figure(f"{what}, p{percentile}", "ms", Target(value_max=50.0) if percentile == 99 else Target())
        for percentile in PERCENTILES
        for what in ("sent to end of sensor", "sent to begin below")
    ]
    hears = [Figure(f"sent to heard, p{percentile}", "ms") for percentile in PERCENTILES]
    begun, decided = (
        [
            Figure(f"sent to begun, p{percentile}", "ms", Target(value_max=goal_ms) if percentile == 99 else Target())
            for percentile in PERCENTILES
        ]
        for goal_ms in (50.0, 100.0)
    )
    sends, runs = options.of(5000, 2000, 200), options.of(60, 20, 2)
    sent_afar = options.of(2000, 500, 100)
    made = []
    for kind in options.databases:
        made.append(
            Case(f"{kind}, one sender", RATES, partial(send_many, kind, sends), partial(commit_many, kind, sends))
        )
        over_grpc, by_client = partial(send_over_grpc, kind, sent_afar), partial(send_by_client, kind, sent_afar)
        made.append(Case(f"{kind}, over gRPC", (*RATES, BY_MANY), over_grpc, by_client))
        about = partial(consider_many, kind, options.of(10_000, 10_000, 200))
        made.append(Case(f"{kind}, 10,000 rules about one key", (CONSIDERED,), about, None))
        made.append(Case(f"{kind}, a sensor", waits, partial(run_station, kind, runs), None))
        made += [Case(f"{kind}, a start by {by}", begun, partial(run_starts, kind, runs, by), None) for by in SENT_BY]
        decides = partial(run_starts, kind, runs + 1, "a command", "decides")
        made.append(Case(f"{kind}, a start that on_signal decides", [*decided, FIRST], decides, None))
        made.append(Case(f"{kind}, a task that listens", hears, partial(run_listener, kind, runs), None))
    return made


BENCH = Bench(
    "signals",
    "signals: sent in a second, and from a signal to the task that it starts, below a sensor, or that listens",
    "of the sender: as many durable commits of one row by the bare driver; over gRPC: the client of the database",
    cases,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
