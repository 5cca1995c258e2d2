"""The demo: it passes on the real pair, and fails on one that cheats, dies or hangs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, LiteralString

import psutil
import psycopg
import pytest

from headgate.cli.demo import processes as demo_processes
from headgate.cli.demo import run as demo_run
from headgate.cli.demo.command import environment_of_demo
from headgate.cli.demo.run import Plan
from headgate.supervisor.config import Settings, load_settings

# It takes the triggers, then acknowledges whatever is written, and stores nothing at all.
CHEAT = """
import json, os, pathlib, sqlite3, time
database = sqlite3.connect("demo.db", isolation_level=None)
database.execute(
    "INSERT INTO triggerer (hostname, pid, machine, process_started, capacity, queues, started_at, latest_heartbeat) "
    "VALUES ('h', 1, 'm', 0, 1, 'default', '2026-01-01', '2026-01-01')"
)
database.execute("UPDATE trigger SET triggerer_id = 1")
folder = pathlib.Path("log")
(folder / ".groups").mkdir(exist_ok=True)
while True:
    offsets = {path.stem: path.stat().st_size for path in folder.glob("*.jsonl")}
    (folder / ".groups" / "new").write_text(json.dumps({"log": "x", "offsets": offsets}))
    os.replace(folder / ".groups" / "new", folder / ".groups" / "demo.json")
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _no_process_and_no_folder_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert left == set()


def folder_kept(out: str) -> Path | None:
    found = re.search(r"^kept: (.*)$", out, re.MULTILINE)
    return Path(found[1]) if found else None


# --- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [0, 1, 5, 50, 1000])
def test_kills_are_spread_over_the_rows_and_one_is_for_the_supervisor(kills: int) -> None:
    plan = Plan(events=10_000, kills=kills, subscribers=3, partitions=4, seed=7)

    schedule = plan.schedule()

    assert len(schedule) == kills + 1
    assert sum(kill.target == "supervisor" for kill in schedule) == 1
    places = [kill.at_rows for kill in schedule]
    assert places == sorted(places)
    assert 0 < places[0] <= places[-1] < plan.rows
    assert all(0 <= kill.delay_s <= demo_run.KILL_DELAY_MAX_S for kill in schedule)
    assert schedule == plan.schedule(), "the same seed gives the same kills"


def test_the_demo_changes_waits_and_nothing_that_makes_events_durable(tmp_path: Path) -> None:
    environ = {"PATH": "/bin", "HEADGATE_FERNET_KEYS": "x", "HEADGATE_CAPACITY": "1"}

    given = environment_of_demo(environ, tmp_path, "sqlite:////x")

    assert given["PATH"] == "/bin"
    settings = load_settings(environ=given, cwd=tmp_path)
    defaults = Settings(home=tmp_path, database_url="sqlite:////x", import_paths=(str(tmp_path),))
    changed = {key for key in Settings.__struct_fields__ if getattr(settings, key) != getattr(defaults, key)}
    assert changed == {
        "log_format",
        "poll_interval_s",
        "respawn_wait_s",
        "respawn_wait_max_s",
        "retry_wait_s",
        "retry_wait_max_s",
    }


# --- the real pair -------------------------------------------------------------------------------


def test_a_small_demo_proves_the_pair_and_leaves_nothing_behind(call: Any, tmp_path: Path) -> None:
    called = call("demo", "--events", "200", "--kills", "1", "--subscribers", "2", "--partitions", "2", "--seed", "1")

    assert (called.code, called.err) == (0, ""), called.out
    table = dict(re.findall(r"^│ (.+?) +│ +(.+?) │$", called.out, re.MULTILINE))
    assert table["events written"] == "200"
    assert table["stored for demo-0"] == table["stored for demo-1"] == "200"
    assert table["stored twice"] == table["lost"] == "0"
    assert table["kills with SIGKILL"] == "1 runner, 1 supervisor"
    assert list(tmp_path.glob("headgate-demo-*")) == []


def test_on_postgresql_the_demo_makes_a_database_of_its_own_and_drops_it(
    call: Any, make_postgres_url: Callable[[], str]
) -> None:
    url = make_postgres_url()
    with psycopg.connect(url, autocommit=True) as connection:

        def column(statement: LiteralString) -> list[Any]:
            return [row[0] for row in connection.execute(statement)]

        called = call("demo", "--events", "50", "--kills", "0", "--subscribers", "1", "--db", url)

        assert (called.code, called.err) == (0, ""), called.out
        made = re.search(r"/(headgate_demo_[0-9a-f]+),", called.out)
        assert made is not None
        assert made[1] not in column("SELECT datname FROM pg_database")
        tables = column("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        assert tables == [], "the named database is not touched"


# --- pairs that are none -------------------------------------------------------------------------


def test_a_pair_that_acknowledges_without_storing_is_found_out(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_processes, "SUPERVISOR_ARGUMENTS", ("-c", CHEAT))
    monkeypatch.setattr(demo_run, "SETTLED_AFTER_S", 0.2)
    monkeypatch.setattr(demo_run, "WRITE_S_MIN", 0.5)
    monkeypatch.setattr(demo_run, "WRITE_S_PER_KILL_MIN", 0.1)

    called = call("demo", "--events", "20", "--kills", "0", "--subscribers", "2", "--partitions", "2")

    assert called.code == 1
    assert "BAD: 40 events are lost" in called.out
    assert "BAD: 40 events were acknowledged before they were stored" in called.out
    assert "BAD: not every event is stored for every subscriber" in called.out
    kept = folder_kept(called.out)
    assert kept is not None
    assert (kept / "demo.db").exists(), "a failed demo keeps what there is to look at"
    shutil.rmtree(kept)


def test_a_supervisor_that_dies_ends_the_demo_with_its_last_words(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_processes, "SUPERVISOR_ARGUMENTS", ("-c", "print('last words'); raise SystemExit(7)"))

    called = call("demo", "--events", "20")

    assert called.code == 1
    assert "last words" in called.out
    assert "the supervisor left by itself with exit code 7" in called.out


def test_the_time_limit_ends_a_demo_that_hangs(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_processes, "SUPERVISOR_ARGUMENTS", ("-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(demo_run, "TIME_LIMIT_S", 0.5)
    monkeypatch.setattr(demo_run, "TIME_LIMIT_S_PER_KILL", 0.0)

    called = call("demo", "--events", "20")

    assert called.code == 1
    assert "the demo failed: the time limit of" in called.out
    assert "came before the supervisor has taken the triggers" in called.out


def test_a_database_that_is_no_postgresql_server_is_refused_before_anything_is_made(call: Any, tmp_path: Path) -> None:
    wrong = call("demo", "--db", "sqlite:////x")
    away = call("demo", "--db", "postgresql://u:hunter2@127.0.0.1:1/d")

    assert (wrong.code, away.code) == (2, 1)
    assert "PostgreSQL" in wrong.err
    assert "no database can be created beside postgresql://u:***@127.0.0.1:1/d" in away.err
    assert list(tmp_path.glob("headgate-demo-*")) == []
