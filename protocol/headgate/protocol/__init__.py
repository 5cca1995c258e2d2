"""The protocol between the supervisor and its children: bytes in, messages out, and no I/O except the frame log's.

`Connection` is one side of a link, `encode_value` and `decode_value` are for authors' values; `FrameLogWriter`,
`read_frames`, `verify` and `describe` are the frame log. The messages are in `headgate.protocol.messages`.
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
from headgate.protocol.link.connection import Connection, Observer
from headgate.protocol.link.runner_dialect import Direction, Message, RunnerDialect
from headgate.protocol.link.session import State
from headgate.protocol.link.splitting import split_round, split_sync
from headgate.protocol.link.wire import Role
from headgate.protocol.link.worker_dialect import WorkerDialect
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
    "RunnerDialect",
    "State",
    "Torn",
    "ValueMalformed",
    "ValueNotSerializable",
    "ValueTooLong",
    "Verification",
    "VersionMismatch",
    "WorkerDialect",
    "decode_value",
    "describe",
    "encode_value",
    "read_frames",
    "register",
    "split_round",
    "split_sync",
    "verify",
]
