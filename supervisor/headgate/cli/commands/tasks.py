"""``headgate tasks``: tasks of runs: lists, details, logs, and how users change their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headgate.cli.commands import task_logs
from headgate.cli.invocation import CommandError, Step, invocation, repeat_until_done
from headgate.cli.lists import (
    ROWS_LISTED,
    AllOption,
    JsonOption,
    RowsOption,
    WideOption,
    pages,
    print_pages,
    print_record,
)
from headgate.cli.options import DagArgument, RunArgument, SinceOption, TaskArgument, since
from headgate.cli.output import payload
from headgate.cli.progress import ProgressShown
from headgate.cli.tables import Column, fields, print_block, print_table
from headgate.cli.task_lines import TASK_COLUMNS, instances_of
from headgate.presentation.moments import duration
from headgate.protocol.messages.dags import DagSpec, TaskState
from headgate.scheduling.words import command, counted, some

if TYPE_CHECKING:
    from headgate.store.inspect.runs import TaskDetail, TaskRef
    from headgate.store.inspect.spans import Phase
    from headgate.store.store import Store
    from headgate.store.tasks.user_actions import Cleared, Mark, StreamClear, ToClear

app = typer.Typer(help="Tasks of runs.", no_args_is_help=True)

app.command("logs")(task_logs.logs)

_SHOWN: tuple[Column, ...] = (
    *("dag", "run_id"),
    *TASK_COLUMNS,
)


PHASES_SHOWN = 20  # of a task, the newest; --json has all that are kept
_PHASES_SHOWN: tuple[Column, ...] = (
    ("try", lambda phase: phase.try_number),
    *("phase", "began_at"),
    ("took", lambda phase: duration(phase.began_at, phase.ended_at) or "until now"),
    "outcome",
)


@app.command("list")
def list_tasks(
    ctx: typer.Context,
    dag: Annotated[str | None, typer.Argument(metavar="DAG", help="Only tasks of this DAG.")] = None,
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only tasks of this run of it; `latest` is the newest.")
    ] = None,
    state: Annotated[
        list[TaskState] | None, typer.Option(metavar="STATE", help="Only those in this state; may be repeated.")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Each instance of mapped tasks, not one line for all.")] = False,
    since_text: SinceOption = None,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List tasks, of the newest runs first, and of one run in the order of its DAG. A mapped task is one line."""
    from headgate.store.inspect.runs import TaskLine

    with invocation(ctx).store() as store:
        begin = since(since_text, store.inspect.now)
        page = partial(store.inspect.tasks, dag=dag, run_id=run, states=state or (), since=begin, each=each)
        print_pages(page, TaskLine, limit=limit, everything=everything, as_json=as_json, wide=wide, shown=_SHOWN)


@app.command()
def show(
    ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument, as_json: JsonOption = False
) -> None:
    """Show a task: its state, its times, its upstream tasks, its XComs, what it did with its time, its last error."""
    with invocation(ctx).store() as store:
        for number, ref in enumerate(store.inspect.find_tasks(dag, run, task)):
            if number and not as_json:
                print()
            _show(store.inspect.task(ref), store.inspect.task_spans(ref), as_json=as_json)


def _show(detail: TaskDetail, phases: Sequence[Phase], *, as_json: bool) -> None:
    record = fields(detail.line, detail.line.__struct_fields__)
    others = [name for name in detail.__struct_fields__ if name not in ("line", "xcoms")]
    record |= fields(detail, others)
    error = record.pop("last_error")
    xcoms = {key: payload(value) for key, value in detail.xcoms.items()}
    if as_json:
        print_record(record | {"xcoms": xcoms, "last_error": error, "phases": phases}, as_json=True)
        return
    if record["map_index"] < 0:
        del record["map_index"]
    record["instances"] = instances_of(detail.line)
    print_record(record | {f"XCom {key}": value for key, value in xcoms.items()}, as_json=False)
    if phases:
        print("\nwhat it did with its time:")
        print_table(phases[-PHASES_SHOWN:], _PHASES_SHOWN)
    if error:
        print("\nlast error:" if detail.line.error else "\nwhy it has ended:")
        print_block(error)


