"""``headgate metrics`` and ``headgate health``: what a monitoring system needs, and what a container asks."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, print_json_lines
from headgate.cli.tables import print_table, shown

if TYPE_CHECKING:
    from headgate.supervisor.metrics.address import Address

app = typer.Typer(
    help="What supervisors measure, alert rules for Prometheus, and dashboards for Grafana.", no_args_is_help=True
)

ANSWER_S_MAX = 8.0  # a supervisor answers within 5 s, whatever its loop does
ANSWER_BYTES_MAX = 64 * 1024
_COLUMNS = ("name", "kind", "labels", "help")
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@app.command("list")
def list_metrics(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List all metrics with their labels and what they mean; behind those of supervisors, those of `signals serve`."""
    from headgate.supervisor.metrics.catalogue import ALL, OF_SIGNAL_SERVERS

    rows: list[dict[str, object]] = []
    for metric in (*ALL, *(metric for metric in OF_SIGNAL_SERVERS if metric not in ALL)):
        labels = ", ".join(f"{name}={'|'.join(values)}" for name, values in metric.labels)
        rows.append(dict(zip(_COLUMNS, (metric.full_name, metric.kind, labels, metric.help), strict=True)))
    if as_json:
        print_json_lines(rows)
    else:
        print_table(rows, _COLUMNS)


@app.command("rules")
def print_rules(ctx: typer.Context) -> None:
    """Print alert rules for Prometheus, to be written into a file that its `rule_files` names."""
    typer.echo((resources.files("headgate.supervisor.metrics") / "rules.yml").read_text(), nl=False)


@app.command("dashboards")
def write_dashboards(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write them to; it is made if it does not exist.")
    ],
) -> None:
    """Write dashboards for Grafana, one file each, over those that are there."""
    from headgate.supervisor.metrics.dashboards import ALL, as_json

    folder.mkdir(parents=True, exist_ok=True)
    for dashboard in ALL:
        path = folder / f"{dashboard.name}.json"
        path.write_text(as_json(dashboard))
        print(f"wrote {path}")


def health(
    ctx: typer.Context,
    ready: Annotated[bool, typer.Option("--ready", help="Ask whether it is ready, and not only alive.")] = False,
) -> None:
    """Ask the supervisor of these settings on this machine how it is, at `metrics_listen`.

    The exit code is 0 if it is alive (with `--ready`: if it can do all of its work), 1 if it is not or does not answer,
    and 2 if `metrics_listen` is not set.
    """
    settings = invocation(ctx).settings()
    if settings.metrics_address is None:
        raise CommandError("metrics_listen is not set, so supervisors answer nobody", exit_code=2)
    is_well, said = _ask(settings.metrics_address, "/readyz" if ready else "/livez")
    for line in said.splitlines():
        print(shown(line))
    raise typer.Exit(0 if is_well else 1)


def _ask(address: Address, path: str) -> tuple[bool, str]:
    from http.client import HTTPConnection, HTTPException

    host = _EVERYWHERE.get(address.host, address.host)
    asked = HTTPConnection(host, address.port, timeout=ANSWER_S_MAX)
    try:
        asked.request("GET", path)
        answer = asked.getresponse()
        return answer.status == 200, answer.read(ANSWER_BYTES_MAX).decode(errors="replace")
    except (OSError, HTTPException) as error:
        return False, f"nobody answers at {host}:{address.port}: {error}\n"
    finally:
        asked.close()
