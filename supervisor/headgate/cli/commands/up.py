"""``headgate up``: everything on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.invocation import invocation
from headgate.protocol.startup import without_collections


def up(
    ctx: typer.Context,
    dags: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of DAG files.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Worker processes.")] = None,
    capacity: Annotated[int | None, typer.Option(metavar="N", help="Triggers to run at most.")] = None,
    queues: Annotated[str | None, typer.Option(metavar="A,B", help="Queues whose tasks and triggers to run.")] = None,
    capture: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record every frame between supervisor and runner in DIR.")
    ] = None,
) -> None:
    """Run everything until told to stop: the tables are brought up to date, DAG files parsed, tasks and triggers run.

    SIGTERM or Ctrl-C drains: what was fired is stored, and what runs may end within drain_s, after which it loses its
    try. A second one does not wait. It leaves with 0 when it has drained, with 1 when that was cut short, with 3 when
    another supervisor has taken its lease. Several of these share one PostgreSQL.
    """
    with without_collections():
        settings = invocation(ctx).settings(
            dags_folder=dags, workers=workers, capacity=capacity, queues=queues, capture=capture
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
