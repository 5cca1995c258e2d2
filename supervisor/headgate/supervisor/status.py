"""How a supervisor is, in the form in which it is published."""

from __future__ import annotations

from headgate.store.facts.supervisor_status import SupervisorStatus, streams_of
from headgate.supervisor.backoff import DatabaseOutage
from headgate.supervisor.runner_lifecycle import RunnerLifecycle
from headgate.supervisor.tasks.core import TaskCore
from headgate.supervisor.triggers.assignments import Assignments

PASSED_OVER_TOLD_MAX = 20  # by name; of the others there is the number


def measured(
    runner: RunnerLifecycle, assignments: Assignments, tasks: TaskCore | None, outage: DatabaseOutage
) -> SupervisorStatus:
    """Return how it is at this moment. Nothing in it changes while nothing happens."""
    passed_over = [] if tasks is None else tasks.passed_over()
    return SupervisorStatus(
        runner=runner.state.value,
        incarnation=runner.incarnation,
        owned=assignments.owned,
        running=assignments.running(),
        held=len(assignments.held()),
        steps=0 if tasks is None else len(tasks.running()),
        streams=streams_of(runner.told),
        streams_in_all=runner.told.streams_in_all,
        trouble=outage.trouble(),
        passed_over=tuple(passed_over[:PASSED_OVER_TOLD_MAX]),
        passed_over_in_all=len(passed_over),
        runner_ends=runner.ends(),
        dag_folder=None if tasks is None else tasks.dag_folder,
        is_draining=runner.is_last,
        logs_trouble="" if tasks is None else tasks.logs_trouble(),
    )
