"""A watcher that is changed and restarted while events flow, with a real pair: nothing lost, nothing twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.conftest import StartPair
from tests.integration.pair import stored
from tests.waiting import wait_until

from headgate.brokers.filelog_writer import FileLogWriter, write_load
from headgate.protocol.values import decode_value
from headgate.store.store import Store

RATE = 500  # a second, so that each change meets events in flight
AT_ONCE = 50
LATER = 100


@contextmanager
def writing(log: Path) -> Iterator[list[int]]:
    """Write events to the log all the while; yields how many, which is all of them afterwards."""
    done = threading.Event()
    written: list[int] = []

    def write() -> None:
        with FileLogWriter(log) as writer:
            while not done.is_set():
                write_load(writer, events=AT_ONCE, partitions=2, rate=RATE, durable=False)
                written.append(AT_ONCE)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield written
    finally:
        done.set()
        thread.join()


def lines_of(store: Store, watcher: str) -> list[Any]:
    return [decode_value(row.payload) for row in store.inspect.events(watcher=watcher)]


def names(lines: list[Any]) -> set[tuple[Any, ...]]:
    """Return the lines by what no two of them share."""
    return {(line["partition"], line["id"], line["written_at"]) for line in lines}


def odd(store: Store) -> int:
    return sum(line["id"] % 2 for line in lines_of(store, "changed"))


def test_kwargs_are_changed_while_events_flow_and_nothing_is_lost_or_stored_twice(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    of_log = {"path": str(log), "group": "g"}
    log.mkdir()
    users_store.add_watcher("neighbour", "headgate.brokers.filelog.FileLogTrigger", of_log)
    trigger_id = users_store.add_watcher("changed", "users_triggers.Every", {**of_log, "every": 2})
    pair = start_pair()
    pair.wait_ready()
    with writing(log) as written:
        wait_until(lambda: stored(users_store, "changed") >= 100, "some events")
        for every in (1, 2, 1):
            before = odd(users_store)
            users_store.change_watcher("changed", kwargs={**of_log, "every": every})
            pair.wait_log("a trigger is changed by a user", trigger_id=trigger_id)
            if every == 1:
                wait_until(lambda: odd(users_store) > before, "events of the new kwargs")  # noqa: B023 - called here
        users_store.restart_watcher("changed")
        pair.wait_log("a trigger is changed by a user", trigger_id=trigger_id)
    since = time.time()
    with FileLogWriter(log) as writer:
        write_load(writer, events=LATER, partitions=2, rate=None, durable=False)
    total = sum(written) + LATER
    wait_until(lambda: stored(users_store, "neighbour") >= total, "all events of the neighbour")
    every_line = lines_of(users_store, "neighbour")
    # Those that no kwargs left out, and all that were written after the last change.
    due = names([line for line in every_line if line["id"] % 2 == 0 or line["written_at"] >= since])
    wait_until(lambda: due <= names(lines_of(users_store, "changed")), "all events of the changed watcher")
    assert pair.stop() == 0

    assert len(every_line) == len(names(every_line)) == total, "lost, or stored twice, for the neighbour"
    changed = lines_of(users_store, "changed")
    assert len(changed) == len(names(changed)), "stored twice"
    assert names(changed) <= names(every_line)
    assert {row.trigger_id for row in users_store.inspect.events(watcher="changed")} == {trigger_id}
    assert users_store.inspect.dead_letters() == []


def test_a_poller_that_is_changed_goes_on_after_its_last_event(users_store: Store, start_pair: StartPair) -> None:
    users_store.add_watcher("counter", "users_triggers.Counter", {"count": 50})
    pair = start_pair()
    wait_until(lambda: stored(users_store, "counter") >= 50, "the first events")
    users_store.change_watcher("counter", kwargs={"count": 80})
    wait_until(lambda: stored(users_store, "counter") >= 80, "the others")
    assert pair.stop() == 0
    assert lines_of(users_store, "counter") == list(range(80))
