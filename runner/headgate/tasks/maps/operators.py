"""Mapped tasks: ``expand`` makes one of an operator or a function, with an instance for each of many values.

In a DAG a mapped task stands as a `MappedOperator`. Only an instance of it is ever run: its step makes the operator
that was meant, with the arguments that all instances share and those of its own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

import msgspec

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import NAME_CHARS_MAX, StartTrigger, TaskSpec
from headgate.protocol.messages.maps import DEFAULT_WINDOW, MapSpec, map_problem
from headgate.tasks.context import Context
from headgate.tasks.graph import DAG, detached, open_dag
from headgate.tasks.maps.expansion import OF_TASK, Expansion, InstanceNamer, wanted
from headgate.tasks.maps.later import LaterValue
from headgate.tasks.operator import BaseOperator, XComArg
from headgate.tasks.operators import (
    BranchPythonOperator,
    ShortCircuitOperator,
    callable_problem,
    outputs_in,
    resolved,
)
from headgate.tasks.options import DEFAULTS, NAMES, OF_RULES, unknown_option
from headgate.triggers.airflow_names import OPTIONS

_UNMAPPED: Final = (BranchPythonOperator, ShortCircuitOperator)


class MappedOperator(BaseOperator):
    """A mapped task of a DAG, made by ``expand`` or ``expand_kwargs``.

    ``shared`` are the arguments that all instances of ``kind`` have, options among them. The values of ``over`` are the
    others: tuples of values for ``names``, or, if that is None, dicts.
    """

    def __init__(
        self, kind: type[BaseOperator], *, task_id: str, dag: DAG | None, shared: Mapping[str, Any], **over: Any
    ) -> None:
        self.kind = kind
        self._name = kind.operator_name or kind.__name__
        self._shared = {name: value for name, value in shared.items() if name not in NAMES}
        options: Any = {name: value for name, value in shared.items() if name in NAMES}
        self._options: Mapping[str, Any] = options
        self._made: BaseOperator | None = None
        self._map: MapSpec | None = None
        self.start_from_trigger = kind.start_from_trigger
        super().__init__(task_id=task_id, dag=dag, **options)
        if issubclass(kind, _UNMAPPED):
            raise self._malformed(f"a {self._name} cannot be mapped: what it skips, it would skip for all")
        if self.mapping is not None:
            raise self._malformed(
                f"cannot be expanded in the mapped group {self.mapping.group_id!r}: it has an instance at each index "
                f"of the group already"
            )
        if kind.emits or self._is_generator():
            raise self._malformed("is mapped, and cannot emit elements: what its instances return is there for others")
        try:
            self._expansion = Expansion(f"the task {self.task_id!r}", **over)
            self._check_arguments()
            self._expansion.bind(self.task_id)
            outputs = [*outputs_in(self._shared), *self._expansion.outputs()]
            if self.start_from_trigger:
                self._expansion.check_in_trigger()
        except (TypeError, ValueError) as error:
            raise self._malformed(str(error)) from None
        for output in outputs:
            self.set_upstream(output.awaited())
        self._map = self._expansion.spec()
        if (problem := map_problem(self._map, self.upstream_task_ids)) is not None:
            raise self._malformed(problem)

    @property
    def is_mapped(self) -> bool:
        """Whether only instances of the task are run."""
        return True

    def execute(self, context: Context) -> NoReturn:
        """Raise RuntimeError: what runs is an instance."""
        raise RuntimeError(f"the task {self.task_id!r} is mapped: only its instances run")

    def on_kill(self) -> None:
        """Stop what the instance has started elsewhere."""
        if self._made is not None:
            self._made.on_kill()

    def for_step(self, context: Context) -> BaseOperator:
        """Return the operator of the instance that the step is of. Raises what the author's functions raise."""
        index = context["ti"].map_index
        if index < 0:
            raise RuntimeError(f"the task {self.task_id!r} is mapped now; it was not when this run began")
        own = self._expansion.own(context)
        if options := sorted(OF_TASK & own.keys()):
            raise TypeError(
                f"the value {index} has {', '.join(options)}, the same for all instances: give it to partial()"
            )
        if twice := sorted(self._shared.keys() & own.keys()):
            raise TypeError(f"the value {index} has {', '.join(twice)}, which all instances have from partial()")
        context["ti"].take_appends(self._expansion.appends())
        try:
            made = self._make({name: resolved(shared, context) for name, shared in self._shared.items()}, own)
        except DagMalformed as error:
            raise TypeError(f"the operator of instance {index} cannot be made: {error.problem}") from error
        made.dag = self.dag
        made.upstream_task_ids, made.downstream_task_ids = self.upstream_task_ids, self.downstream_task_ids
        # Also those that the DAG has for all of its tasks. A mapped task has no rules about signals.
        for name in DEFAULTS.keys() - OF_RULES:
            setattr(made, name, getattr(self, name))
        self._made = context["task"] = made
        return made

    def own_value(self, context: Context) -> Any:
        """Return the value of an instance of a task that begins in its trigger, and so has one parameter of its own."""
        (value,) = self._expansion.own(context).values()
        return value

    @property
    def python_callable(self) -> Any:
        """The function that all instances call; None if they call none, or each its own."""
        return self._shared.get("python_callable")

    def mapped_over(self) -> Iterator[XComArg]:
        return self._expansion.mapped_over()

    # --- parts ---

    def _start_trigger(self) -> StartTrigger:
        """Return the trigger of an instance, without its value: what makes it of that must be known to the supervisor.

        The operator is made as by a step, but with what only a step has left open.
        """
        shared = {name: LaterValue(name) if outputs_in(value) else value for name, value in self._shared.items()}
        assert self._expansion.names is not None
        (name,) = self._expansion.names
        try:
            made = self._make(shared, {name: LaterValue(name, self._expansion.source_in_trigger())})
            made.dag = self.dag
            return made._start_trigger()
        except Exception as error:  # the author's constructor may raise anything
            problem = error.problem if isinstance(error, DagMalformed) else f"{type(error).__name__}: {error}"
            raise self._malformed(
                f"cannot begin in its trigger: {problem} (without a worker, {self._name} is made with {name!r} left "
                f"open, and can only pass it on to its trigger as it is)"
            ) from error

    def _spec(self, start_trigger: Any) -> TaskSpec:
        # It is checked a first time by the constructor of the base, before it is known over what it is mapped.
        spec = super()._spec(start_trigger)
        return msgspec.structs.replace(spec, operator=self._name[:NAME_CHARS_MAX], map=self._map)

    def _templated(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, value) for name, value in self._shared.items() if name in self.kind.template_fields)

    def _is_generator(self) -> bool:
        return False

    def _make(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> BaseOperator:
        with detached():
            return self.kind(task_id=self.task_id, **self._options, **shared, **own)

    def _check_arguments(self) -> None:
        """Raise TypeError, or `DagMalformed`, for an argument that the operator lacks, does not have, or has twice."""
        self._check_function()
        is_known = False
        for own in self._expansion.given_names():
            is_known = True
            if options := sorted(OF_TASK.intersection(own)):
                raise TypeError(f"{options[0]} is the same for all instances: give it to partial()")
            if twice := sorted(self._shared.keys() & set(own)):
                raise TypeError(f"{twice[0]!r:.100} stands in partial() and in what the task is expanded over")
            self._check_call(own, is_whole=True)
            self._expansion.check_namer(own)
        if not is_known:
            self._check_call((), is_whole=False)

    def _check_function(self) -> None:
        function = self.python_callable
        if function is not None and (problem := callable_problem(function)) is not None:
            raise self._malformed(problem)

    def _check_call(self, own: tuple[str, ...], *, is_whole: bool) -> None:
        """Raise `DagMalformed` if the operator has no such arguments, or, if these are all, lacks one."""
        known = _parameters(self.kind)
        for name in (*self._shared, *own):
            if name in OPTIONS and name not in known:
                raise self._malformed(unknown_option(name, NAMES))
            if name not in known:
                there = ", ".join(sorted(known)) or "none"
                raise self._malformed(f"{self._name} has no parameter {name!r:.100}; it has {there}")
        signature = inspect.signature(self.kind)
        given: dict[str, Any] = dict.fromkeys(("task_id", *self._options, *self._shared, *own))
        try:
            (signature.bind if is_whole else signature.bind_partial)(**given)
        except TypeError as error:
            raise self._malformed(f"{self._name} cannot be made with these arguments: {error}") from None


class MappedFunction(MappedOperator):
    """A ``@task`` function that is mapped: the values and ``shared`` are arguments of the function."""

    def __init__(self, kind: type[BaseOperator], function: Callable[..., Any], **given: Any) -> None:
        self._function = function
        super().__init__(kind, **given)

    def _is_generator(self) -> bool:
        return inspect.isgeneratorfunction(self._function)

    @property
    def python_callable(self) -> Any:
        return self._function

    def _templated(self) -> Iterator[tuple[str, Any]]:
        yield from self._shared.items()

    def _make(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> BaseOperator:
        arguments: Any = {"python_callable": self._function, "op_kwargs": {**shared, **own}}
        with detached():
            return self.kind(task_id=self.task_id, **self._options, **arguments)

    def _check_call(self, own: tuple[str, ...], *, is_whole: bool) -> None:
        given = dict.fromkeys((*self._shared, *own))
        taken = given
        with contextlib.suppress(ValueError):  # written in C, it may have no signature
            taken = wanted(self._function, given)
        if unknown := sorted(OPTIONS.keys() & given.keys() - taken.keys()):
            raise self._malformed(unknown_option(unknown[0], NAMES))
        if not is_whole:
            return  # the other arguments are known when an instance has its value
        try:
            self._make(dict.fromkeys(self._shared), dict.fromkeys(own))
        except DagMalformed as error:
            raise self._malformed(error.problem) from None


class Partial:
    """The arguments that all instances have; ``expand`` adds those that each has of its own.

    ``make`` gets the arguments of an `Expansion`, and returns the output of what is expanded.
    """

    def __init__(self, task_id: str, make: Callable[..., XComArg]) -> None:
        self.task_id = task_id
        self.is_expanded = False
        self._make = make
        if (dag := open_dag()) is not None:
            dag.partials.append(self)

    def expand(
        self,
        *,
        window: int = DEFAULT_WINDOW,
        fail_fast: bool = False,
        failures_max: int | None = None,
        map_index_name: InstanceNamer | None = None,
        **over: Any,
    ) -> XComArg:
        """Add a mapped task, with an instance for each combination of the values of ``over``; return its output.

        The values of each parameter are a list, a dict (whose items are pairs), or the output of a task. At most
        ``window`` instances that have begun are unfinished at once. With ``fail_fast`` none begins after one has
        failed; with ``failures_max`` no more are made after that many have. ``map_index_name`` is a function that gets
        those of the instance's own arguments that it has parameters for, and returns a short text to name it by.
        Raises `DagMalformed`.
        """
        self.is_expanded = True
        limits: Any = {"window": window, "fail_fast": fail_fast, "failures_max": failures_max}
        return self._make(over=over, map_index_name=map_index_name, **limits)

    def expand_kwargs(
        self,
        over: Any,
        *,
        window: int = DEFAULT_WINDOW,
        fail_fast: bool = False,
        failures_max: int | None = None,
        map_index_name: InstanceNamer | None = None,
    ) -> XComArg:
        """Add a mapped task, with an instance for each dict of arguments in ``over``; as `expand` otherwise."""
        self.is_expanded = True
        limits: Any = {"window": window, "fail_fast": fail_fast, "failures_max": failures_max}
        return self._make(over=None, over_kwargs=over, map_index_name=map_index_name, **limits)


def _parameters(kind: type[BaseOperator]) -> set[str]:
    """Return the names of the arguments of an operator, also of those that its constructor only passes on."""
    names: set[str] = set()
    for one in kind.__mro__:
        if one is BaseOperator:
            break
        if "__init__" in vars(one):
            parameters = list(inspect.signature(vars(one)["__init__"]).parameters.values())[1:]
            names |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break  # it passes on nothing that is not its own
    return names - {"task_id", "dag"}
