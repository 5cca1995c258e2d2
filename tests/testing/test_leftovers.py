"""What a trigger has left behind when it has ended, beside a server in the test's own process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from headgate.testing import LeftBehind, run_trigger
from headgate.triggers.base import BaseTrigger, TriggerEvent


class Connects(BaseTrigger):
    """Connects to a server in the test's process, which accepts and closes in its own time; closes its own end."""

    server: socket.socket
    kept: list[socket.socket]
    closes = True

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        client = socket.socket(self.server.family)
        client.connect(self.server.getsockname())
        type(self).kept = [self.server.accept()[0], client]
        if self.closes:
            client.close()
        yield TriggerEvent()


class ConnectsAndKeeps(Connects):
    closes = False


class Serves(Connects):
    """Is the server as well."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.server.listen()
        async for event in super().run():
            yield event


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX], ids=["TCP", "Unix"])
@pytest.mark.parametrize(
    ("trigger", "leaves"),
    [(Connects, None), (ConnectsAndKeeps, r"^[^;]*a socket\)$"), (Serves, r"^[^;]*a socket\)$")],
    ids=["closed", "kept", "its own server"],
)
def test_what_a_server_in_the_test_has_accepted_is_not_left_behind(
    trigger: type[Connects], leaves: str | None, family: socket.AddressFamily, tmp_path: Path
) -> None:
    with socket.socket(family) as server:
        server.bind(("0.0.0.0", 0) if family == socket.AF_INET else str(tmp_path / "socket"))
        if trigger is not Serves:
            server.listen()
        Connects.server = server
        with nullcontext() if leaves is None else pytest.raises(LeftBehind, match=leaves):
            run_trigger(trigger())
        for sock in trigger.kept:
            sock.close()
