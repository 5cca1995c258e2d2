"""Bells beside a SQLite database: who is rung, and what becomes of those that are full, dead or out of reach."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from headgate.store.db import bells as bells_module
from headgate.store.db.bells import HEARD_MAX, Bell, Bells, Kind

CHANGES: tuple[Kind, ...] = ("changes",)


class Hang(Protocol):
    """Hangs up a bell beside a database, by default that of the test."""

    def __call__(self, kind: Kind = "changes", *, beside: Path = ...) -> Bell: ...


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "headgate.db"
    path.touch(0o600)
    return path


@pytest.fixture
def hang(database: Path) -> Iterator[Hang]:
    """Hangs up bells, each as another process does; they are taken down when the test ends."""
    hung: list[Bell] = []

    def hang_another(kind: Kind = "changes", *, beside: Path = database) -> Bell:
        hung.append(bells_of(beside).hang(kind))
        return hung[-1]

    yield hang_another
    for bell in hung:
        bell.close()


def bells_of(database: Path) -> Bells:
    """Return the bells as another process has them."""
    return Bells(str(database))


def die(bell: Bell) -> None:
    """Leave the bell as a process does that is killed."""
    bell._socket.close()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_bell_rings_for_others_of_its_kind_and_says_so_once(database: Path, hang: Hang) -> None:
    bell, readers = hang("changes"), hang("events")
    assert not bell.has_rung()
    bells_of(database).ring(CHANGES)
    assert bell.has_rung()
    assert not bell.has_rung()
    assert not readers.has_rung()
    bells_of(database).ring(("changes", "events"))
    assert bell.has_rung()
    assert readers.has_rung()


def test_nobody_rings_the_own_bell(database: Path, hang: Hang) -> None:
    bells, other = bells_of(database), hang()
    bell = bells.hang("changes")
    bells.ring(CHANGES)
    assert other.has_rung()
    assert not bell.has_rung()
    bell.close()


def test_where_nobody_waits_there_is_no_folder(database: Path) -> None:
    bells_of(database).ring(CHANGES)
    assert list(database.parent.iterdir()) == [database]


def test_a_bell_of_a_process_that_has_ended_is_taken_down_by_whoever_rings(database: Path, hang: Hang) -> None:
    die(hang())
    bell = hang()
    folder = Path(f"{database}-bells")
    (folder / "read me").touch()
    assert len(list(folder.iterdir())) == 3
    bells_of(database).ring(CHANGES)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["read me", os.path.basename(bell._path)])
    assert bell.has_rung()
    assert not bell.is_lost()


def test_a_bell_that_is_full_rings_already_and_keeps_nobody_waiting(database: Path, hang: Hang) -> None:
    bell, late = hang(), hang()
    ringing = bells_of(database)
    for _ in range(10 * HEARD_MAX):
        ringing.ring(CHANGES)
        late.has_rung()
    assert bell.has_rung()
    while bell.has_rung():
        pass
    ringing.ring(CHANGES)
    assert bell.has_rung(), "there is room again"
    assert late.has_rung(), "others are rung although one is full"


def test_a_bell_that_is_taken_down_leaves_nothing(database: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    bell, other = hang(), hang()
    bell.close()
    assert os.listdir(f"{database}-bells") == [os.path.basename(other._path)]
    bells_of(database).ring(CHANGES)
    assert other.has_rung()
    monkeypatch.setattr(bells_module, "CHECK_S", 0.0)
    lost = hang()
    assert not lost.is_lost()
    os.unlink(lost._path)
    assert lost.is_lost()


def test_paths_may_be_longer_than_an_address(tmp_path: Path, hang: Hang) -> None:
    folder = tmp_path.joinpath(*["a folder with a long name"] * 8)
    folder.mkdir(parents=True)
    database = folder / "headgate.db"
    database.touch()
    bell = hang(beside=database)
    assert len(bell._path) > bells_module.ADDRESS_BYTES_MAX
    die(hang(beside=database))
    bells_of(database).ring(CHANGES)
    assert bell.has_rung()
    assert os.listdir(bells_of(database).folder) == [os.path.basename(bell._path)]


def test_a_link_to_the_database_leads_to_its_bells(database: Path, tmp_path: Path, hang: Hang) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(database)
    bell = hang()
    bells_of(link).ring(CHANGES)
    assert bell.has_rung()


@pytest.mark.parametrize(("database_mode", "folder_mode"), [(0o600, 0o700), (0o644, 0o700), (0o660, 0o770)])
def test_whoever_may_write_to_the_database_may_ring(
    database: Path, hang: Hang, database_mode: int, folder_mode: int
) -> None:
    database.chmod(database_mode)
    bell = hang()
    assert mode_of(Path(bell._path)) == database_mode
    assert mode_of(Path(f"{database}-bells")) == folder_mode


def test_what_cannot_be_hung_is_told_and_leaves_nothing(
    database: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, mode: int, group: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    hang().close()
    monkeypatch.setattr(bells_module, "_give", refuse)
    with pytest.raises(PermissionError):
        hang()
    assert os.listdir(f"{database}-bells") == []


def test_ringing_fails_for_nobody(database: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit has succeeded, so there is nothing to tell the one who rings."""
    bell, ringing = hang(), bells_of(database)

    def none_left() -> socket.socket:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(bells_module, "_new_socket", none_left)
        ringing.ring(CHANGES)
    assert not bell.has_rung()
    Path(ringing.folder, "changes-folder").mkdir()
    ringing.ring(CHANGES)
    assert bell.has_rung()
    database.unlink()
    ringing.ring(CHANGES)
    assert bell.has_rung()
