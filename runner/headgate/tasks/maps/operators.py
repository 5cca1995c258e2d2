"""Mapped tasks: ``expand`` makes one of an operator or a function, with an instance for each of many values.

In a DAG a mapped task stands as a `MappedOperator`. Only an instance of it is ever run: its step makes the operator
that was meant, with the arguments that all instances share and those of its own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

from headgate.child.error_text import storable
from headgate.child.queries import secrets
from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import NAME_CHARS_MAX, TaskSpec
from headgate.protocol.messages.maps import DEFAULT_WINDOW, MapSpec, map_problem
from headgate.tasks.context import Context
from headgate.tasks.graph import DAG, detached
from headgate.tasks.maps.sources import Combinations, Given, Mappable, function_problem, mappable
from headgate.tasks.operator import BaseOperator, XComArg
from headgate.tasks.operators import (
    BranchPythonOperator,
    ShortCircuitOperator,
    callable_problem,
    outputs_in,
    resolved,
)
from headgate.tasks.options import DEFAULTS, NAMES, unknown_option
from headgate.triggers.airflow_names import OPTIONS

InstanceNamer: TypeAlias = Callable[..., Any]
_UNMAPPED: Final = (BranchPythonOperator, ShortCircuitOperator)
_OF_TASK: Final = frozenset({*NAMES, "task_id", "dag"})


class MappedOperator(BaseOperator):
    """A mapped task of a DAG, made by ``expand`` or ``expand_kwargs``.

    ``shared`` are the arguments that all instances of ``kind`` have, options among them. The values of ``over`` are the
    others: tuples of values for ``names``, or, if that is None, dicts.
    """

    is_mapped = True

    def __init__(
        self,
        kind: type[BaseOperator],
        *,
        task_id: str,
        dag: DAG | None,
        shared: Mapping[str, Any],
        over: Mapping[str, Any] | None,
        over_kwargs: Any = None,
        window: int = DEFAULT_WINDOW,
        fail_fast: bool = False,
        failures_max: int | None = None,
        map_index_name: InstanceNamer | None = None,
    ) -> None:
        self.kind = kind
        self._name = kind.operator_name or kind.__name__
        self._shared = {name: value for name, value in shared.items() if name not in NAMES}
        options: Any = {name: value for name, value in shared.items() if name in NAMES}
        self._options: Mapping[str, Any] = options
        self._names = None if over is None else tuple(over)
        self._namer = map_index_name
        self._made: BaseOperator | None = None
        self._map: MapSpec | None = None
        super().__init__(task_id=task_id, dag=dag, **options)
        if issubclass(kind, _UNMAPPED):
            raise self._malformed(f"a {self._name} cannot be mapped: what it skips, it would skip for all")
        if self.start_from_trigger or kind.start_from_trigger:
            raise self._malformed(
                "a mapped task cannot begin in its trigger, because it has arguments of its own there"
            )
        if kind.emits or self._is_generator():
            raise self._malformed("is mapped, and cannot emit elements: what its instances return is there for others")
        self._over = self._read(over, over_kwargs)
        for name, value, kinds in (
            ("window", window, (int,)),
            ("fail_fast", fail_fast, (bool,)),
            ("failures_max", failures_max, (int, type(None))),
        ):
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise self._malformed(
                    f"{name} must be {' or '.join(one.__name__ for one in kinds)}, not {value!r:.100}"
                )
        self._check_arguments()
        for output in [*outputs_in(self._shared), *self._over_outputs()]:
            self.set_upstream(output)
        self._map = MapSpec(self._over.source(), window, fail_fast, failures_max)
        if (problem := map_problem(self._map, frozenset(self.upstream_task_ids))) is not None:
            raise self._malformed(problem)

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
        values = self._over.values(context)
        counted, length = context["ti"].map_length, len(values)
        if index >= length or (counted is not None and length != counted):
            # A value is found by its place: among others than were counted it may be that of another instance.
            was = "" if counted is None else f"; it was expanded over {counted:,}"
            raise RuntimeError(
                f"there are {length:,} values for the task {self.task_id!r} now, and this is instance {index}{was}: "
                f"clear it together with what it is expanded over"
            )
        value = values[index]
        own = dict(zip(self._names, value, strict=True)) if self._names is not None else self._arguments(index, value)
        context["ti"].map_name = self._name_of(own)
        try:
            made = self._make({name: resolved(shared, context) for name, shared in self._shared.items()}, own)
        except DagMalformed as error:
            raise TypeError(f"the operator of instance {index} cannot be made: {error.problem}") from error
        made.dag = self.dag
        made.upstream_task_ids, made.downstream_task_ids = self.upstream_task_ids, self.downstream_task_ids
        for name in DEFAULTS:  # also those that the DAG has for all of its tasks
            setattr(made, name, getattr(self, name))
        self._made = context["task"] = made
        return made

    @property
    def python_callable(self) -> Any:
        """The function that all instances call; None if they call none, or each its own."""
        return self._shared.get("python_callable")

    def mapped_over(self) -> Iterator[XComArg]:
        return (leaf for leaf in self._over.leaves() if isinstance(leaf, XComArg))

    # --- parts ---

    def _spec(self, start_trigger: Any) -> TaskSpec:
        # It is checked a first time by the constructor of the base, before it is known over what it is mapped.
        spec = super()._spec(start_trigger)
        return msgspec.structs.replace(spec, operator=self._name[:NAME_CHARS_MAX], map=self._map)

    def _templated(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, value) for name, value in self._shared.items() if name in self.kind.template_fields)

    def _read(self, over: Mapping[str, Any] | None, over_kwargs: Any) -> Mappable:
        if over is None:
            return self._mappable("expand_kwargs()", over_kwargs)
        if not over:
            raise self._malformed("expand() needs the name of a parameter, with the values for it")
        return Combinations([self._mappable(f"expand({name}=...)", value) for name, value in over.items()])

    def _mappable(self, where: str, value: Any) -> Mappable:
        try:
            return mappable(value)
        except TypeError as error:
            raise self._malformed(f"{where}: {error}") from None

    def _over_outputs(self) -> Iterator[XComArg]:
        """Yield the outputs that the values are made of, also those within lists of the file."""
        for leaf in self._over.leaves():
            yield from outputs_in(list(leaf.given) if isinstance(leaf, Given) else leaf)

    def _arguments(self, index: int, value: object) -> dict[str, Any]:
        """Return the arguments that an instance gets from expand_kwargs(). Raises TypeError."""
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise TypeError(f"expand_kwargs needs dicts of arguments; the value {index} is {value!r:.100}")
        if options := sorted(_OF_TASK & value.keys()):
            raise TypeError(
                f"the value {index} has {', '.join(options)}, the same for all instances: give it to partial()"
            )
        if twice := sorted(self._shared.keys() & value.keys()):
            raise TypeError(f"the value {index} has {', '.join(twice)}, which all instances have from partial()")
        return dict(value)

    def _name_of(self, own: Mapping[str, Any]) -> str | None:
        """Return the name of the instance with these arguments of its own; None if it has none."""
        if self._namer is None:
            return None
        try:
            name = self._namer(**_wanted(self._namer, own))
            text = "" if name is None else " ".join(str(name).split())
        except KeyboardInterrupt:
            raise
        except BaseException:  # a name is not worth a try
            self.log.warning("map_index_name has failed: the instance has no name", exc_info=True)
            return None
        return storable(secrets.hide(text))[:NAME_CHARS_MAX] or None

    def _is_generator(self) -> bool:
        return False

    def _make(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> BaseOperator:
        with detached():
            return self.kind(task_id=self.task_id, **self._options, **shared, **own)

    def _given_names(self) -> Iterator[tuple[str, ...]]:
        """Yield the names of the arguments that instances have of their own, as far as the file has them.

        Raises `DagMalformed` for a value of expand_kwargs() that is no dict of arguments.
        """
        if self._names is not None:
            yield self._names
        elif isinstance(self._over, Given):
            dicts = [value for value in self._over.given if not isinstance(value, XComArg)]
            for value in dicts:
                if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                    raise self._malformed(f"expand_kwargs(): dicts of arguments are needed, not {value!r:.100}")
            yield from dict.fromkeys(tuple(value) for value in dicts)

    def _check_arguments(self) -> None:
        """Raise `DagMalformed` for an argument that the operator lacks, does not have, or has twice."""
        if self._namer is not None and (problem := function_problem(self._namer)) is not None:
            raise self._malformed(f"map_index_name: {problem}")
        self._check_function()
        is_known = False
        for own in self._given_names():
            is_known = True
            if options := sorted(_OF_TASK.intersection(own)):
                raise self._malformed(f"{options[0]} is the same for all instances: give it to partial()")
            if twice := sorted(self._shared.keys() & set(own)):
                raise self._malformed(f"{twice[0]!r:.100} stands in partial() and in what the task is expanded over")
            self._check_call(own, is_whole=True)
            self._check_namer(own)
        if not is_known:
            self._check_call((), is_whole=False)

    def _check_function(self) -> None:
        function = self.python_callable
        if function is not None and (problem := callable_problem(function)) is not None:
            raise self._malformed(problem)

    def _check_namer(self, own: tuple[str, ...]) -> None:
        if self._namer is None:
            return
        try:
            inspect.signature(self._namer).bind(**_wanted(self._namer, dict.fromkeys(own)))
        except TypeError as error:
            there = ", ".join(own)
            raise self._malformed(f"map_index_name gets the arguments of an instance ({there}): {error}") from None
        except ValueError:
            raise self._malformed(f"map_index_name: a plain function is needed, not {self._namer!r:.100}") from None

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
        wanted = given
        with contextlib.suppress(ValueError):  # written in C, it may have no signature
            wanted = _wanted(self._function, given)
        if unknown := sorted(OPTIONS.keys() & given.keys() - wanted.keys()):
            raise self._malformed(unknown_option(unknown[0], NAMES))
        if not is_whole:
            return  # the other arguments are known when an instance has its value
        try:
            self._make(dict.fromkeys(self._shared), dict.fromkeys(own))
        except DagMalformed as error:
            raise self._malformed(error.problem) from None


class Partial:
    """The arguments that all instances of a mapped task have; ``expand`` adds those that each has of its own."""

    def __init__(self, make: Callable[..., MappedOperator]) -> None:
        self._make = make

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
        limits: Any = {"window": window, "fail_fast": fail_fast, "failures_max": failures_max}
        return self._make(over=over, map_index_name=map_index_name, **limits).output

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
        limits: Any = {"window": window, "fail_fast": fail_fast, "failures_max": failures_max}
        return self._make(over=None, over_kwargs=over, map_index_name=map_index_name, **limits).output


def _wanted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the named arguments that a function has parameters for. Raises ValueError as `inspect` does."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given)
    return {name: given[name] for name in parameters if name in given}


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
