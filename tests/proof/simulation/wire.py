"""The bytes between a supervisor and its runner: two pipes that can be slow, stall, chop, and end anywhere.

What `send` took stays with the pipe when the sender dies, as it would stay with the kernel; a share of it may be lost
all the same, so that a reader sees the end in the middle of a frame.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

import trio

BUFFER_BYTES_MAX = 64 * 1024  # written and not yet read: beyond it a writer has to wait
CHOPPED_BYTES_MAX = 60  # of one read or write, where writes are chopped: mostly less than a frame


class Bell:
    """Wakes one waiter; rung while nobody waits, it wakes the next one at once."""

    def __init__(self) -> None:
        self._is_rung = False
        self._lot = trio.lowlevel.ParkingLot()

    def ring(self) -> None:
        """Wake the waiter."""
        self._is_rung = True
        self._lot.unpark_all()

    async def wait_until(self, deadline: float) -> None:
        """Return when the bell rings, or at ``deadline``; always a checkpoint."""
        if self._is_rung or deadline <= trio.current_time():
            await trio.lowlevel.checkpoint()
        elif deadline == math.inf:
            await self._lot.park()
        else:
            with trio.move_on_at(deadline):
                await self._lot.park()
        self._is_rung = False


class Pipe:
    """One direction. ``latency_s`` passes between a write and the moment its bytes can be read."""

    def __init__(self, rng: random.Random, *, latency_s: float, is_chopped: bool) -> None:
        self._rng = rng
        self._latency_s = latency_s
        self._is_chopped = is_chopped
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._stalled_until = 0.0
        self._is_ended = False
        self.on_data: Callable[[], object] = lambda: None
        self.on_room: Callable[[], object] = lambda: None

    def write(self, data: bytes | memoryview) -> int:
        """Take as much as there is room for; return how much, 0 where there is none. Raises `BrokenPipeError`."""
        if self._is_ended:
            raise BrokenPipeError
        room = BUFFER_BYTES_MAX - self._bytes
        if self._is_chopped:
            room = min(room, self._rng.randint(1, CHOPPED_BYTES_MAX))
        taken = bytes(data[:room])
        if taken:
            self._chunks.append((trio.current_time() + self._latency_s, taken))
            self._bytes += len(taken)
            self.on_data()
        return len(taken)

    def read(self, bytes_max: int) -> bytes | None:
        """Return what has arrived, ``b""`` at the end of the stream, None where one has to wait."""
        now = trio.current_time()
        if now < self._stalled_until:
            return None
        parts = []
        while self._chunks and self._chunks[0][0] <= now and bytes_max > 0:
            at, data = self._chunks.popleft()
            if len(data) > bytes_max:
                self._chunks.appendleft((at, data[bytes_max:]))
                data = data[:bytes_max]
            bytes_max -= len(data)
            parts.append(data)
        if not parts:
            return b"" if self._is_ended and not self._chunks else None
        whole = b"".join(parts)
        self._bytes -= len(whole)
        self.on_room()
        return whole

    def readable_at(self) -> float:
        """When `read` will return something, as far as is known."""
        if self._chunks:
            return max(self._chunks[0][0], self._stalled_until)
        return self._stalled_until if self._is_ended else math.inf

    def stall(self, until: float) -> None:
        """Let nothing arrive before ``until``."""
        self._stalled_until = max(self._stalled_until, until)
        self.on_data()

    def end(self, kept: float) -> None:
        """The writer is gone; the share ``kept`` of what is under way arrives."""
        if self._is_ended:
            return
        self._is_ended = True
        lost = self._bytes - int(self._bytes * kept)
        while lost > 0:
            at, data = self._chunks.pop()
            if len(data) > lost:
                self._chunks.append((at, data[:-lost]))
            self._bytes -= min(lost, len(data))
            lost -= len(data)
        self.on_data()
        self.on_room()


class RunnerStream(trio.abc.Stream):
    """The runner's end, as a trio stream."""

    def __init__(self, up: Pipe, down: Pipe) -> None:
        self._up = up
        self._down = down
        self._room = Bell()
        self._data = Bell()
        up.on_room = self._room.ring
        down.on_data = self._data.ring

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write everything. Raises `trio.BrokenResourceError`."""
        rest = memoryview(data)
        await trio.lowlevel.checkpoint()
        while rest:
            try:
                taken = self._up.write(rest)
            except BrokenPipeError:
                raise trio.BrokenResourceError from None
            rest = rest[taken:]
            if not taken:
                await self._room.wait_until(math.inf)

    async def wait_send_all_might_not_block(self) -> None:
        """Return at once."""
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes; ``b""`` at the end of the stream."""
        has_waited = False
        while (data := self._down.read(max_bytes or BUFFER_BYTES_MAX)) is None:
            await self._data.wait_until(self._down.readable_at())
            has_waited = True
        if not has_waited:
            await trio.lowlevel.checkpoint()
        return data

    async def aclose(self) -> None:
        """Say that nothing more is sent."""
        self._up.end(1.0)
        await trio.lowlevel.checkpoint()


class SupervisorSocket:
    """The supervisor's end, as a non-blocking socket: the four methods that its link uses."""

    def __init__(self, up: Pipe, down: Pipe) -> None:
        self._up = up
        self._down = down

    def setblocking(self, flag: bool) -> None:
        """Agree: it never blocks."""
        assert not flag

    def recv(self, bytes_max: int) -> bytes:
        """Return what there is. Raises `BlockingIOError` where that is nothing."""
        data = self._up.read(bytes_max)
        if data is None:
            raise BlockingIOError
        return data

    def send(self, data: memoryview) -> int:
        """Take a part. Raises `BlockingIOError` where there is no room, `BrokenPipeError` where nobody reads."""
        taken = self._down.write(data)
        if not taken:
            raise BlockingIOError
        return taken

    def close(self) -> None:
        """Say that nothing more is sent."""
        self._down.end(1.0)
