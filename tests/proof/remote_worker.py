"""Processes of signals over gRPC that kill themselves, of `tests.lives`.

- ``serve URL PORT`` serves signals.
- ``send TARGET NUMBER COUNT`` sends its signals from the first on, and says what was answered. With ``--dedup`` it
  names them by dedups of its own; without, it leaves these to the client.
- ``listen TARGET FILE`` appends each version that it hears to a file, and goes on behind the last one there.

``--dies-after N``: a server kills itself at the Nth mark of signals, which may be between their storing and the answer,
a sender after its Nth call, and a listener after its Nth version.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

from headgate.protocol import marks
from headgate.signal_server.server import serve
from headgate.signals import Signal
from headgate.signals.remote import GrpcSignalService
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.db.transaction import Database

KEY = "proof"
TOKEN = "the token of the proof"
LAST = "the end"
AT_ONCE_MAX = 3
RETRY_S = 200.0  # a server that is killed is started again, on a machine that may be busy


class Death:
    """Comes at the last of so many steps; never with 0."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def at_mark(self, name: str) -> None:
        if name.startswith("signals."):
            self.step()


def send(target: str, number: int, count: int, has_dedups: bool, death: Death) -> None:
    with GrpcSignalService(target, TOKEN, retry_s=RETRY_S) as service:
        first = 0
        while first < count:
            items = range(first, min(first + random.randint(1, AT_ONCE_MAX), count))
            first = items.stop
            names = [f"{number}.{item}" for item in items]
            sent = service.send_signals([Signal(KEY, name, name if has_dedups else None) for name in names])
            for name, one in zip(names, sent, strict=True):
                print(name, one.version, flush=True)
            death.step()
    print("done", flush=True)


def listen(target: str, file: Path, death: Death) -> None:
    heard = read(file)
    with GrpcSignalService(target, TOKEN, retry_s=RETRY_S) as service, file.open("ab", buffering=0) as written:
        for one in service.listen_signal("the proof", KEY, after=heard[-1][0] if heard else 0):
            written.write(json.dumps([one.version, one.value]).encode() + b"\n")  # one call: whole or not at all
            if one.value == LAST:
                return
            death.step()


def read(file: Path) -> list[tuple[int, str]]:
    """Return the versions and values that a listener has written."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [(version, value) for version, value in map(json.loads, lines)]


def main(arguments: Sequence[str]) -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("what", choices=("serve", "send", "listen"))
    flags.add_argument("where")
    flags.add_argument("more", nargs="+")
    flags.add_argument("--dies-after", type=int, default=0)
    flags.add_argument("--dedup", action="store_true")
    given = flags.parse_args(arguments)
    death = Death(given.dies_after)
    if given.what == "serve":
        marks.arm(death.at_mark)
        database = Database(open_engine(given.where), Secrets.none(), None)
        address = f"127.0.0.1:{given.more[0]}"
        serve(database, address, token=TOKEN, identity=None, tell=lambda at: print(at, flush=True))
    elif given.what == "send":
        send(given.where, int(given.more[0]), int(given.more[1]), given.dedup, death)
    else:
        listen(given.where, Path(given.more[0]), death)
