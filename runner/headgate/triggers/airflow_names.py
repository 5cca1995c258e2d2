"""Names that Airflow has and headgate has not, and what to use instead: the second half of an error's sentence."""

from __future__ import annotations

from typing import Final, TypedDict

_POOL: Final = "limit them with a pool: headgate pools set NAME SLOTS, and pool=NAME on the tasks"
_ALARM: Final = "there are no callbacks; add a task with trigger_rule='one_failed' below the others"
_LAST_TASK: Final = "there are no callbacks; add a task below the others"
_NO_EMAIL: Final = "headgate sends no email; add a task with trigger_rule='one_failed' that does"
_NO_PAGE: Final = "there is no page to show it"
_NO_DOCS: Final = "there is no page to show it; use description= of the DAG, or a docstring"
_NO_TEMPLATES: Final = "there are no templates; use the context in a @task function"
_NO_LINEAGE: Final = "tasks have no assets; only watchers have (headgate watchers add --asset), which start DAGs"
_DATE: Final = "use logical_date, which is None in runs made by hand without one"

# Of DAG, of task groups, of operators and of default_args.
OPTIONS: Final = {
    "access_control": "there are no users and roles",
    "add_suffix_on_collision": "each call of a @task_group function has an id of its own, with the suffix __1, __2",
    "concurrency": _POOL,
    "dagrun_timeout": "use execution_timeout= of the tasks",
    "dag_display_name": _NO_PAGE,
    "default_view": _NO_PAGE,
    "deferrable": "sensors are deferrable by default; mode='poke' keeps the worker",
    "depends_on_past": "max_active_runs=1 has runs one after another, also after one that failed",
    "do_xcom_push": "return None, which leaves no XCom",
    "doc": _NO_DOCS,
    "doc_md": _NO_DOCS,
    "email": _NO_EMAIL,
    "email_on_failure": _NO_EMAIL,
    "email_on_retry": _NO_EMAIL,
    "end_date": "runs have no last date; pause the DAG then (headgate dags pause)",
    "executor": "tasks run in workers of headgate up; queue= says of which",
    "executor_config": "tasks run in workers of headgate up; queue= says of which",
    "group_display_name": _NO_PAGE,
    "inlets": _NO_LINEAGE,
    "max_active_tasks": _POOL,
    "map_index_template": "use map_index_name= of expand(), a function of the instance's arguments",
    "max_active_tis_per_dag": "use max_active_tis_per_dagrun=, or a pool for all runs: headgate pools set NAME SLOTS",
    "multiple_outputs": "push each value with ti.xcom_push(key, value)",
    "on_execute_callback": _LAST_TASK,
    "on_failure_callback": _ALARM,
    "on_retry_callback": _ALARM,
    "on_skipped_callback": _LAST_TASK,
    "on_success_callback": _LAST_TASK,
    "orientation": _NO_PAGE,
    "outlets": _NO_LINEAGE,
    "owner": "there are no owners; use tags= of the DAG",
    "owner_links": "there are no owners; use tags= of the DAG",
    "parent_group": "make the group in the with block of the other one",
    "params": "a DAG has no params of its own; give defaults in the code: params.get('name', default)",
    "provide_context": "leave it out; a function gets what it has a parameter for, or all with **context",
    "render_template_as_native_obj": _NO_TEMPLATES,
    "run_as_user": "tasks run as the user of headgate up",
    "schedule_interval": "use schedule=",
    "sla": "there are no SLAs; use execution_timeout=",
    "sla_miss_callback": "there are no SLAs; use execution_timeout=",
    "start_date": "use start_date= of the DAG",
    "task_display_name": _NO_PAGE,
    "task_group": "make the task in the with block of the group",
    "template_searchpath": _NO_TEMPLATES,
    "templates_dict": _NO_TEMPLATES,
    "timetable": "use schedule= with a cron expression or assets",
    "tooltip": _NO_DOCS,
    "ui_color": _NO_PAGE,
    "ui_fgcolor": _NO_PAGE,
    "user_defined_filters": _NO_TEMPLATES,
    "user_defined_macros": _NO_TEMPLATES,
    "wait_for_downstream": "max_active_runs=1 has runs one after another, also after one that failed",
    "weight_rule": "priority_weight is the task's own, and is not summed up",
}

