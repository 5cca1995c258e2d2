"""The supervisor without its loop, sockets and processes: messages and a clock in, commands out.

The arbiter (or a simulation) tells it what happened: `receive` a message, `runner_ended`, `drain`, `lose`.
It calls `step` whenever something happened or `wake_at` has come, and carries out the commands that `step`
returns. A step does one bounded piece of each duty, so that none waits long behind another: answering
requests and keeping the lease come before storing, and a long round is stored slice by slice.

The runner, as the core sees it::

    ABSENT ──Spawn──▶ STARTING ──Hello──▶ RUNNING ──Drain──▶ DRAINING
      ▲                  │                   │                  │
      └──────────────────┴──── its end ──────┴──────────────────┘

The database is reached through the store it is given, users' code never.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

import msgspec
import structlog

from headgate.protocol.errors import RemoteProtocolError, VersionMismatch
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    CancelReason,
    CancelTrigger,
    Drain,
    FinishedTrigger,
    FromRunner,
    Hello,
    Request,
    StateChanges,
    StateSync,
    Welcome,
)
from headgate.store.errors import DATABASE_UNUSABLE, LeaseLost
from headgate.store.triggers.leases import ClaimedTrigger, TriggererRow
from headgate.supervisor import commands
from headgate.supervisor.backoff import Backoff, DatabaseOutage, DatabaseRetry
from headgate.supervisor.commands import Command, DumpStacks, Exit, Kill, Send, Spawn
from headgate.supervisor.core_settings import CoreSettings
from headgate.supervisor.duties import SaysToTasks, TaskDuty
from headgate.supervisor.queries import QueryHandler
from headgate.supervisor.triggers.assignments import Assignments
from headgate.supervisor.triggers.intake import EventStore, Intake, Stored
from headgate.supervisor.triggers.leases import Identity, Leases, LeaseStore
from headgate.supervisor.triggers.queries import LastEvents, TriggerQueries

log = structlog.get_logger(__name__)

DUMP_TO_KILL_S = 1.0  # between asking a stuck runner for its stacks and killing it: it needs to write them
# How long a trigger may go on that nothing waits for any more: most have just fired, and end by themselves in a moment.
ENDED_GRACE_S = 5.0
SPEC_ROOM_BYTES = 256  # of a frame, for what is not known of a trigger when it is claimed: the id of its run
DRAIN_MARGIN_S = 5.0  # how long after its deadline a draining runner may still exist


class CoreStore(EventStore, LeaseStore, LastEvents, Protocol):
    """The verbs of the store that the core uses."""


class RunnerState(enum.Enum):
    """The runner, as far as the core knows."""

    ABSENT = "absent"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"


class SupervisorCore:
    """Rounds, claims, leases and respawn decisions of one supervisor.

    ``answers`` answers what triggers ask; without it they can only ask for their own last events.
    """

    def __init__(
        self,
        store: CoreStore,
        identity: Identity,
        settings: CoreSettings,
        *,
        is_gone: Callable[[TriggererRow], bool],
        clock: Callable[[], float] = time.monotonic,
        tasks: TaskDuty | None = None,
        answers: QueryHandler | None = None,
        task_logs: SaysToTasks | None = None,
        outage: DatabaseOutage | None = None,
    ) -> None:
        self._store = store
        self._task_logs = task_logs
        self._settings = settings
        self._outage = outage or DatabaseOutage()
        self._tasks = tasks
        self.intake = Intake(
            store, slice_events_max=settings.slice_events_max, retry=self._retry_of("events"), clock=clock
        )
        self.leases = Leases(
            store,
            identity,
            capacity=settings.capacity,
            queues=settings.queues,
            workers=settings.workers,
            times=settings.lease,
            is_gone=is_gone,
            retry=self._retry_of("leases"),
        )
        self.assignments = Assignments(
            retry_wait_s=settings.retry_wait_s,
            retry_wait_max_s=settings.retry_wait_max_s,
            healthy_s=settings.respawn_healthy_s,
        )
        self.incarnation = 0
        self.state = RunnerState.ABSENT
        self._respawn = Backoff(settings.respawn_wait_s, settings.respawn_wait_max_s)
        self._spawn_at = 0.0
        self._spawned_at = 0.0
        self._heard_at = 0.0
        self._stepped_at = 0.0
        self._kill_at: float | None = None
        self._unreadable: set[int] = set()  # owned triggers whose kwargs no key decrypts
        self._to_release: set[int] = set()  # removed by a user, or of no use, and ended: their rows may be let go
        self._cancel_at: dict[int, float] = {}  # when to cancel those of no use, unless they have ended by then
        self._exit: Exit | None = None  # what to leave with, once the runner is gone
        self._cut_short = ""  # why a drain did not come to its end, if it did not
        self._leave_by: float | None = None  # when to leave with what is not stored left unconfirmed
        self._out: list[Command] = []
        self._queries = TriggerQueries(
            store,
            answers,
            frame_bytes_max=settings.runner.frame_bytes_max,
            retry=DatabaseRetry("queries", settings.database_retry_wait_s, settings.database_retry_wait_max_s),
        )
        # A database that does not answer holds up the loop at each release, so it is not asked again at once.
        self._releases = self._retry_of("releases")

    def _retry_of(self, duty: str) -> DatabaseRetry:
        return DatabaseRetry(
            duty, self._settings.database_retry_wait_s, self._settings.database_retry_wait_max_s, self._outage
        )

    # --- what happens -----------------------------------------------------------------------------

    def receive(self, incarnation: int, message: FromRunner, now: float) -> None:
        """Take a message of a runner. One of an earlier incarnation may still bring a round, nothing else."""
        if incarnation == self.incarnation:
            self._heard_at = now
        match message:
            case Hello():
                self._welcome(message)
            case StateChanges():
                if not self._is_fenced:
                    self.intake.add(incarnation, message)
                elif not message.more:
                    # Its events would be written under an epoch that is no longer ours. The answer confirms none
                    # of them; it only lets the runner go on with its end.
                    self._out.append(Send(StateSync(round=message.round, lease_s=0.0)))
                if message.stuck:
                    self._recycle(message.stuck, now)
            case Request():
                if incarnation == self.incarnation:
                    self._out.append(Send(self._queries.answer(message, now)))
            case _:
                assert_never(message)

    def protocol_failed(self, error: RemoteProtocolError) -> None:
        """The runner broke the protocol: it is replaced; another version of it would be no better."""
        log.error("the runner broke the protocol", error=str(error), incarnation=self.incarnation)
        self._out.append(Kill(str(error)))
        if isinstance(error, VersionMismatch):
            self._exit = Exit(commands.EXIT_INCOMPATIBLE, str(error))

    def runner_ended(self, incarnation: int, explanation: str, now: float, *, gave_up: bool = False) -> None:
        """The runner's process is gone, and all it sent was received. ``gave_up``: it left by itself, with an error."""
        if incarnation != self.incarnation or self.state is RunnerState.ABSENT:
            return
        expected = self.state is RunnerState.DRAINING
        if self._exit is not None and gave_up:
            self._cut_short = f"the runner did not come to the end of its drain: {explanation}"
        self.state = RunnerState.ABSENT
        self._kill_at = None
        if now - self._spawned_at >= self._settings.respawn_healthy_s:
            self._respawn.succeed()
        wait_s = 0.0 if expected else self._respawn.fail()
        self._spawn_at = now + wait_s
        self.assignments.hand_over(now)
        report = log.info if expected else log.error
        report("the runner ended", how=explanation, incarnation=incarnation, respawn_in_s=round(wait_s, 3))

    def drain(self, now: float) -> None:
        """Asked to stop: let the runner hand over what was fired, then leave."""
        if self._exit is None:
            log.info("draining", deadline_s=self._settings.drain_s)
            self._leave(Exit(commands.EXIT_DRAINED, "drained"), now)

    def stop_now(self, reason: str) -> None:
        """Asked to stop a second time: kill the runner. What is not stored is not confirmed either."""
        self._out += [Kill(reason), Exit(commands.EXIT_KILLED, reason)]

    # --- what to do -------------------------------------------------------------------------------

    def step(self, now: float) -> Sequence[Command]:
        """Do one bounded piece of every duty that is due; return what the surroundings have to do."""
        self._notice_own_absence(now)
        try:
            if not self._is_fenced:
                self._keep_lease(now)
                self._store_slice(now)
                self._look_after_tasks(now)
        except LeaseLost as exc:
            self._lose_lease(exc, now)
        self._look_after_runner(now)
        self._start_triggers(now)
        self._finish_leaving(now)
        out, self._out = self._out, []
        return out

    def wake_at(self) -> float:
        """When `step` has something to do even if nothing happens."""
        times: list[float | None] = []
        if not self._is_fenced:
            times += [self.leases.wake_at(), self.intake.wake_at(), min(self._cancel_at.values(), default=None)]
            if self._tasks is not None and self.leases.is_held:
                times.append(self._tasks.wake_at())
        if self.state is not RunnerState.ABSENT:
            silent_at = self._heard_at + self._settings.runner_silence_max_s
            times.append(silent_at if self._kill_at is None else self._kill_at)
        elif self._exit is not None:
            times.append(self._leave_by)
        elif self.leases.is_held:
            times.append(self._spawn_at)
        if self._may_start:
            times.append(self.assignments.next_start_at())
        return min((time for time in times if time is not None), default=math.inf)

    @property
    def is_leaving(self) -> bool:
        """Whether it has been decided to leave; what is left is to finish."""
        return self._exit is not None

    @property
    def _is_fenced(self) -> bool:
        return self._exit is not None and self._exit.code == commands.EXIT_LEASE_LOST

    # --- the lease --------------------------------------------------------------------------------

    def _keep_lease(self, now: float) -> None:
        owned = len(self.assignments) + len(self._unreadable)
        news = self.leases.step(now, owned=owned, claiming=self._exit is None)
        if self._tasks is not None and (news.has_looked or news.has_fenced):
            self._tasks.notice(has_fenced=news.has_fenced)
        if news.claimed:
            log.info("claimed triggers", triggers=len(news.claimed))
            claimed = [self._sendable(trigger) for trigger in news.claimed]
            self.assignments.assign((trigger for trigger in claimed if trigger.kwargs is not None), now)
            for trigger in claimed:
                if trigger.kwargs is None and trigger.id not in self._unreadable:
                    self._report_unreadable(trigger)
        self._cancel(news.removed, "user")
        for trigger_id in news.ended:
            if trigger_id in self.assignments:
                self._cancel_at.setdefault(trigger_id, now + ENDED_GRACE_S)
            else:
                self._to_release.add(trigger_id)
        due = [trigger_id for trigger_id, at in self._cancel_at.items() if at <= now]
        self._cancel(due, "timeout")
        for trigger_id in due:
            del self._cancel_at[trigger_id]
        self._release_removed(now)

    def _cancel(self, trigger_ids: Sequence[int], reason: CancelReason) -> None:
        """Have the runner end these; what it does not run is over at once."""
        cancels = []
        for trigger_id in trigger_ids:
            cancel = self.assignments.cancel(trigger_id, reason)
            if cancel is not None:
                cancels.append(cancel)
            if trigger_id not in self.assignments:
                self._to_release.add(trigger_id)
        if cancels and self.state is RunnerState.RUNNING:
            self._out.append(Send(StateSync(to_cancel=tuple(cancels))))

    def _release_removed(self, now: float) -> None:
        if not self._to_release or not self.leases.is_held or not self._releases.ready(now):
            return
        try:
            self._store.release_triggers(self.leases.epoch, sorted(self._to_release))
        except DATABASE_UNUSABLE as exc:
            self._releases.failed(exc, now)
            return  # they stay in the set, and a later step tries again
        self._releases.succeeded(now)
        self._unreadable -= self._to_release
        self._to_release.clear()

    def _sendable(self, trigger: ClaimedTrigger) -> ClaimedTrigger:
        """Return it as it is, or, where it fits no frame, as one that cannot be read: a smaller limit has been set."""
        needed = len(trigger.kwargs or b"") + 4 * (len(trigger.name) + len(trigger.classpath)) + SPEC_ROOM_BYTES
        limit = self._settings.runner.frame_bytes_max
        if needed <= limit:
            return trigger
        error = f"its kwargs and names take a frame of up to {needed:,} bytes; the limit is {limit:,} (frame_bytes_max)"
        return msgspec.structs.replace(trigger, kwargs=None, error=error)

    def _report_unreadable(self, trigger: ClaimedTrigger) -> None:
        """A trigger whose kwargs no key decrypts cannot run, but all others can (I9)."""
        log.error("a trigger cannot be started", trigger_id=trigger.id, trigger_name=trigger.name, error=trigger.error)
        self._unreadable.add(trigger.id)
        failure = FinishedTrigger(trigger.id, "", "failed", 0, error=trigger.error or "its kwargs cannot be read")
        self.intake.add(0, StateChanges(round=0, finished=(failure,)))

    def _lose_lease(self, error: LeaseLost, now: float) -> None:
        """Another supervisor owns the triggers now: stop them here, and write nothing more (I10)."""
        log.error("the lease is lost; stopping", error=str(error))
        unanswered = self.intake.discard(self.incarnation)
        if self._tasks is not None:
            self._tasks.abandon()
        cancels = self.assignments.cancel_all("reassigned")
        if self.state in (RunnerState.RUNNING, RunnerState.DRAINING):
            self._out.append(Send(StateSync(to_cancel=cancels)))  # which also says that the lease is lost
            self._out += [Send(StateSync(round=number, lease_s=0.0)) for number in unanswered]
        self._leave(Exit(commands.EXIT_LEASE_LOST, str(error)), now)

    # --- tasks ------------------------------------------------------------------------------------

    def _look_after_tasks(self, now: float) -> None:
        if self._tasks is None or not self.leases.is_held:
            return
        if self._exit is not None:
            self._tasks.drain(now)
        if self._tasks.step(self.leases.epoch, now):
            self.leases.look_soon()  # our own writes are not among the notices

    def _are_tasks_done(self, now: float) -> bool:
        """Whether leaving need not wait for tasks. What still runs when the drain is over is ended."""
        if self._tasks is None or self._is_fenced or self._tasks.drain(now):
            return True
        if self._leave_by is not None and now >= self._leave_by - DRAIN_MARGIN_S:
            self._cut_short = "tasks were still running at the drain's deadline"
            self._tasks.end_all("its supervisor was asked to stop, and would not wait longer")
        return self._leave_by is not None and now >= self._leave_by

    # --- rounds -----------------------------------------------------------------------------------

    def _store_slice(self, now: float) -> None:
        stored = self.intake.step(self.leases.epoch, now) if self.leases.is_held else None
        if stored is None:
            return
        if stored.answer is not None and self._is_listening(stored):
            # The round was sent before `now`: on this answer brokers are advanced while the lease lasts (I10).
            self._out.append(Send(msgspec.structs.replace(stored.answer, lease_s=self.leases.lasts_s(now))))
        self._cancel_rejoins(stored)
        for finished in stored.finished:
            self._end_run(finished, stored, now)
        if stored.moved_tasks and self._tasks is not None:
            self._tasks.notice()

    def _cancel_rejoins(self, stored: Stored) -> None:
        """Tell the runner who failed in a shared stream and will not be back, or the stream would wait for them."""
        failed = [each.trigger_id for each in stored.finished if each.outcome == "failed"]
        gone = tuple(CancelTrigger(number, "timeout") for number in failed if self._is_over(number, stored))
        if gone and self._is_listening(stored):
            self._out.append(Send(StateSync(to_cancel=gone)))

    def _is_listening(self, stored: Stored) -> bool:
        """A confirmation is for the incarnation that asked, and for no later one (I6)."""
        return stored.incarnation == self.incarnation and self.state in (RunnerState.RUNNING, RunnerState.DRAINING)

    def _is_over(self, trigger_id: int, stored: Stored) -> bool:
        """Whether nothing waits for a trigger any more: however it ended, it is not started again."""
        return trigger_id in stored.over or trigger_id in self._cancel_at

    def _end_run(self, finished: FinishedTrigger, stored: Stored, now: float) -> None:
        self._tell_task(finished.trigger_id, "its trigger has ended", outcome=finished.outcome, reason=finished.reason)
        if self._is_over(finished.trigger_id, stored):
            finished = msgspec.structs.replace(finished, outcome="returned")
            self._to_release.add(finished.trigger_id)
        wait_s = self.assignments.end_run(finished, now)
        self._cancel_at.pop(finished.trigger_id, None)
        if finished.reason in ("user", "timeout"):
            self._to_release.add(finished.trigger_id)
        if wait_s is not None:
            log.warning(
                "a trigger failed and is started again",
                trigger_id=finished.trigger_id,
                error=finished.error,
                failures=stored.failure_counts.get(finished.trigger_id),
                retry_in_s=round(wait_s, 3),
            )

    # --- the runner -------------------------------------------------------------------------------

    def _welcome(self, hello: Hello) -> None:
        log.info("the runner is ready", incarnation=hello.incarnation, pid=hello.pid)
        self.state = RunnerState.RUNNING
        self._out.append(Send(Welcome(PROTOCOL_VERSION, hello.incarnation, self._settings.runner)))
        if self._exit is not None:
            self._send_drain()

    def _start_triggers(self, now: float) -> None:
        specs = self.assignments.start_due(self.leases.epoch, self.incarnation, now) if self._may_start else ()
        if specs:
            self._out.append(Send(StateSync(to_create=specs)))
        for spec in specs:
            self._tell_task(spec.trigger_id, "its trigger is started", classpath=spec.classpath)

    def _tell_task(self, trigger_id: int, event: str, **fields: object) -> None:
        """Say something in the log of the task that waits for a trigger, if there is one."""
        if self._task_logs is None or (task := self.assignments.task_of(trigger_id)) is None:
            return
        where = {"trigger_id": trigger_id, "epoch": self.leases.epoch, "incarnation": self.incarnation}
        self._task_logs.say(task, "info", event, **where, **fields)

    @property
    def _may_start(self) -> bool:
        """Whether triggers may be started now.

        Not while the claim goes on: triggers that share a stream begin together, or the first ones would go
        on without the rest. Not while a report of an earlier incarnation is unread: it may be that of an end.
        """
        return (
            self.state is RunnerState.RUNNING
            and self._exit is None
            and not self.leases.is_claiming
            and not self.intake.is_waiting_for_others(self.incarnation)
        )

    def _look_after_runner(self, now: float) -> None:
        if self.state is RunnerState.ABSENT:
            if self._exit is None and self.leases.is_held and now >= self._spawn_at:
                self.incarnation += 1
                self.state = RunnerState.STARTING
                self._spawned_at = self._heard_at = now
                self._out.append(Spawn(self.incarnation))
        elif self._kill_at is not None:
            if now >= self._kill_at:
                self._kill_at = None
                self._heard_at = now  # it is being reaped; no second verdict before that
                self._out.append(Kill("it did not end or answer in time"))
                if self._exit is not None:
                    self._cut_short = "the runner did not come to the end of its drain in time"
        elif now >= self._heard_at + self._settings.runner_silence_max_s:  # the very sum of `wake_at`
            self._blame_silence(now)

    def _blame_silence(self, now: float) -> None:
        """A runner that owes a heartbeat and is silent is stuck: take its stacks, then its life."""
        if self.intake.is_waiting_for(self.incarnation):
            self._heard_at = now  # it waits for our answer: the silence is ours
            return
        log.error("the runner is silent; dumping its stacks", silent_s=round(now - self._heard_at, 1))
        self._out.append(DumpStacks())
        self._kill_at = now + DUMP_TO_KILL_S

    def _notice_own_absence(self, now: float) -> None:
        """If this process itself stood still (stopped, or suspended), the runner may have spoken meanwhile."""
        if now - self._stepped_at >= self._settings.runner_silence_max_s / 2:
            self._heard_at = max(self._heard_at, now - self._settings.runner_silence_max_s / 2)
        self._stepped_at = now

    def _recycle(self, stuck: Sequence[int], now: float) -> None:
        """Triggers that swallow their cancellation can only be ended together with their process."""
        if self.state is not RunnerState.RUNNING:
            return
        log.error("triggers do not end when cancelled; replacing the runner", trigger_ids=list(stuck))
        self._send_drain()
        self._kill_at = now + self._settings.drain_s + DRAIN_MARGIN_S

    def _send_drain(self) -> None:
        self.state = RunnerState.DRAINING
        self._out.append(Send(Drain(self._settings.drain_s)))

    # --- leaving ----------------------------------------------------------------------------------

    def _leave(self, exit_: Exit, now: float) -> None:
        self._exit = exit_
        self._kill_at = self._leave_by = now + self._settings.drain_s + DRAIN_MARGIN_S
        if self.state is RunnerState.RUNNING:
            self._send_drain()

    def _finish_leaving(self, now: float) -> None:
        """Leave once the runner is gone and what it sent is stored, or once waiting for that is over."""
        if self._exit is None or self.state is not RunnerState.ABSENT:
            return
        if not self._are_tasks_done(now):
            return
        if not self._is_fenced and not self.intake.is_empty:
            if self._leave_by is not None and now < self._leave_by:
                return
            self._exit = Exit(commands.EXIT_KILLED, "the database was away until the drain's deadline")
        if not self._is_fenced and self.leases.is_held:
            self._release_lease()
        if self._cut_short and self._exit.code == commands.EXIT_DRAINED:
            self._exit = Exit(commands.EXIT_KILLED, self._cut_short)
        self._out.append(self._exit)

    def _release_lease(self) -> None:
        try:
            self._store.release_triggerer(self.leases.epoch)
        except (*DATABASE_UNUSABLE, LeaseLost) as exc:
            log.warning("could not sign off; others take over when the lease runs out", error=str(exc))
