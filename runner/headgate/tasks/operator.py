"""`BaseOperator`, the base of all tasks, and how tasks are joined."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Unpack

from headgate.protocol.errors import DagMalformed, ProtocolError
from headgate.protocol.messages.dags import NAME_CHARS_MAX, StartTrigger, TaskSpec, TriggerRule, task_problem
from headgate.protocol.messages.maps import Elements, Output, Source
from headgate.protocol.messages.rules import Overlap, StoppedAs, stopped_as_default
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.messages.task_streams import HANDLER_METHOD, PoisonRule
from headgate.protocol.values import encode_value
from headgate.signals.rules import Every, On, SignalOperator, rules_of
from headgate.tasks.context import RETURN_VALUE, Context
from headgate.tasks.errors import (
    END_METHOD,
    FAIL_METHOD,
    REASON_TIMEOUT,
    TaskDeferralError,
    TaskDeferred,
    TriggerTimeout,
    XComMissing,
)
from headgate.tasks.graph import DAG, Arrows, open_dag, open_group
from headgate.tasks.maps.elements import Emissions
from headgate.tasks.maps.later import own_arguments
from headgate.tasks.maps.outputs import MappedOutput
from headgate.tasks.maps.sources import Mappable
from headgate.tasks.options import DEFAULTS, TaskOptions, options_problem
from headgate.tasks.streaming import (
    ENDED_METHOD,
    Stream,
    StreamedEvent,
    StreamMisused,
    StreamStep,
    read_stream,
)
from headgate.triggers.airflow_names import CONTEXT
from headgate.triggers.base import BaseTrigger, StartTriggerArgs
from headgate.triggers.encoding import check_classpath

if TYPE_CHECKING:
    from headgate.tasks.groups.mapping import GroupMapping
    from headgate.tasks.maps.operators import Partial

# A template of Airflow's: `{{ ds }}`, `{{ params.x }}`, `{% if %}`. Not those of Docker and Go, `{{ .Names }}`.
_TEMPLATE: Final = re.compile(
    r"\{\{-?\s*(?:" + "|".join({*CONTEXT, *Context.__annotations__}) + r")\b[^{}]*\}\}"
    r"|\{%-?\s*(?:if|for|set|raw|macro)\b[^{}]*%\}"
)


class BaseOperator(SignalOperator, Arrows):
    """One task of a DAG. A subclass overrides `execute`, and adds the methods in which a deferral resumes::

        # report.py
        from datetime import timedelta
        from pathlib import Path

        from headgate.tasks import BaseOperator
        from headgate.triggers.file import FileTrigger


        class ReadReport(BaseOperator):
            def __init__(self, *, path, **options):
                super().__init__(**options)
                self.path = path

            def execute(self, context):
                self.defer(trigger=FileTrigger(self.path), method_name="read", timeout=timedelta(hours=6))

            def read(self, context, event):
                return Path(event["path"]).read_text()

    No instance survives a deferral: the task resumes in a new one, made by loading the DAG file again. The only state
    that reaches it is the ``kwargs`` of `defer`.

    Without ``dag`` the task belongs to the DAG in whose ``with`` block it is made; a task of no DAG can be executed
    (for example in a test), not joined. Raises `DagMalformed`, which names DAG, task and value.
    """

    start_trigger_args: StartTriggerArgs | None = None
    start_from_trigger: bool = False
    operator_name: ClassVar[str | None] = None  # the name shown; None: that of the class
    emits: bool = False  # whether its output is the elements that it emits, and not what it returns
    template_fields: ClassVar[Sequence[str]] = ()  # attributes in which Airflow renders templates, refused here

    def __init__(self, *, task_id: str, dag: DAG | None = None, **options: Unpack[TaskOptions]) -> None:
        super().__init__()
        self.dag = open_dag() if dag is None else dag
        self.task_group = open_group(self.dag)
        self.task_id = task_id if self.task_group is None else self.task_group.child_id(task_id)
        self.upstream_task_ids: set[str] = set()
        self.downstream_task_ids: set[str] = set()
        self.skips: set[str] = set()  # set by a step that succeeds: downstream tasks that are not to run
        self._deferral: TaskDeferred | None = None
        self._stream: StreamStep | None = None  # set by a step that handles events
        self._emissions: Emissions | None = None  # set by a step of one that emits
        dag_args = TaskOptions() if self.dag is None else self.dag.default_args
        if not isinstance(task_id, str):
            raise self._malformed(f"task_id must be a str, not {task_id!r:.100}")
        if (problem := options_problem(options)) is not None:
            raise self._malformed(problem)
        group_args = TaskOptions() if self.task_group is None else self.task_group.all_default_args()
        given: dict[str, Any] = {**DEFAULTS, **dag_args, **group_args, **options}
        self.retries: int = given["retries"]
        self.retry_delay: timedelta = given["retry_delay"]
        self.retry_exponential_backoff: bool = given["retry_exponential_backoff"]
        self.max_retry_delay: timedelta | None = given["max_retry_delay"]
        self.execution_timeout: timedelta | None = given["execution_timeout"]
        self.priority_weight: int = given["priority_weight"]
        self.queue: str = given["queue"]
        self.pool: str = given["pool"]
        self.pool_slots: int = given["pool_slots"]
        self.trigger_rule: TriggerRule = given["trigger_rule"]
        self.max_active_tis_per_dagrun: int | None = given["max_active_tis_per_dagrun"]
        self.overlap: Overlap = given["overlap"]
        self.endless: bool = given["endless"]
        self.stopped_as: StoppedAs = given.get("stopped_as", stopped_as_default(is_endless=self.endless))
        try:
            for signal in given["signals"]:
                self.set_signal(signal)
            if given["every"] is not None:
                self.set_signal(On(Every(given["every"])))
        except (TypeError, ValueError) as error:
            raise self._malformed(f"signals: {error}") from None
        self.start_trigger_args = given.get("start_trigger_args", self.start_trigger_args)
        self.start_from_trigger = given.get("start_from_trigger", self.start_from_trigger)
        # Checked at the author's line; the start trigger is checked later, after the subclass's constructor.
        if (problem := task_problem(self._spec(None))) is not None:
            raise self._malformed(problem)
        if self.dag is not None:
            self.dag.add(self)
        if self.task_group is not None:
            self.task_group.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.task_id!r}>"

    @classmethod
    def partial(cls, *, task_id: str, dag: DAG | None = None, **shared: Any) -> Partial:
        """Begin a mapped task with the arguments that all of its instances have, options among them::

        FileSensor.partial(task_id="wait", timeout=timedelta(hours=6)).expand(filepath=["a.csv", "b.csv"])
        """
        from headgate.tasks.maps.operators import MappedOperator, Partial  # it derives from this class

        def make(**given: Any) -> XComArg:
            return MappedOperator(cls, task_id=task_id, dag=dag, shared=shared, **given).output

        return Partial(task_id, make)

    # --- for authors to override ---

    def execute(self, context: Context) -> Any:
        """Do the task's work. The returned value becomes the XCom ``return_value``."""
        raise NotImplementedError(f"{type(self).__name__} does not override execute")

    def on_kill(self) -> None:
        """Stop work that the task started elsewhere. Called only if a user clears, marks or cancels the task (I14)."""

    # --- deferral ---

    def defer(
        self,
        *,
        trigger: BaseTrigger,
        method_name: str | None = HANDLER_METHOD,
        kwargs: dict[str, Any] | None = None,
        timeout: timedelta | None = None,
        stream: Stream = None,
        ahead: int | None = None,
        poison: PoisonRule = "fail",
    ) -> NoReturn:
        """Release the worker until ``trigger`` fires: raise `TaskDeferred` with these arguments."""
        self._deferral = TaskDeferred(
            trigger=trigger,
            method_name=method_name,
            kwargs=kwargs,
            timeout=timeout,
            stream=stream,
            ahead=ahead,
            poison=poison,
        )
        raise self._deferral

    def handled(self, event: StreamedEvent, **state: Any) -> None:
        """Count all events of the stream up to ``event`` as handled, with the state so far; none if it is unchanged.

        To be called in ``handle_trigger_events``: if it fails further on, the next try begins behind this event. Raises
        `StreamMisused` for an event of another call, or one before an event that is handled, `ValueNotSerializable`
        and `ValueTooLong`.
        """
        self._handling("handled()").mark_handled(event, state or None)

    def end_stream(self) -> None:
        """Take no more events: the stream ends with this call of the handler, and its trigger is ended.

        Raises `StreamMisused` outside of a handler.
        """
        self._handling("end_stream()").end()

    def emit(self, value: Any, *, key: str | None = None) -> None:
        """Leave an element for the tasks that are expanded over the output of this one, which need ``emits = True``.

        Elements are stored with the outcome of the step; those for the events of a stream together with the place up
        to which they are handled. A task that is tried again emits the same ones again. With a ``key`` an element that
        is there is not emitted again, and a new try may emit others, in any order. Raises RuntimeError outside of a
        step, and what `Emissions.add` raises.
        """
        if not self.emits:
            raise RuntimeError(f"{type(self).__name__} emits: it needs the attribute emits = True")
        if self._emissions is None:
            raise RuntimeError("emit() is for the methods that a step calls")
        self._emissions.add(value, key)

    def _handling(self, what: str) -> StreamStep:
        if self._stream is None or not self._stream.is_handling:
            raise StreamMisused(f"{what} is for the handler of a stream, while it has events")
        return self._stream

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any], event: Any, context: Context) -> Any:
        """Resume after a deferral: call ``next_method(context, event=event, **next_kwargs)``.

        For ``__fail__`` raises `TriggerTimeout` or `TaskDeferralError`, with the trigger's error and traceback.
        """
        if next_method == END_METHOD:
            raise TaskDeferralError(
                f"the trigger fired {event!r:.100}, an event that does not end the task, and the deferral has no "
                f"method_name to resume in"
            )
        if next_method != FAIL_METHOD:
            return getattr(self, next_method)(context, event=event, **next_kwargs)
        error, trace = str(next_kwargs.get("error", "the trigger failed")), str(next_kwargs.get("traceback", ""))
        if next_kwargs.get("reason") == REASON_TIMEOUT:
            waited_s = next_kwargs.get("waited_s")
            raise TriggerTimeout(error, waited=None if waited_s is None else timedelta(seconds=waited_s))
        raise TaskDeferralError(error, trace)

    def method_problem(self, name: str, kwargs: dict[str, Any], *, of_stream: bool = False) -> str | None:
        """Return the reason why the task cannot resume in the method ``name`` with these kwargs, None if it can.

        ``of_stream``: it resumes for the events of a stream, and then in `stream_ended` with the same kwargs.
        """
        if name == END_METHOD:
            return None
        if of_stream and name == HANDLER_METHOD:
            problem = self._call_problem(name, "(events, context, **state)", (), None, **kwargs)
        else:
            problem = self._call_problem(name, "(context, event=..., kwargs)", None, event=None, **kwargs)
        if problem is None and of_stream and hasattr(self, ENDED_METHOD):
            problem = self._call_problem(ENDED_METHOD, "(context, **state)", None, **kwargs)
        return problem

    def _call_problem(self, name: str, form: str, /, *args: Any, **kwargs: Any) -> str | None:
        """Return the reason why a method cannot be called with these arguments, which have this form."""
        method = getattr(self, name, None)
        if not callable(method):
            return f"{type(self).__name__} has no method {name!r:.100} to resume in"
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            return f"{type(self).__name__}.{name} must be a plain method: tasks are synchronous, and triggers are async"
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            return f"{type(self).__name__}.{name} cannot be called with {form}: {error}"
        except ValueError:  # written in C, it has no signature
            return None
        return None

    # --- the rest of the DAG ---

    @property
    def log(self) -> logging.Logger:
        """The logger of this operator's class."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__qualname__}")

    @property
    def output(self) -> XComArg:
        """The value this task will return, as an argument for other tasks."""
        return XComArg(self)

    def to_spec(self) -> TaskSpec:
        """Return the spec of the task for the supervisor. Raises `DagMalformed`, also for a template of Airflow's."""
        for name, value in self._templated():
            if (template := _template_in(value)) is not None:
                raise self._malformed(
                    f"{name} has the template {template!r:.100}, and there are no templates: a @task function gets "
                    f"logical_date, params (the run's conf) and the rest of the context, and can pass them on to a "
                    f"command as environment variables"
                )
        if self.start_from_trigger and self.mapping is not None:
            raise self._malformed(f"cannot begin in its trigger: it is in the mapped group {self.mapping.group_id!r}")
        return self._spec(self._start_trigger() if self.start_from_trigger else None)

    def for_step(self, context: Context) -> BaseOperator:
        """Return the operator that a step is to run: this one, or that of an instance if it is mapped."""
        mapping = self.mapping
        if (context["ti"].map_index < 0) is not (mapping is None):
            now = "not mapped any more; it was" if mapping is None else "mapped now; it was not"
            raise RuntimeError(f"the task {self.task_id!r} is {now} when this run began")
        if mapping is not None:
            mapping.begin_step(context)
        return self

    @property
    def mapping(self) -> GroupMapping | None:
        """Over what the mapped group is expanded in which this task is; None if it is in none."""
        return None if self.task_group is None else self.task_group.find_mapping()

    @property
    def is_mapped(self) -> bool:
        """Whether only instances of the task are run."""
        return self.mapping is not None

    def mapped_over(self) -> Iterator[XComArg]:
        """Yield the outputs over which this task, or its mapped group, is expanded."""
        return iter(()) if self.mapping is None else self.mapping.mapped_over()

    def first_tasks(self) -> Sequence[BaseOperator]:
        return (self,)

    def last_tasks(self) -> Sequence[BaseOperator]:
        return (self,)

    def value_hint(self) -> str:
        return f"the task {self.task_id!r} itself is no value: give its output"

    def _templated(self) -> Iterator[tuple[str, Any]]:
        """Yield the arguments in which Airflow renders templates, with their names."""
        for name in self.template_fields:
            yield name, getattr(self, name, None)

    def _malformed(self, problem: str) -> DagMalformed:
        dag_id = "(none)" if self.dag is None else self.dag.dag_id
        return DagMalformed(dag_id, str(self.task_id), problem)

    def _spec(self, start_trigger: StartTrigger | None) -> TaskSpec:
        mapping = self.mapping

        def seconds(delay: timedelta | None) -> float | None:
            return None if delay is None else delay.total_seconds()

        return TaskSpec(
            task_id=self.task_id,
            operator=(self.operator_name or type(self).__name__)[:NAME_CHARS_MAX],
            upstream=tuple(sorted(self.upstream_task_ids)),
            trigger_rule=self.trigger_rule,
            retries=self.retries,
            retry_delay_s=self.retry_delay.total_seconds(),
            retry_exponential_backoff=self.retry_exponential_backoff,
            max_retry_delay_s=seconds(self.max_retry_delay),
            execution_timeout_s=seconds(self.execution_timeout),
            priority_weight=self.priority_weight,
            queue=self.queue,
            pool=self.pool,
            pool_slots=self.pool_slots,
            start_trigger=start_trigger,
            map=None if mapping is None else mapping.spec,
            active_max=self.max_active_tis_per_dagrun,
            emits=self.emits,
            group="" if mapping is None else mapping.group_id,
            signals=rules_of(
                self,
                self.overlap,
                self.stopped_as,
                is_endless=self.endless,
                timezone="UTC" if self.dag is None else self.dag.timezone,
            ),
            endless=self.endless,
        )

    def _start_trigger(self) -> StartTrigger:
        start = self.start_trigger_args
        if start is None:
            raise self._malformed("start_from_trigger needs start_trigger_args")
        next_kwargs = start.next_kwargs or {}
        kwargs = start.trigger_kwargs or {}
        own = own_arguments(kwargs)
        try:
            stream = read_stream(start.stream, ahead=start.ahead, poison=start.poison)
        except (TypeError, ValueError) as error:
            raise self._malformed(f"start_trigger_args: {error}") from None
        if stream is None and start.next_method == HANDLER_METHOD:
            raise self._malformed("start_trigger_args needs next_method, or stream")
        problem = self.method_problem(start.next_method, next_kwargs, of_stream=stream is not None)
        if problem is not None:
            raise self._malformed(f"start_trigger_args.next_method: {problem}")
        try:
            check_classpath(start.trigger_cls)
            return StartTrigger(
                classpath=start.trigger_cls,
                kwargs=_encoded(
                    {name: value for name, value in kwargs.items() if own is None or name not in own.names},
                    "start_trigger_args.trigger_kwargs",
                ),
                next_method=start.next_method,
                next_kwargs=_encoded(next_kwargs, "start_trigger_args.next_kwargs"),
                timeout_s=None if start.timeout is None else start.timeout.total_seconds(),
                stream=stream,
                own=own,
            )
        except ProtocolError as error:
            raise self._malformed(str(error)) from error


