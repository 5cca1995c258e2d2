"""Every page and list of ``headgate web`` on a database with many rows of every kind.

The time is that of the whole answer without the network: routing, queries, templates. Each page is asked for once
before it is timed. A row is the slowest, or the largest, of the pages and lists whose paths begin with the same name;
sizes are those of the text that goes over the network, uncompressed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from starlette.testclient import TestClient

from benchmarks.filling import Filled, Sizes, filled
from benchmarks.harness import Bench, BenchFailed, Case, Figure, Figures, Options, Target, main
from headgate.store.inspect.why_facts import BY_SILENCE
from headgate.web.app import make_app
from headgate.web.routes import ROUTES
from headgate.web.sessions import MemorySessions
from headgate.web.stores import Stores
from headgate.web.views import Site

BASE = "http://127.0.0.1:8780"
P95_MS_MAX = 100.0
KIB_MAX = 350.0
CALLS = {"full": 40, "quick": 20, "tiny": 2}
MANY = Sizes(events=1_000_000, triggers=100_000, runs=10_000, letters=5_000, signal_keys=1_000)
SOME = Sizes(events=100_000, triggers=10_000, runs=1_000, letters=500, signal_keys=100)
FEW = Sizes(events=2_000, triggers=200, runs=200, letters=50, signal_keys=10)

# In place of the parts of a path, by the path: a row that has very much, where there is one.
_ONE = {
    "/streams/{id}": "/streams/{stream}",
    "/triggers/{id}": "/triggers/{busy}",
    "/events/{id}": "/events/{event}",
    "/dead-letters/{id}": "/dead-letters/{letter}",
    "/dags/{dag}": "/dags/dag1",
    "/dags/{dag}/graph": "/dags/dag1/graph",
    "/assets/{id}": "/assets/{asset}",
    "/consumers/{name}": "/consumers/consumer1",
    "/signals/{id}": "/signals/{signal}",
    "/dags/{dag}/runs/{run:path}": "/dags/{dag}/runs/{run}",
    "/dags/{dag}/runs/{run:path}/tasks/{task}": "/dags/{dag}/runs/{run}/tasks/t23",
    "/dags/{dag}/runs/{run:path}/tasks/{task}/instances": "/dags/{dag}/runs/{run}/tasks/t23/instances",
    "/dags/{dag}/runs/{run:path}/tasks/{task}/log": "/dags/{dag}/runs/{run}/tasks/t23/log",
}
# What people ask for besides the first page: far pages, filters that few rows or none pass.
_MORE = (
    "/triggers?beyond={half}",
    "/triggers?which=failing",
    "/triggers?which=all&queue=none",
    "/watchers?beyond=w5",
    "/streams?waits=yes",
    "/watchers?failing=yes",
    "/watchers?name=w12",
    "/events?watcher={busy}",
    "/events?beyond={event}",
    "/dead-letters?state=any",
    "/dead-letters?state=redriven",
    "/dead-letters?reason=none",
    "/runs?state=failed",
    "/runs?state=queued",
    "/runs?dag=dag1",
    "/runs?since=1h",
    "/dags?state=broken",
    "/search?q=k",
    "/search?q=t1",
    "/search?q={run}",
    "/search?q=w{busy} k1",
    "/search.json?q={busy}",
)


class Asked(NamedTuple):
    """What one path took: milliseconds of each call, and the bytes of the answer."""

    ms: Sequence[float]
    size: int


def paths() -> list[str]:
    """Return the paths to ask for, with names in place of ids. Raises `BenchFailed` for a page that is not known."""
    found = []
    for route in ROUTES:
        if route.method != "GET" or not route.reads:
            continue
        path = _ONE.get(route.path) if "{" in route.path else route.path
        if path is None:
            raise BenchFailed(f"{route.path}: say in _ONE which row it is to show")
        found += [path, f"{path}.json"] if route.is_list else [path]
    return found + list(_MORE)


def names(given: Filled) -> dict[str, object]:
    """Return the ids that paths name."""
    inspect = given.store.inspect
    failed = inspect.runs(states=("failed",), limit=1)[0]
    newest = inspect.events_before(limit=1)
    # One in the middle. A database that had others before may have none so far back.
    middle = inspect.events_before(beyond_id=newest[0].id // 2 + 1, limit=1) or newest
    return {
        "busy": given.busy,
        "half": given.busy + len(inspect.watchers()) // 2,
        "stream": inspect.streams(limit=1)[0].id,
        "event": middle[0].id,
        "letter": inspect.dead_letters(1)[0].id,
        "asset": inspect.assets(limit=1)[0].id,
        "signal": given.store.signals.keys(limit=1)[0].id,
        "dag": failed.dag,
        "run": failed.run_id,
    }


def ask(
    given: Filled, calls: int, *, around: Callable[[str], AbstractContextManager[None]] = lambda path: nullcontext()
) -> dict[str, Asked]:
    """Ask for each page so many times, within what ``around`` returns for its path."""
    stores = Stores(given.url)
    site = Site(
        stores=stores,
        liveness=BY_SILENCE,
        sessions=MemorySessions(),
        database="the benchmarks'",
        log_folder=Path(tempfile.gettempdir()) / "headgate-bench-no-logs",
        port=8780,
    )
    ids = names(given)
    found = {}
    client = TestClient(make_app(site), base_url=BASE)
    client.get("/login", params={"token": site.links.new()})
    for named in paths():
        with around(named):
            found[named] = _ask_one(client, named.format(**ids), calls)
    stores.close()
    return found


def _ask_one(client: TestClient, path: str, calls: int) -> Asked:
    took = []
    answer = client.get(path)
    if answer.status_code != 200:
        raise BenchFailed(f"{path} answered {answer.status_code}: {answer.text[:500]}")
    for _ in range(calls):
        begun = time.perf_counter()
        client.get(path)
        took.append((time.perf_counter() - begun) * 1000)
    return Asked(took, len(answer.content))


def part_of(path: str) -> str:
    """Return the part of the pages that a path belongs to: its first name."""
    return "/" + path.lstrip("/").partition("?")[0].partition("/")[0].removesuffix(".json")


def run(kind: str, sizes: Sizes, calls: int) -> Figures:
    """Ask for everything on a database of these sizes; return the slowest and the largest of each part."""
    figures: dict[str, float] = {}
    with filled(kind, sizes) as given:
        for path, asked in ask(given, calls).items():
            ms = sorted(asked.ms)
            told = {"median": statistics.median(ms), "95 of 100": ms[int(0.95 * (len(ms) - 1))]}
            for what, value in (told | {"size": asked.size / 1024}).items():
                name = f"{part_of(path)}, {what}"
                figures[name] = max(value, figures.get(name, 0.0))
    return figures


def case(kind: str, sizes: Sizes, calls: int) -> Case:
    """Return the case of a database of these sizes."""
    figures = []
    for part in dict.fromkeys(map(part_of, paths())):
        figures += [
            Figure(f"{part}, median", "ms"),
            Figure(f"{part}, 95 of 100", "ms", Target(value_max=P95_MS_MAX)),
            Figure(f"{part}, size", "KiB", Target(value_max=KIB_MAX)),
        ]
    label = f"{kind}, {sizes.events:,} events, {sizes.triggers:,} triggers, {sizes.runs:,} runs"
    return Case(label, figures, lambda: run(kind, sizes, calls), lambda: run(kind, FEW, calls))


def cases(options: Options) -> list[Case]:
    """Return one case for each database."""
    sizes = options.of(MANY, SOME, FEW)
    return [case(kind, sizes, CALLS[options.size]) for kind in options.databases]


BENCH = Bench(
    "web",
    "web: every page and list, with many rows of every kind",
    f"the same pages with {FEW.events:,} events, {FEW.triggers:,} triggers and {FEW.runs:,} runs",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
