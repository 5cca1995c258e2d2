"""Outcomes of one step of a task: a step is one call of an operator's method, from its start or from a resumption.

The worker process that made the call reports one of these five; the supervisor stores it. The worker has encoded every
value in them by `headgate.protocol.values`, so that an author whose value cannot be encoded sees it there. ``emitted``
are the elements that the step has emitted and not sent before, by `headgate.protocol.messages.queries.EmitElements`.
``signals`` are sent in the transaction that stores the outcome; a step that fails sends none.
What a step has ``appended`` counts if it goes well: a try that fails appends nothing.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.signals import SignalSend
from headgate.protocol.messages.task_streams import Handled, StreamOptions

EXECUTION_TIMEOUT_OVER: Final = "its execution_timeout is over"  # the error of a try that has no time left


class XCom(WireStruct, frozen=True):
    """One value that a task pushes for others; ``value`` is encoded, at most ``XCOM_BYTES_MAX`` bytes."""

    key: str
    value: bytes


class Emitted(WireStruct, frozen=True):
    """Encoded elements that a task emits, at the positions from ``first`` on, counted over the steps of its try.

    ``keys`` has one for each, 32 bytes, or is empty. An element with a key that is there already is the one that is
    there; then ``first`` says nothing.
    """

    first: int
    values: tuple[bytes, ...]
    keys: tuple[bytes, ...] = ()


class Appended(WireStruct, frozen=True):
    """Encoded values that an instance appends to what the task ``task_id`` of its run is expanded over.

    ``keys`` has one for each value, 32 bytes or None: a value whose key is there already is not appended again. There
    are ``length_max`` appended values at most.
    """

    task_id: str
    values: tuple[bytes, ...]
    keys: tuple[bytes | None, ...]
    length_max: int


class StepSucceeded(WireStruct, frozen=True, tag="succeeded"):
    """The task succeeded. ``skips`` are downstream tasks to be skipped in this run."""

    xcoms: tuple[XCom, ...] = ()
    skips: tuple[str, ...] = ()
    handled: Handled | None = None
    emitted: Emitted | None = None
    signals: tuple[SignalSend, ...] = ()
    appended: Appended | None = None


class StepSkipped(WireStruct, frozen=True, tag="skipped"):
    """The task skipped itself."""

    reason: str = ""
    xcoms: tuple[XCom, ...] = ()
    handled: Handled | None = None
    emitted: Emitted | None = None
    signals: tuple[SignalSend, ...] = ()
    appended: Appended | None = None


class StepFailed(WireStruct, frozen=True, tag="failed"):
    """The try failed. ``may_retry`` is False if another try would fail as well; then the task is not retried."""

    error: str
    traceback: str = ""
    may_retry: bool = True
    xcoms: tuple[XCom, ...] = ()
    handled: Handled | None = None
    emitted: Emitted | None = None


class StepDeferred(WireStruct, frozen=True, tag="deferred"):
    """The task waits for a trigger, and resumes in ``next_method(context, event=..., **next_kwargs)``.

    ``kwargs`` and ``next_kwargs`` are encoded dicts. ``timeout_s`` starts when the deferral is stored. With ``stream``
    the task takes many events of the trigger: ``next_method`` is called for them until the stream is over, and
    ``timeout_s`` starts again with each wait.
    """

    classpath: str
    kwargs: bytes
    next_method: str
    next_kwargs: bytes
    timeout_s: float | None = None
    xcoms: tuple[XCom, ...] = ()
    handled: Handled | None = None
    stream: StreamOptions | None = None
    emitted: Emitted | None = None
    signals: tuple[SignalSend, ...] = ()


class StepHandled(WireStruct, frozen=True, tag="handled"):
    """The step has handled all events that it got, and the stream goes on: the task waits for the next ones."""

    handled: Handled
    xcoms: tuple[XCom, ...] = ()
    emitted: Emitted | None = None
    signals: tuple[SignalSend, ...] = ()
    appended: Appended | None = None


StepOutcome: TypeAlias = StepSucceeded | StepSkipped | StepFailed | StepDeferred | StepHandled


class StepNotBegun(WireStruct, frozen=True, tag="not_begun"):
    """Nothing of the step has run, because of its DAG file, which is away or being edited: its try goes on later."""

    reason: str
