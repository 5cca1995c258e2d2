"""Frames: a 4-byte big-endian length, then as many bytes of body.

::

    0        4                        4 + length
    +--------+------------------------+
    | length | body                   |
    +--------+------------------------+

The length counts the body alone. It is never 0 and never more than the frame limit, which both sides know.
"""

from __future__ import annotations

import struct

from headgate.protocol.errors import FrameTooLong, LocalProtocolError, RemoteProtocolError

HEADER_BYTES = 4
FRAME_LIMIT_MAX = 2**32 - 1  # the largest value of the length field, so the frame limit cannot be set higher

_LENGTH = struct.Struct("!I")


def check_frame_limit(frame_bytes_max: int) -> None:
    """Raise ValueError unless ``frame_bytes_max`` can be a frame limit."""
    if not 1 <= frame_bytes_max <= FRAME_LIMIT_MAX:
        raise ValueError(f"the frame limit must be between 1 and {FRAME_LIMIT_MAX:,} bytes, not {frame_bytes_max:,}")


def encode_frame(body: bytes, frame_bytes_max: int, *, message_name: str = "a message") -> bytes:
    """Return ``body`` as a frame.

    Raises `FrameTooLong`, which names the message, for a body over the limit (I11), and
    `LocalProtocolError` for an empty one.
    """
    if len(body) > frame_bytes_max:
        raise FrameTooLong(message_name, len(body), frame_bytes_max)
    if not body:
        raise LocalProtocolError("a frame cannot be empty")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes, read in pieces of any size, into frames.

    Feed it the data of one read, then take frames until `next_frame` returns None. It never holds more than the longest
    frame plus one read (I11), and its work is linear in the number of bytes.
    """

    __slots__ = ("_buffer", "_eof", "_frame_bytes_max")

    def __init__(self, frame_bytes_max: int) -> None:
        check_frame_limit(frame_bytes_max)
        self._frame_bytes_max = frame_bytes_max
        # To delete the front of a bytearray moves its start and not its content, so taking a frame copies nothing
        # that follows it.
        self._buffer = bytearray()
        self._eof = False

    @property
    def frame_bytes_max(self) -> int:
        """The longest body taken, in bytes."""
        return self._frame_bytes_max

    @frame_bytes_max.setter
    def frame_bytes_max(self, frame_bytes_max: int) -> None:
        check_frame_limit(frame_bytes_max)
        self._frame_bytes_max = frame_bytes_max

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes held that were not returned in a frame yet."""
        return len(self._buffer)

    @property
    def at_eof(self) -> bool:
        """Whether the stream has ended and all its frames were taken."""
        return self._eof and not self._buffer

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take data read from the stream.

        Raises `RemoteProtocolError` as soon as the header of the next frame declares a length that is 0 or over the
        limit; `LocalProtocolError` if so many frames were left untaken that the memory bound is exceeded, or after the
        end of the stream.
        """
        if self._eof:
            raise LocalProtocolError("data was fed after the end of the stream")
        self._body_bytes()
        if len(self._buffer) >= HEADER_BYTES + self._frame_bytes_max:
            raise LocalProtocolError("data was fed before the frames received so far were taken")
        self._buffer += data
        self._body_bytes()

    def next_frame(self) -> bytes | None:
        """Return the body of the next frame, or None if it is not complete yet.

        Raises `RemoteProtocolError` if the declared length is 0 or over the limit, or if the stream ended within the
        frame.
        """
        body_bytes = self._body_bytes()
        if body_bytes is None or len(self._buffer) < HEADER_BYTES + body_bytes:
            if self._eof and self._buffer:
                raise RemoteProtocolError(f"the stream ended within a frame, after {len(self._buffer):,} bytes of it")
            return None
        end = HEADER_BYTES + body_bytes
        with memoryview(self._buffer) as whole, whole[HEADER_BYTES:end] as part:
            body = bytes(part)
        del self._buffer[:end]
        return body

    def receive_eof(self) -> None:
        """Take the end of the stream. Frames that are complete can still be taken.

        Raises `RemoteProtocolError` if the buffer holds only the beginning of a frame. If complete frames precede that
        beginning, `next_frame` raises it after them.
        """
        self._eof = True
        body_bytes = self._body_bytes()
        if body_bytes is None or len(self._buffer) < HEADER_BYTES + body_bytes:
            self.next_frame()

    def _body_bytes(self) -> int | None:
        """Return the length that the next frame declares, None if its header is not complete yet."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        body_bytes: int = _LENGTH.unpack_from(self._buffer)[0]
        if body_bytes == 0:
            raise RemoteProtocolError("the peer sent an empty frame")
        if body_bytes > self._frame_bytes_max:
            raise RemoteProtocolError(
                f"the peer declared a frame of {body_bytes:,} bytes; the limit is {self._frame_bytes_max:,}"
            )
        return body_bytes
