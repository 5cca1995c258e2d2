"""Judges a history of tasks. It knows nothing of the code under test, only what users and a database may expect.

It keeps its own books of every task, deferral, step, run and pool, from the rows that each transaction has changed and
from what workers, triggers and users say they did. What it looks for, by name:

- ``no such transition``: a state follows another by a verb that may not do that
- ``a late answer counted``: a step has changed a task that was not its own any more
- ``an outcome nobody had``, ``not what the step came to``: a task ends in another way than its step did
- ``resumed twice``, ``never resumed``, ``resumed by another's event``, ``resumed without a cause`` (I8)
- ``a step began twice``, ``a try began twice``, ``a step of nobody's``: what a worker runs is not what it was given
- ``a step that had begun was returned``, ``a try lost by waiting``: only a step that no worker has begun goes back, and
  its try goes on
- ``fired after its first event``, ``ran again after its event``: the trigger of a task is over with its first event
- ``began after the end of its try``
- ``timed out early``, ``retried early``, ``too many tries``
- ``late``: where nothing goes wrong, a timeout or a retry is not when it should be, or a step is not ended when the
  execution_timeout of its task is over
- ``a trigger left open``, ``waits for nothing``: the rows of a task and its trigger do not go together
- ``on_kill without a user`` (I14)
- ``lost XComs``, ``wrong XCom``: what is stored, or told, is not what was left
- ``wrong by its rule``: a task begins, or never will, against its trigger rule
- ``a run ended over an unfinished task``, ``a run ended wrongly``
- ``pool overcommitted``, ``began while paused``
- ``written without a lease`` (I10), ``an event was dead-lettered``
- ``removed``: a task was removed from a run though its DAG has it
- ``stuck``, ``moved at rest``, ``broke``
"""

from __future__ import annotations

from collections import Counter

import msgspec
from tests.proof.simulation.checker import HistoryChecker
from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks import records, rules
from tests.proof.simulation.tasks.dags import KEY, pushed
from tests.proof.simulation.tasks.maps.plans import task_of
from tests.proof.simulation.tasks.rules import ENDED
from tests.proof.simulation.tasks.scenario import POOL, TaskScenario, Wait
from tests.proof.simulation.tasks.transitions import OF_ALL, OF_STEP, OF_USER

OCCUPYING = frozenset(("running", "restarting"))
LATE_S = 1.0  # where nothing goes wrong: a poll, and what stands before it
EARLY_S = 0.001


class _Deferral(msgspec.Struct):
    """One wait of one task."""

    task: str
    leg: int
    wait: Wait
    at: float
    times_out_at: float
    events: list[records.EventStored] = []
    is_over: bool = False
    resumed: int = 0  # by dispatches


class KnownTask(msgspec.Struct):
    """What is known of a task."""

    row: records.Moved
    since: float = 0.0
    began_at: float = 0.0  # this try
    given_at: float | None = None  # this try, for the first time: to a worker or to a trigger
    deferral: int = 0  # the trigger whose end it goes on from
    left: dict[str, str] = {}  # what it has left for others, by the journal


def _is_anew(before: records.Moved, now: records.Moved) -> bool:
    """Whether a task that was to go on begins anew, both in the same state."""
    return now.by == "plan" and now.try_number != before.try_number


