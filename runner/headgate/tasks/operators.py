"""Operators that call Python functions, and `EmptyOperator`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Unpack

import msgspec

from headgate.protocol.messages.dags import StartTrigger
from headgate.protocol.messages.task_streams import PAGE_ROWS, ElementsOf
from headgate.tasks.context import Context
from headgate.tasks.errors import TaskFailed
from headgate.tasks.graph import DAG, Arrows
from headgate.tasks.operator import BaseOperator, Placeholder, XComArg
from headgate.tasks.options import TaskOptions
from headgate.tasks.streaming import StreamedEvent
from headgate.triggers.airflow_names import CONTEXT
from headgate.triggers.base import StartTriggerArgs

__all__ = ["BranchPythonOperator", "EmptyOperator", "PythonOperator", "ShortCircuitOperator", "TriggerOperator"]


class EmptyOperator(BaseOperator):
    """Does nothing; joins other tasks."""

    def execute(self, context: Context) -> None:
        """Return at once."""


class PythonOperator(BaseOperator):
    """Calls a function, whose result becomes the XCom ``return_value``.

    The function gets ``op_args`` and ``op_kwargs``. Outputs of other tasks among them (`BaseOperator.output`, also
    within lists, tuples and dicts) are replaced by their values, and those tasks become upstream of this one. The
    function also gets the keys of the context that it has parameters for (``ti``, ``run_id``, ...), or all of them if
    it has ``**kwargs``.

    The function may raise `TaskDeferred` with ``method_name="execute"``: it is then called again from its start, with
    ``event`` and the deferral's kwargs if it has parameters for them. ``event`` is None in the first call.

    What a generator function yields are elements (`BaseOperator.emit`), each as soon as it comes.
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
        if (problem := callable_problem(python_callable)) is not None:
            raise self._malformed(problem)
        if isinstance(op_args, str):
            raise self._malformed(f"op_args must be a sequence of arguments, not the str {op_args!r:.100}")
        self.python_callable = python_callable
        self.emits = inspect.isgeneratorfunction(python_callable)
        if self.emits and type(self).execute is not PythonOperator.execute:
            raise self._malformed("what it returns is what decides, so it cannot be a generator function")
        self.op_args = tuple(op_args)
        self.op_kwargs = dict(op_kwargs or {})
        self._check_arguments()
        try:
            outputs = outputs_in([self.op_args, self.op_kwargs])
        except TypeError as error:
            raise self._malformed(str(error)) from None
        for argument in outputs:
            self.set_upstream(argument.awaited())

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
        """Return the part of ``offered`` that the function has parameters for, except those that ``op_args`` take."""
        try:
            parameters = list(inspect.signature(self.python_callable).parameters.values())
        except ValueError:  # written in C, it has no signature
            return {}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            taken = {p.name for p in parameters[:positional] if p.kind is not p.VAR_KEYWORD}
            return {name: value for name, value in offered.items() if name not in taken}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        free = [p for i, p in enumerate(parameters) if i >= positional or p.kind is p.KEYWORD_ONLY]
        return {p.name: offered[p.name] for p in free if p.kind in by_name and p.name in offered}


