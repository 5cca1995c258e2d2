"""The messages between the runner and its supervisor: one frozen struct per message.

A conversation, which lasts for one incarnation of the runner::

    runner                                supervisor
    ------                                ----------
    Hello                     ------>
                              <------     Welcome
                              <------     StateSync(round=0, to_create=...)
    StateChanges(round=1)     ------>                    one transaction
                              <------     StateSync(round=1, persisted=...)
    Request(id=1)             ------>
                              <------     Response(id=1)
                              <------     Drain
    StateChanges(round=2)     ------>
                              <------     StateSync(round=2)
    (closes)

`Request` and `Response` are in `headgate.protocol.messages.queries`. Structs travel as tagged msgpack arrays: a new
field goes to the end of its struct and has a default, and a tag never changes its meaning (golden frames under
``tests/replay/captured`` hold this).
"""

from __future__ import annotations

from typing import Literal

from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.queries import Request, Response

PROTOCOL_VERSION = 3  # of both links

# The limits of the wire. Both sides hold them; the supervisor's settings reach the runner in `Welcome`.
FRAME_BYTES_MAX = 16 * 1024 * 1024  # one frame: either side must hold a whole one in memory
EVENT_BYTES_MAX = 1024 * 1024  # one encoded payload: 16 of them still fit a frame
KWARGS_BYTES_MAX = 1024 * 1024  # the encoded kwargs of one trigger, for the same reason
KEY_CHARS_MAX = 512  # an event key: 2,048 bytes of UTF-8 at most, which fits an index row everywhere
ERROR_CHARS_MAX = 16 * 1024  # an error or a traceback that is reported, kept and shown
LETTER_BYTES_MAX = 8 * 1024 * 1024  # a dead letter that is kept whole: with its error it still fits a frame
REFUSED_HEAD_BYTES_MAX = 4096  # the part that is kept for diagnosis if a dead letter is not kept whole
PASSED_OVER_KEYS_MAX = 1000  # of one trigger, the newest: so many messages that it cannot take are sent at its start
PASSED_OVER_POSITION = -1  # of the letter of a message that was passed over: events derived from it begin at 0
STREAM_NAME_CHARS_MAX = 250  # of the text that names a shared stream to people
# Of `RunnerFigures`, which are for people, so that they stay small beside what a round is for.
STREAMS_TOLD_MAX = 200
HOLDERS_TOLD_MAX = 20  # of one stream
STREAM_ERROR_CHARS_MAX = 300
LANES_TOLD_MAX = 100  # of one stream, in its figures
LANES_TOLD_IN_ALL_MAX = 2000  # of all streams: the figures have to fit a frame
CANNOT_TELL = "its broker cannot tell how far it is"  # the error of a `DescribedStream` without positions
LANES_DESCRIBED_MAX = 1000  # of one stream, in the answer to a question about it
DESCRIBED_BYTES_MAX = 512 * 1024  # of these, encoded: below the shortest frame
LANE_CHARS_MAX = 250  # of the name of a lane, and of `LaneProgress.cursor`
POSITION_PARTS_MAX = 4  # of a `Position`: the ids of Redis have two

CancelReason = Literal["user", "timeout", "reassigned", "shutdown"]
EventKind = Literal["event", "success", "failed", "skipped"]
Outcome = Literal["returned", "failed", "cancelled"]
LetterContent = Literal["event", "message", "undecoded"]
RedeliveryOutcome = Literal["handled", "rejected", "failed"]
StallReason = Literal["full queue", "absent subscriber", "unresolved events", "broker away"]
LagUnit = Literal["messages", "bytes"]
# A place in a lane of a broker, an offset for example; a later place is greater. Before all of them is ().
Position = tuple[int, ...]


# --- parts of messages ---------------------------------------------------------------------------


class RunnerSettings(WireStruct, frozen=True):
    """Settings of the runner; part of `Welcome`. All times in seconds."""

    heartbeat_s: float = 5.0  # an idle runner sends an empty round this often
    frame_bytes_max: int = FRAME_BYTES_MAX
    event_bytes_max: int = EVENT_BYTES_MAX
    round_events_max: int = 5000  # events of one round: bounds the transaction that stores them
    outbox_events_max: int = 10_000  # events waiting for a round; beyond it the triggers wait
    subscriber_queue_max: int = 1024  # raw events a subscriber of a shared stream may have waiting
    ack_timeout_s: float = 300.0  # see SharedStreamManager
    cohort_grace_s: float = 0.0  # see SharedStreamManager
    cancel_grace_s: float = 10.0  # how long a cancelled trigger may take to end
    hook_timeout_s: float = 10.0  # how long cleanup() and on_kill() may take, each
    blocked_after_s: float = 0.25  # one step of one trigger longer than this is reported
    import_paths: tuple[str, ...] = ()  # folders of users' modules, put at the end of sys.path
    advance_timeout_s: float = 60.0  # how long one `advance` of a producer may take before its stream ends


