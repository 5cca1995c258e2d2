"""Triggers that harm the process they share with all others, as a bug of a user or of a C extension would."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import trio

from headgate.brokers.filelog import FileLogTrigger
from headgate.triggers.base import BaseTrigger, TriggerEvent


class _Kwargs(BaseTrigger):
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"users_runaways.{type(self).__name__}", self.kwargs


class Ticks(_Kwargs):
    """Fires for ever; harms nobody."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while True:
            await trio.sleep(self.kwargs.get("every_s", 0.05))
            yield TriggerEvent("tick")


class _Harms(_Kwargs):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        await trio.sleep(self.kwargs.get("after_s", 0.1))
        self.harm()
        await trio.sleep_forever()
        yield TriggerEvent("never")

    def harm(self) -> None:
        """Overridden."""


class Exits(_Harms):
    """Ends the process at once."""

    def harm(self) -> None:
        os._exit(self.kwargs.get("code", 3))


class Crashes(_Harms):
    """A fault in C code."""

    def harm(self) -> None:
        ctypes.string_at(0)


class Spins(_Harms):
    """Never gives the loop back."""

    def harm(self) -> None:
        while True:
            pass


class SpinsInC(_Harms):
    """Keeps the loop and the GIL."""

    def harm(self) -> None:
        while True:  # a signal ends the call
            ctypes.PyDLL(None).poll(None, 0, 3_600_000)


class ExitsInAThread(_Harms):
    """Ends the process in a thread, which nobody sees."""

    def harm(self) -> None:
        threading.Thread(target=self.exit_later).start()

    @staticmethod
    def exit_later() -> None:
        """End the process when its loop does something else."""
        time.sleep(0.3)
        os._exit(4)


class ExitsInItsConstructor(Ticks):
    """Ends the process before it exists."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        os._exit(5)


class ClosesTheLink(_Harms):
    """Closes descriptors that are not its own."""

    def harm(self) -> None:
        for descriptor in range(3, 64):
            try:
                is_socket = os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
            except OSError:
                continue
            if is_socket:
                os.close(descriptor)


class Scribbles(_Harms):
    """Writes over all memory that the process shares with others, and ends it."""

    def harm(self) -> None:
        with open("/proc/self/maps") as maps:
            lines = [line.split() for line in maps if "black box" in line]
        assert lines, "the box is mapped"
        for fields in lines:
            start, end = (int(text, 16) for text in fields[0].split("-"))
            ctypes.memset(start, 0xFF, end - start)
        os._exit(6)


class ExitsOnMessage(FileLogTrigger):
    """Ends the process when it is given one of these messages."""

    def __init__(self, bad: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bad = bad

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "users_runaways.ExitsOnMessage", {**super().serialize()[1], "bad": self.bad}

    async def filter_shared_stream(self, subscription: Any) -> AsyncIterator[TriggerEvent]:
        async for event in subscription:
            if event["id"] in self.bad:
                sys.stderr.flush()
                os._exit(7)
            yield TriggerEvent(event)
