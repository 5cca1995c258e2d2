"""``headgate audit``: what users have done, by commands and by pages."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import ROWS_LISTED, AllOption, JsonOption, RowsOption, WideOption, print_pages
from headgate.cli.options import since
from headgate.cli.tables import Column

app = typer.Typer(help="What users have done.", no_args_is_help=True)


_SHOWN: tuple[Column, ...] = ("at", "actor", "action", "object", ("change", lambda row: row.change), "outcome")


@app.command("list")
def list_acts(
    ctx: typer.Context,
    actor: Annotated[
        str | None, typer.Option("--by", metavar="USER", help="Only of this user, for example unix:ada@host.")
    ] = None,
    action: Annotated[
        str | None, typer.Option("--action", metavar="WORDS", help="Only this: the words of its command: `dags pause`.")
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--object", metavar="NAME", help="Only on this, for example `DAG etl`, `watcher w`.")
    ] = None,
    since_text: Annotated[
        str | None, typer.Option("--since", metavar="WHEN", help="Only since: 2h, 3d, or 2026-01-31T12:00Z.")
    ] = None,
    limit: RowsOption = ROWS_LISTED,
    everything: AllOption = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """List what users have done by commands and by pages, the newest first."""
    from typing import get_args

    from headgate.store.access.audit import Action
    from headgate.store.inspect.audit import AuditFilter, AuditRow

    if action is not None and action not in get_args(Action):
        raise CommandError(f"--action: {action!r} is none of: {', '.join(get_args(Action))}", exit_code=2)
    with invocation(ctx).store() as store:
        which = AuditFilter(actor, action, subject, since(since_text, store.inspect.now))
        page = partial(store.inspect.audit, which)
        print_pages(page, AuditRow, limit=limit, everything=everything, as_json=as_json, wide=wide, shown=_SHOWN)
