"""``headgate status`` and ``headgate top``: is everything well, and if not, what first?"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.commands.why import liveness_here
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, print_json_lines
from headgate.cli.tables import fields, print_block, shown

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from headgate.scheduling.status_facts import Problem
    from headgate.store.store import Store

EXIT_NO_DATABASE = 3
TOP_INTERVAL_S = 2.0
DETAILS_SHOWN_MAX = 100  # lines of one problem; --json has all


def status(
    ctx: typer.Context,
    as_json: JsonOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every name behind each line.")] = False,
) -> None:
    """Print all that is wrong, the worst first, each with the command to look further with.

    The exit code is 0 if everything is well, 1 if a person should look, 2 if events or tasks stand still, and 3 if the
    database cannot be used.
    """
    from headgate.scheduling.status import exit_code
    from headgate.store.errors import StoreError

    call = invocation(ctx)
    liveness = liveness_here(call.settings().lease_silence_max_s)
    try:
        with call.store() as store:
            found = store.inspect.status(liveness=liveness)
            _refuse_if_read_only(store, found)
    except (StoreError, CommandError) as error:
        raise CommandError(str(error), exit_code=EXIT_NO_DATABASE) from error
    if as_json:
        print_json_lines(fields(problem, problem.__struct_fields__) for problem in found)
    else:
        _print(found, verbose=verbose)
    raise typer.Exit(exit_code(found))


def _refuse_if_read_only(store: Store, found: list[Problem]) -> None:
    """Raise `DatabaseReadOnly` if no supervisor is alive because none can write: to start one would not help."""
    from headgate.store.db.engine import database_name
    from headgate.store.errors import DatabaseReadOnly

    if any(problem.reason == "no_supervisor" for problem in found):
        why = store.inspect.why_read_only()
        if why is not None:
            raise DatabaseReadOnly(database_name(store.database.engine), why)


def top(
    ctx: typer.Context,
    interval: Annotated[
        float, typer.Option("--interval", min=0.5, max=3600.0, metavar="SECONDS", help="Look this often.")
    ] = TOP_INTERVAL_S,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as if the output was no terminal.")] = False,
) -> None:
    """Show what is wrong, the supervisors, the streams and the running tasks, and go on showing it. Ctrl-C ends it.

    It only reads, and shows what supervisors said with their last heartbeats. If the output is not a terminal, it is
    printed once.
    """
    from headgate.cli.output import console
    from headgate.cli.overview import overview

    call, out = invocation(ctx), console()
    liveness = liveness_here(call.settings().lease_silence_max_s)
    with call.store() as store:
        if once or not out.is_terminal:
            out.print(overview(store, liveness))
            return
        _watch(out, lambda: overview(store, liveness), interval)


def _watch(out: Console, look: Callable[[], RenderableType], interval_s: float) -> None:
    """Show what ``look`` returns until Ctrl-C. A database that is away is waited for."""
    from rich.live import Live

    from headgate.store.errors import StoreError

    with suppress(KeyboardInterrupt), Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown_now = look()
            except StoreError as error:
                shown_now = shown(str(error))
            live.update(shown_now, refresh=True)
            time.sleep(interval_s)


def _print(found: list[Problem], *, verbose: bool) -> None:
    if all(problem.severity == "notice" for problem in found):
        print("everything is well")
    for problem in found:
        print(f"{problem.severity}: {shown(problem.text)}")
        print(f"  next: {shown(problem.next)}")
        if verbose and problem.details:
            print_block("\n".join(problem.details[:DETAILS_SHOWN_MAX]), indent="    ")
            if len(problem.details) > DETAILS_SHOWN_MAX:
                print(f"    and {len(problem.details) - DETAILS_SHOWN_MAX:,} more")
