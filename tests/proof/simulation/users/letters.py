"""Users who redrive, edit and discard dead letters, by the verbs that the commands call, and die while they do so."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace
from tests.proof.simulation import database, records
from tests.proof.simulation.processes import Died
from tests.proof.simulation.scenario import TendLetters

from headgate.protocol.values import decode_value, encode_value
from headgate.store.errors import LetterRefused, RowsRefused, StoreError, TriggerRemoved

if TYPE_CHECKING:
    from tests.proof.simulation.world import World

# A refusal is no bug of anybody; whether it was right is judged.
REFUSALS = (LetterRefused, RowsRefused, TriggerRemoved)
USER = "somebody"


async def tend_letters(world: World, act: TendLetters) -> None:
    """Do something to every dead letter of an event, one after the other, and that so many times over."""
    for _ in range(act.times):
        for letter, payload in world.reader.letters().items():
            await trio.sleep_until(max(trio.current_time(), world.weather.database_back_at))
            if not _tend(world, act.what, letter, payload):
                break
            await trio.sleep(act.pause_s)


def _tend(world: World, what: str, letter: int, payload: bytes | None) -> bool:
    """Do it to one letter; return whether the user is alive."""
    world.look()
    outcome = records.Tended(trio.current_time(), letter, what, "done")
    edited = _edited(payload)
    if what == "edit":
        outcome = replace(outcome, payload=zlib.crc32(edited))
    with database.open_store() as store:
        try:
            if what == "redrive":
                store.letters.redrive(letter, by=USER)
            elif what == "edit":
                store.letters.edit(letter, edited, by=USER)
            else:
                store.letters.discard(letter, by=USER)
        except Died as died:
            outcome = replace(outcome, outcome="died", why=str(died))
        except REFUSALS as error:
            outcome = replace(outcome, outcome="refused", why=type(error).__name__)
        except StoreError as error:
            world.broke("the user", error)
    world.look()
    world.note(outcome)
    return outcome.outcome != "died"


def _edited(payload: bytes | None) -> bytes:
    """Return the payload as a user mends it: without what the database refuses, and with a word of the user's."""
    if payload is None:
        return encode_value({"edited": True}, where="payload")
    said = database.said_in(payload)
    mended = {**said, "edited": True, "message": said["message"].removesuffix(f" {database.POISON}")}
    return encode_value({"xcoms": mended} if "xcoms" in decode_value(payload) else mended, where="payload")
