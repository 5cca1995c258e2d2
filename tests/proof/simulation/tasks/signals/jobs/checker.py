"""Judges a history of tasks: beside what its base looks for, what I29 promises of decisions and times, and I30.

- ``decided by nobody``, ``not what was decided``: a rule is met by what no code has decided, or decided otherwise
- ``not decided``: a signal was passed over about which no code has decided, and which was not given up
- ``given up too early``: before its third try
- ``decided again``, ``decided out of order``: code is asked about a signal that is decided, or before one sent earlier
- ``asked twice``: two supervisors ask about one task at a time, though nothing has gone wrong
- ``started early``: the time has met a rule before it was due; ``a missed start was made up``: more than once
- ``out of step``: the next time is not the one that the rule says
- ``start lost``: the time has not met a rule that was due; ``started without cause``: it has, in a run that has ended
- ``a move cost a try``: an endless task has lost its worker, and its try with it, or what is left of its tries
- ``on two workers``: a task begins, and the executor that had it has not said that its last worker is gone, under a
  lease that holds; of an endless task the worker itself is to be gone
- ``taken from the living``: an endless task was taken from a supervisor whose lease holds
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import msgspec
from cronsim import CronSim
from tests.proof.simulation import records as of_pair
from tests.proof.simulation.checker import Finding
from tests.proof.simulation.database import EPOCH_OF_TIME
from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.checker import EARLY_S, LATE_S, KnownTask
from tests.proof.simulation.tasks.signals import records
from tests.proof.simulation.tasks.signals.books import SAME_TIME_S
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.plans import canonical
from tests.proof.simulation.tasks.signals.rules.books import Ask, RuleBook
from tests.proof.simulation.tasks.signals.rules.checker import RuleChecker
from tests.proof.simulation.tasks.signals.rules.plans import BY_HAND, Rule

TRIES = 3  # of a decision
HEALTHY_S = 60.0  # then an endless task has its tries again
_MOVES = frozenset(("lose_worker", "adopt"))


class _Open(NamedTuple):
    """A question that nobody has answered yet."""

    supervisor: int
    task: str


class _EndlessBook(msgspec.Struct):
    """The worker of an endless task, by the token of its step."""

    token: str = ""
    owner: int = 0
    is_gone: bool = True
    began_at: float = 0.0


class JobChecker(RuleChecker):
    """Judges a history of tasks."""

    def __init__(self, plan: SignalScenario) -> None:
        super().__init__(plan)
        self._numbers_of: dict[tuple[str, int], int] = {}  # signals in the order in which they were sent
        self._questions: dict[str, _Open] = {}
        self._answered: set[tuple[str, str, int]] = set()  # by the code of a task: key and version
        self._asked_upto: dict[tuple[str, str], int] = {}  # by task and key: the newest version answered
        self._failures: Counter[tuple[str, str, int]] = Counter()
        self._undecided: dict[tuple[str, str], records.Undecided] = {}
        self._clocks: dict[tuple[str, str], records.Ticked] = {}
        self._late: set[tuple[str, str, int]] = set()  # starts by the time that did not come
        self._endless: dict[str, _EndlessBook] = {}
        self._over: set[int] = set()  # epochs
        self._alive: dict[str, tuple[str, int]] = {}  # endless tasks and their supervisors, by the token of the step
        self._owners: dict[str, int] = {}  # the epochs under which steps were dispatched, by token
        self._workers: dict[str, str] = {}  # the token of the newest step, by task
        self._over_steps: set[str] = set()  # tokens of steps of which the executor has said that they are over

    def _take(self, record: Record) -> None:
        match record:
            case records.Questioned():
                self._check_question(record)
            case records.Decided():
                self._check_decision(record)
            case records.Undecided():
                self._see_decisions(record)
            case records.Ticked():
                self._see_tick(record)
            case records.WorkerGone():
                self._alive.pop(record.token, None)
                for book in self._endless.values():
                    book.is_gone |= book.token == record.token
            case of_tasks.StepTold() if record.how != "asked":
                self._over_steps.add(record.token)
                super()._take(record)
            case records.QuestionOver():
                self._questions.pop(record.token, None)
            case records.LeaseOver():
                self._over.add(record.epoch)
            case records.RunEnding():
                self._end_endless(record.run)
                super()._take(record)
            case of_pair.SupervisorEnded():
                by = record.supervisor
                self._questions = {token: one for token, one in self._questions.items() if one.supervisor != by}
                self._alive = {token: one for token, one in self._alive.items() if one[1] != by}
                super()._take(record)
            case _:
                super()._take(record)

    def _see_signal(self, record: records.SignalStored) -> None:
        super()._see_signal(record)
        self._numbers_of[record.key, record.version] = len(self._numbers_of)

    # --- decisions --------------------------------------------------------------------------------

    def _rules_about(self, task: str, key: str, version: int) -> list[Rule]:
        """Return the rules of a task that a version meets."""
        book, stored = self._rule_books[task], self._log(key).version(version)
        return [rule for rule in book.ruled.rules if stored is not None and book.takes(rule, stored.stored)]

    def _check_question(self, record: records.Questioned) -> None:
        numbers = [self._numbers_of.get(signal, -1) for signal in record.signals]
        what = f"{record.task}: {record.signals}"
        if numbers != sorted(numbers):
            self._find("decided out of order", what)
        for key, version in record.signals:
            rules = self._rules_about(record.task, key, version)
            seen = [self._undecided[record.task, rule.name].seen for rule in rules]
            if all(version <= one for one in seen):
                self._find("decided again", f"{record.task}: version {version} of {key}, and {seen} are seen")
        others = [one for one in self._questions.values() if one.task == record.task]
        if others and self._is_calm:
            self._find("asked twice", f"{what}, by {record.supervisor}, and {others}")
        self._questions[record.token] = _Open(record.supervisor, record.task)

    def _check_decision(self, record: records.Decided) -> None:
        place = (record.task, record.key, record.version)
        if not record.action:
            self._failures[place] += 1
            return
        self._answered.add(place)
        stored = self._log(record.key).version(record.version)
        ruled = self._plan.task(record.task).ruled
        due = ""
        if stored is not None and ruled is not None and ruled.decides is not None:
            due = ruled.decides.action(canonical(stored.stored.value))
        if record.action != due:
            self._find(
                "not what was decided", f"{record.task}: {record.action} for version {record.version}, not {due}"
            )

    def _see_decisions(self, record: records.Undecided) -> None:
        """The row of a rule has changed about which code decides."""
        before = self._undecided.get((record.task, record.rule))
        self._undecided[record.task, record.rule] = record
        book = self._rule_books[record.task]
        rule = book.rules.get(record.rule)
        if rule is None or before is None or not rule.key:
            return
        what = f"{record.task} by {rule.key}"
        if record.given_up and record.given_up != before.given_up:
            tries = self._failures[record.task, rule.key, record.given_up]
            if tries < TRIES:
                self._find("given up too early", f"{what}: version {record.given_up} after {tries} tries")
            self._give_up(book, rule, record.given_up)
        if record.by == "settle_decisions":
            self._check_settled(book, rule, before, record)
        if record.met and (record.met, record.decided) != (before.met, before.decided):
            self._check_met(book, rule, record)

    def _check_settled(self, book: RuleBook, rule: Rule, before: records.Undecided, now: records.Undecided) -> None:
        log, run = self._log(rule.key), now.task.rpartition("/")[0]
        for stored in log.kept(before.seen, now.seen, run):
            place = (now.task, rule.key, stored.version)
            if book.takes(rule, stored) and place not in self._answered and now.given_up != stored.version:
                self._find("not decided", f"{now.task}: version {stored.version} of {rule.key} was passed over")
        for ask in book.every:
            if ask.rule == rule.name and ask.version <= now.seen and ask.at == math.inf:
                ask.at = self._at

    def _check_met(self, book: RuleBook, rule: Rule, record: records.Undecided) -> None:
        """A version is to act. A start behind a restart is a restart."""
        what = f"{record.task}: version {record.met} of {rule.key} is {record.decided or 'not decided'}"
        ask = book.version(rule.name, record.met)
        if (record.task, rule.key, record.met) not in self._answered and record.met != record.given_up:
            self._find("decided by nobody", f"{what}, by {record.by}")
        elif ask is None:
            self._find("started without cause", what)
        elif record.decided != ask.action and (record.decided, ask.action) != ("RESTART", "START"):
            self._find("not what was decided", f"{what}, not {ask.action}")

    def _give_up(self, book: RuleBook, rule: Rule, version: int) -> None:
        ask = book.version(rule.name, version)
        if ask is not None:
            ask.action, ask.is_due = "NONE", False

    # --- the time ---------------------------------------------------------------------------------

    def _see_tick(self, record: records.Ticked) -> None:
        """The row of a rule about the time is there, or has changed."""
        place = (record.task, record.rule)
        before, self._clocks[place] = self._clocks.get(place), record
        book = self._rule_books[record.task]
        rule = book.rules[record.rule]
        what = f"{record.task} {rule.cron or rule.every_s}, start {record.version}"
        if before is None:
            self._check_next_time(rule, record, self._at, what)
        elif record.version == before.version:
            if record.next_at is not None and before.next_at is None:  # its run goes on
                due = self._at if rule.every_s else _after(rule.cron, self._at)
                if abs(record.next_at - due) > EARLY_S:
                    self._find("out of step", f"{what}: next at {record.next_at}, and its run goes on")
            return
        elif before.next_at is None:
            self._find("started without cause", f"{what}, in a run that has ended")
        else:
            if record.version != before.version + 1:
                self._find("a missed start was made up", f"{what}, after {before.version}")
            if self._at < before.next_at - EARLY_S:
                self._find("started early", f"{what}, by {before.next_at - self._at:.3f} s")
            self._check_next_time(rule, record, before.next_at, what)
        if record.version:
            ask = Ask(self._number(), self._at, rule.name, rule.action, record.version)
            ask.is_due = self._is_due(book, ask)
            book.ask(ask)

    def _check_next_time(self, rule: Rule, record: records.Ticked, last: float, what: str) -> None:
        """The next time is the first of the rule from now on; a time that is now is it, or has been."""
        dues = [_after(rule.cron, self._at)]
        if rule.every_s:
            gone = [math.floor((self._at - last + by_s) / rule.every_s) for by_s in (SAME_TIME_S, -SAME_TIME_S)]
            dues = [last + rule.every_s * (number + 1) for number in gone]
        if record.next_at is None or all(abs(record.next_at - due) > EARLY_S for due in dues):
            is_made_up = record.next_at is not None and record.next_at <= self._at
            kind = "a missed start was made up" if is_made_up else "out of step"
            self._find(kind, f"{what}: next at {record.next_at}, not {dues[0]}, and it is {self._at}")

    def _check_clocks(self) -> None:
        for (task, rule), clock in self._clocks.items():
            run = self._runs[task.rpartition("/")[0]]
            if clock.next_at is not None and run.is_ended:
                self._find("started without cause", f"{task} is to start at {clock.next_at}, and its run has ended")
                self._clocks[task, rule] = msgspec.structs.replace(clock, next_at=None)
            elif clock.next_at is None or not self._is_calm or (task, rule, clock.version) in self._late:
                continue
            elif self._at - clock.next_at > LATE_S:
                self._late.add((task, rule, clock.version))
                self._find("start lost", f"{task} was to start at {clock.next_at}")

    # --- endless tasks ----------------------------------------------------------------------------

    def _is_endless(self, task: str) -> bool:
        return task in self._rule_books and self._plan.task(task).endless

    def _is_known(self, now: of_tasks.Moved) -> bool:
        if self._is_endless(now.task) and now.by in _MOVES and now.old == "running":
            return True  # to what is looked at elsewhere
        return super()._is_known(now)

    def _check_transition(self, task: KnownTask, before: of_tasks.Moved, now: of_tasks.Moved) -> None:
        super()._check_transition(task, before, now)
        if now.owner:
            self._owners[now.token] = now.owner
        if not self._is_endless(now.task):
            return
        if now.by == "adopt" and now.old == "running" and before.owner not in self._over:
            self._find("taken from the living", f"{now.task} from epoch {before.owner}")
        if now.by in _MOVES and now.old == "running":
            self._check_move(task, before, now)
        elif now.by == "fail" and now.tries_max != before.tries_max:
            ran_s = self._at - self._endless[now.task].began_at
            if ran_s < HEALTHY_S or now.tries_max < before.tries_max:
                self._find("too many tries", f"{now.task} has {now.tries_max} after {ran_s:.3f} s")

    def _check_outcome(self, task: KnownTask, before: of_tasks.Moved, now: of_tasks.Moved) -> None:
        is_move = self._is_endless(now.task) and now.by == "lose_worker" and now.old == "running"
        if not is_move or before.token != now.said:
            super()._check_outcome(task, before, now)

    def _check_move(self, task: KnownTask, before: of_tasks.Moved, now: of_tasks.Moved) -> None:
        tries = [(row.state, row.try_number, row.tries_max) for row in (before, now)]
        if tries[1] != ("scheduled", *tries[0][1:]):
            self._find("a move cost a try", f"{now.task} was {tries[0]} and is {tries[1]} by {now.by}")
        task.left, task.given_at, task.deferral = self._kept(task), None, 0
        self._begun_tries.discard((now.task, now.try_number))

    def _see_step(self, record: of_tasks.StepBegan | of_tasks.StepRan | of_tasks.StepAnswered) -> None:
        super()._see_step(record)
        if not isinstance(record, of_tasks.StepBegan):
            return
        owner = self._owners.get(record.token, 0)
        if self._is_endless(record.task):
            self._alive[record.token] = (record.task, record.supervisor)
        if owner in self._fenced:
            return  # a worker of a supervisor that does not know yet that its lease is over
        last = self._workers.get(record.task)
        if last is not None and last not in self._over_steps and self._owners.get(last) not in self._over:
            self._find("on two workers", f"{record.task} by {record.token}, and {last} is not over")
        self._workers[record.task] = record.token
        if self._is_endless(record.task):
            book = self._endless.setdefault(record.task, _EndlessBook())
            if not book.is_gone and book.owner not in self._over:
                self._find("on two workers", f"{record.task} by {record.token}, and {book.token} has not ended")
            self._endless[record.task] = _EndlessBook(record.token, owner, is_gone=False, began_at=self._at)

    def _end_endless(self, run: str) -> None:
        """A user wants a run to end: its endless tasks are stopped."""
        for book in self._books_of(run):
            if self._plan.task(book.task).endless:
                number = self._number()
                book.ask(Ask(number, self._at, f"{BY_HAND} STOP", "STOP", -number, is_due=False))

    # --- the rest ---------------------------------------------------------------------------------

    def _judge_look(self, record: of_tasks.LookDone) -> None:
        super()._judge_look(record)
        self._check_clocks()

    def _judge_rest(self, record: of_tasks.AllRested) -> None:
        for token, (task, supervisor) in self._alive.items():
            self._find("on two workers", f"{task} has ended, and {token} has not, a worker of {supervisor}")
        super()._judge_rest(record)


def _after(cron: str, at: float) -> float:
    """Return the next time of a cron expression, in UTC."""
    if not cron:
        return math.inf
    return float((next(CronSim(cron, EPOCH_OF_TIME + timedelta(seconds=at))) - EPOCH_OF_TIME).total_seconds())


def check(plan: SignalScenario, history: Iterable[Record]) -> list[Finding]:
    """Return everything that is wrong with the history of a scenario."""
    return JobChecker(plan).check(history)
