"""The black box: notes, in memory that the supervisor reads after a death, whose code this process is executing.

Each step of a task of a trigger writes the trigger's record, which is prepared, and everything else erases it. A
trigger is recognised by the names in the context of the task, so tasks that it has started count as its own; threads
do not.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager

import trio

from headgate.child.logs import SpecNames, trigger_names
from headgate.protocol.black_box import BOX_BYTES, begin_record, end_record


class BlackBox(trio.abc.Instrument):
    """The box of this process. Without a ``memory`` to share it has one of its own, which nothing reads."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(BOX_BYTES) if memory is None else memory
        self._is_empty = False
        self._clear()

    @classmethod
    def shared(cls, descriptor: int) -> BlackBox:
        """Return the box in the memory of a descriptor, and close that."""
        try:
            return cls(mmap.mmap(descriptor, BOX_BYTES))
        finally:
            os.close(descriptor)

    @contextmanager
    def executing(self, names: SpecNames) -> Generator[None]:
        """Note that the code of a trigger is executed in the block, outside its own tasks."""
        record = _first_record(names)
        self._memory[: len(record)] = record
        try:
            yield
        finally:
            self._clear()

    def messages_of(self, names: SpecNames) -> Callable[[str | None], None]:
        """Return the function that notes, in a step of a trigger, the key of the message that it is given, or None."""
        begin, memory = begin_record(names.spec.trigger_run_id), self._memory

        def note(key: str | None) -> None:
            # For every message: so no record is made of parts that stay the same.
            record = names.record = begin + end_record(key)
            memory[: len(record)] = record
            self._is_empty = False

        return note

    # --- hooks of trio, in each step of the loop: every operation counts -----------------------------

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Note whose step begins."""
        names = task.context.get(trigger_names)
        if type(names) is SpecNames:
            record = names.record or _first_record(names)
            self._memory[: len(record)] = record
            self._is_empty = False
        elif not self._is_empty:
            self._clear()

    def before_io_wait(self, timeout: float) -> None:
        """Note that no step is executed."""
        if not self._is_empty:
            self._clear()

    # --- inside -----------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._memory[0] = 0
        self._is_empty = True


def _first_record(names: SpecNames) -> bytes:
    names.record = begin_record(names.spec.trigger_run_id) + end_record(None)
    return names.record
