"""``headgate db``: the tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.commands.why import liveness_here
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, print_json_lines
from headgate.cli.options import span_s
from headgate.cli.tables import print_table
from headgate.scheduling.words import some, span

if TYPE_CHECKING:
    from sqlalchemy import Engine

RUNNING_TOLD_MAX = 5
app = typer.Typer(help="The database: make, upgrade or clean its tables.", no_args_is_help=True)


@app.command()
def upgrade(ctx: typer.Context) -> None:
    """Make the tables, or bring them up to this version of headgate. Safe to run again, and beside others.

    If the database has no key yet, and home has no key file, it makes one.
    """
    from headgate.store.db import schema
    from headgate.store.db.engine import database_name, open_engine
    from headgate.store.keys import open_secrets

    settings = invocation(ctx).settings()
    settings.make_home()
    engine = open_engine(settings.database_url)
    try:
        upgrade_tables(engine, settings.lease_silence_max_s)
        open_secrets(engine, settings.home, settings.fernet_keys, makes_file=True)
        print(f"{database_name(engine)} is at revision {schema.current_revision(engine)}")
    finally:
        engine.dispose()


def upgrade_tables(engine: Engine, silence_max_s: float) -> None:
    """Bring the tables up to date, and warn of supervisors that seem to run on them: they are of another version."""
    from headgate.store.db import schema
    from headgate.store.db.secrets import Secrets
    from headgate.store.inspect.why_facts import state_of
    from headgate.store.store import Store

    before = schema.current_revision(engine)
    if before == schema.head_revision():
        return
    schema.upgrade(engine)
    if before is None:
        return
    with Store(engine, secrets=Secrets.none()) as store:
        liveness = liveness_here(silence_max_s)
        running = [row for row in store.live_triggerers() if state_of(row, liveness) == "alive"]
    if running:
        told = ", ".join(f"{row.id} on {row.hostname}" for row in running[:RUNNING_TOLD_MAX])
        print(
            f"the tables were upgraded while supervisors seem to run that are of the version before: {told}; "
            "stop them, and start them with this one",
            file=sys.stderr,
        )


@app.command()
def roles() -> None:
    """Print the statements that make roles of PostgreSQL with no more rights than each process needs.

    A superuser runs them after `db upgrade`: `headgate db roles | psql DATABASE`. They make roles that cannot log in:
    grant each to the user in the database_url of a process. They may be run again, and have to be after each upgrade.
    """
    from headgate.store.access.roles import statements

    for statement in statements():
        print(statement)


CLEAN_BATCH_MAX = 10_000  # rows of one transaction: a second or so, far less than a supervisor may be silent


DeadLettersOption = Annotated[
    bool, typer.Option("--dead-letters", help="Also dead letters that were redriven or discarded so long ago.")
]
OpenDeadLettersOption = Annotated[
    bool,
    typer.Option(
        "--open-dead-letters",
        help="Also dead letters that nobody has redriven or discarded: their events and messages are lost then.",
    ),
]


@app.command()
def clean(
    ctx: typer.Context,
    older_than: Annotated[str, typer.Option(metavar="SPAN", help="Only rows that ended longer ago, for example 30d.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; count what can be deleted now.")] = False,
    batch: Annotated[
        int, typer.Option(min=1, max=CLEAN_BATCH_MAX, metavar="N", help="Rows looked at in one transaction.")
    ] = 1000,
    dead_letters: DeadLettersOption = False,
    open_dead_letters: OpenDeadLettersOption = False,
    keyed_events: Annotated[
        bool,
        typer.Option(
            "--keyed-events",
            help="Also events with a key: only if no broker can deliver messages again that are as old as this.",
        ),
    ] = False,
    logs: Annotated[bool, typer.Option("--logs", help="Also the logs of the runs that are deleted now.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete old rows that are no longer needed: ended runs and triggers, and their events. Supervisors may run on.

    The newest event of an open trigger is kept, and so are all events with a key, unless --keyed-events is given: a
    message that is delivered again is recognised by them. Logs are deleted in this machine's log_folder.

    A supervisor that has been silent for about as long, because it was cut off or suspended, loses its lease first and
    stops when it is back: otherwise it might store the deleted events again.
    """
    from headgate.store.cleaning import CLEAN_AGE_MIN_S, KINDS, UNASKED, Kind
    from headgate.store.consuming.places import CONSUMERS_LISTED_MAX
    from headgate.supervisor.logs.task_log_deletion import delete_logs

    seconds = span_s(older_than, "--older-than")
    if seconds < CLEAN_AGE_MIN_S:
        least = f"{CLEAN_AGE_MIN_S / 3600:.0f}h"
        raise CommandError(
            f"--older-than: expected at least {least}, because younger rows may still be needed; got {older_than}",
            exit_code=2,
        )
    asked_for = {"dead_letters": dead_letters, "open_dead_letters": open_dead_letters, "keyed_events": keyed_events}
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
                except OSError as error:  # the run is gone: nothing will come back for its logs
                    print(f"the logs of {dag} {run} stay: {error}", file=sys.stderr)
                    failures += 1
                else:
                    deleted["log files"] = deleted.get("log files", 0) + files
        ages_s = store.consumers.oldest(limit=CONSUMERS_LISTED_MAX)
    _print_deleted(deleted, dry_run=dry_run, as_json=as_json)
    _tell_kept({name: age_s for name, age_s in ages_s.items() if age_s >= seconds})
    if failures:
        raise CommandError(f"{failures:,} runs were deleted, but their logs could not be")


def _print_deleted(deleted: dict[str, int], *, dry_run: bool, as_json: bool) -> None:
    count = "can_be_deleted" if dry_run else "deleted"
    lines = [{"table": table, count: rows} for table, rows in deleted.items()]
    if as_json:
        print_json_lines(lines)
    elif not lines:
        print("nothing is old enough to be deleted")
    else:
        print_table(lines, ("table", count))
        if dry_run:
            print("Rows that can be deleted only after these are not counted.")


def _tell_kept(ages_s: dict[str, float]) -> None:
    """Tell for which consumers old events are kept: one that nobody runs any more keeps all of its trigger's."""
    if ages_s:
        told = some([f"{name} ({span(age_s)})" for name, age_s in ages_s.items()])
        print(
            f"older events are kept for consumers that have yet to get them: {told}; `headgate consumers remove` "
            "removes those that are not needed any more",
            file=sys.stderr,
        )
