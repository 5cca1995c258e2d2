"""Judges a history of tasks with signals: what I25 and I28 promise, and what docs/signals.md says.

Beside what its base looks for, by the kinds of `tests.proof.history.signal_history` where that has one:

- ``version missing``: a version is stored, and the one below it never was; or what was acknowledged, or goes with an
  outcome that is stored, is not in the log
- ``version twice``: a version is given again, or a signal, by its dedup, has two
- ``sent without its outcome``: a signal is stored, and the outcome that it should go with is not
- ``a signal of nobody's``: a signal is stored, and nobody has sent it, or not so, or it was sent for another run
- ``sent by an old step``: a step has sent a signal whose task was not its own any more
- ``an event sent twice``, ``an event not sent``: of a watcher whose events are signals
- ``not considered``, ``considered before its time``, ``considered twice``: a sensor has passed over a version that
  fits, has ended by one that does not count for it, or more than once
- ``overlooked``, ``late``: it waits though one fits; ``not what was sent``: its value is another
- ``gone too early``: a version, or a key, that a sensor needs is gone, or the newest of a key is
- ``not heard``: a listener was not told of a version, or was told of one twice, or out of order
- ``refused``: a step whose task is its own may not send, or listen
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

from tests.proof.history import signal_history
from tests.proof.simulation.records import Record
from tests.proof.simulation.scenario import FAULTS_UNTIL_S
from tests.proof.simulation.tasks import records as of_tasks
from tests.proof.simulation.tasks.checker import LATE_S, KnownTask
from tests.proof.simulation.tasks.records import SaidSignal
from tests.proof.simulation.tasks.signals import records
from tests.proof.simulation.tasks.signals.books import KeyBook, SensorWait, Version
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.plans import A_USER, FEED_BYTES_MAX, Listens, canonical
from tests.proof.simulation.tasks.streams.checker import Checker

SETTLED_S = FAULTS_UNTIL_S + 15.0  # all leases of supervisors that are gone have run out, and all retries are made
AUTOMATIC = "auto:"


class SignalChecker(Checker):
    """Judges a history of tasks."""

    def __init__(self, plan: SignalScenario) -> None:
        super().__init__(plan)
        self._scenario = plan
        self._logs: dict[str, KeyBook] = {}
        self._starts: dict[tuple[str, str], int] = {}  # the newest version of a key when a run was created
        self._created_at: dict[str, float] = {}  # runs
        self._sensing: dict[str, SensorWait] = {}  # by task
        self._said: dict[str, list[_Said]] = {}  # by key
        self._new: list[records.SignalStored] = []  # of the transaction that is being told
        self._dropped: list[Version] = []
        self._new_events: list[of_tasks.EventStored] = []
        self._watchers: dict[int, str] = {}  # by trigger
        self._numbers: set[tuple[str, int]] = set()  # of the events of watchers
        self._heard: dict[str, list[int]] = {}  # by token: what a step was answered, and its code has not taken yet
        self._answers: dict[str, records.Answered] = {}  # the last one of a step that listens
        self._told_new: Counter[tuple[str, str, int]] = Counter()

    def _take(self, record: Record) -> None:
        match record:
            case records.SignalStored():
                self._see_signal(record)
            case records.SignalsDropped() | records.KeyForgotten():
                self._drop(record)
            case records.WatcherAdded():
                self._watchers[record.trigger] = record.watcher
            case records.Sends():
                for one in record.signals:
                    self._said.setdefault(one.key, []).append(_Said(one, record.who, record.run))
            case records.Sent():
                self._check_sent(record)
            case records.Answered():
                self._check_answer(record)
            case records.Listened():
                self._check_listened(record)
            case records.ListenedOut():
                self._check_end_of_listening(record)
            case records.Refused():
                row = self._tasks[record.task].row
                if (row.state, row.token) == ("running", record.token):
                    self._find("refused", f"{record.task}: {record.error}")
            case of_tasks.EventStored() if record.trigger in self._watchers:
                self._new_events.append(record)
            case _:
                super()._take(record)

    # --- the log ----------------------------------------------------------------------------------

    def _log(self, key: str) -> KeyBook:
        return self._logs.setdefault(key, KeyBook(key))

    def _see_signal(self, record: records.SignalStored) -> None:
        log = self._log(record.key)
        if record.version != log.last + 1:
            kind = "version missing" if record.version > log.last else "version twice"
            self._find(kind, f"{record.key}: version {record.version} after {log.last}")
            return
        if log.with_dedup(record.dedup) is not None:
            self._find("version twice", f"{record.key}: {record.dedup} is there already, before {record.version}")
        log.add(record)
        self._new.append(record)
        if record.by == "send_signals":
            name, _, _ = self._given.get(record.said, ("", 0, 0))
            row = self._tasks[name].row if name in self._tasks else None
            if row is None or (row.state, row.token) != ("running", record.said):
                self._find("sent by an old step", f"{record.key}: version {record.version}, by {record.said}")

    def _drop(self, record: records.SignalsDropped | records.KeyForgotten) -> None:
        log = self._log(record.key)
        is_all = isinstance(record, records.KeyForgotten)
        dropped = record.versions if isinstance(record, records.SignalsDropped) else tuple(range(1, log.last + 1))
        for name, wait in self._sensing.items():
            if wait.wait.key != record.key or wait.age != log.age:
                continue
            if is_all or set(dropped).intersection(signal_history.fitting(wait.wait, wait.rows(log))):
                self._find("gone too early", f"{record.key}: {list(dropped)}, by {record.by}, and {name} waits")
        if not is_all:
            if log.last in dropped:
                self._find("gone too early", f"{record.key}: its newest version {log.last}, by {record.by}")
            self._dropped += [log.versions[number - 1] for number in dropped]
            return
        for run, key in [start for start in self._starts if start[1] == record.key]:
            del self._starts[run, key]
            if not self._runs[run].is_ended:
                self._find("gone too early", f"{key}, and {run} has not ended")
        log.begin(self._at)

    def _check_sent(self, record: records.Sent) -> None:
        what = f"{record.key}: {record.dedup or 'a signal'} was acknowledged as version {record.version}"
        count = self._log(record.key).count(record.version, record.dedup)
        self._told_new[record.key, record.dedup, record.version] += record.is_new
        if not count:
            is_there = self._log(record.key).count(record.version, "")
            self._find("version twice" if is_there else "version missing", what)
        elif self._told_new[record.key, record.dedup, record.version] > count:
            self._find("version twice", f"{what}, which is new for the second time")

    # --- who has sent -----------------------------------------------------------------------------

    def _check_senders(self) -> None:
        of_events = [one for one in self._new if one.sender.startswith("watcher ")]
        self._check_events(of_events)
        due = self._due_with_outcomes()
        for new in self._new:
            if new in of_events:
                continue
            if new.by == "store_ends":
                said = [one for one in due if (one.signal.key, one.signal.dedup) == (new.key, new.dedup)]
                if not said:
                    what = f"{new.key}: version {new.version} ({new.dedup}), by {new.sender}"
                    self._find("sent without its outcome", what)
            else:
                said = [one for one in self._said.get(new.key, ()) if one.is_of(new)]
                if not said:
                    self._find("a signal of nobody's", f"{new.key}: version {new.version} ({new.dedup}), by {new.by}")
            if said and not any(one.is_same(new) for one in said):
                self._find("a signal of nobody's", f"{new.key}: version {new.version} is {new.value} for {new.run!r}")
        for one in due:
            if self._log(one.signal.key).with_dedup(one.signal.dedup) is None:
                self._find("version missing", f"{one.signal.key}: {one.signal.dedup}, and the outcome is stored")
        self._new = []
        for version in self._dropped:  # only now: what is sent again may be trimmed by what is sent beside it
            version.is_kept = False
        self._dropped = []

    def _due_with_outcomes(self) -> list[_Said]:
        """Return the signals that go with the outcomes of this transaction."""
        due = []
        for name, _ in self._moved:
            row = self._tasks[name].row
            ran = self._ran.get(row.said) if row.by in ("succeed", "defer") and row.task == row.about else None
            if ran is not None:
                due += [_Said(one, row.said, name.rpartition("/")[0]) for one in ran.signals]
        return due

    def _check_events(self, found: list[records.SignalStored]) -> None:
        """The new events of watchers are signals, each once and in their order."""
        events, self._new_events = self._new_events, []
        due: dict[str, list[str]] = {}
        for event in events:
            plan = self._scenario.watcher(self._watchers[event.trigger])
            if (plan.name, event.number) in self._numbers and event.number >= 0:
                self._find("an event sent twice", f"{plan.name}: {event.number} is in the log again")
            self._numbers.add((plan.name, event.number))
            payload = json.dumps(plan.payload(event.number), separators=(",", ":"))
            if len(payload) > FEED_BYTES_MAX:
                payload = json.dumps({"event_id": event.row, "bytes": len(payload)})
            due.setdefault(plan.key, []).append(canonical(payload))
        for key in sorted(due.keys() | {one.key for one in found}):
            sent, wanted = [canonical(one.value) for one in found if one.key == key], due.get(key, [])
            if sent != wanted:
                kind = "an event not sent" if set(wanted) - set(sent) else "an event sent twice"
                self._find(kind, f"{key}: {sent}, and the log has {wanted}")

    # --- sensors ----------------------------------------------------------------------------------

    def _see_run(self, record: of_tasks.RunMoved) -> None:
        if record.run not in self._runs:
            dag = record.run.split("/")[0]
            self._created_at[record.run] = self._at
            for task in self._scenario.dag(dag).tasks:
                if task.sensor is not None and task.name in self._upstream[dag]:
                    self._starts[record.run, task.sensor.key] = self._log(task.sensor.key).last
        super()._see_run(record)

    def _check_sensors(self) -> None:
        """Sensors begin to wait, or have ended."""
        for name, _ in self._moved:
            row, plan = self._tasks[name].row, self._plan.task(name).sensor
            if plan is None:
                continue
            wait = self._sensing.pop(name, None)
            if row.state == "deferred":
                run, log = name.rpartition("/")[0], self._log(plan.key)
                start, created_at = self._starts.get((run, plan.key)), self._created_at[run]
                self._sensing[name] = SensorWait.begin(
                    name, plan, log, start=start, run_created_at=created_at, now=self._at
                )
            elif row.by == "consider_signals" and wait is not None:
                self._check_sensed(self._tasks[name], wait)

    def _check_sensed(self, task: KnownTask, wait: SensorWait) -> None:
        name, log = wait.wait.task, self._log(wait.wait.key)
        left = self._stored.get(name, {})
        number = int(left.get(signal_history.VERSION, "0"))
        for finding in signal_history.of_wait(wait.wait, (number,), wait.rows(log)):
            self._find(finding.kind, f"{name}: {finding.why}")
        version = log.version(number)
        if version is None:
            return
        value = json.loads(version.stored.value)
        task.left = {signal_history.VERSION: str(number)} | ({} if value is None else {"return_value": str(value)})
        if left != task.left:
            self._find("not what was sent", f"{name} has {left}, and version {number} is {value}")
        self._check_in_time_for(wait, "late", LATE_S)

    def _check_in_time_for(self, wait: SensorWait, kind: str, late_s: float) -> None:
        """A sensor has not ended until now: if a version fits, it is too late."""
        log = self._log(wait.wait.key)
        fits = [log.version(one) for one in signal_history.fitting(wait.wait, wait.rows(log)) if one > wait.wait.until]
        sent_at = min((one.stored.at for one in fits if one is not None), default=float("inf"))
        could_at = max(sent_at, wait.began_at, 0.0 if self._is_calm else SETTLED_S)
        if self._at - could_at > late_s:
            self._find(kind, f"{wait.wait.task}: version {fits[0] and fits[0].stored.version} is there since {sent_at}")

    def _check_timeout(self, now: of_tasks.Moved, deferral: Any) -> None:
        super()._check_timeout(now, deferral)
        if (wait := self._sensing.get(now.task)) is not None:
            self._check_in_time_for(wait, "overlooked", LATE_S)

    # --- listeners --------------------------------------------------------------------------------

    def _listens(self, task: str) -> Listens:
        signals = self._plan.task(task).signals
        assert signals is not None
        assert signals.listens is not None, "it listens"
        return signals.listens

    def _check_answer(self, record: records.Answered) -> None:
        plan, log, run = self._listens(record.task), self._log(record.key), record.task.rpartition("/")[0]
        before = self._answers.get(record.token)
        self._answers[record.token] = record
        first = plan.after if plan.version is None else plan.version - 1
        what = f"{record.task}: {record.versions} after {record.after}, and goes on after {record.seen} of {log.last}"
        if record.after != (first if before is None else before.seen):
            self._find("not heard", f"{what}, asked for anew after {before and before.seen}")
        if record.after is None:
            if record.versions or record.seen != log.last:
                self._find("not heard", what)
            return
        due = tuple(one.version for one in log.kept(record.after, record.seen, run))
        is_right = record.versions == due and record.after <= record.seen <= max(record.after, log.last)
        if not is_right and log.begun_at < self._begun[record.token]:  # else it has places of versions that are gone
            self._find("not heard", f"{what}, not {due}")
        wanted = [one for one in record.versions if plan.version in (None, one)]
        self._heard.setdefault(record.token, []).extend(wanted)

    def _check_listened(self, record: records.Listened) -> None:
        heard = self._heard.get(record.token, [])
        if tuple(heard[: len(record.versions)]) != record.versions:
            self._find("not heard", f"{record.token} is handed {record.versions}, and was answered {heard}")
        del heard[: len(record.versions)]

    def _check_end_of_listening(self, record: records.ListenedOut) -> None:
        answer = self._answers.get(record.token)
        if not record.timed_out or answer is None:
            return
        log, run = self._log(answer.key), record.task.rpartition("/")[0]
        left = [one for one in log.kept(answer.seen, log.last, run) if self._at - one.at > LATE_S]
        is_new = log.begun_at >= self._begun[record.token]
        if self._heard.get(record.token) or (left and self._is_calm and not is_new):
            self._find("not heard", f"{record.task}: {[one.version for one in left]} at the end")

    # --- transactions -----------------------------------------------------------------------------

    def _judge_look(self, record: of_tasks.LookDone) -> None:
        self._check_senders()
        self._check_sensors()
        super()._judge_look(record)

    def _may_be_open(self, trigger: int) -> bool:
        return trigger in self._watchers or super()._may_be_open(trigger)

    def _judge_rest(self, record: of_tasks.AllRested) -> None:
        for wait in self._sensing.values():
            self._check_in_time_for(wait, "overlooked", LATE_S)
        for trigger, deferral in self._deferrals.items():
            if len(deferral.events) > 1 and self._plan.task(deferral.task).sensor is not None:
                what = f"{deferral.task}: trigger {trigger} has {len(deferral.events)} events"
                self._find("considered twice", what)
        for trigger, name in self._watchers.items():
            missing = [n for n in range(self._scenario.watcher(name).count) if (name, n) not in self._numbers]
            if missing:
                self._find("an event not sent", f"{name} (trigger {trigger}): {missing} at rest")
        super()._judge_rest(record)


class _Said(NamedTuple):
    """A signal that somebody asks to be sent; ``who`` as in `records.Sends`, or the token of an outcome."""

    signal: SaidSignal
    who: str
    run: str

    def is_of(self, new: records.SignalStored) -> bool:
        """Whether a version is this signal."""
        by = {"send_signals": new.said, "send": "a trigger"}.get(new.by, A_USER)
        is_same = self.signal.dedup == new.dedup or (not self.signal.dedup and new.dedup.startswith(AUTOMATIC))
        return self.who == by and is_same

    def is_same(self, new: records.SignalStored) -> bool:
        """Whether a version of this signal is as its sender wanted it."""
        return self.signal.value == new.value and new.run == (self.run if self.signal.is_of_run else "")
