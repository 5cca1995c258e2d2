"""A trigger on the worker: for sensors that are told to keep it while they wait."""

from __future__ import annotations

import trio

from headgate.child import asking
from headgate.protocol.messages.questions import Answered, TriggerQuestion
from headgate.tasks.errors import TaskFailed
from headgate.triggers.base import BaseTrigger, TriggerEvent


async def first_event_here(trigger: BaseTrigger, timeout_s: float) -> TriggerEvent:
    """Run a trigger on this loop up to its first event; what it asks the supervisor, the step asks.

    Raises `trio.TooSlowError`, and what the trigger raises.
    """
    with asking.triggers_answered_by(_ask_as_step):
        events = trigger.run()
        try:
            with trio.fail_after(timeout_s):
                async for event in events:
                    return event
        finally:
            with trio.CancelScope(shield=True):
                if (close := getattr(events, "aclose", None)) is not None:
                    await close()
                await trigger.cleanup()
    raise TaskFailed(f"{type(trigger).__name__} returned before its first event")


async def _ask_as_step(question: TriggerQuestion) -> Answered:
    await trio.lowlevel.checkpoint()
    return asking.ask(question)  # it blocks this loop, on which nothing else runs
