"""Steps that a worker has while it runs another one: in order, each with its outcome, and given back if not begun."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.processes import stop
from tests.supervisor.executors.workers_harness import Author, MakePool, Pool

from headgate.protocol.errors import RemoteProtocolError
from headgate.protocol.messages.queries import GetXCom
from headgate.protocol.messages.steps import StepFailed, StepSucceeded, XCom
from headgate.protocol.messages.worker import BUNDLE_MAX, Step, StepEnded, StepsReturned
from headgate.scheduling import bundles
from headgate.scheduling.bundles import BUNDLE_S, Room
from headgate.supervisor.executors import local
from headgate.supervisor.executors.base import StepLost, StepReturned

SHORT_S = 0.001
LONG_S = 1000.0
SOURCE = """
    def f(context):
        folder = Path(__file__).parent
        given = context["params"]
        with (folder / "begun").open("a") as file:
            file.write(f"{given['number']}\\n")
        print("printed by", given["number"])
        os.write(1, f"written by {given['number']}\\n".encode())
        if given["waits"]:
            with (folder / "gate").open() as gate:
                gate.read()
        if given["raises"]:
            raise ValueError("as told")
        if given["asks"]:
            context["ti"].xcom_pull("t")
        return given["number"]
"""


class Bundle:
    """Steps of one task, given to the one worker of a pool; a step that ``waits`` does so until the gate is opened."""

    def __init__(self, author: Author, pool: Pool) -> None:
        self.pool = pool
        self.folder = author.folder
        self.steps: list[Step] = []
        self._author = author
        os.mkfifo(self.folder / "gate")

    def give(self, count: int, *, waits: int | None = None, raises: int | None = None, asks: int | None = None) -> None:
        """Give so many steps, of which those with these numbers do something besides."""
        for number in range(len(self.steps), len(self.steps) + count):
            params = {"number": number, "waits": number == waits, "raises": number == raises, "asks": number == asks}
            step = self._step(params)
            self.steps.append(step)
            self.pool.executor.submit(step, SHORT_S)

    def _step(self, params: dict[str, Any]) -> Step:
        fields = {"params": json.dumps(params).encode()}
        if self.steps:  # the file is there, and may be loaded just now
            return self._author.step_of(Path(self.steps[0].file), **fields)
        return self._author.step(SOURCE, **fields)

    def begun(self) -> list[int]:
        """Return the numbers of the steps that have begun."""
        file = self.folder / "begun"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def wait_begun(self, number: int) -> None:
        self.pool.until(lambda: number in self.begun(), f"step {number} has begun")

    def open_gate(self) -> None:
        with (self.folder / "gate").open("w"):
            pass

    def ends(self) -> list[str]:
        """Wait for the ends of all steps; return what became of each."""
        return [self._end(step) for step in self.steps]

    def _end(self, step: Step) -> str:
        end = self.pool.wait_end(step)
        if isinstance(end, StepLost):
            return f"lost: {end.reason.partition(';')[0]}"
        return "returned" if isinstance(end, StepReturned) else type(end).__name__


@pytest.fixture
def bundle(author: Author, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setattr(bundles, "RECALL_AFTER_S", LONG_S)  # no step lasts so long, however busy the machine is
    return Bundle(author, pool)


def ready(pool: Pool) -> None:
    """Have the worker of a pool be there."""
    pool.until(lambda: any(member.worker.is_free for member in pool.executor._members.values()), "a worker")


def test_a_worker_runs_its_steps_in_order_and_each_has_its_own_outcome(bundle: Bundle) -> None:
    pool = bundle.pool
    bundle.give(4, raises=1)
    assert bundle.ends() == ["StepSucceeded", "StepFailed", "StepSucceeded", "StepSucceeded"]
    ended = [event for event in pool.events if isinstance(event, StepEnded)]
    assert [event.token for event in ended] == [step.token for step in bundle.steps]
    values = [event.outcome.xcoms for event in ended if isinstance(event.outcome, StepSucceeded)]
    assert values == [(XCom("return_value", str(number).encode()),) for number in (0, 2, 3)]
    failed = ended[1].outcome
    assert isinstance(failed, StepFailed)
    assert failed.error == "ValueError: as told"
    assert all(event.took_s > 0 for event in ended)
    assert bundle.begun() == [0, 1, 2, 3]
    assert len(pool.executor.pids()) == 1


def test_what_is_printed_and_logged_belongs_to_the_step_that_did_it(bundle: Bundle) -> None:
    bundle.give(6)
    bundle.ends()
    printed = [(step, record["event"]) for step, record in bundle.pool.records if "printed by" in record["event"]]
    assert printed == [(step, f"printed by {number}") for number, step in enumerate(bundle.steps)]
    assert bundle.pool.output == [(step, f"written by {number}") for number, step in enumerate(bundle.steps)]


def test_it_is_said_that_a_step_has_begun_when_it_has_and_before_what_it_says(bundle: Bundle) -> None:
    bundle.give(3, waits=1)
    bundle.wait_begun(1)
    bundle.pool.until(lambda: len(bundle.pool.begun) == 2, "two steps have begun")
    assert [token for token, _ in bundle.pool.begun] == [step.token for step in bundle.steps[:2]]
    bundle.open_gate()
    bundle.ends()
    assert [token for token, _ in bundle.pool.begun] == [step.token for step in bundle.steps]
    for token, records_before in bundle.pool.begun:
        assert all(step is None or step.token != token for step, _ in bundle.pool.records[:records_before])


def test_a_query_is_of_the_step_that_runs(bundle: Bundle) -> None:
    bundle.give(2, asks=1)
    bundle.pool.until(bundle.pool.asked, "a query")
    (asked,) = bundle.pool.asked()
    assert (asked.token, type(asked.query)) == (bundle.steps[1].token, GetXCom)


# --- what has not begun goes back ----------------------------------------------------------------


def test_what_waits_behind_a_long_step_is_returned_and_the_worker_gets_nothing_more(bundle: Bundle) -> None:
    pool = bundle.pool
    bundle.give(4, waits=1)
    bundle.wait_begun(1)
    pool.until(lambda: pool.ended(bundle.steps[0].token), "the first outcome")
    assert pool.executor.rooms() == [Room(BUNDLE_MAX - 3, BUNDLE_S - 3 * SHORT_S)]
    pool.clock.passed_s += LONG_S
    pool.until(lambda: pool.ended(bundle.steps[3].token), "the others are returned")
    assert pool.executor.rooms() == [bundles.NONE]
    assert not pool.ended(bundle.steps[1].token)
    bundle.open_gate()
    assert bundle.ends() == ["StepSucceeded", "StepSucceeded", "returned", "returned"]
    assert bundle.begun() == [0, 1]
    bundle.give(2)
    assert bundle.ends()[4:] == ["StepSucceeded", "StepSucceeded"]
    assert pool.spawned == 1


def test_of_a_worker_that_is_killed_only_the_step_that_ran_is_lost(bundle: Bundle) -> None:
    bundle.give(4, waits=1)
    bundle.wait_begun(1)
    os.kill(bundle.pool.executor.pids()[0], signal.SIGKILL)
    assert bundle.ends() == ["StepSucceeded", "lost: the worker process killed by SIGKILL", "returned", "returned"]
    assert bundle.begun() == [0, 1]


def test_nothing_is_known_of_the_steps_of_a_worker_that_breaks_the_protocol(bundle: Bundle) -> None:
    bundle.give(3, waits=0)
    bundle.wait_begun(0)
    executor = bundle.pool.executor
    executor.child_broke_protocol(executor.pids()[0], RemoteProtocolError("as told"))
    ends = bundle.ends()
    assert len(ends) == 3
    assert all(end.startswith("lost: the worker process killed") for end in ends), ends


# --- one of them is to end -----------------------------------------------------------------------


@pytest.mark.parametrize("why", ["user", "timeout", "lost"])
def test_a_step_that_has_not_begun_is_taken_out_and_the_one_that_runs_goes_on(bundle: Bundle, why: Any) -> None:
    bundle.give(3, waits=0)
    bundle.wait_begun(0)
    bundle.pool.executor.end(bundle.steps[1].token, why, "as told")
    bundle.pool.until(lambda: bundle.pool.ended(bundle.steps[1].token), "it is returned")
    bundle.open_gate()
    assert bundle.ends() == ["StepSucceeded", "returned", "StepSucceeded"]
    assert bundle.begun() == [0, 2]
    assert not (bundle.folder / "killed").exists()


@pytest.mark.parametrize(("why", "is_hooked"), [("user", True), ("timeout", False), ("lost", False)])
def test_the_step_that_runs_is_ended_when_the_others_are_returned(bundle: Bundle, why: Any, is_hooked: bool) -> None:
    bundle.give(3, waits=0)
    bundle.wait_begun(0)
    bundle.pool.executor.end(bundle.steps[0].token, why, "as told")
    assert bundle.ends() == ["lost: as told", "returned", "returned"]
    assert (bundle.folder / "killed").exists() == is_hooked
    assert bundle.begun() == [0]


def test_a_step_that_has_ended_by_then_costs_the_next_one_nothing(author: Author, bundle: Bundle) -> None:
    """The outcome is on its way when the step is to be ended, and the worker runs another one by then."""
    ready(bundle.pool)
    bundle.give(3, waits=1)
    with (bundle.folder / "gate").open("w"):  # when the second step opens it, too, and nothing has been read meanwhile
        bundle.pool.executor.end(bundle.steps[0].token, "user", "as told")
        bundle.pool.until(lambda: bundle.pool.ended(bundle.steps[2].token), "the last one is returned")
    assert bundle.ends() == ["StepSucceeded", "StepSucceeded", "returned"]
    assert not (author.folder / "killed").exists()
    bundle.give(1)
    assert bundle.ends()[3] == "StepSucceeded"
    assert bundle.pool.spawned == 1


def test_a_worker_that_does_not_answer_a_recall_is_killed_when_its_step_is_to_end(
    author: Author, make_pool: MakePool
) -> None:
    pool = make_pool(end_grace_s=0.2)
    deaf = "[ctypes.PyDLL(None).pthread_mutex_lock(m) for m in [bytes(64)] * 2]"
    source = f"def f(context):\n    (Path(__file__).parent / 'deaf').touch()\n    {deaf}"
    first = author.step(source)
    steps = [first, author.step_of(Path(first.file))]
    for step in steps:
        pool.executor.submit(step, SHORT_S)
    pool.until((author.folder / "deaf").exists, "the step's begin")
    pool.executor.end(steps[0].token, "timeout", "too long")
    assert pool.wait_end(steps[0]) == StepLost(steps[0].token, "too long")
    assert pool.wait_end(steps[1]) == StepReturned(steps[1].token)


def test_a_worker_that_does_not_return_what_it_has_not_begun_is_killed(bundle: Bundle) -> None:
    """A worker that is stopped, or keeps Python's lock, holds up the steps of others for so long, and no longer."""
    bundle.give(3, waits=0)
    bundle.wait_begun(0)
    (pid,) = bundle.pool.executor.pids()
    stop(pid)
    bundle.pool.clock.passed_s += LONG_S
    bundle.pool.turn(0.0)
    bundle.pool.clock.passed_s += local.RECALL_ANSWER_MAX_S
    assert bundle.ends() == ["lost: the worker did not answer within 10 s", "returned", "returned"]


