"""The graphs of DAGs, decoded once for as long as their specs do not change, and the DAGs that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Executable, Integer, Text, bindparam, select, true
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.dags import DagSpec, TaskSpec, decode_dag
from headgate.protocol.messages.maps import Worklist
from headgate.scheduling.planning import Graph
from headgate.store.db.prepared import Cursor, Prepared
from headgate.store.db.transaction import Database, Tx
from headgate.store.db.verbs import Verbs
from headgate.store.errors import NoSuchRow, SpecUnreadable
from headgate.store.ids import DagRowId, DagRunId
from headgate.store.tables import dag, dag_run

GRAPHS_MAX = 200  # the DAGs read most recently: a spec of 100 tasks takes some 100 kB decoded
UNREADABLE_MAX = 20_000  # unreadable DAGs that are remembered, and left out of later queries

_SPEC = Prepared(select(dag.c.name, dag.c.spec, dag.c.spec_hash).where(dag.c.id == bindparam("of_id")))


def read_spec(name: str, data: bytes) -> DagSpec:
    """Decode the stored spec of the DAG ``name``. Raises `SpecUnreadable`."""
    try:
        return decode_dag(data)
    except ProtocolError as error:
        raise SpecUnreadable(name, str(error)) from error


# --- the tasks of one run ------------------------------------------------------------------------


def specs_of_run(tx: Tx, run: DagRunId) -> dict[str, TaskSpec]:
    """Return the tasks of the DAG of a run. Raises `NoSuchRow` and `SpecUnreadable`."""
    row = tx.connection.execute(select(dag.c.name, dag.c.spec).join(dag_run).where(dag_run.c.id == run)).first()
    if row is None:
        raise NoSuchRow("run", str(run))
    return {task.task_id: task for task in read_spec(row.name, row.spec).tasks}


def beside(specs: Mapping[str, TaskSpec], task_id: str) -> set[str]:
    """Return the tasks of the same mapped group; of a task in none, itself."""
    group = specs[task_id].group if task_id in specs else ""
    return {task_id, *(name for name, task in specs.items() if group and task.group == group)}


def gate(specs: Mapping[str, TaskSpec], task_id: str) -> str:
    """Return the gate of the loop that a task is in; '' if it is in none."""
    worklist = _worklist_of(specs, task_id)
    return worklist.task_id if worklist is not None and worklist.is_loop else ""


def worklists(specs: Mapping[str, TaskSpec], names: Iterable[str]) -> tuple[str, ...]:
    """Return the tasks that are expanded over a worklist to which instances of these tasks may append."""
    found = [beside(specs, name) for name in names if _worklist_of(specs, name) is not None]
    return tuple(sorted(set().union(*found)))


def _worklist_of(specs: Mapping[str, TaskSpec], task_id: str) -> Worklist | None:
    """Return the worklist over which a task is expanded, None if it is over none."""
    spec = specs[task_id].map if task_id in specs else None
    return spec.source if spec is not None and isinstance(spec.source, Worklist) else None


# --- statements that leave out unreadable DAGs ---------------------------------------------------


class _JsonIds(FunctionElement[int]):
    """The integers of a JSON array as a subquery: one parameter and one text, however many there are."""

    type = Integer()
    inherit_cache = True


@compiles(_JsonIds, "postgresql")
def _json_ids_postgresql(element: _JsonIds, compiler: SQLCompiler, **kw: Any) -> str:
    array = compiler.process(element.clauses, **kw)
    return f"(SELECT value::bigint FROM json_array_elements_text(CAST({array} AS json)))"


@compiles(_JsonIds, "sqlite")
def _json_ids_sqlite(element: _JsonIds, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **kw)}))"


def _is_one_of_ids(operator: str) -> ColumnElement[bool]:
    ids = _JsonIds(bindparam("unreadable", type_=Text()))
    condition: ColumnElement[bool] = dag.c.id.bool_op(operator)(ids)
    return condition


class ReadableOnly:
    """A statement in two forms: for all DAGs, and for those that are not known to be unreadable.

    ``build`` makes it from a condition on the table ``dag``.
    """

    def __init__(self, build: Callable[[ColumnElement[bool]], Executable]) -> None:
        self.for_all = Prepared(build(true()))
        self._for_readable = Prepared(build(_is_one_of_ids("NOT IN")))

    def run(self, tx: Tx, unreadable: str | None, **parameters: Any) -> Cursor:
        """Execute it; ``unreadable`` is what `Graphs.unreadable` returned."""
        if unreadable is None:
            return self.for_all.run(tx.connection, **parameters)
        return self._for_readable.run(tx.connection, unreadable=unreadable, **parameters)


_HASHES = Prepared(select(dag.c.id, dag.c.spec_hash).where(_is_one_of_ids("IN")))


# --- the cache -----------------------------------------------------------------------------------


class Graphs:
    """The graphs of the DAGs that were read most recently, and the ids of DAGs that cannot be read."""

    def __init__(self) -> None:
        self._graphs: dict[int, tuple[str, Graph]] = {}
        self._unreadable: dict[int, tuple[str, str, str]] = {}  # by id: hash of the spec, name, reason

    def unreadable(self, tx: Tx) -> str | None:
        """Return the ids of the DAGs that are still unreadable, for `ReadableOnly`; None if there are none.

        Nothing of these DAGs begins here, and their dates and dirty flags are left as they are: another supervisor,
        which may be able to read them, depends on them.
        """
        if not self._unreadable:
            return None
        hashes = dict(_HASHES.run(tx.connection, unreadable=self._ids()).fetchall())
        self._unreadable = {id_: found for id_, found in self._unreadable.items() if hashes.get(id_) == found[0]}
        return self._ids() if self._unreadable else None

    def _ids(self) -> str:
        return json.dumps(list(self._unreadable))

    def get(self, tx: Tx, dag_row: DagRowId, spec_hash: str) -> Graph:
        """Return the graph of a DAG, from the cache if that has the spec with this hash.

        Raises `SpecUnreadable` if a newer version has stored a spec that this version cannot decode.
        """
        unreadable = self._unreadable.get(dag_row)
        if unreadable is not None and unreadable[0] == spec_hash:
            raise SpecUnreadable(*unreadable[1:])
        known = self._graphs.pop(dag_row, None)
        if known is None or known[0] != spec_hash:
            name, spec, stored_hash = _SPEC.run(tx.connection, of_id=dag_row).fetchone()
            try:
                known = stored_hash, Graph(read_spec(name, bytes(spec)))
            except SpecUnreadable as error:
                if len(self._unreadable) < UNREADABLE_MAX:
                    self._unreadable[dag_row] = stored_hash, error.dag, error.reason
                raise
            if len(self._graphs) >= GRAPHS_MAX:
                del self._graphs[next(iter(self._graphs))]  # the least recently used one
        self._graphs[dag_row] = known
        return known[1]

    def is_readable(self, tx: Tx, dag_row: DagRowId, spec_hash: str) -> bool:
        """Whether `get` returns a graph."""
        try:
            self.get(tx, dag_row, spec_hash)
        except SpecUnreadable:
            return False
        return True


class GraphVerbs(Verbs):
    """Base of verbs that read graphs; all of a store's share one cache."""

    def __init__(self, database: Database, graphs: Graphs) -> None:
        super().__init__(database)
        self.graphs = graphs
