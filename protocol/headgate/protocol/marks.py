"""Marks: the points of the production code at which crash tests may kill a process (failpoints).

``marks.reach("store.committed")`` does nothing, at the cost of one global read, unless a test has armed the marks of
this process with a callback. The callback runs at the mark, in any thread: it may kill the process, stop it, or block
it while the test changes its environment. Nothing here reads the environment or does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple

Side = Literal["runner", "supervisor", "worker", "command", "consumer"]

# When a mark is reached: in every round of events or step of a task, when a runner is replaced, or when a supervisor
# starts.
When = Literal["flow", "respawn", "start"]


class Mark(NamedTuple):
    """One mark: the process that reaches it, when it does, and the state of affairs at that point."""

    side: Side
    when: When
    meaning: str


MARKS: Final[dict[str, Mark]] = {
    # --- the path of an event out of the runner
    "filelog.handed_out": Mark("runner", "flow", "a line is about to be given to the stream"),
    "host.event_bound": Mark("runner", "flow", "an event is bound to its message, and not yet in the outbox"),
    "host.event_queued": Mark("runner", "flow", "the event is in the outbox"),
    "runner.frame_encoded": Mark("runner", "flow", "a frame is encoded, and nothing of it is sent"),
    "runner.frame_half_sent": Mark("runner", "flow", "half of the bytes of a frame are sent"),
    "runner.frame_sent": Mark("runner", "flow", "the whole frame is with the kernel"),
    # --- through the supervisor
    "intake.round_read": Mark("supervisor", "flow", "a round has been read, and not handled"),
    "capture.half_written": Mark("supervisor", "flow", "half of a record of the frame log is written"),
    "store.begun": Mark("supervisor", "flow", "the transaction is begun, and the epoch is held"),
    "store.rows_inserted": Mark("supervisor", "flow", "the rows of the events are in the open transaction"),
    "store.before_commit": Mark("supervisor", "flow", "everything is written but the commit"),
    "store.committed": Mark("supervisor", "flow", "the commit is durable, and no answer exists"),
    "supervisor.frame_encoded": Mark("supervisor", "flow", "a frame for a child is encoded, and nothing of it is sent"),
    "supervisor.frame_half_sent": Mark("supervisor", "flow", "half of the bytes of a frame for a child are sent"),
    "supervisor.frame_sent": Mark("supervisor", "flow", "the whole message is with the kernel, if the socket took it"),
    # --- back in the runner, and on to the broker
    "session.answer_read": Mark("runner", "flow", "an answer has been read, and nothing is confirmed"),
    "session.confirmed": Mark("runner", "flow", "the stream knows what is stored, the link not that it is answered"),
    "group.before_advance": Mark("runner", "flow", "a batch is resolved, and advance has not been called"),
    "filelog.draft_written": Mark("runner", "flow", "the new offsets are written beside the old ones"),
    "filelog.renamed": Mark("runner", "flow", "the new offsets are in place; the commit has not returned"),
    "group.after_advance": Mark("runner", "flow", "advance has returned"),
    # --- births and deaths
    "arbiter.reaped": Mark("supervisor", "respawn", "a dead runner is reaped, and the core does not know"),
    "arbiter.before_spawn": Mark("supervisor", "respawn", "a runner is about to be started; there is none"),
    "arbiter.spawned": Mark("supervisor", "respawn", "a runner is started, and its descriptors are not yet watched"),
    "session.greeted": Mark("runner", "respawn", "the handshake is done, and no trigger is known"),
    "session.started": Mark("runner", "respawn", "the triggers are started, and the streams are still held"),
    "leases.registered": Mark("supervisor", "start", "the epoch is in the database, and nothing is claimed"),
    "leases.claim_written": Mark("supervisor", "start", "the claim is in the database, and not acted on"),
}

# The matrix of crash tests for triggers covers all marks above; these are the marks of tasks.
TASK_MARKS: Final[dict[str, Mark]] = {
    # --- to a worker, and back
    "tasks.dispatched": Mark("supervisor", "flow", "the task is running in the database, and no worker has it"),
    "executor.step_submitted": Mark("supervisor", "flow", "a step is on its way to a worker"),
    "worker.step_received": Mark("worker", "flow", "a step has been read, and not begun"),
    "worker.step_done": Mark("worker", "flow", "the author's code has ended, and its outcome is not sent"),
    "worker.outcome_half_sent": Mark("worker", "flow", "half of the bytes of the outcome are sent"),
    "worker.outcome_sent": Mark("worker", "flow", "the whole outcome is with the kernel"),
    "executor.outcome_read": Mark("supervisor", "flow", "the outcome has been read, and not handled"),
    "tasks.before_outcome": Mark("supervisor", "flow", "a group of outcomes is about to be stored"),
    "outcomes.grouped": Mark("supervisor", "flow", "a group of outcomes is in the open transaction"),
    "tasks.outcome_stored": Mark("supervisor", "flow", "a group of outcomes is durable, and not acted on"),
    # --- into a deferral, and out of it
    "host.fulfilled": Mark("runner", "flow", "the event of a deferral is in the outbox, and its trigger not closed"),
    "defer.written": Mark("supervisor", "flow", "trigger and task are written, and not committed"),
    "defer.committed": Mark("supervisor", "flow", "the deferral is durable, and its trigger not claimed"),
    "resume.by_event": Mark("supervisor", "flow", "an event has resumed its task in the open transaction"),
    "resume.by_end": Mark("supervisor", "flow", "an event has ended its task in the open transaction"),
    "resume.to_fail": Mark("supervisor", "flow", "a task is resumed to fail in the open transaction"),
    "resume.committed": Mark("supervisor", "flow", "the effects of a slice on tasks are durable, and no answer exists"),
    "plan.in_trigger": Mark("supervisor", "flow", "a task has begun in its trigger, in the open transaction"),
}

# The marks of short steps, which are given to a worker while it runs another one.
BUNDLE_MARKS: Final[dict[str, Mark]] = {
    "bundle.submitted": Mark("supervisor", "flow", "a further step is on its way to a worker that runs another one"),
    "worker.bundle_step_done": Mark("worker", "flow", "an outcome is with the kernel, and the next step not begun"),
}

# The marks of tasks that take many events of one trigger.
TASK_STREAM_MARKS: Final[dict[str, Mark]] = {
    "stream.resumed": Mark("supervisor", "flow", "a task goes on with its stream in the open transaction"),
    "stream.handled_written": Mark("supervisor", "flow", "the place of a stream is moved in the open transaction"),
    "stream.handled_committed": Mark("supervisor", "flow", "handled events are durable, and nothing is acted on"),
    "stream.end_written": Mark("supervisor", "flow", "the end of a stream's trigger is in the open transaction"),
    "stream.reopened": Mark("supervisor", "flow", "the trigger of a stream is open again in the open transaction"),
    "credit.given": Mark("supervisor", "flow", "the credit of a run is known, and its runner does not have it"),
    "host.no_credit": Mark("runner", "flow", "a trigger that feeds a stream stands: it has no credit left"),
}

# The marks of mapped tasks: of each look at a run in which instances of one, or of a group, are to begin; of elements.
MAP_MARKS: Final[dict[str, Mark]] = {
    "maps.expanded": Mark("supervisor", "flow", "instances are made in the open transaction, and none is scheduled"),
    "groups.advanced": Mark("supervisor", "flow", "instances of a group are made, or begin, in the open transaction"),
    "elements.written": Mark("supervisor", "flow", "what a step has emitted is in the open transaction"),
    "elements.committed": Mark("supervisor", "flow", "what a step emits before its end is durable, and not answered"),
    "elements.appended": Mark("supervisor", "flow", "what a step appends is in the open transaction"),
    "elements.absorbed": Mark("supervisor", "flow", "events are elements, without a step, in the open transaction"),
    "maps.committed": Mark("supervisor", "flow", "the look that made instances is durable, and nothing is acted on"),
}

# The marks of signals: of each transaction that sends some.
SIGNAL_MARKS: Final[dict[str, Mark]] = {
    "signals.sent_written": Mark("supervisor", "flow", "signals are in the open transaction, with their versions"),
    "signals.sent_committed": Mark("supervisor", "flow", "signals are durable, and the sender has not heard of it"),
    "signals.considered": Mark("supervisor", "flow", "sensors have ended and rules were met, in the open transaction"),
    "signals.action_written": Mark(
        "supervisor", "flow", "rules about signals have acted on a task, in the open transaction"
    ),
    "signals.ticked": Mark("supervisor", "flow", "the time has met rules of tasks, in the open transaction"),
    "runs.of_events_written": Mark(
        "supervisor", "flow", "a run has taken the events or signals that it is for, in the open transaction"
    ),
    "signals.run_ending": Mark("supervisor", "flow", "a signal has a run end, in the open transaction"),
    "signals.decision_given": Mark("supervisor", "flow", "a worker is asked what signals do, and has not answered"),
    "worker.signal_decided": Mark("worker", "flow", "users' code has decided what a signal does, and nobody knows"),
    "signals.decided_written": Mark("supervisor", "flow", "what signals do is decided, in the open transaction"),
    "signals.decided_stored": Mark("supervisor", "flow", "what signals do is durable, and nothing has acted"),
}

# The mark of endless tasks: of each one that has lost its worker.
ENDLESS_MARKS: Final[dict[str, Mark]] = {
    "endless.moved": Mark("supervisor", "flow", "an endless task waits for another worker, in the open transaction"),
}

# The mark of every commit that others wait for, in whatever process makes it.
BELL_MARKS: Final[dict[str, Mark]] = {
    "bells.unrung": Mark("supervisor", "flow", "a commit that others wait for is durable, and no bell is rung"),
}

# The marks of messages that a trigger cannot take: reached only while one is passed over.
POISON_MARKS: Final[dict[str, Mark]] = {
    "strikes.passed_over": Mark("supervisor", "flow", "the last strike of a message is in the open transaction"),
    "letters.passed_over": Mark("supervisor", "flow", "the letter of a message is in the open transaction"),
}

# The marks of messages that a user has redriven.
REDELIVERY_MARKS: Final[dict[str, Mark]] = {
    "redelivery.read": Mark("supervisor", "flow", "a redriven message has been read, and the runner does not have it"),
    "redelivery.given": Mark("runner", "flow", "a redriven message waits for its trigger to pull it"),
    "redelivery.settled": Mark("runner", "flow", "the end of a redriven message is in the outbox"),
    "redelivery.stored": Mark("supervisor", "flow", "the end of a redriven message is in the open transaction"),
}

# The marks of triggers that end their runner: reached only when one is quarantined.
RUNAWAY_MARKS: Final[dict[str, Mark]] = {
    "holds.written": Mark("supervisor", "flow", "the quarantine of a trigger is in the open transaction"),
    "holds.stored": Mark("supervisor", "flow", "the quarantine is durable, and the supervisor goes on"),
}

# The marks of a redrive, in the process of a user's command.
LETTER_MARKS: Final[dict[str, Mark]] = {
    "redrive.trigger_found": Mark(
        "command", "flow", "the trigger for a letter's event is known, and nothing is locked"
    ),
    "redrive.event_stored": Mark("command", "flow", "the event is in the open transaction, and its letter unresolved"),
    "redrive.written": Mark("command", "flow", "the event, the letter and the record of the act await the commit"),
    "redrive.committed": Mark("command", "flow", "the redrive is durable, and the command has not said so"),
}

# The marks of a batch that a consumer hands over, in the process of a user's program.
CONSUMER_MARKS: Final[dict[str, Mark]] = {
    "consumer.batch_recorded": Mark(
        "consumer", "flow", "that a batch is taken is durable, and its transaction not begun"
    ),
    "consumer.batch_read": Mark("consumer", "flow", "a batch is read, and the user's code has nothing of it"),
    "consumer.block_done": Mark("consumer", "flow", "the user's rows are in the open transaction, not the place"),
    "consumer.place_moved": Mark("consumer", "flow", "the user's rows and the new place await the commit"),
    "consumer.committed": Mark("consumer", "flow", "rows and place are durable, and the program has not heard of it"),
    "consumer.rolled_back": Mark("consumer", "flow", "the user's code has failed, and nothing has counted that"),
    "consumer.failure_counted": Mark("consumer", "flow", "the failure of a batch is in the open transaction"),
}

Callback = Callable[[str], object]

_callback: Callback | None = None


def reach(name: str) -> None:
    """Report that a mark is reached."""
    if _callback is not None:
        _callback(name)


def in_halves(name: str, data: bytes) -> Iterable[bytes]:
    """Return the parts to write for ``data``: one, or, while armed, two halves with the mark between them."""
    return (data,) if _callback is None else _halves(name, data)


def _halves(name: str, data: bytes) -> Iterator[bytes]:
    middle = len(data) // 2
    yield data[:middle]
    reach(name)
    yield data[middle:]


def arm(callback: Callback) -> None:
    """Call ``callback`` with the name of every mark that this process reaches from now on."""
    global _callback
    _callback = callback


def disarm() -> None:
    """Undo `arm`."""
    global _callback
    _callback = None
