"""Judges a history of tasks with runs for signals: beside what its base looks for, what I32 promises, and `end_on`.

- ``a signal passed over``: it has met the schedule of a DAG, and is kept for no run
- ``kept twice``, ``kept without cause``, ``kept out of order``, ``not what was sent``: what is kept for the runs
- ``a run lost``: signals wait, the contract of their DAG has enough of them, and there is no run; or they are gone
- ``in two runs``: a signal is given to another run than before
- ``a run without cause``: it has not the signals that its contract says
- ``a run while paused``, ``too many runs``
- ``not started``, ``started beside an open run``: a user has sent signals with a run unless one is open
- ``ended without cause``: a run is to end by no signal that counts for it, or by one that has ended it before
- ``an end lost``: a signal was to end a run, and it goes on
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from tests.proof.simulation.checker import Finding
from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.checker import EARLY_S, LATE_S
from tests.proof.simulation.tasks.scenario import Dag
from tests.proof.simulation.tasks.signals import records
from tests.proof.simulation.tasks.signals.checker import SETTLED_S
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.jobs.checker import JobChecker
from tests.proof.simulation.tasks.signals.plans import A_USER, canonical
from tests.proof.simulation.tasks.signals.records import RunSignal, SignalStored
from tests.proof.simulation.tasks.signals.rules.books import Ask, RuleBook
from tests.proof.simulation.tasks.signals.rules.plans import Rule
from tests.proof.simulation.tasks.signals.runs.plans import RunsOn

_Place = tuple[str, int]  # a rule of a DAG, and a version


class _DagBook(msgspec.Struct):
    """The signals of one DAG: those that have met its rules ``due``, and what is kept of them, by number of the row."""

    name: str
    plan: RunsOn
    runs_max: int
    due: dict[_Place, SignalStored] = {}
    kept: dict[int, RunSignal] = {}
    sent_at: dict[int, float] = {}
    ready_since: float | None = None
    is_late: bool = False

    def waiting(self) -> list[RunSignal]:
        """Return what waits, the oldest first."""
        return [one for _, one in sorted(self.kept.items()) if not one.run]

    def passed_over(self) -> list[_Place]:
        """Return what is due and is not kept."""
        places = {(one.rule, one.version) for one in self.kept.values()}
        return [place for place in self.due if place not in places]

    def is_ready(self, now: float) -> bool:
        """Whether what waits is enough for a run."""
        waiting = self.waiting()
        match self.plan.contract:
            case "all":
                return {one.rule for one in waiting} == {rule.name for rule in self.plan.rules}
            case "batch":
                return len(waiting) >= self.plan.count or self._is_over(waiting, now)
            case _:
                return bool(waiting)

    def _is_over(self, signals: Iterable[RunSignal], now: float) -> bool:
        first = min((self.sent_at[one.number] for one in signals), default=float("inf"))
        return self.plan.seconds is not None and now >= first + self.plan.seconds - EARLY_S

    def is_by_contract(self, taken: list[RunSignal], now: float) -> bool:
        """Whether a run has these signals by right, in the transaction in which it gets them."""
        own = [one for one in taken if not one.is_superseded]
        others = [one for one in taken if one.is_superseded]
        still = [one.number for one in self.waiting()]
        is_oldest = all(one.number < min(still, default=one.number + 1) for one in taken)
        match self.plan.contract:
            case "each":
                return len(own) == 1 and not others and is_oldest
            case "latest":
                is_newest = len(own) == 1 and all(one.number < own[0].number for one in others)
                return is_newest and is_oldest
            case "batch":
                is_whole = len(own) == self.plan.count or (len(own) < self.plan.count and self._is_over(own, now))
                return bool(own) and is_whole and not others and is_oldest
            case _:
                return {one.rule for one in own} == {rule.name for rule in self.plan.rules} and not others


class _End(msgspec.Struct):
    """A signal that is to end a run."""

    key: str
    version: int
    at: float


class RunsChecker(JobChecker):
    """Judges a history of tasks."""

    def __init__(self, plan: SignalScenario) -> None:
        super().__init__(plan)
        self._dag_books = {
            dag.name: _DagBook(dag.name, dag.runs_on, dag.max_active_runs)
            for dag in plan.dags
            if dag.runs_on is not None
        }
        self._taken: dict[str, list[RunSignal]] = {}  # by run, in the transaction that is being told
        self._new_runs: list[of_tasks.RunMoved] = []
        self._to_end: dict[str, list[_End]] = {}  # by run: signals that are to end it
        self._end_met: dict[tuple[str, str], int] = {}
        self._made: list[records.RuleMade] = []
        self._order: dict[str, int] = {}  # runs in the order of their creation
        self._stood: dict[tuple[str, str], int] = {}  # the newest version of a key when a run ended
        self._starting = ""
        self._was_open = False
        self._ended_by_signal: set[str] = set()  # runs, in the transaction that is being told
        self._took_end: set[str] = set()  # runs in which a signal has acted, in the same

    def _take(self, record: Record) -> None:
        match record:
            case records.RunSignal():
                self._see_kept(record)
            case records.RunToEnd():
                self._see_to_end(record)
            case records.EndMet():
                self._see_end_met(record)
            case records.RuleMade():
                self._made.append(record)
            case records.Starting():
                self._starting = record.dag
                self._was_open = any(
                    not row.is_ended and run not in self._ending
                    for run, row in self._runs.items()
                    if run.split("/")[0] == record.dag
                )
            case records.Started():
                pass  # the transaction says it
            case _:
                super()._take(record)

    # --- what waits for runs ----------------------------------------------------------------------

    def _see_signal(self, record: SignalStored) -> None:
        super()._see_signal(record)
        for book in self._dag_books.values():
            for rule in book.plan.rules:
                if rule.key == record.key and not record.run and rule.value in (None, canonical(record.value)):
                    book.due[rule.name, record.version] = record
        for run, row in self._runs.items():
            if not row.is_ended:
                self._note_end(run, record)

    def _see_kept(self, record: RunSignal) -> None:
        book = self._dag_books[record.dag]
        before = book.kept.get(record.number)
        what = f"{record.dag}: version {record.version} of {record.key}"
        if record.is_gone:
            if before is not None and not before.run:
                self._find("a run lost", f"{what} waits no more, by {record.by}")
            return
        if before is None:
            self._check_kept(book, record, what)
        book.kept[record.number] = record
        if record.run and (before is None or before.run != record.run):
            if before is not None and before.run:
                self._find("in two runs", f"{what} was in {before.run}, and is in {record.run}")
            self._taken.setdefault(record.run, []).append(record)

    def _check_kept(self, book: _DagBook, record: RunSignal, what: str) -> None:
        stored = book.due.get((record.rule, record.version))
        book.sent_at[record.number] = self._at if stored is None else stored.at
        same = [one.version for one in book.kept.values() if one.rule == record.rule]
        if stored is None:
            self._find("kept without cause", what)
        elif canonical(stored.value) != canonical(record.value):
            self._find("not what was sent", f"{what} is {record.value}, not {stored.value}")
        if record.version in same:
            self._find("kept twice", what)
        elif same and record.version < max(same):
            self._find("kept out of order", f"{what}, after {max(same)}")

    def _check_new_run(self, run: of_tasks.RunMoved) -> None:
        dag = run.run.split("/")[0]
        taken = self._taken.pop(run.run, [])
        book = self._dag_books.get(dag)
        if run.by != "create_event_runs" or book is None:
            if taken:
                self._find("a run without cause", f"{run.run} has {taken}, by {run.by}")
            return
        if not book.is_by_contract(taken, self._at):
            self._find("a run without cause", f"{run.run} has {taken}, and {book.waiting()} wait")
        if self._paused.get(dag):
            self._find("a run while paused", run.run)
        if self._open_runs(dag) > book.runs_max:
            self._find("too many runs", f"{run.run} beside {self._open_runs(dag) - 1} others")

    def _open_runs(self, dag: str) -> int:
        return sum(not row.is_ended for run, row in self._runs.items() if run.split("/")[0] == dag)

    def _check_runs_in_time(self, book: _DagBook) -> None:
        """Where nothing goes wrong, what meets a rule is kept at once, and what waits has its run as soon as it may."""
        may_begin = not self._paused.get(book.name) and self._open_runs(book.name) < book.runs_max
        if not (may_begin and book.is_ready(self._at)):
            book.ready_since = None
        elif book.ready_since is None:
            book.ready_since = self._at
        could_at = 0.0 if self._is_calm else SETTLED_S
        if book.ready_since is not None and self._at - max(book.ready_since, could_at) > LATE_S and not book.is_late:
            book.is_late = True
            self._find("a run lost", f"{book.name}: {book.waiting()} wait since {book.ready_since}")
        for place in book.passed_over():
            if self._at - max(book.due[place].at, could_at) > LATE_S:
                self._find("a signal passed over", f"{book.name}: {place}")
                del book.due[place]

    # --- with a run -------------------------------------------------------------------------------

    def _check_started(self) -> None:
        """The transaction of a user who sends signals with a run unless one is open."""
        dag, self._starting = self._starting, ""
        made = [run.run for run in self._new_runs if run.by == A_USER and run.run.split("/")[0] == dag]
        is_due = bool(self._new) and not self._was_open
        if is_due and len(made) != 1:
            self._find("not started", f"{dag}: {[(one.key, one.version) for one in self._new]} made {made}")
        elif made and not is_due:
            self._find("started beside an open run", f"{made}, by {len(self._new)} new signals")

    def _sent_with(self, run: str, key: str) -> list[SignalStored]:
        """Return the signals under a key that were sent with a run, which is new."""
        is_with = any(one.run == run and one.by == A_USER for one in self._new_runs)
        return [one for one in self._new if one.key == key] if is_with else []

    def _newest_before(self, run: str, key: str) -> int:
        sent = self._sent_with(run, key)
        return sent[0].version - 1 if sent else super()._newest_before(run, key)

    def _make_books(self, run: str, dag: Dag) -> None:
        super()._make_books(run, dag)
        for book in self._books_of(run):
            for rule in book.ruled.rules:
                for stored in self._sent_with(run, rule.key) if rule.key else ():
                    if book.takes(rule, stored):
                        number = self._asked_as[stored.key, stored.version]
                        book.ask(Ask(number, self._at, rule.name, book.action(rule, stored.value), stored.version))

    # --- since the run before ---------------------------------------------------------------------

    def _go_on_from_before(self, made: records.RuleMade) -> None:
        """A rule is made that goes on where the same one of the run before stood, if that has ended."""
        book, run = self._rule_books[made.task], made.task.rpartition("/")[0]
        rule = book.rules.get(made.rule)
        earlier = [one for one in self._order if one.split("/")[0] == run.split("/")[0]]
        earlier = [one for one in earlier if self._order[one] < self._order[run]]
        if rule is None or rule.since != "last_run" or not earlier or not self._runs[earlier[-1]].is_ended:
            return
        log, last = self._log(rule.key), self._starts[run, rule.key]
        stood = min(last, self._stood[earlier[-1], rule.key])
        book.started[rule.name] = stood
        for stored in log.kept(stood, last, run):
            if book.takes(rule, stored):
                number = self._asked_as[stored.key, stored.version]
                book.ask(Ask(number, self._at, rule.name, book.action(rule, stored.value), stored.version))
        book.sort()

    # --- what ends runs ---------------------------------------------------------------------------

    def _end_rules(self, run: str) -> tuple[Rule, ...]:
        return self._scenario.dag(run.split("/")[0]).end_on

    def _note_end(self, run: str, record: SignalStored) -> None:
        for rule in self._end_rules(run):
            is_met = rule.key == record.key and rule.value in (None, canonical(record.value))
            if is_met and record.run in ("", run):
                self._to_end.setdefault(run, []).append(_End(record.key, record.version, self._at))

    def _see_end_met(self, record: records.EndMet) -> None:
        """What has met the rule acts in the transaction in which it is taken."""
        before = self._end_met.get((record.run, record.key), 0)
        if not record.version and before:
            self._act_on_end(record.run, record.key, before, record.by)
        self._end_met[record.run, record.key] = record.version

    def _act_on_end(self, run: str, key: str, version: int, by: str) -> None:
        left = self._to_end.get(run, [])
        causes = [one for one in left if one.key == key and one.version == version]
        self._took_end.add(run)
        if by == "plan" and not causes:
            self._find("ended without cause", f"{run} by version {version} of {key}")
        self._to_end[run] = [one for one in left if one.key != key or one.version > version]

    def _see_to_end(self, record: records.RunToEnd) -> None:
        if not record.is_ending:
            self._ending.discard(record.run)
        elif record.by == "plan":
            self._ended_by_signal.add(record.run)
            self._ending.add(record.run)
        elif record.by != A_USER:
            self._find("ended without cause", f"{record.run} by {record.by}")

    def _check_ends(self) -> None:
        """What has met a rule has its run end, and no run is to end by anything else."""
        for run in self._ended_by_signal - self._took_end:
            self._find("ended without cause", f"{run} by no signal")
        for run in self._took_end:
            if run not in self._ending and not self._runs[run].is_ended:
                self._find("an end lost", f"{run}: what was to end it is taken, and it goes on")
        self._ended_by_signal, self._took_end = set(), set()
        for run, ends in self._to_end.items():
            row = self._runs[run]
            if row.is_ended or run in self._ending or run not in self._begun_at:
                continue
            could_at = max(self._begun_at[run], 0.0 if self._is_calm else SETTLED_S)
            late = [one for one in ends if self._at - max(one.at, could_at) > LATE_S]
            if late:
                self._find("an end lost", f"{run} was to end by {late}")
                self._to_end[run] = []

    def _check_in_time_of(self, book: RuleBook, row: of_tasks.Moved) -> None:
        if not self._to_end.get(book.task.rpartition("/")[0]):  # else it may be to end at any time
            super()._check_in_time_of(book, row)

    # --- runs and transactions --------------------------------------------------------------------

    def _see_run(self, record: of_tasks.RunMoved) -> None:
        before = self._runs.get(record.run)
        if before is None:
            self._new_runs.append(record)
            self._order[record.run] = len(self._order)
        super()._see_run(record)
        if before is None:
            for key in {rule.key for rule in self._end_rules(record.run)}:
                for stored in self._sent_with(record.run, key):
                    self._note_end(record.run, stored)
        elif before.is_ended is not record.is_ended:
            self._to_end[record.run] = []
            self._stood |= {(record.run, key): log.last for key, log in self._logs.items()}

    def _judge_look(self, record: of_tasks.LookDone) -> None:
        for made in self._made:
            if self._scenario.task(made.task).ruled is not None and made.task in self._rule_books:
                self._go_on_from_before(made)
        self._made = []
        if self._starting and record.by == A_USER:
            self._check_started()
        for run in self._new_runs:
            self._check_new_run(run)
        self._new_runs = []
        for name, taken in self._taken.items():
            self._find("a run without cause", f"{name}, which was there, is given {taken}")
        self._taken = {}
        self._check_ends()
        super()._judge_look(record)
        for book in self._dag_books.values():
            self._check_runs_in_time(book)

    def _judge_rest(self, record: of_tasks.AllRested) -> None:
        for book in self._dag_books.values():
            for place in book.passed_over():
                self._find("a signal passed over", f"{book.name}: {place}, at rest")
            if book.is_ready(self._at):
                self._find("a run lost", f"{book.name}: {book.waiting()} wait at rest")
        super()._judge_rest(record)


def check(plan: SignalScenario, history: Iterable[Record]) -> list[Finding]:
    """Return everything that is wrong with the history of a scenario."""
    return RunsChecker(plan).check(history)
