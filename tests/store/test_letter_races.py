"""Redrives at the same time as each other and as the broker's own redelivery: each event is stored once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

import pytest
from tests.store.harness import OpenStore, Query, wait_until_blocked
from tests.store.triggers.test_events import Setting, make_setting
from tests.waiting import WITHIN_S

from headgate.store.db.engine import open_engine
from headgate.store.errors import LetterRefused
from headgate.store.letters import Redriven
from headgate.store.store import Store
from headgate.store.triggers.events import insert_events

LETTERS = 300
THREADS = 7
REDELIVERED_PER_SLICE = 10
ENDED_MAX_S = 120.0  # all of it takes a few seconds


def bury(on: Setting, number: int) -> None:
    whole = {"payload_head": b"%d" % number, "payload_bytes": len(b"%d" % number), "is_whole": True}
    on.store.store_slice(on.epoch, refused=[on.refused(number, key=f"k{number}", **whole)])


@pytest.mark.usefixtures("patient_sqlite")
def test_letters_redriven_by_many_while_the_broker_delivers_them_again_are_stored_once_each(
    open_store: OpenStore, query: Query
) -> None:
    on = make_setting(open_store())
    for number in range(LETTERS):
        bury(on, number)
    ids = [row.id for row in reversed(on.store.inspect.dead_letters(LETTERS))]
    assert len(ids) == LETTERS
    start = Barrier(THREADS + 1)

    def redrive(store: Store, turn: int) -> Counter[str]:
        """Redrive the letters of this thread and those of the next one: each letter has two that want it."""
        done: Counter[str] = Counter()
        start.wait()
        for place, letter_id in enumerate(ids):
            if (place - turn) % THREADS > 1:
                continue
            with suppress(LetterRefused):  # another thread has redriven it
                done[store.letters.redrive(letter_id, by=f"thread {turn}").state] += 1
        return done

    def deliver(store: Store) -> int:
        """Deliver every message again, the newest first, as the run of a mended trigger."""
        stored = 0
        start.wait()
        for first in range(LETTERS - REDELIVERED_PER_SLICE, -1, -REDELIVERED_PER_SLICE):
            numbers = range(first, first + REDELIVERED_PER_SLICE)
            again = [on.fired(n, key=f"k{n}", trigger_run_id="mended", payload=b"%d" % n) for n in numbers]
            stored += store.store_slice(on.epoch, events=again).stored
        return stored

    stores = [open_store() for _ in range(THREADS + 1)]
    with ThreadPoolExecutor(THREADS + 1) as pool:
        redriven = [pool.submit(redrive, stores[turn], turn) for turn in range(THREADS)]
        delivered = pool.submit(deliver, stores[THREADS])
        done = sum((future.result(ENDED_MAX_S) for future in redriven), Counter[str]())
        delivered_first = delivered.result(ENDED_MAX_S)

    assert done.total() == LETTERS, "each letter is redriven by one thread"
    assert done["redriven"] + delivered_first == LETTERS, "each event has one writer"
    rows = query("SELECT key, count(*) AS n FROM trigger_event GROUP BY key")
    assert len(rows) == LETTERS
    assert {int(row["n"]) for row in rows} == {1}
    linked = query(
        "SELECT dead_letter.state, count(*) AS n FROM dead_letter JOIN trigger_event "
        "ON trigger_event.id = dead_letter.event_id AND trigger_event.key = dead_letter.key GROUP BY dead_letter.state"
    )
    assert {row["state"]: int(row["n"]) for row in linked} == {state: n for state, n in done.items() if n}
    assert int(query("SELECT count(*) AS n FROM letter_action")[0]["n"]) == LETTERS


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_redrive_waits_for_the_slice_that_is_in_flight_and_finds_its_event(
    open_store: OpenStore, database_url: str
) -> None:
    on, other = make_setting(open_store()), open_store()
    bury(on, 1)
    (letter,) = on.store.inspect.dead_letters()
    with ThreadPoolExecutor(1) as pool:
        with on.store.database.leased(on.epoch) as tx:
            insert_events(tx, [on.fired(0, key="k1", trigger_run_id="mended", payload=b"1")], {})
            second: Future[Redriven] = pool.submit(other.letters.redrive, letter.id, by="one")
            wait_until_blocked(open_engine(database_url))
        done = second.result(WITHIN_S)
    assert (done.state, done.is_same) == ("stored_meanwhile", True)
