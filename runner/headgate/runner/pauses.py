"""Where a trigger stands between two of its events: it lets others run, or waits for room or for credit.

**Room** is that of the outbox, which all triggers share: it is full if the supervisor cannot store. **Credit** is a
run's own (I22): the events that it may fire in all. It ends if the task whose stream the trigger feeds handles the
events more slowly than they come. Then this trigger stands in its ``yield``, and no other one waits for it
but those that share its stream, as for any slow subscriber.
"""

from __future__ import annotations

import trio

from headgate.protocol import marks
from headgate.runner.outbox import Outbox
from headgate.runner.trigger_run import TriggerRun

EVENTS_A_STEP = 100  # events of one trigger that awaits nothing, between two checkpoints


class Pauses:
    """The pauses of all triggers of one runner."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._without_credit: dict[int, trio.Event] = {}

    async def pause(self, run: TriggerRun) -> None:
        """Let other tasks run, and wait for room in the outbox, and for credit, unless the trigger is to end."""
        # Shielded: the trigger may have yielded inside a cancel scope of its own, whose deadline must not be delivered
        # to an await of ours.
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
            while self._outbox.is_full and not run.is_interrupted:
                if run.subscription is not None:
                    run.subscription.waits_for_store = True
                await self._outbox.wait_room()
            if run.subscription is not None:
                run.subscription.waits_for_store = False
                # A shared stream takes it for a subscriber that is slow, but never fails it for that.
                run.subscription.waits_for_credit = run.has_no_credit
            while run.has_no_credit and not run.is_interrupted:
                extended = self._without_credit[run.spec.trigger_id] = trio.Event()
                marks.reach("host.no_credit")
                await extended.wait()
                del self._without_credit[run.spec.trigger_id]
            if run.subscription is not None:
                run.subscription.waits_for_credit = False
        run.pause_after(EVENTS_A_STEP)

    def end(self, run: TriggerRun) -> None:
        """Wake a run that waits for credit: it has some, or is to end."""
        extended = self._without_credit.get(run.spec.trigger_id)
        if extended is not None:
            extended.set()
