"""The audit: who did what, in the transaction that does it.

A store that is opened for a user has an `Actor`. Its verbs that change something are declared by
`headgate.store.db.verbs.acting`, and say by `Tx.act` what they do; that writes a row of ``audit``. A transaction of an
actor that writes without one is not committed: `Unaudited`. Supervisors and programs of users have no actor, and the
same verbs leave no row for them.

An act that needs several transactions has one row: each of them adds its ``counts`` to those of the row, so a part that
is done is there whatever becomes of the rest.

A row has names, and never a value that may be a secret: kwargs, variables, connections, keys, payloads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Literal, NamedTuple
from uuid import uuid4

import msgspec
from sqlalchemy import Connection, insert, select, update

from headgate.store.access.tables import audit

NAME_CHARS_MAX = 400  # of an actor, and of an address
OBJECT_CHARS_MAX = 1000  # a name of a DAG, a run and a task, one after the other
DETAIL_CHARS_MAX = 4000  # of ``before`` and of ``after``; one that is longer says only that

Role = Literal["nobody", "viewer", "operator", "admin"]  # nobody: who has not logged in
Outcome = Literal["done", "unchanged", "refused"]

# The words of the command that does it; a page that does the same leaves the same word.
Action = Literal[
    "consumers add",
    "consumers discard",
    "consumers redeliver",
    "consumers remove",
    "consumers set",
    "connections delete",
    "connections set",
    "dags pause",
    "dags trigger",
    "dags unpause",
    "db clean",
    "dlq discard",
    "dlq edit",
    "dlq redrive",
    "events put",
    "keys add",
    "keys rotate",
    "pools delete",
    "pools set",
    "runs cancel",
    "runs end",
    "signals forget",
    "signals send",
    "streams drift",
    "tasks clear",
    "tasks mark-failed",
    "tasks mark-success",
    "tasks restart",
    "tasks start",
    "tasks stop",
    "triggers orphans",
    "triggers release",
    "users add",
    "users log in",
    "users remove",
    "users revoke",
    "users set",
    "variables delete",
    "variables set",
    "watchers add",
    "watchers pause",
    "watchers remove",
    "watchers restart",
    "watchers resume",
    "watchers set",
]

Detail = Mapping[str, str | int | float | bool | list[str] | None]


class Actor(msgspec.Struct, frozen=True):
    """A user, for one command or one request. ``address`` is that of the browser."""

    name: str
    role: Role
    via: Literal["cli", "web"]
    address: str | None = None
    request_id: str = msgspec.field(default_factory=lambda: uuid4().hex)


class Unaudited(RuntimeError):
    """A transaction of a user was to write without a row in the audit: a mistake of the verb. It is rolled back."""


class Told(NamedTuple):
    """What a row says of an act."""

    action: Action
    subject: str
    before: Detail | None
    after: Detail | None
    outcome: Outcome


class Written(NamedTuple):
    """A row that a transaction has written, and what it says ``after``: there is counted."""

    id: int
    action: Action
    subject: str
    after: Detail
    is_refused: bool = False


def write(connection: Connection, now: datetime, actor: Actor, told: Told) -> int:
    """Write a row; return its id."""
    row = {
        "at": now,
        "actor": _fit(actor.name, NAME_CHARS_MAX),
        "role": actor.role,
        "via": actor.via,
        "address": None if actor.address is None else _fit(actor.address, NAME_CHARS_MAX),
        "action": told.action,
        "object": _fit(told.subject, OBJECT_CHARS_MAX),
        "before": _json(told.before),
        "after": _json(told.after),
        "request_id": actor.request_id,
        "outcome": told.outcome,
    }
    return int(connection.execute(insert(audit).values(**row).returning(audit.c.id)).scalar_one())


def write_more(connection: Connection, last: Written, counts: Mapping[str, int]) -> Written:
    """Add to what is counted in a row that an earlier transaction of the same act has written.

    Two parts of an act on pages may be under way at once, so what is counted by now is read, and held, here.
    """
    counted = select(audit.c.after).where(audit.c.id == last.id).with_for_update()
    stored = connection.execute(counted).scalar_one_or_none()
    after = dict(last.after) if stored is None else json.loads(stored)
    for what, count in counts.items():
        so_far = after.get(what, 0)
        assert isinstance(so_far, int), "what is counted is a number"
        after[what] = so_far + count
    values = {"after": _json(after), "object": _fit(last.subject, OBJECT_CHARS_MAX)}
    if any(counts.values()) and not last.is_refused:
        values["outcome"] = "done"
    connection.execute(update(audit).where(audit.c.id == last.id).values(**values))
    return last._replace(after=after)


def _json(detail: Detail | None) -> str | None:
    if not detail:
        return None
    text = json.dumps(detail, ensure_ascii=True)
    return text if len(text) <= DETAIL_CHARS_MAX else json.dumps({"too long to be kept": len(text)})


def _fit(text: str, chars_max: int) -> str:
    """Return a text as every database stores it: without NUL and surrogates, and not too long."""
    sound = text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    return sound if len(sound) <= chars_max else sound[: chars_max - 1] + "…"
