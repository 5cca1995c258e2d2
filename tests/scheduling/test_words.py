"""Errors with tracebacks, on one line."""

from __future__ import annotations

import traceback

import pytest

from headgate.scheduling.words import error_line, tries

ENDED = "Ended: it ended"
ABOVE = "\n\nThe above exception was the direct cause of the following exception:\n\n"
TRACE = "Traceback (most recent call last):\n  File x\n    f()\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", ""),
        ("no traceback", "no traceback"),
        ("ValueError: a\nb\n\n" + TRACE + "ValueError: a", "ValueError: a b"),
        (TRACE + "ValueError: no", "ValueError: no"),
        ("two errors\n\n  + Exception Group Traceback (most recent call last):\n  |  x", "two errors"),
        (
            ENDED + "\n\nio.Slow: 5 s" + ABOVE + TRACE + ENDED,
            "Ended: it ended, caused by Slow: 5 s",
        ),
        (
            ENDED + "\n\n" + TRACE + "io.Slow: 5 s" + ABOVE + TRACE + ENDED,
            "Ended: it ended, caused by Slow: 5 s",
        ),
        (
            "PollTerminated: the poll of a ended\n\nio.Slow: 5 s at io.x: y" + ABOVE + TRACE + ENDED,
            "its stream has ended: Slow: 5 s at io.x: y",
        ),
    ],
)
def test_an_error_is_one_line_with_its_cause_and_without_a_traceback(error: str, line: str) -> None:
    assert error_line(error) == line


def test_what_python_prints_of_a_cause_is_understood() -> None:
    def slow() -> None:
        raise TimeoutError("5 s")

    def end() -> None:
        try:
            slow()
        except TimeoutError as cause:
            raise RuntimeError("the poll ended") from cause

    with pytest.raises(RuntimeError) as raised:
        end()
    printed = "".join(traceback.format_exception(raised.value))
    assert error_line(printed) == "RuntimeError: the poll ended, caused by TimeoutError: 5 s"
    assert error_line(f"RuntimeError: the poll ended\n\n{printed}") == error_line(printed)


@pytest.mark.parametrize(
    ("number", "most", "retries", "told"),
    [(0, 1, 0, "0 of 1"), (1, 1, 0, "1 of 1"), (2, 3, 2, "2 of 3"), (5, 6, 2, "5 of 6"), (39, 39, 0, "39")],
)
def test_a_try_that_is_the_last_by_itself_is_told_by_its_number(
    number: int, most: int, retries: int, told: str
) -> None:
    assert tries(number, most, retries) == told
