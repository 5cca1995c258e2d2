"""The database with tasks in it: what each transaction has changed, by SQL of its own; and the store that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio
from tests.proof.simulation import database
from tests.proof.simulation.database import FailingStore
from tests.proof.simulation.tasks import records
from tests.proof.simulation.tasks.dags import spec_of
from tests.proof.simulation.tasks.maps.plans import index_of, task_of
from tests.proof.simulation.tasks.scenario import POOL, TaskScenario
from tests.proof.simulation.tasks.streams.handling import state_text

from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepHandled, StepSkipped, StepSucceeded
from headgate.protocol.values import decode_value
from headgate.store.ids import DagRunId, TaskInstanceId
from headgate.store.tasks.outcomes import NotBegun, StepEnd, WorkerLost

if TYPE_CHECKING:
    from tests.proof.simulation.processes import SupervisorProcess
    from tests.proof.simulation.tasks.world import TaskWorld

Result = TypeVar("Result")
FILE = "/dags/{}.py"
QUEUES = ("default",)


def reset(plan: TaskScenario) -> None:
    """Begin anew, with the DAGs of the scenario and its pool."""
    database.reset([])
    with database.open_store() as store:
        epoch = store.register_triggerer(
            hostname="host", pid=0, machine="machine", process_started=0.0, capacity=1, queues=QUEUES
        )
        for dag in plan.dags:
            store.tasks.save_file(epoch, FILE.format(dag.name), [spec_of(dag)])
        store.tasks.set_pool(POOL, plan.pool_slots)
        store.release_triggerer(epoch)


class TaskReader(database.Reader):
    """Tells what has changed since the last look."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: dict[int, tuple[Any, ...]] = {}
        self._runs: dict[int, tuple[Any, ...]] = {}
        self._triggers: dict[int, str] = {}
        self._dags: dict[str, bool] = {}
        self._xcoms: dict[str, tuple[tuple[str, str], ...]] = {}
        self._elements: dict[str, tuple[str, ...]] = {}
        self._streams: dict[int, tuple[Any, ...]] = {}
        self._event = self._letter = 0
        self._changes = -1
        self.names: dict[int, str] = {}
        self.states: dict[str, str] = {}
        self.is_at_rest = False

    def name_of(self, trigger_id: int) -> str:
        """Return a name of a trigger; those of tasks have none."""
        return f"trigger-{trigger_id}"

    def changes(self, by: str, ends: Sequence[StepEnd]) -> list[Any]:
        """Return the records of what a transaction has changed, in the order: DAGs, runs, events, tasks, the rest.

        ``ends`` are those of steps that it was to store.
        """
        connection = self._connection
        if not self.has_changed():
            return []
        self._changes = connection.total_changes
        now = trio.current_time()
        found: list[Any] = self._first(now, by)
        for dag, is_paused in connection.execute("SELECT name, is_paused FROM dag ORDER BY id"):
            if self._dags.get(dag) != bool(is_paused):
                self._dags[dag] = bool(is_paused)
                found.append(records.DagMoved(now, dag, bool(is_paused)))
        runs = connection.execute(
            "SELECT dag_run.id, dag.name || '/' || run_id, state, started_at IS NOT NULL, ended_at IS NOT NULL "
            "FROM dag_run JOIN dag ON dag.id = dag_id ORDER BY dag_run.id"
        ).fetchall()
        for id_, *rest in runs:
            if self._runs.get(id_) != tuple(rest):
                self._runs[id_] = tuple(rest)
                name, state, is_started, is_ended = rest
                found.append(records.RunMoved(now, by, name, state, bool(is_started), bool(is_ended)))
        found += self._events(now)
        moves = self._moves(now, by, ends)  # these know the names of tasks that are new
        found += self._stream_moves(now, by, ends)
        found += self._element_moves(now, by)
        found += moves
        found += self._ends_of_triggers(now, by)
        found += self._left(now, by)
        self.is_at_rest = bool(runs) and all(row[3] for row in self._runs.values()) and not any(self._dags.values())
        if found:
            found.append(records.LookDone(now, by))
        return found

    def _first(self, now: float, by: str) -> list[Any]:
        """Return records that stand in front of all others of a transaction; none here."""
        return []

    def has_changed(self) -> bool:
        """Whether anything was written since `changes` was called last."""
        return self._connection.total_changes != self._changes

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self._runs)

    @property
    def run_names(self) -> set[str]:
        """The runs that there are."""
        return {row[0] for row in self._runs.values()}

    def id_of(self, task: str) -> TaskInstanceId | None:
        """Return the id of a task by its name; None where there is no such run yet."""
        return next((TaskInstanceId(id_) for id_, name in self.names.items() if name == task), None)

    def run_of(self, name: str) -> DagRunId:
        """Return the id of a run by its name."""
        return next(DagRunId(id_) for id_, row in self._runs.items() if row[0] == name)

    def _events(self, now: float) -> list[Any]:
        found: list[Any] = []
        rows = self._connection.execute(
            "SELECT id, trigger_id, kind, payload, trigger_run_id FROM trigger_event WHERE id > ? ORDER BY id",
            (self._event,),
        ).fetchall()
        for id_, trigger, kind, payload, run in rows:
            self._event = id_
            serial, number = _said_in(payload)
            found.append(records.EventStored(now, id_, trigger, kind, serial, number, run))
        letters = self._connection.execute(
            "SELECT id, trigger_id, payload FROM dead_letter WHERE id > ? ORDER BY id", (self._letter,)
        ).fetchall()
        for id_, trigger, payload in letters:
            self._letter = id_
            found.append(records.LetterStored(now, id_, trigger, _said_in(payload)[1]))
        return found

    def _stream_moves(self, now: float, by: str, ends: Sequence[StepEnd]) -> list[Any]:
        found: list[Any] = []
        of_tasks: dict[int, tuple[str, str]] = {end.id: (OF_STEPS[type(end.outcome)], end.token) for end in ends}
        rows = {row[0]: row[1:] for row in self._connection.execute(_STREAMS)}
        for id_ in sorted(rows.keys() | self._streams.keys()):
            row = rows.get(id_)
            if self._streams.get(id_) == row:
                continue
            cause, name = of_tasks.get(id_, (by, "")), self.names[id_]
            if row is None:
                del self._streams[id_]
                found.append(records.StreamMoved(now, *cause, name, 0, 0, 0, "", "", False))
                continue
            self._streams[id_] = row
            trigger, place, handled, state, ended_as, reopens = row
            left = "" if state is None else state_text(database.decrypted(state))
            found.append(records.StreamMoved(now, *cause, name, trigger, place, handled, left, ended_as, bool(reopens)))
        return found

    def _moves(self, now: float, by: str, ends: Sequence[StepEnd]) -> list[Any]:
        found: list[Any] = []
        # Two steps of one task may end together, of which a user has ended the first: the task is with the other one.
        in_order = sorted(ends, key=lambda end: end.token == self._token_of(end.id))
        of_tasks: dict[int, tuple[str, str, str]] = {
            end.id: (OF_STEPS[type(end.outcome)], self.names[end.id], end.token) for end in in_order
        }
        rows = self._connection.execute(
            "SELECT t.id, dag.name || '/' || r.run_id || '/' || t.task_id || "
            "CASE WHEN map_index < 0 THEN '' ELSE '[' || map_index || ']' END, t.state, try_number, tries_max, "
            "coalesce(token, ''), coalesce(trigger_id, 0), coalesce(next_method, ''), coalesce(event_id, 0), "
            "coalesce(triggerer_id, 0) FROM task_instance AS t JOIN dag_run AS r ON r.id = dag_run_id "
            "JOIN dag ON dag.id = r.dag_id ORDER BY t.id"
        ).fetchall()
        for id_, *rest in rows:
            before = self._tasks.get(id_)
            if before != tuple(rest):
                self._tasks[id_] = tuple(rest)
                name, state = rest[:2]
                self.names[id_], self.states[name] = name, state
                old = "" if before is None else before[1]
                cause = of_tasks.get(id_) or self._skipped_by(name, ends) or (by, "", "")
                if old == "restarting" and state == "none" and id_ in of_tasks:
                    cause = ("lose_worker", *cause[1:])  # the outcome is not stored, and its worker is done with it
                found.append(records.Moved(now, *cause, name, old, *rest[1:]))
        return found

    def _token_of(self, instance: int) -> str:
        known = self._tasks.get(instance)
        return "" if known is None else str(known[4])

    def _skipped_by(self, name: str, ends: Sequence[StepEnd]) -> tuple[str, str, str] | None:
        """Return the end of a step for which a task of its run was skipped, if one of these says so."""
        run, _, task = task_of(name).rpartition("/")
        for end in ends:
            skips, by = end.outcome.skips if isinstance(end.outcome, StepSucceeded) else (), self.names[end.id]
            if task in skips and by.rpartition("/")[0] == run and index_of(by) == index_of(name):
                return "succeed", by, end.token
        return None

    def _element_moves(self, now: float, by: str) -> list[Any]:
        values: dict[str, list[str]] = {}
        for id_, value in self._connection.execute(
            "SELECT task_instance_id, value FROM element ORDER BY task_instance_id, position"
        ):
            values.setdefault(self.names[id_], []).append(str(decode_value(value)))
        found: list[Any] = []
        for name in sorted(values.keys() | self._elements.keys()):
            some = tuple(values.get(name, ()))
            if self._elements.get(name, ()) != some:
                self._elements[name] = some
                found.append(records.ElementsMoved(now, by, name, some))
        return found

    def _ends_of_triggers(self, now: float, by: str) -> list[Any]:
        found: list[Any] = []
        for id_, finished, removed in self._connection.execute(
            "SELECT id, finished_at, removed_at FROM trigger ORDER BY id"
        ):
            end = "removed" if removed else "finished" if finished else ""
            if self._triggers.get(id_) != end:
                self._triggers[id_] = end
                found.append(records.TriggerMoved(now, by, id_, end))
        return found

    def _left(self, now: float, by: str) -> list[Any]:
        found: list[Any] = []
        left: dict[str, list[tuple[str, str]]] = {}
        for id_, key, value in self._connection.execute(
            "SELECT task_instance_id, key, value FROM xcom ORDER BY task_instance_id, key"
        ):
            left.setdefault(self.names[id_], []).append((key, str(decode_value(value))))
        for name in sorted(left.keys() | self._xcoms.keys()):
            values = tuple(left.get(name, ()))
            if self._xcoms.get(name, ()) != values:
                self._xcoms[name] = values
                found.append(records.XComsMoved(now, by, name, values))
        return found


