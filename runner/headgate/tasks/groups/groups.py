"""Task groups: tasks that have a common prefix, and are joined to others, expanded or repeated as one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, ParamSpec, Unpack, cast, overload

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import id_problem
from headgate.tasks.context import Context
from headgate.tasks.graph import DAG, Arrows, enter_group, free_id, leave_group, open_dag, open_group
from headgate.tasks.groups.loops import LoopedGroup
from headgate.tasks.groups.mapping import ExpandedGroup, GroupMapping
from headgate.tasks.maps.operators import Partial
from headgate.tasks.operator import BaseOperator, XComArg
from headgate.tasks.options import TaskOptions, options_problem, unknown_option
from headgate.triggers.airflow_names import OPTIONS, NoOptions

GROUP_DEPTH_MAX = 8  # groups in groups
P = ParamSpec("P")


class TaskGroup(Arrows):
    """Tasks that are made in its ``with`` block: they get the ids ``GROUP.TASK``, and are joined to others as one.

    What is upstream of the group is joined to those of its tasks that have none of them upstream, what is downstream to
    those that have none downstream; so arrows to and from a group stand behind its block. Without
    ``prefix_group_id`` its tasks keep their ids. ``default_args`` are the default options of its tasks, before those of
    the DAG. Groups may stand in groups. Raises `DagMalformed`.
    """

    def __init__(
        self,
        group_id: str,
        *,
        prefix_group_id: bool = True,
        default_args: TaskOptions | None = None,
        dag: DAG | None = None,
        **unknown: Unpack[NoOptions],
    ) -> None:
        found = open_dag() if dag is None else dag
        if found is None:
            raise RuntimeError(f"the task group {group_id!r:.100} belongs to no DAG: make it in the with block of one")
        self.dag: DAG = found
        for name in unknown:
            options = inspect.signature(TaskGroup).parameters.keys() - {"group_id", "unknown"}
            raise self._malformed(group_id, f"cannot be made: {unknown_option(name, options)}")
        problem = id_problem(group_id) if isinstance(group_id, str) else f"must be a str, not {group_id!r:.100}"
        if problem is not None:
            raise self._malformed(group_id, f"cannot be made: the group_id {problem}")
        if (problem := options_problem(default_args or {})) is not None:
            raise self._malformed(group_id, f"cannot be made: default_args: {problem}")
        self.parent = open_group(self.dag)
        self.group_id = group_id if self.parent is None else self.parent.child_id(group_id)
        self.own_mapping: GroupMapping | None = None
        self._prefix = (
            f"{self.group_id}." if prefix_group_id else "" if self.parent is None else self.parent.child_id("")
        )
        self._default_args: TaskOptions = TaskOptions(**(default_args or {}))
        self._tasks: list[BaseOperator] = []
        if self._depth() > GROUP_DEPTH_MAX:
            raise self._malformed(group_id, f"stands in more than {GROUP_DEPTH_MAX} groups")
        self.dag.add_group(self)

    def __repr__(self) -> str:
        return f"<TaskGroup {self.group_id!r}, {len(self._tasks)} tasks>"

    def __enter__(self) -> TaskGroup:
        enter_group(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave_group()

    @property
    def tasks(self) -> Sequence[BaseOperator]:
        """Its tasks, and those of groups in it, in the order of their creation."""
        return tuple(self._tasks)

    def first_tasks(self) -> Sequence[BaseOperator]:
        """Return its tasks that have none of it upstream. Raises `DagMalformed` if it has no tasks."""
        return self._ends(lambda task: task.upstream_task_ids)

    def last_tasks(self) -> Sequence[BaseOperator]:
        """Return its tasks that have none of it downstream. Raises `DagMalformed` if it has no tasks."""
        return self._ends(lambda task: task.downstream_task_ids)

    def value_hint(self) -> str:
        return f"the group {self.group_id!r} itself is no value: give what its function returns"

    def child_id(self, name: str) -> str:
        """Return the id that a task or a group of this name has in this group."""
        return self._prefix + name

    def add(self, task: BaseOperator) -> None:
        """Add a task; called by the task itself."""
        self._tasks.append(task)
        if self.parent is not None:
            self.parent.add(task)

    def all_default_args(self) -> TaskOptions:
        """Return the default options of its tasks; those of groups in groups count before those of the outer ones."""
        outer = TaskOptions() if self.parent is None else self.parent.all_default_args()
        return cast(TaskOptions, {**outer, **self._default_args})

    def find_mapping(self) -> GroupMapping | None:
        """Return over what this group, or one that it stands in, is expanded."""
        if self.own_mapping is not None or self.parent is None:
            return self.own_mapping
        return self.parent.find_mapping()

    def _ends(self, neighbours: Callable[[BaseOperator], set[str]]) -> Sequence[BaseOperator]:
        ids = {task.task_id for task in self._tasks}
        if not ids:
            raise self._malformed(self.group_id, "has no tasks: join it to others behind its block")
        return [task for task in self._tasks if ids.isdisjoint(neighbours(task))]

    def _depth(self) -> int:
        return 1 if self.parent is None else 1 + self.parent._depth()

    def _malformed(self, group_id: object, problem: str) -> DagMalformed:
        return DagMalformed(self.dag.dag_id, None, f"the task group {group_id!r:.100} {problem}")


class GroupResult(XComArg):
    """What the function of a group has returned: the output of a task, joined to others as the whole group is."""

    def __init__(self, group: TaskGroup, result: XComArg) -> None:
        super().__init__(result.operator, result.key)
        self.group = group

    def first_tasks(self) -> Sequence[BaseOperator]:
        return self.group.first_tasks()

    def last_tasks(self) -> Sequence[BaseOperator]:
        return self.group.last_tasks()


class LoopResult(GroupResult):
    """The result of the last iteration of a loop, in the arguments of a task; as what to expand over, those of all."""

    def resolve(self, context: Context) -> Any:
        """Return the result; None if there is none."""
        results = super().resolve(context)
        return results[-1] if results else None

    def awaited(self) -> Sequence[BaseOperator]:
        # The gate as well: if it fails there is no result that is good enough.
        return (self.operator, *self.group.last_tasks())


class TaskGroupFunction(Generic[P]):
    """A function that makes the tasks of a group when it is called in a DAG.

    A call returns what the function returns if that is the output of a task, else the `TaskGroup`; either is joined to
    others as the whole group is. The second group of the same function in a DAG gets the suffix ``__1``, and so on.
    """

    def __init__(self, function: Callable[P, Any], group_id: str | None, options: Mapping[str, Any]) -> None:
        self.function = function
        self._group_id = group_id
        self._options = dict(options)
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", "group")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Add a group with the tasks that the function makes."""
        group = self._new_group()
        with group:
            result = self.function(*args, **kwargs)
        return _result(group, result)

    def partial(self, **shared: Any) -> PartialGroup:
        """Begin a group that is expanded or repeated, with the arguments that are the same each time."""
        return PartialGroup(cast(TaskGroupFunction[Any], self), shared)

    def expand(self, **over: Any) -> Any:
        """Add the group for each combination of these values; see `PartialGroup`."""
        return self.partial().expand(**over)

    def expand_kwargs(self, over: Any, **options: Any) -> Any:
        """Add the group for each of these dicts of arguments; see `PartialGroup`."""
        return self.partial().expand_kwargs(over, **options)

    def loop(self, *, max_iterations: int, until: Callable[..., Any] | None = None) -> Any:
        """Repeat the group; see `PartialGroup.loop`."""
        return self.partial().loop(max_iterations=max_iterations, until=until)

    def override(self, *, group_id: str | None = None, **options: Any) -> TaskGroupFunction[P]:
        """Return the same function with another id or other options."""
        return TaskGroupFunction(self.function, group_id or self._group_id, {**self._options, **options})

    def expanded(self, over: Mapping[str, Any], shared: Mapping[str, Any]) -> Any:
        """Add the group with these arguments of `ExpandedGroup`; return as a call does."""
        group = self._new_group(is_mapped=True)
        mapping = group.own_mapping = ExpandedGroup(group, over)
        with group:
            result = self._call(group, {**shared, **mapping.arguments(self.function, shared)})
        mapping.close()
        return _result(group, result)

    def looped(self, max_iterations: int, until: Callable[..., Any] | None, shared: Mapping[str, Any]) -> LoopResult:
        """Add the group with a gate behind it."""
        group = self._new_group(is_mapped=True)
        mapping = group.own_mapping = LoopedGroup(group, max_iterations)
        with group:
            self._call(group, shared)
            return LoopResult(group, mapping.close(until))

    def _call(self, group: TaskGroup, arguments: Mapping[str, Any]) -> Any:
        signature = inspect.signature(self.function)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            options = sorted(OPTIONS.keys() & arguments.keys() - signature.parameters.keys())
            problem = f"{self.__name__} cannot be called with these arguments: {error}"
            problem = unknown_option(options[0], ()) if options else problem
            raise DagMalformed(group.dag.dag_id, None, f"the task group {group.group_id!r}: {problem}") from None
        function: Callable[..., Any] = self.function
        return function(**arguments)

    def _new_group(self, *, is_mapped: bool = False) -> TaskGroup:
        dag = open_dag()
        if dag is None:
            raise RuntimeError(f"{self.__name__} is a task group: call it in the with block of a DAG")
        group = TaskGroup(free_id(self._group_id or self.__name__, dag), **self._options)
        if is_mapped and (outer := group.find_mapping()) is not None:
            problem = f"cannot be expanded or repeated in {outer.group_id!r}, which is expanded or repeated itself"
            raise DagMalformed(dag.dag_id, None, f"the task group {group.group_id!r} {problem}")
        return group


