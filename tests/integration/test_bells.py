"""A supervisor that waits is woken by what another process commits, and looks by itself if nobody wakes it."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.integration.conftest import StartPair
from tests.waiting import wait_until

from headgate.store.store import Store

# Without a bell, the next poll would come after this.
FAR_AWAY = {"poll_interval_s": "3600", "lease_silence_max_s": "7200"}

# Looks of its own, in case that no bell is rung.
NEAR = {"poll_interval_s": "1"}

ADD = """
import os, signal, sys
from headgate.protocol import marks
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
url, keys, name, mark = sys.argv[1:]
marks.arm(lambda reached: os.kill(os.getpid(), signal.SIGKILL) if reached == mark else None)
with Store(open_engine(url), secrets=Secrets([keys], source="the tests")) as store:
    store.add_watcher(name, "users_triggers.Nameless", {"count": 1})
"""


def add(database_url: str, keys: str, name: str, dies_at: str = "") -> int:
    """Add a watcher in a process of its own, which may kill itself at a mark; return its exit code."""
    return subprocess.run([sys.executable, "-c", ADD, database_url, keys, name, dies_at], check=False).returncode


def test_what_another_process_commits_wakes_a_supervisor_that_waits(
    users_store: Store, start_pair: StartPair, database_url: str, keys: str
) -> None:
    pair = start_pair(**FAR_AWAY)
    pair.wait_ready()
    for name in ("first", "second", "third"):  # the first might still be found by the poll of the start
        assert add(database_url, keys, name) == 0
        wait_until(lambda: list(users_store.inspect.events(watcher=name)), f"an event of {name}")  # noqa: B023
    assert pair.stop() == 0


def test_a_bell_that_nobody_rings_costs_no_more_than_the_wait_for_the_next_look(
    users_store: Store, start_pair: StartPair, database_url: str, keys: str
) -> None:
    """The process dies after its commit: on SQLite nobody hears of it. PostgreSQL has told the others by then."""
    pair = start_pair(**(NEAR if database_url.startswith("sqlite") else FAR_AWAY))
    pair.wait_ready()
    for name in ("first", "second"):
        assert add(database_url, keys, name, "bells.unrung") == -signal.SIGKILL
        wait_until(lambda: list(users_store.inspect.events(watcher=name)), f"an event of {name}")  # noqa: B023
    assert pair.stop() == 0
