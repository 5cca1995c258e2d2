"""``headgate up``: everything on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.invocation import invocation
from headgate.protocol.startup import without_collections


def up(
    ctx: typer.Context,
    dags: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of the DAG files.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Worker processes.")] = None,
    endless_workers_max: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes for endless tasks, beside these.")
    ] = None,
    capacity: Annotated[int | None, typer.Option(metavar="N", help="Run at most N triggers.")] = None,
    queues: Annotated[
        str | None, typer.Option(metavar="A,B", help="Run tasks and triggers of these queues only.")
    ] = None,
    capture: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record every frame between supervisor and runner in DIR.")
    ] = None,
) -> None:
    """Run everything until it is stopped: upgrade the tables, parse DAG files, run tasks and triggers.

    SIGTERM or Ctrl-C drains: every event that was fired is stored, and tasks may end within drain_s; a task that does
    not loses its try. A second signal does not wait. The exit code is 0 after a complete drain, 1 if the drain was cut
    short, and 3 if another supervisor has taken the lease. Several of these may share one PostgreSQL database.
    """
    with without_collections():
        settings = invocation(ctx).settings(
            dags_folder=dags,
            workers=workers,
            endless_workers_max=endless_workers_max,
            capacity=capacity,
            queues=queues,
            capture=capture,
        )
        from headgate.store.db import schema
        from headgate.store.db.engine import open_engine
        from headgate.supervisor.serve import serve

    settings.make_folders()
    engine = open_engine(settings.database_url)
    try:
        schema.upgrade(engine)
    finally:
        engine.dispose()
    raise typer.Exit(serve(settings, capture=settings.capture, runs_tasks=True))
