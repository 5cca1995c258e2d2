"""`run_trigger`: run one trigger, from `serialize` to its last event, without waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import trio

from headgate.child import queries
from headgate.protocol.messages.runner import CancelReason, RunnerSettings, TriggerSpec
from headgate.testing.clock import SkippingClock, skipped_wall_clock
from headgate.testing.failures import LeftBehind, Misbehaved, TooFewEvents, TriggerFailed
from headgate.testing.hosting import HostedTriggers, hosted_triggers
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
    too, in the modules that define the trigger's class. `BaseTrigger.last_event` returns ``last_event`` at first;
    ``variables``, ``connections`` (URIs) and ``runs`` answer the trigger's queries, as for `run_task`.

    Raises `RoundTripFailed`, `TriggerFailed` (its cause is the trigger's exception), `TooFewEvents`, `LoopBlocked`,
    `Misbehaved` and `LeftBehind`, which are all assertions.
    """
    spec = check_round_trip(trigger)
    has_streams = isinstance(trigger, BaseEventTrigger) and trigger.shared_stream_key() is not None
    with queries.secrets.apart():
        hosted, records, left = run_hosted(
            trigger,
            spec,
            SkippingClock(),
            events=EVENTS_MAX if events is None else events,
            within_s=within.total_seconds(),
            blocked_after_s=blocked_after.total_seconds(),
            last_events={} if last_event is None else {TRIGGER_ID: last_event},
            has_streams=has_streams,
            stubs=Stubs(variables=variables, connections=connections, runs=runs),
        )
    _judge(hosted, records, trigger)
    fired = hosted.events(TRIGGER_ID)
    if events is None and len(fired) >= EVENTS_MAX:
        raise AssertionError(
            f"{spec.name} has fired {EVENTS_MAX:,} events and does not end: limit their number (events=) or the "
            f"time (within=)"
        )
    if len(fired) < (1 if events is None else events):
        raise TooFewEvents(
            f"{spec.name} fired {len(fired)} of {events or 'at least 1'} events within {within}; time is skipped for "
            f"trio, and for datetime.now() and time.time() in the module of the class, and for nothing else",
            fired,
        )
    check_left(spec.name, left)
    return fired[:events]


def run_hosted(
    trigger: BaseTrigger,
    spec: TriggerSpec,
    clock: SkippingClock,
    *,
    events: int,
    within_s: float,
    blocked_after_s: float,
    stubs: Stubs,
    reason: CancelReason = "user",
    last_events: dict[int, TriggerEvent] | None = None,
    has_streams: bool = False,
) -> tuple[HostedTriggers, Records, list[str]]:
    """Run a trigger until it ends, has fired ``events`` events, or ``within_s`` seconds have passed, then cancel it.

    Return the host, what was logged, and what the trigger left behind. The clock then shows when it was cancelled.
    """

    async def stop(hosted: HostedTriggers, scope: trio.CancelScope) -> None:
        while len(hosted.fired[TRIGGER_ID]) < events and TRIGGER_ID not in hosted.finished:
            await hosted.progress.park()
        scope.cancel()

    async def run(hosted: HostedTriggers) -> tuple[HostedTriggers, list[str]]:
        until = clock.now_s + within_s
        await hosted.start((spec,))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop, hosted, nursery.cancel_scope)
            await clock.skip_waits(until, of=hosted.main)
            nursery.cancel_scope.cancel()
        cancelled_at = clock.now_s
        hosted.cancel(TRIGGER_ID, reason)
        left = await hosted.end()
        clock.now_s = cancelled_at  # a task continues from the moment of the cancellation
        return hosted, left

    open_state = functools.partial(
        hosted_triggers, clock, RunnerSettings(), last_events or {}, has_streams=has_streams, stubs=stubs
    )
    with skipped_wall_clock(type(trigger), clock), trial(open_state, clock, blocked_after_s) as (loop, records, leaks):
        hosted, left = loop.call(run)
        loop.close()
    return hosted, records, [*left, *leaks]


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


def _judge(hosted: HostedTriggers, records: Records, trigger: BaseTrigger) -> None:
    """Raise `TriggerFailed` or `Misbehaved` if the trigger did not end well."""
    finished, error = hosted.finished.get(TRIGGER_ID), hosted.errors.get(TRIGGER_ID)
    if finished is not None and finished.outcome == "failed":
        raise TriggerFailed(finished.error, hosted.events(TRIGGER_ID)) from error
    check_log(records)


def check_log(records: Records) -> None:
    """Raise `Misbehaved` for an error in the runner's log."""
    for record in records:
        if record.get("event") in _MISBEHAVIOUR:
            shown = {name: record[name] for name in ("hook", "timeout_s", "within_s", "reason") if name in record}
            raise Misbehaved(f"{record['event']}: {shown}\n{record.get('exception', '')}".rstrip())
