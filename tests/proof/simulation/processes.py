"""The two processes of a pair, simulated around the real halves: the arbiter's loop, and the runner's main."""

from __future__ import annotations

import math
import random
import socket
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, assert_never, cast

import trio
from tests.proof.simulation import records
from tests.proof.simulation.database import FailingStore, said_in
from tests.proof.simulation.wire import Bell, Pipe, RunnerStream, SupervisorSocket

from headgate.child.parent_death import SupervisorGone
from headgate.protocol import marks
from headgate.protocol.black_box import BOX_BYTES, Record, read_record
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import Message, RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    FiredEvent,
    Hello,
    RefusedEvent,
    StateChanges,
    StateSync,
    Welcome,
)
from headgate.runner.black_box import BlackBox
from headgate.runner.link import AsyncLink
from headgate.runner.session import EXIT_ABANDONED, EXIT_DRAINED, EXIT_PROTOCOL, RunnerSession
from headgate.store.triggers.leases import TriggererRow
from headgate.supervisor.children.link import RunnerLink
from headgate.supervisor.commands import Command, DumpStacks, Exit, Kill, Send, Spawn
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.triggers.leases import Identity

if TYPE_CHECKING:
    from tests.proof.simulation.broker import SimulatedProducer
    from tests.proof.simulation.world import World

REAP_S = 0.01  # between the death of a runner and its supervisor's hearing of it
TURNS_AT_ONCE_MAX = 2000  # of a loop, without time going by: more than that burns a CPU
EXIT_BUG = 70
KILLED_BY_SUPERVISOR = "killed by its supervisor"

running_in: ContextVar[RunnerProcess] = ContextVar("running_in")


class Boxes(trio.abc.Instrument):
    """Has each simulated process write its black box, as the loop of each does by itself where there is one a process.

    A box says whose code is executed at the moment, so only that of one process is not empty.
    """

    def __init__(self) -> None:
        self._executing: RunnerProcess | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """See `BlackBox`."""
        runner = task.context.get(running_in)
        if self._executing is not None and self._executing is not runner:
            self._executing.box.before_io_wait(0.0)
        self._executing = runner
        if runner is not None:
            runner.box.before_task_step(task)


class Died(BaseException):
    """Thrown where a supervisor stands, to kill it there."""


class RunnerProcess:
    """One incarnation of a runner."""

    def __init__(self, world: World, supervisor: SupervisorProcess, incarnation: int) -> None:
        self.world = world
        self.supervisor = supervisor
        self.incarnation = incarnation
        world.runners += 1
        self.number = world.runners
        self.is_dead = False
        self.death = trio.Event()
        self.died_at = math.inf
        self.how = ""
        self.box_memory = bytearray(BOX_BYTES)
        self.box = BlackBox(self.box_memory)
        self.last_record: Record | None = None  # of its box, once dead
        self.producers: list[SimulatedProducer] = []
        self.described: set[str] = set()  # triggers that it is to run, and not only to describe
        topology = world.scenario.topology
        rng = random.Random(f"{world.scenario.seed}/pipes/{self.number}")
        self.up = Pipe(rng, latency_s=topology.latency_s, is_chopped=topology.chops_writes)
        self.down = Pipe(rng, latency_s=topology.latency_s, is_chopped=topology.chops_writes)
        self.up.on_data = self.down.on_room = supervisor.bell.ring
        self._stream = RunnerStream(self.up, self.down)
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Do what the runner's main does, with a stream in place of the socket; raises nothing."""
        running_in.set(self)
        self.note(records.RunnerStarted(trio.current_time(), self.number, self.supervisor.number, self.incarnation))
        code = EXIT_BUG
        with self._scope:
            try:
                code = await self._converse()
            except (SupervisorGone, trio.BrokenResourceError):
                code = EXIT_ABANDONED
            except RemoteProtocolError as error:
                self.world.broke("the supervisor, as the runner sees it", error)
                code = EXIT_PROTOCOL
            except Exception as error:
                if not self.is_dead:
                    self.world.broke("the runner", error)
        self.die(f"exit code {code}")

    async def _converse(self) -> int:
        link = AsyncLink(self._stream, Connection(RunnerDialect(self.incarnation), Role.RUNNER))
        # Not the runner's own handshake, which tells the pid and the version: they differ between machines.
        await link.send(Hello(PROTOCOL_VERSION, self.incarnation, self.number, "simulated"))
        welcome = await link.receive()
        assert isinstance(welcome, Welcome)
        marks.reach("session.greeted")
        return await RunnerSession(link, welcome.settings, exit_process=self._exit, box=self.box).run()

    def _exit(self, code: int) -> None:
        self.die(f"exit code {code}")

    @property
    def ended_itself(self) -> bool:
        """Whether its end may be the doing of what it executed; see `ChildProcess.ended_itself`."""
        return self.how.startswith(("exit code", KILLED_BY_SUPERVISOR))

    def die(self, how: str, *, kept: float = 1.0, record: Record | None = None) -> None:
        """Be gone, in this step. ``record``: what its black box says, if that is damaged."""
        if self.is_dead:
            return
        self.note(records.RunnerEnded(trio.current_time(), self.number, how))
        self.is_dead = True
        self.how = how
        self.last_record = record or read_record(bytes(self.box_memory))
        self.world.first_record = self.world.first_record or self.last_record
        self.died_at = trio.current_time()
        self.up.end(kept)
        self.down.end(0.0)
        for producer in self.producers:
            producer.let_go()
        self.death.set()
        self._scope.cancel()
        self.supervisor.bell.ring()

    def note(self, record: records.Record) -> None:
        """Add to the history, unless this is a ghost."""
        if not self.is_dead:
            self.world.note(record)

    async def nap(self, seconds: float) -> None:
        """Sleep, but not beyond death."""
        with trio.move_on_after(seconds):
            await self.death.wait()


