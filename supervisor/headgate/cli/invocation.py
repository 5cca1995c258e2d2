"""What one call of ``headgate`` was given before the name of its command, and what every command needs of it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headgate.protocol.startup import import_structlog
from headgate.supervisor.config import Resolved, Settings, resolve_settings

if TYPE_CHECKING:
    from headgate.store.store import Store


class CommandError(Exception):
    """A command cannot do what it was asked to; the text says why, in one line.

    ``exit_code`` is 2 where the command line itself is wrong, else 1.
    """

    def __init__(self, text: str, *, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


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
    def store(self) -> Generator[Store]:
        """Open the store for one command.

        Raises `CommandError` for a file that does not exist, `SchemaOutOfDate` for a database that has to be
        upgraded first, `DatabaseAway` for one that does not answer.
        """
        from headgate.store.db.engine import open_engine
        from headgate.store.db.schema import require_current
        from headgate.store.db.secrets import Secrets
        from headgate.store.store import Store

        settings = self.settings()
        engine = open_engine(settings.database_url)
        try:
            file = engine.url.database if engine.dialect.name == "sqlite" else None
            if file and file != ":memory:" and not Path(file).exists():
                # Looking at it would create it, and leave an empty file where a name was misspelt.
                raise CommandError(f"there is no database {file} yet: run `headgate db upgrade` to make it")
            # Before the keys: a command that can do nothing yet should not make a key file either.
            require_current(engine)
            store = Store(engine, secrets=Secrets.open(settings.home, settings.fernet_keys))
            with contextlib.closing(store):
                yield store
        finally:
            engine.dispose()


def invocation(ctx: typer.Context) -> Invocation:
    """Return the invocation a command belongs to."""
    found = ctx.find_object(Invocation)
    assert found is not None, "the callback of the application makes it"
    return found