def test_a_recall_that_crosses_an_end_leaves_no_limit_behind(bundle: Bundle) -> None:
    """The worker returns the second step just as the first has ended, so the second was thought to have begun."""
    bundle.give(2, waits=0)
    bundle.wait_begun(0)
    executor = bundle.pool.executor
    executor._load_timeout_s = 30.0
    (pid,) = executor.pids()
    stop(pid)
    bundle.pool.clock.passed_s += LONG_S
    bundle.pool.turn(0.0)  # the second is recalled
    first, second = (step.token for step in bundle.steps)
    executor.child_said(pid, StepEnded(first, StepSucceeded()))
    member = executor._members[pid]
    assert member.worker.kill_at < math.inf
    executor.child_said(pid, StepsReturned((second,)))
    assert (member.worker.kill_at, member.load_text) == (math.inf, "")
    assert bundle.ends() == ["StepSucceeded", "returned"]


# --- how many ------------------------------------------------------------------------------------


def test_nothing_is_given_behind_a_step_of_unknown_length(author: Author, pool: Pool) -> None:
    ready(pool)
    assert (pool.executor.room(), pool.executor.rooms()) == (1, [])
    first = author.step("def f(context): pass")
    second = author.step_of(Path(first.file))
    pool.executor.submit(first)
    assert (pool.executor.room(), pool.executor.rooms()) == (0, [bundles.NONE])
    pool.executor.submit(second, SHORT_S)
    assert pool.executor.rooms() == [], "it waits for a worker"
    assert pool.wait_end(first) == StepSucceeded()
    assert pool.wait_end(second) == StepSucceeded()


def test_a_worker_that_is_replaced_ends_what_it_has(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "WORKER_STEPS_MAX", 2)
    monkeypatch.setattr(local, "STEPS_A_LOOK", 1)
    bundle.give(4, waits=3)
    bundle.wait_begun(3)
    (pid,) = bundle.pool.executor.pids()
    bundle.pool.until(lambda: bundle.pool.ended(bundle.steps[2].token), "the third outcome")
    assert bundle.pool.executor.rooms() == [bundles.NONE]
    bundle.open_gate()
    assert bundle.ends() == ["StepSucceeded"] * 4
    bundle.pool.until(lambda: pid not in bundle.pool.executor.pids(), "the old worker has left")
    bundle.give(1)
    assert bundle.ends()[4] == "StepSucceeded"
