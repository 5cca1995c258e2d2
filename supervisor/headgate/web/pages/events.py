"""``/events`` and ``/dead-letters``: what came, what became of it, and what could not be stored?"""

from __future__ import annotations

from typing import get_args

from headgate.scheduling.words import times
from headgate.store.ids import LetterState
from headgate.store.inspect.event_log import EventRow
from headgate.store.inspect.letters import UNRESOLVED, LetterFilter, why_unfit
from headgate.web import acts
from headgate.web.cells import Cell, Code, Column, Error, Link, State, path
from headgate.web.rendering import mask_passwords
from headgate.web.views import ROWS_PER_PAGE, Answer, Filter, Listing, Page, View, cut

STATES: tuple[LetterState, ...] = get_args(LetterState)
EDITED_BYTES_MAX = 64 * 1024  # of a payload in a form, in which each may take three; `headgate dlq edit` takes all
CHOICES = tuple((one, one.replace("_", " ")) for one in ("unresolved", *STATES, "any"))


def listing(view: View) -> Answer:
    """List stored events, the newest first."""
    watcher = view.text("watcher")
    trigger_id = None if watcher is None else view.inspect.find_trigger(watcher)
    found = view.inspect.events_before(trigger_id=trigger_id, beyond_id=view.number("beyond"), limit=ROWS_PER_PAGE + 1)
    rows, next_beyond = cut(found)
    return Listing(
        title="Events",
        intro="What came, the newest first?",
        columns=EVENT_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="No such event is stored.",
        filters=(Filter("watcher", "Watcher or trigger", watcher or "", placeholder="exact name, or an id"),),
    )


def one(view: View) -> Answer:
    """Show an event, its payload as it is stored."""
    event = view.inspect.event(view.part_number("id"))
    made = view.inspect.made_of(event.id)
    runs = [
        Link(path("dags", dag, "runs", run), f"{dag} {run}" + (" (superseded)" if is_old else ""))
        for dag, run, is_old in made.runs
    ]
    tasks = [Link(path("dags", dag, "runs", run, "tasks", task), f"{dag} {task}") for dag, run, task in made.tasks]
    values = {
        "event": event,
        "shows_payload": view.may("operator"),
        "facts": (
            ("from", _source(event)),
            ("key", None if event.key is None else Code(event.key)),
            ("position under its key", event.position),
            ("kind", event.kind),
            ("stored", event.stored_at),
            ("came again", event.redelivered or None),
            ("the last of its trigger", event.is_last or None),
            ("has resumed", tasks or None),
            ("has runs", runs or None),
            ("run of the trigger", Code(event.trigger_run_id)),
        ),
    }
    return Page("event.html", f"Event {event.id}", values, lives=False)


def letters(view: View) -> Answer:
    """List the dead letters, the newest first; at first those that nobody has resolved."""
    watcher, reason = view.text("watcher"), view.text("reason")
    state = view.choice("state", ("unresolved", *STATES, "any")) or "unresolved"
    states: tuple[LetterState, ...] | None
    match state:
        case "any":
            states = None
        case "unresolved":
            states = UNRESOLVED
        case _:
            states = tuple(one for one in STATES if one == state)
    which = LetterFilter(watcher=watcher, reason=reason, states=states)
    filters = {"watcher": watcher, "reason": reason}
    wanted = {name: value for name, value in filters.items() if value is not None} or {"everything": "1"}
    found = view.inspect.dead_letters(ROWS_PER_PAGE + 1, which=which, beyond_id=view.number("beyond"))
    rows, next_beyond = cut(found)
    return Listing(
        title="Dead letters",
        intro="What could not be stored, or taken by its trigger, and can it now?",
        columns=LETTER_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="There are no such dead letters.",
        values={"acts": view.acts(*(acts.of_letters(wanted, state) if rows else ()))},
        filters=(
            Filter("watcher", "Watcher", watcher or "", placeholder="exact name"),
            Filter("reason", "Reason has", reason or ""),
            Filter("state", "State", state, CHOICES, has_none=False),
        ),
    )


def letter(view: View) -> Answer:
    """Show a dead letter: its error, its payload, and what was done about it."""
    found = view.inspect.dead_letter(view.part_number("id"))
    row, kept = found.row, found.payload if found.edited_payload is None else found.edited_payload
    unfit = why_unfit(row.content, has_key=row.key is not None, is_edited=found.edited_payload is not None)
    values = {
        "letter": found,
        "shows_payload": view.may("operator"),
        "acts": view.acts(*acts.of_letter(row.id, row.state, _editable(kept), is_fit=not unfit)),
        "facts": (
            ("state", State(row.state)),
            ("of", Link(path("triggers", row.trigger_id), row.watcher or f"trigger-{row.trigger_id}")),
            ("key", None if row.key is None else Code(row.key)),
            ("holds", row.content),
            ("no redrive", unfit or None),
            ("seen", times(row.deliveries)),
            ("since", row.stored_at),
            ("size", f"{row.payload_bytes:,} bytes"),
            ("resolved", row.resolved_at),
            ("by", row.resolved_by),
            ("note", row.note),
            ("event", None if row.event_id is None else Link(path("events", row.event_id), str(row.event_id))),
        ),
        "action_columns": ACTION_COLUMNS,
    }
    return Page("letter.html", f"Dead letter {row.id}", values, lives=False)


def _editable(data: bytes | None) -> str | None:
    """Return the text of a payload as it is edited: the JSON that is stored; None if no form can have it as it is.

    It may be too long, or have a password that a page masks: what is masked would be stored.
    """
    if data is None:
        return ""
    try:
        text = data.decode() if len(data) <= EDITED_BYTES_MAX else None
    except UnicodeDecodeError:
        return None
    return text if text is None or mask_passwords(text) == text else None


def _source(event: EventRow) -> Cell:
    return Link(path("triggers", event.trigger_id), event.watcher or f"trigger-{event.trigger_id}")


EVENT_COLUMNS = (
    Column("event", lambda event: Link(path("events", event.id), str(event.id), is_code=True)),
    Column("from", _source),
    Column("key", lambda event: None if event.key is None else Code(event.key)),
    Column("kind", lambda event: event.kind, is_minor=True),
    Column("stored", lambda event: event.stored_at),
    Column("came again", lambda event: event.redelivered or None, is_number=True, is_minor=True),
    Column("bytes", lambda event: len(event.payload), is_number=True),
)
LETTER_COLUMNS = (
    Column("letter", lambda row: Link(path("dead-letters", row.id), str(row.id), is_code=True)),
    Column("state", lambda row: State(row.state)),
    Column("of", lambda row: Link(path("triggers", row.trigger_id), row.watcher or f"trigger-{row.trigger_id}")),
    Column("key", lambda row: None if row.key is None else Code(row.key)),
    Column("reason", lambda row: Error(row.reason)),
    Column("seen", lambda row: row.deliveries, is_number=True, is_minor=True),
    Column("bytes", lambda row: row.payload_bytes, is_number=True, is_minor=True),
    Column("since", lambda row: row.stored_at),
)
ACTION_COLUMNS = (
    Column("what", lambda action: action.action),
    Column("by", lambda action: action.done_by),
    Column("at", lambda action: action.done_at),
    Column("note", lambda action: action.note),
)
