"""Many processes send to the same keys, and others hold waits against them, while all of them are killed at marks."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.fernet import Fernet
from tests.lives import Lives
from tests.proof.history.signal_history import Acknowledged, Record, Stored, Waited, check
from tests.proof.signal_worker import KEYS
from tests.store.harness import Query
from tests.supervisor.tasks_harness import Tasks
from tests.waiting import ALL_WITHIN_S

from headgate.client import open_client
from headgate.protocol.messages.dags import StartTrigger, TaskSpec
from headgate.protocol.messages.signals import SIGNAL_TRIGGER, SignalWait
from headgate.protocol.values import decode_value
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store

SENDERS, COUNT, DIES_ONE_IN = 8, 30, 8
EACH = 1000  # signals of a program that is not killed
CONSIDERERS = 2


class Processes:
    """Starts processes again and again until they are done; counts those that were killed."""

    def __init__(self, lives: Lives, url: str, keys: str) -> None:
        self._lives = lives
        self._url = url
        self._keys = f"--keys={keys}"
        self.kills = 0
        self.is_over = threading.Event()

    def send(self, number: int) -> list[Acknowledged]:
        """Have a sender send all that it has to; return what was acknowledged to any of its lives."""
        told: list[Acknowledged] = []
        for life in range(1000):
            dies = f"--dies-one-in={DIES_ONE_IN + life}"
            code, said = self._lives.run(self._url, "send", str(number), str(COUNT), self._keys, dies)
            lines = [line.split() for line in said.splitlines()]
            told += [Acknowledged(words[0], words[1], int(words[2])) for words in lines if len(words) == 3]
            if code == 0:
                return told
            assert code == -signal.SIGKILL, said
            self.kills += 1
        raise AssertionError("it never came to its end")

    def consider(self) -> None:
        """Have waits considered until it is over."""
        while not self.is_over.is_set():
            process = self._lives.start(self._url, "consider", self._keys, "--dies-one-in=4")
            while (code := process.poll()) is None and not self.is_over.wait(0.02):
                continue
            if code is None:
                process.kill()
            said = process.close()
            if not self.is_over.is_set():
                assert code == -signal.SIGKILL, said
                self.kills += 1


def sensors() -> tuple[TaskSpec, ...]:
    return tuple(
        TaskSpec(
            f"{key}{value}",
            "SignalSensor",
            start_trigger=StartTrigger(
                SIGNAL_TRIGGER, b"{}", "execute", b"{}", signal=SignalWait(key, value=str(value).encode())
            ),
        )
        for key in KEYS
        for value in range(0, COUNT + 2, 2)
    )


def history(store: Store, query: Query, run: int) -> list[Record]:
    """Read what is stored at the end."""
    records: list[Record] = []
    for key in KEYS:
        records += [Stored(key, one.version, one.dedup, one.value) for one in store.signals.page(key).signals]
    events = query(
        "SELECT task_instance.task_id, trigger_event.payload FROM trigger_event "
        "JOIN signal_task ON signal_task.trigger_id = trigger_event.trigger_id "
        "JOIN task_instance ON task_instance.id = signal_task.instance"
    )
    ended: dict[str, list[int]] = {}
    for row in events:
        version = decode_value(bytes(row["payload"]))["xcoms"]["version"]
        ended.setdefault(row["task_id"], []).append(version)
    for spec in sensors():
        assert spec.start_trigger is not None
        assert spec.start_trigger.signal is not None
        assert spec.start_trigger.signal.value is not None
        wait = spec.start_trigger.signal
        value = decode_value(wait.value or b"")
        records.append(Waited(spec.task_id, wait.key, value, 0, tuple(ended.get(spec.task_id, ()))))
    return records


@pytest.mark.campaign
def test_no_version_is_missing_or_given_twice_and_each_wait_ends_with_the_first_that_fits(
    database_url: str, query: Query
) -> None:
    keys = Fernet.generate_key().decode()
    with Store(open_engine(database_url), secrets=Secrets([keys], source="the test")) as store:
        tasks = Tasks(store, query, tasks=sensors())
        tasks.plan()
        # Which trigger is whose: the row of a task refers to it only while it waits.
        query("DROP TABLE IF EXISTS signal_task")
        query("CREATE TABLE signal_task AS SELECT id AS instance, trigger_id FROM task_instance")
        with Lives("tests.proof.signal_worker") as lives, ThreadPoolExecutor(SENDERS + CONSIDERERS) as pool:
            processes = Processes(lives, database_url, keys)
            considering = [pool.submit(processes.consider) for _ in range(CONSIDERERS)]
            sending = [pool.submit(processes.send, number) for number in range(SENDERS)]
            try:
                told = [said for sender in sending for said in sender.result(ALL_WITHIN_S)]
            finally:
                processes.is_over.set()
            for one in considering:
                one.result(ALL_WITHIN_S)
        epoch = tasks.register()
        while store.scheduling.consider_signals(epoch).has_more:
            pass
        report = check([*told, *history(store, query, tasks.run)])
        query("DROP TABLE signal_task")
        assert report.findings == (), str(report)
        assert report.stored == SENDERS * COUNT * len(KEYS)
        assert report.acknowledged >= report.stored
        assert processes.kills > SENDERS
        print(f"{processes.kills} kills; {report}")


@pytest.mark.campaign
def test_eight_processes_that_send_a_thousand_each_to_one_key_give_1_to_8000(database_url: str) -> None:
    with Lives("tests.proof.signal_worker") as lives:
        senders = [lives.start(database_url, "count", str(number), str(EACH)) for number in range(SENDERS)]
        try:
            ended = [sender.wait(ALL_WITHIN_S) for sender in senders]
        finally:
            for sender in senders:
                sender.kill()
        assert ended == [0] * SENDERS, [sender.said.read() for sender in senders]
        for sender in senders:
            sender.close()
    with open_client(database_url) as client:
        found = [one for after in range(0, SENDERS * EACH, 1000) for one in client.list_signals(KEYS[0], after=after)]
    assert [one.version for one in found] == list(range(1, SENDERS * EACH + 1))
    for number in range(SENDERS):
        assert [item for by, item in (one.value for one in found) if by == number] == list(range(EACH))
