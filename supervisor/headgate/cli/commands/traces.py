"""``headgate traces``: traces of runs, for a collector of OpenTelemetry."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Annotated

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.options import span_s

app = typer.Typer(help="Traces of runs, for a collector of OpenTelemetry.", no_args_is_help=True)


@app.command("send")
def send(
    ctx: typer.Context,
    since: Annotated[
        str, typer.Option("--since", metavar="SPAN", help="Begin with the runs that ended so long ago: 15m, 3d.")
    ] = "15m",
    once: Annotated[bool, typer.Option("--once", help="End when these are sent, and do not wait for more.")] = False,
) -> None:
    """Send the trace of each run that ends to a collector, over OTLP with HTTP, until SIGTERM or Ctrl-C.

    The variables of OpenTelemetry say where and how: OTEL_EXPORTER_OTLP_ENDPOINT and the like; without them it is
    http://localhost:4318. It needs the extra `otel` of the package (docs/metrics.md), and no encryption keys.
    """
    try:
        from headgate.tracing import sender
        from headgate.tracing.collector import Collector, CollectorAway, CollectorUnusable
    except ImportError as error:
        raise CommandError(f'this needs an extra: pip install "headgate[otel]" ({error})') from error
    from headgate.scheduling.words import counted
    from headgate.store.db.secrets import Secrets
    from headgate.store.store import Store

    ago, url = timedelta(seconds=span_s(since, "--since")), sender.endpoint()
    shown = sender.shown(url)
    try:
        collector = Collector(url)
        with invocation(ctx).engine() as engine, Store(engine, secrets=Secrets.none()) as store:
            sending = sender.Sender(store, collector, store.inspect.now() - ago)
            if not once:
                print(f"sending traces to {shown}", flush=True)
                sending.run(time.sleep)
            done = sending.send_new()
    except CollectorUnusable as error:
        raise CommandError(f"{shown}: {error}", exit_code=2) from error
    except CollectorAway as error:
        raise CommandError(f"{shown} takes no traces: {error}") from error
    print(f"sent {counted(done.runs - done.refused, 'run')} to {shown}")
    if done.refused:
        raise CommandError(f"{shown} refuses {counted(done.refused, 'run')}")
