"""Replays the frames of one supervisor: a real core, driven by the log.

The core is a function of its inputs. The runner's messages are in the log; the acts of users, other supervisors,
signals and the clock are not, but the next messages of the supervisor show them. So a runner's frame is held until an
answer in the log shows that it was handled, and an act from outside happens when the log shows its consequence
(`headgate.supervisor.replay.acts`). The core's clock stands still unless the log shows that time has passed.

Rounds without an answer at the death of a supervisor are in doubt: they may have been stored or not. They are stored as
far as a later answer in the log shows them, and no further.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from headgate.protocol.errors import ProtocolError, RemoteProtocolError
from headgate.protocol.framelog.log import mask
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.session import Session
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.queries import LastEvent, Request, Response, StoredEvent
from headgate.protocol.messages.runner import (
    Drain,
    FiredEvent,
    FromRunner,
    FromSupervisor,
    Hello,
    RunnerSettings,
    StateChanges,
    StateSync,
    Welcome,
)
from headgate.supervisor.commands import DumpStacks, Exit, Kill, Send, Spawn
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.core_settings import CoreSettings
from headgate.supervisor.replay.acts import Acts
from headgate.supervisor.replay.compare import (
    Differs,
    compared_form,
    cut_like,
    first_difference,
    replayed_run_id,
    translated,
)
from headgate.supervisor.replay.database import TRIGGER_ID_MAX, ReplayStore
from headgate.supervisor.replay.log import Frame
from headgate.supervisor.replay.look_ahead import EventName, LogIndex, Pieces, RunnerName
from headgate.supervisor.replay.rows import Rows
from headgate.supervisor.replay.unshown import UnshownParts
from headgate.supervisor.runner_lifecycle import RunnerState
from headgate.supervisor.triggers.leases import Identity, LeaseTimes

# The clock stands still but for these jumps. Each is long enough for its purpose, and too short for anything else.
POLL_INTERVAL_S = 1.0
RESPAWN_WAIT_S = 0.1
POLL_JUMP_S = 2.0  # the next poll, and the next respawn
RETRY_WAIT_S = 1e5  # those that failed are due when the log shows it
NEVER_S = 1e9  # no heartbeat is due within a replay, and nobody silent
FENCED_JUMP_S = 2 * NEVER_S  # the next heartbeat, which finds the lease gone

DRAIN_S = 30.0  # if the log shows none, nothing depends on it

STEPS_MAX = 1_000_000  # steps of the core between two frames of a log; a round of 16 MiB takes some thousands
RUNNERS_SILENT_MAX = 10_000  # incarnations in a row that died before they said anything


class ReplayStuck(Exception):
    """The core does not come to rest, or its database cannot be used: the replay has no result."""


class SupervisorRun:
    """One supervisor, from its first frame in the log to its last."""

    def __init__(self, number: int, store: ReplayStore, rows: Rows, index: LogIndex, run_ids: dict[str, str]) -> None:
        self._number = number
        self._store = store
        self._rows = rows
        self._index = index
        self._run_ids = run_ids  # of the log to those of the replay, for all supervisors
        self._core = _core(store, index.settings.get(number), index.drain_s.get(number))
        self._now = 0.0
        self._session: Session | None = None
        self._incarnation = 0  # of that session
        self._broken = ""  # why the current runner's conversation is over
        self._frame = 0
        # Messages of the runner that, by the log so far, have not been handled.
        self._held: deque[tuple[int, StateChanges]] = deque()
        self._queries: dict[int, Request] = {}
        self._started: set[int] = set()  # the triggers that the log has shown to be started
        # Messages of the core that the log has not shown yet.
        self._spawned: deque[int] = deque()
        self._exit: Exit | None = None
        self._said: deque[FromSupervisor] = deque()
        self._unshown = UnshownParts()
        self._pieces = Pieces()  # of the log
        self._acts = Acts(store, self._core, index)
        self._stored_here: set[int] = set()  # triggers with events that this supervisor stored
        self._is_fenced = False  # another supervisor took over: the core stores nothing more
        self._has_lost_lease = False  # the core has said so, and the log has not shown it yet

    # --- frames -----------------------------------------------------------------------------------

    def follow(self, frame: Frame) -> None:
        """Play one frame. Raises `Differs`, `ReplayStuck` and `StoreError`."""
        self._frame = frame.number
        incarnation = frame.record.incarnation
        if self._session is None or incarnation != self._incarnation:
            self._start_runner(incarnation)
        assert self._session is not None
        if self._broken:
            raise Differs(f"the conversation went on after its end: {self._broken}")
        sender = frame.record.direction.sender
        try:
            self._session.move(sender, frame.message)
        except RemoteProtocolError as error:
            self._broken = str(error)
            self._core.protocol_failed(error)
            return
        except ProtocolError as error:
            raise Differs(str(error)) from error
        match frame.message:
            case Hello() | StateChanges() | Request() as message:
                self._hear(message)
            case StateSync() as message:
                self._expect_sync(message)
            case Welcome() as message:
                self._compare(message, self._wait_for(Welcome))
            case Response() as message:
                self._expect_answer(message)
            case Drain() as message:
                self._expect_drain(message)

    def end(self) -> None:
        """End the supervisor: store its last rounds as far as the rest of the log shows them to be stored."""
        self._end_runner()
        shown = [
            event
            for _, changes in self._held
            for event in changes.events
            if self._index.shown.get((event.trigger_run_id, event.sequence_index), 0) > self._frame
        ]
        if shown:
            self._work_off(until=(shown[-1].trigger_run_id, shown[-1].sequence_index))
        self._held.clear()
        if self._core.is_leaving:
            self._settle(lambda: self._exit is not None)

    def _hear(self, message: FromRunner) -> None:
        match message:
            case Hello():
                self._core.receive(self._incarnation, message, self._now)
            case StateChanges():
                self._held.append((self._incarnation, message))
            case Request():
                self._queries[message.id] = message

    # --- the runner -------------------------------------------------------------------------------

    def _start_runner(self, incarnation: int) -> None:
        if incarnation <= self._core.runner.incarnation:
            raise Differs(f"incarnation {incarnation} comes after incarnation {self._core.runner.incarnation}")
        if incarnation - self._core.runner.incarnation > RUNNERS_SILENT_MAX:
            raise Differs(f"incarnation {incarnation} comes right after incarnation {self._core.runner.incarnation}")
        self._end_runner()
        first = self._index.first_starts.get(RunnerName(self._number, incarnation))
        if first is not None:
            # Triggers are started only after all reports of earlier runners are stored.
            self._work_off()
            self._acts.before_runner(first, self._frame, self._now)
        while self._core.runner.incarnation < incarnation:
            if self._core.runner.state is RunnerState.STARTING:
                self._core.runner_ended(self._core.runner.incarnation, "it left no frames", self._now)
            self._now += POLL_JUMP_S
            self._settle()
            if not self._spawned:
                raise Differs(f"a runner was started, incarnation {incarnation}, and the replay starts none")
            self._spawned.clear()
        self._session = Session(RunnerDialect(incarnation), Role.SUPERVISOR)
        self._incarnation = incarnation
        self._broken = ""

    def _end_runner(self) -> None:
        if self._session is None:
            return
        if self._pieces.open is not None:
            self._expect_whole_sync(msgspec.structs.replace(self._pieces.open, more=False), is_cut_off=True)
            self._pieces = Pieces()
        self._core.runner_ended(self._incarnation, "its frames end here", self._now)
        self._session = None
        self._queries.clear()
        self._said.clear()
        self._unshown = UnshownParts()

    # --- messages of the supervisor ---------------------------------------------------------------

    def _expect_sync(self, message: StateSync) -> None:
        before = self._pieces.open
        if before is not None and before.round != message.round:
            raise Differs(f"a StateSync of round {message.round} comes within one of round {before.round}")
        whole = self._pieces.join(RunnerName(self._number, self._incarnation), message)
        if whole is not None:
            self._expect_whole_sync(whole, is_cut_off=False)

    def _without_silent_cancels(self, message: StateSync) -> StateSync:
        """Return a message without the cancellations of held triggers that the log does not show otherwise.

        A supervisor owns held triggers that nothing waits for without a word, until it loses its lease.
        """
        shown = tuple(
            cancel
            for cancel in message.to_cancel
            if cancel.trigger_id in self._core.assignments or cancel.trigger_id in self._started
        )
        return msgspec.structs.replace(message, to_cancel=shown)

    def _expect_whole_sync(self, message: StateSync, *, is_cut_off: bool) -> None:
        if message == StateSync(credits=message.credits):
            return  # the streams of tasks, which the log does not show, decide about credits
        self._started.update(spec.trigger_id for spec in message.to_create)
        if message.lease_lost:
            message = self._without_silent_cancels(message)
        if message.round:
            if (cancel := self._unshown.first_cancel()) is not None:
                problem = f"the replay cancels trigger {cancel.trigger_id}, and the log does not"
                raise Differs(problem, StateSync(to_cancel=(cancel,)))
            self._work_off()
            replayed = self._wait_for(StateSync)
        else:
            replayed = self._unasked_sync(message)
        if is_cut_off and isinstance(replayed, StateSync):
            replayed = cut_like(replayed, message)
        self._compare(message, replayed)
        self._check_rows()

    def _unasked_sync(self, message: StateSync) -> StateSync | None:
        """Cause a `StateSync` that answers no round; return the core's, as far as the log shows it."""
        self._let_be_said(message)
        lease_lost, self._has_lost_lease = self._has_lost_lease, False
        replayed = self._unshown.take(message, all_cancels=lease_lost)
        if replayed is None and not lease_lost:
            return None
        replayed = msgspec.structs.replace(replayed or StateSync(), lease_lost=lease_lost)
        for recorded, spec in zip(message.to_create, replayed.to_create, strict=False):
            if recorded.trigger_run_id in self._run_ids:
                raise Differs(f"the run id {recorded.trigger_run_id!a:.80} is given a second time")
            self._run_ids[recorded.trigger_run_id] = spec.trigger_run_id
        return replayed

    def _let_be_said(self, message: StateSync) -> None:
        def is_said() -> bool:
            is_all = not any(self._unshown.missing(message).values())
            return is_all and self._has_lost_lease == message.lease_lost

        self._settle_held_back(is_said)
        if is_said():
            return
        if message.lease_lost:
            self._is_fenced = True
            self._acts.fence()
            self._now += FENCED_JUMP_S
        else:
            self._acts.cause(message, self._unshown.missing(message), self._frame, self._now)
            self._now += POLL_JUMP_S
        self._settle(is_said)

    def _expect_answer(self, message: Response) -> None:
        query = self._queries.pop(message.id, None)
        if query is None:
            raise Differs(f"this answers query {message.id}, which was not asked")
        asked = query.query
        if not isinstance(asked, LastEvent):
            self._store.recorded.give(message.error if message.result is None else message.result)
        elif message.error:
            self._store.fail_next_query(message.error)
        elif isinstance(message.result, StoredEvent):
            self._let_be_stored(asked.trigger_id, message.result)
        self._core.receive(self._incarnation, query, self._now)
        self._compare(message, self._wait_for(type(message)))

    def _let_be_stored(self, trigger_id: int, answer: StoredEvent) -> None:
        """Store an event that the answer shows, if it can have been stored."""
        name = (answer.trigger_run_id, answer.sequence_index)
        if any(_holds(changes, name) for _, changes in self._held):
            self._work_off(until=name)
        elif answer.trigger_run_id not in self._index.runs and trigger_id not in self._stored_here:
            # It was stored before the log begins, or by another supervisor.
            given = FiredEvent(
                trigger_id,
                replayed_run_id(answer.trigger_run_id, self._run_ids),
                answer.sequence_index,
                seq=0,
                payload=answer.payload,
                key=answer.key,
            )
            if trigger_id in self._store.made and self._core.leases.is_held:
                self._store.store_slice(self._core.leases.epoch, events=(given,))
                self._rows.report((given,))

    def _expect_drain(self, message: Drain) -> None:
        def is_draining() -> bool:
            return any(isinstance(said, Drain) for said in self._said)

        if any(changes.stuck for _, changes in self._held):
            self._work_off()
        self._settle_held_back(is_draining)
        if not is_draining():
            self._core.drain(self._now)
        self._compare(message, self._wait_for(Drain))

    def _compare(self, recorded: FromSupervisor, replayed: FromSupervisor | None) -> None:
        if replayed is None:
            raise Differs(f"the supervisor said {type(recorded).__name__}, and the replay says nothing")
        problem = first_difference(compared_form(recorded, self._run_ids), compared_form(replayed))
        if problem is not None:
            captured = mask(replayed)
            assert isinstance(captured, FromSupervisor)
            raise Differs(problem, captured)

    # --- the core ---------------------------------------------------------------------------------

    def _work_off(self, *, until: EventName | None = None) -> None:
        """Give the held messages to the core, all or up to and including one event, and have them stored."""
        while self._held:
            incarnation, changes = self._held.popleft()
            is_last = until is not None and _holds(changes, until)
            if is_last:
                assert until is not None
                changes, rest = _cut_behind(changes, until)
                self._held.appendleft((incarnation, rest))
            is_current = self._session is not None and incarnation == self._incarnation
            if not is_current:
                changes = msgspec.structs.replace(changes, stuck=())  # the stuck triggers are gone
            self._acts.before_round(changes)
            changes = translated(changes, self._run_ids)
            try:
                self._core.receive(incarnation, changes, self._now)
            except RemoteProtocolError as error:
                self._broken = str(error)
                self._core.protocol_failed(error)
                return
            if not self._is_fenced:
                self._rows.report(changes.events)
                self._stored_here.update(event.trigger_id for event in changes.events)
            self._settle(lambda: self._core.intake.is_empty)
            if is_last:
                break
        self._check_rows()

    def _settle_held_back(self, is_done: Callable[[], bool]) -> None:
        if not is_done():
            self._settle(is_done)

    def _check_rows(self) -> None:
        problem = self._rows.check()
        if problem is not None:
            raise Differs(problem)

    def _wait_for(self, kind: type[FromSupervisor]) -> FromSupervisor | None:
        """Return the next message of this kind that the core sends, or has sent; None if there is none."""

        def find() -> FromSupervisor | None:
            return next((said for said in self._said if isinstance(said, kind)), None)

        self._settle_held_back(lambda: find() is not None)
        found = find()
        if found is not None:
            self._said.remove(found)
        return found

    def _settle(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Step the core until ``is_done``, or until nothing is due."""
        for _ in range(STEPS_MAX):
            commands = self._core.step(self._now)
            for command in commands:
                match command:
                    case Spawn():
                        self._spawned.append(command.incarnation)
                    case Send():
                        self._note(command.message)
                    case Exit():
                        self._exit = command
                    case Kill() | DumpStacks():
                        pass  # the log shows when a runner ended
            if self._store.fault is not None:
                raise ReplayStuck(str(self._store.fault))
            if is_done() or self._exit is not None or (not commands and self._core.wake_at() > self._now):
                return
        raise ReplayStuck("the core does not come to rest")

    def _note(self, message: FromSupervisor) -> None:
        if isinstance(message, StateSync) and not message.round:
            self._has_lost_lease |= message.lease_lost
            for spec in message.to_create:
                self._acts.check_start(spec)
            self._unshown.add(message)
        else:
            self._said.append(message)


def _core(store: ReplayStore, settings: RunnerSettings | None, drain_s: float | None) -> SupervisorCore:
    settings = settings or RunnerSettings()
    return SupervisorCore(
        store,
        Identity(hostname="replay", pid=0, machine="replay", process_started=0.0),
        CoreSettings(
            runner=settings,
            lease=LeaseTimes(heartbeat_s=NEVER_S, silence_max_s=NEVER_S, poll_interval_s=POLL_INTERVAL_S),
            capacity=TRIGGER_ID_MAX,
            runner_silence_max_s=4 * FENCED_JUMP_S,
            respawn_wait_s=RESPAWN_WAIT_S,
            respawn_wait_max_s=RESPAWN_WAIT_S,
            retry_wait_s=RETRY_WAIT_S,
            retry_wait_max_s=RETRY_WAIT_S,
            drain_s=DRAIN_S if drain_s is None else drain_s,
        ),
        is_gone=lambda row: True,  # the supervisors before it
        answers=store.recorded,
    )


def _holds(changes: StateChanges, name: EventName) -> bool:
    return any((event.trigger_run_id, event.sequence_index) == name for event in changes.events)


def _cut_behind(changes: StateChanges, name: EventName) -> tuple[StateChanges, StateChanges]:
    """Cut a frame of a round in two, after the event of this name."""
    names = [(event.trigger_run_id, event.sequence_index) for event in changes.events]
    end = names.index(name) + 1
    return (
        StateChanges(changes.round, changes.events[:end], more=True),
        msgspec.structs.replace(changes, events=changes.events[end:]),
    )
