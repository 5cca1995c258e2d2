"""A process with signals, of `tests.lives`: ``URL send|count NUMBER COUNT``, or ``URL consider``.

A sender sends its signals by their dedups, from the first on, and says what was acknowledged. Another holds waits
against them until it is ended. ``count`` is a program of a user's that sends its numbers under one key, one a call.
``--dies-one-in N``: at a mark of signals, in so many cases, the process kills itself.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Sequence

from tests.store.harness import register

from headgate.client import open_client
from headgate.protocol import marks
from headgate.protocol.values import encode_value
from headgate.store.db.engine import open_engine
from headgate.store.db.secrets import Secrets
from headgate.store.errors import DatabaseAway
from headgate.store.signals.sending import NewSignal
from headgate.store.store import Store

KEYS = ("one", "two")
AT_ONCE = 3  # signals of one call, to both keys in turn
PAUSE_S = 0.002


def die_by_chance(one_in: int) -> None:
    """Have this process killed at a mark of signals, in one of so many cases."""

    def at_mark(name: str) -> None:
        if name.startswith("signals.") and not random.randrange(one_in):
            os.kill(os.getpid(), signal.SIGKILL)

    marks.arm(at_mark)


def send(store: Store, number: int, count: int) -> None:
    for first in range(0, count, AT_ONCE):
        sends = [
            NewSignal(key, encode_value(item, where="value"), f"{number}.{item}", f"sender {number}")
            for item in range(first, min(first + AT_ONCE, count))
            for key in (KEYS if number % 2 else KEYS[::-1])
        ]
        while True:
            try:
                sent = store.signals.send(sends)
                break
            except DatabaseAway:
                continue
        for one, told in zip(sends, sent, strict=True):
            print(one.key, one.dedup, told.version)
    print("done", flush=True)


def count(url: str, number: int, upto: int) -> None:
    with open_client(url) as client:
        for item in range(upto):
            while True:
                try:
                    client.send_signal(KEYS[0], [number, item], dedup=f"{number}.{item}")
                    break
                except DatabaseAway:
                    continue


def consider(store: Store) -> None:
    epoch = register(store)
    while True:
        try:
            if not store.scheduling.consider_signals(epoch, limit=5).has_more:
                time.sleep(PAUSE_S)
        except DatabaseAway:
            continue


def main(arguments: Sequence[str]) -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("url")
    flags.add_argument("what", choices=("send", "consider", "count"))
    flags.add_argument("numbers", nargs="*", type=int)
    flags.add_argument("--keys", default="")
    flags.add_argument("--dies-one-in", type=int, default=0)
    given = flags.parse_args(arguments)
    if given.dies_one_in:
        die_by_chance(given.dies_one_in)
    if given.what == "count":
        count(given.url, *given.numbers)
        return
    with Store(open_engine(given.url), secrets=Secrets([given.keys], source="the test")) as opened:
        if given.what == "send":
            send(opened, *given.numbers)
        else:
            consider(opened)
