"""Signals to a supervisor before it has begun and after it has decided to leave."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.waiting import WITHIN_S

BEFORE = """
import os, signal, sys, types
sys.argv = ["headgate", *sys.argv[2:]]
number = int(sys.argv.pop(1))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
main = types.ModuleType("headgate.cli.main")  # the imports of the real one are the time in which the signal comes
main.main = lambda: os.kill(os.getpid(), number)
sys.modules["headgate.cli.main"] = main
from headgate.cli.__main__ import run
sys.exit(run())
"""

AFTER = """
import collections, os, selectors, signal
from headgate.supervisor.arbiter import _Signals
with selectors.DefaultSelector() as selector:
    queue = collections.deque()
    with _Signals(selector, queue):
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(7 if list(queue) == [signal.SIGINT] else 8)
"""


@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.parametrize(
    ("arguments", "is_supervisor"), [(["--debug", "up"], True), (["triggerer"], True), (["events", "list"], False)]
)
def test_a_supervisor_that_is_stopped_before_it_has_begun_has_drained(
    number: int, arguments: list[str], is_supervisor: bool
) -> None:
    command = [sys.executable, "-P", "-c", BEFORE, "x", str(number), *arguments]
    code = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=WITHIN_S, check=False).returncode
    assert code == 0 if is_supervisor else code == -number


def test_a_signal_after_the_decision_to_leave_changes_nothing() -> None:
    assert subprocess.run([sys.executable, "-P", "-c", AFTER], timeout=WITHIN_S, check=False).returncode == 7
