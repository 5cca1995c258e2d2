"""`headgate metrics` and `headgate health`, called as a user calls them."""

from __future__ import annotations

import socket

import pytest
from tests.cli.conftest import Call

from headgate.supervisor.metrics.address import parse_address
from headgate.supervisor.metrics.asking import Loop, Report
from headgate.supervisor.metrics.catalogue import ALL, OF_SIGNAL_SERVERS, READY
from headgate.supervisor.metrics.endpoint import Endpoint
from headgate.supervisor.metrics.figures import Figures, Snapshot


def test_every_metric_is_listed_with_its_labels(call: Call) -> None:
    rows = call("metrics", "list", "--json").rows()
    names = [row["name"] for row in rows]
    assert names[: len(ALL)] == [metric.full_name for metric in ALL]
    assert set(names) == {metric.full_name for metric in (*ALL, *OF_SIGNAL_SERVERS)}
    assert len(set(names)) == len(names), "those that both have stand there once"
    (steps,) = (row for row in rows if row["name"] == "headgate_task_steps_total")
    assert steps["kind"] == "counter"
    assert steps["labels"] == "outcome=succeeded|skipped|failed|deferred|handled|lost|stopped|returned"
    assert "headgate_task_steps_total" in call("metrics", "list").out


def test_the_rules_can_be_written_into_a_file(call: Call) -> None:
    printed = call("metrics", "rules")
    assert printed.code == 0
    assert printed.out.startswith("# Alert rules for Prometheus.")
    assert "HeadgateNoSupervisorReady" in printed.out


@pytest.mark.parametrize(("is_ready", "code"), [(True, 0), (False, 1)])
def test_health_asks_the_supervisor_of_these_settings(
    call: Call, monkeypatch: pytest.MonkeyPatch, is_ready: bool, code: int
) -> None:
    figures = Figures()
    snapshot = Snapshot(figures.counts(), figures.histograms(), {})
    report = Report(snapshot, {"runner": (is_ready, "the runner is absent")}, READY)
    loop = Loop(lambda: loop.answer(report))
    served = Endpoint(parse_address("127.0.0.1:0"), loop)
    try:
        monkeypatch.setenv("HEADGATE_METRICS_LISTEN", f"0.0.0.0:{served.port}")
        alive = call("health")
        assert (alive.code, alive.out) == (0, "ok\n")
        ready = call("health", "--ready")
        assert ready.code == code
        assert '"says": "the runner is absent"' in ready.out
    finally:
        served.close()


def test_a_supervisor_that_is_not_there_is_not_healthy(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        port = unused.getsockname()[1]
        monkeypatch.setenv("HEADGATE_METRICS_LISTEN", f"localhost:{port}")
        called = call("health")
    assert called.code == 1
    assert called.out.startswith(f"nobody answers at localhost:{port}: ")


def test_without_the_setting_nobody_can_be_asked(call: Call) -> None:
    called = call("health")
    assert (called.code, called.err) == (2, "headgate: metrics_listen is not set, so supervisors answer nobody\n")


def test_a_bad_address_is_named_with_its_place(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_METRICS_LISTEN", "8781")
    called = call("health")
    assert called.code == 2
    example = "for example 127.0.0.1:8781 or [::1]:8781"
    assert called.err == f"headgate: metrics_listen: '8781' is not HOST:PORT, {example} (HEADGATE_METRICS_LISTEN)\n"
