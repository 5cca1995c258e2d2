"""What the scheduler passes over for a while, and how it is named to users (see `headgate.store.db.faults`)."""

from __future__ import annotations

from sqlalchemy import select

from headgate.store.access import acts
from headgate.store.db.faults import PassedOver
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.tables import dag, signal_wait

_DAG = select(dag.c.name)
_RULE = select(signal_wait.c.key, signal_wait.c.dag_id, signal_wait.c.dag_run_id)


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
            rule = tx.connection.execute(_RULE.where(signal_wait.c.id == id_)).one_or_none()
            if rule is not None:
                owner = _name(tx, "run", rule.dag_run_id) if rule.dag_id is None else _name(tx, "DAG", rule.dag_id)
                return f"rule about the signals {rule.key!r} of the {owner}"
        return _name(tx, kind, id_)


def _name(tx: Tx, kind: str, id_: int) -> str:
    match kind:
        case "run":
            return acts.name_of_run(tx, DagRunId(id_))
        case "task":
            return acts.name_of_task(tx, TaskInstanceId(id_))
        case "DAG" if (name := tx.connection.execute(_DAG.where(dag.c.id == id_)).scalar_one_or_none()) is not None:
            return f"DAG {name}"
        case _:
            return f"{kind} {id_}"
