"""Run under a system-call trace: stores rounds with the real intake and store, and answers with the real link.

``python storing.py DATABASE_URL KEYS ROUNDS SYNCHRONOUS``: where the last is not ``FULL`` it is forced upon SQLite,
after the engine has set and checked its own, which is the defect that the test has to find.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

from sqlalchemy import event

from headgate.protocol.link.connection import Connection
from headgate.protocol.link.runner_dialect import RunnerDialect
from headgate.protocol.link.wire import Role
from headgate.protocol.messages.runner import PROTOCOL_VERSION, FiredEvent, Hello, RunnerSettings, StateChanges, Welcome
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store
from headgate.supervisor.backoff import DatabaseRetry
from headgate.supervisor.children.link import RunnerLink
from headgate.supervisor.triggers.intake import Intake


def main(url: str, keys: str, rounds: int, synchronous: str) -> None:
    """Store one event a round, and answer each round."""
    engine = open_engine(url)
    if synchronous != "FULL":

        @event.listens_for(engine, "connect")
        def weaken(dbapi_connection: Any, record: Any) -> None:
            dbapi_connection.execute(f"PRAGMA synchronous = {synchronous}")

    store = Store(engine, secrets=Secrets([keys], source="the tests"))
    trigger_id = store.add_watcher("w", "nothing.Trigger", {})
    epoch = store.register_triggerer(
        hostname="h", pid=1, machine="m", process_started=0.0, capacity=1, queues=("default",)
    )
    intake = Intake(store, slice_events_max=10, retry=DatabaseRetry("events", 0.1, 1.0))
    ours, theirs = socket.socketpair()
    link = RunnerLink(ours, Connection(RunnerDialect(1), Role.SUPERVISOR, frame_bytes_max=2**20), "runner")
    runner = Connection(RunnerDialect(1), Role.RUNNER)
    theirs.setblocking(True)
    theirs.send(runner.send(Hello(PROTOCOL_VERSION, 1, 1, "0")))
    link.receive()
    link.send(Welcome(PROTOCOL_VERSION, 1, RunnerSettings()))
    runner.receive_data(theirs.recv(2**20))
    runner.next_message()
    for number in range(1, rounds + 1):
        fired = FiredEvent(trigger_id, "run", number, number, b"%d" % number, f"key-{number}")
        theirs.send(runner.send(StateChanges(number, (fired,))))
        (changes,) = link.receive()
        assert isinstance(changes, StateChanges)
        intake.add_frame(1, changes)
        stored = intake.step(epoch, 0.0)
        assert stored is not None
        assert stored.answer is not None
        # The trace tells this call by its length from all others: nothing else writes a frame of an answer.
        link.send(stored.answer)
        theirs.recv(2**20)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
