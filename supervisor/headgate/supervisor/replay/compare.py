"""Compares two messages, and finds where they first differ.

Values that depend on the run are brought into one form before: the ids of trigger runs and of redriven letters are
those of the replay, masked kwargs are compared by their size, what tasks want of triggers (one event, or a credit of
them) is left out, and so is the reason for which a database refused an event, because each database has its own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headgate.protocol.messages.queries import Response, StoredEvent
from headgate.protocol.messages.runner import (
    FromRunner,
    FromSupervisor,
    Redelivery,
    StateChanges,
    StateSync,
    TriggerSpec,
)
from headgate.supervisor.replay.database import masked_bytes, replayed_letter_id

SHOWN_CHARS_MAX = 80  # of a value that differs


class Differs(Exception):
    """The replay and the log differ; ``replayed`` is the core's message, if there was one."""

    def __init__(self, problem: str, replayed: FromSupervisor | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.replayed = replayed


def translated(changes: StateChanges, run_ids: Mapping[str, str]) -> StateChanges:
    """Return the runner's message with the run ids of the replay; a run that the log did not start is marked."""

    def renamed(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            msgspec.structs.replace(part, trigger_run_id=replayed_run_id(part.trigger_run_id, run_ids))
            for part in parts
        )

    return msgspec.structs.replace(
        changes,
        events=renamed(changes.events),
        refused=renamed(changes.refused),
        finished=renamed(changes.finished),
        described=renamed(changes.described),
        redriven=tuple(
            msgspec.structs.replace(end, letter_id=replayed_letter_id(end.letter_id))
            for end in renamed(changes.redriven)
        ),
    )


def replayed_run_id(recorded: str, run_ids: Mapping[str, str]) -> str:
    """Return the run id of the replay for one of the log."""
    # A run that was not started here must not be mistaken for one of the replay's with the same name.
    return run_ids.get(recorded) or f"recorded:{recorded}"


def compared_form(message: FromRunner | FromSupervisor, run_ids: Mapping[str, str] | None = None) -> Any:
    """Return a message in the form that is compared; ``run_ids`` are given for a recorded one."""
    match message:
        case StateSync():
            refused = tuple(
                msgspec.structs.replace(refusal, reason="") if refusal.payload_kept else refusal
                for refusal in message.refused
            )
            specs = tuple(_spec_form(spec, run_ids) for spec in message.to_create)
            given = message.redeliveries
            if run_ids is not None:
                given = tuple(_replayed_redelivery(redelivery, run_ids) for redelivery in given)
            shown = {"refused": refused, "to_create": specs, "redeliveries": given}
            return msgspec.structs.replace(message, **shown, credits=(), lease_s=None)
        case Response(result=StoredEvent() as event) if run_ids is not None:
            run_id = replayed_run_id(event.trigger_run_id, run_ids)
            return msgspec.structs.replace(message, result=msgspec.structs.replace(event, trigger_run_id=run_id))
        case _:
            return message


def _replayed_redelivery(recorded: Redelivery, run_ids: Mapping[str, str]) -> Redelivery:
    run_id = replayed_run_id(recorded.trigger_run_id, run_ids)
    return msgspec.structs.replace(recorded, letter_id=replayed_letter_id(recorded.letter_id), trigger_run_id=run_id)


def _spec_form(spec: TriggerSpec, run_ids: Mapping[str, str] | None) -> TriggerSpec:
    run_id = spec.trigger_run_id if run_ids is None else replayed_run_id(spec.trigger_run_id, run_ids)
    kwargs = b"%d bytes" % masked_bytes(spec.kwargs)
    # The log does not show the tasks that wait for triggers, and so the replay has none.
    return msgspec.structs.replace(spec, trigger_run_id=run_id, kwargs=kwargs, takes_one_event=False, credit=None)


def first_difference(recorded: Any, replayed: Any, path: str = "") -> str | None:
    """Describe where two values first differ (``persisted[3] is 12, replayed 13``); None if they are equal."""
    where = path or "the message"
    if type(recorded) is not type(replayed):
        if isinstance(recorded, msgspec.Struct) and isinstance(replayed, msgspec.Struct):
            return f"{where} is a {type(recorded).__name__}, replayed a {type(replayed).__name__}"
        return f"{where} is {_shown(recorded)}, replayed {_shown(replayed)}"
    if isinstance(recorded, msgspec.Struct):
        for name in recorded.__struct_fields__:
            inner = f"{path}.{name}" if path else name
            found = first_difference(getattr(recorded, name), getattr(replayed, name), inner)
            if found is not None:
                return found
        return None
    if isinstance(recorded, tuple):
        for index, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            found = first_difference(one, other, f"{path}[{index}]")
            if found is not None:
                return found
        if len(recorded) != len(replayed):
            return f"{where} has {len(recorded):,} elements, replayed {len(replayed):,}"
        return None
    return None if recorded == replayed else f"{where} is {_shown(recorded)}, replayed {_shown(replayed)}"


def cut_like(whole: StateSync, cut_off: StateSync) -> StateSync:
    """Return ``whole`` without what is missing from ``cut_off``, a `StateSync` cut off between two of its frames."""
    lists = {name: getattr(cut_off, name) for name in cut_off.__struct_fields__}
    kept = {name: getattr(whole, name)[: len(there)] for name, there in lists.items() if isinstance(there, tuple)}
    return msgspec.structs.replace(whole, **kept)


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[: SHOWN_CHARS_MAX - 3]}..."
