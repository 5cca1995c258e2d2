"""The black box of a runner: a few bytes of shared memory that say whose code the runner was executing when it ended.

The runner writes it before each step of a trigger, and whenever a trigger is given a message; the supervisor reads it
after an end of the process that it did not ask for. It holds one record::

    u8 1, the run id, u8 0xFF, then the key and u8 0xFF, or u8 0xFE if there is no key

or begins with 0 while no code of a trigger is executed. UTF-8 has neither of the two bytes that end a text, so a record
is made by appending, which costs next to nothing for each message. Users' code may write to the memory as well, so
`read_record` believes nothing, and the caller compares the run id with those of the runs that it has started. It holds
no secrets (I12): a run id is made of numbers, and the key is that of the message.
"""

from __future__ import annotations

from typing import NamedTuple

from headgate.protocol.messages.runner import KEY_CHARS_MAX

BOX_BYTES = 4096  # a page; more than the longest record
RUN_ID_BYTES_MAX = 255
KEY_BYTES_MAX = 4 * KEY_CHARS_MAX
_BEGIN = b"\x01"
_END = b"\xff"
_NO_KEY = b"\xfe"


class Record(NamedTuple):
    """The run whose code was executed, and the key of the message that it was working on."""

    trigger_run_id: str
    key: str | None = None


def begin_record(trigger_run_id: str) -> bytes:
    """Return the first part of a record, which is the same for all messages of a run."""
    return _BEGIN + trigger_run_id.encode("utf-8", "replace")[:RUN_ID_BYTES_MAX] + _END


def end_record(key: str | None) -> bytes:
    """Return the second part of a record. A key that cannot be written, or is too long, is left out."""
    if key is None or len(key) > KEY_CHARS_MAX:
        return _NO_KEY
    try:
        return key.encode() + _END
    except UnicodeEncodeError:
        return _NO_KEY


def read_record(data: bytes) -> Record | None:
    """Return the record in a box; None if it is empty or anything else than a record."""
    run_id_end = data.find(_END, 1, 1 + RUN_ID_BYTES_MAX + 1)
    if not data.startswith(_BEGIN) or run_id_end <= 1:
        return None
    key_at = run_id_end + 1
    has_key = data[key_at : key_at + 1] != _NO_KEY
    key_end = data.find(_END, key_at, key_at + KEY_BYTES_MAX + 1) if has_key else key_at
    if key_end < 0:
        return None
    try:
        run_id = data[1:run_id_end].decode()
        key = data[key_at:key_end].decode() if has_key else None
    except UnicodeDecodeError:
        return None
    return None if key is not None and len(key) > KEY_CHARS_MAX else Record(run_id, key)
