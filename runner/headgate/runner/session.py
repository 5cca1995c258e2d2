"""One session of the runner with its supervisor, from the handshake to the end.

A few tasks do it: one receives and obeys, two send rounds and requests, and one, when it is time, drains. The
drain keeps the order of I1 and I13: first nothing new is pulled, while confirmations still come and brokers are
advanced; then the triggers are cut short; then what they last fired is handed over.

What does not end in time is left behind with the process: ``exit_process`` is called with the exit code then.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable
from typing import assert_never

import structlog
import trio

from headgate.child import queries
from headgate.child.parent_death import SupervisorGone
from headgate.protocol import marks
from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.queries import Response
from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    Hello,
    RunnerSettings,
    StateSync,
    Welcome,
)
from headgate.protocol.version import VERSION
from headgate.runner.black_box import BlackBox
from headgate.runner.figures import FiguresReport
from headgate.runner.host import Host
from headgate.runner.link import AsyncLink
from headgate.runner.outbox import Outbox
from headgate.runner.watchdog import Watchdog
from headgate.streams.lease import Lease
from headgate.streams.manager import SharedStreamManager

log = structlog.get_logger(__name__)

EXIT_DRAINED = 0
EXIT_ABANDONED = 75  # the supervisor went away without a drain
EXIT_PROTOCOL = 76  # the supervisor broke the protocol
EXIT_OVERDUE = 77  # the drain's deadline passed before everything had ended and was told
SETTLE_SHARE = 0.5  # of the drain's deadline, for what was fired to be stored and advanced before triggers are cut
HANDOVER_SHARE = 0.4  # of the drain's deadline, for the triggers to end and their last events to be stored
ABANDONED_END_S = 0.5  # how long the hooks may take once the supervisor is gone (I7: a second in all)

ExitProcess = Callable[[int], object]


def run(sock: socket.socket, incarnation: int, *, exit_process: ExitProcess, box: BlackBox) -> int:
    """Run one session over the socket; return the exit code of the process."""
    return trio.run(_main, sock, incarnation, exit_process, box, strict_exception_groups=True, instruments=[box])


async def _main(sock: socket.socket, incarnation: int, exit_process: ExitProcess, box: BlackBox) -> int:
    sock.setblocking(False)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    link = AsyncLink(stream, Connection(RunnerDialect(incarnation), Role.RUNNER))
    try:
        settings = await shake_hands(link, incarnation)
        sys.path += [folder for folder in settings.import_paths if folder not in sys.path]
        # What is loaded by now lives as long as the process: the collector need not look at it again.
        gc.freeze()
        with Watchdog(blocked_after_s=settings.blocked_after_s):
            return await RunnerSession(link, settings, exit_process=exit_process, box=box).run()
    except (SupervisorGone, trio.BrokenResourceError):
        return EXIT_ABANDONED
    except RemoteProtocolError as exc:
        log.error("the supervisor broke the protocol", error=str(exc))
        return EXIT_PROTOCOL
    finally:
        await link.aclose()


async def shake_hands(link: AsyncLink, incarnation: int) -> RunnerSettings:
    """Shake hands; return the settings from the supervisor.

    Raises `SupervisorGone`, `trio.BrokenResourceError`, and `RemoteProtocolError` (for another version of the
    protocol a `VersionMismatch`).
    """
    await link.send(Hello(PROTOCOL_VERSION, incarnation, os.getpid(), VERSION))
    welcome = await link.receive()
    assert isinstance(welcome, Welcome), "the session lets nothing else through"
    marks.reach("session.greeted")
    return welcome.settings


class RunnerSession:
    """The session after the handshake."""

    def __init__(self, link: AsyncLink, settings: RunnerSettings, *, exit_process: ExitProcess, box: BlackBox) -> None:
        self._link = link
        self._box = box
        self._settings = settings
        self._exit_process = exit_process
        self._outbox = Outbox(events_max=settings.outbox_events_max, round_events_max=settings.round_events_max)
        self._lease = Lease(request_round=self._outbox.request_round)
        self._is_assembling = False
        self._describing: set[str] = set()  # streams whose brokers are being asked, or wait for that
        self._exit_code = EXIT_DRAINED
        self._streams: SharedStreamManager
        self._host: Host

    async def run(self) -> int:
        """Follow the supervisor's messages until drained or abandoned; return the exit code."""
        settings = self._settings
        # Inherited by the tasks of all triggers, and by the threads they start through trio.
        with queries.trigger_queries_handled_by(self._link.send_query):
            await self._run(settings)
        return self._exit_code

    async def _run(self, settings: RunnerSettings) -> None:
        async with (
            SharedStreamManager(
                max_subscriber_queue=settings.subscriber_queue_max,
                ack_timeout=settings.ack_timeout_s,
                cohort_grace_period=settings.cohort_grace_s,
                advance_timeout=settings.advance_timeout_s,
                overflow="pause",
                lease=self._lease,
            ) as self._streams,
            trio.open_nursery() as nursery,
        ):
            self._host = Host(
                settings=settings,
                streams=self._streams,
                outbox=self._outbox,
                nursery=nursery,
                ask_last_event=self._link.ask_last_event,
                box=self._box,
            )
            self._outbox.request_round()  # for the lease: the first message may have no event to be confirmed
            nursery.start_soon(self._send, name="rounds and requests")
            try:
                await self._obey(nursery)
            except SupervisorGone:
                log.warning("the supervisor is gone")
                await self._abandon(nursery.cancel_scope, EXIT_ABANDONED)
            except RemoteProtocolError as exc:
                log.error("the supervisor broke the protocol", error=str(exc))
                await self._abandon(nursery.cancel_scope, EXIT_PROTOCOL)
            finally:
                # In any case: a trigger that waits for room in the outbox is shielded, and must see that it is over.
                self._host.cancel_all("shutdown")

    async def _send(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                figures = FiguresReport(self._streams.figures)
                nursery.start_soon(self._link.send_rounds, self._outbox, self._settings, self._lease, figures)
                nursery.start_soon(self._link.send_requests)
        except* (trio.BrokenResourceError, RemoteProtocolError):
            pass  # nothing can be sent any more; the receiving side has seen why, and decides

    async def _obey(self, nursery: trio.Nursery) -> None:
        while True:
            message = await self._link.receive()
            match message:
                case StateSync():
                    await self._sync(message)
                    for digest in set(message.describe) - self._describing:
                        self._describing.add(digest)
                        nursery.start_soon(self._describe, digest, name="description of a stream")
                case Response():
                    self._link.note_response(message)
                case Drain():
                    nursery.start_soon(self._drain_within, message.deadline_s, nursery.cancel_scope, name="drain")
                case Welcome():
                    raise AssertionError("the session lets no second Welcome through")
                case _:
                    assert_never(message)

    async def _sync(self, sync: StateSync) -> None:
        """Confirm first, because a broker waits for it; then cancel; then start; then give what belongs to the runs."""
        marks.reach("session.answer_read")
        if sync.lease_lost:
            self._lease.give_up()
        self._confirm(sync)
        for cancel in sync.to_cancel:
            self._host.cancel(cancel)
        self._host.expect_absent(sync.absent)
        if sync.to_create and not self._is_assembling:
            # Shared streams begin only when all their subscribers of this assignment are there: the first
            # message after a restart must find the same audience as before.
            self._streams.pause_starts()
            self._is_assembling = True
        await self._host.start(sync.to_create)
        for credit in sync.credits:
            self._host.extend(credit)
        for redelivery in sync.redeliveries:
            self._host.redeliver(redelivery)
        if self._is_assembling and not sync.more:
            marks.reach("session.started")
            self._streams.resume_starts()
            self._is_assembling = False

    async def _describe(self, digest: str) -> None:
        """Answer a question about a stream, with a round of its own."""
        description = await self._streams.describe(digest)
        self._describing.remove(digest)
        self._outbox.enqueue(description)

    def _confirm(self, sync: StateSync) -> None:
        for refusal in sync.refused:
            log.error("an event went to the dead letters", trigger_id=refusal.trigger_id, reason=refusal.reason)
        kept = [refusal.seq for refusal in sync.refused if refusal.payload_kept and refusal.seq]
        lost_here = [refusal.seq for refusal in sync.refused if not refusal.payload_kept and refusal.seq]
        # Confirmations of stored events arrive here, and only here: nothing else lets a broker be advanced (I1).
        self._streams.confirm_persisted(sync.persisted)
        self._streams.confirm_kept(kept)
        self._streams.confirm_refused(lost_here)
        marks.reach("session.confirmed")
        self._link.note_answer(sync)
        if sync.round and not sync.more:
            self._lease.renew(self._link.round_sent_at, sync.lease_s)

    async def _drain_within(self, deadline_s: float, whole: trio.CancelScope) -> None:
        log.info("draining", deadline_s=deadline_s, triggers=len(self._host))
        begun_at, cut_off_before = trio.current_time(), self._streams.advances_cut_off
        self._streams.stop_pulling()
        self._host.cancel_standalone("shutdown")
        with trio.move_on_at(begun_at + deadline_s * SETTLE_SHARE):
            await self._link.wait_told(self._outbox)
            await self._streams.settled()
        self._host.cancel_all("shutdown")
        with trio.move_on_at(begun_at + deadline_s * (SETTLE_SHARE + HANDOVER_SHARE)):
            await self._host.wait_all_ended()
            await self._link.wait_told(self._outbox)
        with trio.move_on_at(begun_at + deadline_s) as rest:
            await self._streams.stop_all()
        cut_off = self._streams.advances_cut_off - cut_off_before
        if rest.cancelled_caught or cut_off or len(self._host) or not self._link.is_told(self._outbox):
            log.error(
                "the drain's deadline has passed",
                triggers=len(self._host),
                untold=len(self._outbox),
                advances_cut_off=cut_off,
            )
            self._end(whole, EXIT_OVERDUE)
        else:
            whole.cancel()

    async def _abandon(self, whole: trio.CancelScope, code: int) -> None:
        """End without the supervisor: only what it has confirmed before is advanced."""
        with trio.move_on_after(ABANDONED_END_S):
            self._host.cancel_all("shutdown")
            await self._host.wait_all_ended()
            await self._streams.stop_all()
        self._end(whole, code)

    def _end(self, whole: trio.CancelScope, code: int) -> None:
        """Leave at once, whatever still runs. Only in tests does ``exit_process`` return."""
        self._exit_code = code
        self._exit_process(code)
        whole.cancel()
