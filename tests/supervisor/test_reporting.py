"""What a supervisor says of itself, from a core on a real store."""

from __future__ import annotations

import re
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.supervisor.core_harness import SETTINGS, Supervised, World, add_watchers, cut_off, fired

from headgate.protocol.messages.runner import FinishedTrigger
from headgate.store.errors import DatabaseFault
from headgate.store.inspect.inspection import Inspection
from headgate.store.inspect.why_facts import BY_SILENCE
from headgate.supervisor.backoff import DatabaseOutage
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.metrics.asking import AWAY_S_MAX, Loop, Report
from headgate.supervisor.metrics.figures import Figures
from headgate.supervisor.metrics.service_manager import ServiceManager
from headgate.supervisor.reporting import DATABASE_LOOK_S, STATUS_INTERVAL_S, Reported, Reporter
from headgate.supervisor.triggers.leases import Identity


class Reporting:
    """A core whose reporter is asked, with the clock of the test."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, manager: ServiceManager | None = None) -> None:
        self.world = world
        self.figures = Figures()
        outage = DatabaseOutage(self.figures)
        core = SupervisorCore(
            world.store,
            Identity("host", 1, "machine", 0.0),
            SETTINGS,
            is_gone=lambda row: False,
            clock=lambda: 0.0,
            outage=outage,
            figures=self.figures,
        )
        self.on = Supervised(world, core)
        self.selector = selectors.DefaultSelector()
        monkeypatch.setattr("headgate.supervisor.reporting.time.monotonic", lambda: world.now)
        self.reporter = Reporter(
            Reported(core, world.store, self.figures, outage, BY_SILENCE),
            self.selector,
            service_manager=manager,
            leaves_within_s=12.0,
        )

    def turn(self) -> None:
        self.reporter.turn_began()
        self.reporter.turn_ended(lambda: None)

    def ask(self) -> Report:
        """Ask as the endpoint's threads do, while the loop turns."""
        loop: Loop = self.reporter._loop
        answers: list[Report | None] = []
        asking = threading.Thread(target=lambda: answers.append(loop.ask(60.0)))
        asking.start()
        for key, _ in self.selector.select(60.0):
            key.data()
        self.turn()
        asking.join()
        (report,) = answers
        assert report is not None
        return report

    def gauges(self) -> dict[str, float]:
        return {" ".join((name, *labels)): value for (name, labels), value in self.ask().snapshot.gauges.items()}


@pytest.fixture
def reporting(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reporting]:
    made = Reporting(world, monkeypatch)
    yield made
    made.reporter.close()
    made.selector.close()


def failed(report: Report) -> list[str]:
    return [words for holds, words in report.checks.values() if not holds]


def test_it_is_ready_once_the_runner_is(reporting: Reporting) -> None:
    assert failed(reporting.ask()) == ["no lease yet", "the runner is absent"]
    reporting.on.start_runner()
    report = reporting.ask()
    assert (failed(report), report.is_ready) == ([], True)
    assert report.snapshot.gauges["ready", ()] == 1.0
    reporting.on.core.drain(reporting.world.now)
    assert failed(reporting.ask()) == ["the runner is draining", "asked to stop"]


def test_a_short_outage_of_the_database_leaves_it_ready(reporting: Reporting, monkeypatch: pytest.MonkeyPatch) -> None:
    reporting.on.start_runner()
    cut_off(reporting.world, monkeypatch)
    reporting.on.pass_time_with_heartbeats(AWAY_S_MAX)
    assert reporting.ask().is_ready
    reporting.on.pass_time_with_heartbeats(AWAY_S_MAX)
    words = failed(reporting.ask())
    assert words[0] == "the lease has run out"
    assert re.fullmatch(r"the database cannot be used for \d+ s: \S.*", words[1])
    assert reporting.gauges()["database_away_seconds"] > AWAY_S_MAX


def test_events_and_runs_are_counted_where_they_are_stored(reporting: Reporting) -> None:
    add_watchers(reporting.world, 2)
    reporting.on.start_runner()
    first, second = reporting.on.created()
    reporting.on.round(fired(first, 0), fired(first, 1, key="a"), fired(second, 0))
    reporting.on.round(
        fired(first, 2, key="a"), finished=(FinishedTrigger(second.trigger_id, second.trigger_run_id, "failed", 1),)
    )
    counts = reporting.ask().snapshot.counts
    assert counts["events_stored", ()] == 3
    assert counts["events_redelivered", ()] == 1
    assert counts["trigger_runs", ("failed",)] == 1
    assert reporting.gauges()["triggers running"] == 1.0
    assert reporting.gauges()["triggers waiting"] == 1.0