@app.command()
def clear(
    ctx: typer.Context,
    dag: DagArgument,
    run: RunArgument,
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="TASK", help="The task_ids; TASK[17], TASK[10-19] for instances.")
    ] = None,
    upstream: Annotated[bool, typer.Option("--upstream", help="Also all tasks upstream of them.")] = False,
    downstream: Annotated[bool, typer.Option("--downstream", help="Also all tasks downstream of them.")] = False,
    only_failed: Annotated[
        bool, typer.Option("--only-failed", help="Of all these only those that failed, or whose upstream did.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="All tasks of the run.")] = False,
    from_start: Annotated[bool, typer.Option("--from-start", help="Their streams begin anew.")] = False,
    go_on: Annotated[bool, typer.Option("--go-on", help="Their streams go on after the last event handled.")] = False,
) -> None:
    """Clear tasks, so that they run again with all their tries. Those that run are ended first, with on_kill().

    The stream of a task that succeeded, or was skipped, begins anew, and that of any other goes on, unless you say so.
    """
    if from_start and go_on:
        raise CommandError("give --from-start or --go-on, not both", exit_code=2)
    streams: StreamClear | None = "from_start" if from_start else "go_on" if go_on else None
    named = tasks or []
    if bool(named) == (everything or (only_failed and not named)):
        raise CommandError("name the tasks, or give --all, or --only-failed for all that failed", exit_code=2)
    with invocation(ctx).store() as store:
        for task in named:
            store.inspect.find_tasks(dag, run, task)
        line = store.inspect.run(dag, run).line
        begin = partial(store.tasks.clear_many, line.id, named, upstream=upstream, downstream=downstream)
        clearing = _Clearing(partial(begin, only_failed=only_failed, streams=streams), store.tasks.clear_on)
        with ProgressShown("cleared", "tasks", sum(line.tasks.values())) as progress:

            def clear_some() -> Step:
                came = clearing.step()
                progress.update(clearing.rows)
                return came

            repeat_until_done(clear_some, f"the run {line.run_id}")
        _, spec = store.inspect.dag(dag)
    if clearing.as_before:
        print(f"being cleared already: {', '.join(clearing.as_before)}")
    if clearing.told:
        print(
            f"cleared {counted(len(clearing.told), 'task')} of run {line.run_id} of {dag}: {', '.join(clearing.told)}"
        )
        for one in () if spec is None else spec.tasks:
            if one.task_id in clearing.names and one.signals is not None and one.signals.starts:
                start = f"`{command('tasks', 'start', dag, line.run_id, one.task_id)}`"
                print(f"{one.task_id} waits for a signal that starts it, as long as its run is open, or {start}")
    elif not clearing.as_before:
        print(f"nothing to clear in run {line.run_id} of {dag}")


class _Clearing:
    """What a clear has done by now, in as many transactions as it needs."""

    def __init__(self, begin: Callable[[], Cleared], go_on: Callable[[ToClear], Cleared]) -> None:
        self._begin = begin
        self._go_on = go_on
        self._left: ToClear | None = None
        self._tasks: set[str] = set()
        self._instances: dict[str, int] = {}
        self.as_before: list[str] = []

    def step(self) -> Step:
        cleared = self._begin() if self._left is None else self._go_on(self._left)
        self._left = cleared.left
        self._tasks.update(cleared.cleared)
        for name, count in cleared.instances.items():
            self._instances[name] = self._instances.get(name, 0) + count
        self.as_before = sorted([*self.as_before, *cleared.as_before])
        if cleared.left is None:
            return "done"
        return "busy" if cleared.is_busy else "more"

    @property
    def rows(self) -> int:
        return len(self._tasks) + sum(self._instances.values())

    @property
    def names(self) -> set[str]:
        """The tasks of which something was cleared."""
        return self._tasks | self._instances.keys()

    @property
    def told(self) -> list[str]:
        """The tasks, each with the number of instances: ``a``, ``enrich (1,000 instances)``."""
        of = {name: counted(count, "instance") for name, count in self._instances.items()}
        return [f"{name} ({of[name]})" if name in of else name for name in sorted(self.names)]


@app.command()
def start(ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument) -> None:
    """Start a task, whatever its trigger rule says; one that is under way starts once more when it has ended."""
    _ask(ctx, dag, run, task, "START")


@app.command()
def restart(ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument) -> None:
    """Start a task; one that is under way is ended before, with on_kill()."""
    _ask(ctx, dag, run, task, "RESTART")


@app.command()
def stop(ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument) -> None:
    """End a task in the state that its author says, or as skipped; what runs of it is ended, with on_kill()."""
    _ask(ctx, dag, run, task, "STOP")


def _ask(ctx: typer.Context, dag: str, run: str, task: str, action: Literal["START", "RESTART", "STOP"]) -> None:
    from headgate.scheduling.states import TERMINAL

    with invocation(ctx).store() as store:
        first, *others = store.inspect.find_tasks(dag, run, task)
        if others:
            raise CommandError(f"{task} are instances of a mapped task: `headgate tasks clear` begins them again")
        before = store.inspect.task(first).line.state
        line, spec = store.inspect.dag(dag)
        moves = store.signals.ask(first.id, action)
        below: list[str] = []
        if spec is not None and action != "STOP" and before in TERMINAL:
            below = _upstream_failed_below(store, spec, first)
    if not moves:
        print(f"{task} of run {first.run_id} of {dag} has ended already: {before.value}")
        return
    to = {"START": "start", "RESTART": "restart", "STOP": "stop"}[action]
    print(f"{task} of run {first.run_id} of {dag}, which is {before.value}, is to {to}")
    if below:
        clear_all = command("tasks", "clear", dag, first.run_id, first.task_id, "--downstream")
        print(f"tasks below it stay upstream_failed: {some(below)}; `{clear_all}` runs them, too")
    if line.is_paused and action != "STOP":
        print(f"the DAG is paused: it starts after `headgate dags unpause {dag}`")


def _upstream_failed_below(store: Store, spec: DagSpec, task: TaskRef) -> list[str]:
    """Return the tasks downstream of a task that did not begin because of a failure; no start of it begins them."""
    from headgate.scheduling.planning import related

    of_run = partial(store.inspect.tasks, dag=task.dag, run_id=task.run_id, states=[TaskState.UPSTREAM_FAILED])
    failed = {line.task_id for line in pages(of_run, None)}
    upstream = {one.task_id: one.upstream for one in spec.tasks}
    below = related(upstream, {task.task_id}, upstream=False, downstream=True) - {task.task_id}
    return [name for name in upstream if name in failed & below]


@app.command("mark-success")
def mark_success(ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument) -> None:
    """End a task as succeeded; a step or a trigger that runs for it is ended, with on_kill().

    One that has failed counts as succeeded, and what could not begin because of it goes on; not so within mapped tasks.
    """
    _mark(ctx, dag, run, task, "success")


@app.command("mark-failed")
def mark_failed(ctx: typer.Context, dag: DagArgument, run: RunArgument, task: TaskArgument) -> None:
    """End a task as failed, without a retry; a step or a trigger that runs for it is ended, with on_kill()."""
    _mark(ctx, dag, run, task, "failed")


def _mark(ctx: typer.Context, dag: str, run: str, task: str, mark: Mark) -> None:
    with invocation(ctx).store() as store:
        refs = store.inspect.find_tasks(dag, run, task)
        marked = _mark_all(store, refs, mark)
        if not marked:
            state = store.inspect.task(refs[0]).line.state
            raise CommandError(
                f"{task} of run {refs[0].run_id} has ended already: {state.value}; `headgate tasks clear` runs it again"
            )
    count = f" ({marked:,} of them)" if len(refs) > 1 else ""
    print(f"marked {task}{count} of run {refs[0].run_id} of {dag} as {mark}")


def _mark_all(store: Store, refs: Sequence[TaskRef], mark: Mark) -> int:
    """Mark a task, instances of a mapped one, or a mapped one with all of them; return how many were unfinished."""
    from headgate.store.ids import Instances
    from headgate.store.tasks.user_actions import every_instance

    first = refs[0]
    if len(refs) == 1 and (first.map_index >= 0 or not store.inspect.task(first).line.is_map):
        return store.tasks.mark(first.id, mark)
    whole = Instances(first.task_id, first.map_index, refs[-1].map_index)
    of = every_instance(first.task_id) if first.map_index < 0 else whole
    marked = 0

    def mark_some() -> Step:
        nonlocal marked
        ended = store.tasks.mark_map(first.dag_run_id, of, mark)
        marked += ended.tasks
        return "done" if ended.is_ended else "busy" if ended.is_busy else "more"

    repeat_until_done(mark_some, f"the task {first.task_id}")
    return marked
