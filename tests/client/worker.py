"""``python -m tests.client.worker URL``: bills what two consumers get, until it is killed; says where it is."""

from __future__ import annotations

import sys

from sqlalchemy import text

from headgate.client import DatabaseAway, open_client

WATCHERS = ("left", "right")
BATCH_EVENTS = 7
WAIT_S = 0.02  # for one of the two, before the other is asked again
INSERT = text("INSERT INTO users_bill (watcher, event_id, payload) VALUES (:watcher, :event_id, :payload)")


def say(what: str) -> None:
    print(what, flush=True)


def work(url: str) -> None:
    with open_client(url) as client:
        consumers = [client.add_consumer(f"billing of {name}", name) for name in WATCHERS]
        while True:
            for consumer in consumers:
                try:
                    if not consumer.wait(WAIT_S):
                        say("idle")
                        continue
                    with consumer.batch(BATCH_EVENTS) as batch:
                        say("begun")
                        for event in batch:
                            row = {"watcher": event.watcher, "event_id": event.id, "payload": event.payload}
                            batch.connection.execute(INSERT, row)
                        say("written")
                    say("committed")
                except DatabaseAway as error:
                    say(f"away: {error}")


if __name__ == "__main__":
    work(sys.argv[1])
