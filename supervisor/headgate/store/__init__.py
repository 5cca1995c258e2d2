"""The store: everything headgate writes down, and the one place that writes it.

Each durable transition is one verb of `headgate.store.store.Store` and one transaction; the functions behind
the verbs stand in one module per subject. SQLite and PostgreSQL are treated alike.

========================  ==================================================================================
`store`                   `Store`: the verbs, their transactions, the connection they use
`engine`                  `open_engine`: a URL becomes an engine whose durability has been checked
`schema`                  `upgrade`, `downgrade`, `current_revision`, `require_current`
`secrets`                 `Secrets`: the keys that encrypt trigger kwargs
`errors`                  what can go wrong, and what to do about it (imports nothing heavy)
`leases`                  triggerers, fencing, claiming
`events`, `dead_letters`  the event log, and what could not be written to it
`watchers`, `reading`     what users add and remove, and what they look at
`task_verbs`              ``store.tasks``: the verbs of tasks, from `dags`, `dispatch`, `outcomes`, `deferral`,
                          `user_actions` and `values`; their statements are in `task_rows`
`scheduling_verbs`        ``store.scheduling``: those of a scheduler, from `planning`, `new_runs`, `due_times`
========================  ==================================================================================
"""
