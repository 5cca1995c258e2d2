"""A real pair stores events while old rows are deleted beside it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.integration.conftest import StartPair
from tests.integration.test_pair import add_subscribers, assert_once_each, wait_all_stored, write_log
from tests.waiting import wait_until

from headgate.protocol.values import decode_value
from headgate.store.cleaning import UNASKED
from headgate.store.store import Store

EVENTS = 3000
COUNT = 5000


def test_a_clean_in_the_middle_of_a_running_pair_loses_nothing(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    """Everything counts as old here, and a runner is killed, so that messages are delivered again."""
    folder = tmp_path / "log"
    write_log(folder, events=EVENTS)
    names = add_subscribers(users_store, folder, 2)
    counter = users_store.add_watcher("counter", "users_triggers.Nameless", {"count": COUNT})
    pair = start_pair()
    runner = pair.wait_ready()
    deleted: dict[str, int] = {}

    def clean() -> None:
        for _, cleaned in users_store.cleaning.clean(0.0, kinds=(*UNASKED, "dead_letters"), rows_max=200):
            for table, rows in cleaned.rows.items():
                deleted[table] = deleted.get(table, 0) + rows

    def counted() -> bool:
        clean()
        return deleted.get("trigger_event", 0) >= 100

    wait_until(counted, "100 events deleted")
    os.kill(runner, signal.SIGKILL)
    pair.wait_ready()
    for _ in range(5):
        clean()
    wait_all_stored(users_store, names, EVENTS)
    wait_until(lambda: newest(users_store, counter) == COUNT - 1, "the end of the count")
    assert pair.stop() == 0
    clean()

    assert_once_each(users_store, names, EVENTS)
    # Of the nameless ones each was stored once, and all but the newest are gone.
    deleted.pop("supervisor_status", None)  # there is one if a heartbeat had something new
    assert deleted == {"trigger_event": COUNT - 1, "triggerer": 1}


def newest(store: Store, trigger: int) -> Any:
    event = store.last_event(trigger)
    return None if event is None else decode_value(event.payload)