class TriggerOperator(BaseOperator):
    """Emits the payload of each event of a trigger, for the tasks that are expanded over its output.

    No worker runs it: the supervisor that stores an event stores its elements with it. It begins in the trigger,
    and ends when that returns, or fires an event that is its last. With ``elements="each"`` the items of each
    payload are elements: of a list, or of the ``rows`` of a page of `PagedTrigger`; any other payload fails it.
    ``trigger_cls`` is the path of the class, ``module.Class``; ``trigger_kwargs`` are its arguments; ``timeout``
    limits the wait for each event; ``ahead`` is how many elements may be stored before instances are made of them.
    """

    emits = True
    start_from_trigger = True

    def __init__(
        self,
        *,
        trigger_cls: str,
        trigger_kwargs: Mapping[str, Any] | None = None,
        timeout: timedelta | None = None,
        ahead: int | None = None,
        elements: ElementsOf = "event",
        task_id: str,
        dag: DAG | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(task_id=task_id, dag=dag, **options)
        if elements not in ("event", "each"):
            raise self._malformed(f"elements must be 'event' or 'each', not {elements!r:.100}")
        self.elements = elements
        kwargs = dict(trigger_kwargs or {})
        self.start_trigger_args = StartTriggerArgs(
            trigger_cls=trigger_cls, trigger_kwargs=kwargs, timeout=timeout, stream=True, ahead=ahead
        )

    def execute(self, context: Context) -> None:
        """Not called: it begins in its trigger."""

    def handle_trigger_events(self, events: Sequence[StreamedEvent], context: Context) -> None:
        """Emit what has come: in tests, and for a stream that began in a version in which a worker did it."""
        for event in events:
            for value in [event.payload] if self.elements == "event" else self._items_of(event):
                self.emit(value)
            self.handled(event)

    def _items_of(self, event: StreamedEvent) -> Sequence[Any]:
        payload = event.payload
        items = payload.get(PAGE_ROWS) if isinstance(payload, dict) else payload
        if not isinstance(items, list | tuple):
            raise TaskFailed(f"event {event.position} is no list, and no page with a list of rows: {payload!r:.100}")
        return items

    def _start_trigger(self) -> StartTrigger:
        start = super()._start_trigger()
        assert start.stream is not None
        return msgspec.structs.replace(start, stream=msgspec.structs.replace(start.stream, elements=self.elements))


class BranchPythonOperator(PythonOperator):
    """Calls a function that returns which directly downstream tasks run: a task_id, several, or None for none.

    The others are skipped, except for tasks that are downstream of a chosen one as well. The function's result becomes
    the XCom ``return_value``. To return a task that is not directly downstream is an error.
    """

    def execute(self, context: Context, event: Any = None, **resumed_with: Any) -> Any:
        """Call the function, and skip the tasks that it does not choose."""
        chosen = super().execute(context, event, **resumed_with)
        names: Collection[Any] = [] if chosen is None else [chosen] if isinstance(chosen, str) else chosen
        if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"a branch must return a task_id, a list of them, or None, not {chosen!r:.100}")
        if strangers := sorted(set(names) - self.downstream_task_ids):
            below = ", ".join(sorted(self.downstream_task_ids)) or "none"
            raise ValueError(f"the branch chose {', '.join(strangers)}; the directly downstream tasks are: {below}")
        kept = set(names)
        if self.dag is not None:
            kept.update(*(self.dag.descendants(name) for name in names))
        self.skips = self.downstream_task_ids - kept
        return chosen


class ShortCircuitOperator(PythonOperator):
    """Calls a function; unless it returns a true value, all downstream tasks are skipped, whatever their trigger rules.

    With ``ignore_downstream_trigger_rules=False`` only the directly downstream tasks are skipped, and the trigger rules
    of the others decide.
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
        """Call the function, and skip the downstream tasks if its result is false."""
        condition = super().execute(context, event, **resumed_with)
        if not condition:
            self.skips = set(self.downstream_task_ids)
            if self.ignore_downstream_trigger_rules and self.dag is not None:
                self.skips = self.dag.descendants(self.task_id)
        return condition


def callable_problem(function: object) -> str | None:
    """Return the problem with the function of a task; None if there is none."""
    if not callable(function):
        return f"python_callable must be a function, not {function!r:.100}"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "python_callable must not be async: tasks are synchronous, and triggers are async"
    return None


_HOLDERS: Final = (Arrows, dict, list, tuple)  # of outputs


def outputs_in(value: Any) -> list[XComArg]:
    """Return the outputs of other tasks in ``value``, however deep in lists, tuples and dicts.

    Raises TypeError for a task or a group itself, which a step would have another copy of, without a value.
    """
    if isinstance(value, XComArg):
        return [value]
    if isinstance(value, Arrows):
        raise TypeError(value.value_hint())
    # Exactly these types, as in `resolved`: every output found here is replaced there.
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, tuple):
        # Each step loads its file, which may have thousands of numbers in a list: no call for each of them.
        return [found for item in value if isinstance(item, _HOLDERS) for found in outputs_in(item)]
    return []


def resolved(value: Any, context: Context) -> Any:
    """Return ``value`` with what stands for outputs of other tasks, and for arguments, replaced by its values."""
    if isinstance(value, Placeholder):
        return value.resolve(context)
    if type(value) is dict:
        return {key: resolved(item, context) for key, item in value.items()}
    if type(value) is list:
        return [resolved(item, context) for item in value]
    if type(value) is tuple:
        return tuple(resolved(item, context) for item in value)
    return value
