"""``headgate why``: why a task or a trigger is waiting, or why a DAG has no run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, print_json_lines, print_record
from headgate.cli.tables import print_block, print_table, shown

if TYPE_CHECKING:
    from headgate.scheduling.why import Answer
    from headgate.store.inspect.why_facts import Liveness
    from headgate.store.store import Store

TASKS_EXPLAINED_MAX = 100  # of one run: each takes some statements
_RUN_COLUMNS = ("task_id", "state", "reason", "headline", "next")


def why(
    ctx: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="TRIGGER | DAG [RUN [TASK]]",
            help="A trigger's id or its watcher's name; or a task, or an instance of one, TASK[17]; "
            "or a run, for all of its tasks that wait; or a DAG, for its next run.",
        ),
    ],
    as_json: JsonOption = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print whole errors, too.")] = False,
) -> None:
    """Print why a task or a trigger is waiting, or when a DAG has its next run, and what happens next.

    Errors are told in one line; `--traceback` prints all of them. The answer is from the database; the progress of a
    running trigger is in the log of its supervisor.
    """
    from headgate.store.errors import NoSuchRow

    call = invocation(ctx)
    liveness = liveness_here(call.settings().lease_silence_max_s)
    with call.store() as store:
        match names:
            case [name]:
                try:
                    trigger_id = store.inspect.find_trigger(name)
                except NoSuchRow:
                    answer = _why_dag(store, name, liveness)
                else:
                    answer = store.inspect.why_trigger(trigger_id, liveness=liveness)
                _print(answer, as_json, traceback)
            case [dag, run]:
                _explain_run(store, dag, run, liveness, as_json, traceback)
            case [dag, run, task]:
                for number, found in enumerate(store.inspect.find_tasks(dag, run, task)):
                    if number and not as_json:
                        print()
                    _print(store.inspect.why_task(found, liveness=liveness), as_json, traceback)
            case _:
                raise CommandError("name a trigger; or a DAG, or it and a run, or these and a task", exit_code=2)


def _why_dag(store: Store, name: str, liveness: Liveness) -> Answer:
    from headgate.store.errors import DagRemoved, NoSuchRow

    try:
        return store.inspect.why_dag(name, liveness=liveness)
    except DagRemoved:
        raise
    except NoSuchRow:
        raise NoSuchRow("DAG, trigger or watcher", name) from None


def liveness_here(silence_max_s: float) -> Liveness:
    """Return how to know that a supervisor is not alive: of those on this machine by their processes."""
    from headgate.store.inspect.why_facts import Liveness
    from headgate.supervisor.serve import is_gone, this_process

    return Liveness(silence_max_s, partial(is_gone, here=this_process()))


def _print(answer: Answer, as_json: bool, with_errors: bool) -> None:
    if as_json:
        told = {"reason": answer.reason, "headline": answer.headline, "facts": answer.facts, "next": answer.next}
        print_record(told | ({"errors": answer.errors} if with_errors else {}), as_json=True)
        return
    record: dict[str, str] = {}
    for name, text in answer.facts:
        record[name] = f"{record[name]}; {text}" if name in record else text
    print(shown(answer.headline))
    print_record(record, as_json=False)
    print(f"next: {shown(answer.next)}")
    if with_errors:
        _print_errors(answer)


def _print_errors(answer: Answer, of: str = "") -> None:
    for name, error in answer.errors:
        print(f"\n{shown(of)}{name}:")
        print_block(error)


def _explain_run(store: Store, dag: str, run: str, liveness: Liveness, as_json: bool, with_errors: bool) -> None:
    from headgate.protocol.messages.dags import TaskState
    from headgate.scheduling.states import UNFINISHED
    from headgate.scheduling.words import command

    line = store.inspect.run(dag, run).line
    # Of a run that has failed people ask which task did.
    states = [TaskState.FAILED] if line.state == "failed" else sorted(UNFINISHED)
    tasks = store.inspect.tasks(dag=dag, run_id=line.run_id, states=states, limit=TASKS_EXPLAINED_MAX + 1)
    rows: list[dict[str, Any]] = []
    answers: list[tuple[str, Answer]] = []
    for task in tasks[:TASKS_EXPLAINED_MAX]:
        found = store.inspect.find_task(dag, line.run_id, task.task_id)
        answer = store.inspect.why_task(found, liveness=liveness)
        values = (task.task_id, task.state.value, answer.reason, answer.headline, answer.next)
        rows.append(dict(zip(_RUN_COLUMNS, values, strict=True)) | ({"errors": answer.errors} if with_errors else {}))
        answers.append((task.task_id, answer))
    if not as_json:
        waiting = "" if rows else "; none of its tasks is waiting"
        if line.state == "failed" and rows:
            waiting = "; these of its tasks failed"
        if not rows and store.inspect.is_kept_open(line.id):
            waiting += f", but signals may start each of them, until `{command('runs', 'end', dag, line.run_id)}`"
        print(f"run {line.run_id} of {dag} is {line.state}{waiting}")
    if as_json:
        print_json_lines(rows)
    elif rows:
        print_table(rows, ("task_id", "state", "headline", "next"))
        for task_id, answer in answers if with_errors else ():
            _print_errors(answer, f"{task_id}: ")
    if len(tasks) > TASKS_EXPLAINED_MAX and not as_json:
        print(
            f"Only the first {TASKS_EXPLAINED_MAX} are shown; `{command('tasks', 'list', dag, line.run_id)}` has all."
        )
