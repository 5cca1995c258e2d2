"""The demo passes on the real pair, and fails on one that cheats, dies or hangs; its audit finds each kind of fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from rich.console import Console

from headgate.cli.main import main
from headgate.testing import demo
from headgate.testing.brokers import demo as broker_demo
from headgate.testing.brokers.postgres_server import why_none
from headgate.testing.crash import pair as crash_pair
from headgate.testing.demo import Audit, Plan, WrittenLog

# It acknowledges whatever is written, and stores nothing at all.
CHEAT = """
import json, os, pathlib, time
print("the runner is ready", flush=True)
folder = pathlib.Path("log")
while True:
    offsets = {path.stem: path.stat().st_size for path in folder.glob("*.jsonl")}
    if offsets:
        (folder / ".groups").mkdir(exist_ok=True)
        (folder / ".groups" / "new").write_text(json.dumps({"log": "x", "offsets": offsets}))
        os.replace(folder / ".groups" / "new", folder / ".groups" / "demo.json")
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


def run(folder: Path, **sizes: int) -> int:
    plan = {"events": 20, "kills": 0, "subscribers": 2, "partitions": 2, "seed": 1} | sizes
    return demo.main([str(folder), *(f"--{name}={number}" for name, number in plan.items())])


@pytest.mark.parametrize("kills", [0, 1, 5, 50, 1000])
def test_kills_are_spread_over_the_events_and_one_is_for_the_supervisor(kills: int) -> None:
    plan = Plan(events=10_000, kills=kills, subscribers=3, partitions=4, seed=7)

    schedule = plan.schedule()

    assert len(schedule) == kills + 1
    assert sum(kill.target == "supervisor" for kill in schedule) == 1
    places = [kill.at_events for kill in schedule]
    assert places == sorted(places)
    assert 0 < places[0] <= places[-1] < plan.events
    assert all(0 <= kill.delay_s <= demo.KILL_DELAY_MAX_S for kill in schedule)
    assert schedule == plan.schedule(), "the same seed gives the same kills"


# --- pairs that are faulty -----------------------------------------------------------------------


@pytest.mark.campaign
def test_a_pair_that_acknowledges_without_storing_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_pair, "SUPERVISOR_ARGUMENTS", ("-c", CHEAT))
    monkeypatch.setattr(demo, "WRITE_S_MIN", 0.5)
    monkeypatch.setattr(demo, "WRITE_S_PER_KILL_MIN", 0.1)

    assert run(tmp_path) == 1

    out = capsys.readouterr().out
    assert "BAD: 40 events are lost" in out
    assert "BAD: not every event is stored for every subscriber" in out
    assert "the broker forgot all of lane p0" in out, "with the story of an event"


def test_a_supervisor_that_dies_ends_the_demo_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_pair, "SUPERVISOR_ARGUMENTS", ("-c", "print('last words'); raise SystemExit(7)"))

    assert run(tmp_path) == 1

    out = capsys.readouterr().out
    assert "last words" in out
    assert "the supervisor left by itself with exit code 7" in out


