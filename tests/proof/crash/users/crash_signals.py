"""A user's tasks that send signals, with sensors that wait for them, and a DAG of all.

They keep the journal of `crash_tasks`, and add what they send: `tests.proof.history.signal_history` says what is right.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from signal import SIGKILL
from typing import Any

from tests.proof.crash.users.crash_tasks import RETRIES, begin, note, now
from tests.proof.history.signal_history import (
    DECIDED,
    NOW,
    OBEYED,
    ORDERS,
    OUTCOME,
    OWN,
    PASSED,
    STARTED,
    TICKED,
    WAITS,
    Acknowledged,
    Lives,
    Sends,
)
from tests.proof.history.task_records import Ended

from headgate.signals import (
    STOP,
    Every,
    On,
    OnSignal,
    Signal,
    SignalAction,
    SignalService,
    SignalVersion,
    TaskEnded,
    equal,
)
from headgate.tasks import DAG, BaseOperator, BashOperator, Context, SignalSensor, task
from headgate.tasks.options import TaskOptions

ORDERS_SENT = 3
CLOSING = "closing"


@task
def sends(journal: str, values: list[int], **context: Any) -> None:
    """Send at once, some of it for this run alone: a later try sends the same by the same dedups."""
    execution = begin(journal, context)
    of_task = f"{context['run_id']}/{context['task_id']}"
    signals = [Signal(NOW, value, f"{of_task}/{value}") for value in values]
    service = SignalService()
    sent = service.send_signals(signals) + service.send_signals([Signal(OWN, "own", of_task)], of_run=True)
    for one in sent:
        note(journal, Acknowledged(one.key, one.dedup or "", one.version))
    note(journal, Ended(execution, "success", at=now()))


@task
def tells(journal: str, fails_first: bool, **context: Any) -> None:
    """Send with the outcome; a first try that is to fail has sent nothing."""
    execution = begin(journal, context)
    service = SignalService()
    for value in (f"{execution}/0", f"{execution}/1"):
        note(journal, Sends(execution, OUTCOME, value))
        service.send_signal(OUTCOME, value, with_outcome=True)
    is_to_fail = fails_first and context["try_number"] == 1
    note(journal, Ended(execution, "failed" if is_to_fail else "success", at=now()))
    if is_to_fail:
        raise RuntimeError("as it was to")


@task
def orders(journal: str, **context: Any) -> None:
    """Send what starts `obeys`, which has to start for each."""
    execution = begin(journal, context)
    run = f"{context['dag_id']}/{context['run_id']}"
    for number in range(ORDERS_SENT):
        sent = SignalService().send_signal(ORDERS, number, dedup=f"{run}/{number}", of_run=True)
        assert sent is not None
        note(journal, Acknowledged(sent.key, sent.dedup or "", sent.version))
    note(journal, Ended(execution, "success", at=now()))


@task(signals=[On(ORDERS)], overlap="each")
def obeys(dag_id: str, run_id: str, signals: Sequence[SignalVersion]) -> None:
    """Tell which signals have started it: that is stored with the outcome, so once for each start that ended."""
    for signal in signals:
        SignalService().send_signal(OBEYED, f"{dag_id}/{run_id}/{signal.version}", with_outcome=True)


@task(endless=True, retries=0, signals=[On(TaskEnded("closes"), action=STOP)])
def endures(journal: str, **context: Any) -> None:
    """Lose the first worker, and then run for ever, in one process at a time; `closes` ends it."""
    name = f"{context['dag_id']}/{context['run_id']}/{context['task_id']}"
    own = Path(journal).parent.parent / name.replace("/", "-")
    with own.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(journal, Lives(name, os.getpid(), is_alone=False))
            return
        note(journal, Lives(name, os.getpid(), is_alone=True))
        if os.fstat(file.fileno()).st_size == 0:
            file.write("begun")
            file.flush()
            os.kill(os.getpid(), SIGKILL)
        SignalService().send_signal(CLOSING, name, dedup=name, of_run=True)
        while True:
            time.sleep(60.0)


@task(retries=RETRIES, signals=[On(CLOSING)])
def closes() -> None:
    """Run when that is said to go on on another worker."""


class Decides(BaseOperator):
    """A task that some of the orders start, as its operator decides; it tells which, as `obeys` does."""

    def on_signal(self, signal: SignalVersion) -> SignalAction:
        return SignalAction.NONE if signal.value in PASSED else SignalAction.START

    def execute(self, context: Context) -> None:
        for signal in context["signals"]:
            if signal.value not in PASSED:  # those that start nothing go with the next start
                value = f"{context['dag_id']}/{context['run_id']}/{signal.version}"
                SignalService().send_signal(DECIDED, value, with_outcome=True)


@task(retries=RETRIES, signals=[On(Every(timedelta(seconds=1)))])
def ticks(dag_id: str, run_id: str, signals: Sequence[SignalVersion]) -> None:
    """Tell which time has started it, with the outcome."""
    for signal in signals:
        SignalService().send_signal(TICKED, f"{dag_id}/{run_id}/{signal.version}", with_outcome=True)


@task
def after(journal: str, **context: Any) -> None:
    """Run when a sensor has ended."""
    note(journal, Ended(begin(journal, context), "success", at=now()))


@task
def starts(run_signals: Sequence[SignalVersion]) -> None:
    """Tell for which signals the run was created: that is stored with the outcome, so once for each run."""
    for signal in run_signals:
        SignalService().send_signal(STARTED, f"/{signal.version}", with_outcome=True)


def started_dag(name: str) -> DAG:
    """Return a DAG that has a run for each first signal of `sends`; only a signal ends the runs, that of their task."""
    options: TaskOptions = {"retries": RETRIES, "retry_delay": timedelta(0)}
    schedule, end_on = OnSignal(NOW, equal(0)), On(STARTED)
    with DAG(name, schedule=schedule, end_on=end_on, default_args=options, max_active_runs=100) as dag:
        starts()
        BashOperator(task_id="waits", bash_command="false", signals=[On("never")]) >> BashOperator(
            task_id="below", bash_command="false"
        )
    return dag


def signal_dag(name: str, journal: str) -> DAG:
    """Return a DAG that sends at once and with outcomes, waits for that, and has a task that signals start."""
    options: TaskOptions = {"retries": RETRIES, "retry_delay": timedelta(0)}
    with DAG(name, default_args=options, max_active_runs=100) as dag:
        sensors = {}
        for task_id, (key, value) in WAITS.items():
            sensors[task_id] = (
                SignalSensor(task_id=task_id, key=key)
                if value is None
                else SignalSensor(task_id=task_id, key=key, value=value)
            )
        first = sends.override(task_id="sends")(journal, [0, 1])
        second = sends.override(task_id="sends_more")(journal, [2, 3, 2])
        tells.override(task_id="tells")(journal, fails_first=False)
        tells.override(task_id="tells_again")(journal, fails_first=True)
        [first, second] >> sensors["hears_late"]
        sensors["hears_any"] >> after(journal)
        orders(journal)
        obeys()
        endures(journal)
        closes()
        ticks()
        Decides(task_id="decides", signals=[On(ORDERS)], overlap="each")
    return dag
