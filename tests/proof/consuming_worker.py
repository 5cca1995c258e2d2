"""``python -m tests.proof.consuming_worker URL WATCHER...``: bills what consumers of these get, and says where it is.

``--fails-one-in N``: in so many batches, by chance, the code of the user raises in the middle.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from sqlalchemy import text

from headgate.client import BATCH_EVENTS, DatabaseAway, open_client
from headgate.store.consuming.failures import MAX_DELIVERIES

WAIT_S = 0.02  # for the events of one watcher, before the next is asked
TABLES = {
    "sqlite": "CREATE TABLE users_bill (n INTEGER PRIMARY KEY AUTOINCREMENT, watcher TEXT, event_id INT, payload TEXT)",
    "postgresql": "CREATE TABLE users_bill (n BIGSERIAL PRIMARY KEY, watcher TEXT, event_id BIGINT, payload TEXT)",
}
INSERT = text("INSERT INTO users_bill (watcher, event_id, payload) VALUES (:watcher, :event_id, :payload)")


class BillingFailed(Exception):
    """What the code of the user raises now and then."""


def say(what: str) -> None:
    print(what, flush=True)


def work(url: str, watchers: Sequence[str], fails_one_in: int) -> None:
    # What fails by chance is no bad event: none is to be set aside.
    max_deliveries = 0 if fails_one_in else MAX_DELIVERIES
    with open_client(url) as client:
        consumers = [
            client.add_consumer(f"billing of {name}", name, max_deliveries=max_deliveries) for name in watchers
        ]
        while True:
            for consumer in consumers:
                try:
                    if not consumer.wait(WAIT_S):
                        continue
                    with consumer.batch(random.randint(1, BATCH_EVENTS)) as batch:
                        say("begun")
                        for event in batch:
                            row = {"watcher": event.watcher, "event_id": event.id, "payload": event.payload["id"]}
                            batch.connection.execute(INSERT, row)
                        if fails_one_in and not random.randrange(fails_one_in):
                            raise BillingFailed
                        say("written")
                    say("committed")
                except BillingFailed:
                    say("failed")
                except DatabaseAway as error:
                    say(f"away: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.proof.consuming_worker")
    parser.add_argument("url")
    parser.add_argument("watchers", nargs="+")
    parser.add_argument("--fails-one-in", type=int, default=0, metavar="N")
    given = parser.parse_args()
    work(given.url, given.watchers, given.fails_one_in)
