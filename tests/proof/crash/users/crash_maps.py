"""A user's mapped tasks, which keep the journal of `crash_tasks` and add the values that they are given, and a DAG.

What each execution returns is its own name, so that what is expanded over it, or is given all of it, can be judged:
`tests.proof.history.map_history` says what is right.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from datetime import timedelta
from typing import Any

from tests.proof.crash.users import crash_tasks
from tests.proof.crash.users.crash_tasks import RETRIES, note, now
from tests.proof.history.map_history import DOOMED, GIVEN, LEFT, LINKS, NEVER, SEED, Given
from tests.proof.history.task_records import Ended

from headgate.tasks import DAG, task, task_group, worklist
from headgate.tasks.options import TaskOptions


def begin(journal: str, context: Any, values: Iterable[Any]) -> str:
    """Journal that an execution begins with these values; return its name, which it has left as an XCom."""
    execution = crash_tasks.begin(journal, context)
    note(journal, Given(execution, tuple(map(str, values)), at=now()))
    return execution


def end(journal: str, execution: str) -> str:
    """Journal that an execution is about to end well; return what it leaves."""
    note(journal, Ended(execution, "success", at=now()))
    return execution


@task
def values(journal: str, **context: Any) -> list[str]:
    """Leave a list."""
    end(journal, begin(journal, context, ()))
    return list(LEFT)


@task
def emitted(journal: str, **context: Any) -> Generator[str, None, str]:
    """Emit the same one by one."""
    execution = begin(journal, context, ())
    yield from LEFT
    return end(journal, execution)


@task
def one(journal: str, value: str, **context: Any) -> str:
    """Take one value."""
    return end(journal, begin(journal, context, [value]))


@task
def follow(journal: str, value: str, **context: Any) -> str:
    """Append the values that this one leads to; others append them as well, and so does the next try."""
    execution = begin(journal, context, [value])
    for link in LINKS.get(value, ()):
        context["ti"].append(link, key=link)
    if value == DOOMED and context["try_number"] == 1:
        context["ti"].append(NEVER, key=NEVER)
        note(journal, Ended(execution, "failed", at=now()))
        raise RuntimeError("as it was to")
    return end(journal, execution)


@task_group
def walk(journal: str, value: str) -> Any:
    """Follow a value of a worklist, and take what that has left."""
    return one.override(task_id="taken")(journal, follow(journal, value))


@task
def total(journal: str, parts: list[Iterable[str]], **context: Any) -> str:
    """Take all values of other tasks."""
    return end(journal, begin(journal, context, (value for part in parts for value in part)))


def map_dag(name: str, journal: str) -> DAG:
    """Return a DAG whose maps are over a literal, a list, elements, another map, and a worklist: that of a group."""
    options: TaskOptions = {"retries": RETRIES, "retry_delay": timedelta(0)}
    with DAG(name, default_args=options, max_active_runs=100) as dag:
        of_file = one.override(task_id="of_file").partial(journal=journal).expand(value=list(GIVEN), window=2)
        of_list = one.override(task_id="of_list").partial(journal=journal).expand(value=values(journal), window=3)
        elements = emitted(journal)
        one.override(task_id="of_elements").partial(journal=journal).expand(value=elements, window=2)
        of_map = one.override(task_id="of_map").partial(journal=journal).expand(value=of_list)
        taken = walk.partial(journal=journal).expand(value=worklist(SEED), window=2)
        total(journal, [of_map, of_file, taken])
    return dag
