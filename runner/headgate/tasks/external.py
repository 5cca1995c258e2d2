"""Tasks that wait for runs of other DAGs, or create them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Unpack

import trio

from headgate.child import queries
from headgate.protocol.errors import ProtocolError
from headgate.protocol.messages.dags import NAME_CHARS_MAX, id_problem, name_problem
from headgate.protocol.messages.queries import CreateRun, RunCreated
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.values import encode_value
from headgate.tasks.context import Context
from headgate.tasks.errors import TaskFailed, TaskSkipped
from headgate.tasks.graph import DAG
from headgate.tasks.operator import BaseOperator
from headgate.tasks.operators import outputs_in, resolved
from headgate.tasks.options import TaskOptions
from headgate.tasks.sensors import SensorOptions, TriggerSensor, first_event_here
from headgate.triggers.base import BaseTrigger
from headgate.triggers.external import ALLOWED_STATES, FAILED_RUN_STATES, POLL_INTERVAL_S, ExternalTaskTrigger

__all__ = ["ExternalFailed", "ExternalTaskSensor", "TriggerDagRunOperator"]

XCOM_RUN_ID: Final = "trigger_run_id"  # the XCom of TriggerDagRunOperator


class ExternalFailed(Exception):
    """The run or task of another DAG has failed, or does not exist. It may have succeeded by the next try."""


class ExternalTaskSensor(TriggerSensor):
    """Waits for a run of the DAG ``external_dag_id``, or for one or several of its tasks in it. Returns the run_id.

    The run is the one with ``run_id``, if given. Otherwise it is the one with the logical date of this task's own run,
    minus ``execution_delta`` or passed through ``execution_date_fn``. It need not exist yet, unless
    ``check_existence``. The states of the tasks, or of the run if there are no task ids, are looked up in
    ``allowed_states`` (success), ``failed_states`` (by default failed, upstream_failed and removed) and
    ``skipped_states`` (skipped). The task then succeeds, fails with `ExternalFailed` (is skipped with ``soft_fail``),
    or is skipped.
    """

    poke_interval_default = timedelta(seconds=POLL_INTERVAL_S)
    template_fields = ("run_id",)

    def __init__(
        self,
        *,
        external_dag_id: str,
        external_task_id: str | None = None,
        external_task_ids: Sequence[str] | None = None,
        run_id: str | None = None,
        execution_delta: timedelta | None = None,
        execution_date_fn: Callable[[datetime], datetime] | None = None,
        allowed_states: Sequence[str] = ALLOWED_STATES,
        failed_states: Sequence[str] | None = None,
        skipped_states: Sequence[str] | None = None,
        check_existence: bool = False,
        **options: Unpack[SensorOptions],
    ) -> None:
        super().__init__(**options)
        selectors = {"run_id": run_id, "execution_delta": execution_delta, "execution_date_fn": execution_date_fn}
        if len(several := [name for name, value in selectors.items() if value is not None]) > 1:
            raise self._malformed(f"{' and '.join(several)} all determine the run to wait for: give only one of them")
        if external_task_id is not None and external_task_ids is not None:
            raise self._malformed("give external_task_id or external_task_ids, not both")
        if isinstance(external_task_ids, str):
            raise self._malformed(f"external_task_ids must be a list of ids, not the str {external_task_ids!r:.100}")
        if external_task_ids is not None and not external_task_ids:
            raise self._malformed("external_task_ids is empty; leave it out to wait for the whole run")
        if execution_delta is not None and not isinstance(execution_delta, timedelta):
            raise self._malformed(f"execution_delta must be a timedelta, not {execution_delta!r:.100}")
        self.external_dag_id = external_dag_id
        self.external_task_ids = tuple(external_task_ids or ()) if external_task_id is None else (external_task_id,)
        self.run_id = run_id
        self.execution_delta = execution_delta
        self.execution_date_fn = execution_date_fn
        self.allowed_states = allowed_states
        self.failed_states = failed_states
        self.skipped_states = skipped_states
        self.check_existence = check_existence
        try:
            self._trigger(run_id, None)
        except (TypeError, ValueError) as error:
            raise self._malformed(str(error)) from None

    def make_trigger(self, context: Context) -> BaseTrigger:
        """Return an `ExternalTaskTrigger` for the run that corresponds to this task's own."""
        if self.run_id is not None:
            return self._trigger(self.run_id, None)
        own = context["logical_date"]
        if own is None:
            raise ValueError(
                f"the sensor {self.task_id!r} waits for the run with its own logical date, and this run has none: give "
                f"the sensor a run_id, or this run a logical date"
            )
        if self.execution_date_fn is not None:
            return self._trigger(None, self.execution_date_fn(own))
        return self._trigger(None, own - (self.execution_delta or timedelta(0)))

    def execute_complete(self, context: Context, event: Any = None) -> str:
        """Return the run_id, or raise according to the trigger's outcome."""
        try:
            return _judged(self.external_dag_id, event)
        except ExternalFailed as failure:
            if self.soft_fail:
                raise TaskSkipped(str(failure)) from failure
            raise

    def _trigger(self, run_id: str | None, logical_date: datetime | None) -> ExternalTaskTrigger:
        return ExternalTaskTrigger(
            self.external_dag_id,
            run_id=run_id,
            logical_date=logical_date,
            task_ids=self.external_task_ids,
            allowed_states=self.allowed_states,
            failed_states=self.failed_states,
            skipped_states=self.skipped_states,
            must_exist=self.check_existence,
            poll_interval_s=self.poke_interval.total_seconds(),
        )


