"""Operators that come ready-made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack

from headgate.tasks.context import Context
from headgate.tasks.graph import DAG
from headgate.tasks.operator import BaseOperator, XComArg
from headgate.tasks.options import TaskOptions
from headgate.triggers.airflow_names import CONTEXT

__all__ = ["BranchPythonOperator", "EmptyOperator", "PythonOperator", "ShortCircuitOperator"]


class EmptyOperator(BaseOperator):
    """Does nothing: a place for arrows to meet."""

    def execute(self, context: Context) -> None:
        """Return at once."""


class PythonOperator(BaseOperator):
    """Calls a function, and leaves what it returns as the XCom ``return_value``.

    ``op_args`` and ``op_kwargs`` are passed on; the outputs of other tasks among them (`BaseOperator.output`, also
    within lists, tuples and dicts) become their values, and those tasks upstream of this one. Of the context the
    function gets what it has a parameter for (``ti``, ``run_id``, ...), all of it for ``**kwargs``.

    The function may raise `TaskDeferred` with ``method_name="execute"``: it is called again from its start, and gets
    the ``event`` and the deferral's kwargs as it gets the context. ``event`` is None the first time.
    """

    template_fields = ("op_args", "op_kwargs")

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Sequence[Any] = (),
        op_kwargs: Mapping[str, Any] | None = None,
        task_id: str,
        dag: DAG | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(task_id=task_id, dag=dag, **options)
        if not callable(python_callable):
            raise self._malformed(f"python_callable must be a function, not {python_callable!r:.100}")
        if inspect.iscoroutinefunction(python_callable) or inspect.isasyncgenfunction(python_callable):
            raise self._malformed("python_callable must not be async: tasks are synchronous, triggers are not")
        if isinstance(op_args, str):
            raise self._malformed(f"op_args must be a sequence of arguments, not the str {op_args!r:.100}")
        self.python_callable = python_callable
        self.op_args = tuple(op_args)
        self.op_kwargs = dict(op_kwargs or {})
        self._check_arguments()
        for argument in outputs_in([self.op_args, self.op_kwargs]):
            self.set_upstream(argument)

    def execute(self, context: Context, event: Any = None, **resumed_with: Any) -> Any:
        """Call the function; raises what it raises."""
        args = resolved(self.op_args, context)
        kwargs = resolved(self.op_kwargs, context)
        offered = {**context, "event": event, **resumed_with}
        return self.python_callable(*args, **{**self._wanted(offered, len(args)), **kwargs})

    def _check_arguments(self) -> None:
        """Raise `DagMalformed` if the function cannot be called with its arguments and the context."""
        try:
            signature = inspect.signature(self.python_callable)
        except (TypeError, ValueError):  # written in C, it may have no signature
            return
        offered = dict.fromkeys((*Context.__annotations__, "event"))
        try:
            signature.bind(*self.op_args, **{**self._wanted(offered, len(self.op_args)), **self.op_kwargs})
        except TypeError as error:
            missing = str(error).rpartition("missing a required ")[2].rpartition("argument: ")[2].strip("'")
            instead = f": {CONTEXT[missing]}" if missing in CONTEXT else ""
            has = f"; the context has no {missing!r}{instead}; it has {', '.join(sorted(offered))}"
            name = getattr(self.python_callable, "__qualname__", self.python_callable)
            problem = f"{name} cannot be called with its arguments and the context: {error}"
            raise self._malformed(problem + (has if missing in signature.parameters else "")) from None

    def _wanted(self, offered: Mapping[str, Any], positional: int) -> dict[str, Any]:
        """Return what of ``offered`` the function has a parameter for that no positional argument takes."""
        try:
            parameters = list(inspect.signature(self.python_callable).parameters.values())
        except ValueError:  # written in C, it has no signature to be had
            return {}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            taken = {p.name for p in parameters[:positional] if p.kind is not p.VAR_KEYWORD}
            return {name: value for name, value in offered.items() if name not in taken}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        free = [p for i, p in enumerate(parameters) if i >= positional or p.kind is p.KEYWORD_ONLY]
        return {p.name: offered[p.name] for p in free if p.kind in by_name and p.name in offered}


class BranchPythonOperator(PythonOperator):
    """Calls a function that says which of the tasks right below go on: a task id, several, or None for none.

    Those it does not name are skipped, but for a task that stands below one it names as well. What it returned is left
    as the XCom ``return_value``. Naming a task that is not right below is an error.
    """

    def execute(self, context: Context, event: Any = None, **resumed_with: Any) -> Any:
        """Call the function and mark what it leaves out."""
        chosen = super().execute(context, event, **resumed_with)
        names: Collection[Any] = [] if chosen is None else [chosen] if isinstance(chosen, str) else chosen
        if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"a branch must return a task_id, several, or None, not {chosen!r:.100}")
        if strangers := sorted(set(names) - self.downstream_task_ids):
            below = ", ".join(sorted(self.downstream_task_ids)) or "none"
            raise ValueError(f"the branch chose {', '.join(strangers)}; the tasks right below are: {below}")
        kept = set(names)
        if self.dag is not None:
            kept.update(*(self.dag.descendants(name) for name in names))
        self.skips = self.downstream_task_ids - kept
        return chosen


class ShortCircuitOperator(PythonOperator):
    """Calls a function; unless it returns something true, the tasks below are skipped, whatever their trigger rules.

    With ``ignore_downstream_trigger_rules=False`` only those right below are, and the rules of the others decide.
    """

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Sequence[Any] = (),
        op_kwargs: Mapping[str, Any] | None = None,
        ignore_downstream_trigger_rules: bool = True,
        task_id: str,
        dag: DAG | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(
            python_callable=python_callable, op_args=op_args, op_kwargs=op_kwargs, task_id=task_id, dag=dag, **options
        )
        self.ignore_downstream_trigger_rules = ignore_downstream_trigger_rules

    def execute(self, context: Context, event: Any = None, **resumed_with: Any) -> Any:
        """Call the function and mark what it cuts off."""
        condition = super().execute(context, event, **resumed_with)
        if not condition:
            self.skips = set(self.downstream_task_ids)
            if self.ignore_downstream_trigger_rules and self.dag is not None:
                self.skips = self.dag.descendants(self.task_id)
        return condition


def outputs_in(value: Any) -> list[XComArg]:
    """Return the outputs of other tasks in ``value``, however deep in lists, tuples and dicts."""
    if isinstance(value, XComArg):
        return [value]
    # Exactly these, as in `resolved`: what is told to be upstream is what will be looked up.
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, tuple):
        return [found for item in value for found in outputs_in(item)]
    return []


def resolved(value: Any, context: Context) -> Any:
    """Return ``value`` with the values of other tasks in the places of their outputs."""
    if isinstance(value, XComArg):
        return value.resolve(context)
    if type(value) is dict:
        return {key: resolved(item, context) for key, item in value.items()}
    if type(value) is list:
        return [resolved(item, context) for item in value]
    if type(value) is tuple:
        return tuple(resolved(item, context) for item in value)
    return value
