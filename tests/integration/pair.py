"""A real pair, started as a user starts it, with its log read as it is written."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from tests.waiting import WITHIN_S

from headgate.store.store import Store
from headgate.store.tables import asset_watcher, trigger_event

USERS_FOLDER = Path(__file__).parent / "users"


def stored(store: Store, watcher: str | None = None) -> int:
    """Return how many events are stored, of one watcher or of all: counted by the database, to be asked often."""
    statement = select(func.count()).select_from(trigger_event)
    if watcher is not None:
        of_name = select(asset_watcher.c.trigger_id).where(asset_watcher.c.name == watcher)
        statement = statement.where(trigger_event.c.trigger_id.in_(of_name))
    with store.database.reading() as tx:
        return int(tx.connection.execute(statement).scalar_one())


class Pair:
    """One ``headgate triggerer`` and its runner."""

    command = "triggerer"

    def __init__(self, home: Path, database_url: str, keys: str, arguments: tuple[str, ...], settings: dict[str, str]):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        environment |= {
            "HEADGATE_HOME": str(home),
            "HEADGATE_DATABASE_URL": database_url,
            "HEADGATE_FERNET_KEYS": keys,
            "HEADGATE_IMPORT_PATHS": str(USERS_FOLDER),
            "HEADGATE_LOG_FORMAT": "json",
        }
        environment |= {f"HEADGATE_{name.upper()}": value for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headgate.cli", self.command, *arguments],
            env=environment,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.records: list[dict[str, Any]] = []
        self._incoming: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self._incoming.put(json.loads(line))
            except json.JSONDecodeError:
                self._incoming.put({"event": line.decode()})
        self._incoming.put(None)

    def wait_log(self, event: str, **fields: Any) -> dict[str, Any]:
        """Wait for the next log record with this event (a part of it) and these fields; return it."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            try:
                record = self._incoming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                record = None
            if record is None:
                raise AssertionError(f"no record {event!r} {fields} in:\n" + "\n".join(map(str, self.records[-50:])))
            self.records.append(record)
            if event in str(record.get("event")) and fields.items() <= record.items():
                return record

    def wait_ready(self) -> int:
        """Wait until the next runner is ready; return its pid."""
        return int(self.wait_log("the runner is ready")["pid"])

    def kill(self) -> None:
        """SIGKILL to the supervisor."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; return the exit code once the supervisor has left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WITHIN_S)

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.kill()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
