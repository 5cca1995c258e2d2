"""When a round has figures."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from headgate.protocol.messages.runner import RunnerFigures, StreamFigures
from headgate.runner.figures import FIGURES_INTERVAL_S, FiguresReport


async def test_figures_are_told_once_a_second_and_only_if_they_have_changed(autojump_clock: MockClock) -> None:
    now = RunnerFigures()
    asked: list[float] = []

    def measure() -> RunnerFigures:
        asked.append(trio.current_time())
        return now

    report = FiguresReport(measure)
    assert report.take() is None  # a runner without streams says nothing
    now = RunnerFigures((StreamFigures("d", "n", in_flight=1),), 1)
    assert report.take() is None  # it was asked a moment ago
    await trio.sleep(FIGURES_INTERVAL_S)
    assert report.take() == now
    for _ in range(3):
        await trio.sleep(FIGURES_INTERVAL_S)
        assert report.take() is None
    now = RunnerFigures()
    await trio.sleep(FIGURES_INTERVAL_S)
    assert report.take() == now
    assert len(asked) == 6
