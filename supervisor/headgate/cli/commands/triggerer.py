"""``headgate triggerer``: a supervisor and its runner, without tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.invocation import invocation
from headgate.protocol.startup import without_collections


def run(
    ctx: typer.Context,
    capacity: Annotated[int | None, typer.Option(metavar="N", help="Run at most N triggers.")] = None,
    queues: Annotated[str | None, typer.Option(metavar="A,B", help="Run triggers of these queues only.")] = None,
    capture: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record every frame between supervisor and runner in DIR.")
    ] = None,
) -> None:
    """Run triggers until it is stopped: a supervisor, and the runner that it keeps alive.

    SIGTERM or Ctrl-C drains: every event that was fired is stored. A second signal does not wait. The exit code is 0
    after a complete drain, 1 if the drain was cut short, and 3 if another supervisor has taken the lease.
    """
    with without_collections():
        settings = invocation(ctx).settings(capacity=capacity, queues=queues, capture=capture)
        from headgate.supervisor.serve import serve

    raise typer.Exit(serve(settings, capture=settings.capture))
