"""Counts, and the text that Prometheus scrapes."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headgate.protocol.messages.runner import RunnerFigures, StreamFigures
from headgate.supervisor.metrics import catalogue
from headgate.supervisor.metrics.catalogue import ALL, PREFIX
from headgate.supervisor.metrics.exposition import render
from headgate.supervisor.metrics.figures import Figures, Snapshot
from headgate.supervisor.metrics.streams import stream_series

RULES = resources.files("headgate.supervisor.metrics") / "rules.yml"
NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


TOLD = RunnerFigures(
    (
        StreamFigures(
            "d1" * 20, "the log", 3, 4, 1, 2, 1, 70, "bytes", "absent subscriber", 940.0, (9,), 990.0, 5, 6, 7, 8
        ),
        StreamFigures("d2" * 20, "the log"),
    ),
    2,
)


def snapshot_of(figures: Figures) -> Snapshot:
    gauges, counts = stream_series(TOLD, 1000.0, lambda digest: 3 if digest.startswith("d1") else 0)
    gauges[catalogue.READY.name, ()] = 1.0
    return Snapshot(figures.counts() | counts, figures.histograms(), gauges, "sqlite")


def scraped(figures: Figures) -> dict[tuple[str, tuple[str, ...]], float]:
    body, content_type = render(snapshot_of(figures), "")
    assert content_type.startswith("text/plain")
    return {
        (sample.name.removeprefix(PREFIX), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_names_are_used_once() -> None:
    names = [metric.name for metric in ALL]
    assert len(names) == len(set(names))


def test_every_counter_has_all_its_series_from_the_start() -> None:
    values = scraped(Figures())
    outcomes = ("returned", "failed", "cancelled")
    assert [values["trigger_runs_total", (outcome,)] for outcome in outcomes] == [0.0] * 3
    assert values["events_stored_total", ()] == 0.0


def test_what_is_added_is_scraped() -> None:
    figures = Figures()
    figures.add(catalogue.EVENTS_STORED, by=3)
    figures.add(catalogue.EVENTS_STORED)
    figures.add(catalogue.STEPS_ENDED, "lost")
    values = scraped(figures)
    assert values["events_stored_total", ()] == 4.0
    assert (values["task_steps_total", ("lost",)], values["task_steps_total", ("failed",)]) == (1.0, 0.0)


def test_streams_have_series_of_their_own_even_if_two_have_one_name() -> None:
    values = {key: value for key, value in scraped(Figures()).items() if key[0].startswith("stream_")}
    first = {key: value for key, value in values.items() if "the log" in key[1]}
    assert first == {
        ("stream_lag", ("the log", "bytes")): 70,
        ("stream_in_flight_messages", ("the log",)): 3,
        ("stream_drift", ("the log",)): 3,
        ("stream_queued_messages", ("the log",)): 4,
        ("stream_subscribers", ("online", "the log")): 2,
        ("stream_subscribers", ("absent", "the log")): 1,
        ("stream_held_seconds", ("the log",)): 60,
        ("stream_oldest_seconds", ("the log",)): 10,
        ("stream_advanced_messages_total", ("acked", "the log")): 5,
        ("stream_advanced_messages_total", ("failed", "the log")): 6,
        ("stream_advanced_messages_total", ("rejected", "the log")): 7,
        ("stream_ends_total", ("the log",)): 8,
    }
    assert all("the log d2d2d2d2" in labels for _, labels in values.keys() - first.keys())
    assert values["stream_held_seconds", ("the log d2d2d2d2",)] == 0


def test_a_label_that_a_metric_has_not_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Figures().add(catalogue.STEPS_ENDED, "vanished")


def test_a_histogram_counts_a_bound_itself_below_it_and_what_is_larger_than_all() -> None:
    figures = Figures()
    for value in (0.001, 0.0011, 99.0):
        figures.observe(catalogue.SLICE_SECONDS, value)
    values = scraped(figures)
    buckets = {bound: values["store_slice_seconds_bucket", (bound,)] for bound in ("0.001", "0.0025", "10.0", "+Inf")}
    assert buckets == {"0.001": 1.0, "0.0025": 2.0, "10.0": 2.0, "+Inf": 3.0}
    assert values["store_slice_seconds_count", ()] == 3.0
    assert values["store_slice_seconds_sum", ()] == pytest.approx(99.0021)


def test_a_snapshot_does_not_change_later() -> None:
    figures = Figures()
    before = snapshot_of(figures)
    figures.add(catalogue.EVENTS_STORED)
    figures.observe(catalogue.SLICE_SECONDS, 1.0)
    assert before.counts["events_stored", ()] == 0.0
    assert sum(before.histograms["store_slice_seconds"].counts) == 0


def test_openmetrics_is_given_to_those_who_ask_for_it() -> None:
    body, content_type = render(snapshot_of(Figures()), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


@NEEDS_PROMTOOL
def test_promtool_finds_nothing_wrong_with_the_names() -> None:
    body, _ = render(snapshot_of(Figures()), "")
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def filled_in(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)


def with_the_texts_of_the_rules(tests: dict[str, Any]) -> dict[str, Any]:
    """The alerts expected by `rules_test.yml`, each with its annotations: those of its rule, about its labels."""
    rules = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    for asked in (asked for test in tests["tests"] for asked in test["alert_rule_test"]):
        for expected in asked.get("exp_alerts", ()):
            labels = expected["exp_labels"]
            texts = rules[asked["alertname"]]["annotations"]
            expected["exp_annotations"] = {name: filled_in(text, labels) for name, text in texts.items()}
    return tests


@NEEDS_PROMTOOL
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(RULES.read_text())
    tests = yaml.safe_load((Path(__file__).parent / "rules_test.yml").read_text())
    (tmp_path / "rules_test.yml").write_text(yaml.safe_dump(with_the_texts_of_the_rules(tests)))
    tested = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
