"""Run by alembic for every migration command; the connection comes from `headgate.store.db.schema`."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
# The transaction is the caller's: all migrations of one upgrade are done, or none is.
with context.begin_transaction():
    context.run_migrations()
