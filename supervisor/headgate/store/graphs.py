"""The specs of DAGs as the scheduler reads them, decoded once for as long as they stay what they are."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, bindparam, or_, select, true

from headgate.protocol.dags import DagSpec, decode_dag
from headgate.protocol.errors import ProtocolError
from headgate.scheduling.planning import Graph
from headgate.store.errors import SpecUnreadable
from headgate.store.prepared import Prepared
from headgate.store.tables import dag

GRAPHS_MAX = 200  # of the DAGs looked at last: a spec of 100 tasks takes some 100 kB decoded
UNREADABLE_MAX = 100  # remembered: each is two conditions of a statement

_SPEC = Prepared(select(dag.c.name, dag.c.spec, dag.c.spec_hash).where(dag.c.id == bindparam("of_id")))


def read_spec(name: str, data: bytes) -> DagSpec:
    """Return what is stored of the DAG ``name``. Raises `SpecUnreadable`."""
    try:
        return decode_dag(data)
    except ProtocolError as error:
        raise SpecUnreadable(name, str(error)) from error


class Graphs:
    """The graphs of the DAGs that were looked at last."""

    def __init__(self) -> None:
        self._graphs: dict[int, tuple[str, Graph]] = {}
        self._unreadable: dict[int, tuple[str, SpecUnreadable]] = {}

    def readable(self) -> ColumnElement[bool]:
        """Return what holds for the rows of all DAGs but those that are known to be unreadable.

        Nothing is done about these, not even what would be put right later: another supervisor may be able to read
        them, and goes by the marks and dates of their rows.
        """
        return and_(
            true(),
            *(or_(dag.c.id != id_, dag.c.spec_hash != hash_) for id_, (hash_, _) in self._unreadable.items()),
        )

    @property
    def has_unreadable(self) -> bool:
        """Whether any is known to be."""
        return bool(self._unreadable)

    def get(self, connection: Connection, dag_id: int, spec_hash: str) -> Graph:
        """Return the graph of a DAG; ``spec_hash`` says whether the one that is known is still right.

        Raises `SpecUnreadable` for one that a newer version has stored, and this one cannot read.
        """
        unreadable = self._unreadable.get(dag_id)
        if unreadable is not None and unreadable[0] == spec_hash:
            raise unreadable[1]
        known = self._graphs.pop(dag_id, None)
        if known is None or known[0] != spec_hash:
            name, spec, stored_hash = _SPEC.run(connection, of_id=dag_id).fetchone()
            try:
                known = stored_hash, Graph(read_spec(name, bytes(spec)))
            except SpecUnreadable as error:
                self._note_unreadable(dag_id, stored_hash, error)
                raise
            self._unreadable.pop(dag_id, None)
            if len(self._graphs) >= GRAPHS_MAX:
                del self._graphs[next(iter(self._graphs))]  # the one that was asked for the longest time ago
        self._graphs[dag_id] = known
        return known[1]

    def _note_unreadable(self, dag_id: int, spec_hash: str, error: SpecUnreadable) -> None:
        if len(self._unreadable) >= UNREADABLE_MAX:
            del self._unreadable[next(iter(self._unreadable))]
        self._unreadable[dag_id] = spec_hash, error
