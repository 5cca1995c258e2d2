"""Events that one task handles in a stream, one by one and in batches, beside deferring anew for each event.

Both count from the first step begun to the task's end, by the words of the supervisor in the task's log. The slots are
the steps that a worker ran.
"""

from __future__ import annotations

import sys

from benchmarks import stations
from benchmarks.harness import Bench, Case, Figure, Figures, Options, Target, main
from benchmarks.stations import Station

DAG = """
from benchmarks.users.tasks import Empty, Repeating, Streaming
from headgate.tasks.graph import DAG

with DAG("warm"):
    Empty(task_id="warm")

with DAG("stream"):
    Streaming(task_id="task", events={events}, batch={batch})

with DAG("anew"):
    Repeating(task_id="task", events={events})
"""
WITHIN_S = 300.0
RATE, STEPS = "events handled", "steps of the task an event"
ANEW_MAX = 100  # events that are deferred for anew: each takes some milliseconds, and a rate needs no more


def streamed(kind: str, events: int, batch: int) -> Figures:
    """Have a task handle the events of one trigger, which fires them as fast as it may."""
    return _run(kind, "stream", events, batch)


def anew(kind: str, events: int) -> Figures:
    """Have a task defer for one event after the other, each time to a new trigger."""
    return _run(kind, "anew", min(events, ANEW_MAX), 1)


def _run(kind: str, dag: str, events: int, batch: int) -> Figures:
    with stations.running(kind, DAG.format(events=events, batch=batch)) as station:
        station.warm_up("warm")
        station.wait_dag(dag)
        station.create_run(dag, "measured")
        station.wait_ended(WITHIN_S)
        return _figures(station, dag, events)


def _figures(station: Station, dag: str, events: int) -> Figures:
    steps = station.steps_of(dag, "measured", "task")
    took_s = (steps[-1].ended_at - steps[0].begun_at).total_seconds()
    return {RATE: events / took_s, STEPS: len(steps) / events}


def cases(options: Options) -> list[Case]:
    """Return two cases for each database: each event by itself, and batches."""
    each, batches = options.of(2000, 300, 20), options.of(50_000, 10_000, 40)
    return [
        made
        for kind in options.databases
        for made in (case(kind, each, 1), case(kind, batches, options.of(1000, 1000, 20)))
    ]


def case(kind: str, events: int, batch: int) -> Case:
    """Return the case of so many events, with so many in a step."""
    at_least = {("sqlite", False): 700, ("sqlite", True): 20_000, ("postgresql", False): 250}.get((kind, batch > 1))
    rate = Target(value_min=at_least or 10_000)
    what = "one by one" if batch == 1 else f"{batch:,} at once"
    figures = [Figure(RATE, "1/s", rate), Figure(STEPS, "", Target(value_max=0.2) if batch > 1 else Target())]
    return Case(
        f"{kind}, {events:,} events, {what}",
        figures,
        lambda: streamed(kind, events, batch),
        lambda: anew(kind, events),
    )


BENCH = Bench(
    "handled",
    "handled: the events of one trigger that one task handles in a stream",
    "a task that defers to a new trigger for each event",
    cases,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
