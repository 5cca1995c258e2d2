"""Scenarios that are not drawn: for promises about a moment, which random ones meet by chance at most.

Their times are whole binary fractions of a second, so that adding them up costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.proof.simulation import records, world
from tests.proof.simulation.checker import Checker
from tests.proof.simulation.scenario import (
    FRAME_BYTES_SMALL,
    AdvanceHangs,
    DatabaseIsAway,
    KillAtMark,
    KillRunner,
    Message,
    Plan,
    Scenario,
    StreamFails,
    TakeOver,
    Topology,
)

NO_TOLERANCE_S = 0.0005  # less than the shortest time between two looks for an ack timeout


def a_hung_filter_is_failed_at_its_ack_timeout() -> list[str]:
    """One filter hangs: it is cancelled when its ack timeout runs out, not a look later."""
    message = Message(1.0, {"t1": Plan(stalls=1)})
    plan = Scenario(0, Topology(ack_timeout_s=4.0), ((message, Message(8.0)),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan, late_tolerance_s=NO_TOLERANCE_S).check(history)]
    if not any(isinstance(record, records.Hung) for record in history):
        found.append("the filter was never cancelled")
    return found


def a_reject_is_advanced_before_what_was_fired_is_stored() -> list[str]:
    """A filter fires and then rejects while the database is away: the advance does not wait for it."""
    message = Message(1.0, {"t1": Plan("reject", events=1)})
    plan = Scenario(0, Topology(ack_timeout_s=16.0), ((message, Message(8.0)),), (DatabaseIsAway(0.5, 4.0),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    rejected_at = next(record.at for record in history if isinstance(record, records.Refused))
    advanced_at = next(record.at for record in history if isinstance(record, records.AdvanceBegan))
    if advanced_at != rejected_at:
        found.append(f"rejected at {rejected_at} s, advanced at {advanced_at} s")
    return found


def half_a_round_confirms_nothing() -> list[str]:
    """A runner dies between two frames of a round; the answer to the next runner's first round names only its own."""
    plans = {"t1": Plan(events=3, nap_s=0.25, failures=1, fired_before_failing=3, padded=True)}
    topology = Topology(frame_bytes_max=FRAME_BYTES_SMALL)
    after_the_first_half = KillAtMark("runner.frame_sent", nth=3)  # the first two are Hello and a heartbeat
    plan = Scenario(0, topology, ((Message(1.0, plans), Message(8.0)),), (after_the_first_half,))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    if not any(isinstance(record, records.RunnerEnded) for record in history):
        found.append("the runner never died")
    return found


def an_overflow_fails_everything_its_subscriber_owes() -> list[str]:
    """One of two filters naps while more comes than its queue holds: what it owes comes again, the rest goes on."""
    messages = [Message(1.0, {"t1": Plan(nap_s=0.5)}) for _ in range(8)]
    topology = Topology(triggers=2, overflow="fail", subscriber_queue_max=2, ack_timeout_s=16.0)
    plan = Scenario(0, topology, ((*messages, Message(8.0)),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    ends = [record for record in history if isinstance(record, records.Finished)]
    if not any(record.error.startswith("SubscriberOverflow") for record in ends):
        found.append("nothing overflowed")
    return found


def triggers_that_failed_before_a_crash_begin_together_after_it() -> list[str]:
    """Two filters fail while the database is away, and their runner dies: nobody is left out of the next stream."""
    plans = {"t1": Plan(failures=1), "t2": Plan(failures=1)}
    faults = (DatabaseIsAway(0.5, 3.0), KillRunner(2.0))
    plan = Scenario(0, Topology(triggers=2), ((Message(1.0, plans), Message(8.0)),), faults)
    return [str(finding) for finding in Checker(plan).check(world.run(plan))]


def what_a_dead_runner_sent_is_answered_to_nobody() -> list[str]:
    """A round waits for the database when its runner dies; the next runner hears nothing of it."""
    plan = Scenario(0, Topology(), ((Message(1.0), Message(8.0)),), (DatabaseIsAway(0.5, 3.0), KillRunner(2.0)))
    return [str(finding) for finding in Checker(plan).check(world.run(plan))]


def a_subscriber_that_comes_back_to_a_dying_stream_gets_a_fresh_one() -> list[str]:
    """A stream fails while its last advance hangs; its subscriber is back before the stream is closed."""
    faults = (AdvanceHangs(0.5, 3.0), StreamFails(1.5))
    plan = Scenario(0, Topology(), ((Message(1.0), Message(8.0)),), faults)
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    began_at = [record.at for record in history if isinstance(record, records.Began)]
    closed_at = [record.at for record in history if isinstance(record, records.Closed)]
    if not any(began < closed_at[0] for began in began_at[1:]):
        found.append("nobody came back in time")
    return found


def a_filter_that_hangs_hears_of_the_end_of_its_stream() -> list[str]:
    """One filter hangs, and its stream fails meanwhile: it is cancelled an ack timeout after the end."""
    message = Message(1.0, {"t1": Plan(stalls=1)})
    plan = Scenario(0, Topology(ack_timeout_s=4.0), ((message, Message(16.0)),), (StreamFails(1.5),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan, late_tolerance_s=NO_TOLERANCE_S).check(history)]
    hung_at = [record.at for record in history if isinstance(record, records.Hung)]
    if hung_at != [5.5]:
        found.append(f"the filter was cancelled at {hung_at}, not at 5.5 s")
    return found


def who_is_cut_off_from_the_database_advances_while_the_lease_is_sure_and_no_longer() -> list[str]:
    """Messages that fire nothing need no confirmation; and yet no fenced supervisor's runner may have them forgotten.

    The lease is renewed at 0 s and lasts for 30, of which advances may begin in the first 24. From 31.5 s on another
    supervisor has it, and this one hears of that within a second.
    """
    skips = {"t1": Plan(events=0)}
    times = (8.0, 23.5, 24.5, 30.5, 31.5625, 31.625, 31.75, 31.875)
    messages = [Message(at, skips) for at in times]
    plan = Scenario(0, Topology(), ((*messages, Message(40.0)),), (TakeOver(1.0),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    advanced_at = [record.at for record in history if isinstance(record, records.AdvanceBegan)]
    fenced_at = next(record.at for record in history if isinstance(record, records.Fenced))
    if advanced_at[:2] != [8.0, 23.5]:
        found.append(f"advanced at {advanced_at}: what came at 8 and 23.5 s waited for more than an answer")
    if any(24.0 <= at <= fenced_at for at in advanced_at):
        found.append(f"advanced at {advanced_at}: after 24 s no advance may begin")
    return found


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "timeout": a_hung_filter_is_failed_at_its_ack_timeout,
    "reject": a_reject_is_advanced_before_what_was_fired_is_stored,
    "half a round": half_a_round_confirms_nothing,
    "late failure": triggers_that_failed_before_a_crash_begin_together_after_it,
    "late answer": what_a_dead_runner_sent_is_answered_to_nobody,
    "dying stream": a_subscriber_that_comes_back_to_a_dying_stream_gets_a_fresh_one,
    "hung at the end": a_filter_that_hangs_hears_of_the_end_of_its_stream,
    "cut off": who_is_cut_off_from_the_database_advances_while_the_lease_is_sure_and_no_longer,
    "overflow": an_overflow_fails_everything_its_subscriber_owes,
}
