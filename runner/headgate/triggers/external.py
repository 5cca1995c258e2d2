"""A trigger that waits for a run of a DAG, or for tasks of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

import structlog
import trio

from headgate.child import queries
from headgate.protocol.messages.dags import TaskState, id_problem, name_problem
from headgate.protocol.messages.queries import GetTaskStates, TaskStates
from headgate.triggers.base import BaseTrigger, TriggerEvent

__all__ = ["ExternalTaskTrigger"]

log = structlog.get_logger(__name__)

# Each look is a query in the supervisor's only thread, in which it also stores events.
POLL_INTERVAL_S: Final = 5.0
TASKS_MAX: Final = 1000  # that one trigger waits for
TASKS_SHOWN_MAX: Final = 50  # in the payload, whose text becomes part of an error

RUN_STATES: Final = ("queued", "running", "success", "failed")
TASK_STATES: Final = tuple(state.value for state in TaskState)
ALLOWED_STATES: Final = ("success",)
# States that do not change by waiting. Give fewer if the task may be cleared and run again.
FAILED_TASK_STATES: Final = ("failed", "upstream_failed", "removed")
FAILED_RUN_STATES: Final = ("failed",)
SKIPPED_TASK_STATES: Final = ("skipped",)

Outcome: TypeAlias = Literal["success", "failed", "skipped"]


class ExternalTaskTrigger(BaseTrigger):
    """Fires once, when a run of the DAG ``dag_id``, or each task of ``task_ids`` in it, is in one of some states.

    The run is the newest one that has ``run_id`` or ``logical_date``, if they are given; it need not exist yet. The
    outcome is ``failed`` as soon as the run or a task is in one of ``failed_states``, ``skipped`` as soon as one is in
    one of ``skipped_states``, and ``success`` once all are in ``allowed_states``. A run that has ended without one of
    the tasks is ``failed`` too, and with ``must_exist`` so is anything that does not exist at the first look.

    The payload is ``{"outcome": str, "run_id": str | None, "states": {task_id: state}, "problem": str}``; the states
    are those of the tasks that determined the outcome, or of the run under ''. Raises TypeError and ValueError for
    invalid arguments.
    """

    def __init__(
        self,
        dag_id: str,
        *,
        run_id: str | None = None,
        logical_date: datetime | None = None,
        task_ids: Sequence[str] = (),
        allowed_states: Sequence[str] = ALLOWED_STATES,
        failed_states: Sequence[str] | None = None,
        skipped_states: Sequence[str] | None = None,
        must_exist: bool = False,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        if isinstance(task_ids, str):
            raise TypeError(f"task_ids must be a list of ids, not the str {task_ids!r:.100}")
        self.dag_id = dag_id
        self.run_id = run_id
        self.logical_date = logical_date
        self.task_ids = tuple(task_ids)
        failed = FAILED_TASK_STATES if self.task_ids else FAILED_RUN_STATES
        skipped = SKIPPED_TASK_STATES if self.task_ids else ()
        self.allowed_states = tuple(allowed_states)
        self.failed_states = failed if failed_states is None else tuple(failed_states)
        self.skipped_states = skipped if skipped_states is None else tuple(skipped_states)
        # A state that is allowed does not count as failed or skipped by default.
        if failed_states is None:
            self.failed_states = tuple(state for state in failed if state not in self.allowed_states)
        if skipped_states is None:
            self.skipped_states = tuple(state for state in skipped if state not in self.allowed_states)
        self.must_exist = must_exist
        self.poll_interval_s = poll_interval_s
        self._check()

    def _check(self) -> None:
        for what, name in (("dag_id", self.dag_id), *(("task_id", task_id) for task_id in self.task_ids)):
            if not isinstance(name, str):
                raise TypeError(f"the {what} must be a str, not {name!r:.100}")
            if (problem := id_problem(name)) is not None:
                raise ValueError(f"the {what} {problem}")
        if len(self.task_ids) > TASKS_MAX:
            raise ValueError(f"{len(self.task_ids):,} tasks to wait for are too many; the limit is {TASKS_MAX:,}")
        if self.run_id is not None and (not isinstance(self.run_id, str) or name_problem(self.run_id) is not None):
            raise ValueError(f"{self.run_id!r:.100} is not a valid run_id")
        if self.logical_date is not None and (
            not isinstance(self.logical_date, datetime) or self.logical_date.utcoffset() is None
        ):
            raise ValueError(f"logical_date must be an aware datetime, not {self.logical_date!r:.100}")
        known = TASK_STATES if self.task_ids else RUN_STATES
        seen: dict[str, str] = {}
        for name in ("allowed_states", "failed_states", "skipped_states"):
            for state in getattr(self, name):
                if state not in known:
                    of = "a task" if self.task_ids else "a run"
                    raise ValueError(f"{name}: {state!r:.100} is not a state of {of}; there are {', '.join(known)}")
                if state in seen:
                    raise ValueError(f"the state {state!r} is in {seen[state]} and in {name}")
                seen[state] = name
        if not self.allowed_states:
            raise ValueError("allowed_states is empty: the trigger would never fire")
        if not (self.poll_interval_s > 0 and math.isfinite(self.poll_interval_s)):
            raise ValueError(f"poll_interval_s must be a positive number of seconds, not {self.poll_interval_s!r}")

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return this class and all arguments of its constructor."""
        return self._classpath(), {
            "dag_id": self.dag_id,
            "run_id": self.run_id,
            "logical_date": None if self.logical_date is None else self.logical_date.astimezone(UTC),
            "task_ids": list(self.task_ids),
            "allowed_states": list(self.allowed_states),
            "failed_states": list(self.failed_states),
            "skipped_states": list(self.skipped_states),
            "must_exist": self.must_exist,
            "poll_interval_s": self.poll_interval_s,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until the outcome is known, then yield one event."""
        logical_date_s = None if self.logical_date is None else self.logical_date.timestamp()
        query = GetTaskStates(self.dag_id, self.run_id, logical_date_s, self.task_ids)
        logged = ""
        while True:
            try:
                answered = await queries.send_query_from_trigger(query)
            except queries.QueryFailed as error:
                # The database is away, so an event could not be stored now either.
                news = f"the supervisor does not answer: {error}"
            else:
                assert isinstance(answered, TaskStates), answered
                payload = self.judge(answered)
                if payload is not None:
                    yield TriggerEvent(payload)
                    return
                news = self._news(answered)
            if news != logged:
                log.info("waiting for another DAG", dag=self.dag_id, state=news)
                logged = news
            await trio.sleep(self.poll_interval_s)

    def judge(self, answered: TaskStates) -> dict[str, Any] | None:
        """Return the payload to fire, None while the outcome is not known. A pure function."""
        states = {task_id: state.value for task_id, state in answered.tasks if task_id in self.task_ids}
        if not self.task_ids and answered.run_id is not None:
            states = {"": answered.run_state}
        if (problem := self._absence(answered)) is not None:
            return self._payload("failed", answered, {}, problem)
        for outcome, wanted in (("failed", self.failed_states), ("skipped", self.skipped_states)):
            some = {task_id: state for task_id, state in states.items() if state in wanted}
            if some:
                return self._payload(outcome, answered, some)
        if states and not answered.missing and all(state in self.allowed_states for state in states.values()):
            return self._payload("success", answered, states)
        return None

    def _absence(self, answered: TaskStates) -> str | None:
        """Return the sentence for something that does not exist and will not, or that must exist already."""
        missing = ", ".join(repr(task_id) for task_id in answered.missing[:TASKS_SHOWN_MAX])
        if answered.missing and answered.run_state in ("success", "failed"):
            return f"its run {answered.run_id!r} has ended, and has no task {missing}"
        if not self.must_exist:
            return None
        if not answered.has_dag:
            return "there is no such DAG"
        if answered.run_id is None:
            return "there is no such run"
        return f"its run {answered.run_id!r} has no task {missing}" if missing else None

    def _payload(self, outcome: str, answered: TaskStates, states: dict[str, str], problem: str = "") -> dict[str, Any]:
        shown = dict(list(states.items())[:TASKS_SHOWN_MAX])
        return {"outcome": outcome, "run_id": answered.run_id, "states": shown, "problem": problem}

    def _news(self, answered: TaskStates) -> str:
        if not answered.has_dag:
            return "there is no such DAG yet"
        if answered.run_id is None:
            return "there is no such run yet"
        if answered.missing:
            return f"run {answered.run_id!r} is {answered.run_state}, and has no task {answered.missing[0]!r} yet"
        return f"run {answered.run_id!r} is {answered.run_state}"
