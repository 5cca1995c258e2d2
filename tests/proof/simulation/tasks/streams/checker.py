"""Judges a history of tasks of which some take streams: beside what its base looks for, what I20 to I22 promise.

- ``handled twice``: a place goes back, a step gets an event that is handled, or a number is stored once more
- ``event left out``: a step gets, or a place passes, an event in front of which one is not handled, or a stream is over
  without an event that its trigger has fired
- ``out of order``, ``state of another history``: what a step gets is not what the step before has left
- ``place not moved``: an outcome is stored, and what it has handled is not
- ``a place that nobody came to``: a place moves without a step of the task that it has then
- ``beyond its credit``: more events wait than may
- ``ended before its last event``, ``ended twice``, ``ended by another run``
- ``an old run goes on``: a run of a trigger stores an event behind one of a later run
- ``a step before its batch``, ``left waiting``, ``not the newest``
- ``tries not given back``: events are handled, or one is passed over, and the task has not all its tries
- ``not what its handler said``: a step has handled other events than its handler said, or goes on though it has ended
- ``passed over``: an event becomes a dead letter, or none does, against the rule for poison
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.proof.simulation.checker import Finding
from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks import records, transitions
from tests.proof.simulation.tasks.checker import LATE_S, KnownTask
from tests.proof.simulation.tasks.groups.checker import GroupChecker
from tests.proof.simulation.tasks.scenario import TaskScenario
from tests.proof.simulation.tasks.streams.books import EARLY_S, Book, Given, Next, Place
from tests.proof.simulation.tasks.streams.handling import BEGIN_TEXT, METHODS
from tests.proof.simulation.tasks.streams.source import OF_STREAM

_BEGINS = frozenset(("defer", "plan", "retry_due"))


class Checker(GroupChecker):
    """Judges a history of tasks."""

    def __init__(self, plan: TaskScenario) -> None:
        super().__init__(plan)
        self._books: dict[str, Book] = {}
        self._by_trigger: dict[int, Book] = {}  # forgotten ones, too
        self._given_parts: dict[str, Given] = {}  # by token
        self._of_streams: set[str] = set()  # tokens
        self._letters: dict[int, list[int]] = {}  # numbers, by trigger, of the transaction that is being told
        self._blameless: set[str] = set()  # tokens of steps that a shutdown has ended

    def _take(self, record: Record) -> None:
        match record:
            case records.StreamMoved():
                self._see_stream(record)
            case records.EventStored() if record.trigger in self._by_trigger:
                self._see_event(self._by_trigger[record.trigger], record)
            case records.LetterStored() if record.trigger in self._by_trigger:
                self._letters.setdefault(record.trigger, []).append(record.number)
            case records.SourceBegan() if record.trigger in self._by_trigger:
                self._by_trigger[record.trigger].source_began(record.run)
            case records.SourceEnded() if record.trigger in self._by_trigger:
                self._by_trigger[record.trigger].source_ended(record.run, record.how)
            case records.StepGot():
                self._check_given(record)
            case records.StepRan():
                if record.reported != record.handled or (record.takes_no_more and not record.has_ended):
                    self._find("not what its handler said", f"{record.task}: {record.handled} are handled")
                super()._take(record)
            case records.StepStopped():
                if record.why == "lost":
                    self._blameless.add(record.token)
            case records.TriggerMoved():
                book = self._by_trigger.get(record.trigger)
                if record.end == "removed" and record.by in transitions.OF_USER and book is not None:
                    self._removed_by_user.add((book.task, OF_STREAM))
                super()._take(record)
            case _:
                super()._take(record)

    # --- the rows of streams ----------------------------------------------------------------------

    def _see_stream(self, record: records.StreamMoved) -> None:
        book = self._books.get(record.task)
        if not record.trigger:
            self._books.pop(record.task, None)
            if record.by == "clear":  # from its start; it may have been cleared before, to go on, and kept its XComs
                task = self._tasks[record.task]
                task.left = self._kept(task)
            return
        if book is None or book.trigger != record.trigger:
            plan = self._plan.task(record.task).stream
            if plan is None or book is not None:
                self._find("broke", f"a stream of {record.task} that nobody asked for")
                return
            book = self._books[record.task] = self._by_trigger[record.trigger] = Book(record.task, plan, record.trigger)
        place = Place(record.place, record.handled, record.left)
        if place != book.place:
            book.before, book.place, book.is_accounted = book.place, place, False
        if record.ended_as and record.ended_as != book.ended_as:
            self._check_end(book, record)
        if book.reopens and not record.reopens:
            book.open()
        book.ended_as, book.reopens = record.ended_as, record.reopens

    def _check_end(self, book: Book, record: records.StreamMoved) -> None:
        if not book.has_ended_so(record.ended_as):
            self._find("ended by another run", f"the stream of {book.task}: {record.ended_as}, by {record.by}")
        elif record.ended_as == "returned" and len(book.events) < book.plan.total:
            what = f"{book.task}: its stream is over with {len(book.events)} of {book.plan.total} events"
            self._find("event left out", what)

    def _see_event(self, book: Book, record: records.EventStored) -> None:
        if record.run in book.runs[:-1]:
            self._find("an old run goes on", f"{record.run} of the stream of {book.task}, after {book.runs[-1]}")
        elif record.run not in book.runs:
            book.runs.append(record.run)
        if record.kind == "event" or not book.reopens:  # else the task does not hear of this end, and its wait goes on
            book.since = self._at
        if record.kind != "event":
            book.ends.append(record.kind)
            return
        if record.number != len(book.events):
            kind = "handled twice" if record.number < len(book.events) else "event left out"
            self._find(kind, f"{book.task}: number {record.number} is stored as {len(book.events)}")
        book.events.append(record)

    # --- the rows of tasks ------------------------------------------------------------------------

    def _check_transition(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        book = self._books.get(now.task)
        if book is not None and now.by in _BEGINS and now.method in METHODS and now.state in ("deferred", "scheduled"):
            book.begin(now.try_number)
            task.deferral = 0
        super()._check_transition(task, before, now)

    def _book_of(self, trigger: int) -> Book | None:
        """Return the stream that a trigger feeds, if it is still one."""
        book = self._by_trigger.get(trigger)
        return book if book is not None and self._books.get(book.task) is book else None

    def _defer(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        book = self._book_of(now.trigger)
        if book is None:
            super()._defer(task, before, now)
            return
        if now.by in ("plan", "retry_due"):
            self._check_try(task, before, now)
        task.deferral = 0
        book.since = self._at

    def _check_resumption(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        if before.trigger not in self._by_trigger:
            super()._check_resumption(task, before, now)
            return
        book = self._book_of(before.trigger)
        task.deferral = 0
        if book is not None and now.by == "time_out":
            self._check_stream_timeout(task, book, now)
        elif book is not None and now.by in ("store_slice", "begin_due_batches"):
            self._check_next(book, now)
        late_s = 0.0 if book is None or book.ended_as else book.late_s(self._at) or 0.0
        if self._is_calm and now.by not in transitions.OF_USER and late_s > LATE_S:
            self._find("late", f"the batch of {now.task}, by {late_s:.3f} s")

    def _check_next(self, book: Book, now: records.Moved) -> None:
        due = book.next_states(self._at, now)
        if Next(now.state, now.method == "__fail__") in due:
            return
        is_early = due == {Next("deferred")} and book.waiting
        kind = "a step before its batch" if is_early else "resumed without a cause"
        self._find(kind, f"{now.task} is {now.state} {now.method} by {now.by}, not {sorted(due)}")

    def _check_stream_timeout(self, task: KnownTask, book: Book, now: records.Moved) -> None:
        plan = self._plan.task(now.task)
        limits = [] if book.plan.timeout_s is None else [book.since + book.plan.timeout_s]
        limits += [] if plan.execution_timeout_s is None else [task.began_at + plan.execution_timeout_s]
        late_s = self._at - min(limits, default=float("inf"))
        if late_s < -EARLY_S:
            self._find("timed out early", f"{now.task}, by {-late_s:.3f} s")
        if now.method != "__fail__":
            self._find("resumed without a cause", f"{now.task} by its timeout in {now.method}")
        if self._is_calm and late_s > LATE_S:
            self._find("late", f"the timeout of {now.task}, by {late_s:.3f} s")

    def _kept(self, task: KnownTask) -> dict[str, str]:
        book = self._books.get(task.row.task)
        return task.left if book is not None and book.place.handled else {}

    # --- the outcomes of steps --------------------------------------------------------------------

    def _is_what_it_came_to(self, now: records.Moved, ran: records.StepRan) -> bool:
        book = self._books.get(now.task)
        legs = self._plan.task(now.task).legs(now.try_number)
        has_deferred = ran.outcome == "deferred" and legs[ran.leg].streams
        if book is None or not (ran.outcome == "handled" or has_deferred):
            return super()._is_what_it_came_to(now, ran)
        return Next(now.state, now.method == "__fail__") in book.next_states(self._at, now)

    def _check_outcome(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        super()._check_outcome(task, before, now)
        book = self._books.get(now.task)
        if book is None or now.task != now.about or (before.token, before.state) != (now.said, "running"):
            return
        given = self._given_parts.get(now.said)
        ran = None if now.by == "lose_worker" else self._ran.get(now.said)
        due = book.place if book.is_accounted else book.before
        if ran is not None and ran.handled:
            due = Place(ran.handled_to, book.handled_to(ran.handled_to), ran.left)
        tries = before.tries_max if ran is None or not ran.handled else now.try_number + self._retries_of(now.task)
        left = self._failed_on(book, given, ran, now)
        if left:
            assert given is not None
            if len(given.rows) > 1:
                book.one_by_one_to = left[-1]
            elif before.try_number >= before.tries_max:
                due = self._check_passed_over(book, due, left[-1])
            if len(given.rows) > 1 or before.try_number >= before.tries_max:
                tries = now.try_number + 1 + self._retries_of(now.task)
        self._check_place(book, due, is_poison=due.row == left[-1] if left else False)
        if now.tries_max != tries:
            self._find("tries not given back", f"{now.task} has {now.tries_max} in try {now.try_number}, not {tries}")
        if ran is not None and ran.has_ended:
            book.ended_in = now.try_number
            if given is not None and given.is_over and book.waiting and not ran.takes_no_more:
                self._find("ended before its last event", f"{now.task}: {len(book.waiting)} wait")

    def _retries_of(self, task: str) -> int:
        return self._plan.task(task).retries

    def _failed_on(
        self, book: Book, given: Given | None, ran: records.StepRan | None, now: records.Moved
    ) -> tuple[int, ...]:
        """Return the events on which a step has failed, by their rows, if they may be poison."""
        is_failure = now.by == "fail" if ran is not None else now.by in ("fail", "lose_worker")
        is_blamed = (ran is None or ran.may_retry) and not (ran is None and now.said in self._blameless)
        if book.plan.poison != "skip" or given is None or not (is_failure and is_blamed):
            return ()
        return given.rows[0 if ran is None else ran.handled :]

    def _check_passed_over(self, book: Book, due: Place, row: int) -> Place:
        """An event is poison; return the place behind it."""
        numbers = [event.number for event in book.events if event.row == row]
        if self._letters.pop(book.trigger, []) != numbers:
            self._find("passed over", f"{book.task}: {numbers}, and there is no dead letter of it")
        return Place(row, book.handled_to(row), due.left or BEGIN_TEXT)

    def _check_place(self, book: Book, due: Place, *, is_poison: bool) -> None:
        book.is_accounted = True
        if book.place == due:
            return
        what = f"{book.task}: {book.place}, not {due}"
        if book.place.row == due.row:
            self._find("state of another history", what)
        elif book.place.row > due.row:
            self._find("passed over" if is_poison else "event left out", what)
        elif book.place == book.before or book.place.row == book.before.row:
            self._find("place not moved", what)
        else:
            self._find("handled twice", what)

    # --- the beginnings of steps ------------------------------------------------------------------

    def _give(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        super()._give(task, before, now)
        book = self._books.get(now.task)
        if book is None or task.deferral or not now.method:
            return
        self._of_streams.add(now.token)
        if now.method in METHODS:
            self._given_parts[now.token] = book.given()
            if book.ended_in == now.try_number:
                self._find("ended twice", f"{now.task} in try {now.try_number}")

    def _check_begin(self, record: records.StepBegan, trigger: int) -> None:
        if record.token in self._of_streams:
            self._check_in_time(record)
        else:
            super()._check_begin(record, trigger)

    def _check_given(self, record: records.StepGot) -> None:
        due = self._given_parts.get(record.token)
        if due is None:
            self._find("a step of nobody's", f"{record.task} by {record.token} gets {record.numbers}")
            return
        got = Given(record.rows, record.numbers, record.place, record.left, record.is_over)
        book = self._books.get(record.task)
        if book is not None and self._tasks[record.task].row.token == record.token and got == book.given():
            # Of a dispatch whose answer was lost: what came in between is read as well.
            self._given_parts[record.token] = due = got
        if got == due or book is None:
            return
        what = f"{record.task} gets {got}, not {due}"
        if got.rows != due.rows:
            self._find(_how_wrong(book, got, due), what)
        elif got.is_over and not due.is_over:
            self._find("ended before its last event", what)
        else:
            self._find("state of another history", what)

    # --- transactions -----------------------------------------------------------------------------

    def _judge_look(self, record: records.LookDone) -> None:
        super()._judge_look(record)
        for trigger, numbers in self._letters.items():
            self._find("passed over", f"{self._by_trigger[trigger].task}: {numbers}, by {record.by}")
        self._letters.clear()
        for book in self._books.values():
            if not book.is_accounted:
                kind = "handled twice" if book.place.row < book.before.row else "a place that nobody came to"
                self._find(kind, f"{book.task}: {book.place} after {book.before}, by {record.by}")
                book.is_accounted = True
            row = self._tasks[book.task].row
            if len(book.waiting) > book.plan.ahead:
                self._find("beyond its credit", f"{book.task}: {len(book.waiting)} wait, of {book.plan.ahead}")
            if row.state == "deferred" and row.trigger == book.trigger and book.has_to_go_on:
                self._find("left waiting", f"{book.task}: {len(book.waiting)} wait, {book.ended_as or 'not over'}")

    def _may_be_open(self, trigger: int) -> bool:
        book = self._book_of(trigger)
        if book is None:
            return super()._may_be_open(trigger)
        row = self._tasks[book.task].row
        return row.state in ("scheduled", "running") and book.begun_in == row.try_number != book.ended_in

    def _is_over(self, trigger: int) -> bool:
        book = self._book_of(trigger)
        return super()._is_over(trigger) and not (book is not None and book.reopens)


def _how_wrong(book: Book, got: Given, due: Given) -> str:
    if any(row <= book.place.row for row in got.rows):
        return "handled twice"
    if list(got.rows) != sorted(set(got.rows)):
        return "out of order"
    if book.plan.contract == "latest":
        return "not the newest"
    return "a step before its batch" if got.rows == due.rows[: len(got.rows)] else "event left out"


def check(plan: TaskScenario, history: Iterable[Record]) -> list[Finding]:
    """Return what is wrong with the history of a scenario."""
    return Checker(plan).check(history)
