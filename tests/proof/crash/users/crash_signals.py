"""A user's tasks that send signals, with sensors that wait for them, and a DAG of all.

They keep the journal of `crash_tasks`, and add what they send: `tests.proof.history.signal_history` says what is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tests.proof.crash.users.crash_tasks import RETRIES, begin, note, now
from tests.proof.history.signal_history import NOW, OBEYED, ORDERS, OUTCOME, OWN, WAITS, Acknowledged, Sends
from tests.proof.history.task_records import Ended

from headgate.signals import On, Signal, SignalService, SignalVersion
from headgate.tasks import DAG, SignalSensor, task
from headgate.tasks.options import TaskOptions

ORDERS_SENT = 3


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


@task
def after(journal: str, **context: Any) -> None:
    """Run when a sensor has ended."""
    note(journal, Ended(begin(journal, context), "success", at=now()))


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
    return dag
