"""``headgate dags``: DAGs: lists, details, and how their runs are started and stopped."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import AllOption, JsonOption, RowsOption, WideOption, print_json_lines, print_record
from headgate.cli.options import DagArgument, json_object, moment
from headgate.cli.tables import Column, fields, place, print_block, print_table, shown
from headgate.presentation.errors import without_own_frames
from headgate.presentation.run_ids import run_id as checked_run_id
from headgate.protocol.messages.runner import KWARGS_BYTES_MAX
from headgate.protocol.values import encode_value
from headgate.scheduling.words import shortened

if TYPE_CHECKING:
    from headgate.protocol.messages.dags import DagSpec, TaskSpec

app = typer.Typer(help="DAGs, and their files.", no_args_is_help=True)

DAGS_LISTED = 1000  # if the user does not say: all, in nearly every installation
TRACEBACKS_SHOWN_MAX = 2  # of files that cannot be parsed; of more a line each is shown
BROKEN_FILES_SHOWN_MAX = 10  # lines, so that the DAGs above them can still be seen
NO_TASKS_WAY_OUT = "a @task function makes one when it is called in the DAG's with block"

_SHOWN: tuple[Column, ...] = (
    *("name", "schedule", "is_paused", "tasks"),
    ("active", lambda dag: dag.active_runs or None),
    ("queued", lambda dag: dag.queued_runs or None),
    ("events", lambda dag: dag.waiting_events or None),
    *("next_run_at", "last_run_state"),
    ("last_run", lambda dag: dag.last_run_at),
    ("file", lambda dag: place(dag.file)),
)
_TASK_COLUMNS = (
    *("task_id", "operator", "group", "expanded_over"),
    *("upstream", "trigger_rule", "retries", "execution_timeout_s"),
    *("queue", "pool", "pool_slots", "priority_weight"),
)


@app.command("list")
def list_dags(
    ctx: typer.Context,
    paused: Annotated[bool | None, typer.Option("--paused/--active", help="Only those that are.")] = None,
    limit: RowsOption = DAGS_LISTED,
    everything: AllOption = False,
    errors: Annotated[bool, typer.Option("--errors", help="Print the tracebacks of all files with mistakes.")] = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the DAGs by name, and the files that cannot be parsed."""
    from headgate.store.inspect.dags import LIST_DAGS_MAX, DagLine

    with invocation(ctx).store() as store:
        lines = store.inspect.dags(is_paused=paused, limit=LIST_DAGS_MAX if everything else limit)
    columns = DagLine.__struct_fields__
    if as_json:
        print_json_lines(fields(line, columns) for line in lines)
        return
    known = [line for line in lines if line.name is not None]
    print_table(known, [name for name in columns if name != "import_error"] if wide else _SHOWN, wide=wide)
    _print_broken({line.file: line.import_error for line in lines if line.import_error}, whole=errors or wide)


def _print_broken(files: dict[str, str], *, whole: bool) -> None:
    """Print the errors of files: a traceback each if there are few files, otherwise a line each."""
    if whole or len(files) <= TRACEBACKS_SHOWN_MAX:
        for file, error in sorted(files.items()):
            print(f"\ncannot be parsed: {shown(place(file))}")
            print_block(without_own_frames(error))
        return
    print(f"\n{len(files):,} files cannot be parsed; their tracebacks: headgate dags list --errors")
    for file, error in sorted(files.items())[:BROKEN_FILES_SHOWN_MAX]:
        print(shown(f"  {place(file)}: {shortened(error)}"))
    if len(files) > BROKEN_FILES_SHOWN_MAX:
        print(f"  and {len(files) - BROKEN_FILES_SHOWN_MAX:,} more")


@app.command()
def show(ctx: typer.Context, dag: DagArgument, as_json: JsonOption = False) -> None:
    """Show a DAG and its tasks."""
    from headgate.scheduling.signal_rules import rule_text

    with invocation(ctx).store() as store:
        line, spec = store.inspect.dag(dag)
        rules = store.inspect.dag_facts(dag).rules
    record = fields(line, line.__struct_fields__)
    error = record.pop("import_error")
    record |= {
        "description": spec.description,
        "tags": spec.tags,
        "catchup": spec.catchup,
        "max_active_runs": spec.max_active_runs,
        "end_on": [rule_text(rule) for rule in spec.end_on],
    }
    tasks = [_task_fields(task) for task in spec.tasks]
    if as_json:
        of_signals = {"signals": [fields(rule, rule.__struct_fields__) for rule in rules]}
        print_record(record | {"import_error": error, "task_list": tasks} | of_signals, as_json=True)
        return
    print_record(record | {"signals": [str(rule) for rule in rules]}, as_json=False)
    print()
    if tasks:
        print_table(tasks, _TASK_COLUMNS)
    else:
        print(f"the DAG has no tasks: {NO_TASKS_WAY_OUT}")
    if error:
        print("\nits file cannot be parsed now; this is the DAG as it was parsed last:")
        print_block(without_own_frames(error))


