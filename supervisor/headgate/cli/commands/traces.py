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
    http://localhost:4318. It needs the extra `otel` of the package (docs/operating.md), and no encryption keys.
    """
    try:
        from headgate.tracing import sender
    except ImportError as error:
        raise CommandError(f'this needs an extra: pip install "headgate[otel]" ({error})') from error
    from headgate.store.db.secrets import Secrets
    from headgate.store.store import Store

    ago = timedelta(seconds=span_s(since, "--since"))
    url = sender.endpoint()
    with invocation(ctx).engine() as engine, Store(engine, secrets=Secrets.none()) as store:
        sending = sender.Sender(store, sender.open_collector(url), store.inspect.now() - ago)
        if once:
            try:
                count = sending.send_new()
            except sender.CollectorAway as error:
                raise CommandError(f"{url} takes no traces: {error}") from error
            print(f"sent the traces of {count:,} runs to {url}")
        else:
            print(f"sending traces to {url}", flush=True)
            sending.run(time.sleep)
