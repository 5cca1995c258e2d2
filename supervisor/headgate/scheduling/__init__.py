"""Scheduling: which task runs when. These modules decide, without a database; `headgate.store` carries it out.

=================  =========================================================================
`states`           the states of a task, and every transition between them, as one table
`planning`         the decisions about a run; the graph of its tasks; retry delays
`trigger_rules`    whether a task may run, by the states of the tasks upstream of it
`timetable`        when the runs of a schedule are due
`contracts`        which runs are created for events of assets
`why`              explanations for `headgate why`, with `why_tasks` and `why_triggers`
=================  =========================================================================
"""
