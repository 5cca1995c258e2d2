"""``/supervisors``, ``/pools`` and ``/help``: who is alive, and who is full?"""

from __future__ import annotations

from headgate.scheduling.why import OWNED_COUNTED_MAX, Supervisor
from headgate.scheduling.words import span
from headgate.store.facts.supervisor_status import PublishedStatus
from headgate.store.inspect.dags import PoolLine
from headgate.web import acts
from headgate.web.cells import Cell, Column, Error, State
from headgate.web.states import LOOKS
from headgate.web.views import Answer, Listing, Page, View


def supervisors(view: View) -> Answer:
    """List the supervisors that neither ended nor were fenced, the newest first."""
    rows = view.inspect.supervisors(liveness=view.site.liveness)
    statuses = view.inspect.supervisor_statuses([one.epoch for one in rows])
    return Listing(
        title="Supervisors",
        intro="Who is alive, and who is full?",
        columns=(*COLUMNS, Column("runner", lambda one: _runner(statuses.get(one.epoch)))),
        rows=rows,
        empty="No supervisor is running. Start `headgate up`.",
    )


def pools(view: View) -> Answer:
    """List the pools by name."""
    return Listing(
        title="Pools",
        intro="How many slots has each pool, and how many are in use?",
        columns=POOL_COLUMNS,
        rows=view.inspect.pools(),
        empty="There are no pools.",
        values={"acts": view.acts(*acts.of_pools())},
    )


def manual(view: View) -> Answer:
    """Say what the signs and the keys mean."""
    return Page("help.html", "Help", {"states": LOOKS}, lives=False)


def _room(one: Supervisor) -> Cell:
    more = " or more" if one.open_triggers == OWNED_COUNTED_MAX < one.capacity else ""
    text = f"{one.open_triggers:,}{more} of {one.capacity:,}"
    return State("full", f"{text}, full") if one.open_triggers >= one.capacity else text


def _busy(one: Supervisor) -> Cell:
    return None if not one.workers else f"{one.tasks:,} of {one.workers:,}"


def _dag_files(one: Supervisor) -> Cell:
    """Return the digest of its DAG files, which others of the same folder have as well, and for how long."""
    return None if one.dag_folder is None else f"{one.dag_folder.files_shown}, for {span(one.dag_folder_age_s)}"


def _runner(said: PublishedStatus | None) -> Cell:
    """Return how a runner is, as its supervisor says; or why that cannot be read."""
    if said is None:
        return None
    return Error(said.unreadable) if said.unreadable is not None else said.status.runner_told()


def _free(line: PoolLine) -> Cell:
    return line.slots - line.used


COLUMNS = (
    Column("supervisor", lambda one: one.epoch, is_number=True),
    Column("state", lambda one: State(one.shown_state)),
    Column("host", lambda one: one.hostname),
    Column("process", lambda one: str(one.pid)),
    Column("heartbeat", lambda one: f"{max(0.0, one.heartbeat_age_s):.1f} s ago", is_number=True),
    Column("triggers", _room, is_number=True),
    Column("tasks of workers", _busy, is_number=True),
    Column("queues", lambda one: ", ".join(one.queues)),
    Column("DAG files", _dag_files),
)
POOL_COLUMNS = (
    Column("pool", lambda line: line.name),
    Column("slots", lambda line: line.slots, is_number=True),
    Column("used", lambda line: line.used, is_number=True),
    Column("free", _free, is_number=True),
    Column("tasks", lambda line: line.tasks, is_number=True),
    Column("waiting", lambda line: line.waiting, is_number=True),
)
