"""A trigger that ends, blocks or confuses the process that it shares: it is named and quarantined, all others go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import StartPair
from tests.waiting import WITHIN_S, wait_until

from headgate.protocol.marks import RUNAWAY_MARKS
from headgate.protocol.values import decode_value
from headgate.store.store import Store
from headgate.testing.crash.killing import MarkedDeaths

QUICK = {"retry_wait_s": "0.1", "respawn_wait_s": "0.05"}
BLOCKS = {**QUICK, "runner_silence_max_s": "1.5", "runner_heartbeat_s": "0.3"}


LONG = pytest.mark.campaign  # waits until a silence counts, again and again


def hold_of(store: Store, name: str) -> Any:
    return next(row for row in store.inspect.watchers() if row.name == name)


def ticks(store: Store) -> int:
    return sum(1 for _ in store.inspect.events(watcher="bystander"))


@pytest.mark.parametrize(
    ("classpath", "settings", "how"),
    [
        ("users_runaways.Exits", QUICK, "exited with code 3"),
        ("users_runaways.Crashes", QUICK, "SIGSEGV"),
        pytest.param("users_runaways.Spins", BLOCKS, "SIGKILL", marks=LONG),
        pytest.param("users_runaways.SpinsInC", BLOCKS, "SIGKILL", marks=LONG),
        ("users_runaways.ExitsInItsConstructor", QUICK, "exited with code 5"),
        ("users_exits_at_import.Trigger", QUICK, "exited with code 8"),
        pytest.param("users_runaways.ExitsInAThread", QUICK, "exited with code 4", marks=LONG),
        pytest.param("users_runaways.ClosesTheLink", BLOCKS, "", marks=LONG),
        pytest.param("users_runaways.Scribbles", QUICK, "exited with code 6", marks=LONG),
    ],
)
def test_a_runaway_is_named_and_quarantined_and_the_others_go_on(
    users_store: Store, start_pair: StartPair, classpath: str, settings: dict[str, str], how: str
) -> None:
    for number in range(3):
        users_store.add_watcher("bystander" if number == 1 else f"other-{number}", "users_runaways.Ticks", {})
    users_store.add_watcher("culprit", classpath, {})
    pair = start_pair(**settings)
    record = pair.wait_log("a trigger is quarantined")
    assert record["trigger_name"] == "culprit"
    wait_until(lambda: hold_of(users_store, "culprit").hold == "quarantine", "the quarantine to be stored")
    row = hold_of(users_store, "culprit")
    assert how in row.hold_reason
    assert how in row.last_error
    answer = users_store.inspect.why_trigger(row.trigger_id)
    assert answer.reason == "quarantine"
    assert "headgate triggers release culprit" in answer.next
    before = ticks(users_store)
    wait_until(lambda: ticks(users_store) > before + 20, "the bystander to go on")
    assert [row.hold for row in users_store.inspect.watchers() if row.name != "culprit"] == [None] * 3
    assert pair.stop() == 0


def test_a_quarantined_trigger_that_is_released_runs_again(users_store: Store, start_pair: StartPair) -> None:
    users_store.add_watcher("culprit", "users_runaways.Exits", {})
    pair = start_pair(**QUICK)
    pair.wait_log("a trigger is quarantined")
    wait_until(lambda: hold_of(users_store, "culprit").hold, "the quarantine to be stored")
    assert users_store.release_trigger(hold_of(users_store, "culprit").trigger_id) == "quarantine"
    pair.wait_log("a trigger is quarantined")
    assert pair.stop() == 0


@pytest.mark.parametrize("mark", RUNAWAY_MARKS)
def test_a_supervisor_that_dies_while_a_quarantine_is_stored_leaves_it_whole_or_to_the_next_one(
    users_store: Store, start_pair: StartPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    users_store.add_watcher("bystander", "users_runaways.Ticks", {})
    users_store.add_watcher("culprit", "users_runaways.Exits", {})
    deaths = MarkedDeaths(tmp_path / "deaths")
    monkeypatch.setenv("PYTHONPATH", str(deaths.folder))
    deaths.ask(mark)
    pair = start_pair(**QUICK)
    assert pair.process.wait(WITHIN_S) == -signal.SIGKILL
    assert deaths.has_died(mark)
    assert hold_of(users_store, "culprit").hold == ("quarantine" if mark == "holds.stored" else None)
    pair = start_pair(**QUICK)
    wait_until(lambda: hold_of(users_store, "culprit").hold == "quarantine", "the quarantine to be stored")
    before = ticks(users_store)
    wait_until(lambda: ticks(users_store) > before + 20, "the bystander to go on")
    assert hold_of(users_store, "bystander").hold is None
    assert pair.stop() == 0


def test_a_message_that_ends_the_process_goes_to_the_dead_letters_of_its_trigger_alone(
    users_store: Store, start_pair: StartPair, tmp_path: Path
) -> None:
    folder = tmp_path / "log"
    command = [sys.executable, "-m", "headgate.brokers.filelog_writer", str(folder)]
    subprocess.run([*command, "--events", "60", "--partitions", "2"], check=True)
    common = {"path": str(folder), "group": "g"}
    users_store.add_watcher("good", "headgate.brokers.filelog.FileLogTrigger", common)
    users_store.add_watcher("killed", "users_runaways.ExitsOnMessage", {**common, "bad": [30]})
    pair = start_pair(**QUICK)

    def ids(watcher: str) -> list[int]:
        return sorted(decode_value(row.payload)["id"] for row in users_store.inspect.events(watcher=watcher))

    everything = ids_of(folder)
    wait_until(lambda: len(ids("good")) == 60, "the good one to get all")
    wait_until(lambda: len(ids("killed")) == 59, "the other to get all but one")
    assert ids("good") == everything
    assert ids("killed") == [number for number in everything if number != 30]
    assert hold_of(users_store, "killed").hold is None, "the message is to blame"
    wait_until(lambda: list(users_store.inspect.dead_letters()), "the dead letter")
    (letter,) = list(users_store.inspect.dead_letters())
    assert (letter.trigger_id, letter.payload_kept) == (hold_of(users_store, "killed").trigger_id, True)
    assert pair.stop() == 0
    named = [record for record in pair.records if "held the message" in str(record.get("event"))]
    assert all("killed" in record["event"] for record in named)


def ids_of(folder: Path) -> list[int]:
    lines = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(json.loads(line)["id"] for line in lines if line)
