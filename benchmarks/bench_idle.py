"""Cost of an idle pair: CPU time of both processes, and the number of statements to the database.

Statements are counted in the driver's connection (SQLite) or by a proxy in front of the server (PostgreSQL). Counting
takes less than a microsecond per statement, and there are few.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator
from functools import partial

from benchmarks import idlers, kernel, pairs, stations
from benchmarks.databases import fresh
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main
from benchmarks.pairs import Pair
from benchmarks.proxy import in_front_of

CPU = "CPU time a minute"
STATEMENTS = "statements a minute"
OF_SUPERVISOR = "of it the supervisor"
SETTLE_S = 1.0  # until the work of the start is done
WITHIN_S = 60.0
RULES, RULED_TASKS = 1000, 100  # of each run
RULED = f"""
from benchmarks.users.tasks import Empty
from headgate.signals import On
from headgate.tasks.graph import DAG

with DAG("ruled"):
    for number in range({RULED_TASKS}):
        Empty(task_id=f"t{{number}}", signals=[On("never sent")])
"""


@contextlib.contextmanager
def watched_pair(kind: str) -> Generator[Pair]:
    """Give a pair whose statements are counted on its board."""
    with fresh(kind) as database:
        board = pairs.new_board(database)
        if kind == "sqlite":
            with idlers.running_on(database, command=("-m", "benchmarks.watched", "--board", board.path)) as pair:
                yield pair
            return
        with in_front_of(database.url, board=board) as url, idlers.running_on(database._replace(url=url)) as pair:
            yield pair


def run_pair(kind: str, count: int, window_s: float) -> Figures:
    """Look at a pair with so many idle triggers for ``window_s`` seconds."""
    with watched_pair(kind) as pair:
        idlers.add_idle(pair, count)
        time.sleep(min(SETTLE_S, window_s))
        processes = {"runner": pair.runner_pids()[-1], "supervisor": pair.supervisor_pid}
        cpu_before_s = {name: kernel.cpu_s(pid) for name, pid in processes.items()}
        statements_before = pair.board["statements"]
        time.sleep(window_s)
        used_s = {name: (kernel.cpu_s(pid) - cpu_before_s[name]) * 60 / window_s for name, pid in processes.items()}
        statements = (pair.board["statements"] - statements_before) * 60 / window_s
    return {
        CPU: sum(used_s.values()),
        "of it the runner": used_s["runner"],
        OF_SUPERVISOR: used_s["supervisor"],
        STATEMENTS: statements,
    }


def run_rules(kind: str, rules: int, window_s: float) -> Figures:
    """Look at a ``headgate up`` that has so many open rules of tasks about signals, for ``window_s`` seconds."""
    with stations.running(kind, RULED, counts_statements=True) as station:
        station.wait_dag("ruled")
        for number in range(rules // RULED_TASKS):
            station.create_run("ruled", f"run-{number}")
        station.wait_rules(rules, WITHIN_S)
        time.sleep(min(SETTLE_S, window_s))
        supervisor, board = station.pair.supervisor_pid, station.pair.board
        cpu_before_s, statements_before = kernel.cpu_s(supervisor), board["statements"]
        time.sleep(window_s)
        used_s = (kernel.cpu_s(supervisor) - cpu_before_s) * 60 / window_s
        return {OF_SUPERVISOR: used_s, STATEMENTS: (board["statements"] - statements_before) * 60 / window_s}


def rules_case(kind: str, window_s: float) -> Case:
    """Return the case of 1,000 rules; its baseline is none."""
    ruled, none = partial(run_rules, kind, RULES, window_s), partial(run_rules, kind, 0, window_s)
    figures = [Figure(OF_SUPERVISOR, "s"), Figure(STATEMENTS, "")]
    return Case(f"{kind}, {RULES:,} rules about signals", figures, ruled, none)


def cases(options: Options) -> list[Case]:
    """Return one case for each database and number of triggers."""
    window_s = options.of(15.0, 5.0, 0.2)
    kinds = options.of(options.databases, options.databases[:1], options.databases)
    of_triggers = [
        case(kind, count, window_s, empty)
        for kind in kinds
        for empty in [Empty(kind, window_s)]
        for count in options.of((0, 1000, 10_000), (0, 1000), (0, 20))
    ]
    return of_triggers + [rules_case(kind, window_s) for kind in kinds]


class Empty:
    """A pair without triggers: a case of its own, and the baseline of the others of the same round of runs."""

    def __init__(self, kind: str, window_s: float) -> None:
        self._kind = kind
        self._window_s = window_s
        self._found: Figures | None = None

    def look(self) -> Figures:
        """Look at such a pair."""
        self._found = run_pair(self._kind, 0, self._window_s)
        return self._found

    def last(self) -> Figures:
        """Return the last figures; measure if there are none yet."""
        return self._found or self.look()


def case(kind: str, count: int, window_s: float, empty: Empty) -> Case:
    """Return the case of so many triggers. Without any it has no baseline: it is the others'."""
    cpu = Target(value_max=0.1) if count == 1000 else Target()
    statements = Target(value_max=60) if count == 1000 else Target()
    figures = [
        Figure(CPU, "s", cpu),
        Figure("of it the runner", "s"),
        Figure(OF_SUPERVISOR, "s"),
        Figure(STATEMENTS, "", statements),
    ]
    if not count:
        return Case(f"{kind}, no triggers", figures, empty.look, None)
    return Case(f"{kind}, {count:,} triggers", figures, lambda: run_pair(kind, count, window_s), empty.last)


BENCH = Bench(
    "idle",
    "idle: what a pair takes while nothing happens",
    "a pair without triggers; of rules: a supervisor without any",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
