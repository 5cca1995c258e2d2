"""Judges a history of tasks of which some are mapped: beside what its base looks for, what is promised of instances.

- ``instance of no value``, ``a value left out``: the indexes of a task have a gap, or go on behind its values, or its
  own row has succeeded without one of them, or is skipped or failed though there are values
- ``more than its window``, ``more at once than may``: by `window` and by ``active_max``
- ``began after too many failures``, ``skipped for nothing``: by ``fail_fast`` and ``failures_max``
- ``began while another restarts``: an instance begins anew before the old worker of another is gone
- ``removed``: an instance was removed that there is a value for

Its own row, and its instances, are in the rules of what is downstream: those that were removed count for nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

import msgspec
from tests.proof.simulation.tasks import checker, records, rules
from tests.proof.simulation.tasks.checker import LATE_S, OCCUPYING
from tests.proof.simulation.tasks.maps.plans import LIST_KEY, Mapped, index_of, task_of
from tests.proof.simulation.tasks.rules import ENDED, ENDS
from tests.proof.simulation.tasks.scenario import TaskScenario

BEGUN = frozenset(("scheduled", "running", "deferred", "up_for_retry", "restarting"))
_OF_OWN = {("none", "success"), ("none", "skipped"), ("none", "failed")}
_OF_INSTANCE = {*((state, "upstream_failed") for state in ("none", "scheduled", "up_for_retry")), ("", "none")}


class Book(msgspec.Struct):
    """What is known of a mapped task of a run."""

    name: str
    plan: Mapped
    states: dict[int, str] = {}  # of its instances
    before: dict[int, str] = {}  # the same, before the transaction that is being told
    length: int | None = None  # the number of its values, from the first look at them on
    is_counted: bool = False
    failed_at: float | None = None  # when as many had failed as may
    apart: set[int] = set()  # instances that a user has cleared by themselves since all were made

    def count(self, states: frozenset[str], of: dict[int, str]) -> int:
        """Return how many instances are in these states."""
        return sum(state in states for state in of.values())

    @property
    def was_stopped(self) -> bool:
        """Whether as many had failed as may, before this transaction."""
        at = self.plan.stops_at
        return at is not None and self.count(frozenset({"failed"}), self.before) >= at


class MapChecker(checker.Checker):
    """Judges a history of tasks."""

    def __init__(self, plan: TaskScenario) -> None:
        super().__init__(plan)
        self._maps: dict[str, Book] = {}

    # --- rows -------------------------------------------------------------------------------------

    def _see_row(self, record: records.Moved) -> None:
        book, index = self._book(record.task), index_of(record.task)
        if book is not None and index >= 0:
            if index not in book.states and index != len(book.states):
                self._find("a value left out", f"{record.task} is made, and {len(book.states)} were there")
            book.states[index] = record.state
            if record.by == "clear" and self._tasks[book.name].row.state != "none":
                book.apart.add(index)
            if record.state == "failed" and book.failed_at is None:
                at = book.plan.stops_at
                failed = book.count(frozenset({"failed"}), book.states)
                book.failed_at = self._at if at is not None and failed >= at else None
        elif book is not None and record.by == "clear":
            book.is_counted, book.failed_at = False, None
            book.apart.clear()
        elif record.by == "clear":
            # What is expanded over it is cleared with it; a row of that in ``none`` does not change, and is not told.
            for one in self._maps.values():
                one.is_counted = one.is_counted and f"{one.name.rpartition('/')[0]}/{one.plan.of}" != record.task
        super()._see_row(record)
        if book is not None and record.by == "clear":
            book.failed_at = None

    def _is_known(self, now: records.Moved) -> bool:
        if super()._is_known(now):
            return True
        if now.by != "plan" or self._book(now.task) is None:
            return False
        return (now.old, now.state) in (_OF_OWN if index_of(now.task) < 0 else _OF_INSTANCE)

    def _give(self, task: checker.KnownTask, before: records.Moved, now: records.Moved) -> None:
        super()._give(task, before, now)
        book = self._book(now.task)
        if book is None:
            return
        if index_of(now.task) < 0:
            self._find("a step of nobody's", f"{now.task} is mapped")
        is_late = book.failed_at is not None and self._at > book.failed_at + LATE_S
        is_to_stop = book.plan.fail_fast and not book.plan.group and is_late and self._is_calm
        if is_to_stop and now.try_number == 1 and not now.method:
            self._find("began after too many failures", f"{now.task}, {self._at - (book.failed_at or 0):.2f} s later")

    def _book(self, name: str) -> Book | None:
        own = task_of(name)
        if own not in self._maps:
            plan = self._plan.task(own).mapped
            if plan is None:
                return None
            self._maps[own] = Book(own, plan)
        return self._maps[own]

    # --- rules ------------------------------------------------------------------------------------

    def _above(self, dag: str, run: str, own: str) -> tuple[str, ...]:
        """See the base class. What has not ended is told often enough for any combination of ends."""
        return self._told(found for one in self._upstream[dag].get(own, ()) for found in self._states_of(dag, run, one))

    def _states_of(self, dag: str, run: str, own: str) -> list[str]:
        """Return the states of a whole task: of its own row, and of its instances."""
        name = f"{dag}/{run}/{own}"
        state, book = self._tasks[name].row.state, self._book(name)
        present = [] if book is None else [each for each in book.states.values() if each != "removed"]
        return [*present, *([] if state == "success" else [state])] if present else [state]

    def _told(self, states: Iterable[str]) -> tuple[str, ...]:
        found = list(states)
        ended = sorted({state for state in found if state in ENDED})
        return (*ended, *[state for state in found if state not in ENDED][: len(ENDS)])

    def _check_rule(self, name: str, before: records.Moved) -> None:
        book = self._book(name)
        if book is None:
            super()._check_rule(name, before)
            return
        row = self._tasks[name].row
        dag, run, own = task_of(name).split("/")
        if row.by != "plan" or own not in self._upstream[dag]:
            return
        due = self._due(book, dag, run, own)
        if (book.plan.grows or not book.is_counted) and due == "scheduled":
            book.length, book.is_counted = self._length(book), True
        if index_of(name) >= 0:
            self._check_instance(book, row, due)
        elif row.state != before.state:
            self._check_own(book, row, due)

    def _due(self, book: Book, dag: str, run: str, own: str) -> str:
        """Return what becomes of a mapped task by its rule, and by the end of the task that leaves its values."""
        due = rules.decision(self._plan.task(book.name).rule, self._above(dag, run, own))
        if due != "scheduled" or not book.plan.of:
            return due
        name = f"{dag}/{run}/{book.plan.of}"
        state, source = self._tasks[name].row.state, self._book(name)
        if source is None:
            return rules.decision("all_success", (state,))
        return "scheduled" if ENDED.issuperset({state, *source.states.values()}) else "none"

    def _check_own(self, book: Book, row: records.Moved, due: str) -> None:
        is_whole = book.length is not None and book.states.keys() >= set(range(book.length))
        waits = [index for index, state in book.states.items() if state == "none" and index < (book.length or 0)]
        match row.state:
            case "upstream_failed":
                is_right = due == "upstream_failed"
            case "skipped":
                is_right = due == "skipped" or (due == "scheduled" and book.length == 0)
            case "failed":
                is_right = due == "scheduled" and book.length is None
            case _:
                is_right = due == "scheduled" and bool(book.length) and (book.was_stopped or (is_whole and not waits))
        if is_right:
            return
        what = f"{book.name} is {row.state}, by its rule {due}, of {book.length} values has {book.states}"
        self._find("a value left out" if due == "scheduled" else "wrong by its rule", what)

    def _check_instance(self, book: Book, row: records.Moved, due: str) -> None:
        index, what = index_of(row.task), f"{row.task} of {book.length}"
        length = book.length or 0
        match row.state:
            case "skipped":
                # A branch above may have passed over its task, which is skipped then, whatever its rule says.
                if due != "skipped" and self._tasks[book.name].row.state != "skipped":
                    self._find("skipped for nothing", what)
            case "upstream_failed":
                stops = book.was_stopped and index not in book.apart
                is_over = book.length is None or (stops and (book.plan.fail_fast or row.old == "none"))
                if due != "upstream_failed" and not is_over:
                    self._find("skipped for nothing", what)
            case "removed":
                if index < length:
                    self._find("removed", what)
            case "none" | "scheduled" if row.old in ("", "none"):
                if due != "scheduled":
                    self._find("wrong by its rule", f"{what} begins, and is to be {due}")
                if index >= length:
                    self._find("instance of no value", what)
                if book.was_stopped and index not in book.apart:
                    self._find("began after too many failures", what)
                if "restarting" in book.before.values():
                    self._find("began while another restarts", what)
                if row.state == "none":
                    self._find("a value left out", f"{what} is made, and does not begin")
            case _:
                pass

    def _length(self, book: Book) -> int | None:
        """Return how many values a task has now, by what is upstream of it; None if that is no list."""
        if not book.plan.of:
            return book.plan.count
        name = f"{book.name.rpartition('/')[0]}/{book.plan.of}"
        if (source := self._book(name)) is not None:
            return source.count(frozenset({"success"}), source.states)
        left = self._stored.get(name, {}).get(LIST_KEY)
        return None if left is None else len(ast.literal_eval(left))

    # --- transactions -----------------------------------------------------------------------------

    def _judge_look(self, record: records.LookDone) -> None:
        super()._judge_look(record)
        for book in self._maps.values():
            # Those that a user clears by themselves, when all are made, begin beside the window.
            begun = book.count(BEGUN, {at: state for at, state in book.states.items() if at not in book.apart})
            if begun > book.plan.window:
                self._find("more than its window", f"{book.name}: {begun} of {book.plan.window}")
            active = book.count(OCCUPYING, book.states)
            if book.plan.active_max is not None and active > book.plan.active_max:
                self._find("more at once than may", f"{book.name}: {active} of {book.plan.active_max}")
            book.before = dict(book.states)
