"""The store: all access to the database. It supports SQLite and PostgreSQL.

Each durable transition is one verb and one transaction. `headgate.store.db.verbs` says how verbs are declared.

====================  ======================================================================================
`store`               `Store`: the verbs of triggers; it has all others as attributes
`task_verbs`          ``store.tasks``: the verbs of tasks, from `headgate.store.tasks`
`scheduling_verbs`    ``store.scheduling``: the verbs of a scheduler, from `headgate.store.scheduling`
`cleaning`            ``store.cleaning``: deletes old rows
`inspect`             ``store.inspect``: read-only queries
`triggers`            leases, claims, the event log, dead letters, watchers, assets
`db`                  engine, migrations, transactions, prepared and bulk statements, secrets, changes
`tables`, `ids`       the tables, and the types of their ids
`errors`              errors, by the reaction they need (imports nothing heavy)
====================  ======================================================================================
"""
