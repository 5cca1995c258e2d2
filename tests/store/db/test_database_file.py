"""A SQLite file that is deleted, moved or replaced while it is in use: nothing that is committed after that counts."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.harness import add, register

from headgate.protocol import marks
from headgate.protocol.messages.runner import FiredEvent
from headgate.store.db.database_file import DatabaseFile
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway, DatabaseReplaced
from headgate.store.ids import Epoch
from headgate.store.store import Store


@pytest.fixture
def folder(sqlite_url: str, tmp_path: Path) -> Path:
    """A folder with nothing in it but a database with tables."""
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "headgate.db").rename(folder / "headgate.db")
    return folder


@pytest.fixture
def store(folder: Path, secrets: Secrets) -> Iterator[Store]:
    with Store(open_engine(f"sqlite:///{folder}/headgate.db"), secrets=secrets) as store:
        yield store


@pytest.fixture
def epoch(store: Store) -> Epoch:
    add(store, "w")
    return register(store)


def delete(folder: Path) -> None:
    (folder / "headgate.db").unlink()


def move(folder: Path) -> None:
    (folder / "headgate.db").rename(folder / "elsewhere.db")


def replace(folder: Path) -> None:
    shutil.copy(folder / "headgate.db", folder / "copy.db")
    (folder / "copy.db").rename(folder / "headgate.db")


def delete_log(folder: Path) -> None:
    (folder / "headgate.db-wal").unlink()


def replace_log(folder: Path) -> None:
    log = folder / "headgate.db-wal"
    shutil.copy(log, folder / "copy")
    (folder / "copy").rename(log)


def rename_folder(folder: Path) -> None:
    folder.rename(folder.with_name("other"))


def delete_folder(folder: Path) -> None:
    shutil.rmtree(folder)


CALAMITIES = [delete, move, replace, delete_log, replace_log, rename_folder, delete_folder]


def event_of(trigger_id: int, index: int) -> FiredEvent:
    return FiredEvent(trigger_id, "run", index, seq=index + 1, payload=b"1")


@pytest.mark.parametrize("happen", CALAMITIES)
def test_a_slice_is_not_stored_if_the_file_goes_before_its_commit(
    store: Store, epoch: Epoch, folder: Path, happen: Callable[[Path], None]
) -> None:
    store.store_slice(epoch, events=[event_of(1, 0)])
    marks.arm(lambda name: happen(folder) if name == "store.before_commit" else None)
    try:
        with pytest.raises(DatabaseReplaced, match=r"was (deleted or moved|replaced by another file)$"):
            store.store_slice(epoch, events=[event_of(1, 1)])
    finally:
        marks.disarm()


@pytest.mark.parametrize("happen", CALAMITIES)
def test_a_heartbeat_finds_that_the_file_is_gone(
    store: Store, epoch: Epoch, folder: Path, happen: Callable[[Path], None]
) -> None:
    store.heartbeat(epoch)
    happen(folder)
    with pytest.raises(DatabaseReplaced):
        store.heartbeat(epoch)


@pytest.mark.parametrize("happen", CALAMITIES)
def test_a_store_that_only_reads_can_tell_that_the_file_is_gone(
    store: Store, folder: Path, happen: Callable[[Path], None]
) -> None:
    assert store.database.is_as_opened(), "nothing is open"
    for _ in range(2):
        store.inspect.now()
        assert store.database.is_as_opened()
    happen(folder)
    assert not store.database.is_as_opened()


def test_a_file_that_is_missing_is_made_only_if_asked_for(tmp_path: Path, secrets: Secrets) -> None:
    file = tmp_path / "none.db"
    for engine in (
        open_engine(f"sqlite:///{file}", creates=False),
        open_engine(f"sqlite:///{file}", reads_only=True),
    ):
        with Store(engine, secrets=secrets) as store, pytest.raises(DatabaseAway, match=f"there is no file {file}"):
            store.inspect.now()
    assert not file.exists()


def test_a_lost_connection_makes_no_new_file_in_the_place_of_one_that_is_gone(
    store: Store, epoch: Epoch, folder: Path
) -> None:
    store.close()
    delete(folder)
    with pytest.raises(DatabaseReplaced):
        store.heartbeat(epoch)
    assert not (folder / "headgate.db").exists()


def test_a_new_connection_may_find_a_new_log(store: Store, epoch: Epoch, folder: Path) -> None:
    store.close()  # the last connection deletes the log
    assert not (folder / "headgate.db-wal").exists()
    (folder / "takes the inode").touch()
    store.heartbeat(epoch)
    store.heartbeat(epoch)


def test_other_processes_beside_it_are_no_calamity(store: Store, epoch: Epoch, folder: Path) -> None:
    for _ in range(3):
        store.heartbeat(epoch)
        other = sqlite3.connect(folder / "headgate.db", isolation_level=None)
        other.execute("UPDATE trigger SET failure_count = failure_count + 1")
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        other.execute("VACUUM")
        other.close()
    store.heartbeat(epoch)


def test_a_file_behind_a_symbolic_link_is_watched_with_its_own_log(
    folder: Path, tmp_path: Path, secrets: Secrets
) -> None:
    (tmp_path / "link.db").symlink_to(folder / "headgate.db")
    with Store(open_engine(f"sqlite:///{tmp_path}/link.db"), secrets=secrets) as store:
        epoch = register(store)
        store.heartbeat(epoch)
        delete_log(folder)
        with pytest.raises(DatabaseReplaced, match=f"{folder}/headgate.db-wal was deleted"):
            store.heartbeat(epoch)


def test_a_folder_that_cannot_be_looked_at_is_away_and_may_come_back(
    store: Store, epoch: Epoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: str) -> os.stat_result:
        raise OSError(5, "Input/output error", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        with pytest.raises(DatabaseAway, match=r"headgate\.db: Input/output error"):
            store.heartbeat(epoch)
    store.heartbeat(epoch)


def test_a_database_in_memory_or_on_a_server_has_no_file() -> None:
    assert DatabaseFile.of(open_engine("sqlite://")) is None
    assert DatabaseFile.of(open_engine("postgresql://u@host/db")) is None
