"""The handler of a stream, in the simulation of tasks. Its state is how many numbers it has taken, and their chain."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from tests.proof.history.stream_history import link
from tests.proof.simulation.tasks.streams.plans import Call
from tests.proof.simulation.tasks.streams.source import SimulatedSource

from headgate.protocol.messages.task_streams import HANDLER_METHOD
from headgate.protocol.values import decode_value
from headgate.tasks import BaseOperator, Context, TaskFailed, TaskSkipped
from headgate.tasks.streaming import StreamedEvent

if TYPE_CHECKING:
    from tests.proof.simulation.tasks.scenario import Task

TAKES_ONE: Final = "take"
METHODS: Final = frozenset({HANDLER_METHOD, TAKES_ONE})
BEGIN: Final[dict[str, Any]] = {"count": 0, "chain": ""}
HANDLED_KEY: Final = "handled"  # of the XCom that each step leaves


class HandlerFailed(Exception):
    """What a handler raises because its plan says so."""


def state_text(state: bytes | None) -> str:
    """Return a state as histories have it; empty if there is none yet."""
    said = None if state is None else decode_value(state)
    return "" if said is None else f"{said['count']} {said['chain']}".strip()


BEGIN_TEXT: Final = "0"


class StreamOperator(BaseOperator):
    """The part of the simulated operator that takes a stream. ``call`` is what the next call of a handler does."""

    plan: Task
    name: str
    call: Call = Call()
    leg = 0
    has_ended = False
    reported = 0  # events that the handler has said are handled
    takes_no_more = False  # it has ended its stream

    def begin_stream(self) -> None:
        """Defer with the stream of the plan."""
        stream = self.plan.stream
        assert stream is not None
        self.defer(
            trigger=SimulatedSource(self.name),
            method_name=TAKES_ONE if stream.takes_one else HANDLER_METHOD,
            kwargs=BEGIN,
            timeout=None if stream.timeout_s is None else timedelta(seconds=stream.timeout_s),
            stream=stream.asked,
            ahead=stream.ahead,
            poison=stream.poison,
        )

    def run_leg(self, context: Context, number: int) -> None:
        """Do what the plan says of a leg."""
        raise NotImplementedError

    def handle_trigger_events(
        self, events: Sequence[StreamedEvent], context: Context, count: int, chain: str
    ) -> dict[str, Any] | None:
        """Add the numbers to the chain, or fail in the middle."""
        first = count
        for index, event in enumerate(events):
            if self._fails(event, is_middle=index == len(events) // 2):
                if index and self.call.end != "fails":
                    context["ti"].xcom_push(HANDLED_KEY, f"{first} to {count}")
                    self.handled(events[index - 1], count=count, chain=chain)
                    self.reported = index
                raise self._failure()
            count, chain = count + 1, link(chain, event.payload["number"])
            if self.call.end == "reports":
                self.handled(event, count=count, chain=chain)
                self.reported = index + 1
        context["ti"].xcom_push(HANDLED_KEY, f"{first} to {count}")
        stops_at = None if self.plan.stream is None else self.plan.stream.stops_at
        if self.call.end == "ends" or (stops_at is not None and count >= stops_at):
            self._end()
        self.reported = len(events)
        return None if self.call.end == "reports" else {"count": count, "chain": chain}

    def take(self, context: Context, event: Any, count: int, chain: str) -> None:
        """Take one event, as an operator does that knows no streams."""
        number = int(event["number"])
        unfit = () if self.plan.stream is None else self.plan.stream.unfit
        if number in unfit or self.call.end in ("fails", "fails_late", "gives_up", "skips"):
            raise self._failure()
        context["ti"].xcom_push(HANDLED_KEY, f"{number} alone")
        if self.call.end == "ends":
            self._end()
        self.reported += 1

    def _end(self) -> None:
        self.takes_no_more = True
        self.end_stream()

    def stream_ended(self, context: Context, count: int, chain: str) -> None:
        """Go on with the leg behind the stream."""
        self.has_ended = True
        self.run_leg(context, self.leg + 1)

    def _fails(self, event: StreamedEvent, *, is_middle: bool) -> bool:
        unfit = () if self.plan.stream is None else self.plan.stream.unfit
        raises = self.call.end in ("fails", "fails_late", "gives_up", "skips")
        return event.payload["number"] in unfit or (raises and is_middle)

    def _failure(self) -> Exception:
        match self.call.end:
            case "gives_up":
                return TaskFailed("for good, as planned")
            case "skips":
                return TaskSkipped("as planned")
            case _:
                return HandlerFailed("as planned")
