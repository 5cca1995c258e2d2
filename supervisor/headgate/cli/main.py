"""``headgate``: the application, its global options, and how its errors are told.

An error of ours is one line on standard error, beginning with ``headgate:``; the exit code is 2 where the
command line or a setting is wrong, and 1 for everything else. Only ``--debug`` shows a traceback of it. An
exception that is none of ours is a bug, and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from headgate.cli import configuration
from headgate.cli.commands import (
    dags,
    database,
    demo,
    examples,
    frames,
    runs,
    task_logs,
    tasks,
    triggerer,
    triggers,
    up,
    values,
    watchers,
    why,
)
from headgate.cli.commands import events as reading
from headgate.cli.invocation import CommandError, Invocation
from headgate.protocol.errors import ProtocolError
from headgate.protocol.version import VERSION
from headgate.store.errors import StoreError
from headgate.supervisor.config import ConfigError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="headgate",
    help="Durable triggers: no event is acknowledged before it is stored, and none is stored twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(database.app, name="db")
app.command("up")(up.up)
app.command("triggerer")(triggerer.run)
app.add_typer(dags.app, name="dags")
app.add_typer(runs.app, name="runs")
app.add_typer(tasks.app, name="tasks")
tasks.app.command("logs")(task_logs.logs)
app.command("why")(why.why)
app.add_typer(values.variables_app, name="variables")
app.add_typer(values.connections_app, name="connections")
app.add_typer(values.pools_app, name="pools")
app.add_typer(watchers.app, name="watchers")
app.add_typer(triggers.app, name="triggers")
app.add_typer(reading.triggerers_app, name="triggerers")
app.add_typer(reading.events_app, name="events")
app.add_typer(reading.dead_letters_app, name="dlq")
app.add_typer(frames.app, name="frames")
app.add_typer(configuration.app, name="config")
app.command("examples")(examples.examples)
app.command("demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headgate {VERSION}")
        raise typer.Exit


@app.callback()
def _global_options(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The file of settings to read.")] = None,
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of keys and of the embedded database.")
    ] = None,
    db: Annotated[
        str | None, typer.Option(metavar="URL", help="The database: sqlite:///FILE or postgresql://...")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything, and show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    ctx.obj = Invocation({"config": config, "home": home, "database_url": db, "log_level": "debug" if debug else None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given, prog_name="headgate", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as exc:
        # The command-line library leaves this way when the reader of our output has gone.
        return _reader_left() if exc.code == 1 else int(exc.code or 0)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.TyperException as exc:
        return _usage_error(exc)
    except (ConfigError, CommandError, StoreError, ProtocolError, OSError) as exc:
        return _our_error(exc, shows_traceback="--debug" in given)


def _reader_left() -> int:
    """Say nothing: ``| head`` has seen enough. What is still buffered must not be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_ERROR


def _usage_error(exc: typer.TyperException) -> int:
    text = exc.format_message()
    if text.strip():
        _print_error(text)
    # Otherwise it was called without a command, and the help has been printed.
    return exc.exit_code


def _our_error(exc: Exception, *, shows_traceback: bool) -> int:
    if shows_traceback or os.environ.get("HEADGATE_LOG_LEVEL", "").lower() == "debug":
        traceback.print_exception(exc)
    _print_error(str(exc))
    if isinstance(exc, CommandError):
        return exc.exit_code
    return EXIT_USAGE if isinstance(exc, ConfigError) else EXIT_ERROR


def _print_error(text: str) -> None:
    one_line = " ".join(text.split())
    print(f"headgate: {one_line}", file=sys.stderr)
