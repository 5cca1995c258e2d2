"""One step of one task: call the operator's method, and return its outcome. headgate itself does no I/O here.

No exception of the author's code leaves a step, except `KeyboardInterrupt`, by which the caller stops the step.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec

from headgate.child.error_text import describe_error, storable
from headgate.child.queries import secrets
from headgate.protocol.encoded_values import count_items
from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.runner import ERROR_CHARS_MAX, KWARGS_BYTES_MAX
from headgate.protocol.messages.steps import (
    StepDeferred,
    StepFailed,
    StepHandled,
    StepOutcome,
    StepSkipped,
    StepSucceeded,
)
from headgate.protocol.messages.task_streams import StreamPart
from headgate.protocol.values import decode_value, encode_value
from headgate.signals.outgoing import collected
from headgate.tasks.context import RETURN_VALUE, Context, TaskInstance
from headgate.tasks.errors import FAIL_METHOD, TaskDeferred, TaskFailed, TaskSkipped
from headgate.tasks.maps.elements import Emissions
from headgate.tasks.maps.worklists import AppendMisused
from headgate.tasks.operator import BaseOperator
from headgate.tasks.streaming import WAITS, StreamMisused, StreamStep
from headgate.triggers.encoding import encode_trigger

NO_EVENT = b"null"  # the encoding of None, the event of `__fail__`


class Resumption(msgspec.Struct, frozen=True):
    """How a deferred task resumes: the method, its encoded kwargs, and the encoded payload of the event.

    For ``__fail__`` the kwargs are ``error`` and ``traceback`` (both str), and ``reason``, a ``REASON_`` of `errors`.
    """

    next_method: str
    next_kwargs: bytes
    event: bytes = NO_EVENT


class Unresumable(Exception):
    """A task cannot resume as it was to: its operator has changed since, or the stored deferral is damaged."""


def run_step(
    operator: BaseOperator,
    context: Context,
    resumption: Resumption | None = None,
    part: StreamPart | None = None,
    *,
    emitted: int = 0,
) -> StepOutcome:
    """Call ``execute``, or the method of ``resumption``, of a new operator; for the events of ``part``, if it has some.

    Earlier steps of the try have ``emitted`` elements.

    The outcome holds the returned value, the error, the XComs, the signals that go with it, and how far the step has
    come in its stream, without references to the author's objects.
    """
    with collected() as signals:
        outcome = _run(operator, context, resumption, part, emitted)
    if isinstance(outcome, StepFailed):
        return outcome
    return msgspec.structs.replace(outcome, signals=signals.take())


def _run(
    operator: BaseOperator, context: Context, resumption: Resumption | None, part: StreamPart | None, emitted: int
) -> StepOutcome:
    instance = context["ti"]
    outcome: StepOutcome
    stream: StreamStep | None = None
    emissions: Emissions | None = None
    try:
        operator = operator.for_step(context)
        emissions = operator._emissions = _emissions_of(operator, resumption, part, emitted)
        if resumption is None:
            value = operator.execute(context)
            if emissions is not None and isinstance(value, Generator):
                value = emissions.run(value)
        elif part is None or resumption.next_method == FAIL_METHOD:
            value = _resume(operator, context, resumption)
        else:
            stream = operator._stream = _stream_of(operator, resumption, part)
            if emissions is not None:
                emissions.is_handling = True
            value = stream.run(context)
        if operator._deferral is not None:
            raise RuntimeError(
                f"the deferral in {operator.task_id!r} was caught by an except clause of the task, which then "
                f"continued: TaskDeferred may only be caught to be raised again"
            )
        if stream is not None and value is WAITS:
            assert stream.handled is not None, "a stream goes on only after events"
            outcome = StepHandled(stream.handled)
        else:
            if value is not None:
                instance.xcom_push(RETURN_VALUE, value)
            _check_for_maps(operator, instance)
            outcome = StepSucceeded(skips=tuple(sorted(operator.skips)))
    except TaskDeferred as deferral:
        outcome = _deferred(operator, deferral, stream)
    except TaskSkipped as skip:
        outcome = StepSkipped(reason=secrets.hide(storable(_text_of(skip))))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and an asyncio cancellation are the task's failure as well
        outcome = _failed(operator, error)
    appended = instance.take_appended()
    if isinstance(outcome, StepDeferred) and appended is not None:
        # A try that begins anew would append it a second time.
        outcome = _failed(
            operator, AppendMisused("what it has appended would be lost: append in the method that ends the task")
        )
    if isinstance(outcome, StepSucceeded | StepSkipped | StepHandled):
        outcome = msgspec.structs.replace(outcome, appended=appended)
    handled = None if stream is None else stream.handled
    left = None if emissions is None else emissions.take(only_kept=isinstance(outcome, StepFailed))
    return msgspec.structs.replace(outcome, xcoms=instance.take_pushed(), handled=handled, emitted=left)


def _check_for_maps(operator: BaseOperator, instance: TaskInstance) -> None:
    """Raise TypeError if a task is expanded over something that this one leaves, and that is no list or dict.

    So its author sees it in the log of the task that is at fault, and the retry may mend it.
    """
    tasks = {} if operator.dag is None else operator.dag.tasks
    if operator.task_id in tasks and tasks[operator.task_id].is_mapped:
        return  # each instance leaves one of the values
    for name in sorted(operator.downstream_task_ids):
        for output in tasks[name].mapped_over():
            if output.operator.task_id != operator.task_id or output.is_emitted:
                continue
            value = instance.pushed(output.key)
            if value is None and output.key != RETURN_VALUE:
                continue  # an earlier step may have pushed it
            if value is None or count_items(value) is None:
                found = "nothing" if value is None else f"{value[:60].decode(errors='replace')}"
                raise TypeError(
                    f"the task {name!r} is expanded over what this one leaves under {output.key!r}, and it has left "
                    f"{found} there: a list or a dict is needed"
                )


def _resume(operator: BaseOperator, context: Context, resumption: Resumption) -> object:
    kwargs = _checked_kwargs(operator, resumption.next_method, resumption.next_kwargs)
    event = decode_value(resumption.event)
    return operator.resume_execution(resumption.next_method, kwargs, event, context)


def _emissions_of(
    operator: BaseOperator, resumption: Resumption | None, part: StreamPart | None, emitted: int
) -> Emissions | None:
    if not operator.emits:
        return None
    return Emissions(emitted, is_again=resumption is None and part is not None and part.handled > 0)


def _stream_of(operator: BaseOperator, resumption: Resumption, part: StreamPart) -> StreamStep:
    state = resumption.next_kwargs if part.state is None else part.state
    _checked_kwargs(operator, resumption.next_method, state, of_stream=True)
    return StreamStep(operator, resumption.next_method, state, part)


def _checked_kwargs(operator: BaseOperator, method: str, encoded: bytes, *, of_stream: bool = False) -> dict[str, Any]:
    kwargs = decode_value(encoded)
    if not isinstance(kwargs, dict):
        raise Unresumable(f"the kwargs of the resumption are a {type(kwargs).__name__}, not a dict")
    if method != FAIL_METHOD and (problem := operator.method_problem(method, kwargs, of_stream=of_stream)) is not None:
        raise Unresumable(problem)
    return kwargs


def _deferred(operator: BaseOperator, deferral: TaskDeferred, stream: StreamStep | None) -> StepOutcome:
    """Encode a deferral; one that cannot be stored or resumed fails the step."""
    has_stream = deferral.stream is not None
    try:
        if stream is not None and (stream.is_handling or has_stream):
            raise StreamMisused(
                "a task that handles events of a stream cannot defer, because it waits for the next ones: return the "
                "state from the handler; only stream_ended may defer, without stream="
            )
        problem = operator.method_problem(deferral.method_name, deferral.kwargs, of_stream=has_stream)
        if problem is not None:
            raise Unresumable(problem)
        classpath, kwargs = encode_trigger(deferral.trigger)
        next_kwargs = encode_value(deferral.kwargs, where="kwargs", bytes_max=KWARGS_BYTES_MAX)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed(operator, error)
    timeout_s = None if deferral.timeout is None else deferral.timeout.total_seconds()
    return StepDeferred(classpath, kwargs, deferral.method_name, next_kwargs, timeout_s, stream=deferral.stream)


def _failed(operator: BaseOperator, error: BaseException) -> StepFailed:
    text, trace = describe_error(error)
    if isinstance(error, ProtocolError | Unresumable | StreamMisused | AppendMisused):
        # Raised by headgate about a value; the message does not name the task yet.
        dag = "" if operator.dag is None else f"DAG {operator.dag.dag_id!r}, "
        text = f"{dag}task {operator.task_id!r}: {text}"[:ERROR_CHARS_MAX]
    return StepFailed(error=text, traceback=trace, may_retry=not isinstance(error, TaskFailed))


def _text_of(error: Exception) -> str:
    try:
        return str(error)[:ERROR_CHARS_MAX]
    except Exception as exc:  # an author's exception may raise in any method
        return f"{type(error).__name__}, whose text cannot be shown: its __str__ raised {type(exc).__name__}"
