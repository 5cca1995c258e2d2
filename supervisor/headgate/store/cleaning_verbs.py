"""`CleaningVerbs`: what deletes old rows, each verb one short transaction; as ``store.cleaning``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from headgate.store import cleaning, leases
from headgate.store.cleaning import CLEAN_ROWS_MAX, UNASKED, Cleaned, Kind
from headgate.store.leases import Clock
from headgate.store.task_verbs import Transaction


class _RollBack(Exception):
    """Ends a transaction that was only to be tried."""


class CleaningVerbs:
    """The verbs for what is old and needed by nobody any more."""

    def __init__(self, writing: Transaction, reading: Transaction, clock: Clock | None) -> None:
        self._writing = writing
        self._reading = reading
        self._clock = clock

    def clean(
        self,
        older_than_s: float,
        *,
        kinds: Sequence[Kind] = UNASKED,
        rows_max: int = CLEAN_ROWS_MAX,
        is_tried_only: bool = False,
    ) -> Iterator[tuple[Kind, Cleaned]]:
        """Delete rows older than this by the database's clock; yield after each transaction what it deleted.

        ``is_tried_only``: every transaction is rolled back. What is freed by an earlier kind is not counted then.
        """
        with self._reading() as connection:
            before = leases.read_clock(connection, self._clock) - timedelta(seconds=older_than_s)
        for kind in kinds:
            after_id: int | None = 0
            while after_id is not None:
                cleaned = Cleaned({}, None)
                try:
                    with self._writing() as connection:
                        cleaned = cleaning.clean(connection, kind, before, after_id=after_id, rows_max=rows_max)
                        if is_tried_only:
                            raise _RollBack
                except _RollBack:
                    pass
                yield kind, cleaned
                after_id = cleaned.next_id
