"""`FileTrigger`: files, patterns, and the keys of its events."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from headgate.triggers.base import TriggerEvent
from headgate.triggers.file import FileTrigger, _find


async def fire(trigger: FileTrigger) -> list[TriggerEvent]:
    return [event async for event in trigger.run()]


async def test_a_file_that_is_there_fires_with_path_size_and_time(tmp_path: Path, autojump_clock: MockClock) -> None:
    path = tmp_path / "ready"
    path.write_bytes(b"12345")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    (event,) = await fire(FileTrigger(path))
    modified = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert event.payload == {"path": str(path), "size": 5, "modified": modified}


async def test_a_file_that_comes_later_fires_at_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "later"
    looks: list[object] = []

    class Watched(FileTrigger):
        async def _look(self):  # type: ignore[no-untyped-def]
            found = await super()._look()
            looks.append(found)
            if len(looks) == 3:
                path.write_bytes(b"")
            return found

    (event,) = await fire(Watched(path, poke_interval_s=0.001))
    assert looks[:3] == [None, None, None]
    assert len(looks) == 4
    assert event.payload["path"] == str(path)


async def test_a_pattern_fires_with_the_first_match_by_name(tmp_path: Path, autojump_clock: MockClock) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.csv", "a.csv", "a.txt", "deep/0.csv"):
        (tmp_path / name).touch()
    (event,) = await fire(FileTrigger(tmp_path / "*.csv"))
    assert event.payload["path"] == str(tmp_path / "a.csv")
    (event,) = await fire(FileTrigger(tmp_path / "**" / "0.csv"))
    assert event.payload["path"] == str(tmp_path / "deep" / "0.csv")


async def test_a_path_that_looks_like_a_pattern_is_a_path_first(tmp_path: Path, autojump_clock: MockClock) -> None:
    (tmp_path / "[1].csv").touch()
    (event,) = await fire(FileTrigger(tmp_path / "[1].csv"))
    assert event.payload["path"] == str(tmp_path / "[1].csv")


async def test_the_same_unchanged_file_has_the_same_key_and_a_changed_one_another(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    (first,) = await fire(FileTrigger(path))
    (again,) = await fire(FileTrigger(path))
    path.write_bytes(b"12")
    (changed,) = await fire(FileTrigger(path))
    assert first.key == again.key
    assert changed.key != first.key


async def test_the_loop_goes_on_while_a_look_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = trio.Event()
    token = trio.lowlevel.current_trio_token()
    release = threading.Event()

    def hang(pattern: str) -> None:
        token.run_sync_soon(started.set)
        release.wait(30)

    monkeypatch.setattr("headgate.triggers.file._find", hang)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fire, FileTrigger(tmp_path))
            await started.wait()  # the loop runs, although the thread hangs
            nursery.cancel_scope.cancel()  # and the trigger can be cancelled
    finally:
        release.set()


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf")])
def test_an_interval_that_is_not_a_positive_number_is_refused(interval: float) -> None:
    with pytest.raises(ValueError, match="poke_interval_s"):
        FileTrigger("x", poke_interval_s=interval)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ValueError, match="not a path"):
        FileTrigger("")


def test_a_file_trigger_is_restored_equal(tmp_path: Path) -> None:
    classpath, kwargs = FileTrigger(tmp_path, poke_interval_s=2.5).serialize()
    assert classpath == "headgate.triggers.file.FileTrigger"
    assert kwargs == {"path": str(tmp_path), "poke_interval_s": 2.5}
    assert FileTrigger(**kwargs).serialize() == (classpath, kwargs)


def test_a_link_to_nothing_does_not_hide_the_files_behind_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to(tmp_path / "missing")
    (tmp_path / "b.csv").write_text("x")
    found = _find(str(tmp_path / "*.csv"))
    assert found is not None
    assert found.path == str(tmp_path / "b.csv")
