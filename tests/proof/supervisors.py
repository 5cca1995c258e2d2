"""Several supervisors on one database, of which the one with the most triggers is killed and replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.fernet import Fernet
from tests.proof.crash.faults import environment_of
from tests.proof.crash.processes import Supervisor
from tests.proof.crash.reader import open_reader
from tests.waiting import wait_until

from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store

_PIDS = """
SELECT o.pid, count(*) FROM triggerer o JOIN trigger t ON t.triggerer_id = o.id
WHERE o.fenced_at IS NULL AND o.stopped_at IS NULL GROUP BY o.pid ORDER BY 2 DESC, 1
"""


class Supervisors:
    """Real supervisors with one home folder and one database; ``with`` it, and `start` them.

    ``kills`` counts those that were killed.
    """

    def __init__(self, folder: Path, url: str, settings: Mapping[str, str] | None = None) -> None:
        self.kills = 0
        self._folder, self._url = folder, url
        self._keys = Fernet.generate_key().decode()
        self._environment = environment_of(folder, url, self._keys, settings or {})
        self._running: list[Supervisor] = []
        self._reader = open_reader(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for supervisor in self._running:
            supervisor.end()
        self._reader.close()

    def start(self, count: int = 1) -> None:
        """Start so many more."""
        for _ in range(count):
            self._running.append(Supervisor(self._environment, self._folder))

    def wait_ready(self) -> None:
        """Wait until each has its runner. Raises `tests.waiting.NotInTime`."""
        wait_until(lambda: all(one.runner() for one in self._running), "all supervisors at work")

    def add_watcher(self, name: str, classpath: str, kwargs: dict[str, Any]) -> int:
        """Add a watcher, as a user does; return the id of its trigger."""
        engine = open_engine(self._url)
        with Store(engine, secrets=Secrets([self._keys], source="the tests")) as store:
            trigger_id = store.add_watcher(name, classpath, kwargs)
        engine.dispose()
        return trigger_id

    def replace_owner(self) -> None:
        """Kill the supervisor that owns most triggers, and start another one."""
        pids = [pid for pid, _ in self._reader.ask(_PIDS)]
        running = {supervisor.pid: supervisor for supervisor in self._running}
        victim = next((running[pid] for pid in pids if pid in running), self._running[0])
        self._running.remove(victim)
        victim.kill()
        self.kills += 1
        self.start()

    def drain(self) -> Counter[int]:
        """Have all leave; return how many left with each exit code."""
        return Counter(supervisor.drain() for supervisor in self._running)
