"""What the two sides of headgate say to each other: bytes in, messages out, and no I/O but the frame log's.

`Connection` is the door for a link, `encode_value` and `decode_value` for authors' values, `FrameLogWriter`,
`read_frames`, `verify` and `describe` for the frame log. The messages are in `headgate.protocol.messages`.
"""

from __future__ import annotations

from headgate.protocol.connection import (
    Connection,
    Observer,
    RunnerConnection,
    SupervisorConnection,
    split_round,
    split_sync,
)
from headgate.protocol.errors import (
    FrameLogError,
    FrameTooLong,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    ValueMalformed,
    ValueNotSerializable,
    ValueTooLong,
    VersionMismatch,
)
from headgate.protocol.framelog import (
    Damaged,
    Finding,
    FrameLogWriter,
    Record,
    Torn,
    Verification,
    describe,
    read_frames,
    verify,
)
from headgate.protocol.session import Direction, Role, State
from headgate.protocol.values import decode_value, encode_value, register
from headgate.protocol.wire import Message

__all__ = [
    "Connection",
    "Damaged",
    "Direction",
    "Finding",
    "FrameLogError",
    "FrameLogWriter",
    "FrameTooLong",
    "LocalProtocolError",
    "Message",
    "Observer",
    "ProtocolError",
    "Record",
    "RemoteProtocolError",
    "Role",
    "RunnerConnection",
    "State",
    "SupervisorConnection",
    "Torn",
    "ValueMalformed",
    "ValueNotSerializable",
    "ValueTooLong",
    "Verification",
    "VersionMismatch",
    "decode_value",
    "describe",
    "encode_value",
    "read_frames",
    "register",
    "split_round",
    "split_sync",
    "verify",
]
