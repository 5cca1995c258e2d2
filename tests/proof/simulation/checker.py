"""Judges a history. It knows nothing of the code under test: only what a broker, users and a database may expect.

It reads the history once, in order, and keeps its own books of every message, every handout and every row. What it
looks for, by name:

- ``lost``: the broker has forgotten a message that a subscriber should have, and the subscriber has not
- ``stored twice``: one event of one message in two rows (I2)
- ``advanced before stored``, ``confirmed before stored``: acknowledged, or called durable, while it is not (I1)
- ``confirmed to a stranger``: a confirmation of what this runner never reported (I6)
- ``difference forgotten``: a message that gave another event than before, which is in no row and no dead letter (I2)
- ``passed over too early``: a trigger does not get a message that it has not failed on often enough
- ``passed over without a trace``: the same, and the message is neither a whole dead letter nor rejected
- ``ends its runner again and again``: more often than a message may, or a trigger without one
- ``started though it is held``: after its hold was stored, and before a user released it
- ``broadcast without a trigger``: a filter gets a message in a runner in which another of the triggers has not begun
- ``bound to another message``: the row of an event names another message than the one it was derived from
- ``out of lane order``: advances of a lane are not what was handed out, in order, without a gap (I3)
- ``commit past a failed message``: forgotten though it failed, or before it was resolved (I3)
- ``two advances at once`` (I4), ``advanced after close``, ``closed twice``
- ``written without a lease``: a commit under an epoch that is fenced or has signed off (I10)
- ``advanced without a lease``: the same, of what the runner of such a supervisor has its broker forget
- ``split stream``: triggers of one stream belong to two supervisors that may write (I19)
- ``taken in part``: a stream has another owner, but not all of its triggers do (I19)
- ``failed without a cause``: a trigger failed of something no plan and no fault explains (I5, I9)
- ``timed out late``: a filter that hung was left alone beyond the ack timeout
- of dead letters, of redriven messages and of consumers, those of `tests.proof.simulation.users.letter_books`,
  ``message_books`` and ``consumer_books``
- ``broke``: an exception escaped from one of the halves
- ``stuck``: not everything is committed when time is up, or when everybody left, though somebody never wished to
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tests.proof.simulation import records
from tests.proof.simulation.records import Record
from tests.proof.simulation.scenario import (
    HARM_MAX,
    KILLER_KEYS_MAX,
    KILLS_MAX,
    MAX_DELIVERIES,
    Plan,
    Scenario,
)
from tests.proof.simulation.users.consumer_books import ConsumerBooks
from tests.proof.simulation.users.letter_books import LetterBooks
from tests.proof.simulation.users.message_books import MessageBooks

MESSAGE_OF_NOBODY = "?"
NO_READER = 0  # of a message that comes out of a dead letter
PASSED_OVER_POSITION = -1  # of the letter of a message that a trigger did not get
# Adding floating-point times may cost one more look, a millisecond later; in whole binary times it costs nothing.
LATE_TOLERANCE_S = 0.0015
PULL_LOOK_S = 1.0  # between two looks whether a filter whose stream has ended has pulled again
LATE_S_MAX = 0.1  # what comes later than this came for another reason than its ack timeout

# What a run may fail of, by the beginning of its error.
_CAUSES = ("PlannedFailure:", "AckTimeout:", "SubscriberOverflow:", "PollTerminated:")


class Finding(NamedTuple):
    """A violated promise."""

    kind: str
    what: str
    at: float

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} (at {self.at:.3f} s)"


class HistoryChecker(ABC):
    """Takes a history of one scenario, record by record: the structure of the checkers of both families."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._at = 0.0
        self._fenced: set[int] = set()

    def check(self, history: Iterable[Record]) -> list[Finding]:
        """Return everything that is wrong, in the order of the records."""
        for record in history:
            self._at = record.at
            self._take(record)
        return self.findings

    def _find(self, kind: str, what: str) -> None:
        self.findings.append(Finding(kind, what, self._at))

    @abstractmethod
    def _take(self, record: Record) -> None:
        """Judge the next record: here, what concerns any supervisor."""
        match record:
            case records.Fenced():
                self._fenced.add(record.epoch)
            case records.Wrote() if record.epoch in self._fenced:
                self._find("written without a lease", f"{record.verb} of epoch {record.epoch}")
            case records.Broke():
                self._find("broke", f"{record.where}: {record.error}")
            case _:
                pass


