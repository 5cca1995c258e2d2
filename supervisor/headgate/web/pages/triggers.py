"""``/triggers``, ``/watchers`` and ``/streams``: which run, for whom, and which fail?"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from headgate.presentation.drift import finding_text, position_text
from headgate.scheduling.drift import LEVELS, Verdict, worst, worst_first
from headgate.store.facts.drift import StreamDrift
from headgate.store.inspect.streams import StreamLine, SubscriberLine
from headgate.store.inspect.triggers import TriggerLine, WatcherRow
from headgate.store.signals.waits import QUEUE as SIGNALS
from headgate.web import acts
from headgate.web.cells import Cell, Code, Column, Error, Link, State, path
from headgate.web.pages.events import EVENT_COLUMNS
from headgate.web.pages.overview import held_by, lag, stream_state
from headgate.web.views import ROWS_PER_PAGE, Answer, Filter, Listing, Page, View, cut

EVENTS_SHOWN = 20  # on the page of one trigger
RUNS_SHOWN = 10
SUBSCRIBERS_SHOWN = 200  # on the page of one stream
FINDINGS_SHOWN = LANES_SHOWN = 100


def listing(view: View) -> Answer:
    """List the triggers by id."""
    queue, which = view.text("queue"), view.choice("which", ("failing", "all"))
    found = view.inspect.triggers(
        queue=queue,
        is_troubled=which == "failing",
        with_ended=which == "all",
        beyond_id=view.number("beyond") or 0,
        limit=ROWS_PER_PAGE + 1,
    )
    rows, next_beyond = cut(found)
    return Listing(
        title="Triggers",
        intro="Which run, for whom, and which fail?",
        columns=COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="There are no such triggers.",
        filters=(
            Filter("queue", "Queue", queue or "", placeholder="exact name"),
            Filter("which", "Which", which or "", (("failing", "failing or held"), ("all", "also ended ones"))),
        ),
    )


def one(view: View) -> Answer:
    """Show a trigger: why it is where it is, its failures, and its newest events."""
    trigger_id = view.part_number("id")
    line = view.inspect.trigger_line(trigger_id)
    values = {
        "line": line,
        "why": view.inspect.why_trigger(trigger_id, liveness=view.site.liveness),
        "facts": (
            ("state", _state(line)),
            ("class", Code(line.classpath)),
            ("for", _user(line)),
            ("queue", line.queue),
            ("supervisor", line.triggerer_id),
            ("created", line.created_date),
            ("failures in a row", line.failure_count or None),
            ("last failure", line.last_failed_at),
            ("held since", line.held_at),
            ("finished", line.finished_at),
            ("removed", line.removed_at),
        ),
        "acts": view.acts(*_acts(line)),
        "run_columns": RUN_COLUMNS,
        "runs": view.inspect.trigger_runs(trigger_id)[:RUNS_SHOWN],
        "event_columns": EVENT_COLUMNS,
        "events": view.inspect.events_before(trigger_id=trigger_id, limit=EVENTS_SHOWN),
    }
    return Page("trigger.html", line.name, values)


def _acts(line: TriggerLine) -> tuple[acts.Act, ...]:
    if line.removed_at is not None:
        return ()
    if line.dag is None and line.name != f"trigger-{line.id}":
        return acts.of_watcher(line.name, hold=line.hold) + acts.of_trigger(line.id, hold=line.hold)
    return acts.of_trigger(line.id, hold=line.hold)


def watchers(view: View) -> Answer:
    """List the watchers by name; those that fail or are held by their triggers' ids."""
    name, is_failing = view.text("name"), view.choice("failing", ("yes",)) is not None
    if is_failing:
        found = view.inspect.troubled_watchers(beyond_id=view.number("beyond") or 0, limit=ROWS_PER_PAGE + 1)
        rows, next_beyond = cut(found, by="trigger_id")
    else:
        found = view.inspect.watchers(name=name, beyond=view.text("beyond"), limit=ROWS_PER_PAGE + 1)
        rows, next_beyond = cut(found, by="name")
    return Listing(
        title="Watchers",
        intro="Which sources are watched, and which of their triggers fail?",
        columns=WATCHER_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="There are no such watchers. `headgate watchers add` makes one.",
        filters=(
            Filter("name", "Name has", name or ""),
            Filter("failing", "State", "yes" if is_failing else "", (("yes", "failing or held"),)),
        ),
    )


