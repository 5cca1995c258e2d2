"""A database in which much goes on, and much is wrong: for tests in a browser, and for the pictures in the documents.

It is made by the store's own verbs, on a clock that begins some hours ago: a stream that is held up, a message that its
trigger cannot take, a trigger that fails, one that is paused, tasks that are deferred and that are tried again, a file
that cannot be parsed, runs that have failed, and a supervisor that is nearly full.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headgate.protocol.messages.dags import AssetSchedule, DagSpec, TaskSpec
from headgate.protocol.messages.runner import (
    DescribedLane,
    DescribedStream,
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    LaneProgress,
    RefusedEvent,
)
from headgate.protocol.messages.schedules import CronSchedule
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSucceeded, XCom
from headgate.protocol.values import encode_value
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.facts.spans import StepSpan
from headgate.store.facts.supervisor_status import StreamStatus, SupervisorStatus, encode_status
from headgate.store.ids import DagRunId, Epoch, TryName
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import StepEnd
from headgate.supervisor.logs import task_log_files

QUEUES = ("default",)
RUNS = 12
HOURS = 3.2
TASKS = (
    TaskSpec("wait_for_files", "FileSensor", retries=1),
    TaskSpec("read_orders", "ReadOrders", upstream=("wait_for_files",)),
    TaskSpec("read_returns", "ReadReturns", upstream=("wait_for_files",), retries=2, retry_delay_s=7200),
    TaskSpec("read_rates", "ReadRates"),
    TaskSpec("check", "Check", upstream=("read_orders", "read_returns")),
    TaskSpec("convert", "Convert", upstream=("check", "read_rates")),
    TaskSpec("load_warehouse", "Load", upstream=("convert",), pool="warehouse"),
    TaskSpec("load_search", "Load", upstream=("convert",)),
    TaskSpec("report", "Report", upstream=("load_warehouse",), trigger_rule="all_done"),
    TaskSpec("tell_shops", "Tell", upstream=("report", "load_search")),
)
TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/triggers.py", line 41, in filter_shared_stream
    price = Decimal(order["price"])
KeyError: 'price'"""


