"""Users who redrive the messages that are dead letters, and wait for what becomes of them, as the command does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from tests.proof.simulation import database, records
from tests.proof.simulation.scenario import RedriveMessages
from tests.proof.simulation.users.letters import USER

from headgate.store.errors import LetterRefused, StoreError

if TYPE_CHECKING:
    from tests.proof.simulation.world import World

WAIT_S = 60.0  # for the messages that are on their way; their trigger may be gone, or held
LOOK_INTERVAL_S = 0.5


async def redrive_messages(world: World, act: RedriveMessages) -> None:
    """Redrive each of them, and wait; and that so many times over."""
    for _ in range(act.times):
        await trio.sleep_until(max(trio.current_time(), world.weather.database_back_at))
        redriving = [letter for letter in world.reader.messages() if _redrive(world, letter)]
        for _ in range(int(WAIT_S / LOOK_INTERVAL_S)):
            if not set(redriving) & set(world.reader.redriving()):
                break
            await trio.sleep(LOOK_INTERVAL_S)


def _redrive(world: World, letter: int) -> bool:
    """Redrive one message; return whether it is on its way."""
    world.look()
    outcome = records.MessageRedriven(trio.current_time(), letter, "done")
    with database.open_store() as store:
        try:
            store.letters.redrive(letter, by=USER)
        except LetterRefused as error:
            outcome = records.MessageRedriven(outcome.at, letter, "refused", type(error).__name__)
        except StoreError as error:
            world.broke("the user", error)
    world.look()
    world.note(outcome)
    return outcome.outcome == "done"
