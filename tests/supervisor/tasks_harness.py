"""What the tests of tasks in the store have in common: a DAG, a run, and a task brought to any state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import select
from tests.store import ends
from tests.store.harness import QUEUES, register

from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState
from headgate.protocol.messages.runner import EventKind, FiredEvent
from headgate.protocol.values import encode_value
from headgate.store.ids import DagRunId, Epoch, TaskInstanceId
from headgate.store.scheduling.planning import Planned
from headgate.store.store import Store
from headgate.store.tables import task_instance
from headgate.store.tasks import dags
from headgate.store.tasks.deferral import Deferral
from headgate.store.tasks.dispatch import TaskToRun

WAIT = Deferral("a.Trigger", encode_value({"path": "x"}, where="k"), "resume", encode_value({"n": 1}, where="k"))
S = TaskState


def task_states(store: Store, run: int) -> dict[str, TaskState]:
    """Return the states of the tasks of a run, by task id."""
    with store.database.reading() as tx:
        return dags.task_states(tx, DagRunId(run))


def instance_of(store: Store, run: int, task_id: str) -> TaskInstanceId:
    """Return the id of a task's row."""
    statement = select(task_instance.c.id).where(task_instance.c.dag_run_id == run, task_instance.c.task_id == task_id)
    with store.database.reading() as tx:
        return TaskInstanceId(tx.connection.execute(statement).scalar_one())


def body(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a verb does in its transaction, to be done in one that a test holds open: ``tx`` comes first."""
    return partial(verb.__wrapped__, verb.__self__)  # type: ignore[attr-defined]


def import_errors(store: Store) -> dict[str, str]:
    """Return the error of each DAG file that cannot be parsed, by file."""
    return {line.file: line.import_error for line in store.inspect.dags() if line.import_error is not None}


def clear(store: Store, run: int, *task_ids: str) -> dict[str, TaskState]:
    """Clear tasks of a run as ``headgate tasks clear`` does, until none of them is busy; return their new states."""
    answer = store.tasks.clear_many(DagRunId(run), task_ids)
    cleared = answer.cleared
    while answer.left is not None:
        answer = store.tasks.clear_on(answer.left)
        cleared |= answer.cleared
    return cleared


class Tasks:
    """A DAG of one run in a store. Its tasks are called ``a``, ``b``, ... unless the test has others."""

    def __init__(self, store: Store, query: Callable[..., list[dict[str, Any]]], **changes: Any) -> None:
        self.store = store
        self.query = query
        self.epoch = self.register()
        tasks = changes.pop("tasks", None) or (TaskSpec("a", "Op", **changes),)
        self.spec = DagSpec("etl", tasks=tasks)
        store.tasks.save_file(self.epoch, "etl.py", [self.spec])
        run = store.tasks.create_run("etl", "r1")
        assert run is not None
        self.run = run
        self.a = instance_of(store, run, tasks[0].task_id)

    def register(self) -> Epoch:
        return register(self.store, workers=4)

    def row(self, task_id: int | None = None) -> dict[str, Any]:
        (row,) = self.query("SELECT * FROM task_instance WHERE id = :id", id=task_id or self.a)
        return row

    def state(self) -> TaskState:
        return TaskState(self.row()["state"])

    def trigger(self, trigger_id: int) -> dict[str, Any]:
        (row,) = self.query('SELECT * FROM "trigger" WHERE id = :id', id=trigger_id)
        return row

    def plan(self) -> Planned:
        """Evaluate the runs, as a scheduler does until there is nothing left to do; return the sum."""
        total = Planned()
        while (planned := self.store.scheduling.plan(self.epoch)).evaluated:
            total = Planned(
                scheduled=total.scheduled + planned.scheduled,
                in_triggers=total.in_triggers + planned.in_triggers,
                removed=total.removed + planned.removed,
                ended=total.ended | planned.ended,
            )
        return total

    def dispatch(self, *, limit: int = 10) -> list[TaskToRun]:
        return self.store.tasks.dispatch(self.epoch, limit=limit, queues=QUEUES, endless=limit).tasks

    def run_it(self) -> str:
        """Bring the first task from ``none`` or ``scheduled`` to ``running``; return its token."""
        self.plan()
        (task,) = self.dispatch(limit=1)
        assert task.id == self.a, "the most urgent one"
        return task.token

    def clear_it(self) -> TaskState | None:
        """Clear the first task; return its new state, None if it is being cleared already."""
        name = self.row()["task_id"]
        return clear(self.store, self.run, name).get(name)

    def defer_it(self, wait: Deferral = WAIT) -> tuple[str, int]:
        """Bring the first task to ``deferred``, its trigger claimed; return the token and the trigger's id."""
        assert ends.defer(self.store.tasks, self.epoch, self.a, self.run_it(), wait)
        row = self.row()
        trigger_id = row["trigger_id"]
        claimed = self.store.claim_triggers(self.epoch, limit=10, queues=QUEUES)
        assert trigger_id in [trigger.id for trigger in claimed]
        return row["token"], trigger_id

    def bring_to(self, state: TaskState) -> str | None:
        """Bring the first task to any state by the store's own verbs; return its token if it has one.

        For ``upstream_failed`` it must have a second task upstream of it.
        """
        verbs, epoch = self.store.tasks, self.epoch
        match state:
            case S.NONE:
                pass
            case S.SCHEDULED:
                self.plan()
            case S.RUNNING:
                self.run_it()
            case S.DEFERRED:
                self.defer_it()
            case S.UP_FOR_RETRY:
                ends.fail(verbs, epoch, self.a, self.run_it(), "error")
            case S.RESTARTING:
                self.run_it()
                self.clear_it()
            case S.SUCCESS:
                ends.succeed(verbs, epoch, self.a, self.run_it())
            case S.FAILED:
                ends.fail(verbs, epoch, self.a, self.run_it(), "error", may_retry=False)
            case S.SKIPPED:
                ends.succeed(verbs, epoch, self.a, self.run_it(), end="skipped")
            case S.UPSTREAM_FAILED:
                verbs.mark(instance_of(self.store, self.run, self.spec.tasks[1].task_id), "failed")
                self.plan()
            case S.REMOVED:
                self.remove_it()
        assert self.state() is state
        token: str | None = self.row()["token"]
        return token

    def remove_it(self) -> None:
        """Have the DAG's file no longer hold its first task."""
        self.store.tasks.save_file(self.epoch, "etl.py", [DagSpec("etl", tasks=self.spec.tasks[1:])])
        self.plan()


def event_of(trigger_id: int, payload: Any = None, *, kind: EventKind = "event", index: int = 0) -> FiredEvent:
    return FiredEvent(
        trigger_id, f"run-{trigger_id}", index, 1, encode_value(payload, where="p"), kind=kind, is_last=kind != "event"
    )