class Checker(HistoryChecker):
    """Judges a history of tasks."""

    def __init__(self, plan: TaskScenario) -> None:
        super().__init__()
        self._plan = plan
        self._is_calm = not plan.faults
        self._tasks: dict[str, KnownTask] = {}
        self._runs: dict[str, records.RunMoved] = {}
        self._moved: list[tuple[str, records.Moved]] = []  # by the transaction that is being told
        self._ended_runs: list[str] = []
        self._upstream: dict[str, dict[str, tuple[str, ...]]] = {
            dag.name: {task.name: task.upstream for task in dag.tasks} for dag in plan.dags
        }
        self._paused: dict[str, bool] = {}
        self._triggers: dict[int, str] = {}
        self._deferrals: dict[int, _Deferral] = {}
        self._events: dict[int, records.EventStored] = {}
        self._given: dict[str, tuple[str, int, int]] = {}  # by token: task, try, and the trigger it goes on from
        self._begun: dict[str, float] = {}  # by token, when
        self._returned: set[str] = set()  # tokens of steps that no worker has begun
        self._beginnings: set[str] = set()  # tokens of steps with which a try begins
        self._begun_tries: set[tuple[str, int]] = set()  # tries from their beginning, by task
        self._to_skip: list[tuple[str, str]] = []  # by the transaction that is being told: a task, and who skips it
        self._ran: dict[str, records.StepRan] = {}
        self._fired: set[int] = set()  # runs of triggers
        self._waits: dict[tuple[str, int], _Deferral] = {}  # the newest, by task and leg
        self._removed_by_user: set[tuple[str, int]] = set()  # triggers, by task and leg
        self._stored: dict[str, dict[str, str]] = {}
        self._is_resting = False

    def _take(self, record: Record) -> None:
        match record:
            case records.Moved():
                self._see_row(record)
            case records.LookDone():
                self._judge_look(record)
            case records.RunMoved():
                self._see_run(record)
            case records.DagMoved():
                self._paused[record.dag] = record.is_paused
            case records.DagSaved():
                self._upstream[record.dag] = dict(record.upstream)
            case records.TriggerMoved():
                self._triggers[record.trigger] = record.end
                deferral = self._deferrals.get(record.trigger)
                if record.end == "removed" and record.by in OF_USER and deferral is not None:
                    self._removed_by_user.add((deferral.task, deferral.leg))
            case records.EventStored():
                self._events[record.row] = record
                if record.trigger in self._deferrals:
                    self._deferrals[record.trigger].events.append(record)
            case records.LetterStored():
                self._find("an event was dead-lettered", f"of trigger {record.trigger}")
            case records.XComsMoved():
                self._stored[record.task] = dict(record.values)
            case records.StepBegan() | records.StepRan() | records.StepAnswered():
                self._see_step(record)
            case records.StepTold(how="returned"):
                self._returned.add(record.token)
            case records.Waited():
                wait = self._waits.get((record.task, record.leg))
                if self._is_calm and wait is not None and wait.is_over and wait.events:
                    self._find("ran again after its event", f"{record.task} leg {record.leg}")
            case records.EventFired():
                if record.run in self._fired:
                    self._find("fired after its first event", f"{record.task} leg {record.leg}")
                self._fired.add(record.run)
            case records.KillHookCalled():
                if (record.task, record.leg) not in self._removed_by_user and "*" not in record.task:
                    self._find("on_kill without a user", f"{record.task} leg {record.leg}")
            case records.AllRested():
                self._judge_rest(record)
            case _:
                super()._take(record)

    # --- rows -------------------------------------------------------------------------------------

    def _see_row(self, record: records.Moved) -> None:
        task = self._tasks.get(record.task)
        if task is None:
            # New in its run; what became of it in the same transaction is compared with what such a row is.
            task = self._tasks[record.task] = KnownTask(msgspec.structs.replace(record, state="none", try_number=0))
        elif record.old != task.row.state:
            self._find("broke", f"the simulation: {record.task} was {task.row.state}, not {record.old}")
        before, task.row = task.row, record
        if record.state != before.state or not record.old or record.token != before.token or _is_anew(before, record):
            self._moved.append((record.task, before))
            self._check_transition(task, before, record)
            task.since = self._at

    def _check_transition(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        if not self._is_known(now):
            self._find("no such transition", f"{now.task} from {now.old or 'nothing'} to {now.state} by {now.by}")
        if now.by in OF_STEP:
            self._check_outcome(task, before, now)
        if before.state == "deferred":
            self._check_resumption(task, before, now)
        if now.state == "deferred":
            self._defer(task, before, now)
        elif now.state == "running":
            self._give(task, before, now)
        elif now.state == "scheduled" and now.by in ("plan", "retry_due"):
            self._check_try(task, before, now)
        if now.by == "clear":
            task.left, task.deferral = self._kept(task), 0

    def _is_known(self, now: records.Moved) -> bool:
        """Whether the verb may move a row so."""
        step = (now.old, now.state)
        if now.by in OF_USER:
            return step in OF_USER[now.by]
        if now.by in OF_STEP and now.task == now.about:
            return step in OF_STEP[now.by]
        return step == ("none", "skipped") if now.by == "succeed" else step in OF_ALL.get(now.by, ())

    def _check_try(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        """A try begins."""
        task.began_at, task.deferral = self._at, 0
        task.given_at = self._at if now.state == "deferred" else None
        if now.try_number != before.try_number + 1 or now.try_number > now.tries_max:
            self._find("too many tries", f"{now.task}: try {now.try_number} of {now.tries_max}")
        if now.by == "retry_due":
            task.left = self._kept(task)
            late_s = self._at - task.since - self._plan.task(now.task).retry_delay_s
            if late_s < -EARLY_S:
                self._find("retried early", f"{now.task}, by {-late_s:.3f} s")
            if self._is_calm and late_s > LATE_S:
                self._find("late", f"the retry of {now.task}, by {late_s:.3f} s")

    def _check_outcome(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        ran = self._ran.get(now.said)
        if now.task != now.about:
            if ran is None or task_of(now.task).split("/")[2] not in ran.skips:
                self._find("an outcome nobody had", f"{now.task} was skipped by {now.about}")
            return
        if before.token != now.said or self._given.get(now.said, ("",))[0] != now.task:
            self._find(
                "a late answer counted", f"{now.task} {now.old} to {now.state}: {now.said} is not {before.token}"
            )
        if now.by == "return_step":
            self._return(task, before, now)
            return
        if now.by == "lose_worker":
            if now.said in self._returned and now.state != "none":
                self._find("a try lost by waiting", f"{now.task}: the step {now.said} had not begun")
            if now.state != "none":
                self._check_failure(now, may_retry=True)
            return
        if ran is None and now.by == "fail" and now.said not in self._begun and self._left_s(task) <= EARLY_S:
            self._check_failure(now, may_retry=True)  # no time was left, so no worker got the step
            return
        if ran is None:
            self._find("an outcome nobody had", f"{now.task} is {now.state} by {now.said}")
            return
        if not self._is_what_it_came_to(now, ran):
            self._find("not what the step came to", f"{now.task}: {ran.outcome} became {now.state}")
        elif ran.outcome == "failed":
            self._check_failure(now, may_retry=ran.may_retry)
        timeout_s = self._plan.task(now.task).execution_timeout_s
        if self._is_calm and timeout_s is not None:
            late_s = self._at - self._begun[now.said] - timeout_s
            if late_s > LATE_S:
                self._find("late", f"the execution_timeout of {now.task}, by {late_s:.3f} s")
        index = now.task.removeprefix(task_of(now.task))
        self._to_skip += [(f"{now.task.rpartition('/')[0]}/{name}{index}", now.task) for name in ran.skips]
        task.left = {**task.left, **dict(ran.xcoms)}

    def _return(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        """A step goes back to those that wait for a worker."""
        if now.said in self._begun:
            self._find("a step that had begun was returned", f"{now.task} by {now.said}")
        if now.state == "none":
            return
        if (now.try_number, now.tries_max) != (before.try_number, before.tries_max):
            self._find("a try lost by waiting", f"{now.task}: try {now.try_number} after try {before.try_number}")
        if not now.method:
            task.given_at = None
        elif task.deferral:
            self._deferrals[task.deferral].resumed -= 1

    def _is_what_it_came_to(self, now: records.Moved, ran: records.StepRan) -> bool:
        outcomes = {"deferred": "deferred", "success": "succeeded", "skipped": "skipped"}
        return ran.outcome == outcomes.get(now.state, "failed")

    def _kept(self, task: KnownTask) -> dict[str, str]:
        """Return what a task that begins anew keeps of what it has left for others."""
        return {}

    def _left_s(self, task: KnownTask) -> float:
        """Return the time that is left of a task's try."""
        timeout_s = self._plan.task(task.row.task).execution_timeout_s
        if timeout_s is None or task.given_at is None:
            return float("inf")
        return task.given_at + timeout_s - self._at

    def _check_failure(self, now: records.Moved, *, may_retry: bool) -> None:
        due = "up_for_retry" if may_retry and now.try_number < now.tries_max else "failed"
        if now.state != due:
            what = f"{now.task} failed in try {now.try_number} of {now.tries_max}, and is {now.state}"
            self._find("not what the step came to", what)

    # --- deferrals --------------------------------------------------------------------------------

    def _defer(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        plan = self._plan.task(now.task)
        if now.by == "defer":
            ran = self._ran.get(now.said)
            leg = 0 if ran is None else ran.leg
        else:  # in its trigger, from the beginning
            leg = 0
            self._check_try(task, before, now)
        wait = plan.legs(now.try_number if now.by == "defer" else 1)[max(leg, 0)].wait
        if wait is None:
            self._find("an outcome nobody had", f"{now.task} waits, and did not defer")
            wait = Wait("event")
        limits = [] if wait.timeout_s is None else [self._at + wait.timeout_s]
        if plan.execution_timeout_s is not None:
            limits.append(task.began_at + plan.execution_timeout_s)
        deferral = _Deferral(now.task, leg, wait, self._at, min(limits, default=float("inf")), [])
        self._deferrals[now.trigger] = self._waits[now.task, deferral.leg] = deferral

    def _check_resumption(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        deferral = self._deferrals[before.trigger]
        if deferral.is_over:
            self._find("resumed twice", f"{now.task} from trigger {before.trigger}")
        deferral.is_over = True
        task.deferral = before.trigger
        end, what = deferral.wait.end, f"{now.task} from trigger {before.trigger}, which ends by {deferral.wait.end}"
        if now.by == "time_out":
            self._check_timeout(now, deferral)
        elif now.by == "store_slice":
            failed = "up_for_retry" if now.try_number < now.tries_max else "failed"
            due = {"success": "success", "skipped": "skipped", "failed": failed}.get(end, "scheduled")
            is_failing = now.method == "__fail__"
            if now.state != due or end == "never" or is_failing != (end in ("raises", "returns")):
                self._find("resumed without a cause", f"{what}: {now.state} {now.method}")
            elif end in ("event", "events"):
                first = min((event.row for event in deferral.events), default=0)
                if now.event != first or not first:
                    self._find("resumed by another's event", f"{what}: event {now.event}, not {first}")
            elif end in ("success", "failed", "skipped") and deferral.wait.pushes:
                key = now.task if not self._plan.task(now.task).starts_in_trigger or deferral.leg else None
                name = key or f"{now.task.split('/')[0]}/*/{now.task.split('/')[2]}"
                tried = now.try_number if key else 1
                task.left = {**task.left, KEY: pushed(name, tried, deferral.leg)}

    def _check_timeout(self, now: records.Moved, deferral: _Deferral) -> None:
        late_s = self._at - deferral.times_out_at
        if late_s < -EARLY_S:
            self._find("timed out early", f"{now.task}, by {-late_s:.3f} s")
        if now.method != "__fail__":
            self._find("resumed without a cause", f"{now.task} by its timeout in {now.method}")
        if self._is_calm and late_s > LATE_S:
            self._find("late", f"the timeout of {now.task}, by {late_s:.3f} s")

    # --- steps ------------------------------------------------------------------------------------

    def _give(self, task: KnownTask, before: records.Moved, now: records.Moved) -> None:
        """A task is given to a worker."""
        if now.token in self._given:
            self._find("a step of nobody's", f"{now.task}: {now.token} was given away before")
        self._given[now.token] = (now.task, now.try_number, task.deferral if now.method else 0)
        if not now.method:
            self._beginnings.add(now.token)
        task.given_at = self._at if task.given_at is None else task.given_at
        if self._paused.get(now.task.split("/")[0]):
            self._find("began while paused", now.task)
        if now.method and task.deferral:
            deferral = self._deferrals[task.deferral]
            deferral.resumed += 1
            if deferral.resumed > 1:
                self._find("resumed twice", f"{now.task} from trigger {task.deferral}")

    def _see_step(self, record: records.StepBegan | records.StepRan | records.StepAnswered) -> None:
        match record:
            case records.StepRan():
                self._ran[record.token] = record
            case records.StepAnswered():
                if record.value != self._stored.get(record.task, {}).get(KEY):
                    self._find("wrong XCom", f"{record.task}: {record.value}")
            case records.StepBegan():
                name, try_number, trigger = self._given.get(record.token, ("", 0, 0))
                if (name, try_number) != (record.task, record.try_number):
                    self._find("a step of nobody's", f"{record.task} by {record.token}")
                if record.token in self._begun:
                    self._find("a step began twice", f"{record.task} by {record.token}")
                self._begun[record.token] = record.at
                if record.token in self._beginnings:
                    if (record.task, record.try_number) in self._begun_tries:
                        self._find("a try began twice", f"{record.task}, try {record.try_number}, by {record.token}")
                    self._begun_tries.add((record.task, record.try_number))
                self._check_begin(record, trigger)

    def _check_begin(self, record: records.StepBegan, trigger: int) -> None:
        what = f"{record.task} leg {record.leg}"
        self._check_in_time(record)
        if not trigger:
            if record.leg or record.event:
                self._find("resumed without a cause", what)
            return
        deferral = self._deferrals[trigger]
        if record.leg > 0:
            serials = [event.serial for event in sorted(deferral.events, key=lambda event: event.row)]
            if record.leg != deferral.leg + 1:
                self._find("resumed by another's event", f"{what} after leg {deferral.leg}")
            elif record.event != (serials[0] if serials else 0):
                self._find("resumed by another's event", f"{what}: {record.event} is not {serials}")
        elif record.leg == 0:
            self._find("resumed twice", f"{what}: from the beginning, after leg {deferral.leg}")

    def _check_in_time(self, record: records.StepBegan) -> None:
        if record.leg >= 0 and record.task in self._tasks:
            late_s = -self._left_s(self._tasks[record.task])
            if late_s > EARLY_S:
                what = f"{record.task} leg {record.leg}, by {late_s:.3f} s"
                self._find("began after the end of its try", what)

    # --- transactions -----------------------------------------------------------------------------

    def _judge_look(self, record: records.LookDone) -> None:
        """A transaction is told: what has to be true of all rows together is looked at."""
        moved, self._moved = self._moved, []
        for name, before in moved:
            self._check_rule(name, before)
        for name, by in self._to_skip:
            if name in self._tasks and self._tasks[name].row.state == "none":
                self._find("not what the step came to", f"{by} skips {name}, which is not skipped")
        self._to_skip = []
        for run in self._ended_runs:
            self._judge_run(run)
        self._ended_runs = []
        used: Counter[str] = Counter()
        waiting: dict[int, str] = {}
        for name, task in self._tasks.items():
            if task.row.state in OCCUPYING:
                plan = self._plan.task(name)
                used[plan.pool] += plan.pool_slots
            if task.row.trigger:
                waiting[task.row.trigger] = name
                if self._is_over(task.row.trigger):
                    self._find("waits for nothing", f"{name} for trigger {task.row.trigger}, which has ended")
            if task.left != self._stored.get(name, {}):
                self._find("lost XComs", f"{name} has {self._stored.get(name, {})}, and left {task.left}")
                task.left = dict(self._stored.get(name, {}))
        for trigger, end in self._triggers.items():
            if end == "" and trigger not in waiting and not self._may_be_open(trigger):
                self._find("a trigger left open", f"trigger {trigger}, after {record.by}")
                self._triggers[trigger] = "found"
        if used[POOL] > self._plan.pool_slots:
            self._find("pool overcommitted", f"{used[POOL]} of {self._plan.pool_slots} slots")
        if self._is_resting:
            self._find("moved at rest", f"by {record.by}")

    def _is_over(self, trigger: int) -> bool:
        return self._triggers.get(trigger, "?") != ""

    def _may_be_open(self, trigger: int) -> bool:
        """Whether a trigger may be open that no task waits for."""
        return False

    def _check_rule(self, name: str, before: records.Moved) -> None:
        task = self._tasks[name]
        if task.row.state == "removed" and name.split("/")[2] in self._upstream[name.split("/")[0]]:
            self._find("removed", f"{name}, though its DAG has it")
        if (before.state != "none" and task.row.old) or task.row.by != "plan" or task.row.state in ("none", "removed"):
            return
        dag, run, own = name.split("/")
        plan = self._plan.task(name)
        above = self._above(dag, run, own)
        due = rules.decision(plan.rule, above)
        state = "scheduled" if task.row.state == "deferred" else task.row.state
        if state != due:
            self._find("wrong by its rule", f"{name} ({plan.rule}) is {state}, not {due}, with {above} upstream")
        if state == "scheduled" and self._paused.get(dag):
            self._find("began while paused", name)

    def _above(self, dag: str, run: str, own: str) -> tuple[str, ...]:
        """Return the states of what is upstream of a task, as its rule sees them."""
        return tuple(self._tasks[f"{dag}/{run}/{one}"].row.state for one in self._upstream[dag].get(own, ()))

    def _see_run(self, record: records.RunMoved) -> None:
        before = self._runs.get(record.run)
        self._runs[record.run] = record
        if before is not None and before.is_ended and not record.is_ended and not self._may_go_on(record):
            self._find("no such transition", f"run {record.run} goes on by {record.by}")
        if record.is_ended and not (before is not None and before.is_ended):
            self._ended_runs.append(record.run)

    def _may_go_on(self, record: records.RunMoved) -> bool:
        """Whether a run that has ended may go on."""
        return record.by in ("clear", "mark_success")

    def _judge_run(self, run: str) -> None:
        states = {
            name.rsplit("/", 1)[1]: task.row.state for name, task in self._tasks.items() if name.startswith(f"{run}/")
        }
        unfinished = sorted(name for name, state in states.items() if state not in ENDED)
        if unfinished:
            self._find("a run ended over an unfinished task", f"{run}: {unfinished}")
            return
        due = rules.end_of_run(states, self._judging(run.split("/")[0]))
        if self._runs[run].state != due:
            self._find("a run ended wrongly", f"{run} is {self._runs[run].state} with {states}")

    def _judging(self, dag: str) -> dict[str, tuple[str, ...]]:
        """Return what is upstream of each task, as far as it says something about the end of a run."""
        return self._upstream[dag]

    # --- the end ----------------------------------------------------------------------------------

    def _judge_rest(self, record: records.AllRested) -> None:
        self._is_resting = True
        for name, task in self._tasks.items():
            state = task.row.state
            if state == "deferred":
                self._find("never resumed", f"{name} waits for trigger {task.row.trigger}")
            elif state not in ENDED:
                self._find("stuck", f"{name} is {state}")
        if not record.in_time and not self.findings:
            self._find("stuck", f"runs: {sorted(run for run, row in self._runs.items() if not row.is_ended)}")
