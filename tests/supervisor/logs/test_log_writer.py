"""The thread that writes a log: a program that logs never waits for the reader of its log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headgate.supervisor.logs.log_writer import LogWriter


def open_writer(write: Callable[[str], object], lines_max: int = 1000) -> LogWriter[str, str]:
    def write_lines(lines: Sequence[tuple[str, str]], _is_last: bool) -> None:
        for _, line in lines:
            write(line)

    return LogWriter("test", write_lines, "{} dropped".format, lines_max=lines_max, bytes_max=1000)


def test_lines_are_written_in_order_and_none_is_missing_at_the_end() -> None:
    written: list[str] = []
    writer = open_writer(written.append)
    for number in range(100):
        writer.put("", str(number))
    assert writer.close()
    assert written == [str(number) for number in range(100)]


def test_a_reader_that_has_stopped_delays_nobody_and_what_it_missed_is_counted() -> None:
    written: list[str] = []
    is_writing, may_go_on = threading.Event(), threading.Event()

    def write(line: str) -> None:
        is_writing.set()
        may_go_on.wait()
        written.append(line)

    writer = open_writer(write, lines_max=2)
    writer.put("a", "first")
    is_writing.wait()
    for key, line in [("a", "second"), ("a", "third"), ("a", "fourth"), ("b", "fifth"), ("b", "sixth")]:
        writer.put(key, line)  # returns, though nobody reads
    assert not writer.flush(0.0)
    may_go_on.set()
    assert writer.close()
    assert written == ["first", "second", "third", "1 dropped", "2 dropped"]


def test_what_was_dropped_is_said_before_the_next_line() -> None:
    written: list[str] = []
    first_is_out, may_go_on, note_is_out = threading.Event(), threading.Event(), threading.Event()

    def write(line: str) -> None:
        written.append(line)
        if line == "first":
            first_is_out.set()
            may_go_on.wait()
        elif line == "2 dropped":
            note_is_out.set()

    writer = open_writer(write, lines_max=1)
    writer.put("", "first")
    first_is_out.wait()
    writer.put("", "second")
    writer.put("", "dropped one")
    writer.put("", "dropped two")
    may_go_on.set()
    note_is_out.wait()
    writer.put("", "last")
    assert writer.close()
    assert written == ["first", "second", "2 dropped", "last"]