def _task_fields(task: TaskSpec) -> dict[str, object]:
    from headgate.scheduling.map_states import source_text

    own = {"group": task.group or None, "expanded_over": None if task.map is None else source_text(task.map.source)}
    return {name: own[name] if name in own else getattr(task, name) for name in _TASK_COLUMNS}


@app.command()
def trigger(
    ctx: typer.Context,
    dag: DagArgument,
    conf: Annotated[
        str, typer.Option(metavar="JSON", help="The run's parameters, a JSON object; tags as in `watchers add`.")
    ] = "{}",
    run_id: Annotated[
        str | None, typer.Option(metavar="ID", help="A name of your choice; otherwise manual__ and the time.")
    ] = None,
    logical_date: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="The logical date, in ISO 8601, in UTC without a zone; need not be unique."),
    ] = None,
) -> None:
    """Start a run of a DAG.

    With --logical-date a run of a DAG with a cron schedule is about the data interval that this date is in.
    """
    if run_id is not None:
        _check_run_id(run_id)
    about = None if logical_date is None else moment(logical_date, "--logical-date")
    values = json_object(conf, "--conf")
    encoded = encode_value(values, where="conf", bytes_max=KWARGS_BYTES_MAX)
    with invocation(ctx).store() as store:
        line, spec = store.inspect.dag(dag)
        name = run_id or f"manual__{store.inspect.now().isoformat()}"
        interval = _interval(spec, about)
        conf_or_none = encoded if values else None
        if store.tasks.create_run(dag, name, logical_date=about, conf=conf_or_none, interval=interval) is None:
            raise CommandError(f"the DAG {dag} has a run named {name!r} already")
    print(f"created run {name} of {dag}")
    if interval is not None:
        print(f"its data interval: {interval[0].isoformat()} to {interval[1].isoformat()}")
    if line.is_paused:
        print(f"the DAG is paused: the run waits for `headgate dags unpause {dag}`")
    if not spec.tasks:
        print(f"the DAG has no tasks, so the run does nothing: {NO_TASKS_WAY_OUT}")


def _check_run_id(text: str) -> None:
    try:
        checked_run_id(text)
    except ValueError as error:
        raise CommandError(f"--run-id: {error}", exit_code=2) from None


def _interval(spec: DagSpec, about: datetime | None) -> tuple[datetime, datetime] | None:
    """Return the data interval that a logical date is in; None without a date, and for a DAG without such intervals."""
    from headgate.protocol.messages.dags import CronSchedule
    from headgate.scheduling.timetable import NoMoment, interval_at

    if about is None or not isinstance(spec.schedule, CronSchedule):
        return None
    try:
        interval = interval_at(spec.schedule, about)
    except (NoMoment, OverflowError) as exc:
        problem = f"the schedule has no data interval at {about.isoformat()}"
        raise CommandError(f"--logical-date: {problem}: {exc}", exit_code=2) from exc
    return interval.start, interval.end


DagsArgument = Annotated[list[str], typer.Argument(metavar="DAG", help="The dag_ids.")]


@app.command()
def pause(ctx: typer.Context, dags: DagsArgument) -> None:
    """Pause DAGs: no more of their tasks start, and no runs by their schedules; tasks that run are not ended."""
    _set_paused(ctx, dags, is_paused=True)


@app.command()
def unpause(ctx: typer.Context, dags: DagsArgument) -> None:
    """Have paused DAGs continue."""
    _set_paused(ctx, dags, is_paused=False)


def _set_paused(ctx: typer.Context, dags: list[str], *, is_paused: bool) -> None:
    done = "paused" if is_paused else "unpaused"
    with invocation(ctx).store() as store:
        # All are looked up first: a name that is wrong changes nothing.
        lines = {dag: store.inspect.dag(dag)[0] for dag in dags}
        for dag, line in lines.items():
            store.tasks.set_paused(dag, is_paused=is_paused)
            print(f"{dag} was {done} already" if line.is_paused == is_paused else f"{done} {dag}")
