"""``headgate db``: the tables."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headgate.cli.asking import span_s
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.output import JsonOption, print_rows

app = typer.Typer(help="The tables of the database.", no_args_is_help=True)


@app.command()
def upgrade(ctx: typer.Context) -> None:
    """Make the tables, or bring them up to this version of headgate. Safe to run again, and beside others."""
    from headgate.store.db import schema
    from headgate.store.db.engine import database_name, open_engine

    settings = invocation(ctx).settings()
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = open_engine(settings.database_url)
    try:
        schema.upgrade(engine)
        print(f"{database_name(engine)} is at revision {schema.current_revision(engine)}")
    finally:
        engine.dispose()


CLEAN_BATCH_MAX = 10_000  # rows of one transaction: a second or so, far less than a supervisor may be silent


@app.command()
def clean(
    ctx: typer.Context,
    older_than: Annotated[str, typer.Option(metavar="SPAN", help="Only what ended longer ago than this, as in 30d.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; count what can be deleted now.")] = False,
    batch: Annotated[
        int, typer.Option(min=1, max=CLEAN_BATCH_MAX, metavar="N", help="Rows looked at in one transaction.")
    ] = 1000,
    dead_letters: Annotated[bool, typer.Option("--dead-letters", help="Old dead letters, too.")] = False,
    keyed_events: Annotated[
        bool,
        typer.Option(
            "--keyed-events",
            help="Events with a key, too: only where no broker can deliver messages again that are as old as this.",
        ),
    ] = False,
    logs: Annotated[
        bool, typer.Option("--logs", help="The logs of the runs that are deleted, too, but of no earlier ones.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete what is old and needed by nobody: ended runs, ended triggers, their events. Supervisors may go on running.

    Of an open trigger its newest event stays, and so do all events with a key, unless --keyed-events says otherwise: by
    these a message that is delivered again is recognised. Logs are deleted where this machine's log_folder has them.

    A supervisor that has been silent for about as long, cut off or suspended, loses its lease first and stops when it
    is back: it might store again what is deleted.
    """
    from headgate.store.cleaning import CLEAN_AGE_MIN_S, KINDS, UNASKED, Kind
    from headgate.supervisor.logs.task_log_files import delete_logs

    seconds = span_s(older_than, "--older-than")
    if seconds < CLEAN_AGE_MIN_S:
        least = f"{CLEAN_AGE_MIN_S / 3600:.0f}h"
        raise CommandError(f"--older-than must be at least {least}: what is younger may still be needed", exit_code=2)
    asked_for = {"dead_letters": dead_letters, "keyed_events": keyed_events}
    kinds: list[Kind] = [kind for kind in KINDS if kind in UNASKED or asked_for[kind]]
    deleted: dict[str, int] = {}
    failures = 0
    call = invocation(ctx)
    folder = call.settings().log_folder
    with call.store() as store:
        for _, cleaned in store.cleaning.clean(seconds, kinds=kinds, rows_max=batch, is_tried_only=dry_run):
            if cleaned.fenced:
                lose = "would lose their leases" if dry_run else "have lost their leases"
                epochs = ", ".join(map(str, cleaned.fenced))
                print(f"supervisors that were silent for about as long {lose}: {epochs}", file=sys.stderr)
            for table, rows in cleaned.rows.items():
                deleted[table] = deleted.get(table, 0) + rows
            for dag, run in cleaned.runs if logs else ():
                try:
                    files = delete_logs(folder, dag, run, is_tried_only=dry_run)
                except OSError as error:  # the run is gone: nobody will come back for its logs
                    print(f"the logs of {dag} {run} stay: {error}", file=sys.stderr)
                    failures += 1
                else:
                    deleted["log files"] = deleted.get("log files", 0) + files
    if not deleted and not as_json:
        print("nothing is old enough to be deleted")
        return
    count = "can be deleted" if dry_run else "deleted"
    columns = ("table", count.replace(" ", "_"))
    print_rows(({columns[0]: table, columns[1]: rows} for table, rows in deleted.items()), columns, as_json=as_json)
    if dry_run and not as_json:
        print("What becomes free only when these are gone is not counted.")
    if failures:
        raise CommandError(f"the logs of {failures:,} runs that were deleted could not be")
