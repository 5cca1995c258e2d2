"""Every benchmark runs to its end on tiny sizes and says something; how fast it was is nobody's business here."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from benchmarks.__main__ import NAMES
from benchmarks.bench_kafka import noida_is_there
from benchmarks.bench_mqtt import mosquitto_is_there
from benchmarks.bench_nats import nats_answers
from benchmarks.bench_outbox import outbox_answers
from benchmarks.bench_rabbitmq import rabbitmq_answers
from benchmarks.bench_redis import redis_answers
from benchmarks.databases import postgresql_answers
from benchmarks.harness import Document, Options, measure, options_of, parser, rendered
from tests.waiting import ALL_WITHIN_S

from headgate.testing.brokers import sqs_station

ROOT = Path(__file__).parents[2]
ANSWERS: dict[str, Callable[[], bool]] = {
    "redis": redis_answers,
    "outbox": outbox_answers,
    "rabbitmq": rabbitmq_answers,
    "nats": nats_answers,
    "kafka": noida_is_there,
    "sqs": sqs_station.is_there,
    "mqtt": mosquitto_is_there,
}
# Where the two databases are driven differently: the drivers, the proxy. The others would only take longer.
ON_BOTH = {"consume", "intake", "push", "slow_database"}
# Units of what a tiny run may not show: memory of a few triggers, statements and CPU seconds of 0.2 s of idleness, CPU
# of a runner that has handed out its few events before the first look at it.
MAY_BE_ZERO = {"KB", ""}
MAY_BE_ZERO_IN = {"idle": {"s"}, "pair": {"µs"}}


def tiny(kind: str) -> Options:
    return options_of(parser("benchmarks").parse_args(["--tiny", "--db", kind]))


@pytest.mark.campaign
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_benchmark_runs_and_every_figure_has_its_baseline(name: str, kind: str) -> None:
    if kind == "postgresql" and (name not in ON_BOTH or not postgresql_answers()):
        pytest.skip("shown on SQLite" if name not in ON_BOTH else "no PostgreSQL server answers")
    if name in ANSWERS and not ANSWERS[name]() and "CI" not in os.environ:
        pytest.skip("its server does not answer")
    bench = importlib.import_module(f"benchmarks.bench_{name}").BENCH
    document = measure(bench, tiny(kind))
    assert document.bench == name
    assert document.stopped == ""
    assert document.rows
    assert any(row.baseline is not None for row in document.rows)
    may_be_zero = MAY_BE_ZERO | MAY_BE_ZERO_IN.get(name, set())
    for row in document.rows:
        assert row.case.startswith(kind)
        assert row.median > 0 or row.unit in may_be_zero, row
        assert row.low <= row.median <= row.high
        assert row.baseline is None or row.baseline > 0 or row.unit in may_be_zero, row
    table = rendered(document)
    assert all(row.figure.split()[0] in table for row in document.rows)
    assert msgspec.json.decode(msgspec.json.encode(document), type=Document) == document


def test_the_command_prints_one_document_a_benchmark() -> None:
    flags = ["--tiny", "--db", "sqlite", "--only", "intake", "--repeats", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=ALL_WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    document = msgspec.json.decode(line, type=Document)
    assert (document.bench, document.size, document.repeats) == ("intake", "tiny", 2)


def test_without_valgrind_the_count_of_instructions_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.instructions"],
        cwd=ROOT,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=ALL_WITHIN_S,
    )
    assert done.returncode == 1
    assert "the command valgrind is not there" in done.stderr


def test_every_benchmark_is_run_by_the_command() -> None:
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert files == set(NAMES)
