"""``headgate tasks``: the tasks of runs, and what users do to them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.asking import (
    ROWS_LISTED,
    AllOption,
    DagArgument,
    RowsOption,
    RunArgument,
    SinceOption,
    TaskArgument,
    print_pages,
    since,
    until_free,
)
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.output import JsonOption, fields, payload, print_block, print_record
from headgate.protocol.messages.dags import TaskState

if TYPE_CHECKING:
    from headgate.store.tasks.task_actions import Cleared, Mark

app = typer.Typer(help="Tasks of runs.", no_args_is_help=True)

_SHOWN = ("dag", "run_id", "task_id", "state", "try_number", "tries_max", "started_at", "ended_at", "last_error")


@app.command("list")
def list_tasks(
    ctx: typer.Context,
    dag: Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only tasks of this DAG.")] = None,
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Only tasks of this run of it; `latest` is the newest.")
    ] = None,
    state: Annotated[list[TaskState] | None, typer.Option(help="Only those in this state; may be given again.")] = None,
    since_text: SinceOption = None,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """List tasks, those of the newest runs first; those of one run in its order."""
    from headgate.store.inspect.inspecting import TaskLine

    with invocation(ctx).store() as store:
        begin = since(since_text, store.inspect.now)
        page = partial(store.inspect.tasks, dag=dag, run_id=run, states=state or (), since=begin)
        print_pages(page, TaskLine, limit=limit, everything=everything, as_json=as_json, shown=_SHOWN)


@app.command()
def show(
    ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument, as_json: JsonOption = False
) -> None:
    """Show all that is known of a task: its state, its times, what is upstream of it, its XComs, its last error."""
    with invocation(ctx).store() as store:
        detail = store.inspect.task(store.inspect.find_task(dag, run, task))
    record = fields(detail.line, detail.line.__struct_fields__)
    others = [name for name in detail.__struct_fields__ if name not in ("line", "xcoms")]
    record |= fields(detail, others)
    error = record.pop("last_error")
    xcoms = {key: payload(value) for key, value in detail.xcoms.items()}
    if as_json:
        print_record(record | {"xcoms": xcoms, "last_error": error}, as_json=True)
        return
    print_record(record | {f"XCom {key}": value for key, value in xcoms.items()}, as_json=False)
    if error:
        print("\nlast error:")
        print_block(error)


@app.command()
def clear(
    ctx: typer.Context,
    dag: DagArgument,
    run: RunArgument,
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help="The task_ids.")] = None,
    upstream: Annotated[bool, typer.Option("--upstream", help="And all tasks upstream of them.")] = False,
    downstream: Annotated[bool, typer.Option("--downstream", help="And all tasks downstream of them.")] = False,
    only_failed: Annotated[
        bool, typer.Option("--only-failed", help="Of all these only those that failed, or whose upstream did.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="All tasks of the run.")] = False,
) -> None:
    """Have tasks begin anew, with all their tries. What runs or waits is ended first, with on_kill()."""
    named = tasks or []
    if bool(named) == (everything or (only_failed and not named)):
        raise CommandError("name the tasks, or say --all, or --only-failed for all that failed", exit_code=2)
    with invocation(ctx).store() as store:
        for task in named:
            store.inspect.find_task(dag, run, task)
        line = store.inspect.run(dag, run).line
        verb = partial(store.tasks.clear_many, line.id, only_failed=only_failed)
        answers: list[Cleared] = []

        def ask() -> bool:
            if answers:
                answers.append(verb(answers[-1].busy))
            else:
                answers.append(verb(named, upstream=upstream, downstream=downstream))
            return not answers[-1].busy

        until_free(ask, bool, f"the run {line.run_id}")
    cleared = sorted(name for answer in answers for name in answer.cleared)
    restarting = sorted(name for answer in answers for name in answer.as_before)
    if restarting:
        print(f"being cleared already: {', '.join(restarting)}")
    if not cleared and not restarting:
        print(f"nothing to clear in run {line.run_id} of {dag}")
    elif cleared:
        print(f"cleared {len(cleared):,} tasks of run {line.run_id} of {dag}: {', '.join(cleared)}")


@app.command("mark-success")
def mark_success(ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument) -> None:
    """End a task as succeeded; what runs or waits for it is ended, with on_kill()."""
    _mark(ctx, dag, run, task, "success")


@app.command("mark-failed")
def mark_failed(ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument) -> None:
    """End a task as failed, without a retry; what runs or waits for it is ended, with on_kill()."""
    _mark(ctx, dag, run, task, "failed")


def _mark(ctx: typer.Context, dag: str, run: str, task: str, mark: Mark) -> None:
    with invocation(ctx).store() as store:
        ref = store.inspect.find_task(dag, run, task)
        if not store.tasks.mark(ref.id, mark):
            state = store.inspect.task(ref).line.state
            raise CommandError(
                f"{task} of run {ref.run_id} has ended already: {state.value}; `headgate tasks clear` begins it anew"
            )
    print(f"marked {task} of run {ref.run_id} of {dag} as {mark}")
