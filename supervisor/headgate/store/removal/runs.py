"""Deletion of runs with all that belongs to them: as many as fit one transaction, or a piece of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Column, ColumnElement, and_, delete, func, or_, select, update

from headgate.store.access.tables import ONE
from headgate.store.db.bulk import chunks
from headgate.store.db.transaction import Tx
from headgate.store.ids import Epoch
from headgate.store.tables import (
    dag,
    dag_run,
    dag_run_event,
    dag_signal,
    element,
    emitter,
    signal_start,
    signal_wait,
    task_instance,
    task_span,
    task_stream,
    xcom,
)

# Rows read per transaction, and tasks or elements of runs deleted: that takes some tens of milliseconds, and others can
# write between two.
CLEAN_ROWS_MAX = 1000
# Rows that belong to them, as XComs, rules and the events that a run was created for. One task goes with all that it
# has.
DEPENDENT_ROWS_MAX = 10_000


class Cleaned(msgspec.Struct, frozen=True):
    """Result of one batch: the number of rows deleted by table, and the deleted runs, as (dag_id, run_id).

    ``next_id``: the next batch begins after this id; None after the last. ``fenced``: epochs that lost their leases.
    """

    rows: dict[str, int]
    next_id: int | None
    runs: tuple[tuple[str, str], ...] = ()
    fenced: tuple[Epoch, ...] = ()


def delete_rows(tx: Tx, column: Column[Any], ids: Sequence[int]) -> int:
    """Delete the rows with these ids in a column of their table; return how many there were."""
    return sum(tx.connection.execute(delete(column.table).where(column.in_(part))).rowcount for part in chunks(ids))


# The rows that belong to a task, in the order in which they are deleted, before the task itself.
_OF_TASK = (xcom, element, emitter, task_stream, signal_wait, task_span)
_OF_RUN = (dag_run_event, signal_start, dag_signal)  # and of a run, as are its rules


def _rules_of(runs: Sequence[int]) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that a rule is one of these runs themselves."""
    return signal_wait.c.dag_run_id.in_(runs), signal_wait.c.rule.is_not(None), signal_wait.c.task_instance_id.is_(None)


def remove_runs(tx: Tx, ids: Sequence[int]) -> Cleaned:
    """Delete runs with all their tasks. The runs are locked already; a task that is locked by others keeps its run.

    It deletes as many runs as have `CLEAN_ROWS_MAX` tasks in total, and `DEPENDENT_ROWS_MAX` other rows. If the first
    has more, or as many elements, it deletes a piece of that one.
    """
    chosen, tasks = _small_runs(tx, ids)
    if not chosen:
        return _remove_piece(tx, ids[0])
    locked = set(_lock_tasks(tx, [task_id for task_ids in tasks.values() for task_id in task_ids]))
    whole = [run for run in chosen if locked.issuperset(tasks[run])]
    names = _names_of(tx, whole)
    rows = _delete_tasks(tx, [task_id for run in whole for task_id in tasks[run]])
    for table in _OF_RUN:
        rows[str(table.name)] = delete_rows(tx, table.c.dag_run_id, whole)
    for some in chunks(whole):
        rows["signal_wait"] += tx.connection.execute(delete(signal_wait).where(*_rules_of(some))).rowcount
    rows["dag_run"] = delete_rows(tx, dag_run.c.id, whole)
    return Cleaned(rows, chosen[-1], names)