class Placeholder:
    """Stands in the arguments of a task for a value that only its step has."""

    def resolve(self, context: Context) -> Any:
        """Return the value."""
        raise NotImplementedError


class XComArg(Placeholder, Arrows, Mappable):
    """A placeholder for an XCom of a task, in the arguments of tasks downstream.

    If the task is mapped, it stands for the values of all its instances, a `MappedOutput`; if it emits, for the
    elements.
    """

    def __init__(self, operator: BaseOperator, key: str = RETURN_VALUE) -> None:
        self.operator = operator
        self.key = key

    def __repr__(self) -> str:
        return f"<XComArg {self.key!r} of {self.operator.task_id!r}>"

    def _refuse(self, *_: object) -> NoReturn:
        # A command that is put together from it would have this object's name in it, and a condition is always true.
        raise self._unknown("so has no text and no truth: give it to a task as an argument")

    __str__ = __format__ = __bool__ = _refuse

    def __getitem__(self, key: object) -> NoReturn:
        # Also for `for x in output`, and unpacking.
        raise self._unknown("so has no parts: push each part there, by ti.xcom_push, and take XComArg(task, key)")

    def _unknown(self, so: str) -> TypeError:
        return TypeError(f"what {self.operator.task_id!r} returns is not known while the file is parsed, and {so}")

    def resolve(self, context: Context) -> Any:
        """Return the value; None if the task returned None. Raises `XComMissing` if there is none under another key."""
        if self.is_emitted:
            return context["ti"].pull_elements(self.operator.task_id)
        missing = object()
        value = context["ti"].xcom_pull(self.operator.task_id, self.key, default=missing)
        if value is not missing:
            return value
        if self.key == RETURN_VALUE:  # None is not stored
            return None
        raise XComMissing(f"the task {self.operator.task_id!r} has pushed no XCom {self.key!r}")

    @property
    def is_emitted(self) -> bool:
        """Whether it stands for elements."""
        return self.operator.emits and self.key == RETURN_VALUE

    def source(self) -> Source:
        return Elements(self.operator.task_id) if self.is_emitted else Output(self.operator.task_id, self.key)

    def values(self, context: Context) -> Sequence[Any]:
        key = None if self.is_emitted else self.key
        return context["ti"].values_of_map(self.operator.task_id, key, lambda: self._left(context))

    def _left(self, context: Context) -> Sequence[Any]:
        found = self.resolve(context)
        if isinstance(found, Mapping):
            return list(found.items())
        if isinstance(found, list | tuple | MappedOutput):
            return found
        raise TypeError(f"{self!r} is no list or dict, but {found!r:.100}")

    def first_tasks(self) -> Sequence[BaseOperator]:
        return (self.operator,)

    def last_tasks(self) -> Sequence[BaseOperator]:
        return (self.operator,)

    def awaited(self) -> Sequence[BaseOperator]:
        """Return the tasks that are upstream of a task with this in its arguments."""
        return (self.operator,)


def _encoded(kwargs: dict[str, Any], where: str) -> bytes:
    return encode_value(kwargs, where=where, bytes_max=KWARGS_BYTES_MAX)


def _template_in(value: Any) -> str | None:
    """Return the first template of Airflow's in a text, or in one within lists, tuples and dicts."""
    if isinstance(value, str):
        template = _TEMPLATE.search(value) if "{" in value else None
        return None if template is None else template.group()
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for part in parts if (found := _template_in(part)) is not None), None)
