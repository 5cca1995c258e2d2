"""The trigger in which a task starts, without a worker, on the wire; an instance of a mapped task with its own value.

The value of an instance is merged into the arguments of its trigger by the supervisor, which runs no code of users and
decodes no value: it takes the encoded value from where the task is expanded over it, and sets it as it is. So only what
is expanded over the items of one list, or over elements, can begin like that, and only if the trigger gets them as they
are.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from headgate.protocol.messages import MALFORMED, WireStruct
from headgate.protocol.messages.maps import Elements, MapSpec, Output, Values
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.messages.signals import SignalWait
from headgate.protocol.messages.task_streams import StreamOptions

OWN_BYTES_MAX: Final = 48 * 1024  # the value of one instance: no more than an element, or an XCom, may have
OF_MAPPED: Final = "which is mapped: only over a list or elements is the value of an instance known without a worker"


class Listed(WireStruct, frozen=True, tag="listed"):
    """The values that stand in the DAG file, each encoded."""

    values: tuple[bytes, ...]


OwnSource: TypeAlias = Output | Elements | Listed


class OwnArguments(WireStruct, frozen=True):
    """The arguments of a start trigger that each instance of a mapped task has of its own: they are its value.

    ``source`` is over what the task is expanded; the instance has the value at its index.
    """

    names: tuple[str, ...]
    source: OwnSource


class StartTrigger(WireStruct, frozen=True):
    """The trigger in which a task starts, without a worker; part of `headgate.protocol.messages.dags.TaskSpec`.

    ``kwargs`` and ``next_kwargs`` are dicts encoded by `headgate.protocol.values`. The task resumes in ``next_method``,
    with ``stream`` for many events (`headgate.protocol.messages.steps.StepDeferred`). With ``signal`` it waits for that
    in the database alone: no runner gets the trigger, and its end is the end of the task. With ``own`` each instance of
    the task has arguments beside ``kwargs``; a mapped task without it begins in the same trigger at each index.
    """

    classpath: str
    kwargs: bytes
    next_method: str
    next_kwargs: bytes
    timeout_s: float | None = None
    stream: StreamOptions | None = None
    signal: SignalWait | None = None
    own: OwnArguments | None = None


def own_problem(start: StartTrigger, map_spec: MapSpec | None, group: str) -> str | None:
    """Return the problem with how the instances of a task begin in their triggers, or None; also if it has none."""
    if map_spec is not None and start.signal is not None:
        return "it is mapped, and its instances cannot wait for a signal without a worker"
    if map_spec is not None and group:
        return f"it is in the mapped group {group!r:.100}"
    own = start.own
    if own is None:
        return None
    if map_spec is None:
        return "it is not mapped, and its trigger has arguments of instances"
    if not own.names or len(set(own.names)) != len(own.names) or not all(map(str.isidentifier, own.names)):
        return f"its instances have {len(own.names)} arguments for their triggers, which must have different names"
    if not _are_named(start.kwargs):
        return "the arguments of its trigger are no dict with names"
    if len(start.kwargs) + len(own.names) * OWN_BYTES_MAX > KWARGS_BYTES_MAX:
        return f"the arguments of its trigger need {len(start.kwargs):,} bytes, and then those of an instance need more"
    if not isinstance(own.source, Listed):
        return None if own.source == map_spec.source else "it is expanded over other values than those of its triggers"
    if map_spec.source != Values(len(own.source.values)):
        return "it is expanded over other values than those of its triggers"
    longest = max(map(len, own.source.values), default=0)
    return None if longest <= OWN_BYTES_MAX else f"a value needs {longest:,} bytes; the limit is {OWN_BYTES_MAX:,}"


def _are_named(kwargs: bytes) -> bool:
    try:
        return "$" not in msgspec.json.decode(kwargs, type=dict[str, msgspec.Raw])  # a dict with other keys is tagged
    except MALFORMED:
        return False
