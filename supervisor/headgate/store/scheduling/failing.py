"""What the scheduler passes over for a while, and how it is named to users (see `headgate.store.db.faults`)."""

from __future__ import annotations

from sqlalchemy import Select, select

from headgate.store.db.faults import PassedOver
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.ids import instance_name
from headgate.store.tables import dag, dag_run, signal_wait, task_instance

_OF_DAG = select(dag.c.name)
_OF_RUN = select(dag.c.name, dag_run.c.run_id).select_from(dag_run.join(dag))
_OF_TASK = select(dag.c.name, dag_run.c.run_id, task_instance.c.task_id, task_instance.c.map_index).select_from(
    task_instance.join(dag_run).join(dag)
)


class FailingVerbs(Verbs):
    """The verbs by which others go on without one that has failed."""

    @property
    def passed_over(self) -> PassedOver:
        """What all verbs of this store pass over."""
        return self.database.passed_over

    @reading
    def name_of(self, tx: Tx, kind: str, id_: int) -> str:
        """Return the name of a row that has failed as commands take it: ``run etl manual__1``, ``DAG etl``."""
        if kind == "rule":
            rule = tx.connection.execute(select(signal_wait).where(signal_wait.c.id == id_)).one_or_none()
            if rule is None:
                return f"rule {id_}"
            owner = ("run", rule.dag_run_id) if rule.dag_id is None else ("DAG", rule.dag_id)
            return f"rule about the signals {rule.key!r} of the {self._name(tx, *owner)}"
        return self._name(tx, kind, id_)

    def _name(self, tx: Tx, kind: str, id_: int) -> str:
        statement: Select[*tuple[str | int, ...]]
        if kind == "task":
            statement = _OF_TASK.where(task_instance.c.id == id_)
        elif kind == "run":
            statement = _OF_RUN.where(dag_run.c.id == id_)
        else:
            statement = _OF_DAG.where(dag.c.id == id_)
        row = tx.connection.execute(statement).one_or_none()
        if row is None:
            return f"{kind} {id_}"
        if kind == "task":
            return f"task {row[0]} {row[1]} {instance_name(row[2], row[3])}"
        return " ".join([kind, *row])