class TriggerDagRunOperator(BaseOperator):
    """Creates a run of the DAG ``trigger_dag_id``, and waits for its end with ``wait_for_completion``.

    The default ``run_id`` is derived from this task, its run and its try: even if the worker dies, each try creates one
    run. With a ``run_id`` of your own all tries share one run. If there is a run of that name that somebody else has
    created, the task fails for good, or is skipped with ``skip_when_already_exists``. ``conf`` becomes the run's
    ``params``; outputs of other tasks in it are replaced by their values, and those tasks become upstream of this one.
    The run_id is pushed as the XCom ``trigger_run_id``, and returned.

    While it waits, the task releases its worker (``deferrable``). It looks every ``poke_interval``, for at most
    ``timeout``, and fails with `ExternalFailed` if the run is in one of ``failed_states``.
    """

    template_fields = ("run_id", "conf")

    def __init__(
        self,
        *,
        trigger_dag_id: str,
        run_id: str | None = None,
        conf: Mapping[str, Any] | None = None,
        logical_date: datetime | None = None,
        skip_when_already_exists: bool = False,
        wait_for_completion: bool = False,
        deferrable: bool = True,
        poke_interval: timedelta = timedelta(seconds=POLL_INTERVAL_S),
        timeout: timedelta | None = None,
        allowed_states: Sequence[str] = ALLOWED_STATES,
        failed_states: Sequence[str] = FAILED_RUN_STATES,
        task_id: str,
        dag: DAG | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(task_id=task_id, dag=dag, **options)
        if not isinstance(trigger_dag_id, str):
            raise self._malformed(f"trigger_dag_id must be a str, not {trigger_dag_id!r:.100}")
        if (problem := id_problem(trigger_dag_id)) is not None:
            raise self._malformed(f"the trigger_dag_id {problem}")
        if run_id is not None and (not isinstance(run_id, str) or name_problem(run_id) is not None):
            raise self._malformed(f"{run_id!r:.100} is not a valid run_id")
        if logical_date is not None and (not isinstance(logical_date, datetime) or logical_date.utcoffset() is None):
            raise self._malformed(f"logical_date must be an aware datetime, not {logical_date!r:.100}")
        if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
            raise self._malformed(f"timeout must be a timedelta of more than 0, not {timeout!r:.100}")
        if not isinstance(poke_interval, timedelta) or poke_interval <= timedelta(0):
            raise self._malformed(f"poke_interval must be a timedelta of more than 0, not {poke_interval!r:.100}")
        self.trigger_dag_id = trigger_dag_id
        self.run_id = run_id
        self.conf = dict(conf or {})
        self.logical_date = logical_date
        self.skip_when_already_exists = skip_when_already_exists
        self.wait_for_completion = wait_for_completion
        self.deferrable = deferrable
        self.poke_interval = poke_interval
        self.timeout = timeout
        self.allowed_states = allowed_states
        self.failed_states = failed_states
        try:
            outputs = outputs_in(self.conf)
            self._trigger("any")
            if not outputs:
                encode_value(self.conf, where="conf", bytes_max=KWARGS_BYTES_MAX)
        except (TypeError, ValueError, ProtocolError) as error:
            raise self._malformed(str(error)) from None
        for argument in outputs:
            self.set_upstream(argument.awaited())

    def execute(self, context: Context) -> str:
        """Create the run, and wait for it with ``wait_for_completion``."""
        run_id = self.run_id or _run_id_of(context)
        conf = encode_value(resolved(self.conf, context), where="conf", bytes_max=KWARGS_BYTES_MAX)
        logical_date_s = None if self.logical_date is None else self.logical_date.timestamp()
        created = queries.send_query(CreateRun(self.trigger_dag_id, run_id, conf, logical_date_s))
        if not isinstance(created, RunCreated) or not created.is_new:
            text = f"the run {run_id!r} of DAG {self.trigger_dag_id!r} exists already, and this task did not create it"
            if self.skip_when_already_exists:
                raise TaskSkipped(text)
            raise TaskFailed(f"{text}: give it a run_id of its own, or skip_when_already_exists=True")
        self.log.info("created the run %s of DAG %s", run_id, self.trigger_dag_id)
        context["ti"].xcom_push(XCOM_RUN_ID, run_id)
        if not self.wait_for_completion:
            return run_id
        trigger = self._trigger(run_id)
        if self.deferrable:
            self.defer(trigger=trigger, method_name="execute_complete", timeout=self.timeout)
        timeout_s = float("inf") if self.timeout is None else self.timeout.total_seconds()
        try:
            fired = trio.run(first_event_here, trigger, timeout_s)
        except trio.TooSlowError as error:
            problem = f"the run {run_id!r} of DAG {self.trigger_dag_id!r} had not ended after {self.timeout}"
            raise ExternalFailed(problem) from error
        return self.execute_complete(context, event=fired.payload)

    def execute_complete(self, context: Context, event: Any = None) -> str:
        """Return the run_id, or raise if the run has failed."""
        return _judged(self.trigger_dag_id, event)

    def _trigger(self, run_id: str) -> ExternalTaskTrigger:
        return ExternalTaskTrigger(
            self.trigger_dag_id,
            run_id=run_id,
            allowed_states=self.allowed_states,
            failed_states=self.failed_states,
            poll_interval_s=self.poke_interval.total_seconds(),
        )


def _run_id_of(context: Context) -> str:
    """Return a run_id that is unique to this try of this task, or of this instance of it."""
    index = context["ti"].map_index
    task = context["task_id"] if index < 0 else f"{context['task_id']}[{index}]"
    own = (context["dag_id"], context["run_id"], task, str(context["try_number"]))
    readable = f"triggered__{own[0]}__{own[2]}__{own[1]}__try{own[3]}"
    if len(readable) <= NAME_CHARS_MAX and not any("__" in f"_{own[part]}_" for part in (0, 2)):
        return readable
    # Too long, or ambiguous: another task could have the same.
    digest = hashlib.sha256("\0".join(own).encode()).hexdigest()[:32]
    return f"triggered__{own[0][:60]}__{own[2][:60]}__{digest}__try{own[3]}"


def _judged(dag_id: str, event: Any) -> str:
    """Return the run_id in a trigger's payload. Raises `ExternalFailed` and `TaskSkipped`."""
    run_id: str = event["run_id"]
    if event["outcome"] == "success":
        return run_id
    states = ", ".join(f"{task_id or 'the run'} is {state}" for task_id, state in event["states"].items())
    text = f"DAG {dag_id!r}, run {run_id!r}: {event['problem'] or states}"
    if event["outcome"] == "skipped":
        raise TaskSkipped(text)
    raise ExternalFailed(text)