# Of `@task`, and of what it makes.
DECORATORS: Final = {
    "bash": "use BashOperator, or subprocess in a @task function",
    "docker": "use subprocess in a @task function",
    "external_python": "use subprocess in a @task function",
    "kubernetes": "use subprocess in a @task function",
    "loop": "a loop repeats a group of tasks; call the task in a @task_group function, and .loop() of that",
    "run_if": "use @task.short_circuit above it, or raise TaskSkipped in it",
    "sensor": "derive from BaseSensorOperator and override poke",
    "setup": "use an ordinary task above the others",
    "skip_if": "use @task.short_circuit above it, or raise TaskSkipped in it",
    "teardown": "use a task with trigger_rule='all_done'",
    "virtualenv": "use subprocess in a @task function",
}

# Of what a function or `execute` gets as its context, and of templates.
CONTEXT: Final = {
    "conf": "use params, which are the run's conf",
    "conn": "use Connection.get(name)",
    "dag": "use task.dag",
    "dag_run": "use run_id, logical_date and params, which are the run's conf",
    "data_interval": "use data_interval_start and data_interval_end",
    "ds": _DATE,
    "ds_nodash": _DATE,
    "execution_date": _DATE,
    "expanded_ti_count": "a task downstream gets len(values); ti.map_index is the index of an instance",
    "inlets": _NO_LINEAGE,
    "macros": "use datetime and timedelta",
    "next_ds": "use data_interval_end",
    "next_execution_date": "use data_interval_end",
    "outlets": _NO_LINEAGE,
    "prev_ds": "use an XCom or a table of yours",
    "prev_execution_date": "use an XCom or a table of yours",
    "task_instance_key_str": "use dag_id, task_id and run_id",
    "tomorrow_ds": _DATE,
    "triggering_asset_events": "use asset_events",
    "triggering_dataset_events": "use asset_events",
    "ts": _DATE,
    "ts_nodash": _DATE,
    "ts_nodash_with_tz": _DATE,
    "var": "use Variable.get(name)",
    "yesterday_ds": _DATE,
}

# Of `airflow`, `airflow.sdk`, `airflow.exceptions` and `airflow.operators`, as people import them.
IMPORTS: Final = {
    "AirflowException": "raise an exception of yours; TaskFailed fails the task without another try",
    "AirflowFailException": "use TaskFailed",
    "AirflowSensorTimeout": "use SensorTimeout",
    "AirflowSkipException": "use TaskSkipped",
    "AirflowTaskTimeout": "headgate itself ends a task after its execution_timeout; to fail it, raise TaskFailed",
    "BaseHook": "use Connection.get(name)",
    "BaseSensor": "use BaseSensorOperator",
    "BranchDayOfWeekOperator": "use @task.branch",
    "Dataset": "use Asset",
    "DateTimeSensorAsync": "use DateTimeSensor, which defers",
    "DummyOperator": "use EmptyOperator",
    "ExternalPythonOperator": "use subprocess in a @task function",
    "Label": "arrows have no labels",
    "LazyXComSequence": "what a mapped task leaves is a sequence with len(), slices and iteration",
    "LoopDecision": "until= of loop() returns True to end the loop, False to go on",
    "LatestOnlyOperator": "use @task.short_circuit, which compares data_interval_end with the time now",
    "Param": OPTIONS["params"],
    "PythonVirtualenvOperator": "use subprocess in a @task function",
    "TimeDeltaSensor": "use DateTimeSensor, or self.defer(trigger=TimeDeltaTrigger(...))",
    "TriggerRule": "use the rule's name: trigger_rule='all_done'",
    "cross_downstream": "use chain([a, b], [c, d])",
    "get_current_context": "a function gets what it has a parameter for, or all with **context",
    "setup": DECORATORS["setup"],
    "teardown": DECORATORS["teardown"],
}

# Of Variable.
VARIABLES: Final = {
    "default_var": "use default=",
    "delete": "use headgate variables delete NAME",
    "deserialize_json": "use Variable.get_json",
    "set": "use headgate variables set NAME TEXT; tasks only read them",
    "setdefault": "use headgate variables set NAME TEXT; tasks only read them",
    "update": "use headgate variables set NAME TEXT; tasks only read them",
}


class NoOptions(TypedDict):
    """Type of ``**unknown``: type checkers refuse any keyword, and at run time the error says what to use instead."""