def test_the_problems_are_those_of_status_and_are_asked_for_now_and_then(reporting: Reporting) -> None:
    reporting.on.start_runner()
    assert reporting.gauges()["problems attention"] == 0.0
    (number,) = add_watchers(reporting.world, 1)
    reporting.on.pass_time(SETTINGS.lease.poll_interval_s)
    (spec,) = reporting.on.created()
    reporting.on.round(finished=(FinishedTrigger(number, spec.trigger_run_id, "failed", 0, error="KeyError: 1"),))
    assert reporting.gauges()["problems attention"] == 0.0
    reporting.on.pass_time_with_heartbeats(DATABASE_LOOK_S)
    assert reporting.gauges()["problems attention"] == 1.0


def test_the_ages_of_what_consumers_have_yet_to_get_are_there(reporting: Reporting) -> None:
    add_watchers(reporting.world, 1)
    reporting.on.start_runner()
    reporting.world.store.consumers.add("billing", "w0")
    assert reporting.gauges()["consumer_oldest_seconds billing"] == 0.0
    (spec,) = reporting.on.created()
    reporting.on.round(fired(spec, 0))
    reporting.on.pass_time_with_heartbeats(DATABASE_LOOK_S)
    assert reporting.gauges()["consumer_oldest_seconds billing"] >= DATABASE_LOOK_S


def test_problems_that_cannot_be_asked_for_leave_the_other_figures(
    reporting: Reporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise DatabaseFault("db", "a disk that fails")

    monkeypatch.setattr(Inspection, "status", away)
    reporting.on.start_runner()
    gauges = reporting.gauges()
    assert gauges["ready"] == 1.0
    assert [name for name in gauges if name.startswith("problems")] == []


def test_a_turn_is_measured_and_nothing_is_asked_of_the_database_for_nobody(reporting: Reporting) -> None:
    reporting.on.start_runner()
    reporting.reporter.turn_began()
    reporting.world.now += 0.3
    reporting.reporter.turn_ended(lambda: pytest.fail("nobody has asked"))
    turns = reporting.figures.histograms()["loop_turn_seconds"]
    assert sum(turns.counts) == 1
    assert turns.total == pytest.approx(0.3)


def test_systemd_is_told_how_it_is_without_a_watchdog(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        reporting = Reporting(world, monkeypatch, ServiceManager({"NOTIFY_SOCKET": systemd.getsockname()}))
        reporting.turn()
        assert systemd.recv(4096) == b"STATUS=no lease yet; the runner is absent"
        reporting.on.start_runner()
        reporting.world.now += STATUS_INTERVAL_S
        assert reporting.reporter.wake_at() <= reporting.world.now
        reporting.turn()
        assert systemd.recv(4096) == b"READY=1"
        assert systemd.recv(4096) == b"STATUS=0 triggers, 0 steps of tasks"
        reporting.reporter.close()
        reporting.selector.close()


def test_systemd_is_told_that_it_is_ready_that_it_turns_and_that_it_stops(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        environ = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "30000000"}
        reporting = Reporting(world, monkeypatch, ServiceManager(environ))
        reporting.turn()
        assert systemd.recv(4096) == b"WATCHDOG=1"
        assert systemd.recv(4096) == b"STATUS=no lease yet; the runner is absent"
        reporting.on.start_runner()
        reporting.turn()
        assert systemd.recv(4096) == b"READY=1"
        assert reporting.reporter.wake_at() == reporting.world.now + 10.0
        reporting.world.now += 10.0
        reporting.turn()
        assert systemd.recv(4096) == b"WATCHDOG=1"
        assert systemd.recv(4096) == b"STATUS=0 triggers, 0 steps of tasks"
        reporting.on.core.drain(world.now)
        reporting.turn()
        assert systemd.recv(4096) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=12000000"
        reporting.reporter.close()
        reporting.selector.close()