class _Handout:
    """One delivery of one message."""

    __slots__ = (
        "at",
        "fired",
        "lane",
        "message",
        "number",
        "offset",
        "pulled_at",
        "reader",
        "refused_by",
        "should_have",
    )

    def __init__(self, record: records.HandedOut, should_have: frozenset[str]) -> None:
        self.at = record.at
        self.pulled_at = record.at
        self.reader = record.reader
        self.number = record.handout
        self.lane = record.lane
        self.offset = record.offset
        self.message = f"{record.lane}:{record.offset}"
        self.should_have = should_have  # the subscribers that are expected to take it
        self.fired: list[tuple[str, int]] = []  # trigger, position
        self.refused_by: set[str] = set()


class _Reader:
    """One poll of the broker."""

    def __init__(self) -> None:
        self.due: defaultdict[int, list[int]] = defaultdict(list)  # handouts by lane
        self.advanced: Counter[int] = Counter()  # an index into the list above, by lane
        self.outcomes: dict[tuple[int, int], bool] = {}  # of the last handout of a message: may it be forgotten
        self.is_advancing = False
        self.is_closed = False
        self.closed_at: float | None = None


class Checker(HistoryChecker):
    """Judges a history of the pair."""

    def __init__(self, scenario: Scenario, *, late_tolerance_s: float = LATE_TOLERANCE_S) -> None:
        super().__init__()
        self._scenario = scenario
        self._late_tolerance_s = late_tolerance_s
        # Who is there: from the first time its runner reads the broker until a user removes it or it returns.
        self._subscribed: dict[str, None] = {}
        self._joined: defaultdict[int, dict[str, None]] = defaultdict(dict)  # by runner
        self._joined_at = 0.0
        self._runner_of: dict[int, int] = {}  # by reader
        self._added: dict[str, None] = {}
        self._gone: set[str] = set()
        self._returned: set[str] = set()
        self._handouts: dict[int, _Handout] = {}
        self._readers: defaultdict[int, _Reader] = defaultdict(_Reader)
        self._clean_handouts: dict[tuple[int, int], _Handout] = {}  # by message, the one that may be committed
        self._forgotten: Counter[int] = Counter()  # by lane, an offset
        self._rows: dict[tuple[str, str, int], int] = {}  # the handout, by trigger, message, position
        self._handout_rows: Counter[tuple[str, int]] = Counter()  # by trigger and handout
        self._letters: set[tuple[str, str, int]] = set()
        self._events: set[tuple[str, int]] = set()  # run id and index, of rows and letters
        self._letter_books = LetterBooks(self._find)
        self._message_books = MessageBooks(self._find, self._plan_by_name, lambda place: place in self._rows)
        consumers = {f"c{number}": plan for number, plan in enumerate(scenario.consumers, start=1)}
        self._consumer_books = ConsumerBooks(self._find, consumers)
        self._reported: dict[tuple[int, int], records.Reported] = {}  # by runner and seq
        self._supervisor_of: dict[int, int] = {}  # of runners
        self._out_of_office: set[int] = set()  # supervisors that were fenced
        self._failures: Counter[tuple[str, str | None]] = Counter()  # by trigger and message
        self._headless: set[tuple[str, str | None]] = set()  # passed over, and no whole letter: trigger, message
        self._owners: dict[str, dict[str, int]] = {}  # epochs by stream and trigger
        self._kills: Counter[tuple[str, str | None]] = Counter()  # by trigger and message
        self._held: set[str] = set()
        self._begun: dict[str, None] = {}  # in any runner
        self._gone_supervisors: set[int] = set()  # the system ends their runners with them

    def _take(self, record: Record) -> None:
        match record:
            case records.Opened():
                self._runner_of[record.reader] = record.runner
            case records.Stored() | records.DeadLettered():
                self._see_row(record)
            case records.Logged() | records.Taken() | records.Caught():
                self._consumer_books.take(record)
            case records.NotTaken() | records.SetAside() | records.AskedFor():
                self._consumer_books.take(record)
            case records.LetterSeen() | records.Tended() | records.Mended():
                self._letter_books.take(record, self._added.keys() - self._gone)
            case records.MessageSeen() | records.MessageRedriven():
                self._message_books.take(record, self._added.keys() - self._gone - self._returned)
            case records.Redelivered():
                handed_out = records.HandedOut(record.at, NO_READER, record.handout, record.lane, record.offset)
                self._handouts[record.handout] = _Handout(handed_out, frozenset())
            case records.HandedOut() | records.Pulled() | records.Fired() | records.Refused() | records.Hung():
                self._see_delivery(record)
            case records.AdvanceBegan() | records.AdvanceEnded() | records.Closed() | records.Committed():
                self._see_broker(record)
            case records.Reported() | records.Confirmed():
                self._see_wire(record)
            case records.Began():
                if record.trigger in self._held:
                    self._find("started though it is held", record.trigger)
                self._joined[record.runner].setdefault(record.trigger)
                self._begun.setdefault(record.trigger)
                self._joined_at = record.at
                self._returned.discard(record.trigger)  # its end was not stored, so it runs again
            case records.Removed():
                self._gone.add(record.trigger)
            case records.Returned():
                self._returned.add(record.trigger)
            case records.Finished():
                self._see_end(record)
            case records.Killed():
                self._see_killed(record)
            case records.Held():
                self._held.add(record.trigger)
            case records.Released():
                self._held.discard(record.trigger)
                self._forget_harm(record.trigger)
            case records.Added():
                self._added.setdefault(record.trigger)
                if record.trigger in self._gone:
                    self._see_again(record.trigger)
            case records.Rested():
                self._see_rest(record)
            case records.Owned():
                self._see_owners(record)
            case records.SupervisorEnded():
                self._gone_supervisors.add(record.supervisor)
                for trigger in self._begun:
                    self._forget_harm(trigger)  # it was in the memory of the supervisor
            case records.RunnerStarted():
                self._supervisor_of[record.runner] = record.supervisor
            case _:
                super()._take(record)
                if isinstance(record, records.Fenced):
                    self._out_of_office.add(record.supervisor)

    def _see_again(self, trigger: str) -> None:
        """A user has added a trigger anew that has a name of before: it has begun nowhere yet."""
        self._gone.discard(trigger)
        for those_there in (self._subscribed, self._begun, *self._joined.values()):
            those_there.pop(trigger, None)

    # --- deliveries -------------------------------------------------------------------------------

    def _see_delivery(
        self, record: records.HandedOut | records.Pulled | records.Fired | records.Refused | records.Hung
    ) -> None:
        if isinstance(record, records.HandedOut):
            self._subscribed |= self._joined[self._runner_of[record.reader]]
            present = frozenset(self._subscribed.keys() - self._gone - self._returned)
            self._handouts[record.handout] = _Handout(record, present)
            self._readers[record.reader].due[record.lane].append(record.handout)
            return
        handout = self._handouts[record.handout]
        match record:
            case records.Pulled():
                handout.pulled_at = record.at
                if handout.reader == NO_READER:
                    return  # it was given to this trigger alone
                for trigger in self._begun.keys() - self._joined[record.runner].keys() - self._gone - self._returned:
                    self._find("broadcast without a trigger", f"{record.trigger} gets {handout.message}, not {trigger}")
            case records.Fired():
                handout.fired.append((record.trigger, record.position))
            case records.Refused():
                handout.refused_by.add(record.trigger)
                self._message_books.cause(record.trigger, handout.message)
            case records.Hung():
                self._see_hung(record, handout)

    def _see_hung(self, record: records.Hung, handout: _Handout) -> None:
        # The poll may have waited with the broadcast for somebody to come back.
        begun_at = max(handout.at, self._joined_at)
        latest_s = LATE_S_MAX
        closed_at = self._readers[handout.reader].closed_at
        if closed_at is not None and closed_at < begun_at + self._scenario.topology.ack_timeout_s:
            # The stream has ended: what is left is that the filter comes to the end, pull by pull.
            begun_at = max(closed_at, handout.pulled_at) + PULL_LOOK_S
            latest_s = math.inf
        late_s = record.at - begun_at - self._scenario.topology.ack_timeout_s
        if self._late_tolerance_s < late_s < latest_s:
            self._find("timed out late", f"{record.trigger} with handout {record.handout}, by {late_s:.6f} s")

    def _see_passed_over(self, record: records.DeadLettered) -> None:
        what = f"{record.key} by {record.trigger}"
        failures, kills = self._failures[record.trigger, record.key], self._kills[record.trigger, record.key]
        if kills < KILLS_MAX and failures + kills < MAX_DELIVERIES:
            self._find("passed over too early", f"{what}, after {failures} failures and {kills} ends of the process")
        if not record.is_whole:
            self._headless.add((record.trigger, record.key))

    def _see_end(self, record: records.Finished) -> None:
        if record.outcome == "failed":
            self._failures[record.trigger, record.message_key] += 1
            self._message_books.cause(record.trigger, record.message_key)
        if record.outcome == "failed" and not record.error.startswith(_CAUSES):
            self._find("failed without a cause", f"{record.trigger}: {record.error}")

    def _see_killed(self, record: records.Killed) -> None:
        message = record.message if self._scenario.topology.keyed else None
        self._kills[record.trigger, message] += 1
        self._message_books.cause(record.trigger, message)
        kills, ends = self._kills[record.trigger, message], len(self._gone_supervisors | self._out_of_office)
        if message is None:
            is_too_often = kills > HARM_MAX
        else:
            messages = sum(name == record.trigger and of is not None for name, of in self._kills)
            # A supervisor that ends or is fenced may take a strike with it that is not stored.
            redrives = self._message_books.redrives[record.trigger, message]
            is_too_often = kills > KILLS_MAX + ends + redrives or messages > (KILLER_KEYS_MAX + 1) * (1 + ends)
        if is_too_often:
            self._find("ends its runner again and again", f"{record.trigger} with {message}, {kills} times")

    def _forget_harm(self, trigger: str) -> None:
        self._kills.pop((trigger, None), None)

    def _plan_by_name(self, trigger: str, message: str) -> Plan:
        lane, offset = map(int, message.split(":"))
        return self._scenario.lanes[lane][offset].plans.get(trigger, Plan())

    def _plan(self, trigger: str, handout: _Handout) -> Plan:
        return self._scenario.lanes[handout.lane][handout.offset].plans.get(trigger, Plan())

    # --- the broker -------------------------------------------------------------------------------

    def _see_broker(
        self, record: records.AdvanceBegan | records.AdvanceEnded | records.Closed | records.Committed
    ) -> None:
        reader = self._readers[record.reader]
        match record:
            case records.AdvanceBegan():
                supervisor = self._supervisor_of.get(self._runner_of[record.reader])
                if supervisor in self._out_of_office - self._gone_supervisors:
                    self._find("advanced without a lease", f"reader {record.reader}")
                if reader.is_advancing:
                    self._find("two advances at once", f"reader {record.reader}")
                if reader.is_closed:
                    self._find("advanced after close", f"reader {record.reader}")
                reader.is_advancing = True
                for item in record.items:
                    self._see_item(reader, record.reader, item)
            case records.AdvanceEnded():
                reader.is_advancing = False
            case records.Closed():
                if reader.is_closed:
                    self._find("closed twice", f"reader {record.reader}")
                if reader.is_advancing:
                    self._find("advanced after close", f"reader {record.reader}, by a call still under way")
                reader.is_closed = True
                reader.closed_at = record.at
            case records.Committed():
                for offset in range(self._forgotten[record.lane], record.before):
                    self._forget(record.reader, record.lane, offset)
                self._forgotten[record.lane] = record.before

    def _see_item(self, reader: _Reader, number: int, item: records.AdvancedItem) -> None:
        handout = self._handouts[item.handout]
        due, index = reader.due[handout.lane], reader.advanced[handout.lane]
        reader.advanced[handout.lane] += 1
        if index >= len(due) or due[index] != item.handout:
            expected = due[index] if index < len(due) else "nothing"
            self._find("out of lane order", f"reader {number} advanced handout {item.handout}, but {expected} was due")
        may_go = not item.failed and item.acked + item.rejected > 0
        # A message handed out again before the outcome of its last handout came: only the last one counts.
        last = max(h for h in due if self._handouts[h].offset == handout.offset)
        if last == item.handout:
            reader.outcomes[handout.lane, handout.offset] = may_go
        if not may_go:
            return
        self._clean_handouts[handout.lane, handout.offset] = handout
        for trigger, position in handout.fired:
            if trigger not in handout.refused_by and not self._has(trigger, handout, position):
                what = f"{handout.message} position {position} for {trigger} (handout {item.handout})"
                self._find("advanced before stored", what)
        for trigger in handout.should_have:
            if (trigger, handout.message) in self._headless and not item.rejected:
                self._find("passed over without a trace", f"{handout.message} by {trigger} (handout {item.handout})")
        for trigger in handout.refused_by:
            if not item.rejected:
                self._find("reject without effect", f"{handout.message} for {trigger} (handout {item.handout})")

    def _forget(self, number: int, lane: int, offset: int) -> None:
        reader = self._readers[number]
        handout = self._clean_handouts.get((lane, offset))
        if handout is None or not reader.outcomes.get((lane, offset), False):
            self._find("commit past a failed message", f"{lane}:{offset} by reader {number}")
            return
        for trigger in sorted(handout.should_have - self._gone - self._returned):
            plan = self._plan(trigger, handout)
            if plan.kind == "reject" or self._is_passed_over(trigger, handout):
                continue
            for position in range(plan.events):
                if not self._has(trigger, handout, position):
                    self._find("lost", f"{handout.message} position {position} for {trigger}")

    def _is_passed_over(self, trigger: str, handout: _Handout) -> bool:
        return (trigger, handout.message, PASSED_OVER_POSITION) in self._letters

    def _has(self, trigger: str, handout: _Handout, position: int) -> bool:
        """Whether the database holds an event of this handout, or of another of the same message."""
        if self._scenario.topology.keyed:
            return self._is_kept((trigger, handout.message, position))
        if self._plan(trigger, handout).kind in ("refused", "poison", "long"):
            # Without keys nobody can say which message's letter it is; that there is one has to do.
            if any(name == trigger for name, _, _ in self._letters):
                return True
        return self._handout_rows[trigger, handout.number] > position

    def _is_kept(self, place: tuple[str, str, int]) -> bool:
        return place in self._rows or place in self._letters

    def _see_rest(self, record: records.Rested) -> None:
        """Nothing may be left over, unless for want of anybody who wants it: whom the database forgot still does."""
        there = [name for name in self._added if name not in self._gone | self._returned]
        self._message_books.at_rest(set(there) - self._held)
        left_over = any(self._forgotten[lane] < len(messages) for lane, messages in enumerate(self._scenario.lanes))
        if not record.in_time or (there and left_over):
            self._find("stuck", f"committed by lane: {dict(self._forgotten)}, while {there} want more")

    def _see_owners(self, record: records.Owned) -> None:
        """A trigger that comes to its stream may be without an owner for a while; it has not begun there yet."""
        before = self._owners.get(record.stream, {})
        self._owners[record.stream] = record.owners
        epochs = set(record.owners.values()) - {0}
        if len(epochs) > 1:
            self._find("split stream", f"{record.stream}: {record.owners}")
        elif epochs and epochs != set(before.values()) - {0}:
            left = [name for name in before if record.owners.get(name) == 0]
            if left:
                self._find("taken in part", f"{record.stream}: {record.owners}, without {left}")

    # --- the wire and the database ------------------------------------------------------------------

    def _see_wire(self, record: records.Reported | records.Confirmed) -> None:
        if isinstance(record, records.Reported):
            if record.seq:
                self._reported[record.runner, record.seq] = record
            return
        for seq in filter(None, (*record.seqs, *record.refused)):
            event = self._reported.get((record.runner, seq))
            if event is None:
                self._find("confirmed to a stranger", f"seq {seq} to runner {record.runner}")
            elif (event.run_id, event.index) not in self._events and not (
                event.key is not None and self._is_kept((event.trigger, event.key, event.position))
            ):
                self._find("confirmed before stored", f"event {event.index} of run {event.run_id}")
            elif seq in record.seqs:
                self._see_difference(event)

    def _see_difference(self, event: records.Reported) -> None:
        """The payloads of two deliveries of one message differ: they name the handout."""
        place = (event.trigger, event.key or MESSAGE_OF_NOBODY, event.position)
        if self._rows.get(place, event.said_handout) != event.said_handout and place not in self._letters:
            self._find("difference forgotten", f"position {event.position} of {event.key} for {event.trigger}")

    def _see_row(self, record: records.Stored | records.DeadLettered) -> None:
        event = (record.run_id, record.index)
        if isinstance(record, records.DeadLettered):
            self._events.add(event)
            self._letters.add((record.trigger, record.key or MESSAGE_OF_NOBODY, record.position))
            if record.position == PASSED_OVER_POSITION:
                self._see_passed_over(record)
            return
        self._letter_books.take(record, set())
        self._consumer_books.take(record)
        if event in self._events and not self._letter_books.is_redriven(*event):
            self._find("stored twice", f"event {record.index} of run {record.run_id}")
        self._events.add(event)
        handout = self._handouts[record.handout]
        self._handout_rows[record.trigger, record.handout] += 1
        if self._handout_rows[record.trigger, record.handout] > sum(t == record.trigger for t, _ in handout.fired):
            self._find("stored twice", f"{record.said} for {record.trigger} (handout {record.handout})")
        place = (record.trigger, record.said, record.position)
        if self._scenario.topology.keyed:
            if record.key != record.said:
                what = f"row {record.row} of {record.trigger}: {record.key} for {record.said}"
                self._find("bound to another message", what)
            if place in self._rows:
                self._find("stored twice", f"{record.said} position {record.position} for {record.trigger}")
        self._rows[place] = record.handout


def check(scenario: Scenario, history: Iterable[Record]) -> list[Finding]:
    """Return what is wrong with the history of a scenario."""
    return Checker(scenario).check(history)
