"""The records of a history of tasks; `tests.proof.history.task_history` judges it.

Some are seen by whoever looks from outside. The others are the journal, one file that workers and triggers append to:
each line is written before the act that it tells of, so that what stands in the file survives a SIGKILL, and a cause
stands above its effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

import msgspec

from headgate.testing.crash import history
from headgate.testing.crash.history import encode as encode

# How a step ends, or what a trigger fires. ``failed``: the next try follows; ``failed for good``: none does.
StepEnd = Literal["success", "skipped", "failed", "failed for good"]
Fires = Literal["event", "success", "skipped", "failed", "error"]


class _Record(msgspec.Struct, frozen=True, tag_field="what", omit_defaults=True):
    """What all records have in common. ``at`` is any text that helps a reader: a time, a cell of a matrix."""


class Made(_Record, frozen=True, tag="made"):
    """A run was made that has this task."""

    task: str
    at: str = ""


class Began(_Record, frozen=True, tag="began"):
    """The journal of a worker: the author's code begins a step.

    ``execution`` names this one call, and ``pid`` its process. ``number`` counts the steps of a try from 0. ``after``
    is the deferral that the step's own kwargs name, ``event`` the one that the event names; both are empty for
    ``execute``, and where the task is resumed to fail. ``is_resumed``: it goes on after a deferral, named or not.
    """

    task: str
    try_number: int
    execution: str
    pid: int
    number: int = 0
    after: str = ""
    event: str = ""
    is_resumed: bool = False
    at: str = ""


class Deferred(_Record, frozen=True, tag="deferred"):
    """The journal of a worker: the step is about to defer. Whether that was stored is another matter."""

    execution: str
    deferral: str
    at: str = ""


class Ended(_Record, frozen=True, tag="ended"):
    """The journal of a worker: the step is about to return, or to raise."""

    execution: str
    how: StepEnd
    at: str = ""


class Waited(_Record, frozen=True, tag="waited"):
    """The journal of a trigger: it runs for this deferral, which is stored therefore."""

    deferral: str
    at: str = ""


class Fired(_Record, frozen=True, tag="fired"):
    """The journal of a trigger: it is about to fire, or to fail (``error``). Once a run, and it may run often."""

    deferral: str
    fires: Fires = "event"
    at: str = ""


class Fault(_Record, frozen=True, tag="fault"):
    """Something was done to the processes that may cost tries: ``pid`` is the worker it was done to, 0 is all."""

    at: str
    pid: int = 0


class Row(_Record, frozen=True, tag="row"):
    """A task as the database has it. ``xcoms`` are the values it has left, by key.

    ``is_stranded``: it is deferred on a trigger that is over, and has no time limit.
    """

    task: str
    state: str
    try_number: int
    xcoms: Mapping[str, Any] = {}
    is_stranded: bool = False
    at: str = ""


class LeftBehind(_Record, frozen=True, tag="left_behind"):
    """A trigger that nothing waits for, seen by one statement: it is open, or at rest somebody has it yet."""

    trigger: str
    at: str = ""


class Looked(_Record, frozen=True, tag="looked"):
    """A look is complete. ``at_rest``: nothing will change, and whatever was begun should have ended."""

    at: str = ""
    at_rest: bool = False


Record = Made | Began | Deferred | Ended | Waited | Fired | Fault | Row | LeftBehind | Looked

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


# Yields the records of whole lines; a last line that a kill tore off is left out. Raises `ValueError`.
decode_lines = partial(history.decode_records, _decoder)


def name_of(task: str, index: int) -> str:
    """Return the name of an instance of a mapped task, or, for the index -1, of the task itself."""
    return task if index < 0 else f"{task}[{index}]"


# --- what tasks leave in the database ---


def xcom_key(number: int) -> str:
    """Return the key under which the step of this number leaves the name of its execution."""
    return f"step_{number}"


XCOM_OF_TRIGGER: Final = "of_trigger"  # the key under which a trigger that ends its task leaves the deferral's name
