"""``make bench``: all benchmarks, one after the other, each in a process of its own and within its time.

::

    python -m benchmarks [--quick] [--db sqlite] [--only latency] [--repeats N] [--json] [--write]

``--write`` puts the tables into ``docs/performance.md``; what is written there by hand stays.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from benchmarks import report
from benchmarks.harness import LIMIT_S as LIMIT_S_EACH
from benchmarks.harness import Document, parser, rendered
from benchmarks.pairs import ROOT

NAMES = (
    "intake",
    "consume",
    "push",
    "pair",
    "filelog",
    "redis",
    "outbox",
    "rabbitmq",
    "nats",
    "kafka",
    "sqs",
    "mqtt",
    "latency",
    "start",
    "memory",
    "idle",
    "respawn",
    "runaway",
    "backlog",
    "many",
    "redrive",
    "slow_database",
    "defer",
    "chain",
    "wake",
    "signals",
    "wide",
    "maps",
    "pages",
    "deferrals",
    "handled",
    "look",
    "status",
    "web",
)
LIMIT_S = {"full": 30 * 60.0, "quick": 4 * 60.0, "tiny": 4 * 60.0}  # all of them together
ENDING_S = 30.0  # for one that is over its time, to end its pairs
SHARES_MAX = 2.0  # of the time that is left, for one: on a busy machine the last ones get theirs, too
ROOM_S = 5.0  # to begin and to print, beside the measuring


def run_one(name: str, flags: Sequence[str], limit_s: float) -> Document | None:
    """Run one benchmark for at most ``limit_s`` seconds; return what it found, None where it failed."""
    command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--json", "--limit", f"{limit_s:.0f}", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            output, _ = process.communicate(timeout=limit_s + ENDING_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its pairs first
            try:
                output, _ = process.communicate(timeout=ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
    try:
        return msgspec.json.decode(output, type=Document)
    except msgspec.DecodeError:
        print(f"{name}: it failed, with exit code {process.returncode}", file=sys.stderr)
        return None


def selected(only: str) -> list[str]:
    """Return the benchmarks whose name contains ``only``."""
    return [name for name in NAMES if only in name]


def flags_of(given: argparse.Namespace) -> list[str]:
    """Return the flags that go on to each benchmark."""
    flags = ["--db", given.db]
    if given.size != "full":
        flags.append(f"--{given.size}")
    if given.repeats:
        flags += ["--repeats", str(given.repeats)]
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return 1 if any of it failed or was stopped. How fast it was changes nothing here."""
    flags = parser("benchmarks")
    flags.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    given = flags.parse_args(arguments)
    begun = time.monotonic()
    limit_s = given.limit or LIMIT_S[given.size]
    names = selected(given.only)
    if not names:
        flags.error(f"no benchmark's name contains {given.only!r}: {', '.join(NAMES)}")
    documents = []
    for number, name in enumerate(names):
        left_s = limit_s - (time.monotonic() - begun) - ROOM_S
        if left_s <= 0:
            print(f"{name}: left out, {limit_s:g} s are over", file=sys.stderr)
            continue
        share_s = SHARES_MAX * left_s / (len(names) - number)
        document = run_one(name, flags_of(given), min(left_s, share_s, given.limit or LIMIT_S_EACH[given.size]))
        if document is not None:
            documents.append(document)
            if given.write:
                report.write([document])
            print(msgspec.json.encode(document).decode() if given.json else rendered(document) + "\n", flush=True)
    whole = len(documents) == len(names) and not any(document.stopped for document in documents)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
