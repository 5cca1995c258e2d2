"""The supervisor without its loop, sockets and processes: messages and a clock in, commands out.

The arbiter (or a simulation) reports events: it calls `receive` for a message, `runner_ended`, `drain`. After each
event, and at the time of `wake_at`, it calls `step` and carries out the commands that `step` returns. A step does one
bounded piece of each duty, so that none waits long for another: it answers requests and keeps the lease before it
stores events, and a long round is stored slice by slice.

The core connects parts that each have their own state:

===============  =============================================================================
`runner`         the life of the runner's process (`headgate.supervisor.runner_lifecycle`)
`intake`         rounds that wait for the database, and which events may be acknowledged
`leases`         the epoch, its heartbeats, and claims of triggers
`assignments`    the triggers that are owned, and which of them run
`releases`       triggers that must end for good
`holds`          triggers that are owned and must not run
`changes`        triggers that a user has changed
`redrives`       messages that users have redriven
`recoveries`     triggers that had failed, and do not fail any more
`drift`          how far the streams are at their brokers
tasks            scheduling and workers, if this supervisor runs tasks
===============  =============================================================================

The core reaches the database through the store that it is given, and never runs users' code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

import msgspec
import structlog

from headgate.protocol.black_box import Record
from headgate.protocol.errors import RemoteProtocolError, VersionMismatch
from headgate.protocol.messages.queries import Request, SendSignals
from headgate.protocol.messages.runner import CancelTrigger, FinishedTrigger, FromRunner, Hello, StateChanges, StateSync
from headgate.store.errors import DatabaseReplaced, LeaseLost
from headgate.store.store import Store
from headgate.store.triggers.leases import TriggererRow
from headgate.supervisor import commands, status
from headgate.supervisor.backoff import DatabaseOutage, RateBackoff, Waits
from headgate.supervisor.commands import Command, Exit, Kill
from headgate.supervisor.core_settings import CoreSettings
from headgate.supervisor.leaving import Leaving
from headgate.supervisor.logs.task_logs import TaskLogs
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.queries import QueryHandler
from headgate.supervisor.runner_lifecycle import RunnerLifecycle, RunnerState
from headgate.supervisor.tasks.core import TaskCore
from headgate.supervisor.triggers.assignments import Assignments
from headgate.supervisor.triggers.blame import Blame
from headgate.supervisor.triggers.changes import Changes
from headgate.supervisor.triggers.credits import Credits
from headgate.supervisor.triggers.drift import Drift
from headgate.supervisor.triggers.holds import Holds
from headgate.supervisor.triggers.intake import Intake, Stored
from headgate.supervisor.triggers.leases import Identity, Leases
from headgate.supervisor.triggers.published import Published
from headgate.supervisor.triggers.queries import TriggerQueries
from headgate.supervisor.triggers.recoveries import Recoveries
from headgate.supervisor.triggers.redrives import Redrives
from headgate.supervisor.triggers.releases import Releases

log = structlog.get_logger(__name__)


class SupervisorCore:
    """The decisions of one supervisor.

    ``answers`` answers queries of triggers; without it they can only ask for their own last events. ``tasks`` and
    ``task_logs`` are there if the supervisor runs tasks, and ``outage`` is shared with them.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        settings: CoreSettings,
        *,
        is_gone: Callable[[TriggererRow], bool],
        clock: Callable[[], float] = time.monotonic,
        tasks: TaskCore | None = None,
        answers: QueryHandler | None = None,
        task_logs: TaskLogs | None = None,
        outage: DatabaseOutage | None = None,
        figures: Figures | None = None,
    ) -> None:
        outage, figures = outage or DatabaseOutage(), figures or Figures()
        retry_of, frame_max = partial(settings.retry_of, outage=outage), settings.runner.frame_bytes_max
        self.tasks, self._task_logs, self._outage = tasks, task_logs, outage
        self._commands: list[Command] = []
        self._leaving = Leaving(drain_s=settings.drain_s)
        self.intake = Intake(
            store, figures, slice_events_max=settings.slice_events_max, retry=retry_of("events"), clock=clock
        )
        self.leases = Leases(
            store,
            identity,
            capacity=settings.capacity,
            queues=settings.queues,
            workers=settings.workers,
            endless_workers=settings.endless_workers,
            times=settings.lease,
            is_gone=is_gone,
            retry=retry_of("leases"),
        )
        self.assignments = Assignments(
            retry_wait_s=settings.retry_wait_s,
            retry_wait_max_s=settings.retry_wait_max_s,
            healthy_s=settings.respawn_healthy_s,
            frame_bytes_max=frame_max,
        )
        self.releases = Releases(store, self.assignments, retry=retry_of("releases"))
        self.holds = Holds(store, self.assignments, retry=retry_of("holds"))
        self.changes = Changes(self.assignments, self.releases, queues=settings.queues)
        self.redrives = Redrives(store, self.assignments, frame_bytes_max=frame_max, retry=retry_of("redrives"))
        self.credits = Credits(store.tasks, self.assignments, retry=retry_of("credits"))
        waits = Waits(settings.retry_wait_s, settings.retry_wait_max_s)
        self.blame = Blame(store, self.assignments, self.intake, self.holds, waits=waits, retry=retry_of("strikes"))
        self._has_broken_protocol = False  # the current runner
        self._absent_told_to = 0  # the last incarnation that knows for which held triggers streams have to wait
        self.recoveries = Recoveries(store, self.assignments, retry=retry_of("recoveries"))
        self.runner = RunnerLifecycle(
            self._commands,
            self._leaving,
            settings=settings.runner,
            respawn=RateBackoff(settings.respawn_wait_s, settings.respawn_wait_max_s, settings.respawn_healthy_s),
            silence_max_s=settings.runner_silence_max_s,
            drain_s=settings.drain_s,
            is_owed_answer=self.intake.is_waiting_for,
            figures=figures,
        )
        self.drift = Drift(store, self.runner, retry=retry_of("drift"))
        self._published = Published(partial(status.measured, self.runner, self.assignments, tasks, outage))
        # Queries are not in the outage: after one that failed there may never be another.
        self._queries = TriggerQueries(
            store, answers, frame_bytes_max=frame_max, retry=retry_of("queries", outage=None)
        )

    # --- events -----------------------------------------------------------------------------------

    def receive(self, incarnation: int, message: FromRunner, now: float) -> None:
        """Take a message of a runner. From an earlier incarnation only rounds are still handled."""
        self.runner.heard(incarnation, now)
        match message:
            case Hello():
                self.runner.hello(message)
            case StateChanges():
                self.runner.tell(incarnation, message.figures)
                self.drift.note(incarnation, message, now)
                if not self._leaving.is_fenced:
                    self.intake.add_frame(incarnation, message)
                elif not message.more:
                    # Its events would be written under an epoch that is no longer ours. The answer confirms none of
                    # them; it only lets the runner end.
                    self.runner.send(StateSync(round=message.round, lease_s=0.0))
                if message.stuck:
                    self.blame.stuck(message.stuck, now)
                    self.runner.replace(message.stuck, now)
            case Request():
                if incarnation == self.runner.incarnation:
                    self.runner.send(self._queries.answer(message, now))
                    if isinstance(message.query, SendSignals) and self.tasks is not None:
                        self.tasks.notify_signals()
            case _:
                assert_never(message)

    def protocol_failed(self, error: RemoteProtocolError) -> None:
        """Kill the runner, which broke the protocol. Leave if its version differs: so would that of the next one."""
        log.error("the runner broke the protocol", error=str(error), incarnation=self.runner.incarnation)
        self._commands.append(Kill(str(error)))
        self._has_broken_protocol = True
        if isinstance(error, VersionMismatch):
            self._leaving.begin_without_drain(Exit(commands.EXIT_INCOMPATIBLE, str(error)))

    def runner_ended(
        self,
        incarnation: int,
        explanation: str,
        now: float,
        *,
        gave_up: bool = False,
        ended_itself: bool = False,
        record: Record | None = None,
    ) -> None:
        """The runner's process has ended, and all its messages were received. ``gave_up``: it exited with an error.

        ``ended_itself``: the code that it executed may have done it; ``record`` is what its black box says of that.
        """
        if incarnation != self.runner.incarnation or self.runner.state is RunnerState.ABSENT:
            return
        if gave_up:
            self._leaving.cut_short(f"the runner did not come to the end of its drain: {explanation}")
        is_explained = False
        if self.runner.state is RunnerState.DRAINING:
            self.blame.drained(now)
        else:
            if self._has_broken_protocol:
                record = None  # it went on until it was killed: the box says nothing about the cause
            is_explained = self.blame.runner_ended(record, explanation, now, ended_itself=ended_itself)
        self._has_broken_protocol = False
        self._leaving.runner_ended(now)
        self.runner.ended(explanation, now, is_explained=is_explained)

    def drain(self, now: float) -> None:
        """Begin to stop: let the runner send the events that were fired, then leave."""
        if not self.is_leaving:
            log.info("draining", deadline_s=self._leaving.drain_s)
            self._leave(Exit(commands.EXIT_DRAINED, "drained"), now)

    def stop_now(self, reason: str, code: int = commands.EXIT_KILLED) -> Sequence[Command]:
        """Stop at once: kill the runner. Events that are not stored are not confirmed; brokers deliver them again."""
        self._commands += [Kill(reason), Exit(code, reason)]
        return self._take_commands()

    # --- the step ---------------------------------------------------------------------------------

    def step(self, now: float) -> Sequence[Command]:
        """Do one bounded piece of every duty that is due; return the commands for the caller to carry out."""
        self.runner.excuse_own_silence(now)
        try:
            if not self._leaving.is_fenced:
                for duty in (self._keep_lease, self._store_slice, self._step_tasks, self._listen):
                    duty(now)
                    if self._gives_up(now):
                        break
        except LeaseLost as exc:
            self._lose_lease(exc, now)
        except DatabaseReplaced as exc:
            # What was just committed is lost, so no answer confirms it, and a drain could store nothing either (I1).
            log.error("the database file was deleted, moved or replaced; stopping", error=str(exc))
            return self.stop_now(str(exc), commands.EXIT_DATABASE_REPLACED)
        if self.leases.is_cut_off(now) and not self.is_leaving:
            log.error("the lease could not be renewed for cut_off_exit_s; stopping", error=self._outage.reason())
            return self.stop_now("cut off from the database", commands.EXIT_CUT_OFF)
        self.runner.step(now, may_spawn=self.leases.is_held and not self.is_leaving)
        self._start_triggers(now)
        self._finish_leaving(now)
        self._log_drain(now)
        return self._take_commands()

    def _take_commands(self) -> Sequence[Command]:
        out = tuple(self._commands)
        self._commands.clear()
        return out

    def wake_at(self) -> float:
        """Return the time at which `step` must be called even if nothing happens."""
        times: list[float | None] = [self._leaving.log_at]
        if not self._leaving.is_fenced:
            times += [self.leases.wake_at(), self.intake.wake_at(), self.holds.wake_at()]
            times += [self.recoveries.wake_at(), self.blame.wake_at(), self.redrives.wake_at(), self.drift.wake_at()]
            if self.leases.is_held:
                times += [self.credits.wake_at(), None if self.tasks is None else self.tasks.wake_at()]
        if self.is_leaving and self.runner.state is RunnerState.ABSENT:
            times.append(self._leaving.deadline)
        elif self.leases.is_held or self.runner.state is not RunnerState.ABSENT:
            times.append(self.runner.wake_at())
        if self._may_start:
            times += [self.assignments.next_start_at(), self.blame.release_at()]
        return min((time for time in times if time is not None), default=math.inf)

    @property
    def is_listening(self) -> bool:
        """Whether to step at once when the bell of the database rings."""
        return self.leases.is_listening and not self._leaving.is_fenced

    @property
    def is_leaving(self) -> bool:
        """Whether the supervisor has decided to leave, and only finishes its work."""
        return self._leaving.exit is not None

    # --- the lease, and its triggers --------------------------------------------------------------

    def _keep_lease(self, now: float) -> None:
        found = self.leases.step(
            now, owned=self.assignments.owned, claiming=not self.is_leaving, published=self._published
        )
        if self._task_logs is not None and self.leases.is_held:
            self._task_logs.epoch = self.leases.epoch
        if self.tasks is not None and (found.has_looked or found.has_fenced):
            self.tasks.notify(has_fenced=found.has_fenced)
            self.tasks.notify_signals()
        if found.held is not None:
            message, released = self.holds.found(found.held, now)
            self._send_if_running(message)
            self.blame.forget(released)
        message, readable = self.changes.take(found.changed, now)
        self._send_if_running(message)
        self.blame.forget([trigger.id for trigger in found.changed])
        if claimed := found.claimed + readable:
            log.debug("claimed triggers", triggers=len(claimed))
            self.releases.reclaimed([trigger.id for trigger in claimed])
            self.intake.add_unreadable(self.assignments.assign(claimed, now))
            # Before they are started: a stream has to know for whom it waits.
            absent = self.assignments.absent(self.assignments.not_started(trigger.id for trigger in claimed))
            self._send_if_running(StateSync(absent=absent) if absent else None)
        self.redrives.found(found.redriving)
        self.drift.found(found.describe, now)
        if found.has_looked:
            self.credits.look()
        self._send_cancels(self.releases.cancel(found.removed, "user"))
        self._send_cancels(self.releases.cancel(found.ended, "timeout"))
        if self.leases.is_held:
            self.blame.store(self.leases.epoch, now)
            self.holds.store(self.leases.epoch, now)
            if self.releases.release(self.leases.epoch, now, self.intake.is_waiting_for_others(self.runner.running)):
                self.leases.poll_soon()  # the supervisor's own writes cause no notification
            self.recoveries.step(self.leases.epoch, now)
            self._send_if_running(self.drift.step(self.leases.epoch, now))
            self._send_if_running(self.redrives.step(self.leases.epoch, now))
            self._send_if_running(self.credits.step(now))

    def _listen(self, now: float) -> None:
        self.leases.listen(now, owned=self.assignments.owned)

    def _send_cancels(self, cancels: tuple[CancelTrigger, ...]) -> None:
        self._send_if_running(StateSync(to_cancel=cancels) if cancels else None)

    def _send_if_running(self, message: StateSync | None) -> None:
        if message is not None and self.runner.state is RunnerState.RUNNING:
            self.runner.send(message)

    def _lose_lease(self, error: LeaseLost, now: float) -> None:
        """Stop all triggers and write nothing more, because another supervisor owns them now (I10)."""
        log.error("the lease is lost; stopping", error=str(error))
        unanswered = self.intake.discard(self.runner.incarnation)
        if self.tasks is not None:
            self.tasks.abandon()
        cancels = self.assignments.cancel_all("reassigned")
        if self.runner.is_listening(self.runner.incarnation):
            self.runner.send(StateSync(to_cancel=cancels, lease_lost=True))
            for round_ in unanswered:
                self.runner.send(StateSync(round=round_, lease_s=0.0))
        self._leave(Exit(commands.EXIT_LEASE_LOST, str(error)), now)

    def _start_triggers(self, now: float) -> None:
        if not self._may_start:
            return
        self.blame.release(now)
        specs = self.assignments.start_due(self.leases.epoch, self.runner.incarnation, now)
        # Even if none was due: those that a search waits for may be gone, and then it has to go on without them.
        self.blame.started(now)
        if specs:
            is_first = self._absent_told_to != self.runner.incarnation
            self._absent_told_to = self.runner.incarnation
            self.runner.send(StateSync(to_create=specs, absent=self.assignments.absent() if is_first else ()))
            self.credits.started(specs)
        for spec in specs:
            self._log_to_task(spec.trigger_id, "its trigger is started", classpath=spec.classpath)

    @property
    def _may_start(self) -> bool:
        """Whether triggers may be started now.

        Not while more are being claimed: triggers that share a stream must start together, or the stream would begin
        without some of them. Not while a report of an earlier incarnation is unread: a trigger may have ended in it.
        """
        return (
            self.runner.state is RunnerState.RUNNING
            and not self.is_leaving
            and not self.leases.is_claiming
            and not self.intake.is_waiting_for_others(self.runner.incarnation)
            and self.blame.is_stored
        )

    # --- rounds -----------------------------------------------------------------------------------

    def _store_slice(self, now: float) -> None:
        if not self.leases.is_held:
            return
        stored = self.intake.step(self.leases.epoch, now, end_of=self.changes.end_of)
        if stored is None:
            return
        if stored.answer is not None and self.runner.is_listening(stored.incarnation):
            # The round was sent before `now`: on this answer, brokers may be advanced while the lease lasts (I10).
            self.runner.send(msgspec.structs.replace(stored.answer, lease_s=self.leases.lasts_s(now)))
        self._send_cancels(self.releases.end_waits(stored.finished, stored.result.over))
        self._take_strikes(stored)
        for finished in stored.finished:
            self._end_run(finished, stored, now)
        self._take_descriptions(stored, now)
        self.redrives.ended(stored.redriven)
        self.credits.fired(stored.result.fired)
        self.releases.expect_ends(stored.result.over)
        if self.tasks is not None and stored.result.moved_tasks:
            self.tasks.notify()
        if self.tasks is not None and stored.result.has_sent:
            self.tasks.notify_signals()

    def _take_strikes(self, stored: Stored) -> None:
        """Pass triggers over messages that they have failed on too often; hold those that fail on too many messages."""
        for trigger_id, key in stored.result.passed_over:
            log.error("a trigger fails on a message, and goes on without it", trigger_id=trigger_id, key=key)
            self.assignments.pass_over(trigger_id, key)
        for trigger_id, reason in stored.result.braked.items():
            log.error("a trigger fails on too many messages, and is held", trigger_id=trigger_id, reason=reason)
            self._send_if_running(self.holds.take(trigger_id, "brake"))

    def _take_descriptions(self, stored: Stored, now: float) -> None:
        """Start triggers whose streams are known now, or leave them to the owner of their stream."""
        placed = stored.result.placed
        for described in stored.described:
            if self.assignments.describe(described, placed, now):
                self.releases.ended(described.trigger_id, for_good=described.trigger_id not in placed.elsewhere)
        for run in placed.refused:
            log.error("a trigger cannot be started", trigger_id=run.trigger_id, error=run.error)
            self._end_run(run, stored, now)
        if placed.elsewhere:
            log.info("triggers are left to the owner of their stream", triggers=len(placed.elsewhere))
            self.leases.poll_soon()  # the streams may be this supervisor's to claim

    def _end_run(self, finished: FinishedTrigger, stored: Stored, now: float) -> None:
        trigger_id = finished.trigger_id
        is_over = self.releases.is_over(trigger_id, stored.result.over)
        reason = "nothing waits for it" if finished.reason == "timeout" else finished.reason
        self._log_to_task(trigger_id, "its trigger has ended", outcome=finished.outcome, reason=reason)
        if is_over:
            finished = msgspec.structs.replace(finished, outcome="returned")
        wait_s = self.assignments.end_run(finished, now, stored.strikes_of(finished))
        self.releases.ended(trigger_id, for_good=is_over or finished.reason in ("user", "timeout"))
        if is_over and trigger_id in self.credits:
            self.leases.poll_soon()  # the stream of a task may have opened it again
        if wait_s is not None:
            # Not a warning, and without the error: the runner has logged the failure.
            failures = stored.result.failure_counts.get(trigger_id)
            log.info("a trigger is started again", trigger_id=trigger_id, failures=failures, in_s=round(wait_s, 3))

    # --- tasks ------------------------------------------------------------------------------------

    def _step_tasks(self, now: float) -> None:
        if self.tasks is None or not self.leases.is_held:
            return
        if self.is_leaving:
            self.tasks.drain(now)
        elif not self.leases.lasts_s(now):
            self.tasks.end_endless("the lease of its supervisor is over, and another may have it")
        if self.tasks.step(self.leases.epoch, now):
            self.leases.poll_soon()  # the supervisor's own writes cause no notification
        self.credits.handled(self.tasks.take_handled())
        if self.tasks.take_expanded():
            self.credits.expanded()

    def _are_tasks_done(self, now: float) -> bool:
        """Whether leaving need not wait for tasks. Tasks that still run at the end of the drain are ended."""
        if self.tasks is None or self._leaving.is_fenced or self.tasks.drain(now):
            return True
        if self._leaving.is_drain_over(now):
            self._leaving.cut_short("tasks were still running at the drain's deadline")
            self.tasks.end_all("its supervisor was asked to stop, and would not wait longer")
        return self._leaving.is_past_deadline(now)

    def _log_to_task(self, trigger_id: int, event: str, **fields: object) -> None:
        """Write to the log of the task that waits for a trigger, if there is one."""
        if self._task_logs is None or (task := self.assignments.task_of(trigger_id)) is None:
            return
        source = {"trigger_id": trigger_id, "epoch": self.leases.epoch, "incarnation": self.runner.incarnation}
        self._task_logs.say(task, "info", event, **source, **fields)

    # --- leaving ----------------------------------------------------------------------------------

    def _gives_up(self, now: float) -> bool:
        """Whether not to ask the database again, for each attempt takes seconds, and the drain's deadline is over."""
        return self._leaving.is_past_deadline(now) and self._outage.is_away_again(now)

    def _leave(self, exit_: Exit, now: float) -> None:
        self.runner.leave(kill_at=self._leaving.begin(exit_, now))

    def _finish_leaving(self, now: float) -> None:
        """Leave if the runner has ended and its events are stored, or if the time to wait for that is over."""
        if not self.is_leaving or self.runner.state is not RunnerState.ABSENT:
            return
        if not self._are_tasks_done(now):
            # That may take hours. Triggers run nowhere meanwhile, unless others take them.
            is_stored = self.intake.is_empty and self.blame.is_stored and self.holds.is_stored
            if self.leases.is_held and is_stored and not self._leaving.has_released:
                self._leaving.has_released = True
                self.leases.release_triggers()
            return
        is_fenced = self._leaving.is_fenced
        exit_ = self._leaving.result(now, is_all_stored=is_fenced or self.intake.is_empty)
        if exit_ is None:
            return
        if not is_fenced and self.leases.is_held:
            self.leases.sign_off(asks=not self._gives_up(now))
        self._leaving.log_at = math.inf
        self._commands.append(exit_)

    def _log_drain(self, now: float) -> None:
        """Log every few seconds what the drain waits for."""
        if now >= self._leaving.log_at:
            has_runner = self.runner.state is not RunnerState.ABSENT
            tasks = [] if self.tasks is None else self.tasks.running()
            self._leaving.log(now, has_runner=has_runner, has_events=not self.intake.is_empty, tasks=tasks)
