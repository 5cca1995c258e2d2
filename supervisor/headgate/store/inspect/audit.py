"""What users have done, the newest first."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import and_, select, true

from headgate.store.access.audit import Outcome, Role
from headgate.store.db.transaction import Tx
from headgate.store.db.verbs import Verbs, reading
from headgate.store.tables import audit


class AuditRow(msgspec.Struct, frozen=True):
    """One act. ``before`` and ``after`` are values by name, as far as they are known and no secrets."""

    id: int
    at: datetime
    actor: str
    role: Role
    via: str
    address: str | None
    action: str
    object: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    outcome: Outcome
    request_id: str

    @property
    def change(self) -> str:
        """What has changed, for people: ``is_paused: no, now yes; removed: 3``."""
        before, after = self.before or {}, self.after or {}
        parts = [f"{name}: {_shown(before[name])}, now {_shown(after[name])}" for name in before if name in after]
        one_sided = before.keys() ^ after.keys()
        parts += [f"{name}: {_shown(value)}" for name, value in (before | after).items() if name in one_sided]
        return "; ".join(parts)


def _shown(value: Any) -> str:
    """Return a value of a row as people read it."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(map(_shown, value)) or "none"
        case _:
            return str(value)


class AuditFilter(msgspec.Struct, frozen=True):
    """Which acts are wanted: those of a user, of an action as commands name it, on one object; None: whichever."""

    actor: str | None = None
    action: str | None = None
    object: str | None = None
    since: datetime | None = None


_COLUMNS = [audit.c[name] for name in AuditRow.__struct_fields__]


class AuditInspection(Verbs):
    """The queries about what users have done."""

    @reading
    def audit(
        self, tx: Tx, which: AuditFilter | None = None, *, beyond_id: int | None = None, limit: int
    ) -> list[AuditRow]:
        """Return acts, the newest first, before an id."""
        wanted = which or AuditFilter()
        of = {audit.c.actor: wanted.actor, audit.c.action: wanted.action, audit.c.object: wanted.object}
        conditions = [column == value for column, value in of.items() if value is not None]
        if wanted.since is not None:
            conditions.append(audit.c.at >= wanted.since)
        if beyond_id is not None:
            conditions.append(audit.c.id < beyond_id)
        found = select(*_COLUMNS).where(and_(true(), *conditions)).order_by(audit.c.id.desc()).limit(limit)
        return [_row(**row._mapping) for row in tx.connection.execute(found)]

    @reading
    def act(self, tx: Tx, act_id: int) -> AuditRow | None:
        """Return one act; None if there is none of this id."""
        row = tx.connection.execute(select(*_COLUMNS).where(audit.c.id == act_id)).first()
        return None if row is None else _row(**row._mapping)


def _row(before: str | None, after: str | None, **others: Any) -> AuditRow:
    read = [None if text is None else json.loads(text) for text in (before, after)]
    return AuditRow(before=read[0], after=read[1], **others)
