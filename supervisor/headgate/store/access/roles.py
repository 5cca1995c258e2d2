"""Roles of PostgreSQL, each with no more rights than its processes need; `headgate db roles` prints the statements.

================  ====================================================================================
headgate_owner    owns the tables: `headgate db upgrade`, `headgate users`
headgate_supervisor  supervisors, and the other commands: all rows but those of users of the pages
headgate_web      `headgate web`: reads all but secrets, does what its forms do, adds to the audit
headgate_reader   `headgate web --read-only`, dashboards: reads all but secrets
headgate_consumer  programs with `headgate.client`: reads the same, moves consumers, sends signals, starts runs
================  ====================================================================================

No statement takes a right on another table of the database: users keep their own there, and grant rights on them.
Secrets are encrypted anyway; the columns that hold them, and hashes of passwords, are out of reach as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from sqlalchemy import Table

from headgate.store.access.tables import readable
from headgate.store.tables import metadata

ROLES = ("headgate_owner", "headgate_supervisor", "headgate_web", "headgate_reader", "headgate_consumer")
OWNER, SUPERVISOR, WEB, READER, CONSUMER = ROLES
REVISION_TABLE = "alembic_version"

# Tables of which a reader sees nothing, and a supervisor neither.
OF_USERS: Final = frozenset({"web_user", "web_session", "web_guess", "web_browser"})
# What the pages never write, whatever somebody asks them for, but for single columns that are granted below.
NOT_OF_WEB: Final = frozenset({"variable", "connection", "encryption_key", "web_user", "audit", "triggerer"})

# What `headgate.client` writes: places and letters of consumers, signals, and the runs that it starts with them. To
# lock a row is to be allowed to change a column of it.
OF_CONSUMERS: Final = {
    "consumer": "INSERT, UPDATE, DELETE",
    "consumer_letter": "INSERT, UPDATE, DELETE",
    "signal_key": "INSERT, UPDATE",
    "signal": "INSERT, DELETE",
    "signal_start": "INSERT, UPDATE",
    "dag": "UPDATE (parsed_at)",
    "dag_run": "INSERT, UPDATE (needs_look)",
    "task_instance": "INSERT",
}
# What the pages change, but never make or delete, and the columns that they leave as they are: which code runs.
CODE_OF: Final = {"trigger": frozenset({"classpath", "kwargs"}), "dag": frozenset({"name", "file", "spec"})}


def _quote(name: str) -> str:
    return f'"{name}"'


def statements() -> Iterator[str]:
    """Return the statements; they may be repeated, and are to be after each `headgate db upgrade`."""
    for role in ROLES:
        exists = f"SELECT FROM pg_roles WHERE rolname = '{role}'"
        yield f"DO $$ BEGIN IF NOT EXISTS ({exists}) THEN CREATE ROLE {role} NOLOGIN; END IF; END $$;"
    tables = sorted(metadata.tables.values(), key=lambda table: table.name)
    own = (*(table.name for table in tables), REVISION_TABLE)
    yield f"GRANT USAGE, CREATE ON SCHEMA public TO {OWNER};"
    for role in ROLES[1:]:
        yield f"GRANT USAGE ON SCHEMA public TO {role};"
        for name in own:
            yield f"REVOKE ALL ON {_quote(name)} FROM {role};"
        yield f"GRANT SELECT ON {REVISION_TABLE} TO {role};"
    for name in own:
        yield f"ALTER TABLE {_quote(name)} OWNER TO {OWNER};"
    for table in tables:
        name = _quote(table.name)
        if table.name not in OF_USERS:
            yield f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO {SUPERVISOR};"
            yield f"GRANT SELECT ({_readable(table)}) ON {name} TO {READER}, {CONSUMER};"
        yield f"GRANT SELECT ({_readable(table)}) ON {name} TO {WEB};"
        if table.name in CODE_OF:
            yield f"GRANT UPDATE ({_others(table, CODE_OF[table.name])}) ON {name} TO {WEB};"
        elif table.name not in NOT_OF_WEB:
            yield f"GRANT INSERT, UPDATE, DELETE ON {name} TO {WEB};"
    for name, rights in OF_CONSUMERS.items():
        yield f"GRANT {rights} ON {_quote(name)} TO {CONSUMER};"
    yield f"GRANT INSERT, UPDATE (after, object, outcome) ON audit TO {WEB};"
    yield f"GRANT UPDATE (latest_heartbeat) ON triggerer TO {WEB};"  # to lock a row is to be allowed to change it
    yield f"GRANT UPDATE (created_date, password) ON web_user TO {WEB};"  # users change their own
    for role in (SUPERVISOR, WEB, CONSUMER):
        yield f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO {role};"


def _others(table: Table, left_out: Collection[str]) -> str:
    return ", ".join(_quote(column.name) for column in table.columns if column.name not in left_out)


def _readable(table: Table) -> str:
    return ", ".join(_quote(column.name) for column in readable(table))
