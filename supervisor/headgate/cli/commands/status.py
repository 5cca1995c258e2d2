"""``headgate status``: is everything well, and if not, what first?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.commands.why import liveness_here
from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, print_json_lines
from headgate.cli.tables import fields, print_block, shown

if TYPE_CHECKING:
    from headgate.scheduling.status import Problem

EXIT_NO_DATABASE = 3
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
    except (StoreError, CommandError) as error:
        raise CommandError(str(error), exit_code=EXIT_NO_DATABASE) from error
    if as_json:
        print_json_lines(fields(problem, problem.__struct_fields__) for problem in found)
    else:
        _print(found, verbose=verbose)
    raise typer.Exit(exit_code(found))


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
