"""``@task``: a function that is a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, Unpack, cast, overload

from headgate.protocol.errors import DagMalformed
from headgate.tasks.graph import DAG, free_id, open_dag
from headgate.tasks.maps.operators import MappedFunction, Partial
from headgate.tasks.operator import XComArg
from headgate.tasks.operators import BranchPythonOperator, PythonOperator, ShortCircuitOperator
from headgate.tasks.options import NAMES, TaskOptions
from headgate.triggers.airflow_names import DECORATORS

__all__ = ["TaskFunction", "task"]

P = ParamSpec("P")
R = TypeVar("R")


class _NamesOfAirflow:
    def __getattr__(self, name: str) -> NoReturn:
        instead = f": {DECORATORS[name]}" if name in DECORATORS else ""
        raise AttributeError(f"@task has no attribute {name!r}{instead}", name=name, obj=self)


class TaskFunction(_NamesOfAirflow, Generic[P, R]):
    """A function that adds a task when it is called in a DAG; ``function`` is the undecorated function, for tests."""

    def __init__(
        self, function: Callable[P, R], kind: type[PythonOperator], task_id: str | None, options: TaskOptions
    ) -> None:
        self.function = function
        self._kind = kind
        self._task_id = task_id
        self._options = options
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", kind.__name__)

    def __repr__(self) -> str:
        return f"<task function {self.__name__!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> XComArg:
        """Add a task to the open DAG that calls the function with these arguments; return its output.

        The second task of the same function in a DAG gets the id of the first with the suffix ``__1``, and so on.
        """
        dag = open_dag()
        if dag is None:
            raise RuntimeError(f"{self.__name__} is a task: call it in the with block of a DAG, or call its .function")
        operator = self._kind(
            python_callable=self.function,
            op_args=args,
            op_kwargs=kwargs,
            task_id=self._free_id(dag),
            **self._options,
        )
        return operator.output

    def partial(self, **shared: Any) -> Partial:
        """Begin a mapped task with the arguments that all of its instances have; see `Partial.expand`."""
        dag = open_dag()
        if dag is None:
            raise RuntimeError(f"{self.__name__} is a task: map it in the with block of a DAG, or call its .function")
        if options := sorted({*NAMES, "task_id", "dag"}.intersection(shared)):
            raise DagMalformed(dag.dag_id, self.__name__, f"{options[0]} is an option: give it to @task or override()")
        given: Any = {"task_id": self._free_id(dag), "dag": dag, "shared": {**shared, **self._options}}

        def make(**over: Any) -> XComArg:
            return MappedFunction(self._kind, self.function, **given, **over).output

        return Partial(given["task_id"], make)

    def expand(self, **over: Any) -> XComArg:
        """Add a mapped task, with an instance for each combination of these values; see `Partial.expand`."""
        return self.partial().expand(**over)

    def expand_kwargs(self, over: Any, **options: Any) -> XComArg:
        """Add a mapped task, with an instance for each of these dicts of arguments; see `Partial.expand`."""
        return self.partial().expand_kwargs(over, **options)

    def override(self, *, task_id: str | None = None, **options: Unpack[TaskOptions]) -> TaskFunction[P, R]:
        """Return the same function with another id or other options."""
        merged = cast(TaskOptions, {**self._options, **options})
        return TaskFunction(self.function, self._kind, task_id or self._task_id, merged)

    def _free_id(self, dag: DAG) -> str:
        return free_id(self._task_id or self.__name__, dag)


class _TaskDecorator(_NamesOfAirflow):
    """``@task``, ``@task(retries=2)``, ``@task.branch`` and ``@task.short_circuit``."""

    def __init__(self, kind: type[PythonOperator]) -> None:
        self._kind = kind

    @overload
    def __call__(self, function: Callable[P, R], /) -> TaskFunction[P, R]: ...

    @overload
    def __call__(
        self, /, *, task_id: str | None = None, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[P, R]], TaskFunction[P, R]]: ...

    def __call__(
        self, function: Callable[..., Any] | None = None, /, *, task_id: str | None = None, **options: Any
    ) -> Any:
        """Decorate ``function``, or return a decorator with these options."""

        def decorate(function: Callable[P, R]) -> TaskFunction[P, R]:
            return TaskFunction(function, self._kind, task_id, cast(TaskOptions, options))

        return decorate if function is None else decorate(function)

    @property
    def branch(self) -> _TaskDecorator:
        """As `BranchPythonOperator`."""
        return _TaskDecorator(BranchPythonOperator)

    @property
    def short_circuit(self) -> _TaskDecorator:
        """As `ShortCircuitOperator`."""
        return _TaskDecorator(ShortCircuitOperator)


task = _TaskDecorator(PythonOperator)
