"""The simulated machine with signals: small limits of the log, watchers, and users at the command line."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import trio
from tests.proof.simulation.database import open_client
from tests.proof.simulation.processes import Died, SupervisorProcess
from tests.proof.simulation.records import Record
from tests.proof.simulation.tasks import database
from tests.proof.simulation.tasks.records import SaidSignal
from tests.proof.simulation.tasks.scenario import run_name
from tests.proof.simulation.tasks.signals import records
from tests.proof.simulation.tasks.signals.drawing import SignalScenario
from tests.proof.simulation.tasks.signals.jobs.deciding import SimulatedDecider
from tests.proof.simulation.tasks.signals.plans import (
    A_USER,
    FEED_BYTES_MAX,
    Cleans,
    Forgets,
    UserAct,
    UserPuts,
    UserSends,
)
from tests.proof.simulation.tasks.signals.rehearsal import Clock
from tests.proof.simulation.tasks.signals.rules.plans import Asks, EndsRun
from tests.proof.simulation.tasks.signals.runs.plans import EndsAll
from tests.proof.simulation.tasks.signals.surroundings import CLASSPATH, SignalExecutor, SignalReader, SignalStore
from tests.proof.simulation.tasks.world import TaskSupervisor, TaskWorld, tokens_counted
from tests.proof.simulation.world import run_world

from headgate.client import signals as client_signals
from headgate.client.signals import Send
from headgate.protocol.values import encode_value
from headgate.signals import listening, outgoing
from headgate.store import store
from headgate.store.errors import NoSuchRow, SignalKeyInUse, ValueRefused
from headgate.store.scheduling import considering
from headgate.store.signals import feeds, reading, sending
from headgate.store.tasks import dags
from headgate.supervisor.executors.deciders import Deciders
from headgate.supervisor.tasks import decisions

UNSURE_S = 0.2  # until a user who has not heard of a send sends again
DEAD_S = 0.3  # until a user begins anew whose process was killed
ENDS_EVERY_S = 1.5  # of a user who ends all runs of a DAG


class SignalSupervisor(TaskSupervisor):
    """A supervisor whose workers send and listen."""

    signal_world: SignalWorld
    store_of: Any = SignalStore
    executor_of = SignalExecutor

    def _deciders(self) -> Deciders:
        assert isinstance(self.world, SignalWorld)
        self.signal_world = self.world
        return Deciders(lambda: SimulatedDecider(self), clock=trio.current_time)


class SignalWorld(TaskWorld):
    """One run of one scenario of signals."""

    def __init__(self, plan: SignalScenario) -> None:
        super().__init__(plan)
        self.scenario: SignalScenario = plan
        self.reader: SignalReader = SignalReader()
        self._client = open_client()
        self._watchers: dict[str, int] = {}  # the triggers of watchers, by name
        self._users = 0
        self._decisions: Counter[str] = Counter()  # asked of operators, by task

    def count_decision(self, task: str) -> int:
        """Return the number of this call of the code of a task about a signal, from 0 on."""
        self._decisions[task] += 1
        return self._decisions[task] - 1

    def make_supervisor(self, number: int) -> SupervisorProcess:
        """See the base class."""
        return SignalSupervisor(self, number)

    def _works(self) -> Iterator[Callable[[], Awaitable[None]]]:
        self._add_watchers()
        yield from super()._works()
        self._users = len(self.scenario.users)
        for act in self.scenario.users:
            yield partial(self._employ_user, act)

    def _add_watchers(self) -> None:
        for watcher in self.scenario.watchers:
            kwargs = {"name": watcher.name}
            trigger = self._store.add_watcher(watcher.name, CLASSPATH, kwargs, signal=watcher.key)
            self._watchers[watcher.name] = trigger
            self.note(records.WatcherAdded(trio.current_time(), watcher.name, trigger))

    def _is_at_rest(self) -> bool:
        fired = [self.reader.events_of(self._watchers[one.name]) >= one.count for one in self.scenario.watchers]
        return not self._users and all(fired) and super()._is_at_rest()

    def _has_all_runs(self) -> bool:
        wanted = {run_name(dag.name, one + 1) for dag in self.scenario.dags for one in range(len(dag.runs_at))}
        return wanted <= self.reader.run_names and not self._has_runs_to_come()

    def _has_runs_to_come(self) -> bool:
        dags = {dag.name: dag.runs_on for dag in self.scenario.dags if dag.runs_on is not None}
        return self.reader.has_runs_to_come(dags)

    # --- users ------------------------------------------------------------------------------------

    async def _employ_user(self, act: UserAct) -> None:
        await trio.sleep_until(act.at)
        if isinstance(act, EndsAll):
            await self._end_all(act.dag)
        left = act.unsure + 1 if isinstance(act, UserSends) else 1
        while left:
            try:
                self._do_act(act, is_heard=left == 1)
            except Died:
                self.see(A_USER)  # if it was committed
                self._note_starting(act, is_over=True)
                await trio.sleep(DEAD_S)
                continue
            left -= 1
            await trio.sleep(UNSURE_S if left else 0.0)
        self._users -= 1
        self._rested.ring()

    def _do_act(self, act: UserAct, *, is_heard: bool) -> None:
        self.verb = (A_USER, ())
        try:
            match act:
                case UserSends():
                    self._send(act, is_heard=is_heard)
                case UserPuts():
                    self._store.put_event(act.watcher, encode_value({"watcher": act.watcher, "number": -1}, where=""))
                case Forgets():
                    self._tend(f"forgets {act.key}", lambda: self._store.signals.forget(act.key))
                case EndsAll():
                    pass  # they have ended
                case Asks():
                    self._ask(act)
                case EndsRun():
                    if act.run in self.reader.run_names:
                        self.note(records.RunEnding(trio.current_time(), act.run))
                        self._store.signals.end_run(self.reader.run_of(act.run))
                case Cleans():
                    self._tend("cleans", lambda: list(self._store.cleaning.clean(act.older_than_s, kinds=["signals"])))
        finally:
            self.verb = ("", ())
        self.see(A_USER)

    async def _end_all(self, dag: str) -> None:
        while self.reader.open_runs(dag) or self._has_runs_to_come():
            for run in self.reader.open_runs(dag):
                self._do_act(EndsRun(trio.current_time(), run), is_heard=True)
            await trio.sleep(ENDS_EVERY_S)

    def _note_starting(self, act: UserAct, *, is_over: bool = False) -> None:
        if isinstance(act, UserSends) and act.start:
            self.note(records.Starting(trio.current_time(), "" if is_over else act.start))

    def _tend(self, what: str, do: Callable[[], object]) -> None:
        try:
            result = str(do())
        except (NoSuchRow, SignalKeyInUse) as refused:
            result = type(refused).__name__
        self.see(A_USER)
        self.note(records.Tended(trio.current_time(), what, result))

    def _ask(self, act: Asks) -> None:
        task_id = self.reader.id_of(act.task)
        if task_id is None:
            return  # there is no such run yet
        self.note(records.Asked(trio.current_time(), act.task, act.action, is_sure=False))
        try:
            self._store.signals.ask(task_id, act.action)
        except ValueRefused:
            return  # its run is to end
        self.note(records.Asked(trio.current_time(), act.task, act.action, is_sure=True))

    def _send(self, act: UserSends, *, is_heard: bool) -> None:
        dag, _, run_id = act.run.partition("/")
        if act.run and act.run not in self.reader.run_names:
            return  # there is no such run yet
        sends = [
            Send(one.key, json.loads(one.value), one.dedup or None, run=(dag, run_id) if one.of_run else None)
            for one in act.sends
        ]
        said = tuple(
            SaidSignal(one.key, one.dedup, encode_value(json.loads(one.value), where="").decode(), one.of_run)
            for one in act.sends
        )
        self.note(records.Sends(trio.current_time(), A_USER, said, act.run))
        self._note_starting(act)
        started: str | None = None
        if act.start:
            sent, started = self._client.send_and_start(act.start, sends)
        else:
            sent = self._client.send_signals(sends)
        self.see(A_USER)
        self._note_starting(act, is_over=True)
        if act.start:
            self.note(records.Started(trio.current_time(), act.start, f"{act.start}/{started}" if started else ""))
        for one, became in zip(act.sends, sent, strict=True) if is_heard else ():
            self.note(records.Sent(trio.current_time(), A_USER, one.key, one.dedup, became.version, became.is_new))


@contextmanager
def _patched(plan: SignalScenario) -> Generator[None]:
    """Have the log's limits be those of the plan, and all that is random or the time be the same each time."""
    limits, ids = plan.limits, itertools.count(1)
    with ExitStack() as stack:
        for module in (outgoing, feeds, client_signals, store, dags):
            stack.enter_context(patch.object(module, "uuid4", lambda: UUID(int=next(ids))))
        stack.enter_context(patch.object(decisions, "uuid", SimpleNamespace(uuid4=lambda: UUID(int=next(ids)))))
        stack.enter_context(patch.object(listening, "time", Clock))
        for where, name, value in (
            (sending, "VERSIONS_KEPT_MAX", limits.kept),
            (considering, "PAGE_VERSIONS_MAX", limits.page),
            (reading, "SIGNALS_PER_PAGE_MAX", limits.heard),
            (feeds, "SIGNAL_BYTES_MAX", FEED_BYTES_MAX),
        ):
            stack.enter_context(patch.object(where, name, value))
        yield


def run(plan: SignalScenario) -> list[Record]:
    """Run a scenario and return its history: always the same for the same scenario, in any process."""
    with tokens_counted(), _patched(plan):
        database.reset(plan)
        return run_world(plan, lambda: SignalWorld(plan))
