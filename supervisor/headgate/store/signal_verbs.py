"""`SignalVerbs`: the verbs of signals for users, reached as ``store.signals``.

The docstring of `headgate.store.store.Store` applies to these verbs, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sqlalchemy import delete, select, update

from headgate.protocol.messages.signals import DEFAULT_NAMESPACE, SIGNALS_PER_PAGE_MAX, SentSignal
from headgate.scheduling.states import TERMINAL
from headgate.store.access import acts
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, acting, reading
from headgate.store.errors import NoSuchRow, SignalKeyInUse, ValueRefused
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.inspect.runs import run_id_of
from headgate.store.signals import reading as signal_log
from headgate.store.signals import sending, subscriptions
from headgate.store.signals.conditions import has_listener
from headgate.store.signals.reading import Heard, KeyRow, Signal, SignalPage, WaitingTask
from headgate.store.signals.sending import NewSignal
from headgate.store.tables import (
    asset_watcher,
    dag,
    dag_run,
    signal,
    signal_key,
    signal_start,
    signal_wait,
    task_instance,
)
from headgate.store.tasks import dags
from headgate.store.tasks.graphs import read_spec


class SignalVerbs(Verbs):
    """The verbs of signals, except those of tasks (`headgate.store.task_verbs`)."""

    def send(self, signals: Sequence[NewSignal]) -> list[SentSignal]:
        """Send signals in one transaction; return what each has become, in the same order.

        May be repeated, and those that were sent are not sent again. Raises `ValueRefused`.
        """
        sending.check_count(len(signals))
        sent = self._send(signals)
        sending.note_committed()
        return sent

    @acting
    def _send(self, tx: Tx, signals: Sequence[NewSignal]) -> list[SentSignal]:
        sent = sending.send(tx, signals)
        _tell_sent(tx, signals, sent)
        return sent

    def send_and_start(self, signals: Sequence[NewSignal], dag_id: str) -> tuple[list[SentSignal], str | None]:
        """Send signals, and start a run of a DAG unless one is open, in one transaction; return its run_id, or None.

        The signals count for the new run. One that is to end is not open. If none of the signals is new, none of a run
        is: so it may be repeated with the same dedups. Raises `NoSuchRow` for the DAG, and `ValueRefused`.
        """
        sending.check_count(len(signals))
        found = self._send_and_start(signals, dag_id)
        sending.note_committed()
        return found

    @acting
    def _send_and_start(self, tx: Tx, signals: Sequence[NewSignal], dag_id: str) -> tuple[list[SentSignal], str | None]:
        sent = sending.send(tx, signals)
        _tell_sent(tx, signals, sent)
        # The keys are locked, then the DAG, and then its runs: a step that sends locks them in this order as well.
        of_name = select(dag.c.id, dag.c.spec).where(dag.c.name == dag_id, dag.c.removed_at.is_(None))
        row = tx.connection.execute(of_name.with_for_update(key_share=True)).first()
        if row is None:
            raise NoSuchRow("DAG", dag_id)
        if not any(one.is_new for one in sent) or dags.has_open_run(tx, row.id):
            return sent, None
        before = {
            (signal.namespace, signal.key): one.version - 1
            for signal, one in reversed(list(zip(signals, sent, strict=True)))
            if one.is_new
        }
        return sent, dags.start_with(tx, row.id, read_spec(dag_id, row.spec), before)

    @reading
    def run(self, tx: Tx, dag: str, run_id: str) -> DagRunId:
        """Return a run that signals can be sent to; ``latest`` is the newest of its DAG. Raises `NoSuchRow`."""
        return run_id_of(tx, dag, run_id)

    @reading
    def page(
        self,
        tx: Tx,
        key: str,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        after: int = 0,
        limit: int = SIGNALS_PER_PAGE_MAX,
        dag_run: DagRunId | None = None,
    ) -> SignalPage:
        """Return versions of a key above ``after``, the oldest first; there may be more. Raises `ValueRefused`.

        With ``dag_run`` only those that this run may consider.
        """
        signal_log.check_address(key, namespace)
        signal_log.check_version("after", after)
        return signal_log.read_page(
            tx, key, namespace, after=after, limit=signal_log.check_limit(limit), dag_run=dag_run
        )

    @reading
    def hear(
        self,
        tx: Tx,
        key: str,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        after: int | None,
        dag_run: DagRunId,
        bytes_max: int = signal_log.PAGE_BYTES_MAX,
    ) -> Heard:
        """Return versions of a key above ``after`` for a run that listens, and after which one it goes on.

        Without ``after`` none, only the newest version that there is. Raises `ValueRefused`.
        """
        signal_log.check_address(key, namespace)
        if after is not None:
            signal_log.check_version("after", after)
        return signal_log.hear(tx, key, namespace, after=after, dag_run=dag_run, bytes_max=bytes_max)

    @reading
    def newest(self, tx: Tx, key: str, namespace: str = DEFAULT_NAMESPACE, *, limit: int = 1) -> list[Signal]:
        """Return the newest versions of a key, the oldest of them first. Raises `ValueRefused`."""
        signal_log.check_address(key, namespace)
        return signal_log.newest(tx, key, namespace, signal_log.check_limit(limit))

    @reading
    def version(
        self, tx: Tx, key: str, namespace: str, version: int, *, dag_run: DagRunId | None = None
    ) -> Signal | None:
        """Return one version of a key; None if it was not sent yet, or is not kept any more. Raises `ValueRefused`."""
        signal_log.check_address(key, namespace)
        signal_log.check_version("version", version)
        return signal_log.version_of(tx, key, namespace, version, dag_run)

    @reading
    def key(self, tx: Tx, key: str, namespace: str = DEFAULT_NAMESPACE) -> KeyRow:
        """Return a key. Raises `NoSuchRow` if nothing was ever sent under it."""
        return signal_log.key_row(tx, key, namespace)

    @reading
    def keys(self, tx: Tx, namespace: str | None = None, *, beyond_id: int = 0, limit: int) -> list[KeyRow]:
        """Return keys in the order in which they were made, those of one namespace or all, after an id."""
        return signal_log.keys(tx, namespace, beyond_id, limit)

    @reading
    def waiting(self, tx: Tx, key: str, namespace: str = DEFAULT_NAMESPACE, *, limit: int) -> list[WaitingTask]:
        """Return tasks that wait for a signal under a key, those that have waited longest first."""
        return signal_log.waiting(tx, key, namespace, limit)

    @acting
    def ask(self, tx: Tx, instance: TaskInstanceId, action: Literal["START", "RESTART", "STOP"]) -> bool:
        """Have a task start, restart or stop, as a signal would (`headgate.scheduling.signal_rules`).

        A scheduler does it when it evaluates the run; one that has ended goes on, unless the task is to stop. Return
        False if there is nothing to stop: the task has ended, and nothing may start it by what was sent before. Raises
        `NoSuchRow`, and `ValueRefused` for a mapped task, one that its DAG has no more, and a run that is to end.
        """
        tx.notify()
        of_task = (
            task_instance.c.task_id,
            task_instance.c.map_index,
            task_instance.c.dag_run_id,
            dag.c.name,
            dag.c.spec,
        )
        found = select(*of_task).select_from(task_instance.join(dag_run).join(dag))
        row = tx.connection.execute(found.where(task_instance.c.id == instance)).first()
        if row is None:
            raise NoSuchRow("task", str(instance))
        specs = {task.task_id: task for task in read_spec(row.name, row.spec).tasks}
        if row.task_id not in specs:
            raise ValueRefused(f"the task {row.task_id!r} is not in its DAG any more")
        if row.map_index >= 0 or specs[row.task_id].map is not None:
            raise ValueRefused(f"the task {row.task_id!r} is mapped: `headgate tasks clear` begins its instances again")
        # The run does not end any more: who ends it has not seen what is asked for.
        of_run = select(dag_run.c.ended_at, dag_run.c.is_ending).where(dag_run.c.id == row.dag_run_id)
        run = tx.connection.execute(of_run.with_for_update(key_share=True)).first()
        if run is None:
            raise NoSuchRow("run", str(row.dag_run_id))
        moves = action != "STOP" or (run.ended_at is None and not _is_over(tx, instance))
        acts.asked(tx, instance, action, changed=moves)
        if run.ended_at is not None and action == "STOP":
            return False
        if run.ended_at is None and run.is_ending and action != "STOP":
            raise ValueRefused("the run is to end: nothing of it starts any more")
        subscriptions.ask(tx, row.dag_run_id, instance, action)
        if run.ended_at is not None:
            dags.reopen(tx, row.dag_run_id)
        return moves

    @acting
    def end_run(self, tx: Tx, run: DagRunId) -> bool:
        """Have signals start nothing more in a run, and stop its endless tasks; return False if it has ended.

        It ends with what is under way otherwise.
        """
        tx.notify()
        begins = dags.begin_end(tx, run)
        tx.act("runs end", acts.run_name(tx, run), changed=begins)
        return begins

    @acting
    def forget(self, tx: Tx, key: str, namespace: str = DEFAULT_NAMESPACE) -> int:
        """Forget a key with all its versions; return how many were kept. Raises `NoSuchRow`.

        If something is sent under it again, its versions begin with 1. Raises `SignalKeyInUse` if a task waits for it,
        or one of a run that has not ended may, a DAG has runs for it, or a watcher sends its events under it. What
        waits for a run of a DAG that is in no file any more is kept for that.
        """
        found = signal_log.key_row(tx, key, namespace)
        sending.lock(tx, found.id)
        start, wait = signal_start.c, signal_wait.c
        of_key = (wait.namespace == namespace, wait.key == key)
        # A DAG that is in no file any more does not count: no command knows it. If it is there again, it goes on.
        is_there = dag.c.removed_at.is_(None)
        runs = select(dag.c.name).join(signal_wait, wait.dag_id == dag.c.id).where(*of_key, is_there)
        if (name := tx.connection.execute(runs.limit(1)).scalar_one_or_none()) is not None:
            raise SignalKeyInUse(key, f"the DAG {name!r} has runs for its signals")
        if tx.connection.execute(select(has_listener(namespace, key))).scalar_one():
            raise SignalKeyInUse(key, _listener(tx, key, namespace))
        sends = select(asset_watcher.c.name).where(
            asset_watcher.c.signal_namespace == namespace,
            asset_watcher.c.signal_key == key,
            asset_watcher.c.removed_at.is_(None),
        )
        if (watcher := tx.connection.execute(sends.limit(1)).scalar_one_or_none()) is not None:
            raise SignalKeyInUse(key, f"the watcher {watcher!r} sends its events under it")
        tx.connection.execute(delete(signal_start).where(start.namespace == namespace, start.key == key))
        # These are of runs that have ended. Rules are kept: if a run goes on, what was sent before does not count.
        tx.connection.execute(delete(signal_wait).where(*of_key, wait.rule.is_(None)))
        tx.connection.execute(update(signal_wait).where(*of_key).values(seen_version=0))
        kept = tx.connection.execute(delete(signal).where(signal.c.key_id == found.id)).rowcount
        tx.connection.execute(delete(signal_key).where(signal_key.c.id == found.id))
        tx.act("signals forget", f"signal {namespace} {key}", before={"versions": found.last_version, "kept": kept})
        return kept


def _listener(tx: Tx, key: str, namespace: str) -> str:
    """Return one of those for which `has_listener` holds, and how it counts on the key, as text for people."""
    for one in signal_log.waiting(tx, key, namespace, 1):
        run = f"run {one.run_id} of {one.dag}"
        if one.task_id is None:
            return f"{run} has a rule about it, by which it ends"
        return f"the task {one.task_id} of {run} {'has a rule about it' if one.has_rule else 'waits for it'}"
    # No task of it has begun to wait, and its rules are not there yet.
    start = signal_start.c
    of_key = (start.namespace == namespace, start.key == key, dag_run.c.ended_at.is_(None))
    runs = select(dag_run.c.run_id, dag.c.name).select_from(
        signal_start.join(dag_run, dag_run.c.id == start.dag_run_id).join(dag)
    )
    row = tx.connection.execute(runs.where(*of_key).order_by(dag_run.c.id).limit(1)).first()
    run = "a run" if row is None else f"run {row.run_id} of {row.name}"
    return f"{run} has not ended, and may come to wait for it"


def _tell_sent(tx: Tx, signals: Sequence[NewSignal], sent: Sequence[SentSignal]) -> None:
    """Tell which signals a user has sent, without their values."""
    if not signals:
        tx.act_nothing()
    for new, one in zip(signals, sent, strict=True):
        tx.act("signals send", f"signal {new.namespace} {new.key}", after={"version": one.version}, changed=one.is_new)


def _is_over(tx: Tx, instance: TaskInstanceId) -> bool:
    """Return whether a task has ended, and no signal and no user that came before this may still start it."""
    state = select(task_instance.c.state).where(task_instance.c.id == instance)
    return tx.connection.execute(state).scalar_one() in TERMINAL and not subscriptions.may_move(tx, instance)