class Clock:
    """A clock that begins some hours ago, and is moved."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC) - timedelta(hours=HOURS)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self.now += timedelta(seconds=seconds)


class Lively:
    """Fills a database that has tables and no rows, and a folder of logs."""

    def __init__(self, url: str, keys: str, log_folder: Path) -> None:
        self.clock = Clock()
        self.store = Store(open_engine(url), secrets=Secrets([keys], source="the tests"), clock=self.clock)
        self.log_folder = log_folder
        self.epoch = self._register("shop-1", 30, workers=4)
        self._numbers = 0

    def fill(self) -> None:
        """Do everything."""
        self._define()
        for number in range(RUNS):
            self._run_etl(number)
        self._fire()
        self._go_wrong()
        self._send()
        self.clock.now = datetime.now(UTC)
        self.store.heartbeat(self.epoch, encode_status(self._status()))
        self._register("shop-2", 200, workers=8)
        self.store.close()

    def _register(self, host: str, capacity: int, workers: int) -> Epoch:
        lease = {"machine": "m", "process_started": 0.0, "queues": QUEUES}
        return self.store.register_triggerer(hostname=host, pid=4711, capacity=capacity, workers=workers, **lease)  # type: ignore[arg-type]

    def _status(self) -> SupervisorStatus:
        """Return what the supervisor would say of itself."""
        now, fraud = datetime.now(UTC).timestamp(), self.watchers[2]
        orders = StreamStatus(
            "d-orders", in_flight=8, queued=16, lanes=3, online=2, absent=1, lag=12_408, held="absent subscriber",
            held_since=now - 95, held_by=(fraud,), oldest_at=now - 97, acked=240, failed=6,
        )  # fmt: skip
        payments = StreamStatus("d-payments", in_flight=2, lanes=1, online=1, lag=3, oldest_at=now - 1, acked=80)
        return SupervisorStatus("ready", 1, owned=30, running=28, held=1, steps=1, streams=(orders, payments))

    # --- DAGs and runs ---

    def _define(self) -> None:
        def save(file: str, spec: DagSpec) -> None:
            self.store.tasks.save_file(self.epoch, f"/srv/shop/dags/{file}", [spec])

        self.store.tasks.set_pool("warehouse", 2)
        save("shop.py", DagSpec("shop_etl", tasks=TASKS))
        billing = AssetSchedule(("orders",), contract="batch", batch_count=50)
        two = (TaskSpec("collect", "Collect"), TaskSpec("invoice", "Invoice", upstream=("collect",)))
        save("billing.py", DagSpec("billing", schedule=billing, tasks=two))
        save("nightly.py", DagSpec("nightly", schedule=CronSchedule("0 3 * * *"), tasks=two))
        file = "/srv/shop/dags/prices.py"
        error = f'  File "{file}", line 3\n    with DAG("prices"\n            ^\nSyntaxError: \'(\' was never closed'
        self.store.tasks.save_import_error(self.epoch, file, error)

    def _run_etl(self, number: int) -> None:
        run = self.store.tasks.create_run("shop_etl", f"manual__2026-11-25T{8 + number:02}:00:00+00:00")
        assert run is not None
        is_last = number == RUNS - 1
        for _ in range(len(TASKS) + 4):
            self._step(run, number, is_last=is_last)
        if not is_last:
            self.clock.advance(600)

    def _step(self, run: DagRunId, number: int, *, is_last: bool) -> None:
        while self.store.scheduling.plan(self.epoch).evaluated:
            pass
        begun = self.store.tasks.dispatch(self.epoch, limit=8, queues=QUEUES, endless=0).tasks
        for task in begun:
            name = task.task_id
            if is_last and name in ("read_orders", "read_rates"):
                self._log(task, number)
                continue  # it runs
            took_s = 7.0 + 13 * (len(name) % 5)
            self.clock.advance(3 + took_s)
            self._end(task, number, took_s)

    def _end(self, task: TaskToRun, number: int, took_s: float) -> None:
        name, log = task.task_id, self._log(task, number)
        if name == "wait_for_files" and number == RUNS - 1 and task.next_method is None:
            nothing = encode_value({"path": "/srv/in"}, where="kwargs")
            outcome: StepOutcome = StepDeferred("shop.FileThere", nothing, "go_on", nothing)
        elif name == "check" and number in (3, 8):
            log("error", "1,204 of 88,210 rows have no price", exception=TRACEBACK)
            outcome = StepFailed("KeyError: 'price'", TRACEBACK, may_retry=False)
        elif name == "read_returns" and number == RUNS - 2:
            outcome = StepFailed("ConnectionError: returns.shop:5432 at postgresql://etl:s3cret@returns.shop/db", "")
        else:
            rows = encode_value({"rows": 88_210 + 17 * number, "from": "berlin"}, where="value")
            outcome = StepSucceeded((XCom("return_value", rows),))
        span = StepSpan(task.try_number, task.ready_at, took_s)
        self.store.tasks.store_ends(self.epoch, [StepEnd(task.id, task.token, outcome, span=span)])
        self.store.claim_triggers(self.epoch, limit=10, queues=QUEUES)

    def _log(self, task: TaskToRun, number: int) -> _Log:
        log = _Log(self, task)
        log("info", f"reads what came since run {number}")
        log("info", "88,210 rows", rows=88_210, shop="berlin")
        return log

    # --- triggers ---

    def _watch(self, name: str, asset: str | None = None) -> int:
        return self.store.add_watcher(name, f"shop.triggers.{name.title().replace('-', '')}", {}, asset=asset)

    def _fire(self) -> None:
        store = self.store
        watchers = [self._watch("big-orders", "orders"), self._watch("small-orders", "orders"), self._watch("fraud")]
        watchers += [self._watch("payments", "payments"), self._watch("stock")]
        for number in range(24):
            self._watch(f"sensor-{number:02}")
        store.claim_triggers(self.epoch, limit=100, queues=QUEUES)
        orders, payments = "filelog:/srv/shop/orders group=accounting", "redis:shop/payments group=billing"
        self._describe(watchers[:3], "d-orders", orders)
        self._describe(watchers[3:4], "d-payments", payments)
        store.claim_triggers(self.epoch, limit=100, queues=QUEUES)
        for batch in range(10):
            self.clock.advance(60)
            for trigger_id, key in zip(watchers, ("berlin", "kiel", "bonn", "pay", "stock"), strict=True):
                self._store_events(trigger_id, key, 8 * batch)
        self.watchers = watchers

    def _describe(self, triggers: Sequence[int], digest: str, name: str) -> None:
        said = [DescribedTrigger(trigger_id, f"d{trigger_id}", digest, name) for trigger_id in triggers]
        self.store.store_slice(self.epoch, described=said)

    def _store_events(self, trigger_id: int, key: str, first: int) -> None:
        payloads = [{"order": 4700 + first + i, "amount": 1000 + 13 * i, "shop": key} for i in range(8)]
        events = [
            FiredEvent(trigger_id, f"run{trigger_id}", first + i, 0, encode_value(one, where="p"), f"{key}:{first + i}")
            for i, one in enumerate(payloads)
        ]
        self.store.store_slice(self.epoch, events=events)

    def _go_wrong(self) -> None:
        big, small, fraud, _, stock = self.watchers
        payload = encode_value({"order": 4711, "amount": 1800, "shop": "berlin"}, where="payload")
        for number in range(5):
            self.clock.advance(15)
            ended = FinishedTrigger(
                fraud, f"bad{number}", "failed", 0, "KeyError: 'price'", TRACEBACK, message_key="berlin:4711"
            )
            self.store.store_slice(self.epoch, finished=[ended])
        letter = RefusedEvent(
            fraud, "bad5", 0, 0, "KeyError: 'price' in 5 deliveries", len(payload), payload, "berlin:4711",
            content="message", is_whole=True,
        )  # fmt: skip
        self.store.store_slice(self.epoch, refused=[letter])
        for number in range(3):
            key = f"kiel:{number}"
            event = FiredEvent(small, "late", number, 0, payload, key)
            self.store.dead_letter_event(self.epoch, event, "its payload has 3 MiB, and 1 MiB is the limit")
        error = "ConnectionRefusedError: amqp://shop:s3cret@mq.shop:5672 refused the connection"
        self.store.store_slice(self.epoch, finished=[FinishedTrigger(fraud, "off", "failed", 0, error, TRACEBACK)])
        self.store.pause_watcher("stock")
        assert stock > big
        self._drift()

    def _drift(self) -> None:
        """Somebody has set a group forward, and a user has asked since."""

        def lane(name: str, at: int, begun_at: float, *, is_ours: bool) -> LaneProgress:
            return LaneProgress(name, (at,), begun_at, advanced=(at,), asked=(at,), is_ours=is_ours)

        before, after = lane("0", 42, 1.0, is_ours=True), lane("0", 1_042, 2.0, is_ours=False)
        self.store.note_drift(self.epoch, {"d-orders": (before,)}, {})
        self.store.note_drift(self.epoch, {"d-orders": (after,)}, {})
        lanes = (
            DescribedLane("0", end=(13_460,), committed=(1_052,), lag=12_408, oldest_key="kafka:shop:orders:0:1052"),
            DescribedLane("1", end=(977,), committed=(977,), lag=0),
        )
        self.store.note_drift(self.epoch, {}, {"d-orders": DescribedStream("d-orders", lanes, 2)})

    def _send(self) -> None:
        for number in range(4):
            value = encode_value({"eur": 1.07 + number / 100}, where="value")
            self.store.signals.send([NewSignal("rates", value, f"d{number}", "prices nightly r1")])
        self.store.signals.send([NewSignal("drain", encode_value(True, where="value"), "d", "ops@shop-1")])


class _Log:
    """Writes records of one try, as supervisors do."""

    def __init__(self, lively: Lively, task: TaskToRun) -> None:
        name = TryName(task.dag, task.run_id, task.task_id, task.try_number)
        self._file = task_log_files.file_of(lively.log_folder, name, lively.epoch)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._clock = lively.clock

    def __call__(self, level: str, event: str, **fields: object) -> None:
        at = self._clock().isoformat().replace("+00:00", "Z")
        record = {"timestamp": at, "level": level, "event": event, "logger": "shop", "source": "task", **fields}
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")
