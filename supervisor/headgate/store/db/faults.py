"""One of many has failed: which it is, and how the others go on without it.

A verb of the scheduler handles many runs, tasks or rules in one transaction. An error that nobody foresaw, in one of
them, rolls all of them back, and the next transaction would meet it again. So the verb says which one it was::

    for row in tx.passed_over.read("task", limit, partial(_DUE.run, tx.connection, now=now)):
        with blaming("task", row[0]):
            ...

`blaming` raises `ItemFailed`. Who calls the verb decides how long that one is passed over (`PassedOver`), and calls it
again: nothing was written, and the others are handled now. It is known to this process alone. Another supervisor, maybe
of another version, meets the error for itself, or does not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from headgate.store.db import driver_errors
from headgate.store.db.prepared import Cursor
from headgate.store.errors import BLAMELESS, ItemFailed, RowsRefused, SpecUnreadable, described

Kind: TypeAlias = Literal["run", "task", "rule", "DAG", "trigger"]


@contextmanager
def blaming(kind: Kind, id_: int) -> Generator[None]:
    """Raise `ItemFailed` for any error of the block that this row may be to blame for; the others pass."""
    try:
        yield
    except (*BLAMELESS, SpecUnreadable, ItemFailed):
        raise
    except driver_errors.translated() as error:
        refused = driver_errors.translate(error, database="")
        if not isinstance(refused, RowsRefused):
            raise  # the transaction translates it
        raise ItemFailed(kind, id_, refused.reason) from refused  # the driver's error may quote the row
    except Exception as error:
        raise ItemFailed(kind, id_, described(error)) from error


class PassedOver:
    """The rows that are passed over at the moment, by their kinds and ids. Whoever calls the verbs fills it."""

    def __init__(self) -> None:
        self._ids: dict[str, set[int]] = {}

    def add(self, kind: str, id_: int) -> None:
        """Pass this one over from now on."""
        self._ids.setdefault(kind, set()).add(id_)

    def remove(self, kind: str, id_: int) -> None:
        """Handle this one again."""
        self._ids[kind].discard(id_)

    def has(self, kind: Kind, id_: int | None) -> bool:
        """Whether this one is passed over."""
        return id_ in self._ids.get(kind, ())

    def read(self, kind: Kind, limit: int, run: Callable[..., Cursor]) -> list[tuple[Any, ...]]:
        """Return the first ``limit`` rows that are not passed over; their ids are the first column.

        ``run`` executes the statement with the ``limit`` that it is given: as many more as may have to be left out.
        """
        ids = self._ids.get(kind, ())
        return [row for row in run(limit=limit + len(ids)).fetchall() if row[0] not in ids][:limit]
