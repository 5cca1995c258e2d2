"""The file of SQLite is moved away, or replaced by a backup, while pages are served: they show what is there."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from tests.web.conftest import OURS

from headgate.store.access.audit import Actor
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.store import Store
from headgate.web.views import Site


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    return sqlite_url


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headgate.db"


def names(site: Site) -> list[str]:
    with site.stores.one() as store:
        return sorted(pool.name for pool in store.inspect.pools())


def add(file: Path, name: str) -> None:
    """Add a pool with a connection of its own, as a command does."""
    with Store(open_engine(f"sqlite:///{file}"), secrets=Secrets.none()) as store:
        store.tasks.set_pool(name, 4)


def backup(file: Path) -> Path:
    """Return a copy of the database as `sqlite3 .backup` makes it."""
    copy = file.with_name("backup.db")
    with sqlite3.connect(file) as whole, sqlite3.connect(copy) as into:
        whole.backup(into)
    whole.close()
    into.close()
    return copy


def delete_logs(file: Path) -> None:
    for end in ("-wal", "-shm"):
        file.with_name(file.name + end).unlink(missing_ok=True)


@pytest.mark.parametrize("in_place", [False, True], ids=["moved", "copied"])
def test_pages_show_a_database_that_was_restored(site: Site, file: Path, *, in_place: bool) -> None:
    add(file, "old")
    copy = backup(file)
    add(file, "lost")
    assert names(site) == ["lost", "old"]
    with site.stores.one() as first, site.stores.one() as second:
        first.inspect.pools()
        second.inspect.pools()
    delete_logs(file)
    if in_place:
        shutil.copyfile(copy, file)
    else:
        copy.rename(file)
    assert names(site) == ["old"]
    assert len(site.stores._idle) == 1, "those of the old file are closed"
    add(file, "new")
    assert names(site) == ["new", "old"]


def test_what_is_done_and_what_is_shown_are_of_one_file(client: TestClient, site: Site, file: Path) -> None:
    copy = backup(file)
    assert client.get("/watchers").status_code == 200
    delete_logs(file)
    copy.rename(file)
    assert site.writer is not None
    with site.writer.store(Actor("ada", "admin", "web")) as store:
        store.tasks.set_pool("mine", 4)
    assert "mine" in client.get("/pools").text


def test_a_file_that_is_missing_is_named_in_the_log_and_not_made(client: TestClient, file: Path) -> None:
    assert client.get("/runs").status_code == 200
    away = file.rename(file.with_name("away.db"))
    delete_logs(file)
    with capture_logs() as logs:
        answers = [
            client.get("/runs"),
            client.post("/login", headers=OURS, data={"name": "ada", "password": "wrong"}),
        ]
    for answer in answers:
        assert answer.status_code == 503
        assert str(file) not in answer.text, "it is not known who asks"
        assert "The log of this process says why." in answer.text
    told = [record["error"] for record in logs if record["event"] == "a page could not be made"]
    assert [f"there is no file {file}" in error for error in told] == [True] * 2
    assert not file.exists()
    away.rename(file)
    assert client.get("/runs").status_code == 200


def test_nothing_is_changed_in_a_file_that_is_missing(site: Site, file: Path) -> None:
    file.unlink()
    assert site.writer is not None
    with pytest.raises(DatabaseAway, match="there is no file"), site.writer.store(None) as store:
        store.access.end_session("of nobody")
    assert not file.exists()
