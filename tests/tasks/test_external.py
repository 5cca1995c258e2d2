"""Tasks that wait for runs of other DAGs, and that begin them: which run, which states, and one run for one try."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headgate.child import queries
from headgate.protocol.errors import DagMalformed
from headgate.protocol.messages.dags import NAME_CHARS_MAX, TaskState
from headgate.protocol.messages.queries import CreateRun, GetTaskStates, Query, QueryResult, RunCreated, TaskStates
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepOutcome, StepSkipped, StepSucceeded
from headgate.protocol.values import decode_value
from headgate.tasks import DAG, BaseOperator, EmptyOperator, ExternalTaskSensor, TriggerDagRunOperator
from headgate.tasks.context import make_context
from headgate.tasks.execution import run_step
from headgate.testing import run_task, run_trigger
from headgate.triggers.external import ExternalTaskTrigger

MOMENT = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOON = MOMENT.timestamp()
S = TaskState


def sensor(**options: Any) -> ExternalTaskSensor:
    return ExternalTaskSensor(**{"task_id": "s", "external_dag_id": "other", "run_id": "r", **options})


class Supervisor:
    """Answers a step, and remembers what it was asked."""

    def __init__(self, *standings: TaskStates) -> None:
        self.standings = list(standings)
        self.asked: list[Query] = []

    def __call__(self, query: Query) -> QueryResult:
        self.asked.append(query)
        if isinstance(query, CreateRun):
            return RunCreated(is_new=sum(query == other for other in self.asked) == 1)
        return self.standings.pop(0) if len(self.standings) > 1 else self.standings[0]


def step(operator: BaseOperator, supervisor: Supervisor, **context: Any) -> StepOutcome:
    with queries.queries_handled_by(supervisor):
        return run_step(operator, make_context(operator, **{"run_id": "mine", **context}))


# --- the trigger ----------------------------------------------------------------------------------


def judged(states: TaskStates, **options: Any) -> tuple[str, dict[str, str]] | None:
    payload = ExternalTaskTrigger("other", **options).judge(states)
    return None if payload is None else (payload["outcome"], payload["states"])


def of(*states: tuple[str, TaskState], run: str = "running", missing: tuple[str, ...] = ()) -> TaskStates:
    return TaskStates("r", run, states, missing)


@pytest.mark.parametrize(
    ("run_state", "outcome"), [("queued", None), ("running", None), ("success", "success"), ("failed", "failed")]
)
def test_a_whole_run(run_state: str, outcome: str | None) -> None:
    assert judged(TaskStates("r", run_state)) == (None if outcome is None else (outcome, {"": run_state}))


@pytest.mark.parametrize("state", TaskState)
def test_a_task_in_any_state_is_decided_when_it_has_ended(state: TaskState) -> None:
    expected = {"success": "success", "failed": "failed", "upstream_failed": "failed", "removed": "failed"}
    outcome = (expected | {"skipped": "skipped"}).get(state)
    found = judged(of(("a", state)), task_ids=["a"])
    assert found == (None if outcome is None else (outcome, {"a": state.value}))


def test_several_tasks_fail_at_once_and_succeed_together() -> None:
    two: Any = {"task_ids": ["a", "b"]}
    assert judged(of(("a", S.SUCCESS), ("b", S.RUNNING)), **two) is None
    assert judged(of(("a", S.FAILED), ("b", S.RUNNING)), **two) == ("failed", {"a": "failed"})
    assert judged(of(("a", S.SKIPPED), ("b", S.RUNNING)), **two) == ("skipped", {"a": "skipped"})
    assert judged(of(("a", S.SKIPPED), ("b", S.FAILED)), **two) == ("failed", {"b": "failed"})
    assert judged(of(("a", S.SUCCESS), ("b", S.SUCCESS)), **two) == ("success", {"a": "success", "b": "success"})


def test_states_of_the_users_choice() -> None:
    allowed: Any = {"task_ids": ["a"], "allowed_states": ["failed", "skipped"]}
    assert judged(of(("a", S.FAILED)), **allowed) == ("success", {"a": "failed"})
    assert judged(of(("a", S.UPSTREAM_FAILED)), **allowed) == ("failed", {"a": "upstream_failed"})
    patient: Any = {"task_ids": ["a"], "failed_states": []}
    assert judged(of(("a", S.FAILED)), **patient) is None


def test_what_is_not_there_is_waited_for_unless_its_run_has_ended() -> None:
    one: Any = {"task_ids": ["a"]}
    for absent in (TaskStates(has_dag=False), TaskStates(), of(missing=("a",))):
        assert judged(absent, **one) is None
        assert judged(absent, **one, must_exist=True) == ("failed", {})
    assert judged(of(missing=("a",), run="success"), **one) == ("failed", {})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"task_ids": "ab"}, "task_ids must be a list of ids, not the str 'ab'"),
        ({"task_ids": ["a b"]}, "the task_id 'a b' may have letters"),
        ({"task_ids": [1]}, "the task_id must be a str, not 1"),
        ({"run_id": ""}, "'' is not a valid run_id"),
        ({"logical_date": datetime(2026, 1, 1)}, "logical_date must be an aware datetime"),
        ({"allowed_states": ["done"]}, "allowed_states: 'done' is not a state of a run; there are queued, running"),
        ({"task_ids": ["a"], "failed_states": ["queue"]}, "failed_states: 'queue' is not a state of a task"),
        ({"allowed_states": []}, "allowed_states is empty"),
        ({"failed_states": ["success"]}, "the state 'success' is in allowed_states and in failed_states"),
        ({"poll_interval_s": 0}, "poll_interval_s must be a positive number"),
        ({"task_ids": [f"t{n}" for n in range(1001)]}, "1,001 tasks to wait for are too many; the limit is 1,000"),
    ],
)
def test_a_trigger_that_could_wait_for_nothing_is_refused(options: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        ExternalTaskTrigger("other", **options)


def test_the_trigger_looks_again_and_again_and_survives_the_round_trip() -> None:
    trigger = ExternalTaskTrigger("other", logical_date=MOMENT, task_ids=["a"], skipped_states=[], poll_interval_s=60)
    looks = [None, {"b": "running"}, {"a": "running"}, {"a": "success"}]
    (event,) = run_trigger(trigger, runs={"other": looks}, within=timedelta(minutes=3, seconds=1))
    assert event.payload == {"outcome": "success", "run_id": "the run", "states": {"a": "success"}, "problem": ""}


# --- the sensor -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "query"),
    [
        ({"run_id": "r"}, GetTaskStates("other", "r")),
        ({}, GetTaskStates("other", None, NOON)),
        ({"execution_delta": timedelta(hours=1)}, GetTaskStates("other", None, NOON - 3600)),
        (
            {"execution_date_fn": lambda own: own.replace(hour=0)},
            GetTaskStates("other", None, NOON - 43200),
        ),
        ({"external_task_id": "a"}, GetTaskStates("other", None, NOON, ("a",))),
        ({"external_task_ids": ["a", "b"]}, GetTaskStates("other", None, NOON, ("a", "b"))),
    ],
)
def test_which_run_is_waited_for(options: Any, query: GetTaskStates) -> None:
    supervisor = Supervisor(of(*((id_, S.SUCCESS) for id_ in query.task_ids), run="success"))
    operator = sensor(**{"run_id": None, "mode": "poke", **options})
    outcome = step(operator, supervisor, logical_date=MOMENT)
    assert isinstance(outcome, StepSucceeded), outcome
    assert decode_value(outcome.xcoms[0].value) == "r"
    assert supervisor.asked == [query]


def test_a_run_without_a_logical_date_says_what_to_do() -> None:
    outcome = step(sensor(run_id=None), Supervisor(TaskStates()))
    assert isinstance(outcome, StepFailed)
    assert "give the sensor a run_id" in outcome.error


def test_it_defers_and_goes_on_by_what_the_trigger_found() -> None:
    assert isinstance(step(sensor(), Supervisor(TaskStates())), StepDeferred)
    assert run_task(sensor(), runs={"other": [None, "running", "success"]}).value == "r"
    failed = run_task(sensor(external_task_id="a"), runs={"other": [{"a": "running"}, {"a": "failed"}]})
    assert (failed.state, failed.may_retry) == ("failed", True)
    assert failed.error == "ExternalFailed: DAG 'other', run 'r': a is failed"
    skipped = run_task(sensor(external_task_id="a"), runs={"other": {"a": "skipped"}})
    assert (skipped.state, skipped.error) == ("skipped", "DAG 'other', run 'r': a is skipped")
    assert run_task(sensor(soft_fail=True), runs={"other": "failed"}).state == "skipped"
    late = run_task(sensor(timeout=timedelta(minutes=1)), runs={"other": "running"})
    assert late.error.startswith("SensorTimeout")
    gone = run_task(sensor(check_existence=True), runs={"another": "success"})
    assert gone.error == "ExternalFailed: DAG 'other', run None: there is no such DAG"


def test_on_the_worker_a_skip_is_a_skip() -> None:
    outcome = step(sensor(mode="poke", external_task_id="a"), Supervisor(of(("a", S.SKIPPED))))
    assert isinstance(outcome, StepSkipped)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"execution_delta": timedelta(1)}, "run_id and execution_delta all determine the run"),
        ({"external_task_id": "a", "external_task_ids": ["b"]}, "give external_task_id or external_task_ids"),
        ({"external_task_ids": "ab"}, "must be a list of ids"),
        ({"external_task_ids": []}, "external_task_ids is empty"),
        ({"run_id": None, "execution_delta": 5}, "execution_delta must be a timedelta"),
        ({"allowed_states": ["skipped"]}, "'skipped' is not a state of a run"),
        ({"external_dag_id": "no good"}, "the dag_id 'no good' may have"),
    ],
)
def test_a_sensor_is_refused_where_it_is_written(options: Any, problem: str) -> None:
    with pytest.raises(DagMalformed, match=problem):
        sensor(**options)


# --- beginning runs -------------------------------------------------------------------------------


def begins(**options: Any) -> TriggerDagRunOperator:
    return TriggerDagRunOperator(**{"task_id": "t", "trigger_dag_id": "other", **options})


def run_id_of(supervisor: Supervisor) -> str:
    query = supervisor.asked[-1]
    assert isinstance(query, CreateRun)
    return query.run_id


def test_one_try_begins_one_run_and_the_next_another() -> None:
    supervisor = Supervisor()
    with DAG("etl"):
        operator = begins()
    first = step(operator, supervisor, try_number=1)
    assert run_id_of(supervisor) == "triggered__etl__t__mine__try1"
    assert isinstance(first, StepSucceeded)
    assert [(xcom.key, decode_value(xcom.value)) for xcom in first.xcoms] == [
        ("trigger_run_id", "triggered__etl__t__mine__try1"),
        ("return_value", "triggered__etl__t__mine__try1"),
    ]
    step(operator, supervisor, try_number=1)
    assert run_id_of(supervisor) == "triggered__etl__t__mine__try1"
    step(operator, supervisor, try_number=2)
    assert run_id_of(supervisor) == "triggered__etl__t__mine__try2"


def test_each_instance_of_a_mapped_task_begins_a_run_of_its_own() -> None:
    supervisor, names = Supervisor(), list[str]()
    with DAG("etl"):
        mapped = TriggerDagRunOperator.partial(task_id="t", trigger_dag_id="other").expand(conf=[{"m": 1}, {"m": 2}])
    for index in (0, 1, 1):
        step(mapped.operator, supervisor, try_number=1, map_index=index)
        names.append(run_id_of(supervisor))
    assert names == [f"triggered__etl__t[{index}]__mine__try1" for index in (0, 1, 1)]


def test_no_two_tasks_begin_one_run() -> None:
    supervisor = Supervisor()
    names = set()
    for dag_id, task_id, run_id in (("a", "b__c", "r"), ("a__b", "c", "r"), ("a_", "b", "r"), ("a", "_b", "r")):
        with DAG(dag_id):
            operator = begins(task_id=task_id)
        step(operator, supervisor, run_id=run_id)
        names.add(run_id_of(supervisor))
    with DAG("d" * 250):
        operator = begins(task_id="t" * 250)
    step(operator, supervisor, run_id="r" * 250)
    names.add(run_id_of(supervisor))
    assert len(names) == 5
    assert max(map(len, names)) <= NAME_CHARS_MAX


def test_a_run_id_conf_and_logical_date_of_ones_own() -> None:
    with DAG("etl"):
        above = EmptyOperator(task_id="above")
        operator = begins(run_id="mine", conf={"n": [above.output], "day": MOMENT}, logical_date=MOMENT)
    assert operator.upstream_task_ids == {"above"}
    result = run_task(operator, xcoms={"above": 7})
    (run,) = result.created_runs
    assert (run.run_id, run.conf, run.logical_date) == ("mine", {"n": [7], "day": MOMENT}, MOMENT)


def test_a_run_that_somebody_else_has_created_fails_the_task_for_good_or_skips_it() -> None:
    supervisor = Supervisor()
    with DAG("etl"):
        first, second = begins(run_id="mine"), begins(task_id="u", run_id="mine")
        patient = begins(task_id="v", run_id="mine", skip_when_already_exists=True)
    assert isinstance(step(first, supervisor), StepSucceeded)
    failed = step(second, supervisor)
    assert isinstance(failed, StepFailed)
    assert "the run 'mine' of DAG 'other' exists already, and this task did not create it" in failed.error
    assert not failed.may_retry
    assert isinstance(step(patient, supervisor), StepSkipped)


def test_waiting_for_the_run_it_began() -> None:
    waits = begins(wait_for_completion=True)
    good = run_task(waits, runs={"other": ["queued", "running", "success"]})
    assert good.value == good.xcoms["trigger_run_id"] == good.created_runs[0].run_id
    assert good.deferrals[0].trigger_kwargs["run_id"] == good.value
    bad = run_task(waits, runs={"other": ["running", "failed"]})
    assert bad.error == f"ExternalFailed: DAG 'other', run {bad.created_runs[0].run_id!r}: the run is failed"
    late = run_task(begins(wait_for_completion=True, timeout=timedelta(minutes=1)), runs={"other": "running"})
    assert late.error.startswith("TriggerTimeout")
    here = begins(wait_for_completion=True, deferrable=False)
    outcome = step(here, Supervisor(TaskStates("r", "success")))
    assert isinstance(outcome, StepSucceeded)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"trigger_dag_id": "no good"}, "the trigger_dag_id 'no good' may have"),
        ({"trigger_dag_id": 5}, "trigger_dag_id must be a str, not 5"),
        ({"run_id": "a\nb"}, "is not a valid run_id"),
        ({"conf": {"f": print}}, r"conf\['f'\] is a"),
        ({"logical_date": datetime(2026, 1, 1)}, "logical_date must be an aware datetime"),
        ({"poke_interval": timedelta(0)}, "poke_interval must be a timedelta of more than 0"),
        ({"timeout": 5}, "timeout must be a timedelta"),
        ({"allowed_states": ["done"]}, "'done' is not a state of a run"),
    ],
)
def test_an_operator_is_refused_where_it_is_written(options: Any, problem: str) -> None:
    with pytest.raises(DagMalformed, match=problem):
        begins(**options)
