"""A core on a real store in memory and a clock of the test: messages in, commands out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from sqlalchemy import Engine

from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    DescribedTrigger,
    FinishedTrigger,
    FiredEvent,
    FromRunner,
    FromSupervisor,
    Hello,
    RedeliveryEnd,
    RunnerFigures,
    RunnerSettings,
    StateChanges,
    StateSync,
    TriggerSpec,
    Welcome,
)
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store
from headgate.store.triggers.leases import TriggererRow
from headgate.supervisor.commands import Command, Exit, Send, Spawn
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.core_settings import CoreSettings
from headgate.supervisor.queries import StoreQueries
from headgate.supervisor.runner_lifecycle import RunnerState
from headgate.supervisor.triggers.leases import Identity, LeaseTimes

KEYS = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
SETTINGS = CoreSettings(
    runner=RunnerSettings(),
    lease=LeaseTimes(heartbeat_s=5.0, silence_max_s=30.0, poll_interval_s=5.0),
    capacity=10,
    slice_events_max=5,
)
AnyCommand = TypeVar("AnyCommand", bound=Command)
AnyMessage = TypeVar("AnyMessage", bound=FromSupervisor)


class World:
    """One database, one clock, and any number of supervisors with runners made of nothing."""

    def __init__(self, engine: Engine) -> None:
        self.now = 1000.0
        self.secrets = Secrets.open(Path(), KEYS)
        self.engine = engine
        self.store = self.open_store()

    def open_store(self) -> Store:
        return Store(self.engine, secrets=self.secrets, clock=self.clock)

    def clock(self) -> datetime:
        return datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now)

    def supervisor(
        self,
        settings: CoreSettings = SETTINGS,
        *,
        pid: int = 1,
        is_gone: Callable[[TriggererRow], bool] = lambda row: False,
    ) -> Supervised:
        identity = Identity("host", pid, "machine", 0.0)
        answers = StoreQueries(self.store, {"HEADGATE_VAR_REGION": "north"})
        core = SupervisorCore(self.store, identity, settings, is_gone=is_gone, clock=lambda: 0.0, answers=answers)
        return Supervised(self, core)


class Supervised:
    """A core, and what it has said so far."""

    def __init__(self, world: World, core: SupervisorCore) -> None:
        self.world = world
        self.core = core
        self.commands: list[Command] = []
        self._round = 0

    def settle(self) -> None:
        """Step until nothing is due."""
        for _ in range(1000):
            out = list(self.core.step(self.world.now))
            self.commands += out
            if any(isinstance(command, Exit) for command in out):
                return
            if not out and self.core.wake_at() > self.world.now:
                return
        raise AssertionError("the core never comes to rest: it would burn a CPU")

    def pass_time(self, seconds: float) -> None:
        """Let time go by, waking the core whenever it wants to be woken, like the loop does."""
        end = self.world.now + seconds
        while self.world.now < end:
            self.settle()
            if any(isinstance(command, Exit) for command in self.commands):
                self.world.now = end
                return
            self.world.now = min(end, max(self.core.wake_at(), self.world.now + 0.001))
        self.settle()

    def say(self, message: FromRunner, incarnation: int | None = None) -> None:
        self.core.receive(self.core.runner.incarnation if incarnation is None else incarnation, message, self.world.now)
        self.settle()

    def start_runner(self) -> None:
        self.settle()
        (spawn,) = self.take(Spawn)
        self._round = 0
        self.say(Hello(PROTOCOL_VERSION, spawn.incarnation, 4711, "1.0"))
        (welcome,) = self.sent(Welcome)
        assert welcome.incarnation == spawn.incarnation

    def round(
        self,
        *events: FiredEvent,
        finished: tuple[FinishedTrigger, ...] = (),
        described: tuple[DescribedTrigger, ...] = (),
        redriven: tuple[RedeliveryEnd, ...] = (),
        figures: RunnerFigures | None = None,
    ) -> None:
        self._round += 1
        told = {"finished": finished, "described": described, "redriven": redriven, "figures": figures}
        self.say(StateChanges(self._round, events, **told))  # type: ignore[arg-type]

    def heartbeat(self) -> None:
        self.round()

    def pass_time_with_heartbeats(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.pass_time(1.0)
            if self.core.runner.state is RunnerState.RUNNING:
                self.heartbeat()

    def take(self, kind: type[AnyCommand]) -> list[AnyCommand]:
        found: list[AnyCommand] = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return found

    def sent(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        sends = self.take(Send)
        found: list[AnyMessage] = [send.message for send in sends if isinstance(send.message, kind)]
        self.commands += [send for send in sends if not isinstance(send.message, kind)]
        return found

    def created(self) -> list[TriggerSpec]:
        """Take all `StateSync` messages; return the triggers to create."""
        return [spec for sync in self.sent(StateSync) for spec in sync.to_create]

    def answers(self) -> list[StateSync]:
        """Take all `StateSync` messages; return the answers, without what they say of the lease."""
        return [msgspec.structs.replace(sync, lease_s=None) for sync in self.sent(StateSync) if sync.round]

    def leases(self) -> list[float | None]:
        """Take all `StateSync` messages; return for how long the answers say that the lease lasts."""
        return [sync.lease_s for sync in self.sent(StateSync) if sync.round]


def fired(spec: TriggerSpec, index: int, *, key: str | None = None) -> FiredEvent:
    return FiredEvent(spec.trigger_id, spec.trigger_run_id, index, seq=index + 1, payload=b"1", key=key)


def add_watchers(world: World, count: int) -> list[int]:
    return [world.store.add_watcher(f"w{number}", "users.Trigger", {"number": number}) for number in range(count)]


def stored(world: World) -> list[tuple[int, int]]:
    return [(row.trigger_id, row.sequence_index) for row in world.store.inspect.events()]


def cut_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise DatabaseAway("db", "no answer")

    for verb in (
        "store_slice",
        "heartbeat",
        "poll",
        "live_triggerers",
        "release_triggerer",
        "release_owned",
        "reset_failures",
    ):
        monkeypatch.setattr(world.store, verb, away)