class TriggerSpec(WireStruct, frozen=True):
    """One trigger to run; part of `StateSync`.

    ``kwargs`` are encoded by `headgate.protocol.values`, in plain text: the supervisor has decrypted them, and every
    capture masks them. ``stream`` is the digest of the key of its shared stream: "" if it reads none, None if that is
    not known yet; a runner that finds another one reports it and does not run the trigger (`DescribedTrigger`).
    ``passed_over`` are the keys of messages that the trigger has failed on too often: it does not get them any more,
    and the runner reports each, whole, as a dead letter (`RefusedEvent`). If ``takes_one_event``, a task waits for the
    trigger: the runner ends it after its first event, and reports its run as ``returned``. ``credit`` is set if the
    trigger feeds the stream of a task (`Credit`); then its run may return without an event.
    """

    trigger_id: int
    trigger_run_id: str
    name: str
    classpath: str
    kwargs: bytes
    stream: str | None = None
    passed_over: tuple[str, ...] = ()
    takes_one_event: bool = False
    credit: int | None = None


class Credit(WireStruct, frozen=True):
    """How far a run of a trigger may go that feeds the stream of a task; part of `StateSync`.

    It fires no event whose ``sequence_index`` is ``events`` or more (I22). A credit is never taken back: of two, the
    greater one holds.
    """

    trigger_id: int
    trigger_run_id: str
    events: int


class AbsentSubscriber(WireStruct, frozen=True):
    """A subscriber that its shared stream has to wait for although it is not started; part of `StateSync`.

    The stream pulls nothing until the trigger is started or cancelled. ``stream`` is a digest, as in `TriggerSpec`.
    In one message the cancellations come first: one that cancels a trigger and names it as absent ends its run, and the
    stream waits for it from then on, without a message in between that the trigger misses.
    """

    trigger_id: int
    stream: str


class CancelTrigger(WireStruct, frozen=True):
    """One trigger to cancel, and why; part of `StateSync`."""

    trigger_id: int
    reason: CancelReason


class FiredEvent(WireStruct, frozen=True):
    """One event a trigger fired; part of `StateChanges`.

    ``(trigger_run_id, sequence_index)`` identifies the event: the same pair is never stored twice, even if the
    supervisor cannot know whether a commit happened. ``(trigger_id, key, position)`` identifies its origin: a
    redelivered message gives the same triple (I2). The runner's shared stream waits for the confirmation of ``seq``;
    0 if no stream does.
    """

    trigger_id: int
    trigger_run_id: str
    sequence_index: int
    seq: int
    payload: bytes
    key: str | None = None
    position: int = 0
    kind: EventKind = "event"
    is_last: bool = False


class RefusedEvent(WireStruct, frozen=True):
    """One event the runner refused, or a message that a trigger cannot take; part of `StateChanges`.

    It becomes a dead letter. ``content``: "event" if the payload is that of an event, which has no form on the wire or
    is too big; "message" if it is a raw message of a shared stream, which its trigger has failed on too often;
    "undecoded" if it is what the producer cannot decode. The letter keeps ``payload_head``, which if ``is_whole`` is
    all of the payload: then the broker may forget the message.
    """

    trigger_id: int
    trigger_run_id: str
    sequence_index: int
    seq: int
    reason: str
    payload_bytes: int
    payload_head: bytes
    key: str | None = None
    position: int = 0
    is_whole: bool = False
    content: LetterContent = "event"
    kind: EventKind = "event"
    is_last: bool = False
    traceback: str = ""


class FinishedTrigger(WireStruct, frozen=True):
    """One trigger run that ended; part of `StateChanges`, never before the last of its events.

    ``events`` is the number of events the run fired (so its last ``sequence_index`` is one less).
    ``reason`` is set if ``outcome`` is ``cancelled``. ``message_key`` names the message of a shared stream that the
    trigger was working on when it failed; None if there is none, or if the producer has no keys.
    """

    trigger_id: int
    trigger_run_id: str
    outcome: Outcome
    events: int
    error: str = ""
    traceback: str = ""
    reason: CancelReason | None = None
    message_key: str | None = None


class DescribedTrigger(WireStruct, frozen=True):
    """The shared stream of a trigger that was not run, because its supervisor expected another; part of `StateChanges`.

    ``stream`` is the digest of its key, "" if it reads none; ``stream_name`` the same for people. The supervisor starts
    the trigger anew, if the stream is its own to run.
    """

    trigger_id: int
    trigger_run_id: str
    stream: str
    stream_name: str


