"""Judges a history of tasks with mapped groups, loops, worklists and elements (I24, I26, I27).

Beside what its base looks for:

- ``wrong by its rule``: an instance of a group begins, or never will, against its rule over its own index
- ``waits for another index``: nothing goes wrong, its rule holds and the window has room, and it does not begin
- ``began before its gate``: an iteration of a loop begins, and the gate of the one before has not ended well
- ``more than its window``: more indexes than that are open
- ``instance of no value``, ``a value left out``, ``removed``: as for any mapped task, over what there is by then; so an
  iteration of a loop that its gate did not ask for
- ``ended while one could append``: a worklist is at its end, and an instance is unfinished
- ``not what was appended``: a worklist is not what steps that went well have appended, each key once; or what a task
  has emitted is changed
- ``emitted twice``: two elements of a task have the same key
- ``beyond its limit``: more is appended than may be
"""

from __future__ import annotations

from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks import records, rules, transitions
from tests.proof.simulation.tasks.checker import LATE_S
from tests.proof.simulation.tasks.maps.checker import BEGUN, Book, MapChecker
from tests.proof.simulation.tasks.maps.plans import Mapped, index_of, task_of
from tests.proof.simulation.tasks.rules import ENDED
from tests.proof.simulation.tasks.scenario import TaskScenario

# Rules that the success of a task never keeps from holding: under these the elements of one that still runs are taken.
_TAKES_EARLY = frozenset(
    ("all_success", "all_done", "none_failed", "none_failed_min_one_success", "none_skipped", "always")
)
_UNTOUCHED = frozenset({"none"})


def key_of(value: str) -> str:
    """Return the key with which a value was appended; empty if it has none."""
    return value.partition("|")[0]


