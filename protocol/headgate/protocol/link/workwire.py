"""Messages between a supervisor and a task worker as bytes, and who may send which; the twin of `wire`."""

from __future__ import annotations

from typing import Final

import msgspec

from headgate.protocol.errors import LocalProtocolError
from headgate.protocol.link.wire import MALFORMED, explain_malformed
from headgate.protocol.link.worksession import WorkRole
from headgate.protocol.messages.worker import (
    FileParsed,
    FromWorker,
    ParseFile,
    Request,
    Response,
    RunStep,
    StepEnded,
    ToWorker,
    WorkerHello,
    WorkerWelcome,
)

WORK_MESSAGE_TYPES: Final[dict[WorkRole, tuple[type[FromWorker | ToWorker], ...]]] = {
    WorkRole.WORKER: (WorkerHello, StepEnded, FileParsed, Request),
    WorkRole.SUPERVISOR: (WorkerWelcome, RunStep, ParseFile, Response),
}

_TAGS: Final[dict[WorkRole, dict[str, str]]] = {
    role: {str(type_.__struct_config__.tag): type_.__name__ for type_ in types}
    for role, types in WORK_MESSAGE_TYPES.items()
}

_ENCODER = msgspec.msgpack.Encoder()
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def encode_work(message: FromWorker | ToWorker) -> bytes:
    """Return the body of the message's frame.

    Raises `LocalProtocolError` where a field has no form on the wire, as `wire.encode_message` does.
    """
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error


def decode_work(sender: WorkRole, body: bytes) -> FromWorker | ToWorker:
    """Return the message in ``body``, which ``sender`` sent.

    Raises `RemoteProtocolError` that says what is wrong: a malformed body, an unknown tag, or a message of the other
    direction.
    """
    try:
        return _FROM_WORKER.decode(body) if sender is WorkRole.WORKER else _TO_WORKER.decode(body)
    except MALFORMED as error:
        peer = sender.peer
        raise explain_malformed(sender.value, peer.value, _TAGS[sender], _TAGS[peer], body, error) from error
