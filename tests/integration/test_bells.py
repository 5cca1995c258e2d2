"""A supervisor that waits is woken by what another process commits: its own looks are an hour away."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.conftest import StartPair
from tests.integration.pair import wait_until

from headgate.store.store import Store

# Without a bell, the next poll would come after this.
FAR_AWAY = {"poll_interval_s": "3600", "lease_silence_max_s": "7200"}

ADD = """
import sys
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
url, keys, name = sys.argv[1:]
with Store(open_engine(url), secrets=Secrets([keys], source="the tests")) as store:
    store.add_watcher(name, "users_triggers.Nameless", {"count": 1})
"""


def test_what_another_process_commits_wakes_a_supervisor_that_waits(
    users_store: Store, start_pair: StartPair, database_url: str, keys: str
) -> None:
    pair = start_pair(**FAR_AWAY)
    pair.wait_ready()
    for name in ("first", "second", "third"):  # the first might still be found by the poll of the start
        subprocess.run([sys.executable, "-c", ADD, database_url, keys, name], check=True)
        wait_until(lambda: list(users_store.inspect.events(watcher=name)), f"an event of {name}")  # noqa: B023
    assert pair.stop() == 0
