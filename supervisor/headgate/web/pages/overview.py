"""``/``: is everything well, and if not, what first?"""

from __future__ import annotations

import shlex

from headgate.presentation.streams import hold_text, lag_text
from headgate.scheduling.why import OWNED_COUNTED_MAX
from headgate.store.inspect.streams import StreamLine
from headgate.web.cells import Cell, Column, Counts, Error, Link, State, Took, path
from headgate.web.views import Answer, Page, View

STREAMS_SHOWN = 10
RUNS_SHOWN = 10
SUPERVISORS_SHOWN = 10


def overview(view: View) -> Answer:
    """Show all that is wrong, the worst first, and below it supervisors, streams and the newest runs."""
    liveness = view.site.liveness
    problems, supervisors = view.inspect.status_and_supervisors(liveness=liveness)
    values = {
        "problems": problems,
        "place_of": place_of,
        "is_well": all(problem.severity == "notice" for problem in problems),
        "supervisors": supervisors[:SUPERVISORS_SHOWN],
        "streams": view.inspect.streams(limit=STREAMS_SHOWN, liveness=liveness),
        "counted_max": OWNED_COUNTED_MAX,
        "stream_columns": STREAM_COLUMNS,
        "runs": view.inspect.runs(limit=RUNS_SHOWN),
        "run_columns": RUN_COLUMNS,
    }
    return Page("overview.html", "Overview", values)


def place_of(command: str) -> str | None:
    """Return the path of the page that shows what a command of a problem would; None if none does."""
    try:
        words = shlex.split(command)[1:]
    except ValueError:  # it is no command, but a sentence
        return None
    match words:
        case ["why", trigger]:
            return path("search", q=trigger)
        case ["why", dag, run, task]:
            return path("dags", dag, "runs", run, "tasks", task)
        case ["streams", "drift" | "show", stream]:
            return path("streams", stream)
        case ["consumers", "letters", name]:
            return path("consumers", name)
        case ["pools", "set", *_]:
            return path("pools")
        case ["triggers", "list", "--queue", queue]:
            return path("triggers", queue=queue)
        case _:
            return _LISTS.get(" ".join(words))


_LISTS = {
    "triggerers list": path("supervisors"),
    "streams list": path("streams", waits="yes"),
    "triggers list": path("triggers"),
    "consumers list": path("consumers"),
    "consumers list --wide": path("consumers"),
    "tasks list --state scheduled": path("pools"),
    "dlq list": path("dead-letters"),
    "dags list": path("dags", state="broken"),
    "runs list --state failed --since 1d": path("runs", state="failed", since="1d"),
}


def lag(line: StreamLine) -> Cell:
    """Return how far a stream is behind, as its supervisor says."""
    return lag_text(line.live)


def held_by(line: StreamLine) -> Cell:
    """Return who holds a stream up, why and since when, as its supervisor says; or why that cannot be read."""
    if line.unreadable is not None:
        return Error(line.unreadable)
    return hold_text(line.live)


def stream_state(line: StreamLine) -> Cell:
    """Return whether a stream is read, waits for a subscriber, or is run by nobody."""
    if line.missing:
        return State("held up", f"waits for {line.missing:,}")
    return State("running", "reads") if line.supervisor else State("waiting", "nobody runs it")


STREAM_COLUMNS = (
    Column("stream", lambda line: Link(path("streams", line.id), line.name, is_code=True)),
    Column("state", stream_state),
    Column("lag", lag, is_number=True),
    Column("held by", held_by),
    Column("subscribers", lambda line: line.subscribers, is_number=True, is_minor=True),
    Column("newest event", lambda line: line.stored_at),
)
RUN_COLUMNS = (
    Column("DAG", lambda run: Link(path("dags", run.dag), run.dag)),
    Column("run", lambda run: Link(path("dags", run.dag, "runs", run.run_id), run.run_id, is_code=True)),
    Column("state", lambda run: State(run.state)),
    Column("began", lambda run: run.started_at or run.created_date),
    Column("took", lambda run: Took(run.started_at, run.ended_at), is_number=True),
    Column("tasks", lambda run: Counts(run.tasks)),
)
