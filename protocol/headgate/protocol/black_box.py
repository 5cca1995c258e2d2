"""The black box of a runner: a few bytes of shared memory that say whose code the runner was executing when it ended.

The runner writes it before each step of a trigger, and whenever a trigger is given a message; the supervisor reads it
after an end of the process that it did not ask for. It holds one record::

    u8 1, u16 bytes of the run id, u16 bytes of the key (`NO_KEY` if there is none), the run id, the key

or begins with 0 while no code of a trigger is executed. Users' code may write to the memory as well, so `read_record`
believes nothing, and the caller compares the run id with those of the runs that it has started. It holds no secrets
(I12): a run id is made of numbers, and the key is that of the message.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from headgate.protocol.messages.runner import KEY_CHARS_MAX

BOX_BYTES = 4096  # a page; more than the longest record
RUN_ID_BYTES_MAX = 255
KEY_BYTES_MAX = 4 * KEY_CHARS_MAX
NO_KEY = 0xFFFF
_HEAD = struct.Struct("<BHH")


class Record(NamedTuple):
    """The run whose code was executed, and the key of the message that it was working on."""

    trigger_run_id: str
    key: str | None = None


def write_record(record: Record) -> bytes:
    """Return the bytes of a record. A key that cannot be written, or is too long, is left out."""
    run_id = record.trigger_run_id.encode("utf-8", "replace")[:RUN_ID_BYTES_MAX]
    key = b""
    key_bytes = NO_KEY
    if record.key is not None and len(record.key) <= KEY_CHARS_MAX:
        try:
            key = record.key.encode()
            key_bytes = len(key)
        except UnicodeEncodeError:
            key = b""
    return _HEAD.pack(1, len(run_id), key_bytes) + run_id + key


def read_record(data: bytes) -> Record | None:
    """Return the record in a box; None if it is empty or anything else than a record."""
    if len(data) < _HEAD.size or data[0] != 1:
        return None
    _, run_id_bytes, key_bytes = _HEAD.unpack_from(data)
    key_at = _HEAD.size + run_id_bytes
    end = key_at + (0 if key_bytes == NO_KEY else key_bytes)
    if not 0 < run_id_bytes <= RUN_ID_BYTES_MAX or end - key_at > KEY_BYTES_MAX or end > len(data):
        return None
    try:
        run_id = data[_HEAD.size : key_at].decode()
        key = None if key_bytes == NO_KEY else data[key_at:end].decode()
    except UnicodeDecodeError:
        return None
    return None if key is not None and len(key) > KEY_CHARS_MAX else Record(run_id, key)