def streams(view: View) -> Answer:
    """List the shared streams by id."""
    is_waiting = view.choice("waits", ("yes",)) is not None
    found = view.inspect.streams(
        is_waiting=is_waiting,
        beyond_id=view.number("beyond") or 0,
        limit=ROWS_PER_PAGE + 1,
        liveness=view.site.liveness,
    )
    rows, next_beyond = cut(found)
    return Listing(
        title="Streams",
        intro="Who reads each shared stream, who runs it, and who holds it up?",
        columns=STREAM_COLUMNS,
        rows=rows,
        next_beyond=next_beyond,
        empty="No stream waits for a subscriber." if is_waiting else "No open trigger reads a shared stream.",
        filters=(Filter("waits", "State", "yes" if is_waiting else "", (("yes", "waits for a subscriber"),)),),
    )


def stream(view: View) -> Answer:
    """Show a stream and its subscribers."""
    line, subscribers = view.inspect.stream(
        view.part_number("id"), limit=SUBSCRIBERS_SHOWN, liveness=view.site.liveness
    )
    values = {
        "line": line,
        "facts": (
            ("state", stream_state(line)),
            ("queue", line.queue),
            ("supervisor", line.supervisor),
            ("subscribers", line.subscribers),
            ("waits for", line.missing or None),
            ("newest event", line.stored_at),
            ("last failure", line.last_failed_at),
        ),
        "live": _live_facts(line),
        "columns": SUBSCRIBER_COLUMNS,
        "subscribers": subscribers,
        "left": line.subscribers - len(subscribers),
    }
    known = view.inspect.drift([line.id]).get(line.id, StreamDrift(line.id))
    values |= {"acts": view.acts(*acts.of_stream(line.id, has_drifted=bool(known.found)))}
    return Page("stream.html", line.name, values | _drift(known))


def _drift(known: StreamDrift) -> dict[str, Any]:
    """Return what a page has of the drift of a stream; none if its broker was never asked and nothing was found."""
    report = known.report
    if report is None and not known.found and known.asked_at is None:
        return {"drift": None}
    said: Verdict = "cannot be told" if report is None else report.verdict
    verdict = worst([said, *(each.verdict for each in known.found)])
    return {
        "drift": (
            ("verdict", Error(verdict) if LEVELS[verdict] > LEVELS["behind"] else verdict),
            ("its broker has answered", known.answered_at),
            ("it is asked since", known.asked_at),
            ("it could not be asked", Error(report.error) if report is not None and report.error else None),
            ("lanes that were found", _of_all(len(known.found), FINDINGS_SHOWN)),
            ("lanes", None if report is None else _of_all(report.lanes_in_all, LANES_SHOWN)),
        ),
        "findings": worst_first(known.found)[:FINDINGS_SHOWN],
        "finding_columns": FINDING_COLUMNS,
        "lanes": () if report is None else report.lanes[:LANES_SHOWN],
        "lane_columns": LANE_COLUMNS,
    }


def _of_all(count: int, shown: int) -> str | None:
    return f"{count:,}, of which {shown:,} are shown" if count > shown else None


def _live_facts(line: StreamLine) -> tuple[tuple[str, Cell], ...]:
    live = line.live
    if live is None:
        return () if line.unreadable is None else (("figures", Error(line.unreadable)),)
    return (
        ("lag", lag(line)),
        ("held by", held_by(line)),
        ("in flight", live.in_flight),
        ("the oldest of them", live.oldest_at),
        ("queued for subscribers", live.queued or None),
        ("lanes", live.lanes),
        ("subscribers", f"{live.online:,} online" + (f", {live.absent:,} absent" if live.absent else "")),
        ("advanced", f"{live.acked:,} accepted, {live.failed:,} failed, {live.rejected:,} rejected"),
        ("opened anew", live.ended or None),
        ("by", None if not live.ended_by else Error(live.ended_by)),
        ("so it was", live.as_of),
    )


def _state(line: TriggerLine | WatcherRow) -> Cell:
    if line.finished_at is not None:
        return State("finished")
    if isinstance(line, TriggerLine) and line.removed_at is not None:
        return State("removed")
    if line.hold is not None:
        return State(line.hold)
    if line.queue == SIGNALS:  # no supervisor runs it: whoever sends a signal ends it
        return State("waiting", "waits for a signal")
    if line.failure_count:
        return State("failing")
    return State("waiting", "not claimed") if line.triggerer_id is None else State("running", "claimed")


