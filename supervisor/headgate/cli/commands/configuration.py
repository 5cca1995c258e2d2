"""``headgate config``: the settings, and where each comes from."""

from __future__ import annotations

from operator import itemgetter

import typer

from headgate.cli.invocation import invocation
from headgate.cli.lists import JsonOption, print_json_lines
from headgate.cli.tables import print_table

app = typer.Typer(help="The settings.", no_args_is_help=True)


@app.command()
def show(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Print every setting: its value, its source and its purpose. Keys and passwords are hidden."""
    from headgate.supervisor import setting_sources
    from headgate.supervisor.config import masked

    resolved = invocation(ctx).resolve()
    rows = [
        {
            "key": key,
            "value": masked(key, getattr(resolved.settings, key)),
            "source": resolved.sources[key],
            "expected": setting_sources.expected(key),
            "reason": setting_sources.reason(key),
        }
        for key in setting_sources.KEYS
    ]
    if as_json:
        print_json_lines(rows)
    else:
        print_table(rows, ("key", "value", "source", ("meaning", itemgetter("reason"))))
