"""Scenarios that are not drawn: for promises about a moment, which random ones meet by chance at most.

Their times are whole binary fractions of a second, so that adding them up costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.proof.simulation import records, world
from tests.proof.simulation.checker import Checker
from tests.proof.simulation.scenario import (
    FRAME_BYTES_SMALL,
    HARM_MAX,
    KILLS_MAX,
    LATE,
    MAX_DELIVERIES,
    UNFIT,
    AddWatcher,
    AdvanceHangs,
    ChangeWatcher,
    CutLink,
    DatabaseIsAway,
    EndsWithOldBox,
    FileIsReplaced,
    FreezeSupervisor,
    KillAtMark,
    KillRunner,
    KillSupervisor,
    Message,
    Plan,
    Release,
    RemoveWatcher,
    Scenario,
    StartBeside,
    StreamFails,
    TakeOver,
    Topology,
)
from tests.proof.simulation.users.directed import OF_USERS

from headgate.protocol.marks import POISON_MARKS
from headgate.supervisor.commands import EXIT_DATABASE_REPLACED

FIRST_WAIT_S_MAX = 1.0  # from a failure to the next start, and what comes then; later waits are twice as long
RESPAWN_S_MAX = 0.2  # of the next runner after the first of many deaths; later waits would be twice as long
BURIALS_MAX = 21  # messages in a row that one trigger cannot take, after which it is held
LAST_FAILURE_AT = 4.25  # of a filter that fails on a message of second 1 for ever, and is passed over it 0.23 s later
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


def a_message_that_one_cannot_take_costs_only_that_one() -> list[str]:
    """One of two filters fails on a message for ever, and its supervisor dies meanwhile: it goes on without it.

    It gets the message exactly as often as it may.
    """
    messages = (Message(1.0), Message(1.0, {"t1": Plan(failures=UNFIT)}), Message(1.0), Message(64.0))
    plan = Scenario(0, Topology(triggers=2), (messages,), (KillSupervisor(2.0, runner_at_once=True, down_s=0.5),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    failed_at = [r.at for r in history if isinstance(r, records.Finished) and r.message_key == "0:1"]
    letters = [(r.trigger, r.key) for r in history if isinstance(r, records.DeadLettered) and r.position < 0]
    if len(failed_at) != MAX_DELIVERIES:
        found.append(f"it failed {len(failed_at)} times, and not {MAX_DELIVERIES}")
    if letters != [("t1", "0:1")]:
        found.append(f"these were passed over: {letters}")
    return found


def a_death_while_a_message_is_passed_over_loses_neither_strike_nor_letter() -> list[str]:
    """The supervisor dies with the last strike, and another with the letter, in an open transaction."""
    found = []
    for mark in POISON_MARKS:
        messages = (Message(0.25, {"t1": Plan(failures=UNFIT)}), Message(0.25), Message(64.0))
        plan = Scenario(0, Topology(triggers=2), (messages,), (KillAtMark(mark),))
        history = world.run(plan)
        found += [str(finding) for finding in Checker(plan).check(history)]
        if not any(isinstance(r, records.SupervisorEnded) and r.how == f"killed at {mark}" for r in history):
            found.append(f"nothing died at {mark}")
        letters = [(r.trigger, r.key) for r in history if isinstance(r, records.DeadLettered) and r.position < 0]
        if letters != [("t1", "0:0")]:
            found.append(f"these were passed over: {letters}")
    return found


def a_stream_goes_on_at_once_without_a_message_that_cannot_be_taken() -> list[str]:
    """A filter fails on a message for ever: after the last failure it is started as soon as after the first."""
    plan = Scenario(0, Topology(), ((Message(1.0, {"t1": Plan(failures=UNFIT)}), Message(64.0)),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    failed_at = [record.at for record in history if isinstance(record, records.Finished)]
    began_at = [record.at for record in history if isinstance(record, records.Began)]
    wait_s = min(at for at in began_at if at > failed_at[-1]) - failed_at[-1]
    if wait_s > FIRST_WAIT_S_MAX:
        found.append(f"stands still: it is started {wait_s} s after its last failure")
    return found


def a_failure_that_is_reported_again_is_no_other_strike() -> list[str]:
    """The commit of a failure is ambiguous; one more failure than were counted would pass the message over."""
    message = Message(1.0, {"t1": Plan(failures=MAX_DELIVERIES - 1)})
    faults = (DatabaseIsAway(0.5, 1.0, ambiguous=True),)
    plan = Scenario(0, Topology(), ((message, Message(64.0)),), faults)
    return [str(finding) for finding in Checker(plan).check(world.run(plan))]


def a_trigger_that_takes_no_message_is_held() -> list[str]:
    """A filter fails on one message after the other: then its stream waits, until a user has it go on."""
    unfit = [Message(1.0, {"t1": Plan(failures=UNFIT)}) for _ in range(BURIALS_MAX + 4)]
    released_at = 256.0
    plan = Scenario(0, Topology(), ((*unfit, Message(1.0)),), (Release(released_at, "t1"),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    letters = [record for record in history if isinstance(record, records.DeadLettered) and record.position < 0]
    before = sum(letter.at < released_at for letter in letters)
    if before > BURIALS_MAX:
        found.append(f"no brake: {before} messages in a row became dead letters")
    elif before < BURIALS_MAX - 1:
        found.append(f"only {before} messages became dead letters before {released_at} s")
    return found


def a_letter_is_stored_before_its_message_is_forgotten() -> list[str]:
    """A message is passed over while the database is away: it is not advanced until its letter is stored (I1)."""
    message = Message(1.0, {"t1": Plan(failures=UNFIT)})
    plan = Scenario(0, Topology(), ((message, Message(64.0)),), (DatabaseIsAway(LAST_FAILURE_AT + 0.125, 2.0),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    if not any(isinstance(record, records.DeadLettered) for record in history):
        found.append("nothing was passed over")
    return found


def a_message_is_passed_over_by_the_next_runner_as_well() -> list[str]:
    """A runner dies while it advances a message that was passed over: delivered again, it is passed over again."""
    message = Message(1.0, {"t1": Plan(failures=UNFIT)})
    faults = (AdvanceHangs(LAST_FAILURE_AT + 0.125, 16.0), KillRunner(8.0))
    plan = Scenario(0, Topology(), ((message, Message(64.0)),), faults)
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    failed = sum(isinstance(record, records.Finished) for record in history)
    if failed != MAX_DELIVERIES:
        found.append(f"forgotten: it failed {failed} times, and not {MAX_DELIVERIES}")
    if sum(isinstance(record, records.HandedOut) and record.offset == 0 for record in history) <= MAX_DELIVERIES + 1:
        found.append("the message was not delivered again")
    return found


def a_supervisor_whose_file_is_replaced_confirms_nothing_more() -> list[str]:
    """The file is replaced between two messages: the second one is stored in the new file, by the next supervisor."""
    messages = (Message(1.0), Message(2.0), Message(8.0))
    plan = Scenario(0, Topology(), (messages,), (FileIsReplaced(1.5),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    ends = [record.how for record in history if isinstance(record, records.SupervisorEnded)]
    if ends[:1] != [f"exit code {EXIT_DATABASE_REPLACED}"]:
        found.append(f"the supervisor did not leave because of its file: {ends}")
    return found


def a_stream_waits_for_a_trigger_that_is_held_even_in_the_next_runner() -> list[str]:
    """One of two triggers is held, and the runner dies: nothing is broadcast without it until a user releases it."""
    unfit = [Message(1.0, {"t1": Plan(failures=UNFIT)}) for _ in range(BURIALS_MAX + 4)]
    killed_at, released_at = 240.0, 256.0
    faults = (KillRunner(killed_at), Release(released_at, "t1"))
    plan = Scenario(0, Topology(triggers=2, in_flight_max=1), ((*unfit, Message(1.0)),), faults)
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    began_at = [record.at for record in history if isinstance(record, records.Began) and record.trigger == "t2"]
    if not any(killed_at < at < released_at for at in began_at):
        found.append("the other trigger was not started while the first was held")
    return found


def a_trigger_that_another_supervisor_claims_goes_to_the_owner_of_its_stream() -> list[str]:
    """A trigger is added while the owner of its stream stands still, so that the other supervisor describes it."""
    messages = (Message(1.0), Message(8.0), Message(64.0))
    faults = (StartBeside(2.0), FreezeSupervisor(4.0, 8.0), AddWatcher(5.0, LATE))
    plan = Scenario(0, Topology(triggers=2), (messages,), faults)
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    owners = [record.owners for record in history if isinstance(record, records.Owned)]
    if not any(record.get(LATE) == 0 for record in owners):
        found.append(f"the late trigger was not left to the owner of its stream: {owners}")
    if len(set(owners[-1].values())) != 1 or LATE not in owners[-1]:
        found.append(f"the late trigger did not go to the owner of its stream: {owners}")
    return found


def a_stream_is_taken_over_whole() -> list[str]:
    """The owner of a stream dies: another supervisor goes on with all three triggers, from one commit on."""
    messages = (Message(1.0), Message(8.0), Message(64.0))
    faults = (StartBeside(2.0), KillSupervisor(4.0, down_s=32.0))
    plan = Scenario(0, Topology(triggers=3), (messages,), faults)
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    owners = [set(record.owners.values()) for record in history if isinstance(record, records.Owned)]
    if len(owners[-1]) != 1 or owners[-1] == owners[0]:
        found.append(f"the stream has no other owner: {owners}")
    return found


def _waits_for_runner(history: list[records.Record]) -> list[float]:
    """Return the seconds from each end of a runner by a trigger to the start of the next one."""
    ended_at = [record.at for record in history if isinstance(record, records.Killed)]
    started_at = [record.at for record in history if isinstance(record, records.RunnerStarted)]
    return [min(at for at in started_at if at > ended) - ended for ended in ended_at]


def _slow_respawns(history: list[records.Record]) -> list[str]:
    return [f"started late: after {wait_s} s" for wait_s in _waits_for_runner(history) if wait_s > RESPAWN_S_MAX]


def a_message_that_ends_the_process_costs_only_its_trigger() -> list[str]:
    """One of two filters ends the process with a message, always: it is passed over, and all others go on at once."""
    messages = (Message(1.0), Message(1.0, {"t1": Plan(kills=UNFIT)}), Message(1.0), Message(64.0))
    plan = Scenario(0, Topology(triggers=2), (messages,))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)] + _slow_respawns(history)
    kills = [record.message for record in history if isinstance(record, records.Killed)]
    letters = [(r.trigger, r.key) for r in history if isinstance(r, records.DeadLettered) and r.position < 0]
    if kills != ["0:1"] * KILLS_MAX:
        found.append(f"the process was ended with {kills}")
    if letters != [("t1", "0:1")]:
        found.append(f"these were passed over: {letters}")
    if any(isinstance(record, records.Held) for record in history):
        found.append("the trigger was held for its message")
    return found


def a_trigger_that_ends_the_process_is_quarantined() -> list[str]:
    """One of two triggers ends the process when it begins: it is held back, then held, and its stream waits for it."""
    released_at = 30.0
    topology = Topology(triggers=2, kills_at_start={"t1": HARM_MAX + 1})
    plan = Scenario(0, topology, ((Message(0.0), Message(2.0), Message(40.0)),), (Release(released_at, "t1"),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)] + _slow_respawns(history)
    killed_at = [record.at for record in history if isinstance(record, records.Killed)]
    if [at < released_at for at in killed_at] != [True] * HARM_MAX + [False]:
        found.append(f"the process was ended at {killed_at}")
    holds = [(record.trigger, record.hold) for record in history if isinstance(record, records.Held)]
    if holds != [("t1", "quarantine")]:
        found.append(f"these were held: {holds}")
    began_at = [record.at for record in history if isinstance(record, records.Began) and record.trigger == "t2"]
    if not any(killed_at[HARM_MAX - 1] < at < released_at for at in began_at):
        found.append("the other trigger was not started while the first was held")
    return found


def a_message_that_ends_the_process_is_not_struck_by_the_box_of_an_earlier_runner() -> list[str]:
    """A message ends the process once less than it may; then a runner ends by itself, and its box tells of the first.

    The message is not passed over: its trigger handles it in the next runner.
    """
    message = Message(1.0, {"t1": Plan(kills=KILLS_MAX - 1, nap_s=4.0)})
    plan = Scenario(0, Topology(ack_timeout_s=16.0), ((message, Message(16.0)),), (EndsWithOldBox(3.0),))
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    if sum(isinstance(record, records.RunnerEnded) for record in history if record.at <= 3.0) != KILLS_MAX:
        found.append("no runner ended with the box of an earlier one")
    return found


def a_death_while_a_trigger_is_quarantined_loses_nothing() -> list[str]:
    """The supervisor dies with a quarantine in the open transaction, and another right after it is stored.

    In the first case the trigger does as much harm again, in the second it does none until a user releases it.
    """
    found = []
    for mark, kills_before in (("holds.written", 2 * HARM_MAX), ("holds.stored", HARM_MAX)):
        released_at = 30.0
        topology = Topology(triggers=2, kills_at_start={"t1": kills_before})
        plan = Scenario(0, topology, ((Message(0.0), Message(40.0)),), (KillAtMark(mark), Release(released_at, "t1")))
        history = world.run(plan)
        found += [str(finding) for finding in Checker(plan).check(history)]
        if not any(isinstance(r, records.SupervisorEnded) and r.how == f"killed at {mark}" for r in history):
            found.append(f"nothing died at {mark}")
        killed_at = [record.at for record in history if isinstance(record, records.Killed)]
        if len(killed_at) != kills_before or max(killed_at) > released_at:
            found.append(f"{mark}: the process was ended at {killed_at}")
        if not any(isinstance(record, records.Held) for record in history):
            found.append(f"{mark}: no quarantine was stored")
    return found


def a_search_goes_on_when_a_user_removes_what_it_waits_for() -> list[str]:
    """Two runners end soon after another and name nobody, and the trigger that the search starts next is removed."""
    plan = Scenario(
        0,
        Topology(triggers=3),
        ((Message(0.0), Message(5.0)),),
        (CutLink(1.0), CutLink(1.5), RemoveWatcher(2.0, "t2")),
    )
    history = world.run(plan)
    found = [str(finding) for finding in Checker(plan).check(history)]
    if {record.trigger for record in history if isinstance(record, records.Began) and 1.5 < record.at < 2.0} != {"t1"}:
        found.append("no search was under way when the trigger was removed")
    return found


def a_changed_trigger_is_started_again_and_misses_no_message() -> list[str]:
    """One of two triggers is changed while messages flow, and whoever could forget it dies at that moment, or none."""
    changed_at = 2.0
    messages = tuple(Message(1.0 + number / 16, {"t1": Plan(nap_s=0.02)}) for number in range(64))
    found = []
    deaths = [(kill(at),) for at in (2.125, 2.5, 3.0, 3.5) for kill in (KillRunner, KillSupervisor)]
    for faults in ((), *deaths):
        plan = Scenario(
            0,
            Topology(triggers=2, latency_s=0.1),
            ((*messages, Message(40.0)),),
            (ChangeWatcher(changed_at, "t1"), *faults),
        )
        history = world.run(plan)
        found += [str(finding) for finding in Checker(plan).check(history)]
        began = [r.trigger for r in history if isinstance(r, records.Began) and changed_at < r.at < 10.0]
        if "t1" not in began or (not faults and "t2" in began):
            found.append(f"not started again, or not alone: {began} with {faults}")
    return found


DIRECTED: dict[str, Callable[[], list[str]]] = {
    "changed": a_changed_trigger_is_started_again_and_misses_no_message,
    "timeout": a_hung_filter_is_failed_at_its_ack_timeout,
    "reject": a_reject_is_advanced_before_what_was_fired_is_stored,
    "half a round": half_a_round_confirms_nothing,
    "late failure": triggers_that_failed_before_a_crash_begin_together_after_it,
    "late answer": what_a_dead_runner_sent_is_answered_to_nobody,
    "dying stream": a_subscriber_that_comes_back_to_a_dying_stream_gets_a_fresh_one,
    "hung at the end": a_filter_that_hangs_hears_of_the_end_of_its_stream,
    "cut off": who_is_cut_off_from_the_database_advances_while_the_lease_is_sure_and_no_longer,
    "poison": a_message_that_one_cannot_take_costs_only_that_one,
    "poison and death": a_death_while_a_message_is_passed_over_loses_neither_strike_nor_letter,
    "after poison": a_stream_goes_on_at_once_without_a_message_that_cannot_be_taken,
    "repeated failure": a_failure_that_is_reported_again_is_no_other_strike,
    "brake": a_trigger_that_takes_no_message_is_held,
    "letter": a_letter_is_stored_before_its_message_is_forgotten,
    "passed over again": a_message_is_passed_over_by_the_next_runner_as_well,
    "file replaced": a_supervisor_whose_file_is_replaced_confirms_nothing_more,
    "held": a_stream_waits_for_a_trigger_that_is_held_even_in_the_next_runner,
    "two supervisors": a_trigger_that_another_supervisor_claims_goes_to_the_owner_of_its_stream,
    "takeover": a_stream_is_taken_over_whole,
    "killer message": a_message_that_ends_the_process_costs_only_its_trigger,
    "killer": a_trigger_that_ends_the_process_is_quarantined,
    "old box": a_message_that_ends_the_process_is_not_struck_by_the_box_of_an_earlier_runner,
    "quarantine and death": a_death_while_a_trigger_is_quarantined_loses_nothing,
    "search": a_search_goes_on_when_a_user_removes_what_it_waits_for,
    "overflow": an_overflow_fails_everything_its_subscriber_owes,
    **OF_USERS,
}
