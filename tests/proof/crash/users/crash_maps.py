"""A user's mapped tasks, which keep the journal of `crash_tasks` and add the values that they are given, and a DAG.

What each execution returns is its own name, so that what is expanded over it, or is given all of it, can be judged:
`tests.proof.history.map_history` says what is right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterable
from datetime import timedelta
from typing import Any

from tests.proof.crash.users import crash_tasks
from tests.proof.crash.users.crash_tasks import RETRIES, note, now
from tests.proof.history.map_history import DOOMED, GIVEN, LEFT, LINKS, NEVER, PAGED, SEED, Given
from tests.proof.history.task_records import Ended

from headgate.tasks import DAG, BaseOperator, StartTriggerArgs, TriggerOperator, task, task_group, worklist
from headgate.tasks.options import TaskOptions
from headgate.triggers.base import BaseTrigger, TriggerEvent
from headgate.triggers.paging import Page, PagedTrigger


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


class Pages(PagedTrigger):
    """Fires pages of two values."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "crash_maps.Pages", {}

    async def fetch(self, cursor: Any) -> Page:
        first = cursor or 0
        return Page(list(PAGED[first : first + 2]), next=first + 2 if first + 2 < len(PAGED) else None)


@task
def one(journal: str, value: str, **context: Any) -> str:
    """Take one value."""
    return end(journal, begin(journal, context, [value]))


class Told(BaseTrigger):
    """Fires the value that it was made with."""

    def __init__(self, value: str) -> None:
        self.value = value

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "crash_maps.Told", {"value": self.value}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(self.value)


class Waits(BaseOperator):
    """Takes one value, and begins in a trigger that tells it; the value of another instance is given beside its own."""

    start_from_trigger = True

    def __init__(self, *, journal: str, value: str, **options: Any) -> None:
        super().__init__(**options)
        self.journal, self.value = journal, value
        self.start_trigger_args = StartTriggerArgs(
            trigger_cls="crash_maps.Told", trigger_kwargs={"value": value}, next_method="told"
        )

    def told(self, context: Any, event: str) -> str:
        values = dict.fromkeys((self.value, event))
        return end(self.journal, begin(self.journal, context, values))


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
    """Return a DAG whose maps are over a literal, a list, elements, pages, another map, and a group over a worklist.

    The instances of one begin in their triggers.
    """
    options: TaskOptions = {"retries": RETRIES, "retry_delay": timedelta(0)}
    with DAG(name, default_args=options, max_active_runs=100) as dag:
        of_file = one.override(task_id="of_file").partial(journal=journal).expand(value=list(GIVEN), window=2)
        of_list = one.override(task_id="of_list").partial(journal=journal).expand(value=values(journal), window=3)
        elements = emitted(journal)
        one.override(task_id="of_elements").partial(journal=journal).expand(value=elements, window=2)
        pages = TriggerOperator(task_id="pages", trigger_cls="crash_maps.Pages", elements="each", ahead=6)
        one.override(task_id="of_pages").partial(journal=journal).expand(value=pages.output, window=2)
        Waits.partial(task_id="in_triggers", journal=journal).expand(value=elements, window=3)
        of_map = one.override(task_id="of_map").partial(journal=journal).expand(value=of_list)
        taken = walk.partial(journal=journal).expand(value=worklist(SEED), window=2)
        total(journal, [of_map, of_file, taken])
    return dag