def _small_runs(tx: Tx, ids: Sequence[int]) -> tuple[list[int], dict[int, list[int]]]:
    """Return the first of these runs that go in one transaction, and their tasks; none if the first is too large."""
    of_runs = select(task_instance.c.id, task_instance.c.dag_run_id).where(task_instance.c.dag_run_id.in_(ids))
    rows = tx.connection.execute(of_runs.order_by(task_instance.c.dag_run_id).limit(CLEAN_ROWS_MAX + 1)).all()
    is_cut = len(rows) > CLEAN_ROWS_MAX
    chosen = [run for run in ids if not is_cut or run < rows[-1].dag_run_id]
    tasks: dict[int, list[int]] = {run: [] for run in chosen}
    for task_id, run in rows:
        if run in tasks:
            tasks[run].append(task_id)
    while chosen and _has_too_much(tx, chosen, [task_id for run in chosen for task_id in tasks[run]]):
        chosen = chosen[: len(chosen) // 2]
    return chosen, tasks


def _has_too_much(tx: Tx, runs: Sequence[int], tasks: Sequence[int]) -> bool:
    """Whether these runs and tasks have more rows than go with them in one transaction."""
    if len(_first_elements(tx, tasks, limit=CLEAN_ROWS_MAX + 1)) > CLEAN_ROWS_MAX:
        return True
    found = 0
    of_tasks = [(table.c.task_instance_id, tasks) for table in _OF_TASK if table is not element]
    for column, ids in [*of_tasks, *((table.c.dag_run_id, runs) for table in _OF_RUN)]:
        for some in chunks(sorted(ids)):
            few = select(ONE).where(column.in_(some)).limit(DEPENDENT_ROWS_MAX + 1 - found).subquery()
            found += tx.connection.execute(select(func.count()).select_from(few)).scalar_one()
            if found > DEPENDENT_ROWS_MAX:
                return True
    return False


def _remove_piece(tx: Tx, run: int) -> Cleaned:
    """Mark a run as removed, and delete some of its elements, or of its tasks, or what is left of it."""
    tx.connection.execute(
        update(dag_run).where(dag_run.c.id == run, dag_run.c.removed_at.is_(None)).values(removed_at=tx.now)
    )
    of_run = select(task_instance.c.id).where(task_instance.c.dag_run_id == run)
    first = of_run.order_by(task_instance.c.map_index, task_instance.c.id).limit(CLEAN_ROWS_MAX)
    ids = list(tx.connection.execute(first).scalars())
    if not ids and (deleted := _delete_events(tx, run)):
        return Cleaned({"dag_run_event": deleted}, run - 1)
    tasks = _lock_tasks(tx, ids)
    elements = _first_elements(tx, tasks, limit=CLEAN_ROWS_MAX)
    if len(elements) == CLEAN_ROWS_MAX:
        deleted = sum(_delete_elements(tx, task_id, upto) for task_id, upto in _last_of_each(elements).items())
        return Cleaned({"element": deleted}, run - 1)
    while len(tasks) > 1 and _has_too_much(tx, [], tasks):
        tasks = tasks[: len(tasks) // 2]
    # A task that another transaction has locked stays, and with it the rest of its run, until the next clean.
    return Cleaned(_delete_tasks(tx, tasks), run - 1 if tasks else run)


def _delete_events(tx: Tx, run: int) -> int:
    """Delete some of the rows that say which events a run was created for; return how many."""
    c = dag_run_event.c
    first = select(c.trigger_event_id).where(c.dag_run_id == run).limit(CLEAN_ROWS_MAX)
    some = list(tx.connection.execute(first).scalars())
    return sum(
        tx.connection.execute(delete(dag_run_event).where(c.dag_run_id == run, c.trigger_event_id.in_(part))).rowcount
        for part in chunks(some)
    )


def _first_elements(tx: Tx, tasks: Sequence[int], *, limit: int) -> list[tuple[int, int]]:
    """Return the first elements of these tasks, in the order of the primary key."""
    found: list[tuple[int, int]] = []
    for some in chunks(sorted(tasks)):
        statement = select(element.c.task_instance_id, element.c.position).where(element.c.task_instance_id.in_(some))
        in_order = statement.order_by(element.c.task_instance_id, element.c.position).limit(limit - len(found))
        found += [(task_id, position) for task_id, position in tx.connection.execute(in_order)]
    return found


def _last_of_each(elements: Sequence[tuple[int, int]]) -> dict[int, int]:
    return dict(sorted(elements))


def _delete_elements(tx: Tx, task_id: int, upto: int) -> int:
    of_task = delete(element).where(element.c.task_instance_id == task_id, element.c.position <= upto)
    return tx.connection.execute(of_task).rowcount


def _lock_tasks(tx: Tx, ids: Sequence[int]) -> list[int]:
    """Lock those of these tasks that no other transaction has locked; return their ids."""
    locked: list[int] = []
    for some in chunks(ids):
        free = select(task_instance.c.id).where(task_instance.c.id.in_(some)).with_for_update(skip_locked=True)
        locked += tx.connection.execute(free).scalars()
    return locked


def _delete_tasks(tx: Tx, ids: Sequence[int]) -> dict[str, int]:
    rows = {str(table.name): delete_rows(tx, table.c.task_instance_id, ids) for table in _OF_TASK}
    return rows | {"task_instance": delete_rows(tx, task_instance.c.id, ids)}


def _names_of(tx: Tx, runs: Sequence[int]) -> tuple[tuple[str, str], ...]:
    names = select(dag.c.name, dag_run.c.run_id).join(dag).where(dag_run.c.id.in_(runs)).order_by(dag_run.c.id)
    return tuple((name, run_id) for name, run_id in tx.connection.execute(names))


def count_runs(tx: Tx, ids: Sequence[int]) -> Cleaned:
    """Count what `remove_runs` deletes of the first of these runs, in however many transactions."""
    chosen = _small_runs(tx, ids)[0] or [ids[0]]
    tasks = select(task_instance.c.id).where(task_instance.c.dag_run_id.in_(chosen))
    counted: dict[str, ColumnElement[bool]] = {
        str(table.name): table.c.task_instance_id.in_(tasks) for table in _OF_TASK
    }
    of_rules = signal_wait.c.task_instance_id.in_(tasks)
    counted["signal_wait"] = or_(of_rules, and_(*_rules_of(chosen)))
    counted |= {str(table.name): table.c.dag_run_id.in_(chosen) for table in (task_instance, *_OF_RUN)}
    rows = {
        name: tx.connection.execute(select(func.count()).where(condition)).scalar_one()
        for name, condition in counted.items()
    }
    return Cleaned(rows | {"dag_run": len(chosen)}, chosen[-1], _names_of(tx, chosen))
