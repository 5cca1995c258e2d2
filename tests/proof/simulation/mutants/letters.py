"""Deliberate bugs in the redrive, the edit and the discarding of dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

from sqlalchemy import update

from headgate.protocol.messages.runner import FiredEvent
from headgate.store import fresh_events, letters
from headgate.store.db.transaction import Tx
from headgate.store.ids import LetterState
from headgate.store.inspect.letters import UNRESOLVED
from headgate.store.letters import LetterVerbs
from headgate.store.tables import dead_letter, trigger_event
from headgate.store.triggers import by_hand, dead_letters, redrives

Patch = tuple[Any, str, Any]

ANY_STATE: tuple[LetterState, ...] = get_args(LetterState)


def old_state_is_not_looked_at() -> Sequence[Patch]:
    locked, resolve = letters._locked, letters._resolve

    def locked_in_any(tx: Tx, letter_id: int, verb: str, states: Any) -> Any:
        return locked(tx, letter_id, verb, ANY_STATE)

    def resolve_any(tx: Tx, letter_id: int, states: Any, *rest: Any, **event: Any) -> None:
        resolve(tx, letter_id, ANY_STATE, *rest, **event)

    return [(letters, "_locked", locked_in_any), (letters, "_resolve", resolve_any)]


def kind_and_end_are_lost() -> Sequence[Patch]:
    def fired(**fields: Any) -> FiredEvent:
        return FiredEvent(**{**fields, "kind": "event", "is_last": False})

    return [(letters, "FiredEvent", fired)]


def edit_is_ignored() -> Sequence[Patch]:
    original = letters._locked

    def locked(tx: Tx, letter_id: int, verb: str, states: Any) -> Any:
        row = original(tx, letter_id, verb, states)
        return SimpleNamespace(**{**row._mapping, "edited_payload": None})

    return [(letters, "_locked", locked)]


def what_is_stored_is_overwritten() -> Sequence[Patch]:
    original = fresh_events._find

    def find(tx: Tx, event: FiredEvent) -> Any:
        found = original(tx, event)
        overwriting = update(trigger_event).where(trigger_event.c.id == found.event_id)
        tx.connection.execute(overwriting.values(payload=event.payload))
        return found

    return [(fresh_events, "_find", find)]


def refused_again_after_its_redrive() -> Sequence[Patch]:
    return [(dead_letters, "_is_redelivery", lambda tx, names, payload: False)]


def redriven_is_discarded() -> Sequence[Patch]:
    return [(letters, "UNRESOLVED", (*UNRESOLVED, "redriven"))]


def resolved_before_its_event_is_stored() -> Sequence[Patch]:
    original = LetterVerbs.redrive

    def redrive(self: LetterVerbs, letter_id: int, *, by: str, note: str = "", **limits: Any) -> Any:
        with self.database.writing() as tx:
            letters._locked(tx, letter_id, "redriven", ("open",))
            letters._resolve(tx, letter_id, ("open",), "redriven", by, note)
            redrives.record_action(tx, letter_id, "redriven", by, note)
        target = self._target(letter_id)
        with by_hand.writing_by_hand(self.database, target.trigger_id) as tx:
            opened = update(dead_letter).where(dead_letter.c.id == letter_id)
            tx.connection.execute(opened.values(state="open", resolved_at=None))
        return original(self, letter_id, by=by, note=note, **limits)

    return [(LetterVerbs, "redrive", redrive)]


def act_is_not_recorded() -> Sequence[Patch]:
    return [(letters, "record_action", lambda *arguments, **named: None)]


def redriven_to_a_removed_trigger() -> Sequence[Patch]:
    def target(self: LetterVerbs, letter_id: int) -> Any:
        with self.database.reading() as tx:
            return letters._Target(letters._locked(tx, letter_id, "redriven", ANY_STATE).trigger_id, "event")

    def look(tx: Tx, trigger_id: int, *, locks: bool) -> Any:
        return by_hand._Trigger(None, None)

    return [(LetterVerbs, "_target", target), (by_hand, "_look", look)]
