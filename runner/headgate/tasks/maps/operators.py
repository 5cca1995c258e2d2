"""Mapped tasks: ``expand`` makes one of an operator or a function, with an instance for each of many values.

In a DAG a mapped task stands as a `MappedOperator`. Only an instance of it is ever run: its step makes the operator
that was meant, with the arguments that all instances share and those of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

import msgspec

from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import NAME_CHARS_MAX, TaskSpec
from headgate.protocol.messages.maps import DEFAULT_WINDOW, MapSpec
from headgate.tasks.context import Context
from headgate.tasks.graph import DAG, detached
from headgate.tasks.maps.sources import Combinations, Given, Mappable, mappable
from headgate.tasks.operator import BaseOperator, XComArg
from headgate.tasks.operators import BranchPythonOperator, ShortCircuitOperator, outputs_in, resolved
from headgate.tasks.options import NAMES

_UNMAPPED: Final = (BranchPythonOperator, ShortCircuitOperator)


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
    ) -> None:
        self.kind = kind
        self._name = kind.operator_name or kind.__name__
        self._shared = {name: value for name, value in shared.items() if name not in NAMES}
        options: Any = {name: value for name, value in shared.items() if name in NAMES}
        self._options: Mapping[str, Any] = options
        self._names = None if over is None else tuple(over)
        self._made: BaseOperator | None = None
        self._map: MapSpec | None = None
        super().__init__(task_id=task_id, dag=dag, **options)
        if issubclass(kind, _UNMAPPED):
            raise self._malformed(f"a {self._name} cannot be mapped: what it skips, it would skip for all")
        if self.start_from_trigger or kind.start_from_trigger:
            raise self._malformed(
                "a mapped task cannot begin in its trigger, because it has arguments of its own there"
            )
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
        self._map = MapSpec(self._over.source(), window, fail_fast, failures_max)
        self._check_arguments()
        for output in [*outputs_in(self._shared), *self._over.outputs()]:
            self.set_upstream(output)

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
        if index >= len(values):
            raise RuntimeError(f"the task {self.task_id!r} has {len(values)} values now, and none for instance {index}")
        value = resolved(values[index], context)
        if self._names is not None:
            own = dict(zip(self._names, value, strict=True))
        elif isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            own = dict(value)
        else:
            raise TypeError(f"expand_kwargs needs dicts of arguments; the value {index} is {value!r:.100}")
        if twice := sorted(own.keys() & self._shared_names()):
            raise TypeError(f"the value {index} has {', '.join(twice)}, which all instances have from partial()")
        made = self._make({name: resolved(shared, context) for name, shared in self._shared.items()}, own)
        made.dag = self.dag
        made.upstream_task_ids, made.downstream_task_ids = self.upstream_task_ids, self.downstream_task_ids
        self._made = context["task"] = made
        return made

    def mapped_over(self) -> Iterator[XComArg]:
        return self._over.outputs()

    # --- parts ---

    def _spec(self, start_trigger: Any) -> TaskSpec:
        # It is checked a first time by the constructor of the base, before it is known over what it is mapped.
        spec = super()._spec(start_trigger)
        return msgspec.structs.replace(spec, operator=self._name[:NAME_CHARS_MAX], map=self._map)

    def _templated(self) -> Iterator[tuple[str, Any]]:
        yield from self._shared.items()

    def _read(self, over: Mapping[str, Any] | None, over_kwargs: Any) -> Mappable:
        if over is None:
            return self._mappable("expand_kwargs()", over_kwargs)
        if not over:
            raise self._malformed("expand() needs the name of a parameter, with the values for it")
        return Combinations([self._mappable(f"expand({name}=...)", value) for name, value in over.items()])

    def _mappable(self, where: str, value: Any) -> Mappable:
        try:
            found = mappable(value)
        except TypeError as error:
            raise self._malformed(f"{where}: {error}") from None
        for output in outputs_in(list(found.given)) if isinstance(found, Given) else ():
            self.set_upstream(output)
        return found

    def _shared_names(self) -> set[str]:
        return {*self._shared, *self._options, "task_id", "dag"}

    def _make(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> BaseOperator:
        with detached():
            return self.kind(task_id=self.task_id, **self._options, **shared, **own)

    def _given_names(self) -> Iterator[str]:
        """Yield the names of the arguments that instances have of their own, as far as the file has them."""
        if self._names is not None:
            yield from self._names
        elif isinstance(self._over, Given):
            for value in self._over.given:
                yield from value if isinstance(value, Mapping) else ()

    def _check_arguments(self) -> None:
        """Raise `DagMalformed` for an argument that the operator does not have, or has twice."""
        own = list(dict.fromkeys(self._given_names()))
        if options := sorted(NAMES.intersection(own)):
            raise self._malformed(f"{options[0]} is an option, and the same for all instances: give it to partial()")
        if twice := sorted(self._shared.keys() & set(own)):
            raise self._malformed(f"{twice[0]!r:.100} stands in partial() and in what the task is expanded over")
        self._check_names(own)

    def _check_names(self, own: list[str]) -> None:
        """Raise `DagMalformed` for the name of an argument that the operator does not have."""
        known = _parameters(self.kind)
        for name in (*self._shared, *own):
            if name not in known:
                there = ", ".join(sorted(known)) or "none"
                raise self._malformed(f"{self._name} has no parameter {name!r:.100}; it has {there}")


class MappedFunction(MappedOperator):
    """A ``@task`` function that is mapped: the values and ``shared`` are arguments of the function."""

    def __init__(self, kind: type[BaseOperator], function: Callable[..., Any], **given: Any) -> None:
        self._function = function
        super().__init__(kind, **given)

    def _make(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> BaseOperator:
        arguments: Any = {"python_callable": self._function, "op_kwargs": {**shared, **own}}
        with detached():
            return self.kind(task_id=self.task_id, **self._options, **arguments)

    def _check_names(self, own: list[str]) -> None:
        if self._names is None and not own:
            return  # they are known when an instance has its value
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
        **over: Any,
    ) -> XComArg:
        """Add a mapped task, with an instance for each combination of the values of ``over``; return its output.

        The values of each parameter are a list, a dict (whose items are pairs), or the output of a task. At most
        ``window`` instances that have begun are unfinished at once. With ``fail_fast`` none begins after one has
        failed; with ``failures_max`` no more are made after that many have. Raises `DagMalformed`.
        """
        return self._make(over=over, window=window, fail_fast=fail_fast, failures_max=failures_max).output

    def expand_kwargs(
        self,
        over: Any,
        *,
        window: int = DEFAULT_WINDOW,
        fail_fast: bool = False,
        failures_max: int | None = None,
    ) -> XComArg:
        """Add a mapped task, with an instance for each dict of arguments in ``over``; as `expand` otherwise."""
        given: Any = {"window": window, "fail_fast": fail_fast, "failures_max": failures_max}
        return self._make(over=None, over_kwargs=over, **given).output


def _parameters(kind: type[BaseOperator]) -> set[str]:
    """Return the names of the arguments of an operator, also of those that its constructor only passes on."""
    names: set[str] = set()
    for one in kind.__mro__:
        if one is BaseOperator:
            break
        if "__init__" in vars(one):
            for name, parameter in list(inspect.signature(vars(one)["__init__"]).parameters.items())[1:]:
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    names.add(name)
    return names - {"task_id", "dag"}
