"""``headgate config``: which settings hold, and where they come from."""

from __future__ import annotations

import typer

from headgate.cli.invocation import invocation
from headgate.cli.output import JsonOption, print_rows

app = typer.Typer(help="The settings.", no_args_is_help=True)


@app.command()
def show(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Print every setting, its value, where it came from and what it is for. Keys and passwords are hidden."""
    from headgate.supervisor import config

    resolved = invocation(ctx).resolve()
    rows = [
        {
            "key": key,
            "value": config.masked(key, getattr(resolved.settings, key)),
            "source": resolved.sources[key],
            "expected": config.expected(key),
            "reason": config.reason(key),
        }
        for key in config.KEYS
    ]
    columns = ["key", "value", "source", "expected", "reason"] if as_json else ["key", "value", "source", "reason"]
    print_rows(rows, columns, as_json=as_json)
