"""``headgate db``: the tables."""

from __future__ import annotations

import typer

from headgate.cli.invocation import invocation

app = typer.Typer(help="The tables of the database.", no_args_is_help=True)


@app.command()
def upgrade(ctx: typer.Context) -> None:
    """Make the tables, or bring them up to this version of headgate. Safe to run again, and beside others."""
    from headgate.store import schema
    from headgate.store.engine import database_name, open_engine

    settings = invocation(ctx).settings()
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = open_engine(settings.database_url)
    try:
        schema.upgrade(engine)
        print(f"{database_name(engine)} is at revision {schema.current_revision(engine)}")
    finally:
        engine.dispose()
