"""``/signals`` and ``/assets``: which is silent, and who listens?"""

from __future__ import annotations

from functools import partial

from headgate.presentation.values import json_line, payload
from headgate.store.errors import NoSuchRow
from headgate.store.inspect.browsing.assets import EVENTS_LOOKED_MAX, AssetLine
from headgate.store.signals.reading import KeyRow, Signal, WaitingTask
from headgate.web import acts
from headgate.web.cells import Cell, Code, Column, Link, State, path
from headgate.web.views import ROWS_PER_PAGE, Answer, Filter, Listing, Page, View, cut

VERSIONS_SHOWN = 20


def signals(view: View) -> Answer:
    """List the keys that signals were sent under, in the order in which they were made."""
    namespace = view.text("namespace")
    found = view.signals.keys(namespace, beyond_id=view.number("beyond") or 0, limit=ROWS_PER_PAGE + 1)
    rows, next_beyond = cut(found)
    return Listing(
        title="Signals",
        intro="Which keys have signals, and when was the newest sent?",
        columns=KEY_COLUMNS if view.may("operator") else VIEWER_KEY_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="No signal was sent yet. `headgate signals send KEY VALUE` sends one.",
        values={"acts": view.acts(*acts.of_signals())},
        filters=(Filter("namespace", "Namespace", namespace or "", placeholder="exact name"),),
    )


def signal(view: View) -> Answer:
    """Show a key: the whole value of a version, by default the newest, its newest versions, and who waits."""
    key_id = view.part_number("id")
    key = next(iter(view.signals.keys(beyond_id=key_id - 1, limit=1)), None)
    if key is None or key.id != key_id:
        raise NoSuchRow("key of signals", str(key_id))
    versions = view.signals.newest(key.key, key.namespace, limit=VERSIONS_SHOWN)[::-1]
    asked = view.number("version")
    shown = _version(view, key, asked) if asked is not None else versions[0] if versions else None
    values = {
        "shown": shown,
        "acts": view.acts(*acts.of_signals(key.key, key.namespace, is_known=True)),
        "facts": (
            ("namespace", key.namespace),
            ("versions", key.last_version),
            ("newest", key.sent_at),
            ("first used", key.created_date),
        ),
        "version_columns": (Column("version", partial(_version_link, key_id), is_number=True), *VERSION_COLUMNS),
        "versions": versions,
        "waiting_columns": WAITING_COLUMNS,
        "waiting": view.signals.waiting(key.key, key.namespace, limit=ROWS_PER_PAGE),
    }
    return Page("signal.html", f"Signal {key.key}", values)


def assets(view: View) -> Answer:
    """List the assets by name."""
    name = view.text("name")
    found = view.inspect.assets(name=name, beyond=view.text("beyond"), limit=ROWS_PER_PAGE + 1)
    rows, next_beyond = cut(found, by="name")
    return Listing(
        title="Assets",
        intro="Which asset is silent, and who has runs for its events?",
        columns=ASSET_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="There are no such assets. `headgate watchers add --asset` and a DAG's schedule name them.",
        filters=(Filter("name", "Name has", name or ""),),
    )


def asset(view: View) -> Answer:
    """Show an asset: its watchers, and the DAGs that have runs for its events."""
    line, watchers, users = view.inspect.asset(view.part_number("id"))
    values = {
        "facts": (
            ("newest event", _newest(line)),
            ("event", _event(line)),
            ("waiting", line.waiting or None),
        ),
        "watcher_columns": WATCHER_COLUMNS,
        "watchers": watchers,
        "user_columns": USER_COLUMNS,
        "users": users,
    }
    return Page("asset.html", f"Asset {line.name}", values)


def _newest(line: AssetLine) -> Cell:
    return line.stored_at if line.is_looked_up else f"none of the newest {EVENTS_LOOKED_MAX:,}"


def _event(line: AssetLine) -> Cell:
    return None if line.event_id is None else Link(path("events", line.event_id), str(line.event_id), is_code=True)


def _version(view: View, key: KeyRow, number: int) -> Signal:
    found = None if number > key.last_version else view.signals.version(key.key, key.namespace, number)
    if found is None:
        raise NoSuchRow("version", str(number), of=f"the key {key.key}")
    return found


def _version_link(key_id: int, sent: Signal) -> Cell:
    return Link(path("signals", key_id, version=sent.version), f"{sent.version:,}")


def _value(sent: Signal) -> Cell:
    return Code(json_line(payload(sent.data)))


def _listener(task: WaitingTask) -> Cell:
    if task.run_id is None:
        return Link(path("dags", task.dag), f"the DAG {task.dag}")
    if task.task_id is None:
        return Link(path("dags", task.dag, "runs", task.run_id), f"the run {task.run_id} of {task.dag}")
    return Link(path("dags", task.dag, "runs", task.run_id, "tasks", task.task_id), f"{task.dag} {task.task_id}")


def _listens(task: WaitingTask) -> Cell:
    if task.error:
        return State("failed", "could not decide")
    if task.is_asked:
        return State("running", "decides")
    return State("waiting", "waits") if task.waits else State("queued", "has one to start with")


KEY_COLUMNS = (
    Column("key", lambda row: Link(path("signals", row.id), row.key)),
    Column("namespace", lambda row: row.namespace, is_minor=True),
    Column("version", lambda row: row.last_version, is_number=True),
    Column("newest", lambda row: row.sent_at),
    Column("first used", lambda row: row.created_date, is_minor=True),
)
VIEWER_KEY_COLUMNS = (Column("key", lambda row: row.key), *KEY_COLUMNS[1:])  # the page of a key has values
VERSION_COLUMNS = (
    Column("value", _value),
    Column("sender", lambda sent: sent.sender),
    Column("sent", lambda sent: sent.sent_at),
)
WAITING_COLUMNS = (
    Column("who", _listener),
    Column("state", _listens),
    Column("has seen version", lambda task: task.seen_version, is_number=True),
    Column("why not", lambda task: task.error),
)
ASSET_COLUMNS = (
    Column("asset", lambda line: Link(path("assets", line.id), line.name)),
    Column("watchers", lambda line: line.watchers or None, is_number=True),
    Column("DAGs", lambda line: line.dags or None, is_number=True),
    Column("newest event", _newest),
    Column("event", _event, is_minor=True),
    Column("waiting", lambda line: line.waiting or None, is_number=True),
)
WATCHER_COLUMNS = (
    Column("watcher", lambda row: Link(path("triggers", row.trigger_id), row.name)),
    Column("newest event", lambda row: row.stored_at),
)
USER_COLUMNS = (
    Column("DAG", lambda user: Link(path("dags", user.dag), user.dag)),
    Column("contract", lambda user: user.contract),
    Column("waiting events", lambda user: user.waiting or None, is_number=True),
    Column("dropped", lambda user: user.dropped or None, is_number=True),
)
