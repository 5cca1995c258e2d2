"""The overview of `headgate top`: what is wrong, supervisors, streams and running tasks, as one screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headgate.cli.tables import cell
from headgate.presentation.moments import age
from headgate.presentation.streams import hold_text, lag_text
from headgate.protocol.messages.dags import TaskState
from headgate.scheduling.words import tries

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from headgate.scheduling.status_facts import Problem
    from headgate.scheduling.why import Supervisor
    from headgate.store.facts.supervisor_status import PublishedStatus
    from headgate.store.inspect.runs import TaskLine
    from headgate.store.inspect.streams import StreamLine
    from headgate.store.inspect.why_facts import Liveness
    from headgate.store.store import Store

# So many lines of each kind are on the screen; of the rest it says that there is more.
PROBLEMS_SHOWN = 8
SUPERVISORS_SHOWN = 10
STREAMS_SHOWN = 12
TASKS_SHOWN = 12

_COLOURS = {"broken": "red", "attention": "yellow", "notice": "dim"}


def overview(store: Store, liveness: Liveness) -> Group:
    """Read what is to be shown, and return it to be drawn. Raises the errors of the store."""
    from rich.console import Group
    from rich.text import Text

    inspect = store.inspect
    now, (problems, supervisors) = inspect.now(), inspect.status_and_supervisors(liveness=liveness)
    statuses = inspect.supervisor_statuses([each.epoch for each in supervisors])
    streams = inspect.streams(limit=STREAMS_SHOWN + 1, liveness=liveness)
    tasks = inspect.tasks(states=(TaskState.RUNNING,), each=True, limit=TASKS_SHOWN + 1)
    is_well = all(problem.severity == "notice" for problem in problems)
    head = Text.assemble(
        ("headgate", "bold"),
        f"  {now.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC  ",
        ("everything is well", "green") if is_well else (f"{len(problems)} to look at", "red"),
    )
    return Group(
        head,
        *_section(None, [_problem(problem) for problem in problems], PROBLEMS_SHOWN),
        *_section(SUPERVISORS, [_supervisor(each, statuses) for each in supervisors], SUPERVISORS_SHOWN),
        *_section(STREAMS, [_stream(line) for line in streams], STREAMS_SHOWN),
        *_section(TASKS, [_task(line, now) for line in tasks], TASKS_SHOWN),
    )


SUPERVISORS = ("supervisor", "host", "pid", "state", "triggers", "steps", "runner", "heartbeat")
STREAMS = ("stream", "subscribers", "lag", "in flight", "held by", "newest event")
TASKS = ("running task", "run", "try", "for", "supervisor")


def _problem(problem: Problem) -> Sequence[Any]:
    from rich.text import Text

    return (Text(problem.severity, _COLOURS[problem.severity]), problem.text, Text(problem.next, "cyan"))


def _supervisor(each: Supervisor, statuses: dict[int, PublishedStatus]) -> Sequence[Any]:
    published = statuses.get(each.epoch)
    owned = each.open_triggers if published is None or published.unreadable else published.status.owned
    return (
        str(each.epoch),
        each.hostname,
        str(each.pid),
        each.shown_state,
        f"{owned:,} of {each.capacity:,}",
        f"{each.tasks:,} of {each.workers:,}" if each.workers else "",
        "" if published is None else published.unreadable or published.status.runner_told(),
        f"{max(0.0, each.heartbeat_age_s):.0f} s ago",
    )


def _stream(line: StreamLine) -> Sequence[Any]:
    from rich.text import Text

    live = line.live
    return (
        line.name,
        f"{line.subscribers - line.missing} of {line.subscribers}" if line.missing else str(line.subscribers),
        lag_text(live) or "",
        "" if live is None else f"{live.in_flight:,}",
        Text(hold_text(live) or "", "yellow"),
        "" if line.stored_at is None else age(line.stored_at),
    )


def _task(line: TaskLine, now: datetime) -> Sequence[Any]:
    since = "" if line.started_at is None else f"{max(0.0, (now - line.started_at).total_seconds()):.0f} s"
    of_tries = tries(line.try_number, line.tries_max, line.retries)
    owner = "" if line.triggerer_id is None else str(line.triggerer_id)
    return (f"{line.dag}.{line.name}", line.run_id, of_tries, since, owner)


def _section(headings: Sequence[str] | None, rows: Sequence[Sequence[Any]], rows_max: int) -> Iterable[Table | str]:
    """Return a table with a line above it; nothing if there are no rows."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=None, show_header=headings is not None, header_style="bold", pad_edge=False, expand=False)
    for heading in headings or [""] * len(rows[0]):
        table.add_column(heading, overflow="ellipsis", no_wrap=True)
    for row in rows[:rows_max]:
        table.add_row(*[each if isinstance(each, Text) else Text(cell(each)) for each in row])
    yield ""
    yield table
    if len(rows) > rows_max:
        yield f"... and more than these {rows_max}"
