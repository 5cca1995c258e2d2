"""The pytest plugin: one fixture, two options, and the tables of all crash tests in the summary.

pytest loads it in every project that has headgate installed, so it imports nothing slow until it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headgate.testing.crash.pair import Pair

_OVERRIDES = ("kills", "seed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--headgate-kills`` and ``--headgate-seed``."""
    group = parser.getgroup("headgate")
    group.addoption("--headgate-kills", type=int, metavar="N", help="SIGKILLs of each crash_test, whatever it says.")
    group.addoption("--headgate-seed", type=int, metavar="SEED", help="Draw the kills of each crash_test from this.")


def pytest_configure(config: pytest.Config) -> None:
    """Pass the options on to crash tests."""
    options = {name: config.getoption(f"--headgate-{name}") for name in _OVERRIDES}
    if any(value is not None for value in options.values()):
        from headgate.testing.crash import campaign as crash

        crash.overrides.update({name: value for name, value in options.items() if value is not None})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the tables of the crash tests that ran."""
    crash = sys.modules.get("headgate.testing.crash.campaign")
    if crash is None or not crash.reports:
        return
    terminalreporter.section("headgate crash tests")
    for report in crash.reports:
        terminalreporter.write_line(str(report))


@pytest.fixture
def headgate_pair(tmp_path: Path) -> Iterator[Pair]:
    """A real supervisor with its runner, on a new SQLite database; not started yet, and gone after the test."""
    from headgate.testing.crash.pair import Pair

    with Pair(tmp_path / "headgate") as pair:
        yield pair
