"""``headgate why``: why a task or a trigger is waiting."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, print_json_lines, print_record
from headgate.cli.tables import print_table

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
            metavar="TRIGGER | DAG RUN [TASK]",
            help="A trigger's id or its watcher's name; or a task; or a run, for all of its tasks that wait.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Print why a task or a trigger is waiting, and what happens next.

    The answer is from the database; the progress of a running trigger is in the log of its supervisor.
    """
    call = invocation(ctx)
    liveness = _liveness(call.settings().lease_silence_max_s)
    with call.store() as store:
        match names:
            case [trigger]:
                trigger_id = store.inspect.find_trigger(trigger)
                _print(store.inspect.why_trigger(trigger_id, liveness=liveness), as_json=as_json)
            case [dag, run]:
                _explain_run(store, dag, run, liveness, as_json=as_json)
            case [dag, run, task]:
                found = store.inspect.find_task(dag, run, task)
                _print(store.inspect.why_task(found, liveness=liveness), as_json=as_json)
            case _:
                raise CommandError("name a trigger, or a DAG and a run, or a DAG, a run and a task", exit_code=2)


def _liveness(silence_max_s: float) -> Liveness:
    """Return how to know that a supervisor is not alive: of those on this machine by their processes."""
    from headgate.store.inspect.why_facts import Liveness
    from headgate.supervisor.serve import is_gone, this_process

    return Liveness(silence_max_s, partial(is_gone, here=this_process()))


def _print(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        print_record(
            {"reason": answer.reason, "headline": answer.headline, "facts": answer.facts, "next": answer.next},
            as_json=True,
        )
        return
    record: dict[str, str] = {}
    for name, text in answer.facts:
        record[name] = f"{record[name]}; {text}" if name in record else text
    from headgate.cli.tables import shown

    print(shown(answer.headline))
    print_record(record, as_json=False)
    print(f"next: {shown(answer.next)}")


def _explain_run(store: Store, dag: str, run: str, liveness: Liveness, *, as_json: bool) -> None:
    from headgate.scheduling.states import UNFINISHED

    line = store.inspect.run(dag, run).line
    tasks = store.inspect.tasks(dag=dag, run_id=line.run_id, states=sorted(UNFINISHED), limit=TASKS_EXPLAINED_MAX + 1)
    rows: list[dict[str, str]] = []
    for task in tasks[:TASKS_EXPLAINED_MAX]:
        found = store.inspect.find_task(dag, line.run_id, task.task_id)
        answer = store.inspect.why_task(found, liveness=liveness)
        values = (task.task_id, task.state.value, answer.reason, answer.headline, answer.next)
        rows.append(dict(zip(_RUN_COLUMNS, values, strict=True)))
    if not as_json:
        print(f"run {line.run_id} of {dag} is {line.state}" + ("" if rows else "; none of its tasks is waiting"))
    if as_json:
        print_json_lines(rows)
    elif rows:
        print_table(rows, ("task_id", "state", "headline", "next"))
    if len(tasks) > TASKS_EXPLAINED_MAX and not as_json:
        print(f"Only the first {TASKS_EXPLAINED_MAX} are shown; `headgate tasks list {dag} {line.run_id}` has all.")
