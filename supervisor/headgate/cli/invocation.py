"""One call of ``headgate``: its global options, its settings, and its access to the store."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import typer

from headgate.protocol.startup import import_structlog
from headgate.supervisor.config import Settings
from headgate.supervisor.setting_sources import Resolved, resolve_settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from headgate.store.access.audit import Actor
    from headgate.store.store import Store

# A row that another process is changing is tried again; such a change takes milliseconds.
BUSY_ROUNDS_MAX = 100
BUSY_PAUSE_S = 0.05
FILES_NAMED_MAX = 3  # in one error


class CommandError(Exception):
    """A command cannot do what it was asked to; the text says why, in one line.

    ``exit_code`` is 2 if the command line itself is wrong, otherwise 1.
    """

    def __init__(self, text: str, *, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def standard_input() -> TextIO:
    """Return the standard input. Raises `CommandError` if it was closed."""
    if sys.stdin is None:  # so Python says it
        raise CommandError("standard input is closed (<&-), and this was to be read from it", exit_code=2)
    return sys.stdin


@dataclass
class Invocation:
    """The global options of one call."""

    flags: dict[str, Any] = field(default_factory=dict)

    def resolve(self, **flags: Any) -> Resolved:
        """Return the settings and where they came from; ``flags`` are those of the command. Raises `ConfigError`."""
        return resolve_settings(flags=self.flags | {key: value for key, value in flags.items() if value is not None})

    def settings(self, **flags: Any) -> Settings:
        """Return the settings, with the log of this process set up by them. Raises `ConfigError`."""
        import_structlog()
        from headgate.supervisor.logs import process_log

        settings = self.resolve(**flags).settings
        process_log.configure(settings)
        return settings

    @contextlib.contextmanager
    def engine(self) -> Generator[Engine]:
        """Open the database for one command.

        Raises `CommandError` for a file that does not exist, `SchemaOutOfDate` for a database that has to be
        upgraded first, `DatabaseAway` for one that does not answer.
        """
        from headgate.store.db.engine import open_engine
        from headgate.store.db.schema import require_current

        engine = open_engine(self.settings().database_url)
        try:
            file = engine.url.database if engine.dialect.name == "sqlite" else None
            if file and file != ":memory:" and not Path(file).exists():
                # Opening it would create it, and leave an empty file if a name was misspelt.
                raise CommandError(f"there is no database {file} yet: run `headgate db upgrade` to make it")
            require_current(engine)
            yield engine
        finally:
            engine.dispose()

    @contextlib.contextmanager
    def store(self) -> Generator[Store]:
        """Open the store for one command: what it does is recorded under the name of the user of this process.

        Raises the errors of `engine`, and `UnusableKey` if this machine does not have the keys of the database.
        """
        from headgate.store.keys import open_secrets
        from headgate.store.store import Store

        with self.engine() as engine:
            settings = self.resolve().settings
            secrets = open_secrets(engine, settings.home, settings.fernet_keys, makes_file=False)
            with Store(engine, secrets=secrets, actor=_actor()) as store, _files_named_for_missing_dags(store):
                yield store


def _actor() -> Actor:
    """Return the user of this process: whoever has the database's URL and the keys may do everything."""
    from headgate.store.access.audit import Actor

    return Actor(f"unix:{user_name()}@{socket.gethostname()}", "admin", "cli")


def user_name() -> str:
    """Return the user of this process, for the record of who did something: not as its environment says."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may have no name for it
        return f"uid {os.getuid()}"


@contextlib.contextmanager
def _files_named_for_missing_dags(store: Store) -> Generator[None]:
    """Add to the error about a DAG that does not exist the files that cannot be parsed: it may be in one of them."""
    from headgate.store.errors import NoSuchRow
    from headgate.store.inspect.dags import LIST_DAGS_MAX

    try:
        yield
    except NoSuchRow as exc:
        if not exc.what.startswith("DAG"):  # `why` takes the name of a trigger or a watcher as well
            raise
        lines = store.inspect.dags(is_paused=None, limit=LIST_DAGS_MAX)
        files = sorted({Path(line.file).name for line in lines if line.import_error})
        if not files:
            raise
        shown = ", ".join(files[:FILES_NAMED_MAX]) + (", ..." if len(files) > FILES_NAMED_MAX else "")
        count = "1 file cannot be parsed" if len(files) == 1 else f"{len(files):,} files cannot be parsed"
        raise CommandError(f"{exc}; {count}: {shown} (headgate dags list)") from exc


def invocation(ctx: typer.Context) -> Invocation:
    """Return the invocation a command belongs to."""
    found = ctx.find_object(Invocation)
    assert found is not None, "the callback of the application makes it"
    return found


Step = Literal["done", "more", "busy"]


def repeat_until_done(step: Callable[[], Step], subject: str) -> None:
    """Call until nothing is left to do, with a pause if others are changing the rows that come next.

    Raises `CommandError` if they do so all the time.
    """
    rounds = 0
    while (came := step()) != "done":
        if came == "more":
            rounds = 0
            continue
        rounds += 1
        if rounds == BUSY_ROUNDS_MAX:
            raise CommandError(f"{subject} is being changed by others all the time; a part may be done: run this again")
        time.sleep(BUSY_PAUSE_S)
