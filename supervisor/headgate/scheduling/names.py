"""`TryName`: one try of a task by the names that users gave."""

from __future__ import annotations

import msgspec


class TryName(msgspec.Struct, frozen=True, order=True, gc=False):
    """One try of one task of one run; the first try is 1. ``dag_id`` is the name that the author gave."""

    dag_id: str
    run_id: str
    task_id: str
    try_number: int

    @property
    def task(self) -> str:
        """The task without its try, as text for people."""
        return f"{self.dag_id}.{self.run_id}.{self.task_id}"
