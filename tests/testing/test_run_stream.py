"""`run_task` with a stream: its steps come as in production, and what was handled is not handled again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import trio

from headgate.tasks import BaseOperator, Batch, Each, Latest, StartTriggerArgs, TaskDeferralError
from headgate.testing import Misbehaved, TaskNeverEnds, TaskNotSuccessful, run_task
from headgate.triggers.base import BaseTrigger, TaskSkippedEvent, TriggerEvent
from headgate.triggers.paging import Page, PagedTrigger

MINUTE = timedelta(minutes=1)


class Ticks(BaseTrigger):
    """Fires a number every minute: up to ``last``, for ever, or until it fails."""

    def __init__(self, last: int | None = None, then: str = "return") -> None:
        self.last, self.then = last, then

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Ticks", {"last": self.last, "then": self.then}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        before = await self.last_event()
        number = 0 if before is None else before.payload
        while self.last is None or number < self.last:
            await trio.sleep(60)
            number += 1
            yield TriggerEvent(number, key=str(number), is_last=self.then == "say" and number == self.last)
        match self.then:
            case "fail":
                raise ConnectionError("gone")
            case "skip":
                yield TaskSkippedEvent()
            case "wait":
                await trio.sleep_forever()
            case _:
                pass


class Adds(BaseOperator):
    """Adds the numbers of its trigger up, and keeps how many came together."""

    def __init__(self, trigger: BaseTrigger, stream: Any = True, **deferral: Any) -> None:
        options = {name: deferral.pop(name) for name in ("execution_timeout",) if name in deferral}
        super().__init__(task_id="adds", **options)
        self.trigger, self.stream, self.deferral = trigger, stream, deferral
        self.broken = False

    def execute(self, context: Any) -> None:
        self.defer(trigger=self.trigger, stream=self.stream, kwargs={"total": 0, "steps": []}, **self.deferral)

    def handle_trigger_events(self, events: Any, context: Any, total: int, steps: list[int]) -> dict[str, Any]:
        for event in events:
            if event.payload == 3 and context["try_number"] == 1 and self.stream is not True:
                raise ValueError("three")
            total += event.payload
            self.handled(event, total=total, steps=steps)
            if event.payload == 99:
                self.end_stream()
        return {"total": total, "steps": [*steps, len(events)]}

    def stream_ended(self, context: Any, total: int, steps: list[int]) -> Any:
        return [total, steps]


def test_each_event_is_a_step_as_it_comes_and_the_end_of_the_trigger_ends_the_stream() -> None:
    result = run_task(Adds(Ticks(4)))
    assert result.value == [10, [1, 1, 1, 1]]
    assert (result.handled, result.stream_state) == ([1, 2, 3, 4], {"total": 10, "steps": [1, 1, 1, 1]})
    assert result.waited == 4 * MINUTE
    assert [(wait.method_name, wait.failure) for wait in result.deferrals] == [("handle_trigger_events", "")]


def test_the_last_event_ends_the_stream_in_its_own_step() -> None:
    assert run_task(Adds(Ticks(2, "say"))).value == [3, [1, 1]]


def test_a_trigger_that_returns_without_an_event_is_an_empty_stream() -> None:
    result = run_task(Adds(Ticks(0)))
    assert (result.value, result.handled, result.stream_state) == ([0, []], [], None)


@pytest.mark.parametrize(
    ("stream", "steps", "waited"),
    [
        (Batch(count=2), [2, 2, 1], 5),
        (Batch(count=10, seconds=90), [2, 2, 1], 5),
        (Batch(count=10), [5], 5),
    ],
)
def test_a_batch_comes_together(stream: Any, steps: list[int], waited: int) -> None:
    result = run_task(Adds(Ticks(5), stream), try_number=2)
    assert result.value == [15, steps]
    assert result.waited == waited * MINUTE


def test_a_handler_ends_the_stream_of_an_endless_trigger() -> None:
    result = run_task(Adds(Ticks()), events=[5, 99, 7])
    assert (result.value[0], result.handled) == (104 + 7, [5, 99, 7])
    assert run_task(Adds(Ticks(), Each()), events=[5, 99, 7]).handled == [5, 99]


def test_events_given_by_hand_stand_for_the_trigger() -> None:
    given = [1, TriggerEvent(2, key="k"), TriggerEvent(5, key="k"), TriggerEvent(4, is_last=True)]
    result = run_task(Adds(Ticks()), events=given)
    assert (result.value, result.waited) == ([7, [3]], timedelta(0))
    assert run_task(Adds(Ticks(), Latest()), events=given, try_number=2).handled == [4]
    failed = run_task(Adds(Ticks()), events=[1, OSError("gone")])
    assert (failed.handled, failed.error) == ([1], "TaskDeferralError: OSError: gone")


def test_a_try_that_failed_in_the_middle_goes_on_behind_what_it_has_handled() -> None:
    operator = Adds(Ticks(5, "wait"), Batch(count=5))
    failed = run_task(operator)
    assert (failed.state, failed.error) == ("failed", "ValueError: three")
    assert (failed.handled, failed.stream_state) == ([1, 2], {"total": 3, "steps": []})
    again = run_task(operator, after=failed, try_number=2, events=[3, 99])
    assert again.value == [3 + 3 + 4 + 5 + 3 + 99, [5]]
    assert again.handled == [1, 2, 3, 4, 5, 3, 99]
    assert failed.handled == [1, 2], "a result does not change"


def test_the_trigger_of_the_next_try_goes_on_after_the_newest_event() -> None:
    operator = Adds(Ticks(6), Batch(count=2))
    failed = run_task(operator)
    assert failed.handled == [1, 2]
    again = run_task(operator, after=failed, try_number=2)
    assert again.handled == [1, 2, 3, 4, 5, 6]
    assert again.waited == 2 * MINUTE, "3 and 4 were there"


def test_execute_sees_the_stream_that_it_goes_on_with() -> None:
    seen: list[Any] = []

    class Looks(Adds):
        def execute(self, context: Any) -> None:
            seen.append(context["stream"])
            super().execute(context)

    operator = Looks(Ticks(4), Batch(count=4))
    run_task(operator, after=run_task(operator), try_number=2)
    assert seen == [None, (2, 2, {"total": 3, "steps": []})]


def test_a_trigger_that_fails_fails_the_task_behind_its_events() -> None:
    result = run_task(Adds(Ticks(2, "fail")))
    assert (result.state, result.handled) == ("failed", [1, 2])
    assert result.error.startswith(f"{TaskDeferralError.__name__}: ConnectionError: gone")
    assert result.deferrals[0].failure == "ConnectionError: gone"


def test_an_event_that_ends_the_task_ends_it_behind_those_before() -> None:
    result = run_task(Adds(Ticks(2, "skip"), Batch(count=2)))
    assert (result.state, result.handled) == ("skipped", [1, 2])


def test_a_timeout_counts_from_step_to_step_and_the_execution_timeout_over_all() -> None:
    assert run_task(Adds(Ticks(5), timeout=MINUTE * 1.5)).state == "success"
    slow = run_task(Adds(Ticks(5), Batch(count=3), timeout=MINUTE * 1.5), try_number=2)
    assert (slow.error.split(":")[0], slow.handled) == ("TriggerTimeout", [])
    ended = run_task(Adds(Ticks(5), execution_timeout=MINUTE * 2.5))
    assert (ended.handled, ended.waited) == ([1, 2], MINUTE * 2.5)
    assert "its execution_timeout is over" in ended.error


def test_a_stream_that_never_ends_is_found() -> None:
    with pytest.raises(TaskNeverEnds, match="has fired nothing within 0:10:00"):
        run_task(Adds(Ticks(3, "wait")), within=10 * MINUTE)


def test_stream_ended_may_wait_for_something_else() -> None:
    class Waits(Adds):
        def stream_ended(self, context: Any, total: int, steps: list[int]) -> Any:
            self.defer(trigger=Ticks(1), method_name="finish", kwargs={"total": total})

        def finish(self, context: Any, event: Any, total: int) -> Any:
            assert context["stream"] is None
            return total + event

    result = run_task(Waits(Ticks(2)))
    assert (result.value, result.handled, len(result.deferrals)) == (4, [1, 2], 2)


def test_a_task_takes_a_stream_from_the_trigger_that_it_starts_in() -> None:
    class Starts(Adds):
        start_from_trigger = True
        start_trigger_args = StartTriggerArgs(
            f"{__name__}.Ticks", trigger_kwargs={"last": 2}, next_kwargs={"total": 0, "steps": []}, stream=True
        )

    assert run_task(Starts(Ticks())).value == [3, [1, 1]]


class _Unclean(Ticks):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}._Unclean", {"last": self.last}

    async def cleanup(self) -> None:
        raise RuntimeError("unclean")


def test_a_trigger_that_misbehaves_fails_the_test() -> None:
    with pytest.raises(Misbehaved, match="unclean"):
        run_task(Adds(_Unclean(1)))


def test_a_callable_in_the_trigger_is_named_with_its_path() -> None:
    result = run_task(Adds(Ticks(then=[print])))  # type: ignore[arg-type]
    assert "task 'adds': ValueNotSerializable: Ticks kwargs['then'][0] is a builtin_function" in result.error


def test_what_a_handler_opens_is_not_the_triggers(tmp_path: Any) -> None:
    kept: list[Any] = []

    class Opens(Adds):
        def handle_trigger_events(self, events: Any, context: Any, **state: Any) -> Any:  # type: ignore[override]
            kept.append((tmp_path / "file").open("w"))

    assert run_task(Opens(Ticks(1))).state == "success"
    kept[0].close()


@dataclass
class Letters(PagedTrigger):
    pages: list[str]

    async def fetch(self, cursor: Any) -> Page:
        number = cursor or 0
        if self.pages[number] == "down":
            raise ConnectionError("down")
        return Page(list(self.pages[number]), next=number + 1 if number + 1 < len(self.pages) else None)


class Collects(BaseOperator):
    def __init__(self, pages: list[str], method_name: str | None = None) -> None:
        super().__init__(task_id="collects")
        self.pages, self.method_name = pages, method_name

    def execute(self, context: Any) -> None:
        self.defer(trigger=Letters(self.pages), stream=True, method_name=self.method_name)

    def handle_trigger_events(self, events: Any, context: Any, rows: tuple[str, ...] = ()) -> dict[str, Any]:
        return {"rows": rows + tuple(row for event in events for row in event.payload["rows"])}

    def stream_ended(self, context: Any, rows: tuple[str, ...] = ()) -> str | None:
        return "".join(rows) or None

    def one(self, context: Any, event: Any) -> Any:
        return event["rows"]


def test_pages_are_a_stream_whose_trigger_goes_on_in_the_next_try() -> None:
    assert run_task(Collects(["ab", "c", "d"])).value == "abcd"
    failed = run_task(Collects(["ab", "c", "down"]))
    assert [page["page"] for page in failed.handled] == [0, 1]
    with pytest.raises(TaskNotSuccessful, match="ConnectionError: down"):
        _ = failed.value
    again = run_task(Collects(["never", "fetched", "d"]), after=failed, try_number=2)
    assert again.value == "abcd"
    ended = run_task(Collects(["never", "fetched", "again"]), after=again, try_number=3)
    assert ended.value == "abcd", "nothing was left to fetch"


def test_the_value_of_a_method_for_one_event_is_that_of_its_last_call() -> None:
    assert run_task(Collects(["ab", "c"], method_name="one")).value == ["c"]
