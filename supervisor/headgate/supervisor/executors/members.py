"""A worker of the pool with the steps that it has: the first one runs, the others wait behind it."""

from __future__ import annotations

from collections import deque

import msgspec

from headgate.protocol.messages.worker import BUNDLE_MAX, RecallSteps, Step
from headgate.scheduling import bundles
from headgate.scheduling.bundles import Room
from headgate.supervisor.children.worker import Worker
from headgate.supervisor.executors.base import EndReason


class GivenStep(msgspec.Struct):
    """A step, how many seconds it is expected to take (None: nothing is known), and whether it is known to run."""

    step: Step
    expected_s: float | None
    has_begun: bool = False


class Ending(msgspec.Struct, frozen=True):
    """How a step is to be ended."""

    why: EndReason
    text: str


class Member:
    """A worker of the pool."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.given: deque[GivenStep] = deque()
        self.since = float("inf")  # when its first step became the first
        self.is_long = False  # that step: it has lasted so long that those behind it were recalled
        self.steps = 0  # that have ended here
        self.is_leaving = False  # it gets no more steps
        self.is_old = False  # it is to leave as soon as it has no step
        self.end_text: str | None = None  # why its step is to end
        self.end_why: EndReason | None = None
        self.endings: dict[str, Ending] = {}  # by token, of steps that are to be ended as soon as it runs no other
        self.load_text = ""  # that its DAG file took too long; '' if the file is loaded
        self.is_late = False  # it did
        self.limit_text = ""  # the limit for which we killed it
        self.stopped_since: float | None = None
        self.oom_kills = 0  # of the kernel until the step began
        self.printing: str | None = None  # the token of the step whose output is read; None: of the one that runs
        self.recalls = 0  # that it has not answered
        self.answer_by = float("inf")  # until then it has to answer
        self.recalled: set[str] = set()  # the tokens that these name
        self.has_broken_protocol = False

    @property
    def step(self) -> Step | None:
        """The step that it runs."""
        return self.given[0].step if self.given else None

    @property
    def ending(self) -> Ending | None:
        """How the step that it runs is to be ended, as soon as the worker has answered a recall."""
        return self.endings.get(self.given[0].step.token) if self.given else None

    @property
    def room(self) -> Room:
        """What it may be given behind the steps that it has."""
        is_last = self.is_leaving or self.is_old or self.is_long
        if not self.given or is_last or self.recalls or not self.worker.is_free:
            return bundles.NONE
        times = [given.expected_s for given in self.given]
        known = [time for time in times if time is not None]
        if len(known) < len(times):
            return bundles.NONE
        return Room(BUNDLE_MAX - len(known), bundles.BUNDLE_S - sum(known))

    @property
    def recall_at(self) -> float:
        """When the steps behind the first one are to be recalled, because that is a long one."""
        may_recall = len(self.given) > 1 and not self.recalls
        return self.since + bundles.RECALL_AFTER_S if may_recall else float("inf")

    def retire(self) -> None:
        """Have it leave: it runs no step any more."""
        self.is_leaving = True
        self.worker.retire()

    def find(self, instance: object) -> GivenStep | None:
        """Return the step of a task instance."""
        return next((given for given in self.given if given.step.task_instance_id == instance), None)

    def with_token(self, token: str) -> GivenStep | None:
        """Return the step with a token."""
        return next((given for given in self.given if given.step.token == token), None)

    def has_stood_for(self, seconds: float, now: float, *, is_stopped: bool) -> bool:
        """Note whether the process is stopped; return whether it has been for so long. That is said once."""
        if not is_stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        elif now - self.stopped_since >= seconds:
            self.stopped_since = float("inf")
            return True
        return False

    def recall(self, tokens: list[str], answer_by: float) -> None:
        """Ask the worker for those of these steps that it has not begun, unless it was asked before."""
        tokens = [token for token in tokens if token not in self.recalled]
        if tokens:
            self.recalls += 1
            self.answer_by = min(self.answer_by, answer_by)
            self.recalled.update(tokens)
            self.worker.send(RecallSteps(tuple(tokens)))

    def recall_rest(self, answer_by: float) -> None:
        """Recall all steps behind the first one."""
        self.recall([given.step.token for given in list(self.given)[1:]], answer_by)

    def take_back(self, tokens: tuple[str, ...]) -> None:
        """The worker has answered a recall with these tokens."""
        self.recalls -= 1
        if not self.recalls:
            self.answer_by = float("inf")
            self.recalled.clear()
        self.given = deque(given for given in self.given if given.step.token not in tokens)


def names_of(step: Step | None) -> dict[str, object]:
    """Return how a step is named in the log."""
    return {} if step is None else {"dag_id": step.dag_id, "task_id": step.task_id, "run_id": step.run_id}
