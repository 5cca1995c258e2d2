"""Finding anything by an id or the beginning of a name, from indexes alone.

A database may sort other names between those with the same beginning (PostgreSQL, by its collation): of those that
follow the text `LOOKED_AT_MAX` are looked at, for each kind.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from sqlalchemy import Column, ColumnElement, Select, Subquery, func, select

from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.tables import (
    asset,
    asset_watcher,
    dag,
    dag_run,
    dead_letter,
    signal_key,
    task_instance,
    trigger,
    trigger_event,
)

FOUND_MAX = 10  # of each kind
LOOKED_AT_MAX = 2_000
DAGS_AT_A_TIME = 1_000  # whose runs and tasks are looked at, in the order of their names: no statement takes long

Kind: TypeAlias = Literal["event", "trigger", "dead letter", "watcher", "asset", "DAG", "run", "task", "signal", "key"]


class Found(msgspec.Struct, frozen=True):
    """Something that was found. ``id`` is its number, if it has one; a run has ``dag``, and a task ``dag`` and ``run``.

    A ``key`` is that of an event, and ``id`` is the event.
    """

    kind: Kind
    name: str
    id: int | None = None
    dag: str | None = None
    run: str | None = None


class SearchInspection(Verbs):
    """The search."""

    @reading
    def search(self, tx: Tx, text: str) -> list[Found]:
        """Return what a text may mean, up to `FOUND_MAX` of each kind.

        It is an id, an exact run id, the beginning of the name of a DAG, task, watcher, asset or signal, or the name of
        a watcher and the beginning of a key.
        """
        found = [*_numbered(tx, text), *_keyed(tx, text)]
        found += [Found("DAG", name, id_) for name, id_ in _begin(tx, dag, dag.c.name, text, _is_there(dag))]
        runs, tasks = _runs_and_tasks(tx, text)
        found += runs
        for name, id_ in _begin(tx, asset_watcher, asset_watcher.c.name, text, _is_there(asset_watcher), "trigger_id"):
            found.append(Found("watcher", name, id_))
        found += [Found("asset", name, id_) for name, id_ in _begin(tx, asset, asset.c.name, text)]
        found += [Found("signal", name, id_) for name, id_ in _signals(tx, text)]
        return found + tasks


def _is_there(table: Any) -> ColumnElement[bool]:
    gone: ColumnElement[bool] = table.c.removed_at.is_(None)
    return gone


def _begin(
    tx: Tx, table: Any, name: Column[str], text: str, *where: ColumnElement[bool] | str
) -> list[tuple[str, int]]:
    """Return names that begin with a text, with the id of each; the last of ``where`` may name another column of it."""
    id_ = next((one for one in where if isinstance(one, str)), "id")
    conditions = [one for one in where if not isinstance(one, str)]
    follow = select(name, table.c[id_].label("id")).where(name >= text, *conditions)
    return _first(tx, follow.order_by(name), text)


def _first(tx: Tx, follow: Select[*tuple[Any, ...]], text: str) -> list[tuple[str, int]]:
    some = follow.limit(LOOKED_AT_MAX).subquery()
    name, id_ = list(some.c)
    rows = select(name, id_).where(name.startswith(text, autoescape=True)).order_by(name).limit(FOUND_MAX)
    return [(found, number) for found, number in tx.connection.execute(rows)]


def _numbered(tx: Tx, text: str) -> list[Found]:
    digits = text.removeprefix("trigger-").removeprefix("#")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        return []
    kinds: tuple[tuple[Kind, Any], ...] = (("event", trigger_event), ("trigger", trigger), ("dead letter", dead_letter))
    return [
        Found(kind, digits, int(digits))
        for kind, table in kinds
        if tx.connection.execute(select(table.c.id).where(table.c.id == int(digits))).first() is not None
    ]


def _keyed(tx: Tx, text: str) -> list[Found]:
    watcher, _, key = text.partition(" ")
    if not key.strip():
        return []
    named = select(asset_watcher.c.trigger_id).where(asset_watcher.c.name == watcher)
    trigger_id = tx.connection.execute(named.order_by(asset_watcher.c.id.desc()).limit(1)).scalar_one_or_none()
    if trigger_id is None:
        return []
    key = key.strip()
    of_it = (trigger_event.c.trigger_id == trigger_id, trigger_event.c.key.is_not(None), trigger_event.c.key >= key)
    follow = select(trigger_event.c.key, trigger_event.c.id).where(*of_it)
    rows = _first(tx, follow.order_by(trigger_event.c.key), key)
    return [Found("key", name, id_) for name, id_ in rows]


def _signals(tx: Tx, text: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    namespaces = tx.connection.execute(_NAMESPACES).scalars().all()
    for namespace in namespaces:
        found += _begin(tx, signal_key, signal_key.c.key, text, signal_key.c.namespace == namespace)
    return found[:FOUND_MAX]


_NAMESPACES = (
    select(signal_key.c.namespace)
    .where(signal_key.c.id.in_(select(signal_key.c.id).order_by(signal_key.c.id).limit(LOOKED_AT_MAX)))
    .distinct()
    .limit(FOUND_MAX)
)


def _runs_and_tasks(tx: Tx, text: str) -> tuple[list[Found], list[Found]]:
    """Return the runs of this name of all DAGs, and the tasks whose names begin with it."""
    runs, tasks, beyond = list[Found](), list[Found](), ""
    while len(runs) < FOUND_MAX or len(tasks) < FOUND_MAX:
        some = select(dag.c.id, dag.c.name).where(dag.c.name > beyond).order_by(dag.c.name).limit(DAGS_AT_A_TIME)
        dags = some.subquery()
        last = tx.connection.execute(select(func.max(dags.c.name))).scalar_one()
        if last is None:
            break
        runs += _runs(tx, dags, text, FOUND_MAX - len(runs))
        tasks += _tasks(tx, dags, text, FOUND_MAX - len(tasks))
        beyond = last
    return runs, tasks


def _runs(tx: Tx, dags: Subquery, text: str, limit: int) -> list[Found]:
    rows = (
        select(dags.c.name, dag_run.c.run_id)
        .select_from(dags.join(dag_run, dag_run.c.dag_id == dags.c.id))
        .where(dag_run.c.run_id == text, dag_run.c.removed_at.is_(None))
        .limit(limit)
    )
    return [Found("run", run_id, dag=name) for name, run_id in tx.connection.execute(rows)]


def _tasks(tx: Tx, dags: Subquery, text: str, limit: int) -> list[Found]:
    """Return tasks of the newest run of each DAG."""
    newest = select(func.max(dag_run.c.id)).where(dag_run.c.dag_id == dags.c.id).correlate(dags).scalar_subquery()
    runs = select(dags.c.name, newest.label("id")).subquery()
    rows = (
        select(runs.c.name, dag_run.c.run_id, task_instance.c.task_id)
        .select_from(runs.join(task_instance, task_instance.c.dag_run_id == runs.c.id).join(dag_run))
        .where(task_instance.c.map_index == -1, task_instance.c.task_id >= text)
        .where(task_instance.c.task_id.startswith(text, autoescape=True))
        .limit(limit)
    )
    return [Found("task", task, dag=name, run=run) for name, run, task in tx.connection.execute(rows)]
