"""What the tests of tasks in the store have in common: a DAG, a run, and a task brought to any state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.store.triggers.test_leases import QUEUES, Clock, register

from headgate.protocol.messages.dags import DagSpec, TaskSpec, TaskState
from headgate.protocol.messages.runner import EventKind, FiredEvent
from headgate.protocol.values import encode_value
from headgate.store.store import Store
from headgate.store.tasks.deferral import Deferral
from headgate.store.tasks.tasks import TaskToRun

WAIT = Deferral("a.Trigger", encode_value({"path": "x"}, where="k"), "resume", encode_value({"n": 1}, where="k"))
S = TaskState

__all__ = ["QUEUES", "WAIT", "Clock", "S", "Tasks", "event_of"]


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
        self.a = store.tasks.task_id_of(run, tasks[0].task_id)

    def register(self) -> int:
        return register(self.store, workers=4)

    def row(self, task_id: int | None = None) -> dict[str, Any]:
        (row,) = self.query("SELECT * FROM task_instance WHERE id = :id", id=task_id or self.a)
        return row

    @property
    def state(self) -> TaskState:
        return TaskState(self.row()["state"])

    def trigger(self, trigger_id: int) -> dict[str, Any]:
        (row,) = self.query('SELECT * FROM "trigger" WHERE id = :id', id=trigger_id)
        return row

    def dispatch(self, *, straight: bool = True, limit: int = 10) -> list[TaskToRun]:
        return self.store.tasks.dispatch(self.epoch, limit=limit, queues=QUEUES, straight_to_worker=straight).tasks

    def run_it(self) -> str:
        """Bring the first task from ``none`` or ``scheduled`` to ``running``; return its token."""
        self.store.tasks.decide(self.epoch, "scheduled", [self.a])
        (task,) = [task for task in self.dispatch() if task.id == self.a]
        return task.token

    def defer_it(self, wait: Deferral = WAIT) -> tuple[str, int]:
        """Bring the first task to ``deferred``, its trigger claimed; return the token and the trigger's id."""
        token = self.store.tasks.defer(self.epoch, self.a, self.run_it(), wait)
        assert token is not None
        trigger_id = self.row()["trigger_id"]
        claimed = self.store.claim_triggers(self.epoch, limit=10, queues=QUEUES)
        assert trigger_id in [trigger.id for trigger in claimed]
        return token, trigger_id

    def bring_to(self, state: TaskState) -> str | None:
        """Bring the first task to any state by the store's own verbs; return its token where it has one."""
        verbs, epoch = self.store.tasks, self.epoch
        match state:
            case S.NONE:
                pass
            case S.SCHEDULED:
                verbs.decide(epoch, "scheduled", [self.a])
            case S.QUEUED:
                verbs.decide(epoch, "scheduled", [self.a])
                self.dispatch(straight=False)
            case S.RUNNING:
                self.run_it()
            case S.DEFERRED:
                self.defer_it()
            case S.UP_FOR_RETRY:
                verbs.fail(epoch, self.a, self.run_it(), "error")
            case S.RESTARTING:
                self.run_it()
                verbs.clear(self.a)
            case S.SUCCESS:
                verbs.succeed(epoch, self.a, self.run_it())
            case S.FAILED:
                verbs.fail(epoch, self.a, self.run_it(), "error", may_retry=False)
            case S.SKIPPED:
                verbs.decide(epoch, "upstream_skipped", [self.a])
            case S.UPSTREAM_FAILED:
                verbs.decide(epoch, "upstream_failed", [self.a])
            case S.REMOVED:
                self.remove_it()
        assert self.state is state
        token: str | None = self.row()["token"]
        return token

    def remove_it(self) -> list[int]:
        self.store.tasks.save_file(self.epoch, "etl.py", [DagSpec("etl", tasks=())])
        return self.store.tasks.follow_dag(self.epoch, self.run)


def event_of(trigger_id: int, payload: Any = None, *, kind: EventKind = "event", index: int = 0) -> FiredEvent:
    return FiredEvent(
        trigger_id, f"run-{trigger_id}", index, 1, encode_value(payload, where="p"), kind=kind, is_last=kind != "event"
    )
