"""A mapped task as a whole, from the state of its own row and those of its instances.

Its own row is in ``none`` until all of its instances are made. Then it has succeeded, which says nothing of how they
end. Instances that were removed, because it has fewer values now, are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, assert_never

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.maps import Batch, Concat, Elements, Output, Product, Source, Values, Worklist, Zip
from headgate.scheduling.states import TERMINAL
from headgate.scheduling.words import counted

_S = TaskState
RETURN_VALUE: Final = "return_value"  # the key of what a task returns
# A task that has an unfinished row has not ended, and the nearest of them to the end says where it is. Then the worst
# end counts; one that was skipped as a whole is skipped.
_FIRST: Final = (
    *(_S.RUNNING, _S.RESTARTING, _S.DEFERRED, _S.UP_FOR_RETRY, _S.SCHEDULED, _S.NONE),
    *(_S.FAILED, _S.UPSTREAM_FAILED, _S.SUCCESS, _S.SKIPPED, _S.REMOVED),
)
_ORDER: Final = {state: number for number, state in enumerate(_FIRST)}
_TOLD: Final = (_S.SUCCESS, _S.FAILED, _S.UPSTREAM_FAILED, _S.SKIPPED, _S.REMOVED)
_REMOVED: Final = frozenset({_S.REMOVED})
_SUCCESS: Final = frozenset({_S.SUCCESS})


def together(own: frozenset[TaskState], instances: frozenset[TaskState]) -> frozenset[TaskState]:
    """Return the states of a mapped task as trigger rules see them; ``own`` is that of its own row, if it has one."""
    present = instances - _REMOVED
    return (present or instances) | (own - _SUCCESS) if present or not own else own


def state_of(some: Iterable[TaskState]) -> TaskState:
    """Return the state of a task whose rows are in these states, as trigger rules see them; there is at least one."""
    return min(some, key=_ORDER.__getitem__)


def state_with(own: TaskState, instances: Iterable[TaskState]) -> TaskState:
    """Return the one state of a mapped task whose own row, and whose instances, are in these states."""
    return state_of(together(frozenset({own}), frozenset(instances)))


def source_text(source: Source) -> str:
    """Return over what a task is expanded, as text: ``days``, ``days x 3 values``, ``a worklist``."""
    match source:
        case Values(length):
            return counted(length, "value")
        case Output(task_id, key):
            return task_id if key == RETURN_VALUE else f"{task_id} ({key})"
        case Elements(task_id):
            return f"elements of {task_id}"
        case Worklist(length_max=length_max, is_loop=True):
            return f"a loop, at most {length_max:,} iterations"
        case Worklist(given=given, length_max=length_max):
            return f"a worklist of {given:,}, at most {length_max:,}"
        case Zip(parts=parts):
            return f"zip({', '.join(map(source_text, parts))})"
        case Concat(parts):
            return " + ".join(map(source_text, parts))
        case Product(parts):
            return " x ".join(map(source_text, parts))
        case Batch(part, count):
            return f"batches of {count:,} of {source_text(part)}"
        case _:
            assert_never(source)


def counts_text(counts: Mapping[str, int], length: int | None) -> str:
    """Return in one line how many instances are in which state, and of how many: ``9 success, 2 open of 12``.

    ``length`` is the number that there will be, None if it is not known.
    """
    ended = [f"{counts[state]:,} {state.value}" for state in _TOLD if counts.get(state)]
    unfinished = sum(count for state, count in counts.items() if state not in TERMINAL)
    told = ", ".join([*ended, *([f"{unfinished:,} open"] if unfinished else [])])
    return " of ".join(filter(None, (told or "0", "" if length is None else f"{length:,}")))