def test_the_time_limit_ends_a_demo_that_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_pair, "SUPERVISOR_ARGUMENTS", ("-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(demo, "TIME_LIMIT_S", 0.5)
    monkeypatch.setattr(demo, "TIME_LIMIT_S_PER_KILL", 0.0)

    assert run(tmp_path) == 1

    out = capsys.readouterr().out
    assert "the time limit of" in out
    assert "came before this: the runner is ready" in out


# --- the audit -----------------------------------------------------------------------------------


class Scene:
    """A log of one partition with two subscribers on it, and rows, all written by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        (folder / ".groups").mkdir(parents=True)
        self.audit = Audit(WrittenLog(folder), ["demo-0", "demo-1"], lambda: self.rows)

    def write(self, *ids: int, tail: str = "") -> None:
        with (self.folder / "p0.jsonl").open("a") as file:
            file.write("".join(json.dumps({"id": id_}) + "\n" for id_ in ids) + tail)

    def store(self, *ids: int, subscribers: tuple[int, ...] = (0, 1)) -> None:
        for number in subscribers:
            for id_ in ids:
                row = {"id": len(self.rows), "watcher": f"demo-{number}", "payload": {"id": id_}, "redelivered": 0}
                self.rows = [*self.rows, row]

    def commit(self, count: int) -> None:
        """Acknowledge the first so many lines."""
        lines = (self.folder / "p0.jsonl").read_bytes().splitlines(keepends=True)
        offset = sum(len(line) for line in lines[:count])
        (self.folder / ".groups" / "demo.json").write_text(json.dumps({"log": "x", "offsets": {"p0": offset}}))

    def look(self, *, at_rest: bool = False) -> None:
        self.audit.look("a look", at_rest=at_rest)

    def found(self) -> dict[str, int]:
        report = self.audit.report()
        return {kind: report.count(kind) for kind in ("lost", "stored twice", "advanced before stored")}


NOTHING = {"lost": 0, "stored twice": 0, "advanced before stored": 0}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "log")


def test_all_is_well_if_everything_is_stored_and_then_acknowledged(scene: Scene) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(0, 1, 2, 3)
    scene.look()
    scene.commit(4)
    scene.look(at_rest=True)

    assert scene.found() == NOTHING
    assert {name: len(events) for name, events in scene.audit.events.items()} == {"demo-0": 4, "demo-1": 4}


def test_an_event_acknowledged_before_it_is_stored_is_found_even_if_it_is_stored_later(scene: Scene) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(0, 1)
    scene.store(2, subscribers=(0,))
    scene.commit(3)
    scene.look()

    scene.store(2, subscribers=(1,))
    scene.store(3)
    scene.commit(4)
    scene.look(at_rest=True)

    assert scene.found() == NOTHING | {"advanced before stored": 1}


def test_a_lost_event_is_counted_for_each_subscriber_that_misses_it(scene: Scene) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(0, 1, 2)
    scene.store(3, subscribers=(1,))
    scene.commit(4)
    scene.look(at_rest=True)

    assert scene.found() == NOTHING | {"lost": 1}


def test_an_event_stored_twice_is_found_by_its_payload_whatever_its_key(scene: Scene) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(0, 1, 2, 3)
    scene.store(2, 3, subscribers=(0,))
    scene.store(3, subscribers=(0,))
    scene.look()

    assert scene.found() == NOTHING | {"stored twice": 2}


@pytest.mark.parametrize("id_", [4, -1])
def test_a_row_that_is_not_an_event_of_the_log_is_found(scene: Scene, id_: int) -> None:
    scene.write(0, 1, 2, 3)
    scene.store(id_, subscribers=(0,))
    scene.look()

    assert scene.audit.strange_rows == 1


def test_a_row_that_was_seen_before_is_not_counted_again(scene: Scene) -> None:
    for id_ in range(4):
        scene.write(id_)
        scene.store(id_)
        scene.commit(id_ + 1)
        scene.look()
        scene.look()

    assert scene.found() == NOTHING
    assert scene.audit.report().stored == 8


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path, scene: Scene) -> None:
    log = WrittenLog(scene.folder)
    scene.write(0, tail='{"id": 1')
    log.read()
    assert log.written == 1

    scene.write(tail="}\n")
    log.read()
    assert log.written == 2
    assert [record.event for record in log.report()] == ["0", "1"]
    scene.commit(1)
    assert log.acknowledged(log.committed()) == 1


# --- the command ---------------------------------------------------------------------------------


def called(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    from headgate.cli.main import main

    code = main(["demo", "--partitions", "2", "--seed", "1", *arguments])
    return code, capfd.readouterr().out


def test_a_small_demo_proves_the_pair_and_leaves_nothing_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    code, out = called(capfd, "--events", "200", "--kills", "1", "--subscribers", "2")

    assert code == 0, out
    table = dict(re.findall(r"^│ (.+?) +│ +(.+?) │$", out, re.MULTILINE))
    assert table["events written"] == "200"
    assert table["stored for demo-0"] == table["stored for demo-1"] == "200"
    assert table["stored twice"] == table["lost"] == "0"
    assert table["kills with SIGKILL"] == "1 runner, 1 supervisor"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.campaign
@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_with_a_broker_that_is_killed_too_nothing_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    plan = ("--events", "300", "--kills", "3", "--subscribers", "2", "--seed", "1")
    code = main(["demo", "--broker", "postgres", *plan])
    out = capfd.readouterr().out
    assert code == 0, out
    table = dict(re.findall(r"^│ +(.+?) +│ +(.+?) │$", out, re.MULTILINE))
    assert (table["messages published"], table["lost"], table["stored twice"]) == ("300", "0", "0")
    assert table["broker, at a random moment"] == "1"
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_server_of_the_broker_the_demo_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = Console(width=200, record=True)
    assert not broker_demo.prove("redis", tmp_path, 10, 0, 1, 1, out)
    assert "this machine has no program of a server of redis" in out.export_text()


@pytest.mark.campaign
def test_on_postgresql_the_demo_makes_a_database_of_its_own_and_drops_it(
    capfd: pytest.CaptureFixture[str], make_postgres_url: Callable[[], str]
) -> None:
    url = make_postgres_url()
    with psycopg.connect(url, autocommit=True) as connection:
        code, out = called(capfd, "--events", "50", "--kills", "0", "--subscribers", "1", "--db", url)

        assert code == 0, out
        made = re.search(r"/(headgate_demo_[0-9a-f]+),", out)
        assert made is not None
        assert made[1] not in [row[0] for row in connection.execute("SELECT datname FROM pg_database")]
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        assert tables == [], "the named database is not touched"


def test_a_database_that_is_not_a_postgresql_server_is_refused_before_anything_is_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.cli.main import main

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    codes = main(["demo", "--db", "sqlite:////x"]), main(["demo", "--db", "postgresql://u:hunter2@127.0.0.1:1/d"])

    assert codes == (2, 1)
    err = capfd.readouterr().err
    assert "PostgreSQL" in err
    assert "no database can be created beside postgresql://u:***@127.0.0.1:1/d" in err
    assert list(tmp_path.iterdir()) == []
