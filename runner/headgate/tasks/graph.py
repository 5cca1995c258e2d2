"""`DAG`: tasks, their order, and their schedule; the arrows that join them."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from types import FrameType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, Unpack, overload
from zoneinfo import ZoneInfo

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import DEFAULT_MAX_ACTIVE_RUNS, DagSpec, check_dag, id_problem
from headgate.signals.cron import read_zone
from headgate.signals.rules import On, end_rule
from headgate.tasks.options import TaskOptions, options_problem, unknown_option
from headgate.tasks.schedule import Schedule, read_schedule
from headgate.triggers.airflow_names import NoOptions

if TYPE_CHECKING:
    from headgate.tasks.groups.groups import TaskGroup
    from headgate.tasks.maps.operators import Partial
    from headgate.tasks.operator import BaseOperator

# The DAGs and the task groups whose `with` blocks are open, the innermost last; and the DAGs that the file being loaded
# has made so far, with the namespace of that file.
_open: ContextVar[tuple[DAG, ...]] = ContextVar("headgate open DAGs", default=())
_open_groups: ContextVar[tuple[TaskGroup, ...]] = ContextVar("headgate open groups", default=())
_made: ContextVar[tuple[Mapping[str, Any], list[DAG]] | None] = ContextVar("headgate DAGs of a file", default=None)
# Python's own function that runs a module which has not been imported yet.
_IMPORTING = ("<frozen importlib._bootstrap>", "_find_and_load")


class DAG:
    """Tasks that run together, in the order of their arrows.

    ``schedule`` is None (runs are created by hand), a cron expression of five fields or a preset such as ``@daily``,
    read in ``timezone`` (by default that of ``start_date`` if it is a `ZoneInfo`, else UTC), or one or several `Asset`:
    there is a run when each of them has had an event, unless they are in an `Each`, `Batch` or `Latest`. In their place
    there may be signals, `OnSignal`. A signal that meets a rule of ``end_on`` ends the run in which it counts.
    ``start_date`` is aware; ``catchup`` creates the runs between it and now, and requires it. ``default_args`` are the
    tasks' default options.

    Tasks created in its ``with`` block belong to it. Raises `DagMalformed`, which names the DAG, the task and the
    value, here or when tasks are created and joined.
    """

    def __init__(
        self,
        dag_id: str,
        *,
        schedule: Schedule = None,
        start_date: datetime | None = None,
        timezone: str | None = None,
        catchup: bool = False,
        max_active_runs: int = DEFAULT_MAX_ACTIVE_RUNS,
        default_args: TaskOptions | None = None,
        description: str = "",
        tags: Sequence[str] = (),
        is_paused_upon_creation: bool = False,
        end_on: On | Sequence[On] = (),
        **unknown: Unpack[NoOptions],
    ) -> None:
        for name in unknown:
            options = inspect.signature(DAG).parameters.keys() - {"dag_id", "unknown"}
            raise DagMalformed(str(dag_id), None, unknown_option(name, options))
        self.dag_id = dag_id
        self._tasks: dict[str, BaseOperator] = {}
        self._groups: dict[str, TaskGroup] = {}
        self.partials: list[Partial] = []  # that were made in its `with` block
        self._check_types(
            {"dag_id": dag_id, "description": description},
            {"catchup": catchup, "is_paused_upon_creation": is_paused_upon_creation},
        )
        if (problem := id_problem(dag_id)) is not None:
            raise DagMalformed(dag_id, None, f"the dag_id {problem}")
        if not isinstance(max_active_runs, int) or isinstance(max_active_runs, bool):
            raise DagMalformed(dag_id, None, f"max_active_runs must be an int, not {max_active_runs!r:.100}")
        if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
            raise DagMalformed(dag_id, None, f"tags must be a list of str, not {tags!r:.100}")
        if (problem := options_problem(default_args or {})) is not None:
            raise DagMalformed(dag_id, None, f"default_args: {problem}")
        if catchup and start_date is None:
            raise DagMalformed(dag_id, None, "catchup needs a start_date, from which runs are created")
        self.start_date = _aware(dag_id, start_date)
        self.timezone = _zone_of(dag_id, timezone, start_date)
        self.catchup = catchup
        self.max_active_runs = max_active_runs
        self.default_args: TaskOptions = TaskOptions(**(default_args or {}))
        self.description = description
        self.tags = tuple(tags)
        self.is_paused_upon_creation = is_paused_upon_creation
        try:
            self.schedule = read_schedule(schedule, self.timezone)
            self.end_on = tuple(end_rule(rule) for rule in ([end_on] if isinstance(end_on, On | str) else end_on))
        except (TypeError, ValueError) as error:
            raise DagMalformed(dag_id, None, str(error)) from None
        self.to_spec()  # checks the protocol's limits at the author's line
        if (collected := _made.get()) is not None and not _is_by_import(collected[0]):
            collected[1].append(self)

    def __repr__(self) -> str:
        return f"<DAG {self.dag_id!r}, {len(self._tasks)} tasks>"

    def __enter__(self) -> DAG:
        _open.set((*_open.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.set(_open.get()[:-1])
        if kind is None:
            self.to_spec()  # a cycle is reported at the author's line

    def check_expanded(self) -> None:
        """Raise `DagMalformed` for a `partial` that nobody has expanded: its task would be missing."""
        for partial in self.partials:
            if not partial.is_expanded:
                problem = "is partial() alone, and no task: call .expand() or .expand_kwargs() of it"
                raise DagMalformed(self.dag_id, partial.task_id, problem)

    @property
    def tasks(self) -> Mapping[str, BaseOperator]:
        """The tasks by id, in the order of their creation."""
        return MappingProxyType(self._tasks)

    def add(self, task: BaseOperator) -> None:
        """Add a task; called by the task itself. Raises `DagMalformed` for a second task with the same id."""
        if task.task_id in self._tasks:
            raise DagMalformed(self.dag_id, task.task_id, "is in the DAG twice: each task needs its own task_id")
        if task.task_id in self._groups:
            raise DagMalformed(self.dag_id, task.task_id, "has the id of a task group: each needs its own")
        self._tasks[task.task_id] = task

    @property
    def task_groups(self) -> Mapping[str, TaskGroup]:
        """The task groups by id, in the order of their creation."""
        return MappingProxyType(self._groups)

    def add_group(self, group: TaskGroup) -> None:
        """Add a task group; called by the group itself. Raises `DagMalformed` for a second one with the same id."""
        if group.group_id in self._groups or group.group_id in self._tasks:
            raise DagMalformed(self.dag_id, None, f"the group_id {group.group_id!r} is in the DAG twice")
        self._groups[group.group_id] = group

    def descendants(self, task_id: str) -> set[str]:
        """Return the ids of all tasks below this one."""
        found: set[str] = set()
        pending = [task_id]
        while pending:
            below = self._tasks[pending.pop()].downstream_task_ids - found
            found |= below
            pending.extend(below)
        return found

    def to_spec(self) -> DagSpec:
        """Return the spec that the supervisor schedules from. Raises `DagMalformed`."""
        spec = DagSpec(
            dag_id=self.dag_id,
            schedule=self.schedule,
            start_date_s=None if self.start_date is None else self.start_date.timestamp(),
            catchup=self.catchup,
            max_active_runs=self.max_active_runs,
            tasks=tuple(task.to_spec() for task in self._tasks.values()),
            is_paused_upon_creation=self.is_paused_upon_creation,
            description=self.description,
            tags=self.tags,
            end_on=self.end_on,
        )
        check_dag(spec)
        return spec

    def _check_types(self, texts: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
        for kind, values in ((str, texts), (bool, flags)):
            for name, value in values.items():
                if not isinstance(value, kind):
                    raise DagMalformed(str(self.dag_id), None, f"{name} must be a {kind.__name__}, not {value!r:.100}")


Joined = TypeVar("Joined", bound="Joinable")


class Arrows:
    """Base of the operands of ``>>`` and ``<<``."""

    def first_tasks(self) -> Sequence[BaseOperator]:
        """Return the tasks of this that what is upstream of it is joined to."""
        raise NotImplementedError

    def last_tasks(self) -> Sequence[BaseOperator]:
        """Return the tasks of this that what is downstream of it is joined to."""
        raise NotImplementedError

    def value_hint(self) -> str:
        """Return a sentence for an author who has given this itself to a task, as an argument."""
        raise NotImplementedError

    def set_downstream(self, other: Joinable) -> None:
        """Run ``other`` after this. Raises `DagMalformed` for a task of another DAG, or of none."""
        _join_all([self], _parts_of(other))

    def set_upstream(self, other: Joinable) -> None:
        """Run this after ``other``. Raises as `set_downstream` does."""
        _join_all(_parts_of(other), [self])

    def __rshift__(self, other: Joined) -> Joined:
        self.set_downstream(other)
        return other

    def __lshift__(self, other: Joined) -> Joined:
        self.set_upstream(other)
        return other

    # For a list on the left.
    def __rrshift__(self, other: Sequence[Arrows]) -> Arrows:
        self.set_upstream(other)
        return self

    def __rlshift__(self, other: Sequence[Arrows]) -> Arrows:
        self.set_downstream(other)
        return self


Joinable: TypeAlias = Arrows | Sequence[Arrows]


def chain(*links: Joinable) -> None:
    """Join each of ``links`` to the next: ``chain(a, [b, c], d)`` is ``a >> [b, c] >> d``, also for two lists."""
    for above, below in itertools.pairwise(map(_parts_of, links)):
        _join_all(above, below)


def _parts_of(joinable: Joinable) -> list[Arrows]:
    """Return what is on one side of an arrow. Raises TypeError for anything that is no task."""
    parts: Iterable[object] = (
        joinable if isinstance(joinable, Sequence) and not isinstance(joinable, str) else [joinable]
    )
    found: list[Arrows] = []
    for part in parts:
        if not isinstance(part, Arrows):
            hint = ": call it, and join what it returns" if callable(part) else ""
            raise TypeError(f"tasks are joined to tasks, not to {part!r:.100}{hint}")
        found.append(part)
    return found


def _join_all(above: Iterable[Arrows], below: Iterable[Arrows]) -> None:
    firsts = [task for part in below for task in part.first_tasks()]
    for last in [task for part in above for task in part.last_tasks()]:
        for first in firsts:
            _join(last, first)


def _join(above: BaseOperator, below: BaseOperator) -> None:
    if above.dag is None or above.dag is not below.dag:
        problem = f"cannot be joined to {below.task_id!r}: both must be in the same DAG"
        raise above._malformed(problem)
    above.downstream_task_ids.add(below.task_id)
    below.upstream_task_ids.add(above.task_id)


P = ParamSpec("P")


@overload
def dag(function: Callable[P, object], /) -> Callable[P, DAG]: ...


@overload
def dag(dag_id: str | None = None, **options: Any) -> Callable[[Callable[P, object]], Callable[P, DAG]]: ...


def dag(dag_id: Any = None, **options: Any) -> Any:
    """Decorate a function that makes the tasks of a DAG: each call returns a new `DAG` with them.

    The function's name is the dag_id unless one is given; the options are those of `DAG`. Also without parentheses:

        @dag(schedule="@daily")
        def orders():
            load(extract())

        orders()
    """
    if callable(dag_id):
        return dag()(dag_id)

    def decorate(function: Callable[P, object]) -> Callable[P, DAG]:
        @functools.wraps(function)
        def make(*args: P.args, **kwargs: P.kwargs) -> DAG:
            with DAG(dag_id or function.__name__, **options) as made:
                function(*args, **kwargs)
            return made

        return make

    return decorate


def open_dag() -> DAG | None:
    """Return the DAG in whose ``with`` block this is called, None outside of any."""
    dags = _open.get()
    return dags[-1] if dags else None


def open_group(dag: DAG | None) -> TaskGroup | None:
    """Return the innermost task group in whose ``with`` block this is called, None unless it is one of this DAG."""
    groups = _open_groups.get()
    return groups[-1] if groups and groups[-1].dag is dag else None


def free_id(name: str, dag: DAG) -> str:
    """Return the first of ``name``, ``name__1``, ``name__2`` and so on that no task or group here has.

    It is without the prefix that the open group adds.
    """
    group = open_group(dag)
    number, free = 0, name
    while (free if group is None else group.child_id(free)) in (dag.tasks.keys() | dag.task_groups.keys()):
        number += 1
        free = f"{name}__{number}"
    return free


def enter_group(group: TaskGroup) -> None:
    """Have operators that are made from now on belong to this group."""
    _open_groups.set((*_open_groups.get(), group))


def leave_group() -> None:
    """End what `enter_group` has begun last."""
    _open_groups.set(_open_groups.get()[:-1])


@contextmanager
def detached() -> Generator[None]:
    """Have operators that are made in the block belong to no DAG, and to no group."""
    token, group_token = _open.set(()), _open_groups.set(())
    try:
        yield
    finally:
        _open_groups.reset(group_token)
        _open.reset(token)


@contextmanager
def collecting(namespace: Mapping[str, Any]) -> Generator[list[DAG]]:
    """Yield a list that every DAG is added to that a file makes which is run in the block in this namespace.

    A DAG that a module makes when it is imported is not: the next file, or this one the next time, finds the module
    imported already. `open_dag` ignores DAGs opened outside.
    """
    made: list[DAG] = []
    made_token, open_token, group_token = _made.set((namespace, made)), _open.set(()), _open_groups.set(())
    try:
        yield made
    finally:
        _open_groups.reset(group_token)
        _open.reset(open_token)
        _made.reset(made_token)


def _is_by_import(namespace: Mapping[str, Any]) -> bool:
    """Whether an ``import`` statement runs, and not just the file with this namespace."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals is not namespace:
        if (frame.f_code.co_filename, frame.f_code.co_name) == _IMPORTING:
            return True
        frame = frame.f_back
    return False


def _aware(dag_id: str, start_date: datetime | None) -> datetime | None:
    if start_date is None:
        return None
    if not isinstance(start_date, datetime):
        raise DagMalformed(dag_id, None, f"start_date must be a datetime, not {start_date!r:.100}")
    if start_date.utcoffset() is None:
        problem = f"start_date must have a time zone; {start_date.isoformat()} has none"
        raise DagMalformed(dag_id, None, problem)
    return start_date


def _zone_of(dag_id: str, timezone: str | None, start_date: datetime | None) -> str:
    if timezone is None:
        zone = None if start_date is None else start_date.tzinfo
        return zone.key if isinstance(zone, ZoneInfo) and zone.key is not None else "UTC"
    try:
        read_zone(timezone)
    except ValueError as error:
        raise DagMalformed(dag_id, None, f"timezone: {error}") from None
    return timezone
