"""The audit of the demo finds what it is there to find: an auditor that sees no fault proves nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.cli.demo.truth import Audit, WrittenLog, open_reader
from headgate.protocol.messages.runner import FiredEvent
from headgate.protocol.values import encode_value
from headgate.store.store import Store

EVENTS = 4


class Scene:
    """A log of one partition with two subscribers on it, written to by hand."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self._store = store
        self._sequence_index = 0
        self.triggers = [store.add_watcher(f"demo-{number}", "a.B", {}) for number in range(2)]
        self._epoch = store.register_triggerer(
            hostname="h", pid=1, machine="m", process_started=0.0, capacity=9, queues=("default",)
        )
        (folder / ".groups").mkdir(parents=True)

    def claim(self) -> None:
        self._store.claim_triggers(self._epoch, limit=9, queues=("default",))

    def write(self, *ids: int, tail: str = "") -> None:
        with (self.folder / "p0.jsonl").open("a") as file:
            file.write("".join(json.dumps({"id": id_}) + "\n" for id_ in ids) + tail)

    def store(self, *ids: int, subscribers: tuple[int, ...] = (0, 1), run: str = "1") -> None:
        events = []
        for subscriber in subscribers:
            for id_ in ids:
                self._sequence_index += 1
                payload = encode_value({"id": id_}, where="payload")
                trigger_id = self.triggers[subscriber]
                events.append(FiredEvent(trigger_id, f"{run}.{trigger_id}", self._sequence_index, 0, payload))
        self._store.store_slice(self._epoch, events=events, refused=[], finished=[])

    def commit(self, count: int) -> None:
        """Acknowledge the first so many lines."""
        lines = (self.folder / "p0.jsonl").read_bytes().splitlines(keepends=True)
        offset = sum(len(line) for line in lines[:count])
        (self.folder / ".groups" / "g.json").write_text(json.dumps({"log": "x", "offsets": {"p0": offset}}))


@pytest.fixture
def scene(tmp_path: Path, store: Store) -> Scene:
    return Scene(tmp_path / "log", store)


@pytest.fixture
def audit(scene: Scene, database_url: str) -> Iterator[Audit]:
    reader = open_reader(database_url)
    scene.claim()
    yield Audit(reader, WrittenLog(scene.folder, "g"), EVENTS)
    reader.dispose()


def findings(audit: Audit) -> dict[str, Any]:
    return {
        "written": audit.written,
        "lost": audit.lost,
        "twice": audit.stored_twice,
        "early": len(audit.acknowledged_before_stored),
        "complete": audit.is_complete,
    }


def test_all_is_well_when_everything_is_stored_and_then_acknowledged(scene: Scene, audit: Audit) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(0, 1, 2, 3)
    audit.look()
    assert findings(audit) == {"written": 4, "lost": 0, "twice": 0, "early": 0, "complete": False}

    scene.commit(4)
    audit.look()

    assert findings(audit) == {"written": 4, "lost": 0, "twice": 0, "early": 0, "complete": True}
    assert list(audit.names.values()) == ["demo-0", "demo-1"]


def test_an_event_acknowledged_before_it_is_stored_is_found_even_if_it_is_stored_later(
    scene: Scene, audit: Audit
) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(0, 1)
    scene.store(2, subscribers=(0,))
    scene.commit(3)
    audit.look()
    assert audit.acknowledged_before_stored == {(scene.triggers[1], 2)}

    scene.store(2, subscribers=(1,))
    scene.store(3)
    scene.commit(4)
    audit.look()

    assert findings(audit) == {"written": 4, "lost": 0, "twice": 0, "early": 1, "complete": True}


def test_a_lost_event_is_counted_for_each_subscriber_that_misses_it(scene: Scene, audit: Audit) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(0, 1, 2)
    scene.store(3, subscribers=(1,))
    scene.commit(4)
    audit.look()

    assert findings(audit) == {"written": 4, "lost": 1, "twice": 0, "early": 1, "complete": False}
    assert [audit.stored(trigger_id) for trigger_id in scene.triggers] == [3, 4]


def test_an_event_stored_twice_is_found_by_its_payload_whatever_its_key(scene: Scene, audit: Audit) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(0, 1, 2, 3)
    scene.store(2, 3, subscribers=(0,))
    scene.store(3, subscribers=(0,))
    audit.look()

    assert audit.stored_twice == 3


@pytest.mark.parametrize("id_", [EVENTS, -1])
def test_a_row_that_is_no_event_of_the_log_is_a_row_too_many(scene: Scene, audit: Audit, id_: int) -> None:
    scene.store(id_, subscribers=(0,))
    audit.look()

    assert audit.stored_twice == 1


def test_what_was_seen_before_is_not_counted_again(scene: Scene, audit: Audit) -> None:
    for id_ in range(EVENTS):
        scene.write(id_)
        scene.store(id_)
        scene.commit(id_ + 1)
        audit.look()
        audit.look()

    assert (audit.rows, audit.stored_twice, audit.written, audit.is_complete) == (8, 0, 4, True)


def test_a_line_that_is_still_being_written_is_not_read(scene: Scene, audit: Audit) -> None:
    scene.write(0, tail='{"id": 1')
    audit.look()
    assert audit.written == 1

    scene.write(tail="}\n")
    audit.look()
    assert audit.log.ids() == [0, 1]


def test_recovery_means_that_every_subscriber_stores_events_of_a_new_run(scene: Scene, audit: Audit) -> None:
    scene.store(0, run="1")
    audit.look()
    before = {trigger_id: frozenset(runs) for trigger_id, runs in audit.runs.items()}

    scene.store(1, run="1")
    scene.store(2, run="2", subscribers=(0,))
    audit.look()
    assert not audit.flows_again_since(before)

    scene.store(2, run="2", subscribers=(1,))
    audit.look()
    assert audit.flows_again_since(before)


def test_triggers_nobody_has_taken_are_counted(scene: Scene, database_url: str) -> None:
    reader = open_reader(database_url)
    audit = Audit(reader, WrittenLog(scene.folder, "g"), EVENTS)
    assert audit.unclaimed() == 2

    scene.claim()

    assert audit.unclaimed() == 0
    reader.dispose()
