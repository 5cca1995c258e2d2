"""The pair as real processes on real databases: what dies, who notices, and what is left in the database."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter as Count
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy.engine import make_url
from tests.integration.conftest import StartPair
from tests.integration.pair import Pair, stored
from tests.processes import ends, stop
from tests.waiting import WITHIN_S, wait_until

from headgate.protocol.values import decode_value
from headgate.store.store import Store


def payloads(store: Store, watcher: str | None = None) -> list[Any]:
    return [decode_value(row.payload) for row in store.inspect.events(watcher=watcher)]


def write_log(folder: Path, *, events: int, partitions: int = 2) -> None:
    command = [sys.executable, "-m", "headgate.brokers.filelog_writer", str(folder)]
    subprocess.run([*command, "--events", str(events), "--partitions", str(partitions)], check=True)


def add_subscribers(store: Store, folder: Path, count: int) -> list[str]:
    names = [f"subscriber-{number}" for number in range(count)]
    for name in names:
        store.add_watcher(name, "headgate.brokers.filelog.FileLogTrigger", {"path": str(folder), "group": "g"})
    return names


def wait_progress(store: Store, events: int) -> None:
    wait_until(lambda: stored(store) >= events, "some progress")


def wait_all_stored(store: Store, names: list[str], events: int) -> None:
    wait_until(lambda: all(stored(store, name) >= events for name in names), f"{events} events for each of {names}")


def assert_once_each(store: Store, names: list[str], events: int) -> None:
    for name in names:
        counts = Count(payload["id"] for payload in payloads(store, name))
        assert set(counts.values()) == {1}, f"stored twice for {name}"
        assert len(counts) == events, f"lost for {name}"


def committed(log: Path) -> int:
    """How far the group has committed the first partition, in bytes."""
    offsets: dict[str, int] = json.loads((log / ".groups" / "g.json").read_text())["offsets"]
    return offsets["p0"]


def runner_of(pair: Pair) -> psutil.Process | None:
    children = psutil.Process(pair.process.pid).children()
    return children[0] if children else None


def test_a_trigger_of_a_user_runs_by_its_classpath(users_store: Store, start_pair: StartPair) -> None:
    users_store.add_watcher("counter", "users_triggers.Counter", {"count": 100})
    pair = start_pair()
    wait_until(lambda: stored(users_store, "counter") >= 100, "the events of the counter")
    assert pair.stop() == 0
    assert payloads(users_store, "counter") == list(range(100))
    assert [row.sequence_index for row in users_store.inspect.events()] == list(range(100))


def test_a_poller_goes_on_after_its_last_stored_event(users_store: Store, start_pair: StartPair) -> None:
    users_store.add_watcher("counter", "users_triggers.Counter", {"count": 50})
    pair = start_pair()
    pid = pair.wait_ready()
    wait_until(lambda: stored(users_store) >= 50, "the events of the counter")
    os.kill(pid, signal.SIGKILL)
    pair.wait_ready()
    assert pair.stop() == 0
    assert payloads(users_store) == list(range(50))


def test_neither_lost_nor_stored_twice_when_the_runner_is_killed(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    names = add_subscribers(users_store, tmp_path / "log", 3)
    write_log(tmp_path / "log", events=500)
    pair = start_pair(respawn_wait_s="0.01")
    for step in range(1, 6):
        pid = pair.wait_ready()
        wait_progress(users_store, step * 40)
        os.kill(pid, signal.SIGKILL)
        died = pair.wait_log("the runner ended")
        assert "killed by SIGKILL" in died["how"]
        write_log(tmp_path / "log", events=100)
    wait_until(lambda: stored(users_store) >= 3 * 1000, "all of them")
    assert pair.stop() == 0
    for name in names:
        counts = Count((p["partition"], p["id"], p["written_at"]) for p in payloads(users_store, name))
        assert set(counts.values()) == {1}
        assert len(counts) == 1000


def test_neither_lost_nor_stored_twice_when_the_supervisor_is_killed(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    names = add_subscribers(users_store, tmp_path / "log", 2)
    write_log(tmp_path / "log", events=2000)
    for step in range(1, 4):
        pair = start_pair()
        wait_progress(users_store, step * 200)
        pair.kill()
    pair = start_pair()
    pair.wait_ready()  # the last one may have had everything stored: this one must be there to be asked to stop
    wait_all_stored(users_store, names, 2000)
    assert pair.stop() == 0
    assert_once_each(users_store, names, 2000)


def test_lines_that_are_not_json_are_dead_letters_of_each_subscriber_and_the_log_goes_on(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    names = add_subscribers(users_store, tmp_path / "log", 2)
    write_log(tmp_path / "log", events=3, partitions=1)
    with (tmp_path / "log" / "p0.jsonl").open("ab") as file:
        file.write(b"not json\n\xff\nNaN\n" + b"x" * (1024 * 1024 + 1) + b'\n{"id": 3}\n')
    pair = start_pair()
    wait_all_stored(users_store, names, 4)
    wait_until(lambda: committed(tmp_path / "log") == (tmp_path / "log" / "p0.jsonl").stat().st_size, "all committed")
    assert pair.stop() == 0
    letters = users_store.inspect.dead_letters()
    assert sorted(Count(letter.trigger_id for letter in letters).values()) == [4, 4]
    lines = {letter.key: letter for letter in letters}
    assert len(lines) == 4
    assert all(letter.reason.startswith("the message cannot be decoded: ") for letter in letters)
    assert [line.reason.rpartition(": ")[2] for line in lines.values() if not line.payload_kept] == [
        "1,048,577 bytes long; the limit is 1,048,576"
    ]
    rejected = (tmp_path / "log" / ".groups" / "g.rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in rejected] == ["rejected by 2 of 2 subscribers"]


@pytest.mark.parametrize("rotation", ["rename", "copy and truncate"])
def test_a_log_that_is_rotated_under_a_pair_and_while_it_is_down_loses_nothing(
    users_store: Store, start_pair: StartPair, tmp_path: Path, rotation: str
) -> None:
    log = tmp_path / "log"
    names = add_subscribers(users_store, log, 2)

    def rotate_and_write(number: int) -> None:
        if rotation == "rename":
            (log / "p0.jsonl").rename(log / f"p0.jsonl.{number}")
        else:
            shutil.copyfile(log / "p0.jsonl", log / f"p0.jsonl.{number}")
            os.truncate(log / "p0.jsonl", 0)
        with (log / "p0.jsonl").open("ab") as file:
            for id_ in range(number * 100, number * 100 + 100):
                file.write(b'{"id": %3d}\n' % id_)

    def stored_by_all() -> int:
        return min(stored(users_store, name) for name in names)

    log.mkdir()
    (log / "p0.jsonl").write_bytes(b"".join(b'{"id": %3d}\n' % id_ for id_ in range(100)))
    pair = start_pair()
    wait_until(lambda: stored_by_all() >= 20, "some progress")
    rotate_and_write(1)
    wait_until(lambda: stored_by_all() >= 120, "some progress in the second file")
    assert pair.stop() == 0
    rotate_and_write(2)
    pair = start_pair()
    wait_all_stored(users_store, names, 300)
    assert pair.stop() == 0
    assert_once_each(users_store, names, 300)


def test_the_runner_dies_with_its_supervisor_even_while_a_trigger_blocks_the_loop(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    users_store.add_watcher("blocker", "users_triggers.Blocker", {"when": str(tmp_path / "now")})
    pair = start_pair()
    pid = pair.wait_ready()
    wait_until(lambda: payloads(users_store) == ["begun"], "the blocker's first event")
    (tmp_path / "now").touch()
    pair.wait_log("a trigger blocks the loop")
    pair.kill()
    assert ends(pid), "the runner"


def test_a_blocking_trigger_is_named_while_it_blocks_then_the_runner_is_dumped_and_replaced(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    users_store.add_watcher("blocker", "users_triggers.Blocker", {"when": str(tmp_path / "now")})
    pair = start_pair(runner_silence_max_s="2", runner_heartbeat_s="0.5")
    pair.wait_ready()
    wait_until(lambda: payloads(users_store) == ["begun"], "the blocker's first event")
    (tmp_path / "now").touch()
    report = pair.wait_log("a trigger blocks the loop")
    assert report["trigger_name"] == "blocker"
    assert report["classpath"] == "users_triggers.Blocker"
    assert "users_triggers.py:" in report["at"]
    assert "time.sleep(3600)" in report["line"]
    pair.wait_log("the runner is silent")
    pair.wait_log("the runner ended while it executed blocker")
    died = pair.wait_log("the runner ended")
    assert "users_triggers.py" in died["how"], "the dumped stack is part of the last words"
    (tmp_path / "now").unlink()
    pair.wait_ready()
    assert pair.stop() == 0


def test_the_runner_sees_no_database_and_no_key(
    users_store: Store, start_pair: StartPair, keys: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_SOMEBODY", "not on the list")
    monkeypatch.setenv("ASKED_FOR", "on the list")
    monkeypatch.setenv("ASKED_FOR_URL", f"the database is {database_url}")
    users_store.add_watcher("surroundings", "users_triggers.Surroundings", {})
    pair = start_pair(pass_env="ASKED_*")
    pid = pair.wait_ready()
    wait_until(lambda: payloads(users_store), "what the trigger saw")
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
    descriptors = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    connections = psutil.Process(pid).net_connections(kind="inet")
    assert pair.stop() == 0
    (seen,) = payloads(users_store)
    database = make_url(database_url).database
    assert database is not None
    for text in (environment, str(seen["environment"])):
        assert database_url not in text
        assert database not in text
        assert keys not in text
        assert "HEADGATE_" not in text
        assert "not on the list" not in text
        assert "on the list" in text
    assert connections == [], "no connection to a server"
    for target in (*descriptors, *seen["descriptors"].values(), *seen["maps"]):
        assert database not in target
    assert not [path for path in seen["maps"] if "libpq" in path or "_sqlite3" in path or "sqlalchemy" in path]


def test_a_trigger_that_exits_ends_nobody_else(users_store: Store, start_pair: StartPair) -> None:
    users_store.add_watcher("exits", "users_triggers.Exits", {})
    users_store.add_watcher("nowhere", "users_nothing.Trigger", {})
    users_store.add_watcher("counter", "users_triggers.Counter", {"count": 10})
    pair = start_pair(retry_wait_s="0.01")
    pair.wait_log("a trigger is started again")
    wait_until(lambda: stored(users_store, "counter") == 10, "the neighbour's events")
    wait_until(
        lambda: all(row.failure_count >= 2 for row in users_store.inspect.triggers() if "Counter" not in row.classpath),
        "failures being counted",
    )
    assert pair.stop() == 0
    errors = {row.classpath: row.last_error or "" for row in users_store.inspect.triggers()}
    assert "SystemExit: 3" in errors["users_triggers.Exits"]
    assert "sys.exit(3)" in errors["users_triggers.Exits"], "with the traceback"
    assert "there is no module" in errors["users_nothing.Trigger"]


def test_a_removed_watcher_is_killed_and_a_stopped_one_is_not(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    removed, stopped = tmp_path / "removed", tmp_path / "stopped"
    removed.mkdir()
    stopped.mkdir()
    users_store.add_watcher("removed", "users_triggers.Hooked", {"folder": str(removed)})
    users_store.add_watcher("stopped", "users_triggers.Hooked", {"folder": str(stopped)})
    pair = start_pair(poll_interval_s="0.05")
    wait_until(lambda: stored(users_store) == 2, "both to begin")
    users_store.remove_watcher("removed")
    wait_until(lambda: (removed / "cleanup").exists(), "the hooks of the removed one")
    assert (removed / "on_kill").exists()
    assert pair.stop() == 0
    assert sorted(path.name for path in stopped.iterdir()) == ["cleanup"]


def test_a_trigger_that_swallows_its_cancellation_has_the_runner_replaced(
    users_store: Store, start_pair: StartPair
) -> None:
    users_store.add_watcher("stubborn", "users_triggers.Stubborn", {})
    users_store.add_watcher("counter", "users_triggers.Counter", {"count": 10})
    pair = start_pair(poll_interval_s="0.05", cancel_grace_s="0.1", hook_timeout_s="0.1", drain_s="1")
    first = pair.wait_ready()
    wait_until(lambda: stored(users_store) == 11, "both to begin")
    users_store.remove_watcher("stubborn")
    report = pair.wait_log("a trigger does not end")
    assert report["trigger_name"] == "stubborn"
    assert pair.wait_ready() != first
    assert pair.stop() == 0
    assert payloads(users_store, "counter") == list(range(10))


def test_a_subscriber_that_failed_misses_nothing_of_what_the_others_get(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    names = add_subscribers(users_store, tmp_path / "log", 2)
    kwargs = {"path": str(tmp_path / "log"), "group": "g", "fail_at": 300, "marker": str(tmp_path / "failed")}
    users_store.add_watcher("fails", "users_triggers.FailsOnce", kwargs)
    write_log(tmp_path / "log", events=600, partitions=1)
    pair = start_pair(retry_wait_s="0.5")
    pair.wait_log("a trigger is started again")
    wait_all_stored(users_store, [*names, "fails"], 600)
    assert pair.stop() == 0
    assert_once_each(users_store, [*names, "fails"], 600)


def test_forks_of_a_filter_that_go_on_lose_nothing_and_advance_nothing(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    names = add_subscribers(users_store, tmp_path / "log", 2)
    users_store.add_watcher("forks", "users_triggers.Forks", {"path": str(tmp_path / "log"), "group": "g"})
    write_log(tmp_path / "log", events=1000, partitions=1)
    pair = start_pair()
    wait_all_stored(users_store, [*names, "forks"], 1000)
    said = json.loads(pair.wait_log("output of the runner")["line"])
    assert said["event"].startswith("a fork of the runner returned to its loop")
    assert said["trigger_name"] == "forks"
    assert pair.stop() == 0
    assert_once_each(users_store, [*names, "forks"], 1000)
    assert sum(row.redelivered for row in users_store.inspect.events()) == 0, "the runner lived on, undisturbed"


def test_a_drain_stores_what_was_fired_and_acknowledges_it(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    (name,) = add_subscribers(users_store, tmp_path / "log", 1)
    write_log(tmp_path / "log", events=20_000)
    pair = start_pair()
    wait_until(lambda: next(users_store.inspect.events(), None), "the first event")
    assert pair.stop() == 0
    so_far = stored(users_store, name)
    again = start_pair()
    wait_all_stored(users_store, [name], 20_000)
    assert again.stop() == 0
    assert_once_each(users_store, [name], 20_000)
    assert 0 < so_far < 20_000, "it was stopped in the middle"
    assert sum(row.redelivered for row in users_store.inspect.events()) == 0, "all that was stored was acknowledged"


def test_a_second_signal_kills(users_store: Store, start_pair: StartPair) -> None:
    users_store.add_watcher("stubborn", "users_triggers.Stubborn", {})
    pair = start_pair(drain_s="60", cancel_grace_s="60")
    pid = pair.wait_ready()
    wait_until(lambda: payloads(users_store) == ["begun"], "it to begin")
    pair.process.send_signal(signal.SIGTERM)
    pair.wait_log("draining")
    pair.process.send_signal(signal.SIGINT)
    assert pair.process.wait(WITHIN_S) == 1
    assert ends(pid)


def test_a_neighbour_takes_over_from_a_killed_supervisor(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    names = add_subscribers(users_store, tmp_path / "log", 2)
    write_log(tmp_path / "log", events=300)
    one = start_pair()
    wait_all_stored(users_store, names, 300)
    other = start_pair(heartbeat_s="0.1", poll_interval_s="0.05")
    other.wait_ready()
    one.kill()
    other.wait_log("took over from supervisors that are gone")
    write_log(tmp_path / "log", events=300)
    wait_all_stored(users_store, names, 600)
    assert other.stop() == 0


def test_a_supervisor_that_was_stopped_for_too_long_leaves_and_writes_nothing_more(
    users_store: Store, start_pair: StartPair
) -> None:
    users_store.add_watcher("counter", "users_triggers.Counter", {"count": 10})
    times = {"heartbeat_s": "0.1", "lease_silence_max_s": "5", "poll_interval_s": "0.05"}
    stopped = start_pair(**times)
    wait_until(lambda: stored(users_store) == 10, "it to begin")
    stop(stopped.process.pid)
    other = start_pair(**times)
    other.wait_log("took over from supervisors that are gone")
    os.kill(stopped.process.pid, signal.SIGCONT)
    assert stopped.process.wait(WITHIN_S) == 3
    stopped.wait_log("the lease is lost")
    assert other.stop() == 0
    assert payloads(users_store) == list(range(10))
