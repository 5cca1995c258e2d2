"""Signals through real processes: what is sent ends sensors, and is heard by tasks that listen, without a look."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.integration.conftest import StartStation
from tests.integration.test_pair import write_log
from tests.supervisor.tasks_harness import clear
from tests.waiting import wait_until

from headgate.client import open_client
from headgate.protocol.messages.steps import EXECUTION_TIMEOUT_OVER
from headgate.protocol.values import decode_value
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store

DAGS = """
from headgate.signals import Signal, SignalService
from headgate.tasks import DAG, SignalSensor, task

with DAG("senders"):
    @task(retries=1, retry_delay=__import__("datetime").timedelta(0))
    def send(ti):
        service = SignalService()
        at_once = service.send_signal("at once", ti.try_number, dedup="once")
        service.send_signals([Signal("outcome", ti.try_number), Signal("of run", 1)], with_outcome=True)
        if ti.try_number == 1:
            raise RuntimeError("the next try")
        return at_once.version, at_once.is_new, [one.value for one in service.list_signals("at once")]
    send()

with DAG("waiters"):
    SignalSensor(task_id="outcome", key="outcome", value=2) >> SignalSensor(task_id="command", key="by hand")
    SignalSensor(task_id="at_once", key="at once")
"""


NEWS = """
from headgate.tasks import DAG, SignalSensor

with DAG("readers"):
    SignalSensor(task_id="first", key="news") >> SignalSensor(task_id="second", key="news")
"""


def test_what_a_task_and_a_command_send_ends_the_sensors_that_wait(
    start_station: StartStation, database_url: str, keys: str
) -> None:
    # Without bells the next poll would come after this.
    station = start_station(poll_interval_s="3600", lease_silence_max_s="7200")
    station.write("signals.py", DAGS)
    waits = station.run("waiters")
    waits.wait(outcome="deferred", at_once="deferred")
    sender = station.run("senders")
    assert sender.wait_end() == {"send": "success"}
    assert sender.xcom("send") == (1, False, [1])
    waits.wait(outcome="success", at_once="success", command="deferred")
    # A step that fails sends nothing with its outcome; what was sent at once stays.
    assert [one.value for one in station.store.signals.page("outcome").signals] == [2]
    assert (waits.xcom("outcome"), waits.xcom("outcome", "version")) == (2, 1)
    assert waits.xcom("at_once") == 1
    (sent,) = station.store.signals.page("at once").signals
    assert sent.sender == f"task senders.{sender.run_id}.send, try 1"
    command = [sys.executable, "-m", "headgate.cli", "--db", database_url, "--home", str(station.home)]
    environment = os.environ | {"HEADGATE_FERNET_KEYS": keys}
    subprocess.run([*command, "signals", "send", "by hand", '"go"'], env=environment, check=True)
    assert waits.wait_end() == {"outcome": "success", "command": "success", "at_once": "success"}
    assert waits.xcom("command") == "go"
    assert waits.logged("command", "begun") == [], "no worker has had it"
    wait_until(lambda: station.store.inspect.run("waiters", waits.run_id).line.state == "success", "the end of the run")


def test_an_event_of_a_watcher_ends_a_sensor_that_waits(start_station: StartStation, users_store: Store) -> None:
    # Without a notice of the slice's own supervisor the next poll would come after this.
    station = start_station(poll_interval_s="3600", lease_silence_max_s="7200")
    station.write("news.py", NEWS)
    waits = station.run("readers")
    waits.wait(first="deferred", second="none")
    path = station.home / "log"
    kwargs = {"path": str(path), "group": "g"}
    users_store.add_watcher("news", "headgate.brokers.filelog.FileLogTrigger", kwargs, signal="news")
    write_log(path, events=3)
    assert waits.wait_end() == {"first": "success", "second": "success"}
    signals = wait_until(lambda: sent if len(sent := users_store.signals.page("news").signals) == 3 else None, "all")
    stored = {row.id: decode_value(row.payload) for row in users_store.inspect.events(watcher="news")}
    assert [one.value for one in signals] == [stored[event_id] for event_id in sorted(stored)]
    assert waits.xcom("first") == waits.xcom("second") == signals[0].value


LISTENERS = """
from datetime import timedelta

from headgate.signals import SignalService, SignalWatcher, StopListening
from headgate.tasks import DAG, BaseOperator, task

class UntilTheLast(SignalWatcher):
    def __init__(self):
        self.got = []

    def process(self, signals):
        self.got += [(one.version, one.value) for one in signals]
        if signals[-1].value == "last":
            raise StopListening

class Listens(BaseOperator):
    def execute(self, context):
        if context["ti"].try_number > 1:
            return "begun anew"
        for signal in SignalService().listen_signal("class", "never"):
            pass

    def on_kill(self):
        print("on_kill of", self.task_id)

with DAG("listeners"):
    @task
    def each():
        found = []
        for signal in SignalService().listen_signal("each", "labels"):
            found.append((signal.version, signal.value))
            if signal.value == "last":
                return found

    @task
    def watch():
        watcher = UntilTheLast()
        SignalService().listen_signal("watch", "labels", watcher)
        return watcher.got

    @task
    def in_vain():
        return list(SignalService().listen_signal("in vain", "never", timeout=timedelta(seconds=0.2)))

    each(), watch(), in_vain()