_STREAMS = (
    "SELECT task_instance_id, trigger_id, handled_to, handled, state, coalesce(ended_as, ''), reopens "
    "FROM task_stream ORDER BY task_instance_id"
)


def _said_in(payload: bytes | None) -> tuple[int, int]:
    """Return the serial and the number that an event's payload says: 0 and -1 if it says none."""
    said = None if payload is None else decode_value(payload)
    said = said if isinstance(said, dict) else {}
    return int(said.get("serial", 0)), int(said.get("number", -1))


# --- the store -----------------------------------------------------------------------------------

# Verbs that write nothing here: no scenario has assets or signals, so nobody asks whether the epoch may act on them.
READS = frozenset(
    {
        *("create_event_runs", "owned_running", "owned", "left", "next_due", "dag_files", "pull_xcom", "run_standing"),
        *("stream_rooms", "consider_signals", "signal_versions"),
    }
)
# The ends of steps, which are stored in groups, by the names that histories and faults know them by.
OF_STEPS = {
    StepDeferred: "defer",
    StepSucceeded: "succeed",
    StepSkipped: "succeed",
    StepFailed: "fail",
    WorkerLost: "lose_worker",
    NotBegun: "return_step",
    StepHandled: "handle",
}
DEADLY = {"claim_triggers": "claim", "store_slice": "store_slice"}  # of the pair, by the names that faults know them by


