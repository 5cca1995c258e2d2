"""Splitting of a `StateChanges` or `StateSync` that is too long for one frame."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headgate.protocol.errors import FrameTooLong
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import RefusedEvent, StateChanges, StateSync

# The order of the fields in the pieces. Events go before ends of triggers, so that an end never overtakes its events;
# confirmations go before starts; cancels go before creates, so that a trigger that is assigned again is ended before it
# is started; absent subscribers go before creates, so that no stream starts without waiting for them; credits and
# redriven messages go after the start of their trigger run; what became of messages goes after the events that derive
# from them.
_ROUND_FIELDS: Final = ("events", "refused", "finished", "described", "redriven", "stuck", "streams")
_SYNC_FIELDS: Final = (
    "persisted",
    "refused",
    "to_cancel",
    "absent",
    "to_create",
    "credits",
    "redeliveries",
    "describe",
)

# The size limit of one element of a tuple, or of a message without any, apart from its variable parts: 9 bytes for an
# integer, 5 for a header, the longest literal; rounded up.
_EVENT_BYTES_FIXED = 96
_PERSISTED_BYTES_FIXED = 9
_ENVELOPE_BYTES_FIXED = 64


def split_round(changes: StateChanges, frame_bytes_max: int) -> list[StateChanges]:
    """Split a round into messages that each fit a frame, all but the last with ``more``.

    Elements keep their order, and no `FinishedTrigger` precedes an event of its run. A round that fits, which is the
    ordinary case, is returned unchanged; it is not encoded to measure it. Its figures go with the last message, and are
    left out if they do not fit. Raises `FrameTooLong` if one element does not fit a frame by itself.
    """
    if changes.figures is not None:
        *before, last = split_round(msgspec.structs.replace(changes, figures=None), frame_bytes_max)
        told = msgspec.structs.replace(last, figures=changes.figures)
        return [*before, told if _encoded_bytes(told) <= frame_bytes_max else last]
    fields = [getattr(changes, field) for field in _ROUND_FIELDS]
    variable_bytes = sum(
        [len(e.payload) + 4 * len(e.trigger_run_id) + (4 * len(e.key) if e.key else 0) for e in changes.events]
    )
    bound = (
        _ENVELOPE_BYTES_FIXED
        + _EVENT_BYTES_FIXED * len(changes.events)
        + variable_bytes
        + sum(_encoded_bytes(elements) for elements in fields[1:] if elements)
    )
    if bound <= frame_bytes_max:
        return [changes]
    pieces = _cut(StateChanges(round=changes.round), _ROUND_FIELDS, fields, frame_bytes_max)
    return [
        msgspec.structs.replace(changes, **piece, more=changes.more or number < len(pieces))
        for number, piece in enumerate(pieces, 1)
    ]


def fits_frame(letter: RefusedEvent, frame_bytes_max: int) -> bool:
    """Whether a round that has only this letter fits a frame; its payload is not encoded to measure it."""
    rest = msgspec.structs.replace(letter, payload_head=b"")
    return _ENVELOPE_BYTES_FIXED + _encoded_bytes(rest) + len(letter.payload_head) <= frame_bytes_max


def split_sync(sync: StateSync, frame_bytes_max: int) -> list[StateSync]:
    """Split a `StateSync` into messages that each fit a frame, all but the last with ``more``.

    All of them carry its round. The order is: ``persisted``, ``refused``, ``to_cancel``, ``absent``, ``to_create``,
    ``credits``, ``redeliveries``, ``describe``; elements keep their order. A message that fits is returned unchanged.
    Raises `FrameTooLong` if one element does not fit a frame by itself.
    """
    fields = [getattr(sync, field) for field in _SYNC_FIELDS]
    bound = (
        _ENVELOPE_BYTES_FIXED
        + _PERSISTED_BYTES_FIXED * len(sync.persisted)
        + sum(_encoded_bytes(elements) for elements in fields[1:] if elements)
    )
    if bound <= frame_bytes_max:
        return [sync]
    pieces = _cut(StateSync(round=sync.round, lease_s=sync.lease_s), _SYNC_FIELDS, fields, frame_bytes_max)
    return [
        msgspec.structs.replace(sync, **piece, more=sync.more or number < len(pieces))
        for number, piece in enumerate(pieces, 1)
    ]


def _cut(
    envelope: StateChanges | StateSync, names: tuple[str, ...], fields: list[tuple[Any, ...]], frame_bytes_max: int
) -> list[dict[str, tuple[Any, ...]]]:
    """Return the fields of each message; each is filled as far as the order of elements allows."""
    envelope_bytes = len(encode_message(envelope))
    pieces: list[dict[str, list[Any]]] = [{name: [] for name in names}]
    elements_bytes = 0
    for name, elements in zip(names, fields, strict=True):
        for element in elements:
            element_bytes = _encoded_bytes(element)
            piece = pieces[-1]
            headers_bytes = sum(_array_header_bytes(len(piece[n]) + (n == name)) - 1 for n in names)
            if envelope_bytes + headers_bytes + elements_bytes + element_bytes > frame_bytes_max:
                if envelope_bytes + element_bytes > frame_bytes_max:
                    what = f"{type(envelope).__name__} with one element of {name}"
                    raise FrameTooLong(what, envelope_bytes + element_bytes, frame_bytes_max)
                piece = {n: [] for n in names}
                pieces.append(piece)
                elements_bytes = 0
            piece[name].append(element)
            elements_bytes += element_bytes
    return [{name: tuple(elements) for name, elements in piece.items()} for piece in pieces]


def _encoded_bytes(part: Any) -> int:
    """Return the encoded size of a part of a message: it is the same inside the message."""
    return len(encode_message(part))


def _array_header_bytes(elements: int) -> int:
    """Return the size of the msgpack header of an array; that of an empty array is 1 byte."""
    if elements < 16:
        return 1
    return 3 if elements < 2**16 else 5
