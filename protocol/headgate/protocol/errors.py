"""Errors of links, values and frame logs, by whose fault they are.

``Local``: this side broke a rule, so the bug is ours. ``Remote``: the peer broke one. The others are about values, DAGs
and frame logs. All errors that ``headgate.protocol`` raises on purpose are subclasses of `ProtocolError`.
"""

from __future__ import annotations

from typing import Final

ID_SHOWN_CHARS_MAX: Final = 250  # of an id in an error; a longer id is itself the error


def sentence_of(error: BaseException) -> str:
    """Return the class and the text of an error, whatever its class: an author's may fail in its own ``__str__``."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException as of_text:
        return f"{name}, whose text cannot be shown: its __str__ raised {type(of_text).__name__}"


class ProtocolError(Exception):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side broke a rule of the protocol; nothing was sent and nothing has changed."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule of the protocol; the link must be closed."""


class FrameTooLong(LocalProtocolError):
    """A message to be sent exceeds the frame limit."""

    def __init__(self, message_name: str, frame_bytes: int, frame_bytes_max: int) -> None:
        super().__init__(f"{message_name} needs a frame of {frame_bytes:,} bytes; the limit is {frame_bytes_max:,}")
        self.message_name = message_name
        self.frame_bytes = frame_bytes
        self.frame_bytes_max = frame_bytes_max


class VersionMismatch(RemoteProtocolError):
    """Supervisor and child speak different versions of the protocol. ``child_name`` is ``runner`` or ``worker``."""

    def __init__(self, child_name: str, *, supervisor: int, child: int) -> None:
        older = child_name if child < supervisor else "supervisor"
        super().__init__(
            f"the supervisor speaks protocol version {supervisor}, the {child_name} version {child}: "
            f"upgrade the headgate that the {older} is started from"
        )
        self.child_name = child_name
        self.supervisor = supervisor
        self.child = child


class ValueNotSerializable(ProtocolError, TypeError):
    """A value has no form on the wire; ``path`` is its place in the author's value, for example ``payload['a'][3]``."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem


class ValueTooLong(ProtocolError, ValueError):
    """A value is too long once encoded; ``head`` is the beginning of its encoding, for diagnosis."""

    def __init__(self, where: str, value_bytes: int, bytes_max: int, head: bytes) -> None:
        super().__init__(f"{where} needs {value_bytes:,} bytes; the limit is {bytes_max:,}")
        self.where = where
        self.value_bytes = value_bytes
        self.bytes_max = bytes_max
        self.head = head


class ValueMalformed(ProtocolError, ValueError):
    """Bytes that should hold an encoded value do not, or hold a type that is not registered here."""


class DagMalformed(ProtocolError, ValueError):
    """A DAG breaks a rule; ``task_id`` is set if one task is at fault."""

    def __init__(self, dag_id: str, task_id: str | None, problem: str) -> None:
        task = "" if task_id is None else f", task {task_id[:ID_SHOWN_CHARS_MAX]!a}"
        super().__init__(f"DAG {dag_id[:ID_SHOWN_CHARS_MAX]!a}{task}: {problem}")
        self.dag_id = dag_id
        self.task_id = task_id
        self.problem = problem


class DagTooLong(ProtocolError, ValueError):
    """A DAG is too long once encoded."""

    def __init__(self, dag_id: str, spec_bytes: int, bytes_max: int) -> None:
        super().__init__(
            f"DAG {dag_id[:ID_SHOWN_CHARS_MAX]!a} needs {spec_bytes:,} bytes on the wire; the limit is {bytes_max:,}"
        )
        self.dag_id = dag_id
        self.spec_bytes = spec_bytes
        self.bytes_max = bytes_max


class FrameLogError(ProtocolError):
    """A frame log cannot be written, or a file is not a frame log this version can read."""
