"""The thread that writes the log: whoever logs never waits for whoever reads."""

from __future__ import annotations

import threading

import pytest

from headgate.supervisor.logs import log_writer
from headgate.supervisor.logs.log_writer import LogWriter


def dropped(lines: int) -> str:
    return f"{lines} dropped"


def test_lines_are_written_in_order_and_none_is_missing_at_the_end() -> None:
    written: list[str] = []
    writer = LogWriter(written.append, dropped)
    for number in range(100):
        writer.put(str(number))
    writer.close()
    assert written == [str(number) for number in range(100)]


def test_a_reader_that_has_stopped_delays_nobody_and_what_it_missed_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_writer, "LINES_WAITING_MAX", 2)
    written: list[str] = []
    is_writing, may_go_on = threading.Event(), threading.Event()

    def write(line: str) -> None:
        is_writing.set()
        may_go_on.wait()
        written.append(line)

    writer = LogWriter(write, dropped)
    writer.put("first")
    is_writing.wait()
    for line in ("second", "third", "fourth", "fifth"):
        writer.put(line)  # returns, though nobody reads
    may_go_on.set()
    writer.close()
    assert written == ["first", "second", "third"]


def test_what_was_dropped_is_said_before_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "LINES_WAITING_MAX", 1)
    written: list[str] = []
    first_is_out, may_go_on, second_is_out = threading.Event(), threading.Event(), threading.Event()

    def write(line: str) -> None:
        written.append(line)
        if line == "first":
            first_is_out.set()
            may_go_on.wait()
        elif line == "second":
            second_is_out.set()

    writer = LogWriter(write, dropped)
    writer.put("first")
    first_is_out.wait()
    writer.put("second")
    writer.put("dropped one")
    writer.put("dropped two")
    may_go_on.set()
    second_is_out.wait()
    writer.put("last")
    writer.close()
    assert written == ["first", "second", "2 dropped", "last"]
