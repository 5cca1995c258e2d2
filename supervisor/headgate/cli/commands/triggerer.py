"""``headgate triggerer``: the supervised pair itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.invocation import invocation
from headgate.protocol.startup import without_collections


def run(
    ctx: typer.Context,
    capacity: Annotated[int | None, typer.Option(metavar="N", help="Triggers to run at most.")] = None,
    queues: Annotated[str | None, typer.Option(metavar="A,B", help="Queues whose triggers to run.")] = None,
    capture: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record every frame between supervisor and runner in DIR.")
    ] = None,
) -> None:
    """Run triggers until told to stop: a supervisor, and the runner it keeps alive.

    SIGTERM or Ctrl-C drains: what was fired is stored. A second one does not wait. It leaves with 0 when it has
    drained, with 1 when that was cut short, with 3 when another supervisor has taken its lease.
    """
    with without_collections():
        settings = invocation(ctx).settings(capacity=capacity, queues=queues, capture=capture)
        from headgate.supervisor.serve import serve

    raise typer.Exit(serve(settings, capture=settings.capture))
