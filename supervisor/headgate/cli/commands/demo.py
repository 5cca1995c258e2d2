"""``headgate demo``: the main job as proof, with real processes, real kills, and an audit of the stored events."""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.invocation import CommandError, invocation

# Started and never imported: they run triggers.
MODULE = "headgate.testing.demo"
POISON_MODULE = "headgate.testing.poison"
BROKER_MODULE = "headgate.testing.brokers.demo"
EVENTS = 10_000
BROKER_EVENTS = 2_000  # each is published with a confirmation of the broker
POISON_EVENTS_MIN = 20  # three of them are bad
DATABASE_VARIABLE = "HEADGATE_DEMO_DATABASE"  # by which it takes the URL of its database
EVENTS_MAX = 1_000_000  # the audit holds all of them in memory, for each subscriber
KILLS_MAX = 1000


class BrokerName(enum.StrEnum):
    """A broker that the demo can start."""

    redis = "redis"
    postgres = "postgres"
    rabbitmq = "rabbitmq"
    nats = "nats"
    kafka = "kafka"


SUBSCRIBERS_MAX = 100  # each is a trigger of its own
PARTITIONS_MAX = 64  # files the writer appends to; more show nothing more


def demo(
    ctx: typer.Context,
    events: Annotated[
        int | None,
        typer.Option(min=1, max=EVENTS_MAX, metavar="N", help=f"Events to write: {EVENTS:,}, or {BROKER_EVENTS:,}."),
    ] = None,
    kills: Annotated[
        int,
        typer.Option(
            min=0,
            max=KILLS_MAX,
            metavar="K",
            help="SIGKILLs for the runner, and one more for the supervisor; with --broker: all kills.",
        ),
    ] = 5,
    subscribers: Annotated[
        int, typer.Option(min=1, max=SUBSCRIBERS_MAX, metavar="S", help="Watchers that share the stream.")
    ] = 3,
    partitions: Annotated[
        int, typer.Option(min=1, max=PARTITIONS_MAX, metavar="P", help="Files the log consists of.")
    ] = 4,
    db: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A PostgreSQL database; the demo makes one of its own beside it."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="SEED", help="Kill at the same moments as an earlier run.")
    ] = None,
    broker: Annotated[
        BrokerName | None,
        typer.Option(help="Read from a private server of this broker, and kill it as well."),
    ] = None,
    poison: Annotated[
        bool, typer.Option("--poison", help="No kills: three messages that subscribers cannot take.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder and the database.")] = False,
) -> None:
    """Write events, kill the processes while the events flow, and show that none is lost and none stored twice.

    With --poison, three subscribers meet a message that one of them cannot take, one that ends the process of another,
    and one from which all derive too large an event. All other messages have to be stored, and these have to be whole
    dead letters of exactly these subscribers.

    With --broker, the events come from a real broker: a server of its own, of whose program this machine must have one.
    Supervisor, runner and broker are killed, at random moments and in the midst of what they do.

    The exit code is 0 only if that is so. The folder of a failed demo is kept.
    """
    if broker is not None:
        _refuse(ctx, "--broker", "poison", "partitions")
    events = events or (EVENTS if broker is None else BROKER_EVENTS)
    if poison:
        _check_poison(ctx, events)
    plan: dict[str, int | str] = {"events": events}
    plan |= {"partitions": partitions} if broker is None else {"broker": broker.value}
    if not poison:
        seed = secrets.randbelow(2**32) if seed is None else seed
        plan |= {"kills": kills, "subscribers": subscribers, "seed": seed}
    module = POISON_MODULE if poison else MODULE if broker is None else BROKER_MODULE
    # The URL of `headgate --db URL demo`; one from a file of settings or the environment may hold real data.
    raise typer.Exit(_prove(module, plan, db or invocation(ctx).flags.get("database_url"), keep=keep))


def _prove(module: str, plan: dict[str, int | str], beside: str | None, *, keep: bool) -> int:
    """Run the demo in a folder and on a database of its own; return its exit code."""
    with _database(beside, keep=keep) as (url, shown):
        folder = Path(tempfile.mkdtemp(prefix="headgate-demo-"))
        print(f"demo in {folder}, on {shown}" + (f", seed {plan['seed']}" if "seed" in plan else ""), flush=True)
        code = 1
        try:
            code = _run(module, [str(folder), *(f"--{name}={value}" for name, value in plan.items())], url)
        finally:
            if code == 0 and not keep:
                shutil.rmtree(folder)
            else:
                print(f"kept: {folder}")
    return code


def _check_poison(ctx: typer.Context, events: int) -> None:
    """Refuse options that have no effect together with ``--poison``. Raises `CommandError`."""
    _refuse(ctx, "--poison", "kills", "subscribers", "seed")
    if events < POISON_EVENTS_MIN:
        raise CommandError(f"--poison needs --events {POISON_EVENTS_MIN} or more", exit_code=2)


def _refuse(ctx: typer.Context, option: str, *others: str) -> None:
    """Raise `CommandError` if one of these is given, which have no effect together with ``option``."""
    for name in others:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise CommandError(f"{option} has no --{name}", exit_code=2)


def _run(module: str, arguments: list[str], url: str | None) -> int:
    """Run the demo in a process of its own; return its exit code. It cleans up before it ends, whatever ends it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    if url is not None:
        environment[DATABASE_VARIABLE] = url
    # Ctrl-C reaches every process of the terminal; this one is asked to end once, with SIGTERM.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    try:
        process = subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], env=environment)
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.signal(number, lambda _number, _frame: process.terminate())
            before.setdefault(number, handler)
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _database(beside: str | None, *, keep: bool) -> Generator[tuple[str | None, str]]:
    """Make a database for the demo; give its URL, and the text that names it. Without ``beside`` it makes its own.

    ``beside`` is the URL of a PostgreSQL database; a second one is created on its server, and dropped at the end
    unless ``keep`` is set. Raises `CommandError`.
    """
    if beside is None:
        yield None, "SQLite"
        return
    from sqlalchemy import create_engine, make_url, text
    from sqlalchemy.exc import ArgumentError, DBAPIError

    try:
        url = make_url(beside)
    except (ArgumentError, ValueError):
        raise CommandError("--db: this is not a URL; use postgresql://user@host/database", exit_code=2) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise CommandError("--db takes a PostgreSQL URL; without it the demo makes its own SQLite file", exit_code=2)
    name = f"headgate_demo_{secrets.token_hex(4)}"
    # Creating and dropping a database cannot be part of a transaction.
    server = create_engine(url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    try:
        with server.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
    except DBAPIError as exc:
        shown = url.render_as_string(hide_password=True)
        raise CommandError(f"no database can be created beside {shown}: {exc.orig}") from exc
    made = url.set(drivername="postgresql", database=name)
    try:
        yield made.render_as_string(hide_password=False), made.render_as_string(hide_password=True)
    finally:
        if not keep:
            with server.connect() as connection:
                # A backend of a killed supervisor may still be there.
                connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        server.dispose()