class Redelivery(WireStruct, frozen=True):
    """A message that a user has redriven from its dead letter; part of `StateSync`.

    The runner gives it to the trigger once more, beside the messages of its broker, if this run of it still goes on.
    ``message`` is encoded by `headgate.protocol.values`. ``key`` is that of the message: the events that derive from it
    now are recognised if they were stored before (I2).
    """

    letter_id: int
    trigger_id: int
    trigger_run_id: str
    key: str
    message: bytes


class RedeliveryEnd(WireStruct, frozen=True):
    """What a trigger made of a `Redelivery`; part of `StateChanges`.

    ``handled``: it went past the message, and every event that derives from it is stored (I1). ``rejected``: its filter
    rejected the message, or an event of it was refused. ``failed``: the message could not be given to the trigger;
    ``error`` says why. A trigger that fails while it works on the message has no end of it: `FinishedTrigger` names the
    message then.
    """

    letter_id: int
    trigger_id: int
    trigger_run_id: str
    outcome: RedeliveryOutcome
    error: str = ""


class Refusal(WireStruct, frozen=True):
    """One event that was stored as a dead letter instead of an event; part of `StateSync`.

    If ``payload_kept``, the dead letter holds the whole payload, so the event counts as handled. Otherwise only the
    broker still has the message, which must be rejected there, not acknowledged.
    """

    seq: int
    trigger_id: int
    reason: str
    payload_kept: bool


class LaneProgress(WireStruct, frozen=True):
    """How far a producer has come in one lane; part of `StreamFigures`.

    If ``begun_at`` is 0 the producer has given it up, and nothing else is said of it: others may read it now.
    ``began`` is the place that the broker had as committed when this producer began with the lane, at ``begun_at``; ()
    if it had none. ``is_ours``: whether headgate had committed that (None: the broker cannot tell), at
    ``committed_at`` or later. Times are in seconds since 1970. ``cursor`` names what the place is a place of: if it is
    another one, somebody has made it anew. The broker has confirmed everything up to ``advanced``, and was asked for
    nothing beyond ``asked``. ``dropped`` grows whenever it has dropped messages that this reader had not got, and
    ``missing`` is how many these were the last time, at most; () if it has dropped none, or cannot tell. The broker has
    counted ``began_deliveries`` when this producer began, and ``deliveries`` up to now, those of messages that come
    again as well: a count that falls only when the lane is set back (0: it does not count).
    """

    lane: str
    began: Position = ()
    begun_at: float = 0.0
    is_ours: bool | None = None
    committed_at: float | None = None
    cursor: str = ""
    advanced: Position = ()
    asked: Position = ()
    dropped: Position = ()
    missing: int = 0
    began_deliveries: int = 0
    deliveries: int = 0


class StreamFigures(WireStruct, frozen=True):
    """How one shared stream is at a moment; part of `RunnerFigures`. Times are seconds since 1970, by the runner.

    ``stream`` is a digest, as in `TriggerSpec`, ``name`` the same for people. ``in_flight``: messages that are handed
    out and not advanced; ``queued``: those that wait in the queues of subscribers, counted once for each. ``lag``: how
    much its broker has that is not advanced, in ``lag_unit``; None if that is not known. ``held``: why nothing is
    pulled, and ``held_by`` the first `HOLDERS_TOLD_MAX` triggers that cause it; while a broker is away ``last_error``
    says why. ``oldest_at``: when the oldest message that is not advanced was handed out. The counts are of messages
    since the runner started, and ``ended`` of times that the stream ended by ``last_error``, at ``last_error_at``.
    ``progress``: of at most `LANES_TOLD_MAX` lanes.
    """

    stream: str
    name: str
    in_flight: int = 0
    queued: int = 0
    lanes: int = 0
    online: int = 0
    absent: int = 0
    lag: int | None = None
    lag_unit: LagUnit = "messages"
    held: StallReason | None = None
    held_since: float | None = None
    held_by: tuple[int, ...] = ()
    oldest_at: float | None = None
    acked: int = 0
    failed: int = 0
    rejected: int = 0
    ended: int = 0
    last_error: str = ""
    last_error_at: float | None = None
    progress: tuple[LaneProgress, ...] = ()


class DescribedLane(WireStruct, frozen=True):
    """One lane of a stream as its broker and its producer have it; part of `DescribedStream`.

    The broker's: ``end`` is the place behind its newest message, ``first`` that of its oldest, ``committed`` that up to
    which this reader's messages are handled (() if none is), ``lag`` how many messages it still has for this reader;
    None: it cannot tell. ``missing``: how many it has dropped before this reader got them. ``is_shared``: others may
    read for the same group, and commit. The producer's: ``before`` is its `LaneProgress.advanced` before the broker was
    asked, ``after`` its `LaneProgress.asked` after that; both None if it does not read the lane. ``oldest_key`` and
    ``oldest_at`` are of the oldest message that is not advanced. ``deliveries`` is the broker's count of them, and
    ``before_deliveries`` `LaneProgress.deliveries` before it was asked; 0: it does not count.
    """

    lane: str
    end: Position | None = None
    first: Position | None = None
    committed: Position | None = None
    lag: int | None = None
    missing: int = 0
    is_shared: bool = False
    before: Position | None = None
    after: Position | None = None
    oldest_key: str | None = None
    oldest_at: float | None = None
    deliveries: int = 0
    before_deliveries: int = 0


