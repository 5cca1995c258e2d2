"""`run_trigger`: run one trigger, from `serialize` to its last event, without waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import trio

from headgate.child import queries
from headgate.protocol.messages.runner import CancelReason, FinishedTrigger, FiredEvent, RunnerSettings, TriggerSpec
from headgate.runner.trigger_run import FiredAfterLast
from headgate.testing.clock import SkippingClock, skipped_wall_clock
from headgate.testing.failures import LeftBehind, Misbehaved, TooFewEvents, TriggerFailed
from headgate.testing.hosting import DOES_NOT_END, HostedTriggers, hosted_triggers
from headgate.testing.leftovers import leak_warnings
from headgate.testing.loop import Records, TrialLoop, collected_log
from headgate.testing.round_trip import check_round_trip
from headgate.testing.stubs import StubRun, Stubs
from headgate.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

WITHIN = timedelta(days=1)
BLOCKED_AFTER = timedelta(milliseconds=250)  # as in the runner: the default of blocked_after_s
EVENTS_MAX = 10_000  # a test that gets more has probably forgotten to limit them

# Records of the runner's log that fail the test of a trigger.
_MISBEHAVIOUR = (
    "a hook failed",
    "a hook took too long",
    "an event is refused",
    "a trigger does not end",
    "a trigger could not leave its shared stream",
)
TRIGGER_ID = 1


def run_trigger(
    trigger: BaseTrigger,
    *,
    events: int | None = None,
    within: timedelta = WITHIN,
    last_event: TriggerEvent | None = None,
    variables: Mapping[str, str] | None = None,
    connections: Mapping[str, str] | None = None,
    runs: Mapping[str, StubRun | Sequence[StubRun]] | None = None,
    blocked_after: timedelta = BLOCKED_AFTER,
) -> list[TriggerEvent]:
    """Run a trigger until it returns, has fired ``events`` events, or ``within`` has passed; return its events::

        # test_countdown.py
        from countdown import Countdown

        from headgate.testing import run_trigger


        def test_it_counts_down_to_zero():
            assert [event.payload for event in run_trigger(Countdown(3))] == [2, 1, 0]

    The trigger is serialized, its kwargs are encoded and decoded, and the runner's own code constructs it again and
    runs it. Time is skipped: a wait of an hour takes a millisecond. ``datetime.now()`` and ``time.time()`` are skipped
    too, in the modules that define the trigger's class. `BaseTrigger.last_event` returns ``last_event`` at first, and
    if it is given, the trigger may return without an event. ``variables``, ``connections`` (URIs) and ``runs`` answer
    the trigger's queries, as for `run_task`.

    Raises `RoundTripFailed`, `TriggerFailed` (its cause is the trigger's exception), `TooFewEvents`, `LoopBlocked`,
    `Misbehaved` and `LeftBehind`, which are all assertions.
    """
    spec = check_round_trip(trigger)
    has_streams = isinstance(trigger, BaseEventTrigger) and trigger.shared_stream_key() is not None
    with queries.secrets.apart():
        running = hosted_run(
            trigger,
            spec,
            SkippingClock(),
            blocked_after_s=blocked_after.total_seconds(),
            last_event=last_event,
            has_streams=has_streams,
            stubs=Stubs(variables=variables, connections=connections, runs=runs),
        )
        with running as run:
            run.wait(EVENTS_MAX if events is None else events, within.total_seconds())
            run.end("user")
    _judge(run.hosted, run.records)
    fired = run.hosted.events(TRIGGER_ID)
    if events is None and len(fired) >= EVENTS_MAX:
        raise AssertionError(
            f"{spec.name} has fired {EVENTS_MAX:,} events and does not end: limit their number (events=) or the "
            f"time (within=)"
        )
    may_add_nothing = last_event is not None and run.hosted.finished[TRIGGER_ID].outcome == "returned"
    if len(fired) < (events if events is not None else 0 if may_add_nothing else 1):
        again = run.hosted.redelivered
        known = f" ({again} more had the key of an earlier one, so each counts as that one again)" if again else ""
        raise TooFewEvents(
            f"{spec.name} fired {len(fired)} of {events or 'at least 1'} events within {within}{known}; time is "
            f"skipped for trio, and for datetime.now() and time.time() in the module of the class, and for nothing "
            f"else",
            fired,
        )
    check_left(spec.name, run.left)
    return fired[:events]


class HostedRun:
    """One run of a trigger in the runner's own host. Time passes, and the trigger with it, only during `wait`.

    ``records`` is what was logged, ``left`` what the trigger has left behind: complete when `hosted_run` is left.
    """

    def __init__(self, loop: TrialLoop[HostedTriggers], clock: SkippingClock, records: Records) -> None:
        self.records = records
        self.left: list[str] = []
        self.hosted: HostedTriggers
        self._loop = loop
        self._clock = clock

    @property
    def fired(self) -> list[FiredEvent]:
        """What it has fired so far."""
        return self.hosted.fired[TRIGGER_ID]

    @property
    def finished(self) -> FinishedTrigger | None:
        """How it has ended, None as long as it has not."""
        return self.hosted.finished.get(TRIGGER_ID)

    def start(self, spec: TriggerSpec) -> None:
        """Start the trigger."""

        async def start(hosted: HostedTriggers) -> HostedTriggers:
            await hosted.start((spec,))
            return hosted

        self.hosted = self._loop.call(start)

    def wait(self, events: int, within_s: float) -> None:
        """Return when it has fired ``events`` events in all, has ended, or ``within_s`` seconds have passed."""

        async def stop(hosted: HostedTriggers, scope: trio.CancelScope) -> None:
            while len(self.fired) < events and self.finished is None:
                await hosted.progress.park()
            scope.cancel()

        async def wait(hosted: HostedTriggers) -> None:
            until = self._clock.now_s + within_s
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop, hosted, nursery.cancel_scope)
                await self._clock.skip_waits(until, of=hosted.main)
                nursery.cancel_scope.cancel()

        self._loop.call(wait)

    def end(self, reason: CancelReason) -> None:
        """Cancel it, unless it has ended. The clock stays where it is: a task goes on from there."""

        async def end(hosted: HostedTriggers) -> list[str]:
            cancelled_at = self._clock.now_s
            hosted.cancel(TRIGGER_ID, reason)
            left = await hosted.end()
            self._clock.now_s = cancelled_at
            return left

        # One that goes on without waiting keeps the clock from being moved, so real time limits it.
        self.left += self._loop.call(end, if_endless=DOES_NOT_END)
        self._loop.close()


@contextmanager
def hosted_run(
    trigger: BaseTrigger,
    spec: TriggerSpec,
    clock: SkippingClock,
    *,
    blocked_after_s: float,
    stubs: Stubs,
    last_event: TriggerEvent | None = None,
    has_streams: bool = False,
) -> Generator[HostedRun]:
    """Start a trigger; it is to be ended before the ``with`` block is left."""
    last_events = {} if last_event is None else {TRIGGER_ID: last_event}
    open_state = functools.partial(
        hosted_triggers, clock, RunnerSettings(), last_events, has_streams=has_streams, stubs=stubs
    )
    with skipped_wall_clock(type(trigger), clock), trial(open_state, clock, blocked_after_s) as (loop, records, leaks):
        run = HostedRun(loop, clock, records)
        run.start(spec)
        yield run
    run.left += leaks


def check_left(name: str, left: Sequence[str]) -> None:
    """Raise `LeftBehind` if anything is left."""
    if left:
        raise LeftBehind(f"{name} left behind: {'; '.join(left)}")


@contextmanager
def trial(
    open_state: Callable[[], object], clock: SkippingClock, blocked_after_s: float
) -> Generator[tuple[TrialLoop[HostedTriggers], Records, list[str]]]:
    """Yield a running loop, the records it logs, and a list of leaks, which is filled at the end."""
    with leak_warnings() as leaks, collected_log() as records:
        loop: TrialLoop[HostedTriggers] = TrialLoop(
            open_state, clock=clock, blocked_after_s=blocked_after_s, records=records
        )
        loop.start()
        try:
            yield loop, records, leaks
        except BaseException:
            loop.abandon()
            raise


def _judge(hosted: HostedTriggers, records: Records) -> None:
    """Raise `TriggerFailed` or `Misbehaved` if the trigger did not end well."""
    finished, error = hosted.finished.get(TRIGGER_ID), hosted.errors.get(TRIGGER_ID)
    # One that was cancelled may have raised as well: in a `finally`, for example.
    if (
        finished is not None
        and error is not None
        and (finished.outcome != "returned" or isinstance(error, FiredAfterLast))
    ):
        raise TriggerFailed(finished.error, hosted.events(TRIGGER_ID)) from error
    check_log(records)


def check_log(records: Records) -> None:
    """Raise `Misbehaved` for an error in the runner's log."""
    for record in records:
        if record.get("event") in _MISBEHAVIOUR:
            shown = {name: record[name] for name in ("hook", "timeout_s", "within_s", "reason") if name in record}
            raise Misbehaved(f"{record['event']}: {shown}\n{record.get('exception', '')}".rstrip())
