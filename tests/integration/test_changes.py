"""A watcher that is changed and restarted while events flow, with a real pair: nothing lost, nothing twice."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration.conftest import StartPair
from tests.integration.pair import wait_until

from headgate.protocol.values import decode_value
from headgate.store.store import Store

EVENTS = 6000
RATE = 1000  # a second, so that each change meets events in flight
LATER = 100


def write(log: Path, events: int, rate: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headgate.brokers.filelog_writer", str(log), f"--events={events}"]
    return subprocess.Popen([*command, "--partitions=2", f"--rate={rate}"])


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
    writer = write(log, EVENTS, RATE)
    try:
        wait_until(lambda: len(lines_of(users_store, "changed")) >= 100, "some events")
        for every in (1, 2, 1):
            before = odd(users_store)
            users_store.change_watcher("changed", kwargs={**of_log, "every": every})
            pair.wait_log("a trigger is changed by a user", trigger_id=trigger_id)
            if every == 1:
                wait_until(lambda: odd(users_store) > before, "events of the new kwargs")  # noqa: B023 - called here
        users_store.restart_watcher("changed")
        pair.wait_log("a trigger is changed by a user", trigger_id=trigger_id)
        assert writer.poll() is None, "no change met events in flight"
    finally:
        writer.wait()
    since = time.time()
    assert write(log, LATER, RATE).wait() == 0
    total = EVENTS + LATER
    wait_until(lambda: len(lines_of(users_store, "neighbour")) >= total, "all events of the neighbour")
    every_line = lines_of(users_store, "neighbour")
    # Those that no kwargs left out, and all that were written after the last change.
    due = names([line for line in every_line if line["id"] % 2 == 0 or line["written_at"] >= since])
    wait_until(lambda: due <= names(lines_of(users_store, "changed")), "all events of the changed watcher")
    assert pair.stop() == 0

    assert len(every_line) == len(names(every_line)) == total, "lost, or stored twice, for the neighbour"
    stored = lines_of(users_store, "changed")
    assert len(stored) == len(names(stored)), "stored twice"
    assert names(stored) <= names(every_line)
    assert {row.trigger_id for row in users_store.inspect.events(watcher="changed")} == {trigger_id}
    assert users_store.inspect.dead_letters() == []


def test_a_poller_that_is_changed_goes_on_after_its_last_event(users_store: Store, start_pair: StartPair) -> None:
    users_store.add_watcher("counter", "users_triggers.Counter", {"count": 50})
    pair = start_pair()
    wait_until(lambda: len(lines_of(users_store, "counter")) >= 50, "the first events")
    users_store.change_watcher("counter", kwargs={"count": 80})
    wait_until(lambda: len(lines_of(users_store, "counter")) >= 80, "the others")
    assert pair.stop() == 0
    assert lines_of(users_store, "counter") == list(range(80))
