"""Dead letters brought back by one command: ``headgate dlq redrive --all``, from its start to its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks import nothing
from benchmarks.databases import KEYS, Database, add_triggers, bare_driver, fresh, moment
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, main
from headgate.protocol.messages.runner import RefusedEvent
from headgate.protocol.values import encode_value
from headgate.store.db.secrets import Secrets
from headgate.store.store import Store

LETTERS_S = "letters"
LETTERS_PER_SLICE = 500
PAYLOAD = encode_value({"order": 1, "amount": 1800}, where="payload")


def bury(database: Database, letters: int) -> None:
    """Add a trigger that a supervisor owns, and as many dead letters of it, as a runner reports them."""
    add_triggers(database, "nobody.Loads", [{}])
    with Store(database.engine(), secrets=Secrets([KEYS], source="the benchmarks")) as store:
        epoch = store.register_triggerer(
            hostname="h", pid=1, machine="m", process_started=0.0, capacity=1, queues=("default",)
        )
        (trigger,) = store.claim_triggers(epoch, limit=1, queues=("default",))
        for first in range(0, letters, LETTERS_PER_SLICE):
            numbers = range(first, min(first + LETTERS_PER_SLICE, letters))
            store.store_slice(epoch, refused=[letter(trigger.id, number) for number in numbers])


def letter(trigger_id: int, number: int) -> RefusedEvent:
    """Return an event that is refused, with its whole payload."""
    return RefusedEvent(
        trigger_id=trigger_id,
        trigger_run_id=f"run-{trigger_id}",
        sequence_index=number,
        seq=number + 1,
        reason="too big",
        payload_bytes=len(PAYLOAD),
        payload_head=PAYLOAD,
        key=str(number),
        is_whole=True,
    )


def run_command(kind: str, *, letters: int) -> Figures:
    """Have the command redrive all letters; return how many it did a second, its start included."""
    with fresh(kind) as database:
        bury(database, letters)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        environment |= {"HEADGATE_HOME": str(database.folder), "HEADGATE_FERNET_KEYS": KEYS}
        command = [sys.executable, "-m", "headgate.cli", "--db", database.url, "dlq", "redrive", "--all"]
        begun = time.monotonic()
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - begun
        rows = database.count("trigger_event")
    if ended.returncode or rows != letters:
        raise BenchFailed(f"{rows:,} rows are stored of {letters:,}: {ended.stderr[-500:]}")
    return {LETTERS_S: letters / took_s}


def run_driver(kind: str, *, letters: int) -> Figures:
    """Have the bare driver store as many events, each in a commit of its own."""
    with fresh(kind) as database:
        add_triggers(database, "nobody.Loads", [{}])
        driver = bare_driver(database)
        rows = [nothing.event_row(1, number, str(number), PAYLOAD, moment(kind)) for number in range(letters)]
        begun = time.monotonic()
        for row in rows:
            driver.store([row])
        took_s = time.monotonic() - begun
        driver.close()
    return {LETTERS_S: letters / took_s}


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    return [case(kind, options.of(10_000, 1000, 50)) for kind in options.databases]


def case(kind: str, letters: int) -> Case:
    """Return the case of so many letters."""
    return Case(
        f"{kind}, {letters:,} letters",
        [Figure(LETTERS_S, "letters/s")],
        lambda: run_command(kind, letters=letters),
        lambda: run_driver(kind, letters=letters),
    )


BENCH = Bench(
    "redrive",
    "redrive: dead letters brought back by one command, each in its own transaction",
    "the bare driver storing the same events, one a commit, without locks, letters and their record",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
