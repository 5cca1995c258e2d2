"""``headgate brokers``: is a source of messages there, may it be read, and may it lose messages?"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from headgate.cli.invocation import CommandError, invocation
from headgate.cli.lists import JsonOption, print_record
from headgate.cli.sources import parse_source

app = typer.Typer(help="Brokers: checking a source before it is read.", no_args_is_help=True)

EXIT_WARNED = 3


@app.command()
def check(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="As in `headgate watchers add --from SOURCE`.")],
    as_json: JsonOption = False,
) -> None:
    """Connect to a broker as a watcher would, and say what is wrong or dangerous; no message is taken.

    The exit code is 0 if the source can be read and nothing about it is dangerous, 3 if it can be read and may lose
    messages, and 1 if it cannot be read.
    """
    from headgate.cli.commands.watchers import encode_kwargs
    from headgate.protocol.messages.queries import GetConnection, SecretText
    from headgate.scheduling.words import counted
    from headgate.supervisor.children.checker import check_broker
    from headgate.supervisor.children.isolation import user_named
    from headgate.supervisor.children.process import environment_of_children
    from headgate.supervisor.queries import QueryRefused, StoreQueries

    classpath, kwargs = parse_source(source, "the argument")
    name = kwargs["connection"]
    with invocation(ctx).store() as store:
        settings = invocation(ctx).resolve().settings
        environment = environment_of_children(settings, store.database.engine.url)
        try:
            found = StoreQueries(store, os.environ).answer(GetConnection(name), dag_run_id=None)
        except QueryRefused as refused:
            raise CommandError(str(refused)) from None
        uri = found.value if isinstance(found, SecretText) else None
        if uri is None:
            raise CommandError(f"there is no connection {name!r}: set it with `headgate connections set {name}`")
        try:
            run_as = None if settings.runner_user is None else user_named(settings.runner_user)
            checked = check_broker(
                classpath, encode_kwargs(kwargs), connection=uri, environment=environment, run_as=run_as
            )
        except (OSError, ValueError) as error:
            raise CommandError(f"the broker cannot be checked: {error}") from error
    if as_json:
        result = {"name": checked.name, "problem": checked.problem, "warnings": checked.warnings, "lag": checked.lag}
        print_record(result, as_json=True)
    elif not checked.problem:
        waiting = "" if checked.lag is None else f"; it has {counted(checked.lag, 'message')}"
        print(f"{checked.name}: it can be read{waiting}")
        for warning in checked.warnings:
            print(f"warning: {warning}")
    if checked.problem:
        raise CommandError(checked.problem)
    if checked.warnings:
        raise typer.Exit(EXIT_WARNED)