class DescribedStream(WireStruct, frozen=True):
    """The answer to a question about a stream; part of `StateChanges`. ``stream`` is a digest.

    ``lanes`` are at most `LANES_DESCRIBED_MAX` of ``lanes_in_all``. If the broker could not be asked, ``error`` says
    why (`CANNOT_TELL`: it has no positions); ``is_missing``: because it does not have what is read. ``progress`` is
    that of the producer, after the broker was asked.
    """

    stream: str
    lanes: tuple[DescribedLane, ...] = ()
    lanes_in_all: int = 0
    error: str = ""
    is_missing: bool = False
    progress: tuple[LaneProgress, ...] = ()


class RunnerFigures(WireStruct, frozen=True):
    """How the runner's shared streams are at a moment; part of `StateChanges`, for people, and nothing depends on it.

    ``streams`` are at most `STREAMS_TOLD_MAX`, those first that are held or have most in flight; ``streams_in_all`` is
    the number of all.
    """

    streams: tuple[StreamFigures, ...] = ()
    streams_in_all: int = 0


# --- runner to supervisor ------------------------------------------------------------------------


class Hello(WireStruct, frozen=True, tag="hello"):
    """Runner to supervisor: the first message. Answered by `Welcome`."""

    protocol_version: int
    incarnation: int
    pid: int
    headgate_version: str


class StateChanges(WireStruct, frozen=True, tag="changes"):
    """Runner to supervisor: one round of events and ends of triggers. Answered by the `StateSync` of the same round.

    A round too long for one frame is sent in several messages, all but the last with ``more``. An empty round is the
    runner's heartbeat. ``stuck`` are triggers that were cancelled and did not end. ``figures`` are told with a round
    that is sent anyway, once a second at most, and only if they differ from those told before; the last message of the
    round has them, unless they do not fit.
    """

    round: int
    events: tuple[FiredEvent, ...] = ()
    refused: tuple[RefusedEvent, ...] = ()
    finished: tuple[FinishedTrigger, ...] = ()
    stuck: tuple[int, ...] = ()
    more: bool = False
    described: tuple[DescribedTrigger, ...] = ()
    redriven: tuple[RedeliveryEnd, ...] = ()
    figures: RunnerFigures | None = None
    streams: tuple[DescribedStream, ...] = ()


# --- supervisor to runner ------------------------------------------------------------------------


class Welcome(WireStruct, frozen=True, tag="welcome"):
    """Supervisor to runner: the answer to `Hello`. Answered by the first `StateChanges`."""

    protocol_version: int
    incarnation: int
    settings: RunnerSettings


class StateSync(WireStruct, frozen=True, tag="sync"):
    """Supervisor to runner: stored events, triggers to start and to cancel. Not answered.

    ``round`` is the round it answers, 0 if it answers none. ``persisted`` are seqs whose events are durable: the runner
    may advance the broker only for these (I1). If ``more``, the message is too long for one frame and continues in the
    next `StateSync`, which has the same ``round``; the round is answered, and shared streams start, when it is
    complete. In an answer, ``lease_s`` is the time after the round was sent during which brokers may be advanced (I10);
    None means no limit. If ``lease_lost``, the supervisor has lost its lease, so no broker may be advanced any more,
    whatever this or an earlier message confirmed. ``describe`` are the digests of shared streams whose brokers are to
    be asked how far they are: each is answered by a `DescribedStream`.
    """

    round: int = 0
    persisted: tuple[int, ...] = ()
    refused: tuple[Refusal, ...] = ()
    to_create: tuple[TriggerSpec, ...] = ()
    to_cancel: tuple[CancelTrigger, ...] = ()
    more: bool = False
    lease_s: float | None = None
    lease_lost: bool = False
    absent: tuple[AbsentSubscriber, ...] = ()
    redeliveries: tuple[Redelivery, ...] = ()
    credits: tuple[Credit, ...] = ()
    describe: tuple[str, ...] = ()


class Drain(WireStruct, frozen=True, tag="drain"):
    """Supervisor to runner: stop pulling, send the last events, advance the resolved ones, then close.

    Answered by the runner closing the link, at the latest after ``deadline_s`` seconds.
    """

    deadline_s: float


FromRunner = Hello | StateChanges | Request
FromSupervisor = Welcome | StateSync | Response | Drain
