"""The life of the runner's process: when it is spawned, drained, asked for its stacks, and killed.

::

    ABSENT ──Spawn──▶ STARTING ──Hello──▶ RUNNING ──Drain──▶ DRAINING
      ▲                  │                   │                  │
      └──────────────────┴──── its end ──────┴──────────────────┘

Like the core, it takes events and a clock, and adds commands to the core's list.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from headgate.protocol.messages.runner import (
    PROTOCOL_VERSION,
    Drain,
    FromSupervisor,
    Hello,
    RunnerFigures,
    RunnerSettings,
    Welcome,
)
from headgate.scheduling.why import RunnerEnds
from headgate.supervisor.backoff import RateBackoff
from headgate.supervisor.children.process import without_output
from headgate.supervisor.commands import Command, DumpStacks, Kill, Send, Spawn
from headgate.supervisor.leaving import DRAIN_MARGIN_S, Leaving
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.figures import Figures

log = structlog.get_logger(__name__)

LINK_LOST_GRACE_S = 1.0  # a runner that closed its link by exiting is gone by then
DUMP_TO_KILL_S = 1.0  # between asking a stuck runner for its stacks and killing it: it needs to write them
ENDS_WINDOW_S = 600.0  # ends that nobody asked for are told to others for so long
ENDS_COUNTED_MAX = 1000  # of one window
WAIT_TOLD_MIN_S = 1.0  # a shorter wait before the next start is none to speak of
NO_ANSWER = "it did not end or answer in time"


class RunnerState(enum.Enum):
    """The runner, as far as the core knows."""

    ABSENT = "absent"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"


class RunnerLifecycle:
    """One runner after the other, each with its own incarnation number.

    A runner that ends unexpectedly is started again after the backoff ``respawn``. One that is silent for
    ``silence_max_s`` is killed, unless ``is_owed_answer`` of its incarnation is true: then it waits for the supervisor,
    and its silence counts from the answer. ``commands`` is the list of the core.

    Silence is judged only by a `step` whose ``now`` is later than the reading of all messages that had arrived, and
    before the step has waited for the database: the loop reads, asks for the time, then steps.
    """

    def __init__(
        self,
        commands: list[Command],
        leaving: Leaving,
        *,
        settings: RunnerSettings,
        respawn: RateBackoff,
        silence_max_s: float,
        drain_s: float,
        is_owed_answer: Callable[[int], bool],
        figures: Figures | None = None,
    ) -> None:
        self._figures = Figures() if figures is None else figures
        self.incarnation = 0
        self.told = RunnerFigures()  # what it has said of its streams last
        self.state = RunnerState.ABSENT
        self._commands = commands
        self._leaving = leaving
        self._settings = settings
        self._respawn = respawn
        self._silence_max_s = silence_max_s
        self._drain_s = drain_s
        self._is_owed_answer = is_owed_answer
        self._spawn_at = 0.0
        self._heard_at = 0.0
        self._stepped_at = 0.0
        self._kill_at: float | None = None
        self._kill_because = NO_ANSWER
        self._is_dumped = False  # it was asked for its stacks, and has not said anything since
        self._ended_at: deque[float] = deque(maxlen=ENDS_COUNTED_MAX)  # unless it was asked to
        self._ended_as = ""  # the last time
        self._wait_s = 0.0  # before the next start

    # --- events -----------------------------------------------------------------------------------

    def heard(self, incarnation: int, now: float) -> None:
        """Take note of a sign of life."""
        if incarnation == self.incarnation:
            self._heard_at = now
            if self._is_dumped:
                log.info("the runner is not silent any more", incarnation=incarnation)
                self._is_dumped, self._kill_at = False, None

    def tell(self, incarnation: int, figures: RunnerFigures | None) -> None:
        """Take note of what the runner says of its streams; None: nothing new."""
        if incarnation == self.incarnation and figures is not None:
            self.told = figures

    def hello(self, hello: Hello) -> None:
        """Welcome the runner. If the supervisor is leaving, drain it at once."""
        log.info("the runner is ready", incarnation=hello.incarnation, pid=hello.pid)
        self.state = RunnerState.RUNNING
        self.send(Welcome(PROTOCOL_VERSION, hello.incarnation, self._settings))
        if self.is_last:
            self._drain()

    def link_closed(self, now: float) -> None:
        """Kill the process if it does not end soon: it can neither report anything nor receive anything any more.

        In a drain it has until the drain's deadline, because its hooks may still run.
        """
        if self.state in (RunnerState.STARTING, RunnerState.RUNNING):
            self._is_dumped = False
            self._kill_because = "it has closed its link"
            self._kill_at = min(now + LINK_LOST_GRACE_S, math.inf if self._kill_at is None else self._kill_at)

    def ended(self, explanation: str, now: float, *, is_explained: bool = False) -> None:
        """Handle the end of the process: set the time at which the next one is spawned.

        ``is_explained``: it is known which trigger caused the end, and the next runner starts without it. Then the end
        does not count for the backoff.
        """
        expected = self.state is RunnerState.DRAINING
        self.state = RunnerState.ABSENT
        self._kill_at = None
        self._is_dumped = False
        wait_s = 0.0 if expected else self._respawn.first() if is_explained else self._respawn.fail(now)
        self._spawn_at, self._wait_s = now + wait_s, wait_s
        if not expected:
            self._figures.add(catalogue.RUNNER_ENDS)
            self._ended_at.append(now)
            self._ended_as = without_output(explanation)
        report = log.info if expected else log.error
        report("the runner ended", how=explanation, incarnation=self.incarnation, respawn_in_s=round(wait_s, 3))

    # --- the step ---------------------------------------------------------------------------------

    def step(self, now: float, *, may_spawn: bool) -> None:
        """Spawn, dump or kill, if one of them is due."""
        self._excuse_own_pause(now)
        if self.state is RunnerState.ABSENT:
            if may_spawn and now >= self._spawn_at:
                self._spawn(now)
        elif self._kill_at is not None:
            if now >= self._kill_at:
                self._kill(now)
        elif self._is_dumped:
            self._kill_at = now + DUMP_TO_KILL_S  # the first step after the one that asked for the stacks
        elif now >= self._heard_at + self._silence_max_s:  # the same sum as in `wake_at`
            self._blame_silence(now)

    def wake_at(self) -> float:
        """Return the time at which `step` must be called even if nothing happens."""
        if self.state is RunnerState.ABSENT:
            return self._spawn_at
        if self._is_dumped and self._kill_at is None:
            return self._stepped_at
        return self._heard_at + self._silence_max_s if self._kill_at is None else self._kill_at

    @property
    def running(self) -> int:
        """The incarnation of the runner that is running, 0 if none is."""
        return self.incarnation if self.state is RunnerState.RUNNING else 0

    @property
    def is_last(self) -> bool:
        """Whether no other is started after this one: the supervisor has decided to leave."""
        return self._leaving.exit is not None

    def ends(self) -> RunnerEnds | None:
        """Return how often runners have ended of late unless they were asked to; None if none has.

        It is the same until a runner ends or starts, or an end is older than `ENDS_WINDOW_S`.
        """
        while self._ended_at and self._ended_at[0] <= self._stepped_at - ENDS_WINDOW_S:
            self._ended_at.popleft()
        if not self._ended_at:
            return None
        waits = self.state is RunnerState.ABSENT and not self.is_last and self._wait_s >= WAIT_TOLD_MIN_S
        return RunnerEnds(len(self._ended_at), ENDS_WINDOW_S, self._ended_as, round(self._wait_s, 1) if waits else 0.0)

    def is_listening(self, incarnation: int) -> bool:
        """Whether this incarnation can be answered: its answer must not go to a later one (I6)."""
        return incarnation == self.incarnation and self.state in (RunnerState.RUNNING, RunnerState.DRAINING)

    def send(self, message: FromSupervisor) -> None:
        """Send a message to the current runner."""
        self._commands.append(Send(message))

    def leave(self, kill_at: float) -> None:
        """Drain the runner, and kill it if it is still there at ``kill_at``."""
        self._kill_at, self._is_dumped = kill_at, False
        if self.state is RunnerState.RUNNING:
            self._drain()

    def replace(self, stuck: Sequence[int], now: float) -> None:
        """Drain a runner with triggers that swallow their cancellation: they end only together with their process."""
        if self.state is not RunnerState.RUNNING:
            return
        log.error("triggers do not end when cancelled; replacing the runner", trigger_ids=list(stuck))
        self._drain()
        self._kill_at, self._is_dumped = now + self._drain_s + DRAIN_MARGIN_S, False

    def _spawn(self, now: float) -> None:
        self.incarnation += 1
        self.told = RunnerFigures()
        self.state = RunnerState.STARTING
        self._kill_because = NO_ANSWER
        self._heard_at = now
        self._commands.append(Spawn(self.incarnation))

    def _drain(self) -> None:
        self.state = RunnerState.DRAINING
        self.send(Drain(self._drain_s))

    def _kill(self, now: float) -> None:
        self._kill_at = None
        self._is_dumped = False
        self._heard_at = now  # it must not be killed a second time before it is reaped
        self._commands.append(Kill(self._kill_because))
        self._leaving.cut_short("the runner did not come to the end of its drain in time")

    def _blame_silence(self, now: float) -> None:
        """Let a runner that is stuck dump its stacks, and kill it unless it says something."""
        log.error("the runner is silent; dumping its stacks", silent_s=round(now - self._heard_at, 1))
        self._commands.append(DumpStacks())
        self._is_dumped = True

    def excuse_own_silence(self, now: float) -> None:
        """Note that the runner waits for our answer, if it does: call it before the step that may send the answer."""
        if self._is_owed_answer(self.incarnation):
            self._heard_at = max(self._heard_at, now)

    def _excuse_own_pause(self, now: float) -> None:
        """Wait longer if this process itself was stopped or suspended: the runner's messages may not be read yet."""
        if now - self._stepped_at >= self._silence_max_s / 2:
            self._heard_at = max(self._heard_at, now - self._silence_max_s / 2)
        self._stepped_at = now
