"""Dead letters as the runner reports them: events that cannot be stored, and messages that a trigger does not get.

A letter should be whole, because the broker forgets the message once a whole letter is stored. So it holds the first of
these that has a form on the wire, has at most `LETTER_BYTES_MAX` bytes and fits a frame: the event, or the raw message
that it derives from. If neither does, it has only a head; the message then counts as rejected, and the broker has to
keep it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import structlog

from headgate.child.error_text import storable
from headgate.child.logs import SpecNames
from headgate.protocol.errors import ValueTooLong
from headgate.protocol.link.splitting import fits_frame
from headgate.protocol.messages.runner import (
    ERROR_CHARS_MAX,
    LETTER_BYTES_MAX,
    PASSED_OVER_POSITION,
    REFUSED_HEAD_BYTES_MAX,
    LetterContent,
    RefusedEvent,
    TriggerSpec,
)
from headgate.protocol.values import encode_value
from headgate.runner.outbox import Outbox
from headgate.streams.contract import Undecodable

log = structlog.get_logger(__name__)


class Content(NamedTuple):
    """What a letter may hold. ``data`` is the whole encoded value if it has ``data_bytes``, otherwise its beginning."""

    content: LetterContent
    data: bytes
    data_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether a letter may hold all of it. No value is encoded as nothing."""
        return 0 < len(self.data) == self.data_bytes <= LETTER_BYTES_MAX


def message_content(raw_event: Any) -> Content:
    """Return a raw message of a shared stream as the content of a letter; empty if it has no form on the wire."""
    try:
        data = encode_value(raw_event, where="message", bytes_max=LETTER_BYTES_MAX)
    except ValueTooLong as exc:
        return Content("message", exc.head, exc.value_bytes)
    except BaseException:  # the encoding of an author's own type may raise anything, even SystemExit
        return Content("message", b"", 0)
    return Content("message", data, len(data))


def fill(letter: RefusedEvent, contents: Iterable[Content], frame_bytes_max: int) -> RefusedEvent:
    """Return the letter with the first content that it can hold whole; with the head of one if there is none."""
    head: RefusedEvent | None = None
    for content in contents:
        filled = msgspec.structs.replace(
            letter, content=content.content, payload_head=content.data, payload_bytes=content.data_bytes
        )
        if content.is_whole and fits_frame(filled, frame_bytes_max):
            return msgspec.structs.replace(filled, is_whole=True)
        if head is None and content.data:
            head = msgspec.structs.replace(filled, payload_head=content.data[:REFUSED_HEAD_BYTES_MAX])
    return letter if head is None else head


class PassedOver:
    """The messages that one run of a trigger does not get: each is reported, whole, as a dead letter.

    Implements `headgate.streams.subscription.PassOver`.
    """

    __slots__ = ("_frame_bytes_max", "_outbox", "_reported", "_spec", "keys")

    def __init__(self, spec: TriggerSpec, outbox: Outbox, frame_bytes_max: int) -> None:
        self.keys = frozenset(spec.passed_over)
        self._spec = spec
        self._outbox = outbox
        self._frame_bytes_max = frame_bytes_max
        self._reported = 0

    async def wait_room(self) -> None:
        """Wait until the outbox may have room for a letter."""
        await self._outbox.wait_room()

    @property
    def is_full(self) -> bool:
        """Whether a letter has to wait for room in the outbox."""
        return self._outbox.is_full

    def report(self, raw_event: Any, key: str | None, seq: int | None, *, rejection: str | None = None) -> None:
        """Put the letter of one message into the outbox; ``seq`` is to be confirmed once it is stored.

        ``rejection`` is the reason with which the filter has rejected it, perhaps an empty one; None if it has not.
        """
        spec = self._spec
        self._reported += 1
        reason = f"{spec.name} has failed on this message too often and does not get it any more"
        if rejection is not None:
            reason = f"{spec.name} has rejected this message" + (f": {rejection}" if rejection else "")
        content = message_content(raw_event)
        if isinstance(raw_event, Undecodable):
            reason = f"the message cannot be decoded: {raw_event.reason}"
            content = message_content(raw_event.content)._replace(content="undecoded")
            if not raw_event.is_whole:
                more = content.data_bytes + 1  # that of more than the data
                size = raw_event.whole_bytes if isinstance(raw_event.whole_bytes, int) else more
                content = content._replace(data_bytes=max(more, size))
        letter = RefusedEvent(
            trigger_id=spec.trigger_id,
            trigger_run_id=spec.trigger_run_id,
            sequence_index=-self._reported,  # those of its events begin at 0
            seq=seq or 0,
            reason=storable(reason[:ERROR_CHARS_MAX])[:ERROR_CHARS_MAX],
            payload_bytes=0,
            payload_head=b"",
            key=key,
            position=PASSED_OVER_POSITION,
        )
        filled = fill(letter, [content], self._frame_bytes_max)
        what = "a message is passed over" if rejection is None else "a message is rejected"
        log.warning(what, message_key=key, is_whole=filled.is_whole, **SpecNames(spec))
        self._outbox.enqueue(filled)
