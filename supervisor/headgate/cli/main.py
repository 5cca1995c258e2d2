"""``headgate``: the application, its global options, and its errors.

An expected error is one line on standard error that begins with ``headgate:``; the exit code is 2 if the command line
or a setting is wrong, and 1 otherwise. ``--debug`` adds the traceback. Any other exception is a bug and keeps its
traceback.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_command

from headgate.cli import usage
from headgate.cli.commands import (
    audit,
    brokers,
    configuration,
    dags,
    database,
    dead_letters,
    demo,
    event_log,
    events,
    examples,
    frames,
    keys,
    metrics,
    runs,
    service,
    signals,
    status,
    streams,
    tasks,
    traces,
    triggerer,
    triggers,
    up,
    users,
    values,
    watchers,
    web,
    why,
)
from headgate.cli.invocation import CommandError, Invocation
from headgate.protocol.errors import ProtocolError
from headgate.protocol.version import VERSION
from headgate.store.errors import DatabaseReplaced, StoreError, UnsupportedDatabase, UnusableKey
from headgate.supervisor.commands import EXIT_DATABASE_REPLACED
from headgate.supervisor.config import ConfigError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_READER_LEFT = 141  # 128 + SIGPIPE: what a shell says of other programs whose reader has gone

app = typer.Typer(
    name="headgate",
    cls=usage.Group,
    help="Durable triggers: no event is acknowledged before it is stored, and none is stored twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",  # joins the lines of a paragraph, and groups commands
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up", rich_help_panel=usage.RUN)(up.up)
app.command("triggerer", rich_help_panel=usage.RUN)(triggerer.run)
app.command("web", rich_help_panel=usage.RUN)(web.web)
app.add_typer(dags.app, name="dags", rich_help_panel=usage.DAGS)
app.add_typer(runs.app, name="runs", rich_help_panel=usage.DAGS)
app.add_typer(tasks.app, name="tasks", rich_help_panel=usage.DAGS)
app.command("why", rich_help_panel=usage.DAGS)(why.why)
app.add_typer(values.variables_app, name="variables", rich_help_panel=usage.DAGS)
app.add_typer(values.connections_app, name="connections", rich_help_panel=usage.DAGS)
app.add_typer(values.pools_app, name="pools", rich_help_panel=usage.DAGS)
app.add_typer(watchers.app, name="watchers", rich_help_panel=usage.TRIGGERS)
app.add_typer(brokers.app, name="brokers", rich_help_panel=usage.TRIGGERS)
app.add_typer(events.events_app, name="events", rich_help_panel=usage.TRIGGERS)
app.add_typer(event_log.consumers_app, name="consumers", rich_help_panel=usage.TRIGGERS)
app.add_typer(signals.app, name="signals", rich_help_panel=usage.TRIGGERS)
app.add_typer(dead_letters.app, name="dlq", rich_help_panel=usage.TRIGGERS)
app.add_typer(streams.app, name="streams", rich_help_panel=usage.TRIGGERS)
app.add_typer(triggers.app, name="triggers", rich_help_panel=usage.TRIGGERS)
app.add_typer(events.triggerers_app, name="triggerers", rich_help_panel=usage.TRIGGERS)
app.command("status", rich_help_panel=usage.MAINTAIN)(status.status)
app.command("top", rich_help_panel=usage.MAINTAIN)(status.top)
app.command("health", rich_help_panel=usage.MAINTAIN)(metrics.health)
app.add_typer(metrics.app, name="metrics", rich_help_panel=usage.MAINTAIN)
app.add_typer(traces.app, name="traces", rich_help_panel=usage.MAINTAIN)
app.add_typer(service.app, name="service", rich_help_panel=usage.MAINTAIN)
app.add_typer(database.app, name="db", rich_help_panel=usage.MAINTAIN)
app.add_typer(audit.app, name="audit", rich_help_panel=usage.MAINTAIN)
app.add_typer(users.app, name="users", rich_help_panel=usage.MAINTAIN)
app.add_typer(keys.app, name="keys", rich_help_panel=usage.MAINTAIN)
app.add_typer(configuration.app, name="config", rich_help_panel=usage.MAINTAIN)
app.add_typer(frames.app, name="frames", rich_help_panel=usage.MAINTAIN)
app.command("examples", rich_help_panel=usage.LEARN)(examples.examples)
app.command("demo", rich_help_panel=usage.LEARN)(demo.demo)


@app.command("help", rich_help_panel=usage.LEARN)
def print_help(
    words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="A command, or a group.")] = None,
) -> None:
    """Print the help of a command, as `--help` after it does."""
    raise typer.Exit(main([*(words or ()), "--help"]))


usage.prepare_help(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headgate {VERSION}")
        raise typer.Exit


@app.callback()
def _global_options(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The file of settings.")] = None,
    home: Annotated[  # no Path, which would be the current folder for the text of a variable that is not set
        str | None, typer.Option(metavar="DIR", help="The folder of the keys, the logs and the SQLite database.")
    ] = None,
    db: Annotated[
        str | None, typer.Option(metavar="URL", help="The database: sqlite:///FILE or postgresql://...")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything, and print tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    ctx.obj = Invocation({"config": config, "home": home, "database_url": db, "log_level": "debug" if debug else None})


@cache
def _commands(name: str | None) -> Callable[..., object]:
    """Return the application with this command, or with all: to read the signatures of all takes longer than most run.

    A group has all of its commands.
    """
    if name is None:
        return get_command(app)
    one = copy.copy(app)
    one.registered_commands = [command for command in app.registered_commands if command.name == name]
    one.registered_groups = [group for group in app.registered_groups if group.name == name]
    return get_command(one)


def _command_in(arguments: Sequence[str]) -> str | None:
    """Return the command, or the group, that is called; None if it takes all of them to say what is meant."""
    names = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    words = iter(arguments)
    for word in words:
        if word in usage.GLOBAL_OPTIONS:
            if usage.GLOBAL_OPTIONS[word]:
                next(words, None)  # its value
        else:
            return word if word in names else None
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # so Python says that it was closed
        # Nothing is begun whose outcome could not be told. A file that is opened later would also get its number, and
        # with it what is printed for people.
        _print_error("standard output is closed (>&-): send it to a file, or to /dev/null")
        return EXIT_ERROR
    try:
        code = _commands(_command_in(given))(args=given, prog_name="headgate", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as exc:
        # The command-line library exits with 1 if the reader of the output has gone.
        return _reader_left() if isinstance(exc.__context__, BrokenPipeError) else int(exc.code or 0)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.TyperException as exc:
        return _usage_error(exc, given)
    except (ConfigError, CommandError, StoreError, ProtocolError, OSError) as exc:
        return _our_error(exc, shows_traceback="--debug" in given)


def _reader_left() -> int:
    """Exit without a word: ``| head`` has read enough. Nothing that is buffered may be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_READER_LEFT


def _usage_error(exc: typer.TyperException, given: list[str]) -> int:
    text = usage.usage_error(exc, given)
    if text.strip():
        _print_error(text)
    # Otherwise it was called without a command, and the help has been printed.
    return exc.exit_code


def _our_error(exc: Exception, *, shows_traceback: bool) -> int:
    if shows_traceback or os.environ.get("HEADGATE_LOG_LEVEL", "").lower() == "debug":
        traceback.print_exception(exc)
    _print_error(_text_of_os_error(exc) if isinstance(exc, OSError) else str(exc))
    if isinstance(exc, CommandError):
        return exc.exit_code
    if isinstance(exc, DatabaseReplaced):
        return EXIT_DATABASE_REPLACED
    return EXIT_USAGE if isinstance(exc, ConfigError | UnsupportedDatabase | UnusableKey) else EXIT_ERROR


def _text_of_os_error(exc: OSError) -> str:
    """Return the error without its number: ``/nope: No such file or directory``."""
    if exc.strerror is None:
        return str(exc)
    return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror


def _print_error(text: str) -> None:
    one_line = " ".join(text.split())
    print(f"headgate: {one_line}", file=sys.stderr)
