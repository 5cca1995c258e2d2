"""What a seed of tasks means for a stream: what its trigger fires, what its handler does, and how it is drawn."""

from __future__ import annotations

import random
from typing import Literal

from tests.proof.simulation.scenario import Part

from headgate.protocol.messages.task_streams import EVENTS_PER_STEP, PoisonRule, StreamContract
from headgate.tasks import Batch, Each, Latest
from headgate.tasks.streaming import Stream as Asked

Trouble = Literal["", "dies_before", "dies_after", "cut", "twice", "late", "stubborn"]
CallEnd = Literal["return", "reports", "fails", "fails_late", "gives_up", "skips", "ends"]
SourceEnd = Literal["returns", "is_last", "success", "failed", "skipped", "never"]


class Call(Part, frozen=True):
    """What one call of a handler does, and what happens to its worker.

    It returns the state, or ``reports`` each event by `handled()` and returns None, or ``ends`` the stream. The others
    raise in the middle of their events: ``fails`` has handled none, the rest have handled what is in front.
    """

    end: CallEnd = "return"
    trouble: Trouble = ""


class Stream(Part, frozen=True):
    """The stream of a task, over all its tries.

    **Its trigger** fires the numbers up to ``total``, each after ``gap_s``: with keys from 0 on, whenever it runs, or
    else after its last event. In front of each number in ``breaks`` it fails, the first time. Then it ends so; behind
    an event that it says is its last it runs on for ``rest_s``.

    **Its handler** takes ``seconds``. The first ``calls`` of it are these, over all tries. It always fails at the
    numbers ``unfit``, and ends the stream when it has taken ``stops_at``. ``takes_one``: it is a method for one event.
    """

    contract: StreamContract = "available"
    count: int = EVENTS_PER_STEP
    batch_s: float | None = None
    ahead: int = 1000
    poison: PoisonRule = "fail"
    timeout_s: float | None = None
    total: int = 3
    keyed: bool = False
    gap_s: float = 0.0
    breaks: tuple[int, ...] = ()
    ending: SourceEnd = "returns"
    rest_s: float = 0.0
    seconds: float = 0.0
    calls: tuple[Call, ...] = ()
    unfit: tuple[int, ...] = ()
    stops_at: int | None = None
    takes_one: bool = False

    @property
    def asked(self) -> Asked:
        """The stream as an author asks for it."""
        match self.contract:
            case "batch":
                return Batch(count=self.count, seconds=self.batch_s)
            case "each":
                return Each()
            case "latest":
                return Latest()
            case _:
                return True

    @property
    def step_max(self) -> int:
        """How many events a step gets at most."""
        return min(self.count, self.ahead)

    def call(self, number: int) -> Call:
        """Return what a call does, by its number from 0 on."""
        return self.calls[number] if number < len(self.calls) else Call()


ENDINGS: tuple[SourceEnd, ...] = (
    *("returns", "returns", "returns", "is_last", "is_last", "is_last"),
    *("success", "failed", "skipped", "never"),
)
CALLS: tuple[CallEnd, ...] = ("reports", "reports", "fails", "fails", "fails_late", "fails_late", "gives_up", "skips")
TROUBLES: tuple[Trouble, ...] = ("dies_before", "dies_after", "dies_after", "cut", "twice", "late", "stubborn")


def draw(rng: random.Random) -> Stream:
    """Return the stream of a task."""
    contract: StreamContract = rng.choice(("available", "available", "each", "batch", "batch", "latest", "latest"))
    count = {"batch": rng.choice((2, 3, 5)), "available": EVENTS_PER_STEP}.get(contract, 1)
    total = rng.choice((0, 1, 3, 4, 5, 6, 7, 8))
    ending = rng.choice(ENDINGS)
    stops_at = rng.randint(1, total) if total and rng.random() < 0.15 else None
    timeout_s = rng.choice((None, None, 3.0, 20.0))
    if ending == "never" and timeout_s is None:
        timeout_s = 3.0
    ahead = rng.choice((1, 2, 3, 1000))
    return Stream(
        contract,
        count,
        batch_s=rng.choice((None, 0.3, 1.0, 5.0)) if contract == "batch" else None,
        ahead=max(ahead, count) if contract == "batch" else ahead,
        poison=rng.choice(("fail", "skip")),
        timeout_s=timeout_s,
        total=total,
        keyed=rng.random() < 0.5,
        gap_s=rng.choice((0.0, 0.0, 0.0, 0.05, 0.3, 0.8)),
        breaks=_some(rng, total) if rng.random() < 0.25 else (),
        ending=ending,
        rest_s=rng.choice((0.0, 0.0, 0.4)),
        seconds=rng.choice((0.0, 0.05, 0.3, 0.3, 1.0)),
        calls=tuple(_draw_call(rng) for _ in range(rng.choice((0, 2, 4, 6)))),
        unfit=_some(rng, total) if rng.random() < 0.25 else (),
        stops_at=stops_at,
        takes_one=rng.random() < 0.15,
    )


def _some(rng: random.Random, total: int) -> tuple[int, ...]:
    return tuple(sorted({rng.randrange(total) for _ in range(rng.choice((1, 1, 2)))})) if total else ()


def _draw_call(rng: random.Random) -> Call:
    end: CallEnd = "return"
    if rng.random() < 0.4:
        end = rng.choice(CALLS) if rng.random() < 0.9 else "ends"
    return Call(end, rng.choice(TROUBLES) if rng.random() < 0.2 else "")