def appended_to(there: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a worklist is after a step has appended to it: a key is there once."""
    for value in new:
        key = key_of(value)
        if not key or key not in map(key_of, there):
            there = (*there, value)
    return there


class GroupChecker(MapChecker):
    """Judges a history of tasks."""

    def __init__(self, plan: TaskScenario) -> None:
        super().__init__(plan)
        self._elements: dict[str, tuple[str, ...]] = {}
        self._element_moves: list[records.ElementsMoved] = []  # of the transaction that is being told
        self._elements_before: dict[str, tuple[str, ...]] = {}  # of those in it
        self._own_before: dict[str, str] = {}  # states of own rows before the transaction
        self._due_since: dict[str, float] = {}  # instances that could begin

    def _take(self, record: Record) -> None:
        match record:
            case records.ElementsMoved():
                self._element_moves.append(record)
                self._elements_before[record.task] = self._elements.get(record.task, ())
                self._elements[record.task] = record.values
            case _:
                super()._take(record)

    # --- what there is to be expanded over --------------------------------------------------------

    def _list_of(self, name: str, plan: Mapped) -> str:
        """Return the name of the task that has the elements, or the worklist, over which a task is expanded."""
        assert plan.grows
        of = plan.of if plan.worklist is None else plan.worklist.to
        return f"{task_of(name).rpartition('/')[0]}/{of}"

    def _length(self, book: Book) -> int | None:
        if not book.plan.grows:
            return super()._length(book)
        given = 0 if book.plan.worklist is None else book.plan.worklist.given
        return given + len(self._elements.get(self._list_of(book.name, book.plan), ()))

    def _may_grow(self, book: Book) -> bool:
        """Whether there may be more values later."""
        if book.plan.worklist is not None:
            return any(one.count(BEGUN, one.states) for one in self._beside(book))
        return book.plan.grows and self._tasks[self._list_of(book.name, book.plan)].row.state not in ENDED

    def _beside(self, book: Book) -> list[Book]:
        """Return the books of the tasks of a mapped group; of a task in none, its own."""
        if not book.plan.group:
            return [book]
        run = book.name.rpartition("/")[0]
        dag = next(dag for dag in self._plan.dags if dag.name == book.name.split("/")[0])
        names = [task.name for task in dag.tasks if task.mapped is not None and task.mapped.group == book.plan.group]
        return [found for name in names if (found := self._book(f"{run}/{name}")) is not None]

    # --- rules ------------------------------------------------------------------------------------

    def _states_of(self, dag: str, run: str, own: str) -> list[str]:
        """See the base class. A task that emits counts as one that succeeds, for those that take its elements."""
        task = self._deciding
        plan = self._plan.task(task).mapped if task else None
        found = super()._states_of(dag, run, own)
        takes = (
            plan is not None and plan.is_of_elements and plan.of == own and self._plan.task(task).rule in _TAKES_EARLY
        )
        return ["success"] if takes and not ENDED.issuperset(found) else found

    _deciding = ""  # the task whose rule is being looked at

    def _check_rule(self, name: str, before: records.Moved) -> None:
        book, row = self._book(name), self._tasks[name].row
        self._deciding = task_of(name)
        if book is None or not book.plan.group:
            super()._check_rule(name, before)
        elif row.by == "plan":
            due = self._due_of_source(book)
            if due == "scheduled" and (book.plan.grows or not book.is_counted):
                book.length, book.is_counted = self._length(book), True
            if row.state == "scheduled" and row.old in ("", "none") and self._paused.get(name.split("/")[0]):
                self._find("began while paused", name)
            if index_of(name) >= 0:
                self._check_inside(book, row, due)
            elif row.state != before.state:
                self._check_own_inside(book, row, due)
        self._deciding = ""

    def _due(self, book: Book, dag: str, run: str, own: str) -> str:
        if book.plan.is_of_elements:
            return rules.decision(self._plan.task(book.name).rule, self._above(dag, run, own))
        return super()._due(book, dag, run, own)

    def _due_of_source(self, book: Book) -> str:
        """Return what becomes of a whole group by the end of the task that leaves its values."""
        if not book.plan.of or book.plan.is_of_elements:
            return "scheduled"
        return rules.decision("all_success", (self._tasks[f"{book.name.rpartition('/')[0]}/{book.plan.of}"].row.state,))

    def _due_at(self, book: Book, index: int | None) -> str:
        """Return what becomes of an instance by its rule; without an index, of one at any, if all tasks end so."""
        dag, run, own = book.name.split("/")
        group = {one.name.rpartition("/")[2]: one for one in self._beside(book)}
        found: list[str] = []
        for above in self._upstream[dag].get(own, ()):
            if above in group and index is None:
                found.append(self._tasks[group[above].name].row.state)
            elif above in group and index in group[above].states:
                found.append(group[above].states[index])
            else:
                found += self._states_of(dag, run, above)
        return rules.decision(self._plan.task(book.name).rule, self._told(found))

    def _is_stopped(self, book: Book) -> bool:
        """Whether as many had failed as may, before this transaction, while instances were still to be made."""
        at, beside = book.plan.stops_at, self._beside(book)
        is_open = any(self._own_before.get(one.name) == "none" for one in beside)
        failed = sum(one.count(frozenset({"failed"}), one.before) for one in beside)
        return at is not None and is_open and failed >= at

    def _is_untouched(self, book: Book, index: int) -> bool:
        """Whether nothing had begun at an index before this transaction."""
        return _UNTOUCHED.issuperset(one.before.get(index, "none") for one in self._beside(book))

    def _check_inside(self, book: Book, row: records.Moved, of_source: str) -> None:
        index, length = index_of(row.task), book.length or 0
        due, what = self._due_at(book, index), f"{row.task} of {length}"
        own = self._tasks[book.name].row.state
        is_new = self._is_untouched(book, index)
        match row.state:
            case "removed":
                if index < length:
                    self._find("removed", what)
            case "skipped" | "upstream_failed":
                is_stopped = row.state == "upstream_failed" and is_new and self._is_stopped(book)
                is_ended = row.state == of_source or (book.length is None and row.state == "upstream_failed")
                if row.state != due and not is_stopped and not is_ended and own != "skipped":
                    self._find("wrong by its rule", f"{what} is {row.state}, and is to be {due}")
            case "scheduled" if row.old in ("", "none"):
                if due != "scheduled" or of_source != "scheduled":
                    self._find("wrong by its rule", f"{what} begins, and is to be {due}")
                if is_new and self._is_stopped(book):
                    self._find("began after too many failures", what)
                if is_new and index and not self._is_asked_for(book, index):
                    self._find("began before its gate", what)
            case _:
                pass
        if not row.old:
            if index >= length:
                self._find("instance of no value", what)
            if any("restarting" in one.before.values() for one in self._beside(book)):
                self._find("began while another restarts", what)

    def _is_asked_for(self, book: Book, index: int) -> bool:
        """Whether the gate of a loop has ended in the iteration before."""
        worklist = book.plan.worklist
        if worklist is None or not worklist.stops:
            return True
        gate = self._book(self._list_of(book.name, book.plan))
        return gate is None or gate.states.get(index - 1) in ("success", "skipped")

    def _check_own(self, book: Book, row: records.Moved, due: str) -> None:
        super()._check_own(book, row, due)
        self._check_end_of_list(book, row)

    def _check_own_inside(self, book: Book, row: records.Moved, of_source: str) -> None:
        length, stopped = book.length or 0, self._is_stopped(book)
        waits = [index for index in range(length) if book.states.get(index, "none") == "none"]
        match row.state:
            case "success":
                is_right = of_source == "scheduled" and length > 0 and (stopped or not waits)
            case "failed":
                is_right = book.length is None
            case _:
                is_empty = row.state == "skipped" and length == 0
                is_right = (
                    is_empty or row.state == of_source or (not book.states and self._due_at(book, None) == row.state)
                )
        if not is_right:
            what = f"{book.name} is {row.state}, by its source {of_source}, of {length} values has {book.states}"
            self._find("a value left out" if waits else "wrong by its rule", what)
        self._check_end_of_list(book, row)

    def _check_end_of_list(self, book: Book, row: records.Moved) -> None:
        """A task has made its last instance: no value is without one, and there will be no more values."""
        is_over = row.state == "success" or (row.state == "skipped" and book.length == 0 and not book.states)
        if not is_over or self._is_stopped(book):
            return
        if book.plan.grows and self._may_grow(book):
            self._find("ended while one could append", f"{book.name} with {book.length} values has {book.states}")
        if gone := [index for index in range(book.length or 0) if book.states.get(index) == "removed"]:
            self._find("a value left out", f"{book.name} of {book.length} values has none at {gone}: they were removed")

    # --- what is appended -------------------------------------------------------------------------

    def _is_what_it_came_to(self, now: records.Moved, ran: records.StepRan) -> bool:
        """See the base class. A step that appends more than may be has failed."""
        plan = self._plan.task(now.task).mapped
        if now.by == "fail" and ran.appended and plan is not None and plan.worklist is not None:
            there = self._elements.get(self._list_of(now.task, plan), ())
            return len(appended_to(there, ran.appended)) > plan.worklist.room
        return super()._is_what_it_came_to(now, ran)

    def _check_appended(self) -> None:
        due: dict[str, tuple[str, ...]] = {}
        for name, _ in self._moved:
            row = self._tasks[name].row
            ran = self._ran.get(row.said) if row.by == "succeed" and row.task == row.about else None
            plan = self._plan.task(name).mapped
            if ran is None or plan is None or plan.worklist is None:
                continue
            to = self._list_of(name, plan)
            if self._own_before.get(to) == "none":
                there = due.get(to, self._elements_before.get(to, self._elements.get(to, ())))
                due[to] = appended_to(there, ran.appended)
                if len(due[to]) > plan.worklist.room:
                    self._find("beyond its limit", f"{to}: {len(due[to])} of {plan.worklist.room}")
        for to, values in due.items():
            if self._elements.get(to, ()) != values:
                self._find("not what was appended", f"{to} has {self._elements.get(to, ())}, and should have {values}")
        for moved in self._element_moves:
            before, after = self._elements_before[moved.task], moved.values
            is_kept = after[: len(before)] == before
            emits = self._plan.task(moved.task).emits
            is_emitted = emits is not None
            has_keys = emits is not None and emits.have_keys
            if has_keys and len(set(after)) < len(after):
                self._find("emitted twice", f"{moved.task} has {after} after {before}, by {moved.by}")
            is_ordered = not is_emitted or has_keys or after == tuple(map(str, range(len(after))))
            is_cleared = moved.by in transitions.OF_USER and before[: len(after)] == after
            if moved.task not in due and not is_cleared and not (is_emitted and is_kept and is_ordered):
                self._find("not what was appended", f"{moved.task} has {after} after {before}, by {moved.by}")

    # --- transactions -----------------------------------------------------------------------------

    def _judge_look(self, record: records.LookDone) -> None:
        self._check_appended()
        super()._judge_look(record)
        seen: set[str] = set()
        for book in list(self._maps.values()):
            self._own_before[book.name] = self._tasks[book.name].row.state
            beside = self._beside(book)
            if book.plan.group and beside[0].name not in seen:
                seen.add(beside[0].name)
                self._judge_indexes(beside, has_looked=record.by == "plan")
        self._element_moves.clear()
        self._elements_before.clear()

    def _judge_indexes(self, beside: list[Book], *, has_looked: bool) -> None:
        """Look at all indexes of a group: how many are open, and whether one waits that should not."""
        open_ = {index for one in beside for index, state in one.states.items() if state in BEGUN}
        window = beside[0].plan.window
        if len(open_) > window:
            self._find("more than its window", f"{beside[0].name}: the indexes {sorted(open_)} of {window}")
        if not self._is_calm:
            return
        for book in beside:
            self._deciding = book.name
            for index, state in book.states.items():
                name = f"{book.name}[{index}]"
                has_room = index in open_ or len(open_) < window
                if state != "none" or not has_room or self._due_at(book, index) != "scheduled":
                    self._due_since.pop(name, None)
                elif self._at > self._due_since.setdefault(name, self._at) + LATE_S:
                    self._find("waits for another index", name)
        self._deciding = ""
