"""Scheduling: which task runs when. These modules decide, without a database; `headgate.store` acts on it.

=================  =========================================================================
`states`           the states of a task, and every transition between them, as one table
`planning`         the decisions about a run; the graph of its tasks; retry delays
`trigger_rules`    whether a task may run, by the states of the tasks upstream of it
`timetable`        when the runs of a schedule are due
`contracts`        which runs asset events make
`why`              why something waits: facts in, an answer out; `why_tasks` and `why_triggers` decide
=================  =========================================================================
"""
