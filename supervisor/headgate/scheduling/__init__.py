"""Scheduling: which task runs when. What stands here decides, and touches no database; the store acts on it.

=================  =========================================================================
`states`           the states of a task, and every way from one to another, as one table
`trigger_rules`    whether a task may run, by the states of the tasks upstream of it
`retries`          when a task that failed is tried again
`lineage`          what comes before a task of a DAG, and what after it
`why`              why something waits: facts in, an answer out; `why_tasks` and `why_triggers` decide
=================  =========================================================================
"""
