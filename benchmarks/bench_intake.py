"""The supervisor's core by itself: encoded frames in, rows down, encoded answers out. No sockets, no runner."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from structlog.testing import capture_logs

from benchmarks import nothing
from benchmarks.databases import KEYS, Database, add_triggers, bare_driver, fresh, moment
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.framing import encode_frame
from headgate.protocol.link.runner_dialect import Message, RunnerDialect
from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.messages.runner import (
    FRAME_BYTES_MAX,
    PROTOCOL_VERSION,
    FiredEvent,
    Hello,
    StateChanges,
    StateSync,
)
from headgate.protocol.values import encode_value
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.supervisor.commands import Command, Send, Spawn
from headgate.supervisor.config import Settings
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.serve import core_settings, this_process

STEPS_MAX = 10_000  # of the core for one answer; it needs a few
EVENTS = "events"


class Supervisor:
    """A core that has a runner made of nothing: bytes of it go in, bytes to it come out."""

    def __init__(self, database: Database) -> None:
        self.store = Store(database.engine(), secrets=Secrets([KEYS], source="the benchmarks"))
        self._core = SupervisorCore(self.store, this_process(), core_settings(Settings()), is_gone=lambda row: False)
        self._step_until(lambda command: isinstance(command, Spawn))
        self._incarnation = self._core.runner.incarnation
        self._link = Connection(RunnerDialect(self._incarnation), Role.SUPERVISOR)
        self.receive(frame_of(Hello(PROTOCOL_VERSION, self._incarnation, 1, "benchmark")))
        self._step_until(lambda command: isinstance(command, Send) and isinstance(command.message, StateSync))

    def receive(self, data: bytes) -> None:
        """Take what a runner sent."""
        self._link.receive_data(data)
        while (message := self._link.next_message()) is not None:
            self._core.receive(self._incarnation, message, time.monotonic())

    def answer(self, round_: int) -> bytes:
        """Step until a round is answered; return the last bytes of what goes to the runner."""

        def is_answer(command: Command) -> bool:
            return (
                isinstance(command, Send) and isinstance(command.message, StateSync) and command.message.round == round_
            )

        return self._step_until(is_answer)

    def _step_until(self, is_it: Callable[[Command], bool]) -> bytes:
        for _ in range(STEPS_MAX):
            found, data = False, b""
            for command in self._core.step(time.monotonic()):
                if isinstance(command, Send):
                    data = self._link.send(command.message)
                found = found or is_it(command)
            if found:
                return data
        raise BenchFailed("the core does not do what it was to do")


def frame_of(message: Message) -> bytes:
    """Encode a message as the runner's side does."""
    return encode_frame(encode_message(message), FRAME_BYTES_MAX, message_name=type(message).__name__)


def run_core(kind: str, *, frames: int, events_per_frame: int) -> Figures:
    """Feed frames to a core, one answered after the other; return the events a second."""
    payload = encode_value({"order": 1, "amount": 1800}, where="payload")
    data = []
    for number in range(frames):
        first = number * events_per_frame
        events = tuple(
            FiredEvent(1, "run-1", index, index + 1, payload, str(index))
            for index in range(first, first + events_per_frame)
        )
        data.append(frame_of(StateChanges(round=number + 1, events=events)))
    with fresh(kind) as database:
        add_triggers(database, "nobody.Loads", [{}])
        with capture_logs():
            supervisor = Supervisor(database)
            begun = time.monotonic()
            for round_, frame in enumerate(data, start=1):
                supervisor.receive(frame)
                supervisor.answer(round_)
            took_s = time.monotonic() - begun
            supervisor.store.close()
        rows = database.count("trigger_event")
    if rows != frames * events_per_frame:
        raise BenchFailed(f"{rows:,} rows are stored of {frames * events_per_frame:,}")
    return {EVENTS: rows / took_s}


def run_driver(kind: str, *, frames: int, events_per_frame: int) -> Figures:
    """Have the bare driver store as many rows, as many a commit."""
    payload = encode_value({"order": 1, "amount": 1800}, where="payload")
    with fresh(kind) as database:
        add_triggers(database, "nobody.Loads", [{}])
        driver = bare_driver(database)
        groups = [
            [
                nothing.event_row(1, index, str(index), payload, moment(kind))
                for index in range(number * events_per_frame, (number + 1) * events_per_frame)
            ]
            for number in range(frames)
        ]
        begun = time.monotonic()
        for rows in groups:
            driver.store(rows)
        took_s = time.monotonic() - begun
        driver.close()
    return {EVENTS: frames * events_per_frame / took_s}


def cases(options: Options) -> list[Case]:
    """Return one case for each database and size of frames."""
    made = []
    for kind in options.databases:
        for size in options.of((1, 10, 100, 1000), (1, 100), (1, 100)):
            events = options.of(10_000, 5000, 1000)
            frames = max(1, min(events // size, options.of(150, 100, 10)))
            target = Target(ratio_min=0.6) if size == 100 else Target()
            made.append(case(kind, size, frames, target))
    return made


def case(kind: str, size: int, frames: int, target: Target) -> Case:
    """Return the case of frames of one size."""
    return Case(
        f"{kind}, {size:,} a frame",
        [Figure(EVENTS, "events/s", target)],
        lambda: run_core(kind, frames=frames, events_per_frame=size),
        lambda: run_driver(kind, frames=frames, events_per_frame=size),
    )


BENCH = Bench(
    "intake",
    "intake: frames into the supervisor's core, rows and answers out",
    "the bare driver storing the same rows in the same table, as many a commit (PostgreSQL: executemany)",
    cases,
    repeats=7,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