class TaskFailingStore(FailingStore):
    """The store with its parts for tasks; it can be deadly as well, as the faults say."""

    reads = READS

    def __init__(self, world: TaskWorld, supervisor: SupervisorProcess) -> None:
        super().__init__(world, supervisor)
        self._task_world = world
        self._has_changed = False
        self.tasks = FailingVerbs(self, self._store.tasks)
        self.scheduling = FailingVerbs(self, self._store.scheduling)

    def call(self, name: str, verb: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """See the base class; two of these verbs are deadly."""
        call = super().call
        if name not in DEADLY:
            return call(name, verb, *args, **kwargs)
        return self._named(DEADLY[name], lambda: call(name, verb, *args, **kwargs))

    def call_part(self, name: str, verb: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Carry out a verb of tasks or of the scheduler."""
        ends: Sequence[StepEnd] = args[1] if name == "store_ends" else ()
        writes = "" if name in self.reads else name
        if name == "save_file":
            self._task_world.saving = args[2]
        epoch = args[0] if writes and args and isinstance(args[0], int) else 0
        return self._named(name, lambda: self.fail_or(lambda: verb(*args, **kwargs), epoch, writes), ends)

    def _named(self, name: str, call: Callable[[], Result], ends: Sequence[StepEnd] = ()) -> Result:
        """Carry out a verb under its name; the supervisor may die before it, or after its commit."""
        names = sorted({OF_STEPS[type(end.outcome)] for end in ends}) or [name]
        for known in names:
            self._task_world.reach_verb(known, is_committed=False)
        self._task_world.verb = (name, ends)
        self._has_changed = False
        try:
            result = call()
        finally:
            self._task_world.verb = ("", ())
        if self._has_changed:
            for known in names:
                self._task_world.reach_verb(known, is_committed=True)
        return result

    def _wrote(self, epoch: int, verb: str) -> None:
        super()._wrote(epoch, verb)
        name, ends = self._task_world.verb
        self._has_changed = self._task_world.see(name or verb, ends)


class FailingVerbs:
    """The verbs of one part of the store; see `TaskVerbs` and `SchedulingVerbs`."""

    def __init__(self, store: TaskFailingStore, verbs: Any) -> None:
        self._store = store
        self._verbs = verbs

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._verbs, name)
        # Variables and connections are parts of their own, which no scenario asks for.
        return partial(self._store.call_part, name, part) if callable(part) else part
