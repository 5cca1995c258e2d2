"""Judges a history of tasks of which some have rules: beside what its base looks for, what I29 promises.

- ``started without cause``: a task has begun, or was ended, by no rule that was met since its last start: by a version
  that does not count for it, by some of its necessary rules, or against its trigger rule
- ``stopped without cause``: it was ended, and nothing has asked for that
- ``acted twice``: it has started with a version with which it had started before
- ``a start came back``: it has started with what was sent before a stop
- ``start lost``: what should have started it did not, or the next one of each did not
- ``stopped and running``: what should have ended it did not
- ``a run ended too early``: over a start that was remembered, or sent before
- ``began in a run that ends``, ``began while paused``
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tests.proof.simulation.checker import Finding
from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks import rules as trigger_rules
from tests.proof.simulation.tasks.checker import LATE_S, KnownTask
from tests.proof.simulation.tasks.rules import ENDED
from tests.proof.simulation.tasks.scenario import Dag
from tests.proof.simulation.tasks.signals import records
from tests.proof.simulation.tasks.signals.checker import SETTLED_S, SignalChecker
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.plans import A_USER
from tests.proof.simulation.tasks.signals.rules.books import FREE, UNDER_WAY, Ask, RuleBook
from tests.proof.simulation.tasks.signals.rules.plans import BY_HAND, STARTING, Rule, Ruled

_BEGUN = frozenset(("scheduled", "deferred"))
_NO_RULES = Ruled(())


class RuleChecker(SignalChecker):
    """Judges a history of tasks."""

    def __init__(self, plan: SignalScenario) -> None:
        super().__init__(plan)
        self._rule_books: dict[str, RuleBook] = {}
        self._ending: set[str] = set()  # runs that users have asked to end
        self._asked: set[str] = set()  # runs of which users have asked for something
        self._count = 0
        self._asked_as: dict[tuple[str, int], int] = {}  # by key and version: the number of what a signal asks for
        self._met: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # versions, by task and rule
        self._begun_at: dict[str, float] = {}  # runs, when they began, or went on after their end
        self._unpaused_at: dict[str, float] = {}  # DAGs
        self._under_way_since: dict[str, float] = {}
        self._since: dict[str, float] = {}  # tasks, in their states
        self._before: dict[str, str] = {}  # the states of tasks before the transaction that is being told

    def _take(self, record: Record) -> None:
        match record:
            case records.RulesMoved():
                self._rule_books[record.task].snapshot = record.starts
            case records.Asked():
                self._asked.add(record.task.rpartition("/")[0])
                self._ask_by_hand(record)
            case records.RunEnding():
                self._ending.add(record.run)
            case of_tasks.Acted():
                if record.what == "clear" and record.result != "None":
                    self._ending.discard(record.task.rpartition("/")[0])  # it is to go on
                super()._take(record)
            case records.RuleMet():
                self._met[record.task, record.rule].add(record.version)
                super()._take(record)
            case records.SignalsDropped():
                self._forgive_dropped(record)
                super()._take(record)
            case of_tasks.DagMoved():
                if not record.is_paused:
                    self._unpaused_at[record.dag] = self._at
                super()._take(record)
            case of_tasks.TriggerMoved() if record.end == "removed" and record.by == "plan":
                deferral = self._deferrals.get(record.trigger)
                if deferral is not None and deferral.task in self._rule_books:
                    self._removed_by_user.add((deferral.task, deferral.leg))
                super()._take(record)
            case _:
                super()._take(record)

    # --- what is asked for ------------------------------------------------------------------------

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _see_signal(self, record: records.SignalStored) -> None:
        super()._see_signal(record)
        number = self._asked_as[record.key, record.version] = self._number()
        for book in self._rule_books.values():
            row = self._runs[book.task.rpartition("/")[0]]
            for rule in () if row.is_ended else book.ruled.rules:
                if book.takes(rule, record):
                    action = book.action(rule, record.value)
                    ask = Ask(number, self._asked_at(book, rule), rule.name, action, record.version)
                    ask.is_due = self._is_due(book, ask)
                    book.ask(ask)

    def _forgive_dropped(self, record: records.SignalsDropped) -> None:
        """Versions are gone; the rules of a run that has not begun do not keep any."""
        for book in self._rule_books.values():
            if book.task.rpartition("/")[0] not in self._begun_at:
                names = {rule.name for rule in book.ruled.rules if rule.key == record.key}
                for one in book.left:
                    one.is_due = one.is_due and not (one.rule in names and one.version in record.versions)

    def _asked_at(self, book: RuleBook, rule: Rule) -> float:
        """Return from when on what a rule asks for may be late: where an operator decides that is not known yet."""
        return self._at if book.ruled.decides is None or not rule.key else float("inf")

    def _ask_by_hand(self, record: records.Asked) -> None:
        book, rule = self._rule_books[record.task], f"{BY_HAND} {record.action}"
        if record.is_sure:
            for one in book.left:
                if one.rule == rule and one.at == self._at:
                    one.is_due = self._is_due(book, one)
            return
        book.ask(Ask(self._number(), self._at, rule, record.action, -self._count, is_due=False))

    def _is_due(self, book: RuleBook, ask: Ask) -> bool:
        """Whether anything has to be done, by the state in which the task is."""
        state = self._state(book)
        if ask.action == "STOP":
            return state not in ENDED
        return ask.action != "START" or book.ruled.overlap != "ignore" or state not in UNDER_WAY

    def _end_asks(self, name: str, row: of_tasks.Moved) -> None:
        """A task has ended, or is to begin again: there may be rules about that."""
        run, _, own = name.rpartition("/")
        for book in self._rule_books.values():
            for rule in book.ruled.rules if book.task.rpartition("/")[0] == run else ():
                if rule.ended != own:
                    continue
                if row.state not in ENDED:
                    book.started[rule.name] = min(book.started.get(rule.name, 0), row.try_number)
                    if row.by != "plan":  # that notices ends before it begins what has ended
                        book.forgive(rule.name, self._met[book.task, rule.name])
                elif row.state != "removed" and rule.state in (None, row.state):
                    book.ask(Ask(self._number(), self._at, rule.name, rule.action, row.try_number + 1))

    # --- runs -------------------------------------------------------------------------------------

    def _see_run(self, record: of_tasks.RunMoved) -> None:
        before = self._runs.get(record.run)
        dag = self._scenario.dag(record.run.split("/")[0])
        if before is None and _is_ruled(dag):
            self._make_books(record.run, dag)
        super()._see_run(record)
        if record.is_started and not (before is not None and before.is_started):
            self._begun_at[record.run] = self._at
        if before is not None and before.is_ended and not record.is_ended:
            self._begun_at[record.run] = self._at
            self._ending.discard(record.run)
            for book in self._books_of(record.run):
                keys = {name: self._log(rule.key).last for name, rule in book.rules.items() if rule.key}
                clocks = {name: book.started.get(name, 0) for name, rule in book.rules.items() if rule.is_of_clock}
                book.close(keys | clocks)

    def _make_books(self, run: str, dag: Dag) -> None:
        for task in dag.tasks:
            name = f"{run}/{task.name}"
            book = self._rule_books[name] = RuleBook(name, task.ruled or _NO_RULES)
            for rule in book.ruled.rules:
                if not rule.key:
                    continue
                log, last = self._log(rule.key), self._newest_before(run, rule.key)
                self._starts[run, rule.key] = book.started[rule.name] = last
                before = [one for one in log.kept(0, last, run) if rule.since == "latest"]
                if before:
                    book.started[rule.name] = before[-1].version - 1
                    if book.takes(rule, before[-1]):
                        # It may be trimmed before the rules of the run are looked at for the first time.
                        is_due, action = self._is_calm, book.action(rule, before[-1].value)
                        at, number = self._asked_at(book, rule), self._asked_as[rule.key, before[-1].version]
                        book.ask(Ask(number, at, rule.name, action, before[-1].version, is_due))
            book.sort()

    def _newest_before(self, run: str, key: str) -> int:
        """Return the newest version of a key that was sent before a run, which is new."""
        return self._log(key).last

    def _books_of(self, run: str) -> list[RuleBook]:
        return [book for name, book in self._rule_books.items() if name.rpartition("/")[0] == run]

    def _may_go_on(self, record: of_tasks.RunMoved) -> bool:
        return super()._may_go_on(record) or (record.by == A_USER and record.run in self._asked)

    def _judging(self, dag: str) -> dict[str, tuple[str, ...]]:
        free = {task.name for task in self._scenario.dag(dag).tasks if task.ruled and task.ruled.is_sufficient}
        return {name: () if name in free else above for name, above in super()._judging(dag).items()}

    def _judge_run(self, run: str) -> None:
        for book in self._books_of(run):
            if run not in self._ending:
                for ask in book.due():
                    self._find("a run ended too early", f"{run}: {book.task} was to start by {ask}")
                if self._is_ready(book) and self._held_over_the_end(book):
                    self._find("a run ended too early", f"{run}: {book.task} was to start by {book.met()}")
            book.close()
        super()._judge_run(run)

    # --- tasks ------------------------------------------------------------------------------------

    def _state(self, book: RuleBook) -> str:
        """Return the state of a task; of one that has not begun and will at once ``starting``."""
        if book.task not in self._tasks:
            return "none"
        return _state_of(self._tasks[book.task].row)

    def _is_ready(self, book: RuleBook) -> bool:
        """Whether its necessary rules are to start a task now."""
        met = book.met()
        if met is None or not any(one.action in STARTING for one in met) or book.task not in self._tasks:
            return False
        if self._tasks[book.task].row.state not in FREE:
            return False
        return all(one.is_due and not book.is_taken_back(one) for one in met) and self._holds(book)

    def _holds(self, book: RuleBook) -> bool:
        rule, above = self._plan.task(book.task).rule, self._above(*book.task.split("/"))
        return trigger_rules.decision(rule, above) == "scheduled"

    def _held(self, book: RuleBook) -> bool:
        """Whether its trigger rule holds, or did until another task has begun again in the same transaction."""
        return self._holds(book) or self._held_with(book, self._before)

    def _held_over_the_end(self, book: RuleBook) -> bool:
        """Whether its trigger rule holds in a run that has ended, but for what was skipped by that end.

        Tasks that signals start, and have not, are skipped with their run, and nothing begins below them any more.
        """
        skipped = {
            name
            for name, one in self._rule_books.items()
            if one.ruled.starts and name in self._before and self._tasks[name].row.state == "skipped"
        }
        return self._held_with(book, {name: self._before[name] for name in skipped})

    def _held_with(self, book: RuleBook, before: Mapping[str, str]) -> bool:
        """Whether its trigger rule holds, or did with these states of tasks."""
        dag, run, own = book.task.split("/")
        names = [f"{dag}/{run}/{one}" for one in self._upstream[dag].get(own, ())]
        above = tuple(before.get(name, self._tasks[name].row.state) for name in names)
        return trigger_rules.decision(self._plan.task(book.task).rule, above) == "scheduled"

    def _is_known(self, now: of_tasks.Moved) -> bool:
        book = self._rule_books.get(now.task)
        if book is None or now.by != "plan" or super()._is_known(now):
            return super()._is_known(now)
        if now.state in _BEGUN:
            return now.old in FREE or now.old in ("deferred", "scheduled")
        is_stop = now.state == book.ruled.stopped_as and now.old not in (*ENDED, "restarting")
        return is_stop or (now.old, now.state) == ("running", "restarting")

    def _check_transition(self, task: KnownTask, before: of_tasks.Moved, now: of_tasks.Moved) -> None:
        super()._check_transition(task, before, now)
        if now.task in self._rule_books and now.by == "plan" and now.state in (*_BEGUN, "restarting"):
            task.left = self._kept(task)

    def _check_rule(self, name: str, before: of_tasks.Moved) -> None:
        book, row = self._rule_books.get(name), self._tasks[name].row
        if book is None or row.by != "plan":
            super()._check_rule(name, before)
            return
        run = name.rpartition("/")[0]
        if row.state in _BEGUN:
            if self._paused.get(name.split("/")[0]):
                self._find("began while paused", name)
            if run in self._ending and (book.ruled.starts or before.state != "none"):
                self._find("began in a run that ends", name)
        elif row.state in ENDED and before.state == "none":
            is_skipped = row.state == "skipped" and (self._runs[run].is_ended or run in self._ending)
            if book.ruled.starts and is_skipped:
                return
            if row.state == book.ruled.stopped_as and book.asks("STOP"):
                book.stop()
            elif not book.ruled.starts or not book.ruled.is_sufficient:
                super()._check_rule(name, before)
            else:
                self._find("stopped without cause", f"{name} is {row.state}")

    # --- transactions -----------------------------------------------------------------------------

    def _judge_look(self, record: of_tasks.LookDone) -> None:
        moved = dict(self._moved)
        self._before = {name: before.state for name, before in moved.items()}
        for name, before in moved.items():
            if name in self._rule_books:
                self._check_in_time_of(self._rule_books[name], before)
        for name, book in self._rule_books.items():
            if record.by == "plan" and (name in moved or book.snapshot is not None):
                self._check_act(book, moved.get(name))
            book.snapshot = None
        for name in moved:
            self._note_move(name, moved[name])
        for name, book in self._rule_books.items():
            if name in self._tasks:
                self._look_at(book)
        super()._judge_look(record)

    def _note_move(self, name: str, before: of_tasks.Moved) -> None:
        row = self._tasks[name].row
        is_by_the_end = before.state == "none" and self._runs[name.rpartition("/")[0]].is_ended
        if (row.state in ENDED) is not (before.state in ENDED) and not is_by_the_end:
            self._end_asks(name, row)
        self._since[name] = self._at
        if before.state in (*ENDED, "none", "restarting") or name not in self._under_way_since:
            self._under_way_since[name] = self._at
        book = self._rule_books.get(name)
        if book is not None and _state_of(before) == "starting" and book.ruled.overlap != "each":
            for one in self._by_hand(book):  # it may have joined that start
                one.is_due = False
        if book is None or row.state not in ENDED:
            return
        for one in book.asks("STOP"):  # if it has ended before it was stopped nothing is to be done
            one.is_due = False

    def _check_act(self, book: RuleBook, before: of_tasks.Moved | None) -> None:
        """Planning has moved a task, or what it has started with."""
        row = self._tasks[book.task].row
        if before is None:
            if self._state(book) != "starting" or book.ruled.overlap == "each":
                self._find("started without cause", f"{book.task} is {row.state}, and is started by {book.snapshot}")
            self._check_start(book, is_joined=True)
        elif row.state in _BEGUN:
            is_by_rules = book.snapshot is not None or bool(self._by_hand(book)) or before.state != "none"
            is_of_another = before.state == "up_for_retry" and book.ruled.overlap == "each"
            if is_of_another and not self._may_end(book, "RESTART", "STOP"):
                self._find("started without cause", f"a try of {book.task} by the next signal")
            if is_by_rules or book.ruled.starts:
                self._check_start(book, is_joined=False)
            else:
                super()._check_rule(book.task, before)
        elif row.state == "restarting":
            self._check_cause_of_end(book, "started without cause", "RESTART", "STOP")
        elif before.state != "none" and row.state == book.ruled.stopped_as:
            self._check_cause_of_end(book, "stopped without cause", "STOP")
            book.stop()

    def _by_hand(self, book: RuleBook) -> list[Ask]:
        return [one for one in book.asks(*STARTING) if one.is_by_hand]

    def _check_cause_of_end(self, book: RuleBook, kind: str, *actions: str) -> None:
        if not self._may_end(book, *actions):
            self._find(kind, f"{book.task} is {self._tasks[book.task].row.state}, and {book.left} is left")

    def _may_end(self, book: RuleBook, *actions: str) -> bool:
        """Whether anything asks for the end of what is under way."""
        met = book.met() or []
        return bool(book.asks(*actions)) or ("RESTART" in actions and any(one.action == "RESTART" for one in met))

    def _check_start(self, book: RuleBook, *, is_joined: bool) -> None:
        """A task is started, with a version for each rule that has met it."""
        rules, starts = book.rules, book.snapshot or ()
        by_hand, what = self._by_hand(book), f"{book.task} by {starts}"
        causes = [name for name, version in starts if name in rules and book.is_start(rules[name], version)]
        necessary = {name for name in rules if book.is_necessary(name)}
        is_together = bool(necessary) and necessary <= dict(starts).keys() and self._held(book)
        if not by_hand and not is_joined and not is_together and not any(name not in necessary for name in causes):
            self._find("started without cause", what)
        for name, version in starts:
            if name in rules:
                self._check_version(book, name, version, is_joined=is_joined)
        is_each = book.ruled.overlap == "each" and bool(starts)  # others by hand are put off
        done = [one for one in book.left if one.is_by_hand and (not is_each or one.rule in dict(starts))]
        for stop in book.asks("STOP"):
            stop.is_due = stop.is_due and not any(one.number > stop.number for one in done if one.action in STARTING)
        book.left = [one for one in book.left if one not in done]

    def _check_version(self, book: RuleBook, name: str, version: int, *, is_joined: bool) -> None:
        rule, what = book.rules[name], f"{book.task} by version {version} of {book.rules[name].key or name}"
        ask = book.version(name, version)
        if ask is None:
            self._find("started without cause", what)
        elif ask.action == "STOP":
            self._find("started without cause", f"{what}, which is a stop")
        elif book.is_start(rule, version) and not rule.ended and book.has_come_back(ask):
            self._find("a start came back", what)
        for one in book.asks("STOP", "RESTART"):  # what is done by a later start
            one.is_due = one.is_due and not (ask is not None and one.number < ask.number)
        last = book.started.get(name, 0)
        if version <= last and not (is_joined and version == last):
            self._find("acted twice", f"{what}, after {last}")
        is_start = book.is_start(rule, version)
        if book.ruled.overlap == "each" and is_start and rule.condition == "sufficient" and rule.key:
            for one in book.passed_over(name, version):
                self._find("start lost", f"{what}: {one} was to be before")
        book.start(name, version)

    # --- what has to be done by now ---------------------------------------------------------------

    def _look_at(self, book: RuleBook) -> None:
        state = self._state(book)
        if book.ruled.overlap == "ignore" and state in UNDER_WAY:
            for one in book.left:
                one.is_due = one.is_due and one.action != "START"
        is_ready = self._is_ready(book)
        book.ready_since = None if not is_ready else self._at if book.ready_since is None else book.ready_since
        self._check_in_time_of(book, self._tasks[book.task].row)

    def _check_in_time_of(self, book: RuleBook, row: of_tasks.Moved) -> None:
        """What a task in this state until now was asked for has to be done by now, where nothing goes wrong."""
        dag, run, _ = book.task.split("/")
        run, state = f"{dag}/{run}", _state_of(row)
        if self._runs[run].is_ended or run not in self._begun_at:
            return
        may_start = run not in self._ending and not self._paused.get(dag)
        could_at = max(self._begun_at[run], self._unpaused_at.get(dag, 0.0), 0.0 if self._is_calm else SETTLED_S)
        if may_start and (row.state in FREE or (state == "starting" and book.ruled.overlap != "each")):
            since = max(could_at, self._since.get(book.task, 0.0))
            is_of_another = row.state == "up_for_retry" and book.ruled.overlap == "each"  # it ends with all its retries
            due = [one for one in book.due() if one.action == "RESTART" or not is_of_another]
            # What came before a step was returned, which seemed to run, counts for the next start, or for this one.
            if row.by == "return_step" and row.state == "scheduled":
                due = [one for one in due if one.at > row.at]
            # One by hand that joins a start leaves nothing to be seen.
            due = [one for one in due if not (one.is_by_hand and state == "starting")]
            late = [one for one in due if self._at - max(since, one.at) > LATE_S]
            if book.ready_since is not None and not is_of_another and self._at - max(since, book.ready_since) > LATE_S:
                late += book.met() or []
            for one in (one for one in late if one.is_due):
                self._find("start lost", f"{book.task} is {row.state}, and was to start by {one}")
                one.is_due = False
        if state not in (*ENDED, "restarting"):
            since = max(could_at, self._under_way_since.get(book.task, 0.0))
            for one in book.asks("STOP", *(("RESTART",) if may_start else ())):  # a stop acts in a pause as well
                is_restart = one.action == "RESTART"
                is_over = book.is_both(one) if not is_restart else state not in UNDER_WAY or book.is_taken_back(one)
                if one.is_due and not is_over and self._at - max(since, one.at) > LATE_S:
                    self._find("stopped and running", f"{book.task} is {row.state}, and was to end by {one}")
                    one.is_due = False


def _state_of(row: of_tasks.Moved) -> str:
    return "starting" if row.state == "scheduled" and not row.method else row.state


def _is_ruled(dag: Dag) -> bool:
    return any(task.ruled is not None for task in dag.tasks)


def check(plan: SignalScenario, history: Iterable[Record]) -> list[Finding]:
    """Return everything that is wrong with the history of a scenario."""
    return RuleChecker(plan).check(history)
