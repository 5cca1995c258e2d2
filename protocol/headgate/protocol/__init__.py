"""What the two sides of headgate say to each other: bytes in, messages out, and no I/O but the frame log's.

`Connection` is the door for a link, `encode_value` and `decode_value` for authors' values, `FrameLogWriter`,
`read_frames`, `verify` and `describe` for the frame log. The messages are in `headgate.protocol.messages.runner`.
"""

from __future__ import annotations

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
from headgate.protocol.framelog.log import (
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
from headgate.protocol.link.connection import (
    Connection,
    Observer,
    RunnerConnection,
    SupervisorConnection,
    split_round,
    split_sync,
)
from headgate.protocol.link.session import Direction, Role, State
from headgate.protocol.link.wire import Message
from headgate.protocol.values import decode_value, encode_value, register

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
