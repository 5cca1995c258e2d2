"""Over what a group of tasks is expanded, as its tasks see it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.maps import MapSpec
from headgate.tasks.context import Context, TaskInstance
from headgate.tasks.maps.expansion import Expansion
from headgate.tasks.operator import Placeholder, XComArg

if TYPE_CHECKING:
    from headgate.tasks.groups.groups import TaskGroup
    from headgate.tasks.groups.loops import Loop


class GroupMapping:
    """What makes a mapped group of a `TaskGroup`. ``spec`` is None until all of its tasks are made."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self.spec: MapSpec | None = None

    @property
    def group_id(self) -> str:
        """The id of the group."""
        return self._group.group_id

    @property
    def task_ids(self) -> Collection[str]:
        """The ids of its tasks."""
        return {task.task_id for task in self._group.tasks}

    def mapped_over(self) -> Iterator[XComArg]:
        """Yield the outputs over which the group is expanded."""
        return iter(())

    def begin_step(self, context: Context) -> None:
        """Prepare the step of an instance of the group. Raises what the author's functions raise."""
        raise NotImplementedError

    def loop_of(self, instance: TaskInstance) -> Loop | None:
        """Return the iteration that an instance is in; None if the group is no loop."""
        return None

    def malformed(self, problem: str) -> DagMalformed:
        """Return the error for a group that cannot be mapped, for this reason."""
        return DagMalformed(self._group.dag.dag_id, None, f"the task group {self.group_id!r}: {problem}")


class ExpandedGroup(GroupMapping):
    """A group that is expanded: ``over`` are the arguments of `Expansion`. Raises `DagMalformed`."""

    def __init__(self, group: TaskGroup, over: Mapping[str, Any]) -> None:
        super().__init__(group)
        try:
            self._expansion = Expansion(f"the task group {group.group_id!r}", **over)
        except (TypeError, ValueError) as error:
            raise self.malformed(str(error)) from None
        self._own: tuple[TaskInstance | None, Mapping[str, Any]] = (None, {})

    def arguments(self, function: Callable[..., Any], shared: Mapping[str, Any]) -> dict[str, GroupArgument]:
        """Return what stands for the arguments of an index. Raises `DagMalformed`."""
        names = self._expansion.names
        if names is None:
            names = tuple(name for name in inspect.signature(function).parameters if name not in shared)
        if twice := sorted(shared.keys() & set(names)):
            raise self.malformed(f"{twice[0]!r:.100} stands in partial() and in what it is expanded over")
        try:
            for own in self._expansion.given_names():
                self._expansion.check_namer(own)
        except TypeError as error:
            raise self.malformed(str(error)) from None
        return {name: GroupArgument(self, name) for name in names}

    def close(self) -> None:
        """Join its tasks, all of which are made, to what the group is expanded over. Raises `DagMalformed`."""
        firsts = self._group.first_tasks()
        try:
            self._expansion.bind(firsts[0].task_id)
        except ValueError as error:
            raise self.malformed(str(error)) from None
        for output in self._expansion.outputs():
            for task in firsts:
                task.set_upstream(output.awaited())
        self.spec = self._expansion.spec()

    def mapped_over(self) -> Iterator[XComArg]:
        return self._expansion.mapped_over()

    def begin_step(self, context: Context) -> None:
        """Check the values of an instance, give it its name, and let it append. Raises as `Expansion.own` does."""
        self.own(context)
        context["ti"].take_appends(self._expansion.appends())

    def own(self, context: Context) -> Mapping[str, Any]:
        """Return the arguments of the index that this step is at. Raises as `Expansion.own` does."""
        of, own = self._own
        if of is not context["ti"]:
            own = self._expansion.own(context)
            self._own = (context["ti"], own)
        return own


class GroupArgument(Placeholder):
    """Stands for an argument of a mapped group, in the arguments of its tasks: each index has a value of its own."""

    encode_hint = ", which only a step has: give it to a task as an argument"

    def __init__(self, mapping: ExpandedGroup, name: str) -> None:
        self._mapping = mapping
        self._name = name

    def __repr__(self) -> str:
        return f"<the argument {self._name!r} of the task group {self._mapping.group_id!r}>"

    def __getitem__(self, key: object) -> NoReturn:
        # Also for `for x in argument`, and unpacking.
        raise TypeError(f"{self!r} is not known while the file is parsed: take it apart in a task")

    def resolve(self, context: Context) -> Any:
        """Return the value at the index of this step. Raises TypeError, and as `Expansion.own` does."""
        if context["ti"].task_id not in self._mapping.task_ids:
            raise TypeError(f"{self!r} is for tasks of this group, and {context['ti'].task_id!r} is none of them")
        own = self._mapping.own(context)
        if self._name not in own:
            raise TypeError(f"the value {context['ti'].map_index} of expand_kwargs() has no {self._name!r}")
        return own[self._name]
