"""`TaskVerbs`: the verbs for DAGs, runs, tasks, and the values they read. It is reached as ``store.tasks``.

The docstring of `headgate.store.store.Store` applies to these verbs, too. A verb that moves a task returns whether it
did; if another transaction was first, it changes nothing.
"""

from __future__ import annotations

from headgate.store.db.transaction import Database
from headgate.store.scheduling.element_verbs import ElementVerbs
from headgate.store.tables import connection, variable
from headgate.store.tasks.dags import DagVerbs
from headgate.store.tasks.deferral import DeferralVerbs
from headgate.store.tasks.dispatch import DispatchVerbs
from headgate.store.tasks.graphs import Graphs
from headgate.store.tasks.outcomes import OutcomeVerbs
from headgate.store.tasks.user_actions import UserActionVerbs
from headgate.store.tasks.values import ValueVerbs, XComVerbs


class TaskVerbs(DispatchVerbs, ElementVerbs, DeferralVerbs, OutcomeVerbs, DagVerbs, UserActionVerbs, XComVerbs):
    """All verbs of ``store.tasks``; those of variables and connections are below `variables` and `connections`."""

    def __init__(self, database: Database, graphs: Graphs) -> None:
        super().__init__(database, graphs)
        self.variables = ValueVerbs(database, variable)
        self.connections = ValueVerbs(database, connection)