with DAG("ended"):
    Listens(task_id="cleared")
    Listens(task_id="late", execution_timeout=timedelta(seconds=5))
"""


def test_tasks_hear_what_a_program_sends_while_they_listen(
    start_station: StartStation, database_url: str, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without bells the next poll would come after this.
    station = start_station(poll_interval_s="3600", lease_silence_max_s="7200")
    station.write("listeners.py", LISTENERS)
    monkeypatch.setenv("HEADGATE_FERNET_KEYS", keys)
    with open_client(database_url) as client:
        client.send_signal("labels", "before")
        run = station.run("listeners")
        for name in ("each", "watch"):
            assert run.wait_logged(name, "listens for signals")["event"].startswith(f"{name} listens")
        for value in ("first", {"n": 2}, "last"):
            client.send_signal("labels", value)
        assert run.wait_end() == {"each": "success", "watch": "success", "in_vain": "success"}
    sent = [[2, "first"], [3, {"n": 2}], [4, "last"]]
    assert [[*pair] for pair in run.xcom("each")] == [[*pair] for pair in run.xcom("watch")] == sent
    assert run.xcom("in_vain") == []


def test_a_task_that_listens_is_ended_as_any_other(start_station: StartStation) -> None:
    station = start_station()
    station.write("listeners.py", LISTENERS)
    run = station.run("ended")
    for name in ("cleared", "late"):
        run.wait_logged(name, "listens for signals")
    clear(station.store, run.id, "cleared")
    assert run.wait_end() == {"cleared": "success", "late": "failed"}
    assert run.xcom("cleared") == "begun anew"
    assert run.wait_logged("cleared", "on_kill of cleared")["try_number"] == 1
    assert run.logged("late", "on_kill of late") == []
    assert run.wait_logged("late", "the worker was lost")["error"] == EXECUTION_TIMEOUT_OVER


PERIODIC = """
from datetime import timedelta

from headgate.signals import STOP, On
from headgate.tasks import DAG, task

with DAG("periodic"):
    @task(every=timedelta(seconds=1), signals=[On("enough", action=STOP)], stopped_as="success")
    def look(signals, previous_signals):
        since = (signals[0].value - previous_signals[0].value).total_seconds() if previous_signals else None
        print("first" if since is None else f"at a whole second: {since > 0 and since % 1 == 0}")

    look()
"""


def test_a_task_starts_again_and_again_until_its_run_is_ended(start_station: StartStation) -> None:
    # Its starts are due by the clock: no poll and no bell comes before the next one.
    station = start_station(poll_interval_s="3600", lease_silence_max_s="7200")
    station.write("periodic.py", PERIODIC)
    run = station.run("periodic")
    tries = "SELECT try_number FROM task_instance WHERE task_id = 'look'"
    wait_until(lambda: station.query(tries)[0]["try_number"] >= 3, "the third start")
    station.store.signals.send([NewSignal("enough", b"null", "once", "a test")])
    station.store.signals.end_run(run.id)
    wait_until(lambda: station.store.inspect.run("periodic", run.run_id).line.state == "success", "the end of the run")
    assert len(run.logged("look", "first")) == 1
    assert len(run.logged("look", "at a whole second: True")) >= 1
    assert run.logged("look", "at a whole second: False") == []


DECIDES = """
import os

from headgate.signals import RESTART, On, SignalAction
from headgate.tasks import DAG, BaseOperator

class Retrain(BaseOperator):
    def execute(self, context):
        return [one.version for one in context["signals"]]

    def on_signal(self, signal):
        print("drift", signal.value)
        if signal.value == "dies":
            os._exit(7)
        return RESTART if signal.value > 0.2 else SignalAction.NONE

class Hangs(BaseOperator):
    def on_signal(self, signal):
        os.read(os.pipe()[0], 1)  # for ever

with DAG("decides"):
    Retrain(task_id="train", signals=[On("drift")])

with DAG("hangs"):
    Hangs(task_id="train", signals=[On("drift")])
"""


def test_an_operator_decides_what_signals_do_while_another_hangs(
    start_station: StartStation, database_url: str, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without bells the next poll would come after this.
    station = start_station(poll_interval_s="3600", lease_silence_max_s="7200")
    station.write("decides.py", DECIDES)
    station.run("hangs")
    run = station.run("decides")
    monkeypatch.setenv("HEADGATE_FERNET_KEYS", keys)
    with open_client(database_url) as client:
        for value in (0.1, 0.3, "dies", 0.15):
            client.send_signal("drift", value)
    run.wait(train="success")
    assert run.xcom("train") == [2]
    given_up = run.wait_logged("train", "on_signal has failed, try 3 of 3: the signal does nothing")
    assert (given_up["key"], given_up["version"]) == ("drift", 3)
    assert given_up["error"] == "the process that decided it exited with code 7"
    wait_until(lambda: run.logged("train", "drift 0.15"), "the one behind it")
    decided = [(one["version"], one["action"]) for one in run.logged("train", "on_signal has decided")]
    assert decided[:2] == [(1, "NONE"), (2, "RESTART")]
    (told,) = station.store.signals.waiting("drift", limit=9)[1:]
    assert told.error == "version 3, try 3 of 3: the process that decided it exited with code 7"
