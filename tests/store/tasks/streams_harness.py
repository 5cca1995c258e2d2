"""A task with a stream in a store, whose trigger and worker are the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from tests.store.harness import QUEUES
from tests.supervisor.tasks_harness import Tasks

from headgate.protocol.messages.dags import TaskState
from headgate.protocol.messages.runner import EventKind, FinishedTrigger, FiredEvent, Outcome
from headgate.protocol.messages.steps import StepDeferred, StepFailed, StepHandled, StepOutcome, StepSucceeded, XCom
from headgate.protocol.messages.task_streams import HANDLER_METHOD, Handled, StreamOptions, StreamPart
from headgate.protocol.values import decode_value, encode_value
from headgate.store.ids import Epoch
from headgate.store.store import Store
from headgate.store.tasks.deferral import Deferral
from headgate.store.tasks.dispatch import TaskToRun
from headgate.store.tasks.outcomes import StepEnd, WorkerLost
from headgate.store.triggers.events import StoredSlice

S = TaskState


def stream_wait(options: StreamOptions | None = None, *, timeout_s: float | None = None, **kwargs: Any) -> Deferral:
    """A deferral with a stream; its trigger has these kwargs."""
    return Deferral(
        "pages.Pages",
        encode_value(kwargs, where="k"),
        HANDLER_METHOD,
        encode_value({"rows": 0}, where="k"),
        timeout_s,
        options or StreamOptions(),
    )


def handled(part: StreamPart, *, number: int | None = None, **state: Any) -> Handled:
    """The first events of a part as handled, all of them unless a number is given."""
    events = part.events if number is None else part.events[:number]
    return Handled(events[-1].id, len(events), encode_value(state, where="state"))


class Streams(Tasks):
    """A task ``a``, of which a try begins to stream. ``fired`` counts the events of its trigger's current run."""

    def __init__(self, store: Store, query: Callable[..., list[dict[str, Any]]], **changes: Any) -> None:
        super().__init__(store, query, **{"retries": 2, "retry_delay_s": 0.0, **changes})
        self.runs = 0
        self.fired = 0
        self.trigger_id = 0

    # --- the worker ---------------------------------------------------------------------------------

    def end(self, token: str, outcome: StepOutcome | WorkerLost, part: StreamPart | None = None) -> TaskState | None:
        """Store the outcome of a step that had this part; return the new state of the task."""
        events = () if part is None else tuple(event.id for event in part.events)
        (state,) = self.store.tasks.store_ends(self.epoch, [StepEnd(self.a, token, outcome, events)])
        return state

    def stream_it(self, wait: Deferral | None = None) -> TaskState | None:
        """Run ``execute``, which defers with a stream; claim its trigger if it can be; return the task's state."""

        fields = msgspec.structs.asdict(wait or stream_wait())
        del fields["signal"]
        state = self.end(self.run_it(), StepDeferred(**fields))
        self.trigger_id = self.stream()["trigger_id"]
        self.claim()
        return state

    def claim(self, epoch: Epoch | None = None) -> list[int]:
        """Claim all triggers; a claimed one begins a new run."""
        claimed = [row.id for row in self.store.claim_triggers(epoch or self.epoch, limit=10, queues=QUEUES)]
        if self.trigger_id in claimed:
            self.runs += 1
            self.fired = 0
        return claimed

    def take(self) -> tuple[TaskToRun, StreamPart]:
        """Dispatch the task; return it with the part of its stream."""
        (task,) = self.dispatch()
        assert task.stream is not None
        return task, task.stream

    def handle(self, *, xcoms: Sequence[XCom] = (), **state: Any) -> TaskState | None:
        """Dispatch the task, and have its step handle all events; return its new state."""
        task, part = self.take()
        return self.end(task.token, StepHandled(handled(part, **state), tuple(xcoms)))

    def fail_it(self, *, number: int = 0, error: str = "boom", **state: Any) -> TaskState | None:
        """Dispatch the task, and have its step fail behind its first events."""
        task, part = self.take()
        so_far = handled(part, number=number, **state) if number else None
        return self.end(task.token, StepFailed(error, "Traceback", handled=so_far))

    def retry(self) -> list[int]:
        """Let the retry delay be over."""
        return list(self.store.tasks.retry_due(self.epoch))

    # --- the trigger --------------------------------------------------------------------------------

    def run_name(self) -> str:
        return f"run-{self.trigger_id}.{self.runs}"

    def events(
        self, *payloads: Any, keyed: bool = False, is_last: bool = False, kind: EventKind = "event"
    ) -> list[FiredEvent]:
        """The next events of the current run; the last of them may be its last."""
        made = []
        for number, payload in enumerate(payloads, start=1):
            last = kind != "event" or (is_last and number == len(payloads))
            data = encode_value(payload, where="p")
            key = f"key-{payload}" if keyed else None
            event = FiredEvent(self.trigger_id, self.run_name(), self.fired, 1, data, key=key, kind=kind, is_last=last)
            made.append(event)
            self.fired += 1
        return made

    def fire(self, *payloads: Any, epoch: Epoch | None = None, **changes: Any) -> StoredSlice:
        """Store the next events of the current run, as the supervisor that owns the trigger."""
        return self.store.store_slice(epoch or self.epoch, events=self.events(*payloads, **changes))

    def finish(self, outcome: Outcome = "returned", *, error: str = "", epoch: Epoch | None = None) -> StoredSlice:
        """Report the end of the current run."""
        end = FinishedTrigger(self.trigger_id, self.run_name(), outcome, self.fired, error=error)
        return self.store.store_slice(epoch or self.epoch, finished=[end])

    def let_go(self) -> None:
        """Report that the current run was cancelled, and release the trigger, as a supervisor does afterwards."""
        self.finish("cancelled")
        self.store.release_triggers(self.epoch, [self.trigger_id])

    # --- what is stored -----------------------------------------------------------------------------

    def stream(self) -> dict[str, Any]:
        (row,) = self.query("SELECT * FROM task_stream WHERE task_instance_id = :id", id=self.a)
        return row

    def place(self) -> tuple[int, Any]:
        """How many events are handled, and the state that is stored with that."""
        row = self.stream()
        state = row["state"]
        return row["handled"], None if state is None else decode_value(self.store.database.secrets.decrypt(state))

    def is_open(self) -> bool:
        """Whether the trigger of the stream may run."""
        row = self.trigger(self.trigger_id)
        return row["finished_at"] is None and row["removed_at"] is None

    def succeed_it_with(self, task: TaskToRun, part: StreamPart) -> TaskState | None:
        """End the task with a step, which has handled all its events."""
        return self.end(task.token, StepSucceeded(handled=handled(part) if part.events else None))

    def succeed_it(self) -> TaskState | None:
        """Dispatch the task, and have its step end the task."""
        return self.succeed_it_with(*self.take())


def payloads(part: StreamPart) -> list[Any]:
    return [decode_value(event.payload) for event in part.events]
