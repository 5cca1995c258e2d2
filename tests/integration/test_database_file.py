"""A real pair whose SQLite file goes away: it leaves at once, and the broker still has what is not in the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import StartPair
from tests.integration.test_pair import add_subscribers, write_log
from tests.waiting import WITHIN_S, wait_until

from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.supervisor.commands import EXIT_DATABASE_REPLACED


def delete_all(file: Path) -> None:
    for path in file.parent.glob(f"{file.name}*"):
        if path.is_dir():  # the bells of who waits
            shutil.rmtree(path)
        else:
            path.unlink()


def delete_log(file: Path) -> None:
    Path(f"{file}-wal").unlink()


def committed(log: Path) -> dict[str, int]:
    """Return up to which byte the broker may forget each partition."""
    (group,) = (log / ".groups").glob("g.json")
    offsets: dict[str, int] = json.loads(group.read_text())["offsets"]
    return offsets


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("happen", [delete_all, delete_log])
def test_a_supervisor_whose_file_is_gone_leaves_and_acknowledges_nothing_more(
    database_url: str, keys: str, start_pair: StartPair, tmp_path: Path, happen: Callable[[Path], None]
) -> None:
    log = tmp_path / "log"
    with Store(open_engine(database_url), secrets=Secrets([keys], source="the tests")) as store:
        add_subscribers(store, log, 1)
        write_log(log, events=50)
        pair = start_pair()
        wait_until(lambda: list((log / ".groups").glob("g.json")), "the first commit")
        sizes = {path.stem: path.stat().st_size for path in log.glob("*.jsonl")}
        wait_until(lambda: committed(log) == sizes, "the first events")
    happen(tmp_path / "headgate.db")
    write_log(log, events=50)
    pair.wait_log("the database file was deleted, moved or replaced; stopping", level="error")
    assert pair.process.wait(WITHIN_S) == EXIT_DATABASE_REPLACED
    assert committed(log) == sizes, "the broker may forget nothing more"