class PartialGroup(Partial):
    """The arguments of a group's function that are the same each time.

    ``expand`` and ``expand_kwargs`` are those of `headgate.tasks.maps.operators.Partial`: the group has an index for
    each combination of values, each of its tasks an instance at each index, and an index goes through the whole group,
    whatever the others do. ``window`` counts indexes. They return what the function returns: if that is the output of a
    task, its values at all indexes.
    """

    def __init__(self, function: TaskGroupFunction[Any], shared: Mapping[str, Any]) -> None:
        super().__init__(function.__name__, self._add)
        self._function = function
        self._shared = shared

    def loop(self, *, max_iterations: int, until: Callable[..., Any] | None = None) -> Any:
        """Repeat the group, one iteration after the other, until ``until(loop=...)`` returns True.

        The group has one last task, whose result is that of the iteration. Behind it a gate is added, a task with the
        name of ``until``, which calls it with `headgate.tasks.groups.loops.Loop`. If it is not True after
        ``max_iterations`` the gate fails; without ``until`` there are that many iterations. Returns the result of the
        last iteration. Raises `DagMalformed`.
        """
        self.is_expanded = True
        return self._function.looped(max_iterations, until, self._shared)

    def _add(self, **over: Any) -> Any:
        return self._function.expanded(over, self._shared)


def _result(group: TaskGroup, result: Any) -> Any:
    return GroupResult(group, result) if isinstance(result, XComArg) else group if result is None else result


@overload
def task_group(function: Callable[P, Any], /) -> TaskGroupFunction[P]: ...


@overload
def task_group(group_id: str | None = None, **options: Any) -> Callable[[Callable[P, Any]], TaskGroupFunction[P]]: ...


def task_group(group_id: Any = None, **options: Any) -> Any:
    """Decorate a function that makes the tasks of a group: each call in a DAG adds a `TaskGroup` with them.

    The function's name is the group_id unless one is given; the options are those of `TaskGroup`. Also without
    parentheses::

        @task_group
        def load(day):
            store(check(fetch(day)))

        load.expand(day=["mon", "tue"])
    """
    if callable(group_id):
        return TaskGroupFunction(group_id, None, {})
    return functools.partial(TaskGroupFunction, group_id=group_id, options=options)
