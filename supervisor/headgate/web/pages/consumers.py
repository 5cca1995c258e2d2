"""``/consumers``: which program is behind, and which has set events aside?

``/consumers/NAME``: the events that it has set aside, each with the error of the program.
"""

from __future__ import annotations

from headgate.scheduling.words import command
from headgate.store.consuming.consumers import BEHIND_ON_PAGE_MAX, ConsumerRow, ConsumerVerbs
from headgate.web.cells import Cell, Column, Error, Link, State, path
from headgate.web.views import ROWS_PER_PAGE, Answer, Listing, View, cut


def listing(view: View) -> Answer:
    """List the consumers by name."""
    found = ConsumerVerbs(view.inspect.database).some(beyond=view.text("beyond"), limit=ROWS_PER_PAGE + 1)
    rows, next_beyond = cut(found, by="name")
    return Listing(
        title="Consumers",
        intro="Which program has yet to get events, and which has set some aside?",
        columns=COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="There are no consumers. A program adds its own: docs/consuming.md.",
    )


def letters(view: View) -> Answer:
    """List the events that a consumer has set aside, the newest first, as long as nothing is done about them."""
    name = view.part("name")
    found = ConsumerVerbs(view.inspect.database).some_letters(
        name, beyond_event=view.number("beyond"), limit=ROWS_PER_PAGE + 1
    )
    rows, next_beyond = cut(found, by="event_id")
    return Listing(
        title=f"Set aside by {name}",
        intro=f"Which events could {name} not take, and why? `{command('consumers', 'redeliver', name, '--all')}` has "
        f"them handed over again, and `{command('consumers', 'discard', name, '--all')}` gives them up.",
        columns=LETTER_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty=f"{name} has set nothing aside.",
    )


def _set_aside(row: ConsumerRow) -> Cell:
    return Link(path("consumers", row.name), f"{row.set_aside:,}") if row.set_aside else None


def _behind(row: ConsumerRow) -> Cell:
    return f"{BEHIND_ON_PAGE_MAX:,} or more" if row.behind >= BEHIND_ON_PAGE_MAX else row.behind or None


def _state(row: ConsumerRow) -> Cell:
    if row.failures:
        return State("failing")
    return State("attention", "has set events aside") if row.set_aside else State("running", "takes events")


COLUMNS = (
    Column("consumer", lambda row: row.name),
    Column("state", _state),
    Column("watcher", lambda row: Link(path("events", watcher=row.watcher), row.watcher)),
    Column("yet to get", _behind, is_number=True),
    Column("oldest of them", lambda row: row.oldest_at),
    Column("set aside", _set_aside, is_number=True),
    Column("got", lambda row: row.handed_over, is_number=True, is_minor=True),
    Column("newest", lambda row: row.moved_at),
    Column("failures", lambda row: row.failures or None, is_number=True),
    Column("last error", lambda row: Error(row.last_error or "") if row.failures else None),
)
LETTER_COLUMNS = (
    Column("event", lambda letter: Link(path("events", letter.event_id), str(letter.event_id), is_code=True)),
    Column("state", lambda letter: State("open") if letter.state == "open" else State("redriving", "asked for again")),
    Column("error", lambda letter: Error(letter.error)),
    Column("tries", lambda letter: letter.deliveries, is_number=True),
    Column("since", lambda letter: letter.set_aside_at),
)
