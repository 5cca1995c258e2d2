"""The folder of DAG files and the database: real files and a real store, and a parser that does what the test says."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest
import structlog.testing
from tests.store.harness import register
from tests.supervisor.tasks_harness import import_errors

from headgate.protocol.messages.dags import CronSchedule, DagSpec, TaskSpec
from headgate.protocol.messages.worker import FileParsed
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store
from headgate.supervisor.executors.file_parser import FileParser
from headgate.supervisor.tasks import dag_files
from headgate.supervisor.tasks.dag_files import DagFiles


class TextParser(FileParser):
    """Takes the text of a file for the id of its only DAG; ``error`` in it for what it is."""

    def __init__(self) -> None:
        self.parsed: list[str] = []
        self.is_busy = False
        self.replaces: dict[str, str] = {}  # what the text of a file counts as
        self._events: list[FileParsed] = []

    def room(self) -> int:
        return 0 if self._events else 1

    def parse(self, file: str) -> None:
        self.parsed.append(os.path.basename(file))
        text = Path(file).read_text()
        text = self.replaces.get(text, text)
        if "error" in text:
            self._events.append(FileParsed(file, error=f"SyntaxError: {text}", traceback="line 1", source_digest=text))
        else:
            dags = (DagSpec(text, tasks=(TaskSpec("a", "Op"),)),)
            self._events.append(FileParsed(file, dags, source_digest=text))

    def events(self, now: float) -> list[FileParsed]:
        if self.is_busy:
            return []
        events, self._events = self._events, []
        return events

    def wake_at(self) -> float:
        return 0.0 if self._events and not self.is_busy else math.inf

    def close(self) -> None:
        pass


class Scene:
    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self.store = store
        self.epoch = register(store)
        self.now = 0.0
        self.begin()

    def begin(self) -> None:
        self.parser = TextParser()
        self.files = DagFiles(self.folder, self.parser, self.store.tasks, look_s=5.0)

    def run(self) -> bool:
        """Look at the folder, and do all that follows from it; return whether the database changed."""
        self.now += 5.0
        changed = self.files.step(self.epoch, self.now)
        while self.files.wake_at() <= self.now:
            changed = self.files.step(self.epoch, self.now) or changed
        return changed

    def dags(self) -> dict[str, str]:
        return {line.name: os.path.basename(line.file) for line in self.store.inspect.dags() if line.name is not None}


@pytest.fixture
def scene(tmp_path: Path, store: Store) -> Scene:
    (tmp_path / "dags").mkdir()
    return Scene(tmp_path / "dags", store)


def test_files_come_change_and_go(scene: Scene) -> None:
    (scene.folder / "a.py").write_text("first")
    assert scene.run()
    assert scene.dags() == {"first": "a.py"}
    assert not scene.run()
    (scene.folder / "a.py").write_text("second")
    assert scene.run()
    assert scene.dags() == {"second": "a.py"}
    (scene.folder / "notes.txt").touch()
    (scene.folder / "a.py").unlink()
    assert scene.run()
    assert scene.dags() == {}


def test_a_broken_file_is_an_error_and_keeps_what_it_had(scene: Scene) -> None:
    (scene.folder / "a.py").write_text("first")
    (scene.folder / "b.py").write_text("other")
    scene.run()
    (scene.folder / "a.py").write_text("error")
    scene.run()
    assert scene.dags() == {"first": "a.py", "other": "b.py"}
    ((file, error),) = import_errors(scene.store).items()
    assert os.path.basename(file) == "a.py"
    assert error == "SyntaxError: error\nline 1"
    (scene.folder / "a.py").write_text("first")
    scene.run()
    assert import_errors(scene.store) == {}


def test_a_file_that_could_not_be_parsed_is_tried_again_less_and_less_often(scene: Scene) -> None:
    (scene.folder / "good.py").write_text("good")
    bad = scene.folder / "bad.py"
    bad.write_text("error")
    scene.run()
    scene.parser.parsed.clear()
    tried: list[float] = []
    with structlog.testing.capture_logs() as records:
        while scene.now < 3000.0:
            scene.run()
            tried += [scene.now] * len(scene.parser.parsed)
            assert set(scene.parser.parsed) <= {"bad.py"}
            scene.parser.parsed.clear()
    waits = [after - before for before, after in itertools.pairwise([5.0, *tried])]
    assert waits[:5] == [60.0, 120.0, 240.0, 480.0, 600.0]
    assert records == [], "the error is the same"
    status = bad.stat()
    bad.write_text("apple")
    os.utime(bad, ns=(status.st_atime_ns, status.st_mtime_ns))
    scene.run()
    assert scene.parser.parsed[0] == "bad.py", "its size and the time of its contents are the same"
    assert import_errors(scene.store) == {}


def test_what_was_wrong_with_a_file_may_be_over_though_it_has_not_changed(scene: Scene) -> None:
    (scene.folder / "bad.py").write_text("error")
    scene.run()
    assert import_errors(scene.store) != {}
    scene.parser.replaces = {"error": "mended"}
    scene.now += dag_files.FAILED_AGAIN_S
    scene.run()
    assert import_errors(scene.store) == {}
    assert scene.dags() == {"mended": "bad.py"}


def test_a_dag_that_no_author_s_library_would_make_is_an_error(scene: Scene) -> None:
    (scene.folder / "a.py").write_text("x" * 300)  # a dag_id that is too long for its column
    scene.run()
    assert scene.dags() == {}
    assert len(import_errors(scene.store)) == 1


def test_of_two_files_with_one_dag_id_the_first_has_it_and_the_other_is_an_error_that_names_both(scene: Scene) -> None:
    (scene.folder / "b.py").write_text("same")
    scene.run()
    (scene.folder / "a.py").write_text("same")
    for _ in range(2):
        scene.run()
        assert scene.dags() == {"same": "b.py"}
        ((file, error),) = import_errors(scene.store).items()
        assert os.path.basename(file) == "a.py"
        assert f"DAG 'same' is defined by two files, {scene.folder}/b.py and {scene.folder}/a.py" in error
        scene.begin()  # a new supervisor parses a.py before b.py
    # Once the first lets go of it, the other has it: when it defines another, is gone, or both change at once.
    (scene.folder / "b.py").write_text("other")
    scene.run()
    assert scene.dags() == {"other": "b.py", "same": "a.py"}
    assert import_errors(scene.store) == {}
    (scene.folder / "a.py").write_text("other")
    scene.run()
    assert len(import_errors(scene.store)) == 1
    (scene.folder / "b.py").unlink()
    scene.run()
    assert (scene.dags(), import_errors(scene.store)) == ({"other": "a.py"}, {})
    (scene.folder / "a.py").write_text("new")
    (scene.folder / "0.py").write_text("other")
    scene.run()
    assert (scene.dags(), import_errors(scene.store)) == ({"other": "0.py", "new": "a.py"}, {})


def test_a_folder_is_looked_through_once_however_many_links_lead_to_it(scene: Scene) -> None:
    team = scene.folder / "team"
    team.mkdir()
    (team / "etl.py").write_text("etl")
    (team / "up").symlink_to(scene.folder)
    (scene.folder / "a_link").symlink_to(team)
    (scene.folder / ".worktree").mkdir()
    (scene.folder / ".worktree" / "synced.py").write_text("synced")
    (scene.folder / "current").symlink_to(scene.folder / ".worktree")  # as git-sync does
    (scene.folder / "same.py").symlink_to(team / "other.txt")
    (team / "other.txt").write_text("of a link")
    scene.run()
    assert sorted(scene.parser.parsed) == ["etl.py", "same.py", "synced.py"]
    files = {line.file for line in scene.store.inspect.dags()}
    assert files == {f"{scene.folder}/{name}" for name in ("team/etl.py", "current/synced.py", "same.py")}


def test_a_dag_without_tasks_is_told_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TextParser, "events", lambda self, now: [FileParsed(str(scene.folder / "a.py"), (DagSpec("d"),))]
    )
    (scene.folder / "a.py").write_text("d")
    with structlog.testing.capture_logs() as records:
        for _ in range(2):
            scene.files.step(scene.epoch, 5.0)
    told = [record for record in records if "has no tasks" in record["event"]]
    assert [record["dag"] for record in told] == ["d"]


def test_a_change_has_the_other_files_parsed_after_it(scene: Scene) -> None:
    for name in "abc":
        (scene.folder / f"{name}.py").write_text(name)
    scene.run()
    scene.parser.parsed.clear()
    (scene.folder / "b.py").write_text("b2")
    scene.run()
    assert scene.parser.parsed == ["b.py", "a.py", "c.py"]


def test_folders_are_looked_through_but_hidden_ones_and_caches(scene: Scene) -> None:
    for name in ("team/etl.py", ".hidden/x.py", "__pycache__/y.py", "notes.txt"):
        (scene.folder / name).parent.mkdir(exist_ok=True)
        (scene.folder / name).write_text("etl" if name.startswith("team") else "wrong")
    scene.run()
    assert scene.dags() == {"etl": "etl.py"}


def test_what_went_away_while_nobody_looked_is_put_away(scene: Scene) -> None:
    (scene.folder / "a.py").write_text("first")
    (scene.folder / "b.py").write_text("error")
    scene.run()
    (scene.folder / "a.py").unlink()
    (scene.folder / "b.py").unlink()
    (scene.folder / "notes.txt").touch()
    scene.begin()
    scene.run()
    assert scene.dags() == {}
    assert import_errors(scene.store) == {}


def test_a_folder_that_cannot_be_read_is_no_folder_without_files(scene: Scene) -> None:
    (scene.folder / "a.py").write_text("first")
    scene.run()
    away = scene.folder.with_name("away")
    scene.folder.rename(away)
    scene.run()
    scene.run()
    assert scene.dags() == {"first": "a.py"}
    scene.begin()  # a supervisor that starts meanwhile
    scene.run()
    assert scene.dags() == {"first": "a.py"}
    away.rename(scene.folder)
    scene.run()
    assert scene.dags() == {"first": "a.py"}


def test_an_empty_folder_may_be_a_disk_that_is_not_mounted(scene: Scene) -> None:
    for name in "ab":
        (scene.folder / f"{name}.py").write_text(name)
    scene.run()
    away = scene.folder.with_name("away")
    scene.folder.rename(away)
    scene.folder.mkdir()
    scene.run()
    assert scene.dags().keys() == {"a", "b"}
    scene.begin()  # a supervisor that starts meanwhile
    scene.run()
    assert scene.dags().keys() == {"a", "b"}
    scene.folder.rmdir()
    away.rename(scene.folder)
    (scene.folder / "b.py").unlink()
    scene.run()
    assert scene.dags().keys() == {"a"}, "what went away meanwhile is found once there is something to be seen again"


def test_no_more_files_are_looked_at_than_there_may_be(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dag_files, "FILES_MAX", 2)
    for name in "abc":
        (scene.folder / f"{name}.py").write_text(name)
    scene.run()
    assert scene.dags().keys() == {"a", "b"}


def test_a_slow_file_is_parsed_last_and_not_each_time_that_another_one_changes(scene: Scene) -> None:
    for name in ("a", "b", "c"):
        (scene.folder / f"{name}.py").write_text(name)
    scene.parser.is_busy = True
    scene.run()
    scene.now += 30.0
    scene.parser.is_busy = False  # it has taken 35 s to parse a.py
    scene.run()
    assert scene.parser.parsed == ["a.py", "b.py", "c.py"]

    (scene.folder / "c.py").write_text("changed")
    scene.run()
    assert scene.parser.parsed[3:] == ["c.py", "b.py"]
    scene.now += 350.0
    scene.run()
    assert scene.parser.parsed[5:] == ["a.py"], "it may import from the one that changed"

    scene.parser.parsed.clear()
    (scene.folder / "a.py").write_text("changed too")
    scene.run()
    assert scene.parser.parsed == ["a.py", "b.py", "c.py"], "it was fast the last time"


def test_a_slow_file_that_changed_does_not_pause_when_another_one_changes_before_it_is_parsed(scene: Scene) -> None:
    make_slow(scene, "a")
    (scene.folder / "b.py").write_text("b")
    scene.run()
    scene.parser.parsed.clear()

    scene.parser.is_busy = True
    (scene.folder / "a.py").write_text("changed")
    (scene.folder / "b.py").write_text("changed-too")
    scene.run()
    assert scene.parser.parsed == ["b.py"], "the slow one comes last"
    (scene.folder / "c.py").write_text("new")
    scene.run()
    scene.parser.is_busy = False
    scene.run()
    assert scene.parser.parsed[1:3] == ["c.py", "a.py"]


def test_a_slow_file_pauses_even_if_another_one_changed_while_it_was_parsed(scene: Scene) -> None:
    (scene.folder / "a.py").write_text("a")
    scene.parser.is_busy = True
    scene.run()
    (scene.folder / "b.py").write_text("b")
    scene.run()
    scene.now += 30.0
    scene.parser.is_busy = False
    scene.run()
    assert scene.parser.parsed == ["a.py", "b.py"], "it does not hold up the next change of another one"
    scene.now += 400.0
    scene.run()
    assert scene.parser.parsed[2:] == ["a.py"], "it may import from the one that changed"


def make_slow(scene: Scene, name: str) -> None:
    (scene.folder / f"{name}.py").write_text(name)
    scene.parser.is_busy = True
    scene.run()
    scene.now += 30.0
    scene.parser.is_busy = False
    scene.run()


def test_a_database_that_is_away_loses_no_file(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    (scene.folder / "a.py").write_text("first")
    scene.files.step(scene.epoch, 5.0)

    def away(*arguments: object) -> None:
        raise DatabaseAway("db", "the test says so")

    with monkeypatch.context() as patch:
        patch.setattr(type(scene.store.tasks), "save_file", away)
        with pytest.raises(DatabaseAway):
            scene.files.step(scene.epoch, 5.0)
    assert scene.files.step(scene.epoch, 5.0)
    assert scene.dags() == {"first": "a.py"}


@pytest.mark.parametrize("name", [b"a\tb.py", b"a\nb.py", b"a\xffb.py", "a\u2028b.py".encode()])
def test_a_file_whose_path_cannot_be_stored_is_told_and_left_alone(scene: Scene, name: bytes) -> None:
    (scene.folder / os.fsdecode(name)).write_text("first")
    (scene.folder / "good.py").write_text("other")
    with structlog.testing.capture_logs() as logs:
        scene.run()
    assert scene.dags() == {"other": "good.py"}
    assert scene.parser.parsed == ["good.py"]
    (told,) = [record for record in logs if record["log_level"] == "warning"]
    assert repr(os.fsdecode(name))[1:-1] in told["file"]


@pytest.mark.parametrize("start_date_s", [1e300, 1e12, -1e12, -62135596800.0, 253402300799.0])
def test_a_dag_that_begins_outside_of_all_calendars_is_an_error(scene: Scene, start_date_s: float) -> None:
    spec = DagSpec(
        "d", CronSchedule("* * * * *"), start_date_s=start_date_s, catchup=True, tasks=(TaskSpec("a", "Op"),)
    )
    scene.parser._events.append(FileParsed(str(scene.folder / "a.py"), (spec,)))
    scene.run()
    assert scene.dags() == {}
    assert len(import_errors(scene.store)) == 1


def test_what_a_folder_is_can_be_compared_with_another_one(scene: Scene, tmp_path: Path, store: Store) -> None:
    assert scene.files.told is None
    (tmp_path / "elsewhere" / "in").mkdir(parents=True)
    (scene.folder / "in").mkdir()
    other = Scene(tmp_path / "elsewhere", store)
    for folder in (scene.folder, other.folder):
        (folder / "a.py").write_text("first")
        (folder / "in" / "b.py").write_text("error")
    scene.run()
    other.parser.is_busy = True
    other.files.step(other.epoch, 5.0)
    assert other.files.told is None, "not all are parsed"
    other.parser.is_busy = False
    other.run()
    told, others = scene.files.told, other.files.told
    assert told is not None
    assert others is not None
    assert others.files == told.files
    assert others.where != told.where
    scene.run()
    assert scene.files.told == told, "nothing has changed"
    (other.folder / "a.py").write_text("other")
    other.run()
    assert other.files.told is not None
    assert other.files.told.files != told.files
    (other.folder / "a.py").write_text("first")
    (other.folder / "in" / "b.py").rename(other.folder / "b.py")
    other.run()
    assert other.files.told.files != told.files, "a file has another place in its folder"
