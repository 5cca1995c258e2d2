"""The database of a demo: a new one, made for it and removed with it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator
from pathlib import Path

from headgate.cli.invocation import CommandError


@contextlib.contextmanager
def database_for_demo(beside: str | None, folder: Path, *, keep: bool) -> Generator[str]:
    """Give the URL of a new, empty database.

    Without ``beside`` it is an SQLite file in ``folder``. Else ``beside`` is the URL of a PostgreSQL database;
    a second one is created on its server, and dropped at the end unless ``keep`` is set. Raises `CommandError`.
    """
    if beside is None:
        yield f"sqlite:///{folder}/demo.db"
        return
    from sqlalchemy import create_engine, make_url, text
    from sqlalchemy.exc import ArgumentError, DBAPIError

    try:
        url = make_url(beside)
    except ArgumentError:
        raise CommandError("--db: this is no URL; use postgresql://user@host/database", exit_code=2) from None
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
    try:
        yield url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    finally:
        if not keep:
            with server.connect() as connection:
                # A backend of a killed supervisor may still be there.
                connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        server.dispose()
