"""Triggers as a user would write them, in a file of theirs outside the package."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import structlog
import trio

from headgate.brokers.filelog import FileLogTrigger
from headgate.triggers.base import BaseTrigger, TriggerEvent
from headgate.triggers.file import FileTrigger

log = structlog.get_logger(__name__)


class _Kwargs(BaseTrigger):
    """Serializes as what it was constructed with."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"users_triggers.{type(self).__name__}", self.kwargs


class Counter(_Kwargs):
    """Counts to ``count`` at once, going on where the stored events end, then waits for ever."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        last = await self.last_event()
        for number in range(0 if last is None else last.payload + 1, self.kwargs["count"]):
            yield TriggerEvent(number, key=str(number))
        await trio.sleep_forever()


class Nameless(_Kwargs):
    """Counts as `Counter` does, with events that have no key."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        last = await self.last_event()
        for number in range(0 if last is None else last.payload + 1, self.kwargs["count"]):
            yield TriggerEvent(number)
        await trio.sleep_forever()


class Every(FileLogTrigger):
    """Fires for every line whose number ``every`` divides."""

    def __init__(self, path: str, group: str, every: int) -> None:
        super().__init__(path, group)
        self.every = every

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "users_triggers.Every", {"path": self.path, "group": self.group, "every": self.every}

    async def filter_shared_stream(self, shared_stream: AsyncIterable[Any]) -> AsyncIterator[TriggerEvent]:
        async for line in shared_stream:
            if line["id"] % self.every == 0:
                yield TriggerEvent(line)


class Surroundings(_Kwargs):
    """Tells what this process can see of its surroundings."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        descriptors = {}
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                descriptors[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
            except FileNotFoundError:
                continue
        lines = (await trio.Path("/proc/self/maps").read_text()).splitlines()
        maps = sorted({line.split()[-1] for line in lines if "/" in line})
        yield TriggerEvent({"environment": dict(os.environ), "descriptors": descriptors, "maps": maps})
        await trio.sleep_forever()


class Blocker(_Kwargs):
    """Blocks the loop, as soon as a file says so, for as long as nobody kills it."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("begun")
        while True:
            if await trio.Path(self.kwargs["when"]).exists():
                time.sleep(3600)  # noqa: ASYNC251 - this is the offence
            await trio.sleep(0.01)


class Stubborn(_Kwargs):
    """Swallows its cancellation and goes on waiting."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("begun")
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()


class Exits(_Kwargs):
    """Calls sys.exit, which must end nobody else."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("begun")
        sys.exit(3)


class Talker(_Kwargs):
    """Says things in every way, and fires when a file is there."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        log, name = structlog.get_logger("author"), self.kwargs["name"]
        sys.stdout.buffer.write(f"{name} prints ".encode() + b"\xff\n")
        print("x" * 100_000, end="")
        print(f"{name} complains", file=sys.stderr)
        logging.getLogger("library").warning("%s waits loudly", name)
        log.info(f"{name} waits")
        async for event in FileTrigger(self.kwargs["go"], poke_interval_s=0.01).run():
            yield event

    async def cleanup(self) -> None:
        structlog.get_logger("author").info(f"{self.kwargs['name']} has cleaned up")
        print("half a line", end="")


class Hooked(_Kwargs):
    """Leaves a file for each hook that was called."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("begun")
        await trio.sleep_forever()

    async def cleanup(self) -> None:
        await trio.Path(self.kwargs["folder"], "cleanup").touch()

    async def on_kill(self) -> None:
        await trio.Path(self.kwargs["folder"], "on_kill").touch()


class FailsOnce(FileLogTrigger):
    """Raises at the first sight of event ``fail_at``, before it has fired anything for it."""

    def __init__(self, *, fail_at: int, marker: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fail_at = fail_at
        self.marker = marker

    def serialize(self) -> tuple[str, dict[str, Any]]:
        classpath, kwargs = super().serialize()
        return classpath, kwargs | {"fail_at": self.fail_at, "marker": self.marker}

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for event in shared_stream:
            marker = trio.Path(self.marker)
            if event["id"] == self.fail_at and not await marker.exists():
                await marker.touch()
                raise ValueError(f"no event {self.fail_at} for me")
            yield TriggerEvent(event)


class Forks(FileLogTrigger):
    """Forks at every fiftieth event. Both processes go on, the first one when its fork has ended."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "users_triggers.Forks", super().serialize()[1]

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for event in shared_stream:
            if event["id"] % 50 == 0 and (pid := os.fork()):
                await trio.to_thread.run_sync(os.waitpid, pid, 0)
            yield TriggerEvent(event)


class Indiscreet(_Kwargs):
    """Reads a variable and a connection, writes them wherever it can, and tells their lengths."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        token = await self.get_variable("token")
        config = await self.get_variable_json("config")
        connection = await self.get_connection("db")
        log.warning("my token is %s", token, config=config, connection=[connection, connection.uri], raw=token.encode())
        logging.getLogger("indiscreet").warning("the password is %s", connection.password)
        print("printed", token, connection.password)
        os.write(2, f"written {token} {connection.password}\n".encode())
        yield TriggerEvent([len(token), config["user"], connection.host, await self.get_variable("none", default=None)])
        if not await trio.Path(self.kwargs["marker"]).exists():
            await trio.Path(self.kwargs["marker"]).touch()
            raise ValueError(f"{connection.uri} does not take {token}")
        await trio.sleep_forever()
