"""Operators decide about signals in workers of their own: whatever one does, others do not wait for it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.supervisor.executors.workers_harness import Author, Loop, closing

from headgate.protocol.messages.queries import StartSignal
from headgate.protocol.messages.worker import DecideSignals, WorkerSettings
from headgate.protocol.values import encode_value
from headgate.supervisor.executors import deciders
from headgate.supervisor.executors.deciders import DECISION_S_MAX, LONG_S, Answer, Decider, Deciders

GATE = """
class Gate(BaseOperator):
    def on_signal(self, signal):
        print("about", signal.key, signal.version)
{body}

from headgate.signals import SignalAction, On
with DAG("d"):
    Gate(task_id="t", signals=[On("drift")])
"""
DECIDES = "if signal.value == 'bad':\n    {bad}\nreturn SignalAction.RESTART if signal.value else 'NONE'"


class Asking(Loop):
    """A loop around `Deciders`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._tokens = itertools.count()
        settings = WorkerSettings(import_paths=(str(folder),))

        def make() -> Decider:
            return Decider(
                self.selector,
                self.spawn,
                timeout_s=DECISION_S_MAX,
                settings=settings,
                on_record=lambda asked, record: self.records.append((asked, record)),
                on_output=lambda asked, line: self.output.append((asked, line)),
                clock=self.clock,
            )

        self.deciders = Deciders(make, clock=self.clock)
        self.parts.append(self.deciders)

    def give(self, file: Path, *values: object) -> DecideSignals:
        signals = tuple(
            StartSignal("drift", "default", number, encode_value(value, where="value"))
            for number, value in enumerate(values, 1)
        )
        asked = DecideSignals(f"token-{next(self._tokens)}", 1, str(file), "d", "r", "t", 1, signals)
        assert self.deciders.room(self.clock()) > 0
        self.deciders.decide(asked)
        return asked

    def answer(self, asked: DecideSignals) -> Answer:
        def found() -> list[Answer]:
            return [event for event in self.events if event.asked == asked]

        self.until(found, "the answer")
        (answer,) = found()
        assert isinstance(answer, Answer)
        return answer


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path)


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[Asking]:
    with closing(Asking(tmp_path)) as asking:
        yield asking


def gate(author: Author, bad: str, name: str = "dag.py") -> Path:
    body = DECIDES.format(bad=bad).replace("\n", "\n        ")
    return author.write(GATE.format(body="        " + body), name)


def test_an_operator_is_asked_about_signals_in_their_order(author: Author, asking: Asking) -> None:
    file = gate(author, "pass")
    for _ in range(2):
        answer = asking.answer(asking.give(file, 0.5, 0, None, "x"))
        assert (answer.actions, answer.error) == (("RESTART", "NONE", "NONE", "RESTART"), "")
    assert asking.lines()[:2] == ["about drift 1", "about drift 2"]
    assert asking.spawned == 1


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("raise ValueError('no idea')", r"^ValueError: no idea$"),
        ("sys.exit(3)", r"^SystemExit: 3$"),
        ("return 'GO'", r"^TypeError: Gate.on_signal returned 'GO'; expected one of SignalAction.NONE, "),
        ("return None", r"^TypeError: Gate.on_signal returned None; "),
        ("os._exit(3)", r"^the process that decided it exited with code 3$"),
        ("os.kill(os.getpid(), signal_module.SIGKILL)", r"killed by SIGKILL$"),
    ],
)
def test_what_is_decided_before_a_bad_signal_counts_and_the_next_one_is_asked(
    author: Author, asking: Asking, bad: str, error: str
) -> None:
    file = gate(author, bad.replace("signal_module", "__import__('signal')"))
    answer = asking.answer(asking.give(file, 1, "bad", 2))
    assert answer.actions == ("RESTART",)
    assert re.search(error, answer.error), answer.error
    assert asking.answer(asking.give(file, 2)).actions == ("RESTART",)


def test_a_fork_of_the_code_decides_nothing(author: Author, asking: Asking) -> None:
    file = gate(author, "os.fork()")
    answer = asking.answer(asking.give(file, "bad", 1))
    assert (answer.actions, answer.error) == (("RESTART", "RESTART"), "")
    assert asking.answer(asking.give(file, 0)).actions == ("NONE",)


def test_a_file_that_cannot_be_loaded_decides_nothing_and_nobody_was_asked(author: Author, asking: Asking) -> None:
    answer = asking.answer(asking.give(author.write("raise RuntimeError('half written')"), 1))
    assert answer.actions == ()
    assert "cannot be loaded: RuntimeError: half written" in answer.error
    assert answer.is_unloaded
    assert not asking.answer(asking.give(gate(author, "raise ValueError"), "bad")).is_unloaded


def test_one_that_hangs_is_ended_and_holds_up_no_other(author: Author, asking: Asking, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    hanging = asking.give(gate(author, f"Path('{begun}').write_text('yes'); wait_for_ever()"), 1, "bad")
    asking.until(begun.exists, "it hangs")
    good = gate(author, "pass", "good.py")
    asking.clock.passed_s += LONG_S
    assert asking.answer(asking.give(good, 1)).actions == ("RESTART",)
    asking.clock.passed_s += DECISION_S_MAX
    answer = asking.answer(hanging)
    assert answer.actions == ("RESTART",), "the one before it counts"
    assert answer.error == "it took longer than 30 s to decide (the limit of on_signal)"
    assert re.search(r'dag\.py", line \d+ in on_signal', answer.traceback)
    asking.clock.passed_s += deciders.IDLE_S
    asking.turn(0.0)
    assert asking.deciders.room(asking.clock()) == 1, "the first stays"


class Still:
    """A decider that is asked, and does not answer until it is told to."""

    def __init__(self) -> None:
        self.is_busy = False
        self.since = 0.0
        self.is_closed = False

    def room(self) -> int:
        return int(not self.is_busy)

    def decide(self, asked: object) -> None:
        self.is_busy = True

    def events(self, now: float) -> list[Answer]:
        return []

    def wake_at(self) -> float:
        return float("inf")

    def close(self) -> None:
        self.is_closed = True


def test_another_worker_is_started_if_all_are_busy_for_long_and_leaves_if_none_needs_it() -> None:
    made: list[Still] = []

    def make() -> Any:
        made.append(Still())
        made[-1].since = now
        return made[-1]

    now = 100.0
    pool = Deciders(make, clock=lambda: now)
    asked: Any = None
    for number in range(1, deciders.DECIDERS_MAX + 1):
        assert pool.room(now) == 1
        pool.decide(asked)
        assert (len(made), pool.room(now)) == (number, 0), "most decisions take no time"
        is_last = number == deciders.DECIDERS_MAX
        assert pool.wake_at(is_asked=True) == (float("inf") if is_last else now + LONG_S)
        now += LONG_S
    assert pool.room(now + 1000) == 0
    made[3].is_busy = made[0].is_busy = False
    assert (pool.room(now), pool.wake_at(is_asked=True)) == (2, 0.0)
    pool.events(now := made[3].since + deciders.IDLE_S)
    assert [one.is_closed for one in made[:4]] == [False, False, False, True]
    assert pool.room(now) == 1, "the first stays"
