"""The specs of DAGs as the scheduler reads them, decoded once for as long as they stay what they are."""

from __future__ import annotations

from sqlalchemy import Connection, TextClause, bindparam, select, text

from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.dags import DagSpec, decode_dag
from headgate.scheduling.planning import Graph
from headgate.store.db.prepared import Prepared
from headgate.store.errors import SpecUnreadable
from headgate.store.tables import dag

GRAPHS_MAX = 200  # of the DAGs looked at last: a spec of 100 tasks takes some 100 kB decoded
UNREADABLE_MAX = 20_000  # DAGs that are remembered as such, and left out of what is asked for

_SPEC = Prepared(select(dag.c.name, dag.c.spec, dag.c.spec_hash).where(dag.c.id == bindparam("of_id")))


def read_spec(name: str, data: bytes) -> DagSpec:
    """Return what is stored of the DAG ``name``. Raises `SpecUnreadable`."""
    try:
        return decode_dag(data)
    except ProtocolError as error:
        raise SpecUnreadable(name, str(error)) from error


class Graphs:
    """The graphs of the DAGs that were looked at last, and which DAGs cannot be read."""

    def __init__(self) -> None:
        self._graphs: dict[int, tuple[str, Graph]] = {}
        self._unreadable: dict[int, tuple[str, str, str]] = {}  # by id: hash of the spec, name, reason

    def readable(self, connection: Connection) -> TextClause | None:
        """Return what holds for the rows of all DAGs but those that are known to be unreadable; None for none.

        Nothing is begun of these, and neither marks nor dates of theirs are touched: another supervisor may be able to
        read them, and goes by what stands there.
        """
        if not self._unreadable:
            return None
        now = Prepared(select(dag.c.id, dag.c.spec_hash).where(self._known()))
        hashes = dict(now.run(connection).fetchall())
        self._unreadable = {id_: told for id_, told in self._unreadable.items() if hashes.get(id_) == told[0]}
        return text(f"NOT ({self._known()})") if self._unreadable else None

    def _known(self) -> TextClause:
        return text(f"dag.id IN ({', '.join(map(str, self._unreadable))})")

    def get(self, connection: Connection, dag_id: int, spec_hash: str) -> Graph:
        """Return the graph of a DAG; ``spec_hash`` says whether the one that is known is still right.

        Raises `SpecUnreadable` for one that a newer version has stored, and this one cannot read.
        """
        unreadable = self._unreadable.get(dag_id)
        if unreadable is not None and unreadable[0] == spec_hash:
            raise SpecUnreadable(*unreadable[1:])
        known = self._graphs.pop(dag_id, None)
        if known is None or known[0] != spec_hash:
            name, spec, stored_hash = _SPEC.run(connection, of_id=dag_id).fetchone()
            try:
                known = stored_hash, Graph(read_spec(name, bytes(spec)))
            except SpecUnreadable as error:
                if len(self._unreadable) < UNREADABLE_MAX:
                    self._unreadable[dag_id] = stored_hash, error.dag, error.reason
                raise
            if len(self._graphs) >= GRAPHS_MAX:
                del self._graphs[next(iter(self._graphs))]  # the one that was asked for the longest time ago
        self._graphs[dag_id] = known
        return known[1]

    def is_readable(self, connection: Connection, dag_id: int, spec_hash: str) -> bool:
        """Whether `get` returns a graph."""
        try:
            self.get(connection, dag_id, spec_hash)
        except SpecUnreadable:
            return False
        return True
