"""`CleaningVerbs`: what deletes old rows, each verb one short transaction; as ``store.cleaning``."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from headgate.store import cleaning
from headgate.store.cleaning import CLEAN_AGE_MIN_S, CLEAN_ROWS_MAX, IN_DOUBT_MAX_S, UNASKED, Cleaned, Kind
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs
from headgate.store.triggers import leases


class _RollBack(Exception):
    """Ends a transaction that was only to be tried."""


class CleaningVerbs(Verbs):
    """The verbs for what is old and needed by nobody any more."""

    def clean(
        self,
        older_than_s: float,
        *,
        kinds: Sequence[Kind] = UNASKED,
        rows_max: int = CLEAN_ROWS_MAX,
        is_tried_only: bool = False,
    ) -> Iterator[tuple[Kind, Cleaned]]:
        """Delete rows older than this by the database's clock; yield after each transaction what it deleted.

        Supervisors that have been silent for about as long are fenced first: what they have stored without hearing of
        it they would store again, once it is deleted. One that died need not have been fenced by anybody, so it would
        not do to leave for them what is younger than their silence.

        ``is_tried_only``: every transaction is rolled back. What is freed by an earlier kind is not counted then.
        """
        silence_max_s = max(older_than_s, CLEAN_AGE_MIN_S) - IN_DOUBT_MAX_S
        with self._trying(is_tried_only) as tx:
            fenced = leases.fence_silent(tx, silence_max_s)
            if fenced:
                tx.notify()
        if fenced:
            yield "triggerers", Cleaned({}, 0, fenced=tuple(fenced))
        before = tx.now - timedelta(seconds=older_than_s)
        for kind in kinds:
            after_id: int | None = 0
            while after_id is not None:
                with self._trying(is_tried_only) as tx:
                    cleaned = cleaning.clean(tx.connection, kind, before, after_id=after_id, rows_max=rows_max)
                yield kind, cleaned
                after_id = cleaned.next_id

    @contextmanager
    def _trying(self, is_tried_only: bool) -> Generator[Tx]:
        try:
            with self.database.writing() as tx:
                yield tx
                if is_tried_only:
                    raise _RollBack
        except _RollBack:
            pass
