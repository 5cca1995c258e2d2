"""Loops: a group of tasks that is repeated, until a function of its result says that it is enough.

An iteration is an index of a mapped group, and there is one at a time. Behind the last task of the group stands its
*gate*, which decides: it appends the next iteration to the worklist over which the group is expanded, or does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from headgate.protocol.messages import maps
from headgate.protocol.messages.dags import id_problem
from headgate.protocol.messages.maps import INSTANCES_MAX, MapSpec
from headgate.tasks.context import Context, TaskInstance
from headgate.tasks.errors import TaskFailed
from headgate.tasks.graph import free_id
from headgate.tasks.groups.mapping import GroupMapping
from headgate.tasks.maps.worklists import Appends
from headgate.tasks.operator import XComArg
from headgate.tasks.operators import PythonOperator

if TYPE_CHECKING:
    from headgate.tasks.groups.groups import TaskGroup

ITERATIONS_MAX: Final = 10_000
GATE: Final = "__loop_gate"  # the name of a gate whose function has none
assert ITERATIONS_MAX <= INSTANCES_MAX


class Loop:
    """``loop`` in the context of a task: the iteration that it is in, from 0, of ``max_iterations`` at most."""

    def __init__(self, instance: TaskInstance, result_of: str, max_iterations: int) -> None:
        self._instance = instance
        self._result_of = result_of
        self.index = instance.map_index
        self.max_iterations = max_iterations

    def __repr__(self) -> str:
        return f"<iteration {self.index} of at most {self.max_iterations}>"

    @property
    def previous(self) -> Any:
        """The result of the iteration before; None in the first one."""
        return self._instance.pull_at(self._result_of, self.index - 1) if self.index > 0 else None

    @property
    def result(self) -> Any:
        """The result of this iteration, for its gate: what its last task has returned."""
        return self._instance.pull_at(self._result_of, self.index)

    @property
    def result_of(self) -> str:
        """The id of the task whose result is that of an iteration."""
        return self._result_of


class LoopedGroup(GroupMapping):
    """A group that is repeated. Raises `DagMalformed`."""

    def __init__(self, group: TaskGroup, max_iterations: int) -> None:
        super().__init__(group)
        if not isinstance(max_iterations, int) or isinstance(max_iterations, bool):
            raise self.malformed(f"max_iterations must be an int, not {max_iterations!r:.100}")
        if not 1 <= max_iterations <= ITERATIONS_MAX:
            raise self.malformed(f"max_iterations must be in 1..{ITERATIONS_MAX:,}, not {max_iterations:,}")
        self.max_iterations = max_iterations
        self._result_of = ""
        self._gate = ""

    def close(self, until: Callable[..., Any] | None) -> XComArg:
        """Add the gate, behind the last of its tasks; return the output of that one. Raises `DagMalformed`."""
        lasts = self._group.last_tasks()
        if len(lasts) != 1:
            names = ", ".join(sorted(task.task_id for task in lasts))
            raise self.malformed(f"a loop needs one last task, whose result is that of the iteration; it has {names}")
        (last,) = lasts
        if last.emits:
            raise self.malformed(f"the last task of a loop returns its result, and {last.task_id!r} emits elements")
        gate = LoopGate(until, task_id=free_id(_name_of(until), self._group.dag))
        gate.set_upstream(last)
        self._result_of, self._gate = last.task_id, gate.task_id
        self.spec = MapSpec(maps.Worklist(gate.task_id, 1, self.max_iterations, is_loop=True), window=1)
        return last.output

    def begin_step(self, context: Context) -> None:
        """Let a gate append the next iteration."""
        if context["ti"].task_id == self._gate:
            context["ti"].take_appends(Appends(self._gate, self.max_iterations - 1, frozenset()))

    def loop_of(self, instance: TaskInstance) -> Loop | None:
        """Return the iteration that an instance is in."""
        return Loop(instance, self._result_of, self.max_iterations)


class LoopGate(PythonOperator):
    """Decides, behind an iteration, whether there is another one: not if ``until`` returns True."""

    def __init__(self, until: Callable[..., Any] | None, *, task_id: str) -> None:
        super().__init__(python_callable=_never if until is None else until, task_id=task_id)
        self._until = until

    def execute(self, context: Context, event: Any = None, **resumed_with: Any) -> None:
        """Call ``until``; append the next iteration. Raises TaskFailed if it does not hold in the last one."""
        loop = context["loop"]
        assert loop is not None, "it is in a loop"
        is_enough = super().execute(context, event, **resumed_with)
        if not isinstance(is_enough, bool):
            raise TypeError(f"until must return True or False, not {is_enough!r:.100}")
        if is_enough:
            return
        if loop.index + 1 < loop.max_iterations:
            context["ti"].append(None, key=str(loop.index + 1))
        elif self._until is not None:
            raise TaskFailed(f"{self.task_id!r} is not True after {loop.max_iterations:,} iterations, the most allowed")


def _never() -> bool:
    return False


def _name_of(until: object) -> str:
    """Return the name of a gate; functions without a name of their own, as lambdas, have a common one."""
    name = until.__name__ if inspect.isfunction(until) else ""
    return name if name and id_problem(name) is None else GATE
