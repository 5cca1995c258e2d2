"""A supervisor's core at work, with every frame recorded as a capture does; its runner is made of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet
from tests.store.harness import open_migrated_in_memory

from headgate.protocol.framelog.log import FrameLogWriter
from headgate.protocol.link.runner_dialect import Direction, Message
from headgate.protocol.link.wire import encode_message
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    FiredEvent,
    FromRunner,
    FromSupervisor,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
)
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.supervisor.commands import Exit, Send
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.core_settings import CoreSettings
from headgate.supervisor.queries import StoreQueries
from headgate.supervisor.triggers.leases import Identity, LeaseTimes

SETTINGS = CoreSettings(
    runner=RunnerSettings(heartbeat_s=2.0),
    lease=LeaseTimes(heartbeat_s=5.0, silence_max_s=30.0, poll_interval_s=1.0),
    slice_events_max=3,
    drain_s=7.0,
)


class Live:
    """A supervisor at work on a database of its own, with every frame recorded; its runner is made of nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.0
        self.engine = open_migrated_in_memory()
        self.store = Store(self.engine, secrets=Secrets([Fernet.generate_key().decode()], source="the test"))
        self._writer: FrameLogWriter | None = None
        self.sent: list[FromSupervisor] = []
        self._round = 0
        self.neighbours: set[int] = set()  # epochs of other supervisors that live
        self.start_supervisor()

    def start_supervisor(self) -> None:
        """The supervisor before, if there was one, is gone without a word."""
        if self._writer is not None:
            self._writer.close()
        self._writer = FrameLogWriter(self.folder, clock=lambda: self.now)
        identity = Identity("host", 1, "machine", 0.0)
        answers = StoreQueries(self.store, {"HEADGATE_VAR_REGION": "the-north"})
        self.core = SupervisorCore(
            self.store, identity, SETTINGS, is_gone=lambda row: row.id not in self.neighbours, answers=answers
        )

    def start_runner(self) -> None:
        """A runner starts, after the end of the one before."""
        if self.core.runner.incarnation:
            self.core.runner_ended(self.core.runner.incarnation, "killed by SIGKILL", self.now)
        self.pass_time(2.0)
        self._round = 0
        self.say(Hello(PROTOCOL_VERSION, self.core.runner.incarnation, 4711, "0.1.0"))

    def say(self, message: FromRunner, *, heard: bool = True, answered: bool = True) -> None:
        """The runner says something; ``heard``, ``answered``: the supervisor lives, the runner lives, for so long."""
        self._record(Direction.FROM_RUNNER, message)
        if heard:
            self.core.receive(self.core.runner.incarnation, message, self.now)
            if answered:
                self.settle()

    def round(self, *events: FiredEvent, heard: bool = True, answered: bool = True, **fields: Any) -> None:
        """The runner reports a round."""
        self._round += 1
        self.say(StateChanges(self._round, events, **fields), heard=heard, answered=answered)

    def settle(self) -> None:
        for _ in range(1000):
            out = self.core.step(self.now)
            for command in out:
                if isinstance(command, Send):
                    self.sent.append(command.message)
                    self._record(Direction.FROM_SUPERVISOR, command.message)
            if any(isinstance(command, Exit) for command in out):
                return
            if not out and self.core.wake_at() > self.now:
                return
        raise AssertionError("no rest")

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.settle()
            self.now = min(end, max(self.core.wake_at(), self.now + 0.01))
        self.settle()

    def _record(self, direction: Direction, message: Message) -> None:
        assert self._writer is not None
        self._writer.record(direction, self.core.runner.incarnation, message, encode_message(message))

    def specs(self) -> dict[str, TriggerSpec]:
        """The newest run of each watcher."""
        syncs = [message for message in self.sent if isinstance(message, StateSync)]
        return {spec.name: spec for sync in syncs for spec in sync.to_create}

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.hgframe"))

    def close(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self.store.close()
        self.engine.dispose()
