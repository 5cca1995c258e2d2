"""A run whose tasks have rules about signals, in a store: for the tests of rules."""

from __future__ import annotations

from typing import Any

from tests.store import ends
from tests.store.harness import Query
from tests.store.signals.test_sending import new
from tests.supervisor.tasks_harness import S, Tasks, instance_of, task_states

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.rules import Overlap, Rule, Rules, SignalRule, StoppedAs
from headgate.protocol.messages.signals import Predicate
from headgate.protocol.values import decode_value, encode_value
from headgate.store.ids import TaskInstanceId
from headgate.store.store import Store
from headgate.store.tasks.dispatch import TaskToRun

GO = SignalRule("go")
AGAIN = SignalRule("again", action="RESTART")
HALT = SignalRule("halt", action="STOP")
PLAIN = TaskSpec("plain", "Op")


def is_(value: Any) -> Predicate:
    return Predicate("equal", encode_value(value, where="value"))


def ruled(
    *rules: Rule, name: str = "job", overlap: Overlap = "latest", stopped_as: StoppedAs = "skipped", **options: Any
) -> TaskSpec:
    return TaskSpec(name, "Op", signals=Rules(rules or (GO, AGAIN, HALT), overlap, stopped_as), **options)


class Jobs:
    """A run with tasks that have rules, and a supervisor that considers signals and evaluates runs."""

    taken = 0  # tasks whose workers or triggers the supervisor is to end

    def __init__(self, store: Store, query: Query, *tasks: TaskSpec) -> None:
        self.tasks = Tasks(store, query, tasks=tasks or (ruled(), PLAIN))
        self.store = store
        self.query = query
        self.settle()

    def send(self, key: str, *values: Any, **fields: Any) -> list[int]:
        """Send signals, and have them act; return their versions."""
        sent = self.store.signals.send([new(key, value, **fields) for value in values or (None,)])
        self.settle()
        return [one.version for one in sent]

    def settle(self) -> None:
        """Do what schedulers do until nothing is left to do."""
        epoch = self.tasks.epoch
        while True:
            planned = self.store.scheduling.plan(epoch)
            self.taken += planned.taken
            considered = self.store.scheduling.consider_signals(epoch)
            if not (planned.evaluated or considered.has_more or considered.tasks or considered.rules):
                return

    def states(self) -> dict[str, S]:
        return task_states(self.store, self.tasks.run)

    def state(self, name: str = "job") -> S:
        return self.states()[name]

    def id(self, name: str = "job") -> TaskInstanceId:
        return instance_of(self.store, self.tasks.run, name)

    def row(self, name: str = "job") -> dict[str, Any]:
        return self.tasks.row(self.id(name))

    def dispatch(self, name: str = "job") -> TaskToRun:
        """Have a worker run what is scheduled; return this task of it."""
        by_name = {task.task_id: task for task in self.tasks.dispatch()}
        return by_name[name]

    def end(self, task: TaskToRun, state: S = S.SUCCESS) -> None:
        """Have the worker end a step."""
        verbs = self.store.tasks
        if state is S.SUCCESS:
            assert ends.succeed(verbs, self.tasks.epoch, task.id, task.token)
        else:
            ends.fail(verbs, self.tasks.epoch, task.id, task.token, "it broke")
        self.settle()

    def end_plain(self) -> None:
        """End the task without rules, if the run has it."""
        if self.states().get("plain") is S.SCHEDULED:
            tasks = {task.task_id: task for task in self.tasks.dispatch()}
            self.end(tasks["plain"])

    def run_state(self) -> str:
        return str(self.query("SELECT state FROM dag_run WHERE id = :run", run=self.tasks.run)[0]["state"])

    def signals(self, name: str = "job") -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """The keys and values of the signals that have started a task, and of those before."""
        found = self.store.tasks.start_signals(self.id(name))
        return (
            [(one.key, decode_value(one.value)) for one in found.signals],
            [(one.key, decode_value(one.value)) for one in found.previous],
        )