class SupervisorProcess:
    """One supervisor: the real core and link, and what the arbiter does with sockets, processes and signals."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.bell = Bell()
        self.runner: RunnerProcess | None = None
        self.is_beside = False  # it shares the work of another, and does not come back when it dies
        self.is_gone = False
        self.is_taken_for_dead = False
        self.is_cut_off = False  # from the database, until it is fenced
        self.slow_s = 0.0
        self._link: RunnerLink | None = None
        self._frozen_until = 0.0
        self._exit: Exit | None = None
        self._down_s = 0.1
        self._scope = trio.CancelScope()
        self.core = self._make_core(Identity("host", number, "machine", 0.0))

    def _make_core(self, identity: Identity) -> SupervisorCore:
        world = self.world
        store: Any = FailingStore(world, self)
        return SupervisorCore(store, identity, world.settings, is_gone=self._is_other_gone, clock=trio.current_time)

    def _is_other_gone(self, row: TriggererRow) -> bool:
        other = self.world.supervisors[row.pid - 1]
        return other.is_gone or other.is_taken_for_dead

    # --- its life ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Turn the loop until the core says exit or something kills it; raises nothing."""
        self.world.note(records.SupervisorStarted(trio.current_time(), self.number))
        with self._scope:
            try:
                await self._loop()
            except Died as died:
                self.die(f"killed at {died}", runner_at_once=True, down_s=0.3)
            except Exception as error:
                self.world.broke("the supervisor", error)
                self.die("a bug", runner_at_once=True, down_s=1.0)

    async def _loop(self) -> None:
        turns, turned_at = 0, -1.0
        while self._exit is None:
            wake_at = min(self.core.wake_at(), self._hear_at())
            await self.bell.wait_until(max(wake_at, self._frozen_until))
            if trio.current_time() < self._frozen_until:
                await trio.sleep_until(self._frozen_until)
            turns = turns + 1 if turned_at == trio.current_time() else 0
            turned_at = trio.current_time()
            if turns > TURNS_AT_ONCE_MAX:
                raise RuntimeError("the supervisor's loop never comes to rest")
            await self._turn()
        self.die(f"exit code {self._exit.code}", runner_at_once=True, down_s=self._down_s)

    def _hear_at(self) -> float:
        """When the runner will be heard of: bytes, or, when it is dead and all its bytes are read, its end."""
        runner, link = self.runner, self._link
        if runner is None or link is None:
            return math.inf
        return runner.died_at + REAP_S if link.is_ended else runner.up.readable_at()

    async def _turn(self) -> None:
        self._receive()
        runner, link = self.runner, self._link
        if runner is not None and link is not None and link.is_ended and self._hear_at() <= trio.current_time():
            self.runner = self._link = None
            gave_up = runner.how.startswith("exit code") and runner.how != f"exit code {EXIT_DRAINED}"
            self.core.runner_ended(
                runner.incarnation,
                runner.how,
                trio.current_time(),
                gave_up=gave_up,
                ended_itself=runner.ended_itself,
                record=runner.last_record,
            )
        commands = self.core.step(trio.current_time())
        if self.slow_s and self.core.leases.is_held:
            seconds, self.slow_s = self.slow_s, 0.0
            await trio.sleep(seconds)
        for command in commands:
            self._handle(command)

    def die(self, how: str, *, runner_at_once: bool, down_s: float) -> None:
        """Be gone, in this step; the runner is killed with it, or finds out."""
        if self.is_gone:
            return
        self.is_gone = True
        self.world.note(records.SupervisorEnded(trio.current_time(), self.number, how))
        runner, self.runner = self.runner, None
        if runner is not None and runner_at_once:
            runner.die("its supervisor is gone")
        elif runner is not None:
            runner.down.end(1.0)
            runner.up.end(0.0)
        self._scope.cancel()
        self.world.supervisor_ended(self, down_s=down_s)

    def freeze(self, until: float) -> None:
        """Stand still."""
        self._frozen_until = max(self._frozen_until, until)

    def drain(self, *, down_s: float) -> None:
        """Take a SIGTERM."""
        self._down_s = down_s
        if not self.core.is_leaving:
            self.core.drain(trio.current_time())
        self.bell.ring()

    # --- what the arbiter does --------------------------------------------------------------------

    def _receive(self) -> None:
        runner, link = self.runner, self._link
        if runner is None or link is None or link.is_ended:
            return
        link.flush()
        try:
            for message in link.receive():
                self._note_report(runner, message)
                self.core.receive(runner.incarnation, message, trio.current_time())
        except RemoteProtocolError as error:
            link.is_ended = True
            self.world.broke("the runner, as the supervisor sees it", error)
            self.core.protocol_failed(error)

    def _handle(self, command: Command) -> None:
        match command:
            case Spawn():
                self._spawn(command.incarnation)
            case Send() if self.runner is not None:
                self._send(self.runner, command)
            case Kill() if self.runner is not None:
                self.runner.die(f"{KILLED_BY_SUPERVISOR}: {command.reason}")
            case Send() | Kill() | DumpStacks():
                pass
            case Exit():
                self._exit = command
            case _:
                assert_never(command)

    def _send(self, runner: RunnerProcess, command: Send) -> None:
        message = command.message
        if isinstance(message, StateSync) and (message.persisted or message.refused):
            self.world.look()
            refused = tuple(refusal.seq for refusal in message.refused)
            self.world.note(records.Confirmed(trio.current_time(), runner.number, message.persisted, refused))
        if isinstance(message, StateSync):
            runner.described |= {spec.name for spec in message.to_create if spec.stream}
        assert self._link is not None
        try:
            self._link.send(message)
        except RemoteProtocolError as error:
            self.world.broke("the runner, as the supervisor sees it", error)
            self.core.protocol_failed(error)

    def _spawn(self, incarnation: int) -> None:
        assert self.runner is None, "one runner at a time"
        self.runner = runner = RunnerProcess(self.world, self, incarnation)

        def observe(sender: Role, message: Message, body: bytes) -> None:
            self.world.note_frame(runner, body, is_up=sender is Role.RUNNER)

        connection = Connection(
            RunnerDialect(incarnation),
            Role.SUPERVISOR,
            frame_bytes_max=self.world.settings.runner.frame_bytes_max,
            observer=observe,
        )
        fake = SupervisorSocket(runner.up, runner.down)
        self._link = RunnerLink(cast(socket.socket, fake), connection, "runner")
        self.world.nursery.start_soon(runner.run)

    def _note_report(self, runner: RunnerProcess, message: Any) -> None:
        if not isinstance(message, StateChanges):
            return
        now, name_of = trio.current_time(), self.world.reader.name_of
        reported: list[FiredEvent | RefusedEvent] = [*message.events, *message.refused]
        for event in reported:
            names = (name_of(event.trigger_id), event.trigger_run_id, event.sequence_index, event.key, event.position)
            handout = said_in(event.payload).get("handout", 0) if isinstance(event, FiredEvent) else 0  # 0: of none
            self.world.note(records.Reported(now, runner.number, event.seq, *names, handout))
        for end in message.finished:
            self.world.note(
                records.Finished(
                    now,
                    runner.number,
                    name_of(end.trigger_id),
                    end.outcome,
                    end.error or str(end.reason),
                    end.message_key,
                )
            )