def _user(line: TriggerLine) -> Cell:
    if line.dag is not None and line.run_id is not None and line.task is not None:
        return Link(path("dags", line.dag, "runs", line.run_id, "tasks", line.task), f"{line.dag} {line.task}")
    return None if line.name.startswith("trigger-") else f"watcher {line.name}"


def _subscriber_state(line: SubscriberLine) -> Cell:
    if line.hold is not None:
        return State(line.hold)
    if line.missing is not None:
        return State("held up", "missing")
    return State("running", "reads")


def _stream_link(line: StreamLine) -> Cell:
    return Link(path("streams", line.id), line.name, is_code=True)


RUN_COLUMNS = (
    Column("ended", lambda run: run.ended_at),
    Column(
        "how", lambda run: State({"returned": "finished", "cancelled": "ended"}.get(run.outcome, "failed"), run.outcome)
    ),
    Column("events", lambda run: run.events or None, is_number=True),
    Column("error", lambda run: Error(run.error) if run.error else None),
)
COLUMNS = (
    Column("trigger", lambda line: Link(path("triggers", line.id), line.name)),
    Column("state", _state),
    Column("class", lambda line: Code(line.classpath.rpartition(".")[2])),
    Column("for", _user),
    Column("queue", lambda line: line.queue, is_minor=True),
    Column("supervisor", lambda line: line.triggerer_id, is_number=True, is_minor=True),
    Column("created", lambda line: line.created_date, is_minor=True),
    Column("failures", lambda line: line.failure_count or None, is_number=True),
    Column("last error", lambda line: Error(line.last_error) if line.last_error else None),
)
WATCHER_COLUMNS = (
    Column("watcher", lambda row: Link(path("triggers", row.trigger_id), row.name)),
    Column("state", _state),
    Column("class", lambda row: Code(row.classpath.rpartition(".")[2])),
    Column("asset", lambda row: row.asset),
    Column("signal", lambda row: row.signal, is_minor=True),
    Column("queue", lambda row: row.queue, is_minor=True),
    Column("supervisor", lambda row: row.triggerer_id, is_number=True, is_minor=True),
    Column("failures", lambda row: row.failure_count or None, is_number=True),
    Column("last error", lambda row: Error(row.last_error) if row.last_error else None),
)
STREAM_COLUMNS = (
    Column("stream", _stream_link),
    Column("state", stream_state),
    Column("queue", lambda line: line.queue, is_minor=True),
    Column("lag", lag, is_number=True),
    Column("held by", held_by),
    Column("in flight", lambda line: None if line.live is None else line.live.in_flight or None, is_number=True),
    Column("subscribers", lambda line: line.subscribers, is_number=True, is_minor=True),
    Column("newest event", lambda line: line.stored_at),
)
SUBSCRIBER_COLUMNS = (
    Column("trigger", lambda line: Link(path("triggers", line.trigger_id), line.name)),
    Column("state", _subscriber_state),
    Column("the stream waits for it", lambda line: Error(line.missing) if line.missing else None),
    Column("newest event", lambda line: line.stored_at),
    Column("open letters", lambda line: line.open_letters or None, is_number=True),
    Column("failures", lambda line: line.failure_count or None, is_number=True),
    Column("last error", lambda line: Error(line.last_error) if line.last_error else None),
)
FINDING_COLUMNS = (
    Column("found", lambda found: datetime.fromtimestamp(found.at, UTC)),
    Column("what", lambda found: Error(finding_text(found))),
)
LANE_COLUMNS = (
    Column("lane", lambda lane: Code(lane.lane) if lane.lane else None),
    Column("verdict", lambda lane: lane.verdict),
    Column("committed", lambda lane: position_text(lane.committed), is_number=True),
    Column("advanced", lambda lane: position_text(lane.advanced), is_number=True),
    Column("end", lambda lane: position_text(lane.end), is_number=True),
    Column("lag", lambda lane: lane.lag, is_number=True),
    Column("oldest unresolved", lambda lane: Code(lane.oldest_key) if lane.oldest_key else None, is_minor=True),
)
